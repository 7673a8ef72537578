"""Top-k in the spellings that occur in the wild: what is one, what it becomes, what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from portable_ops.inductor_ext import explain
from portable_ops.kernels.target import named_target
from portable_ops.kernels.topk import TOPK
from torch import Tensor, nn


def distinct(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Different numbers, exact in every type, in random order: a top-k of them is unambiguous."""
    n = torch.Size(shape).numel()
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).view(shape).sub(n // 2).to(dtype)


def traced(tracing: ModuleType, model: Callable, *args: Tensor, grad: bool = False, **options: object):
    with torch.set_grad_enabled(grad):
        return tracing.trace(model, *args, **{"gate": "always", **options})


def rewritten(found) -> list[dict[str, str]]:
    return [dict(s.bound) for s in found.report.sites if s.kind == "topk" and s.decision == "rewritten"]


def routed(found) -> list[dict[str, str]]:
    return [dict(s.bound) for s in found.report.sites if s.kind == "router" and s.decision == "rewritten"]


def selections(found) -> int:
    """How many top-k of the graph are recognised, alone or in a router."""
    return found.report.counts["topk"] + sum(int(router["selections"]) for router in routed(found))


def reasons(found) -> list[str]:
    return [m.reason for m in found.report.misses if m.kind == "topk"]


def check(tracing: ModuleType, model: Callable, *args: Tensor, sites: int = 1, **options: object):
    """``sites`` matches, no miss, and exactly eager's results."""
    found = traced(tracing, model, *args, **options)
    assert len(rewritten(found)) == found.report.counts["topk"] == sites and not reasons(found)
    torch.testing.assert_close(found.result, model(*args), rtol=0, atol=0)
    return found


# ------------------------------------------------------------------------------------------------------ what is used

USED: dict[str, tuple[Callable, str]] = {
    "both": (lambda x: tuple(x.topk(2)), "values and indices"),
    "values": (lambda x: torch.topk(x, 2)[0], "values"),
    "indices": (lambda x: torch.topk(x, 2, dim=-1, sorted=False)[1].sort(-1)[0], "indices"),
    "indices by name": (lambda x: torch.topk(x, k=2, dim=-1).indices, "indices"),
    "values summed": (lambda x: x.unflatten(-1, (2, 4)).topk(2, dim=-1)[0].sum(-1), "values"),
    "gathered": (lambda x: x.gather(-1, x.topk(3, -1)[1]), "indices"),
    "normalised": (
        lambda x: (lambda v, i: (v / v.sum(-1, keepdim=True), i))(*x.topk(2)),
        "values and indices",
    ),
    "scattered": (lambda x: torch.zeros_like(x).scatter(-1, x.topk(2)[1], 1.0), "indices"),
}


@pytest.mark.parametrize(("model", "used"), USED.values(), ids=USED)
def test_what_is_used(model: Callable, used: str, tracing: ModuleType) -> None:
    found = check(tracing, model, distinct(3, 5, 8))
    assert rewritten(found)[0]["used"] == used


ARGUMENTS = [
    {"k": 3},
    {"k": 1, "dim": -1},
    {"k": 2, "dim": 0},
    {"k": 2, "dim": -2, "largest": False},
    {"k": 8, "dim": 2, "largest": True, "sorted": True},
    {"k": 4, "largest": False, "sorted": True},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_arguments_are_kept(arguments: dict, dtype: torch.dtype, tracing: ModuleType) -> None:
    found = check(tracing, lambda x: tuple(torch.topk(x, **arguments)), distinct(3, 5, 8, dtype=dtype))
    expected = {"k": 0, "dim": -1, "largest": True, "sorted": True, **arguments}
    assert {name: rewritten(found)[0][name] for name in expected} == {k: str(v) for k, v in expected.items()}


def test_what_no_kernel_takes_is_recognised(tracing: ModuleType) -> None:
    for dtype in (torch.int64, torch.float64):
        found = traced(tracing, lambda x: tuple(x.topk(3)), distinct(3, 8, dtype=dtype))
        (site,) = found.report.sites
        assert (site.kind, site.decision) == ("topk", "declined")
        assert site.reason == f"x is {dtype}, needs a type of at most 32 bits"
        assert found.after == found.before


def test_unsorted(tracing: ModuleType) -> None:
    found = check(tracing, lambda x: x.topk(3, sorted=False)[0].sort(-1)[0], distinct(3, 8))
    assert rewritten(found)[0]["sorted"] == "False"


def test_the_graph_before_and_after(tracing: ModuleType) -> None:
    found = check(tracing, lambda x: x.topk(2, dim=-1, sorted=False)[1] + 1, distinct(4, 8))
    assert_expected_inline(
        found.before,
        """\
%0 = input : f32[4, 8]
%1 = aten.topk.default(%0, 2, -1, True, False)
%2 = getitem(%1, 1) : i64[4, 2]
%3 = aten.add.Tensor(%2, 1) : i64[4, 2]
return (%3,)
""",
    )
    assert_expected_inline(
        found.after,
        """\
%0 = input : f32[4, 8]
%1 = portable_ops.topk_indices.default(x=%0, k=2, dim=-1, largest=True, sorted=False) : i64[4, 2]
%2 = aten.add.Tensor(%1, 1) : i64[4, 2]
return (%2,)
""",
    )


# ------------------------------------------------------------------------------------------------------------ routers


def deepseek_v2(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    groups = scores.view(-1, 2, 4).max(-1).values
    chosen = torch.topk(groups, k=1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(1, chosen, 1).unsqueeze(-1).expand(-1, 2, 4).reshape(-1, 8)
    return tuple(torch.topk(scores.masked_fill(~mask.bool(), 0.0), k=2, dim=-1))


def deepseek_v3(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    biased = scores + 0.125
    groups = biased.view(-1, 2, 4).topk(2, dim=-1)[0].sum(-1)
    chosen = torch.topk(groups, k=1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(1, chosen, 1).unsqueeze(-1).expand(-1, 2, 4).reshape(-1, 8)
    indices = torch.topk(biased.masked_fill(~mask.bool(), 0.0), k=2, dim=-1)[1]
    weights = scores.gather(1, indices)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), indices


def mixtral(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(logits.softmax(-1, dtype=torch.float32), 2, dim=-1)
    return (values / values.sum(-1, keepdim=True)).to(logits.dtype), indices


def gpt_oss(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(logits, 2, dim=-1)
    return torch.zeros_like(logits).scatter_(1, indices, values.softmax(1)), indices


def sparse_attention(logits: Tensor) -> Tensor:
    index = logits.topk(4, dim=-1)[1]
    return torch.full_like(logits, -torch.inf).scatter_(-1, index, 0.0)


ROUTERS = [(deepseek_v2, 2), (deepseek_v3, 3), (mixtral, 1), (gpt_oss, 1), (sparse_attention, 1)]


@pytest.mark.parametrize(("router", "sites"), ROUTERS, ids=[r.__name__ for r, _ in ROUTERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers(router: Callable, sites: int, dtype: torch.dtype, tracing: ModuleType) -> None:
    logits = distinct(6, 8, dtype=dtype) / 16
    found = traced(tracing, router, logits)
    assert selections(found) == sites and len(rewritten(found)) == found.report.counts["topk"]
    torch.testing.assert_close(found.result, router(logits))


# ------------------------------------------------------------------------------------------------ order of the indices

FREE: dict[str, Callable] = {
    "a mask": lambda x, kv: torch.zeros_like(x).scatter(-1, x.topk(3)[1], 1.0),
    "a mask of zeros in -inf": lambda x, kv: torch.full_like(x, -torch.inf).scatter_(-1, x.topk(3)[1], 0.0),
    "the sum of what is gathered": lambda x, kv: x.gather(-1, x.topk(3)[1]).sum(-1),
    "the maximum of a function": lambda x, kv: (x.gather(-1, x.topk(3)[1]) * 2).exp().amax(-1),
    "sorted": lambda x, kv: x.topk(3)[1].sort(-1)[0],
    "rows of a table, summed": lambda x, kv: kv[0][x.topk(3)[1]].sum(-2),
    "rows of a batch, summed": lambda x, kv: kv[torch.arange(6)[:, None], x.topk(3)[1]].sum(1),
    "attention": lambda x, kv: selected_attention(x, kv, x.topk(3)[1]),
    "expanded for each feature": lambda x, kv: kv.gather(1, x.topk(3)[1][..., None].expand(-1, -1, 4)).mean(1),
}
"""Of x [6, 8] and kv [6, 8, 4]."""


def selected_attention(x: Tensor, kv: Tensor, index: Tensor) -> Tensor:
    """Of one query a row over the selected keys, which are the values as well."""
    chosen = kv.gather(1, index.unsqueeze(-1).expand(-1, -1, 4))
    scores = torch.bmm(x[:, None, :4], chosen.transpose(1, 2)) * 0.5
    return torch.bmm(scores.softmax(-1), chosen)


ORDERED: dict[str, Callable] = {
    "returned": lambda x, kv: x.topk(3)[1],
    "the first of them": lambda x, kv: x.topk(3)[1][:, :1] * 2,
    "gathered": lambda x, kv: x.gather(-1, x.topk(3)[1]),
    "a running sum": lambda x, kv: x.gather(-1, x.topk(3)[1]).cumsum(-1),
    "weighed by place": lambda x, kv: (x.gather(-1, x.topk(3)[1]) * torch.arange(3)).sum(-1),
    "weighed by another tensor": lambda x, kv: (x.gather(-1, x.topk(3)[1]) * kv[:, :3, 0]).sum(-1),
    "places written": lambda x, kv: torch.zeros_like(x).scatter(-1, x.topk(3)[1], torch.arange(3.0).expand(6, 3)),
    "written along another dimension": lambda x, kv: torch.zeros(8, 3).scatter(0, x.topk(3)[1], 1.0),
    "sorted, with places": lambda x, kv: x.topk(3)[1].sort(-1)[1] + 1,
    "the sum over rows": lambda x, kv: x.gather(-1, x.topk(3)[1]).sum(0),
    "rows of another order": lambda x, kv: (lambda g: (g * g.flip(0)).sum(-1))(x.gather(-1, x.topk(3)[1])),
    "two selections": lambda x, kv: (x.gather(-1, x.topk(3)[1]) * x.gather(-1, (-x).topk(3)[1])).sum(-1),
    "rows against rows": lambda x, kv: (lambda g: torch.mm(g, g.t()))(x.gather(-1, x.topk(3)[1])),
    "one and a sum": lambda x, kv: (lambda i: (x.gather(-1, i).sum(-1), i[:, 0] + 1))(x.topk(3)[1]),
    "a softmax, returned": lambda x, kv: kv[..., 0].gather(-1, x.topk(3)[1]).softmax(-1),
}


def small(x: Tensor) -> tuple[Tensor, Tensor]:
    return x / 64, torch.linspace(-1, 1, 6 * 8 * 4).view(6, 8, 4)


@pytest.mark.parametrize("model", FREE.values(), ids=FREE)
def test_indices_are_not_sorted_where_nobody_can_tell(model: Callable, tracing: ModuleType) -> None:
    args = small(distinct(6, 8))
    found = traced(tracing, model, *args)
    assert [site["sorted"] for site in rewritten(found)] == ["False"]
    torch.testing.assert_close(found.result, model(*args))


@pytest.mark.parametrize("model", ORDERED.values(), ids=ORDERED)
def test_indices_are_sorted_where_somebody_can(model: Callable, tracing: ModuleType) -> None:
    args = small(distinct(6, 8))
    found = traced(tracing, model, *args)
    assert {site["sorted"] for site in rewritten(found)} == {"True"}
    torch.testing.assert_close(found.result, model(*args))


# ---------------------------------------------------------------------------------------------------------------- spans


def counting(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], device=x.device)


SPANNED: dict[str, tuple[Callable, str]] = {
    "lengths": (lambda x, n: x.masked_fill(counting(x) >= n[:, None], -torch.inf), "end"),
    "lengths, kept": (lambda x, n: torch.where(counting(x)[None] < n[:, None], x, -torch.inf), "end"),
    "lengths, from the right": (lambda x, n: x.masked_fill(n[:, None] <= counting(x), -torch.inf), "end"),
    "the last of them": (lambda x, n: torch.where(counting(x) <= n[:, None] - 1, x, -torch.inf), "end"),
    "not inside": (lambda x, n: x.masked_fill(~(counting(x) < n[:, None]), -torch.inf), "end"),
    "starts": (lambda x, n: x.masked_fill(counting(x) < n[:, None] - 4, -torch.inf), "start"),
    "behind": (lambda x, n: torch.where(counting(x) > n[:, None] - 4, x, -torch.inf), "start"),
    "a window": (
        lambda x, n: torch.where((counting(x) >= n[:, None] - 6) & (counting(x) < n[:, None]), x, -torch.inf),
        "start and end",
    ),
    "a window, twice": (
        lambda x, n: x.masked_fill(counting(x) >= n[:, None], -torch.inf).masked_fill(
            counting(x) < n[:, None] - 6, -torch.inf
        ),
        "start and end",
    ),
    "outside of a window": (
        lambda x, n: x.masked_fill((counting(x) < n[:, None] - 6) | (counting(x) >= n[:, None]), -torch.inf),
        "start and end",
    ),
    "causal": (
        lambda x, n: torch.where(counting(x)[None, :] <= torch.arange(6)[:, None] + 2, x, -torch.inf),
        "end",
    ),
    "causal, by triu": (
        lambda x, n: x.masked_fill(torch.ones(6, 8, dtype=torch.bool).triu(3), -torch.inf),
        "end",
    ),
    "one length": (lambda x, n: x.masked_fill(counting(x) >= n[2], -torch.inf), "end"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mask", "span"), SPANNED.values(), ids=SPANNED)
def test_spans(mask: Callable, span: str, dtype: torch.dtype, tracing: ModuleType) -> None:
    """Two are selected of at least two that count."""
    x, n = distinct(6, 8, dtype=dtype), torch.tensor([4, 5, 6, 7, 8, 8])
    found = check(tracing, lambda x, n: mask(x, n).topk(2)[1] + 0, x, n)
    assert rewritten(found)[0]["span"] == span
    assert "aten.where" not in found.after and "aten.masked_fill" not in found.after


NOT_SPANNED: dict[str, Callable] = {
    "another fill": lambda x, n: x.masked_fill(counting(x) >= n[:, None], -1e9).topk(2)[1] + 0,
    "the lowest number": lambda x, n: x.masked_fill(counting(x) >= n[:, None], torch.finfo(x.dtype).min).topk(2)[1] + 0,
    "values are read": lambda x, n: tuple(x.masked_fill(counting(x) >= n[:, None], -torch.inf).topk(2)),
    "the smallest": lambda x, n: x.masked_fill(counting(x) >= n[:, None], torch.inf).topk(2, largest=False)[1] + 0,
    "another dimension": lambda x, n: x.masked_fill(counting(x) >= n[:, None], -torch.inf).topk(2, dim=0)[1] + 0,
    "positions that do not count": lambda x, n: x.masked_fill(counting(x) * 2 >= n[:, None], -torch.inf).topk(2)[1] + 0,
    "positions from one on": (lambda x, n: x.masked_fill(torch.arange(1, 9) > n[:, None], -torch.inf).topk(2)[1] + 0),
    "two ends": (
        lambda x, n: x.masked_fill((counting(x) >= n[:, None]) | (counting(x) >= 7), -torch.inf).topk(2)[1] + 0
    ),
    "either side of two": (
        lambda x, n: torch.where((counting(x) < n[:, None]) | (counting(x) > 6), x, -torch.inf).topk(2)[1] + 0
    ),
    "lengths that are not whole": lambda x, n: x.masked_fill(counting(x) >= n[:, None] / 2, -torch.inf).topk(2)[1] + 0,
    "a mask from outside": lambda x, n: x.masked_fill((x > 3) | (x < -9), -torch.inf).topk(2)[1] + 0,
    "equal positions": lambda x, n: x.masked_fill(counting(x) == n[:, None] - 1, -torch.inf).topk(2)[1] + 0,
}


@pytest.mark.parametrize("model", NOT_SPANNED.values(), ids=NOT_SPANNED)
def test_what_is_no_span(model: Callable, tracing: ModuleType) -> None:
    x, n = distinct(6, 8), torch.tensor([4, 5, 6, 7, 8, 8])
    found = check(tracing, model, x, n)
    assert "span" not in rewritten(found)[0]


def test_a_masked_row_that_others_read_is_not_masked_twice(tracing: ModuleType) -> None:
    def model(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        masked = x.masked_fill(counting(x) >= n[:, None], -torch.inf)
        return masked.topk(2)[1] + 0, masked.softmax(-1)

    x, n = distinct(6, 8), torch.tensor([4, 5, 6, 7, 8, 8])
    found = traced(tracing, model, x, n)
    assert rewritten(found)[0]["span"] == "end"
    torch.testing.assert_close(found.result, model(x, n))


# --------------------------------------------------------------------------------------------------------- from a sort

SORTS: dict[str, tuple[Callable, dict[str, str]]] = {
    "descending": (
        lambda x: x.sort(-1, descending=True)[0][..., :3] + 1,
        {"k": "3", "dim": "2", "largest": "True", "used": "values"},
    ),
    "ascending": (lambda x: x.sort(-1)[0][..., :3] * 2, {"k": "3", "largest": "False"}),
    "argsort": (lambda x: x.argsort(-1, descending=True)[..., :2] + 0, {"k": "2", "used": "indices"}),
    "both": (
        lambda x: tuple(t[:, :4] * 2 for t in torch.sort(x, dim=1, descending=True)),
        {"k": "4", "dim": "1", "used": "values and indices"},
    ),
    "first dimension": (lambda x: x.sort(0)[1][:1].sum(0), {"k": "1", "dim": "0", "largest": "False"}),
    "narrow": (lambda x: x.sort(-1, descending=True)[0].narrow(-1, 0, 2).sum(-1), {"k": "2"}),
}


@pytest.mark.parametrize(("model", "expected"), SORTS.values(), ids=SORTS)
def test_the_first_of_a_sort(model: Callable, expected: dict, tracing: ModuleType) -> None:
    found = check(tracing, model, distinct(3, 5, 8))
    bound = rewritten(found)[0]
    assert {k: bound[k] for k in expected} == expected and "aten.sort" not in found.after


WHOLE = "the whole sorted tensor is read as well as a piece of it"
OTHERS = "other elements of a sort are taken than the first k"
STABLE = "the sort is stable: it keeps the order of equal elements, which top-k does not promise"
SIZES = "pieces of different sizes are taken from one sort"
STRIDED = "the sort is of a tensor that is not contiguous and has its strides"
RETURNED = "a piece of a sort is returned from the graph with the strides of the whole"

NEAR_MISSES: dict[str, tuple[Callable, str]] = {
    "the last": (lambda x: x.sort(-1)[0][..., -3:] + 1, OTHERS),
    "from the second on": (lambda x: x.sort(-1)[0][..., 1:4] + 1, OTHERS),
    "all but the first": (lambda x: x.argsort(-1)[..., 1:] + 1, OTHERS),
    "every other": (lambda x: x.sort(-1)[0][..., :6:2] + 1, OTHERS),
    "the whole as well": (lambda x: (lambda v: (v[..., :3] + 1, v.cumsum(-1)))(x.sort(-1)[0]), WHOLE),
    "all indices as well": (lambda x: (lambda v, i: (v[..., :3] + 1, i + 1))(*x.sort(-1)), WHOLE),
    "another dimension as well": (lambda x: (lambda v, i: (v[..., :3] + 1, i[:2] + 1))(*x.sort(-1)), WHOLE),
    "different sizes": (lambda x: (lambda v, i: (v[..., :3] + 1, i[..., :2] + 1))(*x.sort(-1)), SIZES),
    "two sizes of one": (lambda x: (lambda v: (v[..., :3] + 1, v[..., :2] + 1))(x.sort(-1)[0]), SIZES),
    "stable": (lambda x: torch.sort(x, dim=-1, stable=True)[1][..., :3] + 1, STABLE),
    "stable argsort": (lambda x: torch.argsort(x, dim=-1, descending=True, stable=True)[..., :3] + 1, STABLE),
    "returned": (lambda x: x.sort(-1)[0][..., :3], RETURNED),
    "indices returned": (lambda x: x.argsort(-1, descending=True)[..., :3], RETURNED),
    "returned transposed": (lambda x: x.sort(-1)[0][..., :3].transpose(0, 1), RETURNED),
    "a piece of it returned": (lambda x: x.sort(-1)[0][..., :4][..., :3], RETURNED),
    "a part of a split of it returned": (lambda x: x.sort(-1)[0][..., :4].split(2, -1)[0], RETURNED),
    "read by its strides": (lambda x: x.sort(-1)[0][..., :3].as_strided((2, 2), (1, 2)) + 1, RETURNED),
    "transposed": (lambda x: x.transpose(1, 2).sort(-1)[0][..., :3] + 1, STRIDED),
    "transposed, and viewed": (lambda x: x[0].t().sort(-1)[0][..., :2].t().view(-1) + 1, STRIDED),
}


@pytest.mark.parametrize(("model", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_are_declined_with_their_reason(model: Callable, reason: str, tracing: ModuleType) -> None:
    x = distinct(3, 5, 8)
    found = traced(tracing, model, x)
    assert not found.report.counts.get("topk", 0) and reasons(found) == [reason]
    assert found.after == found.before
    torch.testing.assert_close(found.result, model(x))


PLAIN: dict[str, Callable] = {
    "a sort": lambda x: x.sort(-1)[0],
    "an argsort": lambda x: x.argsort(-1),
    "all of a sort": lambda x: x.sort(-1)[0][..., :8] + 1,
    "another dimension of a sort": lambda x: x.sort(-1)[0][:2] + 1,
    "the largest": lambda x: x.max(-1)[0],
    "its index": lambda x: x.argmax(-1),
    "the k-th": lambda x: x.kthvalue(3, -1)[0],
    "the median": lambda x: x.median(-1)[0],
    "the first k": lambda x: x[..., :3] + 1,
    "dead": lambda x: (x.topk(2), x + 1)[1],
}


@pytest.mark.parametrize("model", PLAIN.values(), ids=PLAIN)
def test_what_is_plainly_something_else(model: Callable, tracing: ModuleType) -> None:
    found = traced(tracing, model, distinct(3, 5, 8))
    assert not found.report.counts.get("topk", 0) and not reasons(found)
    assert found.after == found.before


# -------------------------------------------------------------------------------------- inference, training, dynamic


def test_recognised_and_left_alone_by_default(tracing: ModuleType) -> None:
    found = traced(tracing, mixtral, distinct(6, 8), gate="table")
    sites = [s for s in found.report.sites if s.kind == "topk"]
    assert [s.decision for s in sites] == ["declined"] and "no measurement" in sites[0].reason
    assert found.after == found.before


@pytest.mark.parametrize(("router", "sites"), ROUTERS[1:4], ids=[r.__name__ for r, _ in ROUTERS[1:4]])
def test_a_training_graph_has_as_many(router: Callable, sites: int, tracing: ModuleType) -> None:
    x, w = distinct(6, 8).div(16).requires_grad_(), nn.Parameter(torch.eye(8))

    def model(x: Tensor, w: Tensor) -> Tensor:
        return router(x @ w)[0]

    assert explain(model)(x, w).counts["topk"] == sites
    model(x, w).square().sum().backward()
    expected, x.grad, w.grad = (x.grad, w.grad), None, None
    found = traced(tracing, model, x, w, grad=True)
    found.result.square().sum().backward()
    assert selections(found) == sites
    torch.testing.assert_close((x.grad, w.grad), expected)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("router", "sites"), ROUTERS[:4], ids=[r.__name__ for r, _ in ROUTERS[:4]])
def test_dynamic_sizes(router: Callable, sites: int, dynamic: bool | None, tracing: ModuleType) -> None:
    logits = distinct(6, 8) / 16
    if dynamic is None:
        torch._dynamo.mark_dynamic(logits, 0)
    else:
        torch._dynamo.mark_static(logits, 1)
    found = traced(tracing, router, logits, dynamic=dynamic)
    assert selections(found) == sites
    torch.testing.assert_close(found.result, router(logits))


def test_a_k_that_is_dynamic(tracing: ModuleType) -> None:
    def model(x: Tensor) -> Tensor:
        return x.topk(x.shape[0], dim=-1)[0]

    x = distinct(3, 8)
    torch._dynamo.mark_dynamic(x, 0)
    found = traced(tracing, model, x)
    assert [(s.kind, s.reason) for s in found.report.sites] == [("topk", "k is dynamic, needs a constant")]
    assert found.after == found.before

    def sorted_model(x: Tensor) -> Tensor:
        return x.sort(-1)[0][:, : x.shape[0]] + 1

    x = distinct(3, 8)
    torch._dynamo.mark_dynamic(x, 0)
    found = traced(tracing, sorted_model, x)
    assert reasons(found) == ["the number of elements taken from a sort is dynamic"]


def test_mutation_between_the_pieces(tracing: ModuleType) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = x.topk(2)
        x.neg_()
        return values + x.topk(2)[0], indices

    x = distinct(4, 8)
    expected, ours = model(x.clone()), x.clone()
    found = traced(tracing, model, ours)
    assert len(rewritten(found)) == 2
    torch.testing.assert_close(found.result, expected)
    torch.testing.assert_close(ours, -x)


def test_compiled() -> None:
    logits = distinct(6, 8) / 16
    torch._dynamo.reset()
    compiled = torch.compile(deepseek_v3, backend="portable_ops", options={"portable_ops.gate": "always"})
    torch.testing.assert_close(compiled(logits), deepseek_v3(logits))


# -------------------------------------------------------------------------------------------------- random spellings

examples = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
VIEWS = [lambda x: x, lambda x: x.mT.contiguous().mT, lambda x: x.float(), lambda x: x.clone(), lambda x: x.mT]


@examples
@given(
    k=st.integers(1, 4),
    dim=st.integers(-3, 2),
    largest=st.booleans(),
    view=st.sampled_from(VIEWS),
    way=st.sampled_from(["topk", "sort", "argsort"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_random_spellings(k, dim, largest, view, way, dtype, tracing) -> None:
    def model(x: Tensor) -> Tensor:
        x = view(x)
        if way == "topk":
            return x.topk(k, dim, largest)[0] * 2
        x = x.contiguous()  # a sort has the strides of what it sorts, and is left alone where those are others
        if way == "sort":
            return x.sort(dim, descending=largest)[0].narrow(dim, 0, k) * 2
        return x.gather(dim, x.argsort(dim, descending=largest).narrow(dim, 0, k)) * 2

    check(tracing, model, distinct(6, 5, 8, dtype=dtype))


@examples
@given(
    k=st.integers(1, 4),
    dim=st.integers(-3, 2),
    largest=st.booleans(),
    spoiled=st.sampled_from(["start", "end", "whole", "stable", "step"]),
)
def test_random_near_misses(k, dim, largest, spoiled, tracing) -> None:
    def model(x: Tensor) -> Tensor:
        v, _ = torch.sort(x, dim=dim, descending=largest, stable=spoiled == "stable")
        v, n = v.movedim(dim, -1), x.shape[dim]
        if spoiled == "step":
            return v[..., : 2 * k : 2] * 2
        if spoiled == "whole":
            return v[..., :k].sum(-1) + v.prod(-1)
        start = {"start": 1, "end": n - k}.get(spoiled, 0)
        return v[..., start : start + k] * 2

    x = distinct(6, 5, 9)
    found = traced(tracing, model, x)
    assert not found.report.counts.get("topk", 0)
    assert found.after == found.before


# ----------------------------------------------------------------------------------------------------------- operator


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_the_operator_keeps_the_rules_of_torch(arguments: dict) -> None:
    x = distinct(3, 5, 8)
    torch.library.opcheck(TOPK.op, (x,), arguments, test_utils=("test_schema", "test_faketensor"))
    torch.testing.assert_close(TOPK.op(x, **arguments), tuple(torch.topk(x, **arguments)))


def test_what_the_operator_refuses() -> None:
    target = named_target("sm_90")
    assert TOPK.supports(distinct(3, 5), 2, target=target) is None
    assert TOPK.supports(torch.tensor(1.0), 1, target=target) == "x has no dimension"
    refused = "x is torch.bool, of which torch.topk takes none"
    assert TOPK.supports(distinct(3, 5) > 0, 2, target=target) == refused


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16])
def test_a_sort_of_what_top_k_does_not_take(dtype: torch.dtype, tracing: ModuleType) -> None:
    def model(x: Tensor) -> Tensor:
        return x.argsort(-1, descending=True)[..., :3].sort(-1)[0]

    x = distinct(3, 8).remainder(2).to(dtype)
    found = traced(tracing, model, x)
    (site,) = found.report.sites
    assert (site.decision, site.reason) == ("declined", f"x is {dtype}, of which torch.topk takes none")
    torch.testing.assert_close(found.result, model(x))


def test_a_gradient_reads_all_indices(tracing: ModuleType) -> None:
    found = traced(tracing, lambda x: x.sort(-1)[0][..., :3] * 2, distinct(3, 8).requires_grad_(), grad=True)
    assert reasons(found) == ["the gradient of the sort reads all of its indices"]
