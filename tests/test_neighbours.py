"""What stock joins in one kernel is not cut apart by an operator of ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from portable_ops.inductor_ext import explain, gate, neighbours
from torch import Tensor

SIZE = 2048
"""Rows and columns for which the table of sm_90 takes RMSNorm with a residual."""


def stored(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


X, R, W, M = stored(SIZE, SIZE), stored(SIZE, SIZE), stored(SIZE), stored(SIZE, SIZE)


def norm(h: Tensor, weight: Tensor = W) -> Tensor:
    wide = h.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)


def between_products(x: Tensor, r: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    total = x @ m + r
    return norm(total) @ m, total


def reads_a_view(x: Tensor, r: Tensor, m: Tensor) -> Tensor:
    return norm((x @ m).view(2, SIZE // 2, SIZE) + r.view(2, SIZE // 2, SIZE))[:, -1:] @ m


def stream_of_two_layers(x: Tensor, r: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the first is an input of the second, but the product of its norm stands between the two."""
    first = x @ m + r
    second = norm(first) @ m + first
    return norm(second) @ m, second


def gated_behind(x: Tensor, r: Tensor, m: Tensor) -> Tensor:
    return (norm(x @ m + r) * F.silu(x @ m)) @ m


def viewed_and_scaled(x: Tensor, r: Tensor, m: Tensor) -> Tensor:
    return norm(x @ m + r).view(-1, 64).mul(2)


def gated_in_front(x: Tensor, r: Tensor, m: Tensor) -> Tensor:
    return norm(F.silu(x @ m) + r) @ m


def normalised_in_front(x: Tensor, r: Tensor, m: Tensor) -> Tensor:
    """As in Gemma 2: what is added to the stream was normalised before."""
    return norm(norm(x @ m) + r) @ m


def sum_read_at_once(x: Tensor, r: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    total = x @ m + r
    return norm(total) @ m, total * 2


def decisions(model: Callable) -> list[tuple[str, str]]:
    with torch.no_grad():
        report = explain(model, target="sm_90")(X, R, M)
    return [(site.decision, site.reason) for site in report.sites if site.kind == "rms_norm"]


@pytest.mark.parametrize(
    ("model", "count"),
    [(between_products, 1), (reads_a_view, 1), (stream_of_two_layers, 2)],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_between_matrix_products_it_is_rewritten(model: Callable, count: int) -> None:
    found = decisions(model)
    assert [decision for decision, _ in found] == ["rewritten"] * count, found


@pytest.mark.parametrize(
    ("model", "neighbour"),
    [
        (gated_behind, "the mul behind it"),
        (viewed_and_scaled, "the mul behind it"),
        (sum_read_at_once, "the mul behind it"),
        (gated_in_front, "the convert_element_type in front of it"),
        (normalised_in_front, "the mul in front of it"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_beside_what_stock_joins_it_is_left_alone(model: Callable, neighbour: str) -> None:
    reason = f"stock computes {neighbour} in the same kernel, which saves more than the operator does"
    assert decisions(model)[-1] == ("declined", reason)


def test_it_is_rewritten_where_it_gains_more_than_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tensors are moved, and of the two results one is written and read for the sake of the cut."""
    for speedup, decision in ((1.5, "declined"), (1.6, "rewritten")):
        rules = {"portable_ops::add_rms_norm": ({"when": {}, "take": True, "speedup": speedup, "why": "measured"},)}
        monkeypatch.setattr(gate, "table", lambda arch, rules=rules: rules)
        assert decisions(gated_behind)[-1][0] == decision


def test_a_way_that_is_too_long_to_follow_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "FURTHEST", 1)
    assert "declined" in [decision for decision, _ in decisions(stream_of_two_layers)]
