"""attention: the kernels against float64, what they decline, the machine code."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from portable_ops.kernels import attention
from portable_ops.kernels.attention import ATTENTION, AttentionConfig
from portable_ops.kernels.target import Target, named_target
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

SM90 = named_target("sm_90")
TARGETS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100"]
BF16, FP16, FP32, BOOL = torch.bfloat16, torch.float16, torch.float32, torch.bool
INF = float("inf")


def random(*shape: int, dtype: torch.dtype = FP32, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * len(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def qkv(
    batch: int,
    heads: int,
    heads_kv: int,
    len_q: int,
    len_k: int,
    head_dim: int,
    dtype: torch.dtype = FP32,
    **options: Any,
) -> dict[str, Any]:
    """The arguments of a call on contiguous random tensors."""
    device = options.pop("device", "cpu")
    return {
        "q": random(batch, heads, len_q, head_dim, dtype=dtype, seed=1, device=device),
        "k": random(batch, heads_kv, len_k, head_dim, dtype=dtype, seed=2, device=device),
        "v": random(batch, heads_kv, len_k, head_dim, dtype=dtype, seed=3, device=device),
        "enable_gqa": heads != heads_kv,
        **options,
    }


def exact(args: dict[str, Any]) -> torch.Tensor:
    """The result in float64."""
    wide = {k: a.double() if isinstance(a, torch.Tensor) and a.dtype != BOOL else a for k, a in args.items()}
    return attention.attention_reference(**wide)


TORCH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch's own ways.  A fault in a vendor's library on a GPU would end every test that follows."""


def reference_error(args: dict[str, Any], truth: torch.Tensor) -> torch.Tensor:
    """The reference's largest error over every order of summing along head_dim that we try and both ways in which
    torch computes it: one order alone may be lucky, on one kind of processor."""
    errors = []
    for seed in range(4):
        order = torch.randperm(args["q"].shape[-1], generator=torch.Generator().manual_seed(seed))
        order = order.to(args["q"].device)
        reordered = {**args, "q": args["q"][..., order], "k": args["k"][..., order]}
        for ways in (TORCH, [SDPBackend.MATH]):
            with sdpa_kernel(ways):
                errors.append((attention.attention_reference(**reordered).double() - truth).abs().max())
    return torch.stack(errors).max()


def assert_as_close_as_reference(args: dict[str, Any], actual: torch.Tensor) -> None:
    """Error at most 1.5 times the reference's largest plus one rounding of the output's dtype."""
    with sdpa_kernel(TORCH):
        reference, truth = attention.attention_reference(**args), exact(args)
    assert actual.dtype == reference.dtype
    assert actual.shape == reference.shape
    assert actual.stride() == reference.stride()
    unit = torch.finfo(actual.dtype).eps / 2
    tiny = torch.finfo(actual.dtype).smallest_normal
    bound = 1.5 * reference_error(args, truth) + unit * truth.abs() + tiny
    error = (actual.double() - truth).abs()
    worst = (error - bound).argmax()
    assert (error <= bound).all(), f"error {error.flatten()[worst]} > {bound.flatten()[worst]} at {worst}"


def run(interpret, args: dict[str, Any], target: Target = SM90) -> torch.Tensor:
    assert ATTENTION.supports(**args, target=target) is None
    (out,) = interpret(ATTENTION.plan(**args, target=target), args)
    return out


def check(interpret, args: dict[str, Any], target: Target = SM90) -> None:
    assert_as_close_as_reference(args, run(interpret, args, target))


def variant(args: dict[str, Any], target: Target = SM90) -> str:
    return ATTENTION.plan(**args, target=target).variant


# --- values ---

SIZES = {  # (batch, heads, heads_kv, len_q, len_k, head_dim)
    "one of each": (1, 1, 1, 1, 1, 16),
    "one query": (2, 6, 2, 1, 257, 64),
    "three queries": (1, 6, 3, 3, 131, 80),
    "many splits": (1, 4, 1, 2, 1031, 16),
    "wide": (1, 2, 1, 1, 67, 256),
    "no group": (3, 2, 2, 5, 129, 128),
    "rows not a power of two": (1, 14, 2, 7, 97, 96),
    "prefill": (1, 2, 1, 131, 197, 64),
    "prefill, one key": (1, 1, 1, 67, 1, 16),
    "prefill, long": (1, 2, 2, 70, 517, 128),
    "prefill, odd head_dim": (2, 2, 1, 65, 127, 72),
    "prefill, wide": (1, 1, 1, 97, 65, 256),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_sizes(interpret, name: str, dtype: torch.dtype, is_causal: bool) -> None:
    args = qkv(*SIZES[name], dtype=dtype, is_causal=is_causal)
    assert variant(args).startswith("portable.prefill" if name.startswith("prefill") else "portable.decode")
    check(interpret, args)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_dims(interpret, head_dim: int) -> None:
    check(interpret, qkv(1, 2, 1, 129, 33, head_dim, FP16, is_causal=True))
    check(interpret, qkv(1, 2, 1, 1, 33, head_dim, FP16))


def masks(batch: int, heads: int, len_q: int, len_k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Masks of every broadcastable shape, and of unusual strides."""

    def make(*shape: int) -> torch.Tensor:
        scores = random(*shape, seed=4)
        return scores > -0.3 if dtype == BOOL else scores.to(dtype)

    return {
        "k": make(len_k),
        "1k": make(1, len_k),
        "q1": make(len_q, 1),
        "qk": make(len_q, len_k),
        "hqk": make(heads, len_q, len_k),
        "1111": make(1, 1, 1, 1),
        "b11k": make(batch, 1, 1, len_k),
        "b1qk": make(batch, 1, len_q, len_k),
        "1hq1": make(1, heads, len_q, 1),
        "1h1k": make(1, heads, 1, len_k),
        "bhqk": make(batch, heads, len_q, len_k),
        "transposed": make(batch, 1, len_k, len_q).transpose(2, 3),
        "every other key": make(batch, 1, len_q, 2 * len_k)[..., ::2],
        "expanded": make(batch, 1, 1, len_k).expand(batch, heads, len_q, len_k),
        "cut from a larger one": make(batch, 2, len_q + 3, len_k + 5)[:, 1:, 2:-1, 4:-1],
    }


MASKS = list(masks(1, 1, 1, 1, BOOL))


@pytest.mark.parametrize("len_q", [3, 66], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", [BOOL, FP32, FP16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(interpret, name: str, dtype: torch.dtype, len_q: int) -> None:
    if name == "k":  # torch's CPU kernel refuses this shape, its CUDA kernels do not
        mask = masks(2, 4, len_q, 151, dtype)["k"]
        expected = run(interpret, qkv(2, 4, 2, len_q, 151, 32, FP16, attn_mask=mask[None]))
        assert torch.equal(run(interpret, qkv(2, 4, 2, len_q, 151, 32, FP16, attn_mask=mask)), expected)
        return
    check(interpret, qkv(2, 4, 2, len_q, 151, 32, FP16, attn_mask=masks(2, 4, len_q, 151, dtype)[name]))


def prefix(len_q: int, len_k: int, dtype: torch.dtype) -> torch.Tensor:
    """Batch 0 sees a prefix, batch 1 a window and one key far away, batch 2 nothing."""
    keys = torch.arange(len_k)
    seen = torch.stack([keys < 100, ((keys > 300) & (keys < 330)) | (keys == len_k - 1), keys < 0])
    seen = seen[:, None, None, :].expand(3, 1, len_q, len_k)
    return seen if dtype == BOOL else torch.where(seen, 0.5, -INF).to(dtype)


@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per row"])
@pytest.mark.parametrize("dtype", [BOOL, FP32], ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1100), (4, 1100), (80, 400)])
def test_few_valid_keys(interpret, len_q: int, len_k: int, dtype: torch.dtype, per_row: bool) -> None:
    mask = prefix(len_q, len_k, dtype)
    mask = mask.contiguous() if per_row else mask[:, :, :1]
    args = qkv(3, 2, 1, len_q, len_k, 32, attn_mask=mask)
    out = run(interpret, args)
    assert_as_close_as_reference(args, out)
    assert not out[2].any()


@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per row"])
@pytest.mark.parametrize("len_q", [2, 70])
def test_hidden_keys_are_not_read(interpret, len_q: int, per_row: bool) -> None:
    args = qkv(1, 2, 1, len_q, 500, 64, attn_mask=prefix(len_q, 500, BOOL)[:1])
    args["attn_mask"] = args["attn_mask"].contiguous() if per_row else args["attn_mask"][:, :, :1]
    expected = run(interpret, args)
    args["k"][:, :, 256:] = args["v"][:, :, 256:] = float("nan")
    assert torch.equal(run(interpret, args), expected)


@pytest.mark.parametrize("len_q", [2, 70])
def test_smallest_finite_mask_is_arithmetic(interpret, len_q: int) -> None:
    """A row of finfo.min is not a row of -inf: its scores are equal, its result is the mean of v."""
    mask = torch.zeros(len_q, 40)
    mask[0] = torch.finfo(FP32).min
    mask[1, 20:] = torch.finfo(FP32).min
    args = qkv(1, 1, 1, len_q, 40, 16, attn_mask=mask)
    out = run(interpret, args)
    assert_as_close_as_reference(args, out)
    torch.testing.assert_close(out[0, 0, 0], args["v"][0, 0].mean(0))


def test_more_blocks_than_bits(interpret) -> None:
    """One program, more than 32 blocks of keys: the mask is looked through in several rounds."""
    undivided = dataclasses.replace(SM90, num_processors=0)
    for len_q, head_dim, dtype in ((1, 256, FP32), (65, 256, FP16)):
        keys = torch.arange(1200)
        mask = ((keys % 200 < 3) | (keys > 1190)).expand(len_q, 1200)
        args = qkv(1, 1, 1, len_q, 1200, head_dim, dtype, attn_mask=mask)
        assert variant(args, undivided) in ("portable.decode", "portable.prefill")
        check(interpret, args, undivided)


@pytest.mark.parametrize("dtype", [None, BOOL, FP16], ids=str)
def test_keys_are_split_for_an_idle_device(interpret, dtype: torch.dtype | None) -> None:
    """Too many rows for one tile, too few for the device: the decode kernel with several row blocks."""
    mask = None if dtype is None else masks(1, 2, 70, 2100, dtype)["b1qk"]
    args = qkv(1, 2, 1, 70, 2100, 16, FP16, attn_mask=mask)
    assert variant(args) == "portable.decode_split"
    check(interpret, args)


@pytest.mark.parametrize("scale", [0.3, -0.5, 0.0])
@pytest.mark.parametrize("len_q", [2, 70])
def test_scale(interpret, len_q: int, scale: float) -> None:
    for mask in (None, random(len_q, 90), random(len_q, 90) > 0):
        check(interpret, qkv(1, 2, 1, len_q, 90, 16, scale=scale, attn_mask=mask))


def strided(name: str, len_q: int) -> dict[str, Any]:
    b, h, s, d = 2, 4, 75, 24
    args = qkv(b, h, h, len_q, s, d, FP16)
    if name == "heads next to head_dim":
        for key, length in (("q", len_q), ("k", s), ("v", s)):
            args[key] = random(b, length, h, d, dtype=FP16).transpose(1, 2)
    elif name == "one buffer":
        packed = random(b, s, 3, h, d, dtype=FP16)
        q, k, v = packed.unbind(2)
        args |= {"q": q[:, :len_q].transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
    elif name == "part of a cache":
        args["k"] = random(b + 1, h, 2 * s, d, dtype=FP16)[1:, :, 7 : 7 + s]
        args["v"] = random(b, h, s, d + 8, dtype=FP16)[..., 8:]
    elif name == "expanded":
        args["k"] = random(1, h, s, d, dtype=FP16).expand(b, h, s, d)
        args["v"] = random(b, 1, s, d, dtype=FP16).expand(b, h, s, d)
    elif name == "same key":
        args["k"] = random(b, h, 1, d, dtype=FP16).expand(b, h, s, d)
    return args


@pytest.mark.parametrize("len_q", [3, 66])
@pytest.mark.parametrize("name", ["heads next to head_dim", "one buffer", "part of a cache", "expanded", "same key"])
def test_strides(interpret, name: str, len_q: int) -> None:
    check(interpret, strided(name, len_q))


@pytest.mark.parametrize("out_order", [None, [0, 2, 1, 3], [2, 0, 1, 3], [1, 2, 0, 3]], ids=str)
@pytest.mark.parametrize("len_q", [3, 66])
def test_output_strides(interpret, len_q: int, out_order: list[int] | None) -> None:
    check(interpret, qkv(2, 6, 2, len_q, 300, 24, out_order=out_order))


@pytest.mark.parametrize("len_q", [2, 70])
def test_three_dimensions(interpret, len_q: int) -> None:
    q, k, v = random(3, len_q, 16), random(3, 50, 16, seed=1), random(3, 50, 16, seed=2)
    for mask in (None, random(3, 1, 50) > 0, random(len_q, 50)):
        check(interpret, {"q": q, "k": k, "v": v, "attn_mask": mask})
    check(interpret, {"q": q, "k": k, "v": v, "is_causal": True, "out_order": [1, 0, 2]})


@pytest.mark.parametrize("len_q", [2, 70])
def test_no_keys(interpret, len_q: int) -> None:
    for mask in (None, torch.ones(len_q, 0, dtype=BOOL), torch.ones(1, 0)):
        assert not run(interpret, qkv(1, 2, 1, len_q, 0, 16, attn_mask=mask)).any()


@pytest.mark.parametrize("len_q", [2, 70])
def test_nan_propagates(interpret, len_q: int) -> None:
    args = qkv(1, 2, 2, len_q, 600, 16)
    args["q"][0, 0, 1] = float("nan")
    args["v"][0, 1, 123] = float("nan")
    out = run(interpret, args)
    assert out[0, 0, 1].isnan().all()
    assert out[0, 1].isnan().all()
    assert not out[0, 0, 0].isnan().any()


@pytest.mark.parametrize("len_q", [2, 70])
def test_large_scores(interpret, len_q: int) -> None:
    args = qkv(1, 1, 1, len_q, 300, 16)
    args["q"] *= 100
    check(interpret, args)


# --- supports ---

GOOD = qkv(2, 4, 2, 3, 20, 64, BF16)
DECLINED = {
    "2-D": ({"q": GOOD["q"][0, 0]}, "q has 2 dimensions, needs [batch, heads, length, head_dim] or"),
    "mixed ranks": ({"k": GOOD["k"][0]}, "k has 3 dimensions, needs q's 4"),
    "mixed dtypes": ({"v": GOOD["v"].float()}, "v is torch.float32, needs q's torch.bfloat16"),
    "mixed devices": ({"k": GOOD["k"].to("meta")}, "k is on meta, needs q's device cpu"),
    "float64": ({k: GOOD[k].double() for k in "qkv"}, "q is torch.float64, needs float16"),
    "complex": ({k: GOOD[k].to(torch.complex64) for k in "qkv"}, "q is torch.complex64, needs float16"),
    "strided head_dim": ({"k": random(2, 2, 64, 20, dtype=BF16).mT}, "k has stride 20 along head_dim, needs 1"),
    "small head_dim": (qkv(1, 1, 1, 2, 3, 8), "q has head_dim 8, needs a multiple of 8 from 16 to 256"),
    "large head_dim": (qkv(1, 1, 1, 2, 3, 264), "q has head_dim 264, needs a multiple of 8 from 16 to 256"),
    "odd head_dim": (qkv(1, 1, 1, 2, 3, 20), "q has head_dim 20, needs a multiple of 8 from 16 to 256"),
    "other head_dim of v": ({"v": random(2, 2, 20, 32, dtype=BF16)}, "v has head_dim 32, needs q's 64"),
    "other batch": ({"k": GOOD["k"][:1]}, "k has batch 1, needs q's 2"),
    "other length": ({"v": GOOD["v"][:, :, 1:]}, "v has length 19, needs k's 20"),
    "other heads of v": ({"v": GOOD["v"][:, :1]}, "v has 1 heads, needs k's 2"),
    "not grouped": ({"enable_gqa": False}, "k has 2 heads, needs q's 4 or enable_gqa"),
    "uneven groups": ({"q": GOOD["q"][:, :3]}, "q has 3 heads, needs a multiple of k's 2"),
    "grouped 3-D": (
        {"q": GOOD["q"][0], "k": GOOD["k"][0, :1].expand(4, -1, -1), "v": GOOD["v"][0, :1].expand(4, -1, -1)},
        "enable_gqa with 3-D q, needs a head axis",
    ),
    "no queries": ({"q": GOOD["q"][:, :, :0]}, "q has no elements, needs at least one"),
    "no batch": ({k: GOOD[k][:0] for k in "qkv"}, "q has no elements, needs at least one"),
    "mask and causal": ({"attn_mask": torch.ones(3, 20, dtype=BOOL), "is_causal": True}, "attn_mask together with"),
    "integer mask": ({"attn_mask": torch.ones(3, 20, dtype=torch.int32)}, "attn_mask is torch.int32, needs bool"),
    "mask of another dtype": ({"attn_mask": torch.ones(3, 20, dtype=FP16)}, "attn_mask is torch.float16, needs bool"),
    "mask elsewhere": ({"attn_mask": torch.ones(3, 20, device="meta")}, "attn_mask is on meta, needs q's device cpu"),
    "wrong mask": ({"attn_mask": torch.ones(2, 20)}, "attn_mask of shape (2, 20), needs one that broadcasts"),
    "5-D mask": ({"attn_mask": torch.ones(1, 1, 1, 3, 20)}, "attn_mask has 5 dimensions, needs 1 to 4"),
    "0-D mask": ({"attn_mask": torch.ones(())}, "attn_mask has 0 dimensions, needs 1 to 4"),
    "infinite scale": ({"scale": INF}, "scale is inf, needs a finite constant"),
    "padded order": ({"out_order": [0, 1, 3, 2]}, "out_order is [0, 1, 3, 2], needs a permutation that ends with"),
}


def test_supports_says_none() -> None:
    assert ATTENTION.supports(**GOOD, target=SM90) is None


@pytest.mark.parametrize("name", DECLINED)
def test_declined(name: str) -> None:
    change, reason = DECLINED[name]
    answer = ATTENTION.supports(**{**GOOD, **change}, target=SM90)
    assert answer is not None
    assert answer.startswith(reason)
    assert "\n" not in answer


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (named_target("cpu"), "no kernel for the CPU"),
        (named_target("sm_75"), "needs compute capability 8.0 or later"),
        (dataclasses.replace(SM90, shared_memory=8192), "head_dim 64 in torch.bfloat16 needs more shared memory"),
    ],
    ids=["cpu", "sm_75", "little shared memory"],
)
def test_declined_target(target: Target, reason: str) -> None:
    assert ATTENTION.supports(**GOOD, target=target).startswith(reason)


def dynamic(mode: FakeTensorMode, x: torch.Tensor, *dims: int) -> torch.Tensor:
    """A fake of ``x`` on a GPU whose sizes along ``dims`` are symbols."""
    sizes = [DimDynamic.DYNAMIC if d in dims else DimDynamic.STATIC for d in range(x.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=[None] * x.dim())
    return mode.from_tensor(x, symbolic_context=context)


@pytest.mark.parametrize("len_q", [2, 70])
def test_dynamic_shapes_add_no_guard(len_q: int) -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    args = qkv(3, 4, 2, len_q, 50, 64, BF16)
    with mode:
        q = dynamic(mode, args["q"], 0, 2)
        batch, _, length, _ = q.shape
        keys = dynamic(mode, args["k"], 2).shape[2]
        k = torch.empty(batch, 2, keys, 64, dtype=BF16)
        mask = torch.empty(batch, 1, length, keys, dtype=BOOL)
        guards = len(env.guards)
        call = {"q": q, "k": k, "v": k, "attn_mask": mask, "enable_gqa": True}
        assert ATTENTION.supports(**call, target=SM90) is None
        plan = ATTENTION.plan(**call, target=SM90)
        assert ATTENTION.supports(**call | {"attn_mask": torch.empty(batch, 1, 5, keys, dtype=BOOL)}, target=SM90)
    assert len(env.guards) == guards
    assert isinstance(plan.launches[0].grid[0], torch.SymInt)
    assert plan.launches[0].constexprs["MASK_PER_ROW"]


# --- configuration ---


def splits_of(*sizes: int, **options: Any) -> int:
    with FakeTensorMode():
        plan = ATTENTION.plan(**qkv(*sizes, BF16, **options), target=SM90)
    return plan.launches[0].constexprs["NUM_SPLITS"]


def test_number_of_splits() -> None:
    """One wave of programs where there are few heads, none without need, no more than there are blocks."""
    for len_k in (4096, 32768, 131072):
        assert 0.75 * SM90.num_processors <= 8 * splits_of(1, 32, 8, 1, len_k, 128) <= 4 * SM90.num_processors
    assert splits_of(64, 32, 8, 1, 4096, 128) <= 4
    assert splits_of(1, 1, 1, 1, 100, 128) == 1
    assert 1 < splits_of(1, 1, 1, 1, 1000, 128) <= 16
    assert splits_of(1, 32, 8, 1, 32768, 128, is_causal=True) == 1  # one query sees one key


def test_offsets_are_wide_only_where_needed() -> None:
    with FakeTensorMode():
        args = qkv(1, 1, 1, 1, 64, 64, BF16)
        assert not ATTENTION.plan(**args, target=SM90).launches[0].constexprs["WIDE"]
        args["k"] = torch.empty_strided((1, 1, 64, 64), (1, 1, 2**28, 1), dtype=BF16)
        assert ATTENTION.plan(**args, target=SM90).launches[0].constexprs["WIDE"]


def test_tf32_follows_torch() -> None:
    def allowed(dtype: torch.dtype, arch: str) -> bool:
        plan = ATTENTION.plan(**qkv(1, 1, 1, 1, 64, 64, dtype), target=named_target(arch))
        return plan.launches[0].constexprs["ALLOW_TF32"]

    assert not allowed(FP32, "sm_90")
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert allowed(FP32, "sm_90")
        assert not allowed(BF16, "sm_90")
        assert not allowed(FP32, "gfx942")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("is_causal", [False, True])
def test_opcheck(is_causal: bool) -> None:
    args = qkv(2, 4, 2, 3, 20, 64, is_causal=is_causal, out_order=[0, 2, 1, 3])
    torch.library.opcheck(
        ATTENTION.op, tuple(args.pop(k) for k in "qkv"), args, test_utils=("test_schema", "test_faketensor")
    )


# --- machine code ---

MAIN = {
    "prefill 64": qkv(1, 32, 8, 512, 512, 64, BF16),
    "prefill 128": qkv(1, 32, 8, 512, 512, 128, BF16),
    "prefill 128 causal": qkv(1, 32, 8, 512, 512, 128, BF16, is_causal=True),
    "prefill 128 masked": qkv(1, 32, 8, 512, 512, 128, BF16, attn_mask=torch.ones(1, 1, 512, 512, dtype=BOOL)),
    "prefill 256 causal": qkv(1, 16, 8, 512, 512, 256, BF16, is_causal=True),
    "decode 128": qkv(1, 32, 8, 1, 4096, 128, BF16),
    "decode 128 masked": qkv(1, 32, 8, 1, 4096, 128, BF16, attn_mask=torch.ones(1, 1, 1, 4096, dtype=BOOL)),
}


@pytest.mark.parametrize("name", MAIN)
def test_machine_code_of_sm_90(compile_ahead, name: str) -> None:
    """Matrix units, 16-byte asynchronous copies, no register that spills inside a loop.

    One register may be put aside before the loops and fetched after them: head_dim 256 needs all others.
    """
    args = MAIN[name]
    first, *_ = compiled = compile_ahead(ATTENTION.plan(**args, target=SM90), args, SM90)
    assert max(kernel.spilled for kernel in compiled) <= (4 if args["q"].shape[-1] == 256 else 0)
    assert "cp.async.cg.shared.global" in first.asm["ptx"]
    assert ("wgmma.mma_async" if name.startswith("prefill") else "mma.sync.aligned.m16n8k16") in first.asm["ptx"]


AHEAD = {
    "decode, boolean mask": MAIN["decode 128 masked"],
    "decode, additive mask per row": qkv(1, 2, 1, 3, 300, 256, FP32, attn_mask=torch.zeros(3, 300)),
    "prefill, causal": MAIN["prefill 128 causal"],
    "prefill, boolean mask per row": qkv(1, 2, 1, 70, 300, 80, FP16, attn_mask=torch.ones(70, 300, dtype=BOOL)),
}


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", AHEAD)
def test_compiles_ahead_of_time(compile_ahead, arch: str, name: str) -> None:
    """For every target, within its shared memory and within what the choice of a configuration assumes."""
    args, target = AHEAD[name], named_target(arch)
    assert ATTENTION.supports(**args, target=target) is None
    plan = ATTENTION.plan(**args, target=target)
    chosen = plan.launches[0].constexprs
    config = AttentionConfig(*(chosen[n] for n in ("BLOCK_M", "BLOCK_N", "NUM_WARPS", "NUM_STAGES")))
    mask_bytes = 0 if args.get("attn_mask") is None else args["attn_mask"].element_size()
    assumed = attention._shared_bytes(config, chosen["BLOCK_D"], args["q"].element_size(), mask_bytes, target)
    shared = [kernel.shared for kernel in compile_ahead(plan, args, target)]
    assert max(shared) <= assumed <= target.shared_memory


# --- on a GPU ---


def on_gpu(args: dict[str, Any]) -> dict[str, Any]:
    return {k: a.to("cuda") if isinstance(a, torch.Tensor) else a for k, a in args.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_on_gpu(poison, name: str, dtype: torch.dtype, is_causal: bool) -> None:
    args = on_gpu(qkv(*SIZES[name], dtype=dtype, is_causal=is_causal))
    assert_as_close_as_reference(args, ATTENTION.op(**args))


@pytest.mark.gpu
@pytest.mark.parametrize("len_q", [3, 66], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", [BOOL, FP32, FP16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_on_gpu(poison, name: str, dtype: torch.dtype, len_q: int) -> None:
    mask = masks(2, 4, len_q, 151, dtype)[name]
    strides = mask.stride()
    args = on_gpu(qkv(2, 4, 2, len_q, 151, 32, FP16))
    storage = torch.as_strided(mask, (mask.untyped_storage().nbytes() // mask.element_size(),), (1,), 0).cuda()
    args["attn_mask"] = storage.as_strided(mask.shape, strides, mask.storage_offset())
    assert_as_close_as_reference(args, ATTENTION.op(**args))


@pytest.mark.gpu
@pytest.mark.parametrize("len_q", [3, 66])
@pytest.mark.parametrize("dtype", [BOOL, FP32], ids=str)
def test_few_valid_keys_on_gpu(poison, len_q: int, dtype: torch.dtype) -> None:
    for mask in (prefix(len_q, 1100, dtype).contiguous(), prefix(len_q, 1100, dtype)[:, :, :1]):
        args = on_gpu(qkv(3, 2, 1, len_q, 1100, 32, attn_mask=mask))
        out = ATTENTION.op(**args)
        assert_as_close_as_reference(args, out)
        assert not out[2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("len_q", [1, 8, 2048])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_large_on_gpu(poison, head_dim: int, len_q: int) -> None:
    mask = torch.zeros(2, 1, len_q, 8192, dtype=BOOL)
    mask[0, :, :, 100:5000] = True
    mask[1] = torch.arange(8192) < torch.arange(3000, 3000 + len_q)[:, None]
    args = on_gpu(qkv(2, 8, 2, len_q, 8192, head_dim, BF16, attn_mask=mask, out_order=[0, 2, 1, 3]))
    assert_as_close_as_reference(args, ATTENTION.op(**args))


@pytest.mark.gpu
def test_repeated_runs_are_equal_on_gpu() -> None:
    args = on_gpu(qkv(1, 8, 2, 1, 30000, 128, BF16))
    first = ATTENTION.op(**args)
    assert all(torch.equal(ATTENTION.op(**args), first) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("len_q", [1, 100])
def test_offsets_beyond_32_bits_on_gpu(len_q: int) -> None:
    """Keys and values whose heads start, and end, more than 2^31 elements apart."""
    k = torch.zeros(2, 1, 9 * 2**20, 128, dtype=FP16, device="cuda")
    k[1, 0, -50:] = random(50, 128, dtype=FP16, device="cuda")
    long = k.view(1, 1, -1, 128)  # 18 * 2^20 keys of 128: 2.4e9 elements in one head
    mask = torch.zeros(1, 1, 1, long.shape[2], dtype=BOOL, device="cuda")
    mask[..., -50:] = True
    args = {"q": random(1, 1, len_q, 128, dtype=FP16, device="cuda"), "k": long, "v": long, "attn_mask": mask}
    short = {**args, "k": long[:, :, -50:], "v": long[:, :, -50:], "attn_mask": None}
    assert_as_close_as_reference(short, ATTENTION.op(**args))
