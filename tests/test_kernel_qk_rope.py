"""rope, qk_rope and qk_rope_append: the kernel against float64, what it declines, the machine code."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from portable_ops.kernels.operator import Operator
from portable_ops.kernels.qk_rope import QK_ROPE, QK_ROPE_APPEND
from portable_ops.kernels.rope import ROPE
from portable_ops.kernels.rotation import RotationConfig, choose_config
from portable_ops.kernels.target import named_target
from torch import Tensor

SM90 = named_target("sm_90")
TARGETS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100"]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [BF16, FP16, FP32]
PAIRINGS = ["half", "interleaved"]
CACHES = ("k_cache", "v_cache")
ROPE_ONLY = {"q": "x", "q_order": "out_order"}


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def turned(dtype: torch.dtype = BF16, rotary_dim: int = 16, **options: Any) -> dict[str, Any]:
    """The arguments that say how pairs are turned."""
    plain = {"pairing": "half", "out_pairing": "half", "rotary_dim": rotary_dim, "offset": 0, "sections": 1}
    return {**plain, "compute_dtype": dtype, "product_dtype": dtype, "out_dtype": dtype, **options}


def normed(dtype: torch.dtype = BF16, **options: Any) -> dict[str, Any]:
    """The arguments that say how heads are normalised."""
    dtypes = ("weight_dtype", "norm_dtype", "norm_product_dtype", "norm_out_dtype")
    return {"eps": 1e-6, "weight_offset": 0.0, "root_dtype": None, **dict.fromkeys(dtypes, dtype), **options}


def tables(*shape: int, dtype: torch.dtype = BF16, seed: int = 7, device: str = "cpu") -> dict[str, Tensor]:
    angles = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 6.3
    return {"cos": angles.cos().to(device, dtype), "sin": angles.sin().to(device, dtype)}


def call(
    dtype: torch.dtype = BF16,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    length: int = 5,
    head_dim: int = 16,
    device: str = "cpu",
    **options: Any,
) -> dict[str, Any]:
    """q and k as pieces of one projection, transposed, and tables [1, 1, length, rotary_dim] of theirs."""
    widths = [h * head_dim for h in heads]
    packed = random(batch, length, sum(widths), dtype=dtype, device=device)
    q, k = (p.unflatten(-1, (-1, head_dim)).transpose(1, 2) for p in packed.split(widths, -1))
    turn = turned(dtype, options.pop("rotary_dim", head_dim), **options)
    width = turn["rotary_dim"]
    return {"q": q, "k": k, **tables(1, 1, length, width, dtype=dtype, device=device), **turn}


def weighted(args: dict[str, Any], per_head: bool = False, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """``args`` with norms in front."""
    dtype = dtype or args["q"].dtype
    weights = {}
    for seed, name in enumerate("qk", 20):
        size = args[name].shape[-1] * (args[name].shape[1] if per_head else 1)
        weights[f"{name}_weight"] = (random(size, dtype=FP32, seed=seed) * 0.3 + 1).to(args["q"].device, dtype)
    return {**args, **weights, **normed(args["q"].dtype)}


def appended(args: dict[str, Any], position: Tensor | None = None, cache: int = 11, v_dim: int | None = None) -> dict:
    """``args`` with v and caches [batch, heads, cache, head_dim]."""
    batch, heads, length, head_dim = args["k"].shape
    v_dim = v_dim or head_dim
    how = {"dtype": args["k"].dtype, "device": args["k"].device.type}
    v = random(batch, length, heads * v_dim, seed=3, **how).unflatten(-1, (heads, v_dim)).transpose(1, 2)
    caches = {
        "k_cache": random(batch, heads, cache, head_dim, seed=4, **how).to(args["out_dtype"]),
        "v_cache": random(batch, heads, cache, v_dim, seed=5, **how),
    }
    return {**args, "v": v, **caches, "position": position, "start": 0, "dim": 2}


def of_one(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``rope`` that turns q."""
    return {ROPE_ONLY.get(name, name): a for name, a in args.items() if name != "k"}


def operator_of(args: dict[str, Any]) -> Operator:
    return ROPE if "x" in args else QK_ROPE_APPEND if "k_cache" in args else QK_ROPE


def with_own_caches(args: dict[str, Any]) -> dict[str, Any]:
    return {name: a.clone() if name in CACHES else a for name, a in args.items()}


def results(args: dict[str, Any], outputs: Any) -> list[Tensor]:
    """All that a call computes: what it returns, and the caches that it wrote."""
    returned = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    return returned + [args[name] for name in CACHES if name in args]


def reference(args: dict[str, Any]) -> list[Tensor]:
    args = with_own_caches(args)
    return results(args, operator_of(args).reference(**args))


def exact(args: dict[str, Any]) -> list[Tensor]:
    """The results in float64, nothing rounded on the way, by matrices that swap and negate elements."""
    width, offset = args["rotary_dim"], args["offset"]
    take, other, sign = _matrices(args)
    found = []
    for name in ("x", "q", "k"):
        if name not in args:
            continue
        x = args[name].double()
        if args.get("eps") is not None:
            x = x / (x.square().mean(-1, keepdim=True) + args["eps"]).sqrt()
            weight = args.get(f"{name}_weight")
            if weight is not None:
                weight = weight.double() + args["weight_offset"]
                x = x * (weight if weight.shape[0] == x.shape[-1] else weight.view(x.shape[1], 1, -1))
        part = x[..., offset : offset + width]
        cos, sin = (_full(args[t].double(), args) for t in ("cos", "sin"))
        part = part[..., take] * cos + sign * part[..., other] * sin
        found.append(torch.cat((x[..., :offset], part, x[..., offset + width :]), -1))
    if "k_cache" in args:
        order = args.get("cache_order") or list(range(found[1].dim()))
        index = (*[slice(None)] * args["dim"], _positions(args))
        caches = [args[name].double().clone() for name in CACHES]
        caches[0][index], caches[1][index] = found.pop().permute(order), args["v"].double()
        found += caches
    return found


def _positions(args: dict[str, Any]) -> Tensor:
    position, first = args["position"], torch.arange(args["v"].shape[args["dim"]])
    if position is None:
        return first + args["start"]
    return (position if position.dim() else first.to(position.device) + args["start"] + position).long()


def _matrices(args: dict[str, Any]) -> tuple[list[int], list[int], Tensor]:
    """For each element of the rotary part of the result: itself and its partner in x, and the partner's sign."""
    width, sections = args["rotary_dim"], args["sections"]
    size, half = width // sections, width // sections // 2
    take, other, sign = [0] * width, [0] * width, torch.ones(width, dtype=FP64, device=args["cos"].device)
    for start, p in itertools.product(range(0, width, size), range(half)):
        u, v = (p, p + half) if args["pairing"] == "half" else (2 * p, 2 * p + 1)
        first, second = (p, p + half) if args["out_pairing"] == "half" else (2 * p, 2 * p + 1)
        take[start + first], other[start + first], sign[start + first] = start + u, start + v, -1
        take[start + second], other[start + second] = start + v, start + u
    return take, other, sign


def _full(table: Tensor, args: dict[str, Any]) -> Tensor:
    if table.shape[-1] == args["rotary_dim"]:
        return table
    parts = table.unflatten(-1, (args["sections"], -1))
    if args["out_pairing"] == "half":
        return torch.cat((parts, parts), -1).flatten(-2)
    return parts.repeat_interleave(2, -1).flatten(-2)


def assert_as_close_as_reference(args: dict[str, Any], actual: list[Tensor]) -> None:
    """Error at most 1.5 times the reference's largest plus one rounding of the output's dtype."""
    for ours, theirs, truth in zip(actual, reference(args), exact(args), strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        unit = torch.finfo(ours.dtype).eps / 2
        bound = 1.5 * (theirs.double() - truth).abs().max() + unit * truth.abs() + torch.finfo(ours.dtype).tiny
        assert ((ours.double() - truth).abs() <= bound).all()  # false for NaN


def run_interpreted(interpret, args: dict[str, Any], arch: str = "sm_90", **config: Any) -> list[Tensor]:
    args, operator, target = with_own_caches(args), operator_of(args), named_target(arch)
    assert operator.supports(**args, target=target) is None
    return results(args, interpret(operator.plan(**args, target=target, **config), args))


def check(interpret, args: dict[str, Any], **how: Any) -> None:
    assert_as_close_as_reference(args, run_interpreted(interpret, args, **how))


# ------------------------------------------------------------------------------------------------------------ rotations


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("half_width", [False, True], ids=["full", "half width"])
@pytest.mark.parametrize(("pairing", "out_pairing"), list(itertools.product(PAIRINGS, PAIRINGS)))
def test_pairings(interpret, pairing: str, out_pairing: str, half_width: bool, dtype: torch.dtype) -> None:
    args = call(dtype, pairing=pairing, out_pairing=out_pairing)
    if half_width:
        args |= {name: args[name][..., :8] for name in ("cos", "sin")}
    check(interpret, args)
    check(interpret, of_one(args))


@pytest.mark.parametrize("half_width", [False, True], ids=["full", "half width"])
@pytest.mark.parametrize(("rotary_dim", "offset"), [(10, 0), (10, 6), (6, 4), (20, 0), (2, 1)])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_parts(interpret, pairing: str, rotary_dim: int, offset: int, half_width: bool) -> None:
    args = call(
        head_dim=max(16, rotary_dim), rotary_dim=rotary_dim, offset=offset, pairing=pairing, out_pairing=pairing
    )
    if half_width:
        args |= {name: args[name][..., : rotary_dim // 2] for name in ("cos", "sin")}
    check(interpret, args)
    check(interpret, weighted(args))


@pytest.mark.parametrize("sections", [2, 3])
@pytest.mark.parametrize(("pairing", "out_pairing"), list(itertools.product(PAIRINGS, PAIRINGS)))
def test_sections(interpret, pairing: str, out_pairing: str, sections: int) -> None:
    args = call(head_dim=24, sections=sections, pairing=pairing, out_pairing=out_pairing)
    check(interpret, args)
    check(interpret, {**args, "cos": args["cos"][..., :12], "sin": args["sin"][..., :12]})


@pytest.mark.parametrize(
    "dtypes",
    [(FP32, FP32, BF16), (FP32, BF16, BF16), (BF16, FP32, FP32), (BF16, BF16, FP32), (FP16, FP32, BF16)],
    ids=str,
)
def test_rounding_points(interpret, dtypes: tuple[torch.dtype, ...]) -> None:
    """Nothing is added up, so that results are the reference's bit for bit."""
    args = call(**dict(zip(("compute_dtype", "product_dtype", "out_dtype"), dtypes, strict=True)))
    args |= tables(1, 1, 5, 16, dtype=FP32)
    for ours, theirs in zip(run_interpreted(interpret, args), reference(args), strict=True):
        assert torch.equal(ours, theirs)
    other = run_interpreted(interpret, {**args, "compute_dtype": FP32 if dtypes[0] != FP32 else BF16})
    assert not torch.equal(other[0], reference(args)[0])


@pytest.mark.parametrize(
    "shape", [(2, 1, 5, 16), (1, 1, 5, 16), (5, 16), (1, 16), (16,), (2, 1, 1, 16), (1, 1, 1, 1, 16)[1:]], ids=str
)
def test_tables_that_are_repeated(interpret, shape: tuple[int, ...]) -> None:
    check(interpret, {**call(), **tables(*shape)})


def test_tables_that_are_strided(interpret) -> None:
    """As the real and imaginary parts of complex numbers lie, and as those of a cache of angles."""
    pairs = torch.view_as_real(torch.polar(torch.ones(1, 1, 5, 8), torch.rand(1, 1, 5, 8) * 6.3))
    args = call(pairing="interleaved", out_pairing="interleaved", compute_dtype=FP32, product_dtype=FP32)
    check(interpret, {**args, "cos": pairs[..., 0], "sin": pairs[..., 1]})
    both = random(2, 1, 9, 32, dtype=FP32)
    check(interpret, {**args, "cos": both[:, :, 1:6, :16], "sin": both[:, :, 2:7, 16:]})
    check(interpret, {**args, "cos": both[:, :, 1:6, :16], "sin": both[..., 8:24].transpose(-1, -2)[:, :, :, :5].mT})


LAYOUTS = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "contiguous": lambda x: x.contiguous(),
    "every second token": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "one batch repeated": lambda x: x[:1].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("order", [None, [0, 2, 1, 3], [1, 2, 0, 3], [2, 1, 0, 3]], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(interpret, layout: Any, order: list[int] | None) -> None:
    args = call()
    args |= {"q": layout(args["q"]), "k": args["k"], "q_order": order, "k_order": [0, 2, 1, 3]}
    check(interpret, args)


def test_heads_behind_tokens(interpret) -> None:
    """[batch, length, heads, head_dim], [tokens, heads, head_dim] and one head."""
    args = call(heads=(3, 5))
    args |= {name: args[name].transpose(1, 2) for name in ("q", "k", "cos", "sin")}
    check(interpret, args)
    check(interpret, weighted({**args, **{name: args[name][0] for name in ("q", "k", "cos", "sin")}}))
    check(interpret, {**args, **{name: args[name][0, :, 0] for name in ("q", "k", "cos", "sin")}})


@pytest.mark.parametrize("config", [(1, 1, 1), (1, 8, 2), (4, 2, 4), (8, 8, 4), (2, 4, 1)], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (7, 1)], ids=str)
def test_every_configuration(interpret, heads: tuple[int, int], config: tuple[int, int, int]) -> None:
    args = appended(weighted(call(batch=1, heads=heads)), torch.tensor(3))
    check(interpret, args, config=RotationConfig(*config))


# --------------------------------------------------------------------------------------------------------------- norms

NORMS = {
    "llama": {},
    "torch": normed(FP32, norm_out_dtype=BF16),
    "gemma": normed(FP32, norm_out_dtype=BF16, weight_offset=1.0),
    "short offset": normed(BF16, norm_dtype=FP32, weight_offset=1.0),
    "short root": normed(BF16, root_dtype=BF16),
    "fp32 all along": normed(FP32),
}


@pytest.mark.parametrize("per_head", [False, True], ids=["one weight", "per head"])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms(interpret, norm: dict[str, Any], per_head: bool) -> None:
    for options in ({}, {"head_dim": 80}, {"head_dim": 24, "rotary_dim": 10, "offset": 2}):
        args = {**weighted(call(batch=1, heads=(6, 3), **options), per_head), **norm}
        check(interpret, args)


def test_a_norm_without_weights(interpret) -> None:
    args = weighted(call())
    check(interpret, {**args, "q_weight": None, "k_weight": None})
    check(interpret, {**args, "q_weight": None})


def test_eps_is_read(interpret) -> None:
    args = weighted(call())
    args["q"] = args["q"] * 1e-3
    check(interpret, {**args, "eps": 1e-5})
    assert not torch.equal(run_interpreted(interpret, args)[0], run_interpreted(interpret, {**args, "eps": 1e-5})[0])


# -------------------------------------------------------------------------------------------------------------- caches

POSITIONS = {
    "from a tensor on": torch.tensor(4),
    "from a 32-bit tensor on": torch.tensor(4, dtype=torch.int32),
    "any": torch.tensor([7, 0, 10, 3, 1]),
    "strided": torch.tensor([7, 9, 0, 9, 10, 9, 3, 9, 1])[::2],
    "from the end": torch.tensor([-1, -11, 2, -3, 5]),
    "from the start": None,
}


@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
def test_caches(interpret, norm: bool, position: Tensor | None) -> None:
    args = appended(weighted(call()) if norm else call(), position)
    for start in (0, 2) if position is None or not position.dim() else (0,):
        check(interpret, {**args, "start": start})


def test_what_a_cache_held_stays(interpret) -> None:
    args = appended(call(), torch.tensor([7, 0, 10, 3, 1]))
    for name, written in zip(CACHES, run_interpreted(interpret, args)[1:], strict=True):
        kept = [2, 4, 5, 6, 8, 9]
        assert torch.equal(written[:, :, kept], args[name][:, :, kept])
        assert not torch.equal(written[:, :, 7], args[name][:, :, 7])


def test_positions_outside_are_not_written(interpret) -> None:
    """Where torch would raise an error: memory beside the cache stays as it was."""
    args = appended(call(), torch.tensor([11, -12, 2**40, 3, -(2**40)]))
    expected = appended(call(), torch.tensor([3, 3, 3, 3, 3]))
    for name, written in zip(CACHES, run_interpreted(interpret, args)[1:], strict=True):
        others = [p for p in range(11) if p != 3]
        assert torch.equal(written[:, :, others], args[name][:, :, others])
        assert expected[name].shape == written.shape


def test_caches_of_other_layouts(interpret) -> None:
    """[batch, cache, heads, head_dim]; values of another size; a cache that is a piece of a longer one; slots."""
    args = appended(call(), torch.tensor(2), v_dim=24)
    check(interpret, args)
    swapped = {name: args[name].transpose(1, 2).contiguous() for name in CACHES}
    check(interpret, {**args, **swapped, "v": args["v"].transpose(1, 2), "dim": 1, "cache_order": [0, 2, 1, 3]})
    args = call(heads=(3, 2))
    args |= {name: args[name][0].transpose(0, 1) for name in ("q", "k", "cos", "sin")}
    caches = {name: random(13, 2, 16, seed=i) for i, name in enumerate(CACHES)}
    args |= {**caches, "v": random(5, 2, 16, seed=3), "position": torch.tensor([12, 3, 5, 0, 7]), "start": 0, "dim": 0}
    check(interpret, args)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_one_token_of_each_sequence(interpret, batch: int) -> None:
    args = appended(weighted(call(batch=batch, length=1, heads=(4, 1))), torch.tensor(6))
    check(interpret, args)


# ------------------------------------------------------------------------------------------------------------- any call


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    dtype = draw(st.sampled_from(DTYPES))
    head_dim = 2 * draw(st.integers(1, 40))
    rotary_dim = 2 * draw(st.integers(1, head_dim // 2))
    heads = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    args = call(
        dtype,
        draw(st.integers(1, 3)),
        heads,
        draw(st.integers(1, 6)),
        head_dim,
        rotary_dim=rotary_dim,
        offset=draw(st.integers(0, head_dim - rotary_dim)),
        pairing=draw(st.sampled_from(PAIRINGS)),
        out_pairing=draw(st.sampled_from(PAIRINGS)),
        compute_dtype=draw(st.sampled_from([dtype, FP32])),
        product_dtype=draw(st.sampled_from([dtype, FP32])),
    )
    if draw(st.booleans()):
        args |= {name: args[name][..., : rotary_dim // 2] for name in ("cos", "sin")}
    orders = st.sampled_from([None, [0, 2, 1, 3]])
    args["q_order"] = draw(orders)
    kind = draw(st.sampled_from(["one", "two", "normed", "appended", "normed, appended"]))
    if kind == "one":
        return of_one(args)
    if "normed" in kind:
        args = weighted(args, per_head=draw(st.booleans()))
    if "appended" in kind:
        return appended(args, draw(st.sampled_from([None, torch.tensor(3)])))
    return {**args, "k_order": draw(orders)}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(args=calls(), arch=st.sampled_from(["sm_90", "sm_89", "gfx942"]))
def test_any_call(interpret, args: dict[str, Any], arch: str) -> None:
    check(interpret, args, arch=arch)


# -------------------------------------------------------------------------------------------------- operators, supports


def test_opcheck() -> None:
    for args in (of_one(call()), call(), weighted(call()), appended(weighted(call()), torch.tensor(3))):
        operator = operator_of(args)
        tensors = [args.pop(name) for name in operator.params if isinstance(args.get(name), Tensor)]
        names = [name for name in operator.params if name not in args][: len(tensors)]
        assert len(names) == len(tensors)
        torch.library.opcheck(operator.op, (), {**dict(zip(names, tensors, strict=True)), **args}, test_utils=TESTED)


TESTED = ("test_schema", "test_faketensor")


def test_what_is_written_is_declared() -> None:
    assert QK_ROPE_APPEND.mutated == CACHES
    assert ROPE.mutated == QK_ROPE.mutated == ()
    args = appended(call(), torch.tensor(3))
    assert QK_ROPE_APPEND.plan(**args, target=SM90).mutated == CACHES


def test_the_operator_writes_the_caches() -> None:
    args = appended(weighted(call()), torch.tensor(3))
    expected = reference(args)
    for ours, theirs in zip(results(args, QK_ROPE_APPEND.op(**args)), expected, strict=True):
        assert torch.equal(ours, theirs)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"q": random(2, 4, 5, 16, dtype=FP64)}, r"q is torch.float64"),
    ({"cos": torch.ones(1, 1, 5, 16, dtype=torch.complex64)}, r"cos is torch.complex64"),
    ({"cos": random(1, 1, 5, 8)}, r"cos and sin have 8 and 16 columns"),
    ({"cos": random(1, 1, 5, 4), "sin": random(1, 1, 5, 4)}, r"cos and sin have 4 and 4 columns"),
    ({"q": random(2, 4, 16, 5).mT}, r"the last dimension of q is not contiguous"),
    ({"k": random(2, 2, 6, 16)}, r"q and k differ in more than the number of heads"),
    ({"k": random(2, 5, 16)}, r"q and k have different numbers of dimensions"),
    ({"q": random(2, 0, 5, 16)}, r"q is empty"),
    ({"compute_dtype": FP64}, r"rounds to torch.float64"),
    ({"q": random(1, 1, 5, 2048), "k": random(1, 1, 5, 2048)}, r"q has heads of 2048 elements"),
    ({"q_weight": random(17)}, r"q_weight has shape \(17,\)"),
    ({"q_weight": random(32)[::2]}, r"q_weight has shape"),
    ({"eps": float("inf")}, r"eps or the weight offset is not finite"),
    ({"k_cache": random(2, 3, 11, 16)}, r"k_cache has shape"),
    ({"v_cache": random(2, 2, 12, 16)}, r"the caches have different lengths"),
    ({"v_cache": random(2, 2, 11, 16, dtype=FP32)}, r"the caches have other types"),
    ({"k_cache": random(2, 2, 16, 11).mT}, r"the last dimension of k_cache"),
    ({"position": torch.tensor([[1]])}, r"position is torch.int64 with 2 dimensions"),
    ({"position": torch.tensor(1.0)}, r"position is torch.float32"),
    ({"position": torch.arange(5, device="meta")}, r"position is on meta, not on cpu"),
    ({"dim": 1}, r"more than two count tokens"),
]


@pytest.mark.parametrize(("changes", "reason"), UNSUPPORTED, ids=[reason for _, reason in UNSUPPORTED])
def test_reasons(changes: dict[str, Any], reason: str) -> None:
    args = {**appended(weighted(call()), torch.tensor(3)), **changes}
    assert re.search(reason, QK_ROPE_APPEND.supports(**args, target=SM90) or "")


def test_targets_without_a_kernel() -> None:
    args = of_one(call())
    assert ROPE.supports(**args, target=named_target("cpu")) == "no kernel for the CPU"
    assert ROPE.supports(**{**args, "sin": None}, target=SM90) == "cos is complex, needs cosine and sine apart"
    angles = {"cos": random(2, 3, 4, 5, 16), "sin": random(2, 3, 4, 5, 16), "x": random(2, 3, 4, 5, 16)}
    assert "more than two count tokens" in ROPE.supports(**{**args, **angles}, target=SM90)


def test_configurations_do_not_waste_heads() -> None:
    for q_heads, k_heads in ((32, 8), (32, 32), (16, 2), (64, 8), (28, 4), (12, 12), (8, 1), (40, 10)):
        for tokens in (1, 64, 16384):
            config = choose_config(tokens, q_heads, k_heads, 128, SM90)
            padded = sum(-heads % config.block_heads for heads in (q_heads, k_heads))
            assert padded <= (q_heads + k_heads) // 4
            assert config.block_tokens & (config.block_tokens - 1) == config.block_heads & (config.block_heads - 1) == 0


# --------------------------------------------------------------------------------------------------------- machine code


def on_meta(args: dict[str, Any]) -> dict[str, Any]:
    return {name: a.to("meta") if isinstance(a, Tensor) else a for name, a in args.items()}


def large(length: int = 2048, **options: Any) -> dict[str, Any]:
    packed = torch.empty(2, length, 48 * 128, dtype=BF16, device="meta")
    q, k, v = (p.unflatten(-1, (-1, 128)).transpose(1, 2) for p in packed.split((4096, 1024, 1024), -1))
    tables = {name: torch.empty(1, 1, length, 128, dtype=BF16, device="meta") for name in ("cos", "sin")}
    weights = {f"{name}_weight": torch.empty(128, dtype=BF16, device="meta") for name in "qk"}
    args = {"q": q, "k": k, **tables, **weights, **normed(), **turned(rotary_dim=128, **options)}
    caches = {name: torch.empty(2, 8, 4096, 128, dtype=BF16, device="meta") for name in CACHES}
    return {
        **args,
        "v": v,
        **caches,
        "position": torch.empty((), dtype=torch.int64, device="meta"),
        "start": 0,
        "dim": 2,
    }


def joined(args: dict[str, Any]) -> dict[str, Any]:
    """Without the caches."""
    return {name: a for name, a in args.items() if name not in (*CACHES, "v", "position", "start", "dim")}


@pytest.mark.parametrize("arch", TARGETS)
def test_it_compiles_everywhere(compile_ahead, arch: str) -> None:
    target = named_target(arch)
    odd = on_meta(appended(weighted(call(head_dim=24, rotary_dim=10, offset=2, heads=(3, 2))), torch.tensor([1] * 5)))
    neighbours = large(pairing="interleaved", out_pairing="interleaved")
    for args in (large(), joined(large()), neighbours, odd, large(1), on_meta(of_one(call(FP32)))):
        (kernel,) = compile_ahead(operator_of(args).plan(**args, target=target), args, target)
        assert kernel.shared <= target.shared_memory
        assert not kernel.spilled


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("length", [1, 2048])
def test_accesses_are_wide_and_nothing_goes_through_shared_memory(compile_ahead, length: int, pairing: str) -> None:
    args = large(length, pairing=pairing, out_pairing=pairing)
    for some in (args, joined(args)):
        (kernel,) = compile_ahead(operator_of(some).plan(**some, target=SM90), some, SM90)
        code = kernel.asm["ptx"]
        assert kernel.shared == 0 and "bar.sync" not in code
        stores = re.findall(r"st\.global\S*", code)
        assert stores and all(".v4.b32" in store for store in stores)
        loads = re.findall(r"ld\.global\S*", code)
        scalar = 1 if "k_cache" in some else 0  # the position
        if pairing == "half":
            assert sum(".v4.b32" not in load for load in loads) == scalar


# -------------------------------------------------------------------------------------------------------------- on GPU


def on_gpu(args: dict[str, Any]) -> list[Tensor]:
    args = with_own_caches(args)
    return results(args, operator_of(args).op(**args))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("length", [1, 7, 300])
def test_rotations_on_gpu(poison, length: int, pairing: str, dtype: torch.dtype) -> None:
    for heads, head_dim, rotary_dim in (((32, 8), 128, 128), ((5, 3), 80, 32), ((16, 16), 64, 64)):
        options = {"pairing": pairing, "out_pairing": pairing, "rotary_dim": rotary_dim}
        args = call(dtype, 3, heads, length, head_dim, "cuda", **options)
        for some in (of_one(args), args, weighted(args), {**args, "q_order": [0, 2, 1, 3], "k_order": [0, 2, 1, 3]}):
            assert_as_close_as_reference(some, on_gpu(some))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("per_head", [False, True], ids=["one weight", "per head"])
def test_norms_on_gpu(poison, norm: dict[str, Any], per_head: bool) -> None:
    args = {**weighted(call(BF16, 2, (32, 8), 129, 128, "cuda"), per_head), **norm}
    assert_as_close_as_reference(args, on_gpu(args))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("length", [1, 5])
def test_caches_on_gpu(poison, length: int, batch: int) -> None:
    positions = (torch.tensor(100, device="cuda"), torch.tensor([400, 3, 77, -1, 12][:length], device="cuda"), None)
    for position in positions:
        for args in (call(BF16, batch, (32, 8), length, 128, "cuda"), call(FP16, batch, (3, 3), length, 72, "cuda")):
            for some in (appended(args, position, 500), appended(weighted(args), position, 500)):
                assert_as_close_as_reference(some, on_gpu(some))


@pytest.mark.gpu
def test_every_configuration_on_gpu(poison) -> None:
    from portable_ops.kernels.launch import run
    from portable_ops.kernels.target import device_target

    target = device_target(torch.device("cuda"))
    args = appended(weighted(call(BF16, 5, (12, 4), 33, 128, "cuda")), torch.tensor(9, device="cuda"), 64)
    for tokens, heads, warps in itertools.product((1, 2, 8), (1, 4, 16), (1, 4)):
        own = with_own_caches(args)
        plan = QK_ROPE_APPEND.plan(**own, target=target, config=RotationConfig(tokens, heads, warps))
        assert_as_close_as_reference(args, results(own, run(plan, own, torch.device("cuda"))))


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31_on_gpu() -> None:
    q = torch.randn(2, 2, 2**23, 128, device="cuda", dtype=BF16)
    k = q[:, :1]
    args = {"q": q, "k": k, **tables(1, 16, dtype=BF16, device="cuda"), **turned(rotary_dim=16)}
    args |= {"cos": args["cos"][None, None], "sin": args["sin"][None, None]}
    ours = [x[-1:, -1:, -3:].contiguous() for x in QK_ROPE.op(**args)]
    assert_as_close_as_reference({**args, "q": q[-1:, -1:, -3:], "k": k[-1:, -1:, -3:]}, ours)
