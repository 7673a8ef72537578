"""router: the kernel against the plain router, what it declines, the machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from portable_ops.kernels.router import MAX_EXPERTS, ROUTER, RouterConfig
from portable_ops.kernels.target import named_target
from torch import Tensor

SM90 = named_target("sm_90")
TARGETS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def routed(tokens: int, experts: int, dtype: torch.dtype = FP32, bias: bool = False, **options: Any) -> dict[str, Any]:
    """Arguments of a call; logits and biases are of the size that trained routers have."""
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(tokens, experts, generator=generator) * 2
    defaults = {"k": min(8, experts), "score_dtype": FP32, "weight_dtype": FP32}
    offsets = torch.randn(experts, generator=generator) * 0.1 if bias else None
    return {"logits": logits.to(dtype), "bias": offsets, **defaults, **options}


DEEPSEEK_V3 = {
    "scoring": "sigmoid",
    "groups": 8,
    "top_groups": 4,
    "group_best": 2,
    "normalise": "sum",
    "eps": 1e-20,
    "scale": 2.5,
}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": routed(5, 128),
    "mixtral": routed(9, 8, k=2, normalise="sum"),
    "mixtral in bf16": routed(9, 8, BF16, k=2, normalise="sum", weight_dtype=BF16),
    "qwen3": routed(7, 128, BF16, k=8, normalise="sum", weight_dtype=BF16),
    "qwen1.5": routed(3, 60, k=4),
    "deepseek v2": routed(5, 160, k=6, groups=8, top_groups=3, scale=16.0),
    "deepseek v3": routed(5, 256, bias=True, **DEEPSEEK_V3),
    "kimi k2": routed(5, 384, bias=True, scoring="sigmoid", normalise="sum", eps=1e-20, scale=2.827),
    "gpt-oss": routed(5, 32, BF16, k=4, scoring="none", normalise="softmax", score_dtype=BF16, weight_dtype=BF16),
    "llama 4": routed(5, 16, k=1, scoring="sigmoid"),
    "no scores": routed(5, 24, k=3, scoring="none"),
    "few experts in groups": routed(5, 12, k=3, groups=3, top_groups=2, group_best=2, fill=-torch.inf),
    "as many as there are": routed(5, 8, k=8, normalise="sum"),
    "one expert": routed(3, 1, k=1),
    "512 experts": routed(3, 512, k=10, normalise="sum"),
    "half precision": routed(5, 64, FP16, k=6, normalise="sum", score_dtype=FP16, weight_dtype=FP16),
}


def assert_routed(args: dict[str, Any], weights: Tensor, indices: Tensor) -> None:
    """As the reference, but for experts whose choices are within a rounding of each other, and groups likewise."""
    expected, reference = ROUTER.reference(**args)
    assert (weights.dtype, weights.shape, indices.dtype) == (expected.dtype, expected.shape, torch.int64)
    assert weights.is_contiguous() and indices.is_contiguous()
    in_order = indices.sort(-1)[0]
    assert ((indices >= 0) & (indices < args["logits"].shape[1])).all()
    assert (in_order[:, 1:] != in_order[:, :-1]).all(), "an expert is chosen twice"
    # A score is off by a rounding or two of float32; what is rounded to a shorter type may be one of its steps away.
    step = max(torch.finfo(args["score_dtype"]).eps, torch.finfo(expected.dtype).eps)
    tolerance = 2e-6 if step < 1e-6 else 2 * step
    clear = clear_choices(args, tolerance)
    if args["logits"].dtype == FP32 and args["score_dtype"] == FP32:
        assert clear.double().mean() > 0.9, "a test of next to nothing"
        assert (indices == reference)[clear].all()
    # By their scores alone, experts that change places have the same weights.
    judged = clear if args["bias"] is not None or args.get("groups", 1) > 1 else slice(None)
    torch.testing.assert_close(weights[judged], expected[judged], rtol=tolerance, atol=1e-9, equal_nan=True)


def clear_choices(args: dict[str, Any], tolerance: float) -> Tensor:
    """The tokens of which no two neighbours in rank, one of them chosen, are as close as that."""
    logits, experts = args["logits"], args["logits"].shape[1]
    scores = logits.float()
    scores = {"softmax": scores.softmax(-1), "sigmoid": scores.sigmoid(), "none": scores}[
        args.get("scoring", "softmax")
    ]
    choice = scores.to(args["score_dtype"]).float()
    choice = choice if args["bias"] is None else choice + args["bias"]
    clear = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    if args.get("groups", 1) > 1:
        groups = choice.unflatten(-1, (args["groups"], -1)).topk(args.get("group_best", 1), -1)[0].sum(-1)
        clear &= apart(groups, args["top_groups"], tolerance, order=False)
        best = groups.topk(args["top_groups"], -1)[1]
        chosen = torch.zeros_like(groups, dtype=torch.bool).scatter(-1, best, True)
        choice = choice.masked_fill(~chosen.repeat_interleave(experts // args["groups"], -1), args.get("fill", 0.0))
    return clear & apart(choice, args["k"], tolerance, order=True)


def apart(x: Tensor, k: int, tolerance: float, order: bool) -> Tensor:
    """Rows whose ``k`` largest differ from the next one, and from each other where their ``order`` counts."""
    ranked = x.sort(-1, descending=True)[0]
    gaps = ranked[:, :-1] - ranked[:, 1:]
    near = gaps <= 2 * tolerance * ranked[:, :-1].abs()
    near = near[:, 0 if order else k - 1 : k]
    return ~near.any(-1)


def check(interpret, args: dict[str, Any], config: RouterConfig | None = None, arch: str = "sm_90") -> None:
    target = named_target(arch)
    assert ROUTER.supports(**args, target=target) is None
    assert_routed(args, *interpret(ROUTER.plan(**args, target=target, config=config), args))


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(interpret, name: str) -> None:
    check(interpret, ROUTERS[name])


@pytest.mark.parametrize("config", [RouterConfig(1, 1), RouterConfig(4, 4), RouterConfig(16, 4)], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 35])
def test_several_tokens_to_a_program(interpret, tokens: int, config: RouterConfig) -> None:
    check(interpret, routed(tokens, 60, k=4, normalise="sum"), config)
    check(interpret, routed(tokens, 64, bias=True, **DEEPSEEK_V3), config)


def test_rows_of_a_larger_tensor(interpret) -> None:
    args = routed(6, 40, k=4)
    check(interpret, {**args, "logits": args["logits"][::2, 4:36]})
    check(interpret, {**args, "logits": args["logits"][:1].expand(6, 40)})


def test_a_bias_chooses_but_does_not_weigh(interpret) -> None:
    args = routed(4, 16, k=2, scoring="sigmoid", bias=True)
    args["bias"] = torch.zeros(16).index_fill(0, torch.tensor([3, 11]), 5.0)
    weights, indices = interpret(ROUTER.plan(**args, target=SM90), args)
    assert (indices.sort(-1)[0] == torch.tensor([3, 11])).all()
    torch.testing.assert_close(weights, args["logits"].sigmoid().gather(1, indices))


@pytest.mark.parametrize("fill", [0.0, -torch.inf])
def test_what_fills_other_groups_competes(interpret, fill: float) -> None:
    """DeepSeek fills with 0, which is more than a score with a negative bias."""
    args = routed(4, 16, k=2, scoring="sigmoid", groups=4, top_groups=1, group_best=2, fill=fill)
    args["bias"] = torch.full((16,), -2.0)
    args["bias"][:4] = -1.5
    weights, indices = interpret(ROUTER.plan(**args, target=SM90), args)
    assert (indices < 4).all() == (fill != 0.0)
    assert ((indices >= 4).all()) == (fill == 0.0)
    torch.testing.assert_close(weights, args["logits"].sigmoid().gather(1, indices))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "none"])
def test_numbers_that_are_not_finite(interpret, scoring: str) -> None:
    args = routed(5, 32, k=4, scoring=scoring)
    logits = args["logits"]
    logits[0, 3], logits[1, 4], logits[2, 5] = torch.nan, torch.inf, -torch.inf
    logits[3, 7:] = -torch.inf
    logits[4] = 0.25
    weights, indices = interpret(ROUTER.plan(**args, target=SM90), args)
    expected, _ = ROUTER.reference(**args)
    torch.testing.assert_close(weights, expected, equal_nan=True, rtol=2e-6, atol=0)
    assert all(len(set(row)) == 4 for row in indices.tolist())
    assert indices[4].tolist() == [0, 1, 2, 3]


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    groups = draw(st.sampled_from([1, 1, 2, 3, 8]))
    size = draw(st.integers(2, 20))
    top_groups = draw(st.integers(1, groups))
    dtype = draw(st.sampled_from([FP32, BF16]))
    return routed(
        draw(st.integers(1, 9)),
        groups * size,
        dtype,
        bias=draw(st.booleans()),
        k=draw(st.integers(1, min(8, top_groups * size))),
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        groups=groups,
        top_groups=top_groups,
        group_best=draw(st.integers(1, 2)),
        fill=-torch.inf,
        normalise=draw(st.sampled_from(["none", "sum", "softmax"])),
        eps=draw(st.sampled_from([0.0, 1e-20, 1e-3])),
        scale=draw(st.sampled_from([1.0, 2.5])),
        weight_dtype=dtype,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(args=calls(), arch=st.sampled_from(["sm_90", "gfx942"]))
def test_any_router(interpret, args: dict[str, Any], arch: str) -> None:
    check(interpret, args, arch=arch)


# ------------------------------------------------------------------------------------------------- operators, supports


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "integers": ({"logits": torch.ones(2, 8).int()}, "logits is torch.int32, needs float32, bfloat16 or float16"),
    "a token": ({"logits": torch.ones(8)}, "logits has 1 dimensions, needs [tokens, experts]"),
    "many experts": (
        {"logits": torch.ones(2, 600)},
        f"logits has 600 experts, needs a constant from 1 to {MAX_EXPERTS}",
    ),
    "columns": (
        {"logits": torch.ones(8, 4).T},
        "logits has rows that are not contiguous, needs stride 1 along the experts",
    ),
    "another bias": ({"bias": torch.ones(7)}, "bias has shape (7,), needs (8,)"),
    "a bias of integers": (
        {"bias": torch.ones(8).int()},
        "bias is torch.int32 on cpu, needs a floating-point type on cpu",
    ),
    "every other bias": ({"bias": torch.ones(16)[::2]}, "bias is not contiguous"),
    "too many": ({"k": 9}, "k is 9, needs one from 1 to 8"),
    "groups": ({"groups": 3}, "8 experts do not divide into 3 groups"),
    "more groups than there are": (
        {"groups": 2, "top_groups": 3},
        "3 of 2 groups by their 1 best is more than there are",
    ),
    "double precision": ({"score_dtype": torch.float64}, "rounds to torch.float64, needs float32, bfloat16 or float16"),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_supports_says_what_is_missing(change: dict[str, Any], reason: str) -> None:
    assert ROUTER.supports(**{**routed(2, 8), **change}, target=SM90) == reason


def test_unknown_steps() -> None:
    with pytest.raises(ValueError, match="scoring is 'tanh', needs one of softmax, sigmoid, none"):
        ROUTER.reference(**routed(2, 8, scoring="tanh"))
    with pytest.raises(ValueError, match="normalise is 'max', needs one of none, sum, softmax"):
        ROUTER.reference(**routed(2, 8, normalise="max"))


@pytest.mark.parametrize("name", ["mixtral", "deepseek v3", "gpt-oss"])
def test_opcheck(name: str) -> None:
    args = dict(ROUTERS[name])
    torch.library.opcheck(ROUTER.op, (args.pop("logits"), args.pop("bias")), args)


# ------------------------------------------------------------------------------------------------------- compilation


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", ["qwen3", "deepseek v2", "deepseek v3", "gpt-oss"])
def test_compiles_for(compile_ahead, name: str, arch: str) -> None:
    args = ROUTERS[name]
    (compiled,) = compile_ahead(ROUTER.plan(**args, target=named_target(arch)), args, named_target(arch))
    assert compiled.shared <= 4096 and not compiled.spilled


def test_a_maximum_is_one_instruction(compile_ahead) -> None:
    """A row of 128 experts fills a warp, whose maximum and minimum of integers are one instruction each."""
    args = routed(64, 128, k=8)
    (compiled,) = compile_ahead(ROUTER.plan(**args, target=SM90), args, SM90)
    assert compiled.asm["ptx"].count("redux.sync.max.s32") == 8
    assert compiled.asm["ptx"].count("redux.sync.min.s32") == 8


# --------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize("name", ["qwen3", "deepseek v2", "deepseek v3", "gpt-oss"])
def test_routers_on_a_gpu(poison, name: str, tokens: int) -> None:
    args = dict(ROUTERS[name])
    args["logits"] = torch.randn(tokens, args["logits"].shape[1], device="cuda").to(args["logits"].dtype)
    args["bias"] = None if args["bias"] is None else args["bias"].cuda()
    assert_routed(args, *ROUTER.op(**args))
