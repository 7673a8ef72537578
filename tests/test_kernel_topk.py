"""topk and topk_indices: the kernels select exactly what torch selects, what they decline, the machine code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from portable_ops.kernels.operator import Operator
from portable_ops.kernels.target import named_target
from portable_ops.kernels.topk import MAX_K, TOPK, TOPK_INDICES, TopkConfig, choose_config
from torch import Tensor

SM90 = named_target("sm_90")
TARGETS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int32, torch.int16, torch.int8, torch.uint8]

SMALL = TopkConfig(row=False, num_warps=4, groups=64, block_cols=32, block_rows=4, room=128, finish_warps=4, run=8)
"""A tournament that rows of a few hundred elements are long enough for, and k up to 64."""
WAYS = {
    "row": None,
    "tournament": SMALL,
    "bounded": dataclasses.replace(SMALL, bounded=True),
    "fused": dataclasses.replace(SMALL, fused=True),
}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers, spread over the integers where ``dtype`` is of those."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (
        (x * 40).round().clamp(0 if dtype == torch.uint8 else -128, 127).to(dtype) if dtype in INTEGERS else x.to(dtype)
    )


def masked(x: Tensor, dim: int, largest: bool, start: Tensor | None, end: Tensor | None) -> Tensor:
    """``x`` with the least (or the greatest) number outside of its spans, element by element."""
    rows = x.movedim(dim, -1).clone()
    least, greatest = (
        (-torch.inf, torch.inf) if x.is_floating_point() else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
    )
    for row in torch.cartesian_prod(*(torch.arange(n) for n in (1, *rows.shape[:-1]))).view(-1, rows.dim()).tolist():
        at = tuple(row[1:])
        first = 0 if start is None else int(start.expand(rows.shape[:-1])[at])
        last = rows.shape[-1] if end is None else int(end.expand(rows.shape[:-1])[at])
        for i in range(rows.shape[-1]):
            if not first <= i < last:
                rows[(*at, i)] = least if largest else greatest
    return rows.movedim(-1, dim)


def assert_selected(x: Tensor, indices: Tensor, k: int, dim: int, largest: bool, sorted: bool) -> None:
    """``indices`` are k different ones of each row, and what they point at is what torch selects, ties aside."""
    expected = torch.topk(x, k, dim, largest)[0]
    assert (indices.dtype, indices.shape) == (torch.int64, expected.shape) and indices.is_contiguous()
    assert ((indices >= 0) & (indices < x.shape[dim])).all()
    in_order = indices.sort(dim)[0].movedim(dim, -1)
    assert (in_order[..., 1:] != in_order[..., :-1]).all(), "an index is there twice"
    found = x.gather(dim, indices)
    found = found if sorted else found.sort(dim, descending=largest)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def check(
    interpret: Callable,
    x: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = False,
    *,
    config: TopkConfig | None = None,
    arch: str = "sm_90",
    values: bool = False,
    **span: Tensor,
) -> None:
    target = named_target(arch)
    args = {"x": x, "k": k, "dim": dim, "largest": largest, "sorted": sorted}
    if values:
        best, indices = interpret(TOPK.plan(**args, target=target, config=config), args)
        torch.testing.assert_close(best, x.gather(dim, indices), rtol=0, atol=0, equal_nan=True)
        assert_selected(x, indices, k, dim, largest, sorted)
        return
    args |= {"start": None, "end": None, **span}
    assert TOPK_INDICES.supports(**args, target=target) is None
    (indices,) = interpret(TOPK_INDICES.plan(**args, target=target, config=config), args)
    if span:
        x = masked(x, dim, largest, args["start"], args["end"])
    assert_selected(x, indices, k, dim, largest, sorted)


# ---------------------------------------------------------------------------------------------------------- selections


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sorted", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (100, 64), (64, 64), (301, 17), (640, 1)])
def test_sizes(interpret, n: int, k: int, sorted: bool, way: str) -> None:
    for values in (False, True):
        check(interpret, normal(2, n), k, sorted=sorted, config=WAYS[way], values=values)


@pytest.mark.parametrize("way", ["row", "tournament"])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_types(interpret, dtype: torch.dtype, largest: bool, way: str) -> None:
    check(interpret, normal(2, 300, dtype=dtype), 31, largest=largest, sorted=True, config=WAYS[way])


def spikes(n: int) -> Tensor:
    """Softmax weights of attention: a few large ones, a long tail down to denormal numbers."""
    return (normal(2, n) * 20).softmax(-1)


HARD: dict[str, Callable[[int], Tensor]] = {
    "all equal": lambda n: torch.full((2, n), 0.7),
    "two values": lambda n: normal(2, n).sign(),
    "two values, few large": lambda n: (normal(2, n) > 2).float(),
    "ascending": lambda n: normal(2, n).sort(-1)[0],
    "descending": lambda n: normal(2, n).sort(-1, descending=True)[0],
    "an outlier": lambda n: normal(2, n).index_fill(1, torch.tensor([5]), 3e38),
    "denormals": lambda n: normal(2, n) * 1e-42,
    "zeros of both signs": lambda n: normal(2, n).sign() * 0.0,
    "infinities": lambda n: normal(2, n) / (normal(2, n, seed=1) > 0),
    "NaN": lambda n: normal(2, n).masked_fill(normal(2, n, seed=1) > 1.5, torch.nan),
    "negative NaN": lambda n: normal(2, n).masked_fill(normal(2, n, seed=1) > 1.5, torch.nan).neg(),
    "NaN only": lambda n: torch.full((2, n), torch.nan),
    "-inf but for a few": lambda n: normal(2, n).masked_fill(normal(2, n, seed=1) < 2, -torch.inf),
    "attention": spikes,
    "extremes of integers": lambda n: torch.where(normal(2, n) > 0, 2**31 - 1, -(2**31)).to(torch.int32),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("hard", HARD)
def test_hard_rows(interpret, hard: str, largest: bool, way: str) -> None:
    check(interpret, HARD[hard](500), 32, largest=largest, sorted=way == "row", config=WAYS[way])


@pytest.mark.parametrize("way", ["tournament", "fused"])
@pytest.mark.parametrize("sorted", [False, True])
def test_more_above_the_bound_than_there_is_room_for(interpret, sorted: bool, way: str) -> None:
    """All that is large lies in a few of the groups, which are the indices modulo 64."""
    x = normal(2, 16, 64)
    x[:, :, :20] += 10
    check(interpret, x.view(2, 1024), 32, sorted=sorted, config=WAYS[way])
    x[:, :, :20] = 3.0
    x[:, 1, :5] = 4.0
    check(interpret, x.view(2, 1024), 32, sorted=sorted, config=WAYS[way])


@pytest.mark.parametrize("way", ["row", "tournament"])
@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1])
def test_dimensions_and_strides(interpret, dim: int, way: str) -> None:
    x = normal(2, 4, 2, 3)
    for view in (x, x[:, ::2, :, 1:].transpose(1, 3), x.permute(3, 1, 0, 2)):
        check(interpret, view, 2, dim, sorted=True, config=WAYS[way], values=True)


def test_rows_that_are_one(interpret) -> None:
    check(interpret, normal(1, 90).expand(4, 90), 9)
    check(interpret, normal(90), 9, 0)


SPANS: dict[str, dict[str, list[int]]] = {
    "lengths": {"end": [0, 1, 31, 32, 33, 500]},
    "starts": {"start": [500, 499, 469, 468, 467, 0]},
    "both": {"start": [0, 10, 100, 450, 300, 7], "end": [10, 100, 100, 500, 340, 490]},
    "backwards": {"start": [9, 9, 9, 9, 9, 9], "end": [9, 8, 0, 500, 10, 41]},
    "beyond the row": {"start": [-5, -1, 0, 480, 600, 3], "end": [3, 600, 500, 501, 700, -1]},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spans", SPANS)
def test_spans(interpret, spans: str, way: str) -> None:
    dtype = torch.int32 if way == "fused" else torch.int64
    span = {name: torch.tensor(bounds, dtype=dtype) for name, bounds in SPANS[spans].items()}
    check(interpret, normal(6, 500), 32, sorted=way == "row", config=WAYS[way], **span)


def test_what_lies_outside_of_a_span_is_not_read(interpret) -> None:
    x = normal(2, 500)
    x[:, 200:] = torch.nan
    end = torch.tensor([200, 20])
    args = {"x": x, "k": 32, "end": end}
    for config in WAYS.values():
        (indices,) = interpret(TOPK_INDICES.plan(**args, target=SM90, config=config), args)
        assert set(indices[0].tolist()) == set(x[0, :200].topk(32)[1].tolist())
        assert set(indices[1, :20].tolist()) == set(range(20)) and len(set(indices[1].tolist())) == 32


def test_spans_of_integers_and_along_other_dimensions(interpret) -> None:
    end = torch.tensor([3, 40, 70])
    check(interpret, normal(3, 90, dtype=torch.int8), 9, end=end)
    check(interpret, normal(2, 90, 3), 9, 1, sorted=True, end=end)
    check(interpret, normal(2, 3, 90), 9, end=end, start=torch.tensor([[5], [20]]))
    check(interpret, normal(2, 3, 90), 9, end=torch.tensor(33))


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 400))
    of_few = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-45]), min_size=1)
    kind = draw(st.sampled_from(["normal", "few", "integers"]))
    seed = draw(st.integers(0, 999))
    if kind == "few":
        values = torch.tensor(draw(of_few))
        x = values[torch.randint(len(values), (2, n), generator=torch.Generator().manual_seed(seed))]
    else:
        x = normal(2, n, dtype=draw(st.sampled_from(FLOATS if kind == "normal" else INTEGERS)), seed=seed)
    bounds = st.integers(-3, n + 3)
    span = {"end": torch.tensor([draw(bounds), draw(bounds)])} if draw(st.booleans()) else {}
    if span and draw(st.booleans()):
        span["start"] = torch.tensor([draw(bounds), draw(bounds)])
    way = draw(st.sampled_from(list(WAYS)))
    k = draw(st.integers(1, min(n, 64)))
    options = {"largest": bool(span) or draw(st.booleans()), "sorted": draw(st.booleans()), "config": WAYS[way]}
    return {"x": x, "k": k, **options, **span}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(args=rows(), arch=st.sampled_from(["sm_90", "gfx942"]))
def test_any_row(interpret, args: dict[str, Any], arch: str) -> None:
    check(interpret, arch=arch, **args)


# ------------------------------------------------------------------------------------------------- operators, supports


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no dimension": ({"x": torch.tensor(1.0), "k": 1}, "x has no dimension"),
    "booleans": ({"x": normal(2, 9) > 0, "k": 1}, "x is torch.bool, of which torch.topk takes none"),
    "double precision": ({"x": normal(2, 9).double(), "k": 1}, "x is torch.float64, needs a type of at most 32 bits"),
    "long integers": ({"x": normal(2, 9).long(), "k": 1}, "x is torch.int64, needs a type of at most 32 bits"),
    "nothing": ({"x": normal(2, 9), "k": 0}, f"k is 0, needs one from 1 to {MAX_K}"),
    "too many": ({"x": normal(2, 9999), "k": MAX_K + 1}, f"k is {MAX_K + 1}, needs one from 1 to {MAX_K}"),
    "sparse": ({"x": normal(2, 9).to_sparse(), "k": 1}, "x is torch.sparse_coo, needs a dense tensor"),
    "too many dimensions": (
        {"x": normal(9, 3, 3, 3, 3).permute(4, 2, 1, 3, 0), "k": 1},
        "the rows of x lie in more than 3 dimensions that cannot be merged",
    ),
    "the smallest of a span": (
        {"x": normal(2, 9), "k": 1, "largest": False, "end": torch.ones(2).int()},
        "the smallest between start and end: what is outside would come before NaN, needs largest=True",
    ),
    "spans of floats": (
        {"x": normal(2, 9), "k": 1, "end": torch.ones(2)},
        "end is torch.float32, needs int32 or int64",
    ),
    "spans of another shape": (
        {"x": normal(2, 9), "k": 1, "start": torch.ones(3, dtype=torch.int32)},
        "start has shape (3,), needs one that broadcasts to (2,)",
    ),
}


@pytest.mark.parametrize(("args", "reason"), REFUSED.values(), ids=REFUSED)
def test_supports_says_what_is_missing(args: dict[str, Any], reason: str) -> None:
    operator = TOPK_INDICES if {"start", "end"} & set(args) else TOPK
    assert operator.supports(**args, target=SM90) == reason


def test_other_targets() -> None:
    args = {"x": normal(2, 9), "k": 1}
    assert TOPK.supports(**args, target=named_target("cpu")) == "no kernel for the CPU"
    assert TOPK.supports(**args, target=named_target("sm_75")) is not None


def test_deterministic_algorithms() -> None:
    x = normal(2, 9)
    torch.use_deterministic_algorithms(True)
    try:
        reason = TOPK_INDICES.supports(x, 2, target=SM90)
    finally:
        torch.use_deterministic_algorithms(False)
    assert reason is not None and reason.startswith("deterministic algorithms are asked for")
    assert TOPK_INDICES.supports(x, 2, target=SM90) is None


def test_opcheck() -> None:
    x = normal(3, 4, 9)
    for args in ({"k": 3}, {"k": 2, "dim": 0, "sorted": False}, {"k": 9, "largest": False}):
        torch.library.opcheck(TOPK.op, (x,), args)
        torch.library.opcheck(TOPK_INDICES.op, (x,), args)
    torch.library.opcheck(TOPK_INDICES.op, (x, 3), {"end": torch.tensor([1, 2, 3, 9])})


def test_the_reference_masks() -> None:
    x, start, end = normal(2, 3, 20), torch.tensor([[4], [0]]), torch.tensor([6, 20, 1])
    for dim, largest in ((-1, True), (2, False)):
        indices = TOPK_INDICES.reference(x, 5, dim, largest, True, start, end)
        assert_selected(masked(x, dim, largest, start, end), indices, 5, dim, largest, True)


def test_rows_shorter_than_k_raise_as_in_torch() -> None:
    for operator in (TOPK, TOPK_INDICES):
        with pytest.raises(RuntimeError, match="out of range"):
            operator.op(normal(2, 5), 6)


# --------------------------------------------------------------------------------------------------- plan, compilation


def plan_of(shape: tuple[int, ...], k: int, arch: str = "sm_90", **options: Any) -> Any:
    x = torch.empty(shape, device="meta", dtype=options.pop("dtype", torch.float32))
    return x, TOPK_INDICES.plan(x, k, target=named_target(arch), **options)


@pytest.mark.parametrize("arch", TARGETS)
def test_configurations_are_possible(arch: str) -> None:
    target = named_target(arch)
    for n in (2, 100, 5000, 8193, 32768, 131072, 2**20):
        for k in (1, 50, 2048, MAX_K):
            for rows in (1, 64, 4096):
                config = choose_config(n, k, rows, target)
                assert target.warp_size <= config.num_warps * target.warp_size <= 1024
                if not config.row:
                    assert config.groups >= 2 * k and config.room >= 2 * k
                    assert config.groups % config.block_cols == 0
                    assert config.block_cols * config.block_rows <= 2**15  # two counters in one number
                    # A lane notes its keys in the bits of a positive number.
                    lanes = max(config.block_cols, config.num_warps * target.warp_size)
                    assert 1 <= config.block_cols * config.block_rows // lanes <= 24


def test_variants() -> None:
    assert plan_of((4096, 8192), 2048)[1].variant == "portable.row"
    plan = plan_of((1, 131072), 2048)[1]
    assert plan.variant == "portable.tournament" and len(plan.launches) <= 3


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("sorted", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), [((4096, 1000), torch.bfloat16), ((2, 70000), torch.float32)], ids=str)
def test_compiles_for(compile_ahead, shape: tuple[int, int], dtype: torch.dtype, sorted: bool, arch: str) -> None:
    x, plan = plan_of(shape, 64, arch, sorted=sorted, dtype=dtype)
    for compiled in compile_ahead(plan, {"x": x}, named_target(arch)):
        assert compiled.shared <= named_target(arch).shared_memory


@pytest.mark.parametrize("shape", [(4096, 8192), (64, 32768), (1, 131072), (64, 262144)], ids=str)
def test_machine_code(compile_ahead, shape: tuple[int, int]) -> None:
    """Elements stay in the registers in which they arrive: shared memory is for sums over warps."""
    x, plan = plan_of(shape, 2048, sorted=False)
    for compiled in compile_ahead(plan, {"x": x}, SM90):
        assert compiled.spilled <= 64 and compiled.shared <= 16384


# ------------------------------------------------------------------------------------------------------------------ GPU


def on_gpu(x: Tensor, k: int, operator: Operator = TOPK_INDICES, **options: Any) -> Tensor:
    result = operator.op(x, k, **options)
    return result if isinstance(result, Tensor) else result[1]


@pytest.mark.gpu
@pytest.mark.parametrize("sorted", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 32768), (1, 131072), (1, 524288), (64, 32768), (64, 262144), (512, 8192)], ids=str
)
def test_large_rows_on_a_gpu(poison, shape: tuple[int, int], sorted: bool) -> None:
    x = torch.randn(shape, device="cuda")
    assert_selected(x, on_gpu(x, 2048, sorted=sorted), 2048, -1, True, sorted)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 131072), (300, 8192)], ids=str)
def test_hard_rows_on_a_gpu(poison, shape: tuple[int, int]) -> None:
    for name, make in HARD.items():
        x = make(shape[1]).repeat(shape[0] // 2, 1).cuda()
        assert x.shape == shape, name
        assert_selected(x, on_gpu(x, 2048), 2048, -1, True, False)


@pytest.mark.gpu
def test_spans_on_a_gpu(poison) -> None:
    end = torch.tensor([131072, 70001, 2048, 100, 0], device="cuda")
    x = torch.randn(5, 131072, device="cuda")
    outside = torch.arange(131072, device="cuda") >= end[:, None]
    indices = on_gpu(x.masked_fill(outside, torch.nan), 2048, end=end)
    assert_selected(x.masked_fill(outside, -torch.inf), indices, 2048, -1, True, False)


@pytest.mark.gpu
def test_many_calls_in_a_row_on_a_gpu(poison) -> None:
    """Counters are cleared by every call, whatever the memory held."""
    for seed in range(50):
        x = normal(3, 70000, seed=seed).cuda()
        assert_selected(x, on_gpu(x, 1000), 1000, -1, True, False)
