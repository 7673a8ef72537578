"""One site of a dump as a test of its own: the subgraph, its shapes and strides, and what is expected of it."""

from __future__ import annotations

import ast
import json
import os
import pprint
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .dump import BadDump


def reproduction(folder: str | os.PathLike[str], index: Mapping[str, Any], number: int) -> str:
    """The source of a pytest file for the site or near miss ``number`` of the dump in ``folder``.

    ``index``: the contents of its dump.json.  Raises BadDump for a number that is not there, and for a site that
    was in no graph (a call that Dynamo's graph had and AOTAutograd took apart).
    """
    entries = [*index["sites"], *index["misses"]]
    if not 0 <= number < len(entries):
        raise BadDump(f"there is no site {number}: the dump has sites and near misses 0 to {len(entries) - 1}")
    entry = entries[number]
    if "region" not in entry:
        raise BadDump(f"site {number} stands in no graph that was recorded: {entry['reason']}")
    graph = index["graphs"][entry["graph"]]
    path = Path(folder) / graph["folder"] / f"{graph['stages'][entry['stage']]}.py"
    region = entry["region"]
    body = _statements(path.read_text(encoding="utf-8"), set(region["nodes"]))
    missed = number >= len(index["sites"])
    settings = {k: v for k, v in index["settings"].items() if k in ("gate", "target") and v is not None}
    if settings.get("gate") == "measure":
        settings["gate"] = "table"  # a measurement is no part of a reproduction
    same = entry.get("decision") == "rewritten" or (bool(entry.get("operator")) and settings.get("gate") == "always")
    return _FILE.format(
        what=f"{'Near miss' if missed else 'Site'} {number}: {entry['kind']} in {entry['path'] or 'the model itself'}",
        source=entry["source"],
        reason=entry["reason"],
        imports="\n".join(_imports(path.read_text(encoding="utf-8"))),
        arguments=", ".join(region["inputs"]),
        body="\n".join(f"    {line}" for line in body.splitlines()),
        results=", ".join(n if n in region["returned"] else f"_used({n})" for n in region["outputs"]),
        inputs=pprint.pformat(region["inputs"], width=110, sort_dicts=False),
        settings=json.dumps(settings),
        check=(_MISSED if missed else _REWRITTEN if same else _MATCHED).format(
            kind=entry["kind"], reason=entry["reason"]
        ),
        name="is_missed" if missed else "matches",
    )


def _statements(text: str, names: set[str]) -> str:
    """The assignments to ``names`` in the graph that ``text`` holds, with their types as comments."""
    tree = ast.parse(text)
    graph = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Graph")
    forward = next(n for n in graph.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    lines = []
    for statement in forward.body:
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
        name = targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""
        value = getattr(statement, "value", None)
        if name in names and value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            kind = f"  # {statement.annotation.value}" if isinstance(statement, ast.AnnAssign) else ""
            lines.append(f"{name} = {ast.unparse(value)}{kind}")
    text = "\n".join(lines)
    # The inputs are on the meta device, so what is made inside goes there too.
    text = re.sub(r"\bdevice\(type='\w+'(, index=\d+)?\)", "'meta'", text)
    # What was pinned is traced as the call that it was.
    return re.sub(r"\btorch\.ops\.portable_ops\.attention\.default\(", "_stock_attention(", text)


def _imports(text: str) -> list[str]:
    """The imports of the graph's own names; those that every file has are in the template."""
    usual = ("import sys", "import torch", "import portable_ops")
    top = [n for n in ast.parse(text).body if isinstance(n, ast.Import | ast.ImportFrom)]
    lines = [ast.unparse(n) for n in top]
    return [line for line in lines if not (line.startswith(usual) and " as " not in line)]


_FILE = '''"""{what}

{source}
{reason}
"""

import torch
import torch.nn.functional as F
from portable_ops.inductor_ext import explain
{imports}

SETTINGS = {settings}
INPUTS = {inputs}


def _stock_attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, out_order=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def _used(x):
    """Something that reads ``x``, as the rest of the model does."""
    return x.clone() if isinstance(x, torch.Tensor) else x


def region({arguments}):
{body}
    return ({results},)


def made_up(dtype=None, shape=(), stride=None, number=None):
    if number is not None:
        return number
    kind = getattr(torch, dtype)
    return torch.empty_strided(shape, stride, dtype=kind, device="meta")


def test_{name}():
    with torch.no_grad():
        report = explain(region, **SETTINGS)(*(made_up(**spec) for spec in INPUTS.values()))
    print(report)
{check}'''

_MATCHED = """    found = [site for site in report.sites if site.kind == {kind!r}]
    assert found, [miss.reason for miss in report.misses]
"""

_REWRITTEN = """    found = [site for site in report.sites if site.kind == {kind!r}]
    assert found, [miss.reason for miss in report.misses]
    assert any(site.decision == "rewritten" for site in found), [site.reason for site in found]
"""

_MISSED = """    assert not [site for site in report.sites if site.kind == {kind!r}], "it matches now"
    assert {reason!r} in [miss.reason for miss in report.misses if miss.kind == {kind!r}]
"""
