"""Near misses in words: the first failed condition, and what would make it match."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from portable_ops.inductor_ext import explain
from portable_ops.inductor_ext.hints import HINTS, hint
from portable_ops.patterns import PATTERNS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "name",
    [
        "wrong_axis",
        "eps_outside",
        "mask_of_five_dimensions",
        "silu_on_the_wrong_half",
        "all_values_of_topk",
        "backwards_rope",
    ],
)
def test_planted_near_misses_are_explained(name: str, planted: ModuleType) -> None:
    function = getattr(planted, name)
    with torch.no_grad():
        report = explain(function)(planted.inputs())
    assert [(m.kind, m.reason) for m in report.misses] == [planted.MISSES[function]]
    assert report.counts[report.misses[0].kind] == 0
    assert hint(report.misses[0].reason)
    (miss,) = report.misses
    assert miss.anchor in miss.nodes and len(miss.nodes) > 1, "what is drawn is the subgraph and not its anchor alone"


def reasons() -> set[str]:
    """The reasons that patterns give, with a word in place of each value.

    Not those of a pattern that joins others: they are no misses, its parts stand as they were.
    """
    found = set()
    joining = {f"{p.name}.py" for p in PATTERNS if p.first}
    for path in (path for path in (ROOT / "patterns").glob("*.py") if path.name not in joining):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = node.exc.args[0]
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                if getattr(node.exc.func, "id", "") == "Unmatched" and not isinstance(text, ast.Name | ast.Call):
                    found.add("".join(p.value if isinstance(p, ast.Constant) else "word" for p in parts))
    return found


WITHOUT = (
    "word is not a tensor",
    "a term of the scores has",
    "batch and heads are one dimension",
    "the scores are a sum of several products",
    "the scores are divided by zero",
    "the scores are multiplied by scores",
    "the scores are replaced by a tensor",
    "the scale is a symbolic number",
    "the scores have word dimensions",
    "the word are rounded to",
    "the result has head_dim before the queries",
    "the result is used with batch and heads",
)
"""Reasons of what is too far from the pattern for a piece of advice."""


def test_every_reason_has_advice_or_is_known_to_have_none() -> None:
    all_reasons = reasons()
    assert len(all_reasons) > 50
    assert not {r for r in all_reasons if not hint(r) and not r.startswith(WITHOUT)}


def test_no_advice_is_for_a_reason_that_nobody_gives() -> None:
    sources = "".join(p.read_text() for f in ("patterns", "kernels", "inductor_ext") for p in (ROOT / f).glob("*.py"))
    sources = sources.replace((ROOT / "inductor_ext" / "hints.py").read_text(), "")
    sources = re.sub(r"\{[^{}]*\}", "word", sources)
    for start, _ in HINTS:
        assert re.search(start, sources), start
