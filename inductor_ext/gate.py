"""Whether a match pays: never slower than what stock Inductor makes of the same nodes.

The table of a target holds measured verdicts by operator and shape; ``gate=measure`` takes the measurement while
compiling.  A declined match leaves its nodes to Inductor untouched, so a wrong "no" costs only the gain.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..kernels.launch import hint
from ..kernels.rotation import heads_dim
from ..kernels.target import Target
from ..patterns import Match
from . import inductor_compat as inductor
from .neighbours import cut_off
from .settings import Settings

TABLES = Path(__file__).parent / "gate_tables"

GAIN = 1.02
"""A rewrite is taken from this speed-up on: below it the two are a tie, and stock needs no explanation."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether to rewrite, and why, in words that stand in the report.

    ``speedup``: how many times as long stock takes for the match alone, where that was measured.
    """

    take: bool
    reason: str
    speedup: float | None = None


Features = dict[str, Any]
"""What a table may ask about a match: names to strings, booleans or numbers (symbolic sizes stay symbolic)."""

Describe = Callable[[Mapping[str, Any], Mapping[str, Any]], Features]
_features: dict[str, Describe] = {}


def register_features(operator_name: str, features: Describe) -> None:
    """Say how to describe a call of ``operator_name`` to gate tables.

    ``features(values, bound)``: the operator's arguments with example values for tensors, and what the match found.
    """
    _features[operator_name] = features


def decide(match: Match, target: Target, settings: Settings, *, training: bool, taken: int) -> Verdict:
    """The gate's verdict on one match; ``taken`` counts the rewrites that the graph already has."""
    values = match.values()
    disabled = [part.kind for part in match.parts or (match,) if part.kind not in settings.enable]
    if disabled:
        return Verdict(False, f"{disabled[0]} is disabled")
    reason = match.operator.supports(**values, target=target)
    if reason is not None:
        return Verdict(False, reason)
    if settings.gate == "never":
        return Verdict(False, "gate=never")
    if settings.max_rewrites is not None and taken >= settings.max_rewrites:
        return Verdict(False, f"max_rewrites={settings.max_rewrites} is reached")
    if settings.gate == "always":
        return Verdict(True, "gate=always")
    if match.operator.plan is None:
        return Verdict(False, f"recognised; {match.operator.no_kernel}")
    if training:
        return Verdict(False, "a training graph: stock saves less for backward than a rewrite would")
    if match.shared():
        return Verdict(False, "an inner value has other users, so its work would be done twice")
    if settings.gate == "measure":
        from .measure import measured

        # What a span leaves out depends on the data, so that it is measured as if it left out nothing.
        verdict = measured(match.instead if "span" in match.bound else match, target)
    else:
        verdict = look_up(match.operator.name, values, match.bound, target)
    # Neither kind of measurement has the nodes around the match.
    reason = cut_off(match, verdict.speedup / GAIN) if verdict.take and verdict.speedup is not None else None
    return verdict if reason is None else Verdict(False, reason)


def features(match: Match) -> dict[str, Any]:
    """What the gate's table is asked about ``match``, symbolic sizes as text."""
    describe = _features.get(match.operator.name)
    found = describe(match.values(), match.bound) if describe is not None else {}
    return {name: value if isinstance(value, str | bool | int | float) else str(value) for name, value in found.items()}


def look_up(name: str, values: Mapping[str, Any], bound: Mapping[str, Any], target: Target) -> Verdict:
    """The verdict of the measured table of ``target`` on a call of operator ``name``."""
    features = _features[name](values, bound) if name in _features else {}
    for rule in table(target.arch).get(name, ()):
        if all(_admits(features.get(feature), allowed) for feature, allowed in rule["when"].items()):
            return Verdict(rule["take"], rule["why"], rule.get("speedup"))
    return Verdict(False, f"no measurement on {target.arch} says that it pays here (gate=measure takes one)")


@functools.cache
def table(arch: str) -> Mapping[str, tuple[dict[str, Any], ...]]:
    """The measured rules for ``arch`` followed by those that hold on any GPU."""
    rules: dict[str, tuple] = {}
    for name in (arch, "any"):
        path = TABLES / f"{name}.json"
        if path.exists():
            for operator, entries in json.loads(path.read_text())["rules"].items():
                rules[operator] = (*rules.get(operator, ()), *entries)
    return rules


def _admits(value: Any, allowed: Any) -> bool:
    """Whether a feature fits a condition: equal to it, one of a list, or inside ``{"min": a, "max": b}``.

    A symbolic size must fit over its whole range, since the compiled graph serves all of it.
    """
    if not isinstance(allowed, dict):
        return value in allowed if isinstance(allowed, list) else bool(value == allowed)
    if value is None:
        return False
    low, high = _range(value)
    return low >= allowed.get("min", low) and high <= allowed.get("max", high)


def _range(value: Any) -> tuple[Any, Any]:
    if isinstance(value, torch.SymInt):
        bounds = value.node.shape_env.bound_sympy(value.node.expr)
        return bounds.lower, bounds.upper
    return value, value


def attention_features(values: Mapping[str, Any], bound: Mapping[str, Any]) -> Features:
    """Regime, repetition of heads, mask and sizes of an attention call."""
    q, k, mask = values["q"], values["k"], values["attn_mask"]
    heads = q.shape[1] if q.dim() == 4 else 1
    kv_heads = k.shape[1] if k.dim() == 4 else 1
    groups = hint(heads) // max(1, hint(kv_heads))
    return {
        "dtype": str(q.dtype).removeprefix("torch."),
        "head_dim": q.shape[-1],
        "q_len": q.shape[-2],
        "kv_len": k.shape[-2],
        "square": statically_known_true(q.shape[-2] == k.shape[-2]),
        "rows": q.shape[-2] * groups,
        "groups": groups,
        "batch_heads": q.shape[0] * kv_heads,
        "repeated": bound.get("repeat_kv", 1) != 1,
        "mask": "none" if mask is None else "bool" if mask.dtype == torch.bool else "float",
        "is_causal": values["is_causal"],
    }


def rms_norm_features(values: Mapping[str, Any], bound: Mapping[str, Any]) -> Features:
    """Rows, columns and types of an RMSNorm call."""
    x = values["x"]
    rows: Any = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return {"dtype": str(x.dtype).removeprefix("torch."), "rows": rows, "hidden_size": x.shape[-1]}


def linear_features(values: Mapping[str, Any], bound: Mapping[str, Any]) -> Features:
    """Rows and features of linear layers; ``out_features`` of all weights together.

    ``tuned``: Inductor tunes matrix products itself (max-autotune), which is not what the table was measured against.
    """
    x = values["x"]
    weights = [value for name, value in values.items() if name.endswith("weight")]
    return {
        "tuned": inductor.tunes_matmuls(),
        "dtype": str(x.dtype).removeprefix("torch."),
        "rows": x.shape[0],
        "in_features": x.shape[1],
        "out_features": sum(weight.shape[0] for weight in weights),
    }


def rope_features(values: Mapping[str, Any], bound: Mapping[str, Any]) -> Features:
    """Tokens, heads of q and k together and types; whether heads are normalised, and keys and values appended."""
    xs = [values[name] for name in ("x", "q", "k") if name in values]
    heads = heads_dim(xs, (values["cos"], values["sin"]))
    head_counts = [1 if heads is None else x.shape[heads] for x in xs]
    tokens: Any = 1
    for dim, size in enumerate(xs[0].shape[:-1]):
        tokens = tokens if dim == heads else tokens * size
    return {
        "dtype": str(xs[0].dtype).removeprefix("torch."),
        "tokens": tokens,
        "heads": sum(head_counts),
        "head_dim": xs[0].shape[-1],
        "partial": values["rotary_dim"] != xs[0].shape[-1],
        "pairing": values["pairing"],
        "norm": values.get("eps") is not None,
        "append": "k_cache" in values,
    }


def topk_features(values: Mapping[str, Any], bound: Mapping[str, Any]) -> Features:
    """Rows and their length, k and order of a selection; ``last_dim``: along the last dimension, side by side."""
    x, dim = values["x"], values["dim"] % values["x"].dim()
    rows: Any = 1
    for size in (*x.shape[:dim], *x.shape[dim + 1 :]):
        rows = rows * size
    return {
        "dtype": str(x.dtype).removeprefix("torch."),
        "rows": rows,
        "row_length": x.shape[dim],
        "k": values["k"],
        "sorted": values["sorted"],
        "last_dim": dim == x.dim() - 1 and statically_known_true(x.stride(dim) == 1),
    }


def router_features(values: Mapping[str, Any], bound: Mapping[str, Any]) -> Features:
    """Tokens, experts, and how they are chosen."""
    logits = values["logits"]
    return {
        "dtype": str(logits.dtype).removeprefix("torch."),
        "rows": logits.shape[0],
        "experts": logits.shape[1],
        "k": values["k"],
        "groups": values["groups"],
    }


register_features("portable_ops::router", router_features)
register_features("portable_ops::topk", topk_features)
register_features("portable_ops::topk_indices", topk_features)
register_features("portable_ops::attention", attention_features)
register_features("portable_ops::rms_norm", rms_norm_features)
register_features("portable_ops::add_rms_norm", rms_norm_features)
for _name in ("rope", "qk_rope", "qk_rope_append"):
    register_features(f"portable_ops::{_name}", rope_features)
for _name in ("linear", "qkv_linear", "gated_linear"):
    register_features(f"portable_ops::{_name}", linear_features)
