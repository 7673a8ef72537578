"""RMSNorm in the spellings that occur in the wild: what is matched, what it becomes, what is left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from portable_ops.inductor_ext import Report, explain
from torch import Tensor, nn

N = 64
EPS = 1e-5


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def explained(model: Callable, *args: Tensor, grad: bool = False, **options: object) -> Report:
    with torch.set_grad_enabled(grad):
        return explain(model, **{"gate": "always", **options})(*args)


def mean_square(f: Tensor) -> Tensor:
    return f.pow(2).mean(-1, keepdim=True)


def rms_norm(x: Tensor, weight: Tensor, eps: float | Tensor = EPS) -> Tensor:
    """Llama's."""
    f = x.float()
    return weight * (f * torch.rsqrt(mean_square(f) + eps)).to(x.dtype)


# ------------------------------------------------------------------------------------ ways to write the normalisation

NORMALISATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "pow": lambda f: f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS),
    "power operator": lambda f: f * torch.rsqrt((f**2).mean(-1, keepdim=True) + EPS),
    "square": lambda f: f * torch.rsqrt(f.square().mean(-1, keepdim=True) + EPS),
    "f * f": lambda f: f * torch.rsqrt((f * f).mean(-1, keepdim=True) + EPS),
    "multiply": lambda f: torch.multiply(f, torch.rsqrt(torch.mean(torch.square(f), dim=-1, keepdim=True) + EPS)),
    "last dimension by number": lambda f: f * torch.rsqrt(f.pow(2).mean(f.dim() - 1, keepdim=True) + EPS),
    "sum / N": lambda f: f * torch.rsqrt(f.pow(2).sum(-1, keepdim=True) / f.shape[-1] + EPS),
    "sum * (1 / N)": lambda f: f * torch.rsqrt(f.pow(2).sum(-1, keepdim=True) * (1 / N) + EPS),
    "(1 / N) * sum": lambda f: f * torch.rsqrt((1 / N) * f.pow(2).sum(-1, keepdim=True) + EPS),
    "1 / sqrt": lambda f: f * (1 / torch.sqrt(mean_square(f) + EPS)),
    "reciprocal of sqrt": lambda f: f * torch.sqrt(mean_square(f) + EPS).reciprocal(),
    "sqrt ** -1": lambda f: f * torch.sqrt(mean_square(f) + EPS) ** -1,
    "pow(-0.5)": lambda f: f * torch.pow(mean_square(f) + EPS, -0.5),
    "x / sqrt": lambda f: f / torch.sqrt(mean_square(f) + EPS),
    "x / pow(0.5)": lambda f: f / (mean_square(f) + EPS) ** 0.5,
    "commuted": lambda f: torch.rsqrt(EPS + mean_square(f)) * f,
    "in place": lambda f: f * mean_square(f).add_(EPS).rsqrt_(),
    "eps as a constant tensor": lambda f: f * torch.rsqrt(mean_square(f) + torch.full((), EPS)),
}


@pytest.mark.parametrize("normalise", NORMALISATIONS.values(), ids=NORMALISATIONS)
def test_every_way_to_normalise_is_one_rms_norm(normalise: Callable, tracing: ModuleType) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * normalise(x.float()).to(x.dtype)

    args = tensor(2, 3, N), tensor(N, seed=1)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == traced.report.counts["rms_norm"] == 1
    assert not traced.report.misses
    assert traced.report.sites[0].pattern == "rms_norm"
    assert float(traced.report.sites[0].bound["eps"]) == pytest.approx(EPS)
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


def test_casts_repeated_at_every_use(tracing: ModuleType) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        mean = (x.float() * x.to(torch.float32)).mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(mean + EPS)).type_as(x) * weight

    args = tensor(2, 3, N), tensor(N, seed=1)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == 1
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


def test_the_unconverted_input_is_scaled(tracing: ModuleType) -> None:
    # T5: bf16 * float32 promotes, so that the product is the same as with the converted input.
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(mean_square(x.to(torch.float32)) + EPS)
        return weight * scaled.to(weight.dtype)

    args = tensor(2, 3, N), tensor(N, seed=1)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == 1
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


# ------------------------------------------------------------------------------------------------- weight and bias

BF16, F32 = torch.bfloat16, torch.float32

# name: (n, x's dtype, w, b) -> y, and the rounding points: weight, norm, product, out, weight offset
SCALES: dict[str, tuple[Callable, tuple]] = {
    "weight after the cast": (lambda n, d, w, b: w * n.to(d), (BF16, BF16, BF16, BF16, 0.0)),
    "weight after the cast, commuted": (lambda n, d, w, b: n.to(d) * w, (BF16, BF16, BF16, BF16, 0.0)),
    "weight before the cast": (lambda n, d, w, b: (w * n).to(d), (BF16, F32, BF16, BF16, 0.0)),
    "converted weight before the cast": (lambda n, d, w, b: (n * w.float()).to(d), (BF16, F32, BF16, BF16, 0.0)),
    "no cast back": (lambda n, d, w, b: n * w, (BF16, F32, F32, F32, 0.0)),
    "no weight": (lambda n, d, w, b: n.to(d), (F32, BF16, BF16, BF16, 0.0)),
    "no weight, no cast": (lambda n, d, w, b: n, (F32, F32, F32, F32, 0.0)),
    "1 + w in float32": (lambda n, d, w, b: (n * (1.0 + w.float())).to(d), (F32, F32, BF16, BF16, 1.0)),
    "1 + w in its own type": (lambda n, d, w, b: (n * (1 + w)).to(d), (BF16, F32, BF16, BF16, 1.0)),
    "w + 1 after the cast": (lambda n, d, w, b: n.to(d) * (w + 1), (BF16, BF16, BF16, BF16, 1.0)),
    "w + 0.5": (lambda n, d, w, b: n.to(d) * (w + 0.5), (BF16, BF16, BF16, BF16, 0.5)),
    "weight, bias": (lambda n, d, w, b: n.to(d) * w + b, (BF16, BF16, BF16, BF16, 0.0)),
    "bias, weight": (lambda n, d, w, b: b + w * n.to(d), (BF16, BF16, BF16, BF16, 0.0)),
    "weight and bias before the cast": (lambda n, d, w, b: (n * w + b).to(d), (BF16, F32, F32, BF16, 0.0)),
    "weight of shape [1, 1, N]": (lambda n, d, w, b: n.to(d) * w.view(1, 1, -1), (BF16, BF16, BF16, BF16, 0.0)),
    "weight rounded, then multiplied in float32": (
        lambda n, d, w, b: (n * (1 + w).to(torch.float16)).to(d),
        (torch.float16, F32, BF16, BF16, 0.0),
    ),
}


@pytest.mark.parametrize(("scale", "rounding"), SCALES.values(), ids=SCALES)
def test_weight_and_bias_keep_their_rounding_points(scale: Callable, rounding: tuple, tracing: ModuleType) -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        f = x.float()
        return scale(f * torch.rsqrt(mean_square(f) + EPS), x.dtype, weight, bias)

    args = tensor(2, 3, N), tensor(N, seed=1), tensor(N, seed=2)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == 1 and not traced.report.misses
    bound = traced.report.sites[0].bound
    names = ("weight_dtype", "norm_dtype", "product_dtype", "out_dtype", "weight_offset")
    assert {name: bound[name] for name in names} == dict(zip(names, map(str, rounding), strict=True))
    assert "aten.rsqrt" not in traced.after
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


def test_a_wide_weight_that_is_cast_down(tracing: ModuleType) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        f = x.float()
        return (f * torch.rsqrt(mean_square(f) + EPS)).to(x.dtype) * weight.to(x.dtype)

    args = tensor(2, 3, N), tensor(N, seed=1, dtype=F32)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert "convert_element_type" not in traced.after  # the operator rounds the weight itself
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


def test_a_product_in_a_wider_type_than_its_factors(tracing: ModuleType) -> None:
    # n and 1 + w are rounded to bf16, their product is not: it must not become a bf16 product.
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        f = x.float()
        return (f * torch.rsqrt(mean_square(f) + EPS)).to(x.dtype) * (1 + weight).float()

    args = tensor(2, 3, N), tensor(N, seed=1)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == 1
    assert traced.result.dtype == F32
    assert (traced.result.bfloat16() != traced.result).any()
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.float16, torch.bfloat16])
def test_types_of_input_and_weight(dtype: torch.dtype, weight_dtype: torch.dtype | None, tracing: ModuleType) -> None:
    def norm(x: Tensor, *weight: Tensor) -> Tensor:
        f = x.float()
        n = (f * torch.rsqrt(mean_square(f) + EPS)).to(x.dtype)
        return n * weight[0] if weight else n

    args = [tensor(2, 3, N, dtype=dtype)]
    if weight_dtype is not None:
        args.append(tensor(N, seed=1, dtype=weight_dtype))
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == 1 and not traced.report.misses
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


WEIGHT_FIRST_SPELLINGS: dict[str, tuple[Callable, torch.dtype]] = {
    "weight * h first": (lambda x, w, r: (w * x) * r, F32),
    "h * weight first, commuted": (lambda x, w, r: r * (x * w), F32),
    "weight * root first": (lambda x, w, r: x * (w * r), F32),
    "weight of shape [1, N]": (lambda x, w, r: x * (w.view(1, N) * r), F32),
    "1 + w first": (lambda x, w, r: ((1 + w) * x) * r, F32),
    "short input, wide weight": (lambda x, w, r: ((w.float() * x.float()) * r).to(x.dtype), BF16),
    "short input, promoted": (lambda x, w, r: ((w * x.float()) * r).to(x.dtype), BF16),
}


@pytest.mark.parametrize(("spelling", "dtype"), WEIGHT_FIRST_SPELLINGS.values(), ids=WEIGHT_FIRST_SPELLINGS)
def test_the_weight_may_come_first(spelling: Callable, dtype: torch.dtype, tracing: ModuleType) -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return spelling(x, w, torch.rsqrt(mean_square(x.float()) + EPS))

    args = tensor(2, 3, N, dtype=dtype), tensor(N, seed=1, dtype=dtype)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == traced.report.counts["rms_norm"] == 1
    assert "weight=%" in traced.after and "aten.rsqrt" not in traced.after
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


SHORT_ROOTS: dict[str, Callable] = {
    "short product": lambda x, r, w: x * r.to(x.dtype),  # DeepSeek V4
    "short product and weight": lambda x, r, w: w * (x * r.to(x.dtype)),
    "wide product": lambda x, r, w: (x.float() * r.to(x.dtype)).to(x.dtype) * w,
    "short product widened": lambda x, r, w: (x * r.to(x.dtype)).float(),
    "short product, wide weight": lambda x, r, w: w.float() * (x * r.to(x.dtype)),
    "of another short type": lambda x, r, w: x * r.half(),
}


@pytest.mark.parametrize("spelling", SHORT_ROOTS.values(), ids=SHORT_ROOTS)
def test_a_rounded_inverse_root(spelling: Callable, tracing: ModuleType) -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return spelling(x, torch.rsqrt(mean_square(x.float()) + EPS), w)

    args = tensor(2, 3, N), tensor(N, seed=1)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
        exact = norm(*args)
    assert traced.report.rewritten["rms_norm"] == 1 and not traced.report.misses
    assert "root_dtype=" in traced.after and "aten.rsqrt" not in traced.after
    assert traced.result.dtype == exact.dtype
    # The same roundings: equal but for what the order of the sum moves across one.
    assert (traced.result == exact).double().mean() > 0.99
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


# ----------------------------------------------------------------------------------------- groups, gates, scaled inputs

GROUPED: dict[str, tuple[Callable, str]] = {
    "groups": (lambda n, w, x: w * n.view(2, 3, N).to(x.dtype), "weight=%"),  # Zamba 2
    "cast, then merged": (lambda n, w, x: n.to(x.dtype).view(2, 3, N) * w, "weight=%"),
    "1 + w": (lambda n, w, x: (n.flatten(-2) * (1 + w.float())).to(x.dtype), "weight_offset=1.0"),
    "everything merged": (lambda n, w, x: n.reshape(-1, N) * w, "weight=%"),
    "no cast back": (lambda n, w, x: n.view(2, 3, N) * w, "weight=%"),
    "a weight that is not one": (lambda n, w, x: n.view(2, 3, N) * x, "norm_dtype=f32"),
    "split further": (lambda n, w, x: n.view(2, 3, 8, 8) * w[:8], "norm_dtype=f32"),
}


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("scale", "bound"), GROUPED.values(), ids=GROUPED)
def test_groups_with_a_weight_over_all_of_them(scale: Callable, bound: str, groups: int, tracing: ModuleType) -> None:
    def norm(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        f = (x.float() * F.silu(gate.float())).view(2, 3, groups, N // groups)
        return scale(f * torch.rsqrt(mean_square(f) + EPS), w, x)

    args = tensor(2, 3, N), tensor(2, 3, N, seed=1), tensor(N, seed=2)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == traced.report.counts["rms_norm"] == 1
    call = " ".join(traced.after.split("\n    "))
    assert bound in re.search(r"portable_ops.rms_norm.default\([^)]*\)", call).group(0)
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


@pytest.mark.parametrize("dynamic", [None, True])
def test_groups_of_a_residual_sum(dynamic: bool | None, tracing: ModuleType) -> None:
    def norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        f = h.float()
        n = f * torch.rsqrt(mean_square(f) + EPS)
        return w * n.to(x.dtype).flatten(-2), h

    args = tensor(2, 3, 4, 16), tensor(2, 3, 4, 16, seed=1), tensor(N, seed=2)
    if dynamic:
        for t in args[:2]:
            torch._dynamo.mark_dynamic(t, (0, 1))
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert [(s.pattern, s.decision) for s in traced.report.sites] == [("add_rms_norm", "rewritten")]
    assert "weight=%" in traced.after
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


GATED: dict[str, Callable] = {
    "norm(x) * silu(z)": lambda x, z, w: (rms_norm(x, w) * F.silu(z.float())).to(x.dtype),  # Qwen3-Next
    "norm(x * silu(z))": lambda x, z, w: rms_norm(x * F.silu(z.float()).to(x.dtype), w),
    "norm(x) * sigmoid(z), gate before the cast": lambda x, z, w: (
        rms_norm(x.float(), w.float()) * torch.sigmoid(z.float())
    ).to(x.dtype),
    "scaled input": lambda x, z, w: rms_norm((x.float() * (1 + w)).to(x.dtype), z[0, 0]),  # Muse Spark
}


@pytest.mark.parametrize("norm", GATED.values(), ids=GATED)
def test_a_gate_stays_outside(norm: Callable, tracing: ModuleType) -> None:
    args = tensor(2, 3, N), tensor(2, 3, N, seed=1), tensor(N, seed=2)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always", enable="rms_norm")
    assert traced.report.rewritten["rms_norm"] == traced.report.counts["rms_norm"] == 1
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


# ----------------------------------------------------------------------------------------------------------- eps


@pytest.mark.parametrize("eps_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_eps_as_a_tensor(eps_dtype: torch.dtype, tracing: ModuleType) -> None:
    args = tensor(2, 3, N), tensor(N, seed=1), torch.tensor(1e-3, dtype=eps_dtype)
    with torch.no_grad():
        traced = tracing.trace(rms_norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == 1
    assert "eps_tensor=%" in traced.after
    tracing.assert_as_good_as_eager(traced.result, rms_norm, *args)


def test_no_eps(tracing: ModuleType) -> None:
    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(mean_square(x))

    args = (tensor(2, 3, N, dtype=F32),)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == 1
    assert traced.report.sites[0].bound["eps"] == "0.0"
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


def test_eps_that_a_short_type_rounds_is_not_read_as_a_number(tracing: ModuleType) -> None:
    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(mean_square(x) + torch.full((), 1e-3, dtype=torch.bfloat16))

    args = (tensor(2, 3, N, dtype=F32) * 0.01,)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == 1
    tracing.assert_as_good_as_eager(
        traced.result, lambda x: x * torch.rsqrt(mean_square(x) + 0.00099945068359375), *args
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("affine", [True, False])
def test_torch_rms_norm(dtype: torch.dtype, eps: float | None, affine: bool, tracing: ModuleType) -> None:
    model = nn.RMSNorm(N, eps=eps, elementwise_affine=affine).to(dtype)
    # Small enough that eps counts.
    x = tensor(2, 3, N, dtype=dtype) * 1e-3
    with torch.no_grad():
        traced = tracing.trace(model, x, gate="always")
    assert traced.report.rewritten["rms_norm"] == traced.report.counts["rms_norm"] == 1
    with torch.no_grad():
        torch.testing.assert_close(traced.result, model(x))


# ------------------------------------------------------------------------------------------------------ residual add


def test_residual_add_gives_both_results(tracing: ModuleType) -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return rms_norm(total, weight), total * 2

    args = tensor(2, 3, N), tensor(2, 3, N, seed=1), tensor(N, seed=2)
    with torch.no_grad():
        traced = tracing.trace(block, *args, gate="always")
    assert_expected_inline(
        traced.before,
        """\
%0 = input : bf16[2, 3, 64]
%1 = input : bf16[2, 3, 64]
%2 = input : bf16[64]
%3 = aten.add.Tensor(%0, %1) : bf16[2, 3, 64]
%4 = prims.convert_element_type.default(%3, f32) : f32[2, 3, 64]
%5 = aten.pow.Tensor_Scalar(%4, 2) : f32[2, 3, 64]
%6 = aten.mean.dim(%5, [-1], True) : f32[2, 3, 1]
%7 = aten.add.Tensor(%6, 1e-05) : f32[2, 3, 1]
%8 = aten.rsqrt.default(%7) : f32[2, 3, 1]
%9 = aten.mul.Tensor(%4, %8) : f32[2, 3, 64]
%10 = prims.convert_element_type.default(%9, bf16) : bf16[2, 3, 64]
%11 = aten.mul.Tensor(%2, %10) : bf16[2, 3, 64]
%12 = aten.mul.Tensor(%3, 2) : bf16[2, 3, 64]
return (%11, %12)
""",
    )
    assert_expected_inline(
        traced.after,
        """\
%0 = input : bf16[2, 3, 64]
%1 = input : bf16[2, 3, 64]
%2 = input : bf16[64]
%3 = portable_ops.add_rms_norm.default(x=%0, residual=%1, weight=%2, eps=1e-05, weight_offset=0.0,
    weight_dtype=bf16, norm_dtype=bf16, product_dtype=bf16, out_dtype=bf16)
%4 = getitem(%3, 0) : bf16[2, 3, 64]
%5 = getitem(%3, 1) : bf16[2, 3, 64]
%6 = aten.mul.Tensor(%5, 2) : bf16[2, 3, 64]
return (%4, %6)
""",
    )
    tracing.assert_as_good_as_eager(traced.result, block, *args)


def test_rms_norm_before_and_after(tracing: ModuleType) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:  # Gemma's
        f = x.float()
        return (f * torch.rsqrt(mean_square(f) + EPS) * (1.0 + weight.float())).type_as(x)

    args = tensor(2, 3, N), tensor(N, seed=1)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert_expected_inline(
        traced.before,
        """\
%0 = input : bf16[2, 3, 64]
%1 = input : bf16[64]
%2 = prims.convert_element_type.default(%0, f32) : f32[2, 3, 64]
%3 = aten.pow.Tensor_Scalar(%2, 2) : f32[2, 3, 64]
%4 = aten.mean.dim(%3, [-1], True) : f32[2, 3, 1]
%5 = aten.add.Tensor(%4, 1e-05) : f32[2, 3, 1]
%6 = aten.rsqrt.default(%5) : f32[2, 3, 1]
%7 = aten.mul.Tensor(%2, %6) : f32[2, 3, 64]
%8 = prims.convert_element_type.default(%1, f32) : f32[64]
%9 = aten.add.Tensor(%8, 1.0) : f32[64]
%10 = aten.mul.Tensor(%7, %9) : f32[2, 3, 64]
%11 = prims.convert_element_type.default(%10, bf16) : bf16[2, 3, 64]
return (%11,)
""",
    )
    assert_expected_inline(
        traced.after,
        """\
%0 = input : bf16[2, 3, 64]
%1 = input : bf16[64]
%2 = portable_ops.rms_norm.default(x=%0, weight=%1, eps=1e-05, weight_offset=1.0, weight_dtype=f32,
    norm_dtype=f32, product_dtype=bf16, out_dtype=bf16) : bf16[2, 3, 64]
return (%2,)
""",
    )


RESIDUALS: dict[str, tuple[Callable, torch.dtype, torch.dtype]] = {
    "bf16": (lambda x, r, w: rms_norm(x + r, w), BF16, BF16),
    "only the norm is used": (lambda x, r, w: rms_norm(r.add(x), w), BF16, BF16),
    "sum used by the next layer": (lambda x, r, w: (rms_norm(x + r, w), (x + r) @ w), BF16, BF16),
    "float32 stream": (lambda x, r, w: (rms_norm(r + x, w), r + x), BF16, F32),
    "all float32": (lambda x, r, w: (rms_norm(x + r, w), x + r), F32, F32),
    "itself": (lambda x, r, w: rms_norm(x + x, w), BF16, BF16),
    "in place": (lambda x, r, w: (lambda h: (rms_norm(h, w), h))(x.clone().add_(r)), BF16, BF16),
}


@pytest.mark.parametrize(("block", "dtype", "residual_dtype"), RESIDUALS.values(), ids=RESIDUALS)
def test_residual_adds(block: Callable, dtype: torch.dtype, residual_dtype: torch.dtype, tracing: ModuleType) -> None:
    args = tensor(2, 3, N, dtype=dtype), tensor(2, 3, N, seed=1, dtype=residual_dtype), tensor(N, seed=2, dtype=dtype)
    with torch.no_grad():
        traced = tracing.trace(block, *args, gate="always")
    assert [site.pattern for site in traced.report.sites] == ["add_rms_norm"]
    assert traced.report.rewritten["rms_norm"] == 1
    tracing.assert_as_good_as_eager(traced.result, block, *args)


def test_what_is_no_residual_add(tracing: ModuleType) -> None:
    def broadcast(x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x + bias, weight)

    def scaled(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(torch.add(x, residual, alpha=2), weight)

    def shifted(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x + 1.0, weight)

    def difference(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:  # the Differential Transformer's
        return rms_norm(x - 0.5 * residual, weight)

    x, residual, weight = tensor(2, 3, N), tensor(2, 3, N, seed=1), tensor(N, seed=2)
    three = (x, residual, weight)
    for block, args in [(broadcast, (x, weight, weight)), (scaled, three), (shifted, three), (difference, three)]:
        with torch.no_grad():
            traced = tracing.trace(block, *args, gate="always")
        assert [(s.pattern, s.decision) for s in traced.report.sites] == [("rms_norm", "rewritten")], block
        tracing.assert_as_good_as_eager(traced.result, block, *args)


def test_an_argument_that_is_computed_late_moves_up(tracing: ModuleType) -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        f = total.float()
        n = (f * torch.rsqrt(mean_square(f) + EPS)).to(x.dtype)
        return n * weight.to(x.dtype) + bias.to(x.dtype), total

    args = tensor(2, 3, N), tensor(2, 3, N, seed=1), tensor(N, seed=2, dtype=F32), tensor(N, seed=3, dtype=F32)
    with torch.no_grad():
        traced = tracing.trace(block, *args, gate="always")
    assert [(s.pattern, s.decision) for s in traced.report.sites] == [("add_rms_norm", "rewritten")]
    tracing.assert_as_good_as_eager(traced.result, block, *args)


def test_an_argument_that_depends_on_the_sum_is_declined(tracing: ModuleType) -> None:
    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        weight = total.sum((0, 1))
        return rms_norm(total, weight), total

    args = tensor(2, 3, N), tensor(2, 3, N, seed=1)
    with torch.no_grad():
        traced = tracing.trace(block, *args, gate="always")
        assert traced.after == tracing.stock_graph(block, *args)
    reasons = [site.reason for site in traced.report.declined]
    assert reasons == ["an argument is computed only after the first use of a result"]
    tracing.assert_as_good_as_eager(traced.result, block, *args)


# ------------------------------------------------------------------------------------------------- several norms


class Norm(nn.Module):
    """Llama's, with everything of its own."""

    def __init__(self, size: int = N, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor(size, seed=seed))
        self.eps = EPS

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Chain(nn.Module):
    """Pre-norm blocks, each norm, work, residual, and a last norm: one norm without an add, the others with one."""

    def __init__(self, norms: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(seed=i) for i in range(norms))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms[:-1]:
            x = x + torch.tanh(norm(x))
        return self.norms[-1](x)


def test_a_chain_of_norms(tracing: ModuleType) -> None:
    model, x = Chain(), tensor(2, 3, N)
    with torch.no_grad():
        traced = tracing.trace(model, x, gate="always")
    assert traced.report.rewritten["rms_norm"] == traced.report.counts["rms_norm"] == 4
    assert [s.pattern for s in traced.report.sites] == ["rms_norm"] + ["add_rms_norm"] * 3
    tracing.assert_as_good_as_eager(traced.result, model, x)


def test_max_rewrites_takes_the_first(tracing: ModuleType) -> None:
    model, x = Chain(), tensor(2, 3, N)
    with torch.no_grad():
        traced = tracing.trace(model, x, gate="always", max_rewrites=2)
        untouched = tracing.trace(model, x, gate="always", max_rewrites=0)
        assert untouched.after == tracing.stock_graph(model, x)
    assert traced.report.counts["rms_norm"] == 4
    assert [s.decision for s in traced.report.sites] == ["rewritten"] * 2 + ["declined"] * 2
    assert {s.reason for s in traced.report.declined} == {"max_rewrites=2 is reached"}
    tracing.assert_as_good_as_eager(traced.result, model, x)


def test_post_norm_inside_the_residual(tracing: ModuleType) -> None:
    # Gemma 2 and OLMo 2: the branch is normalised before it is added.
    def block(x: Tensor, w: Tensor) -> Tensor:
        h = x + rms_norm(torch.tanh(x), w)
        return rms_norm(h + rms_norm(torch.sin(h), w), w)

    args = tensor(2, 3, N), tensor(N, seed=1)
    with torch.no_grad():
        traced = tracing.trace(block, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == traced.report.counts["rms_norm"] == 3
    tracing.assert_as_good_as_eager(traced.result, block, *args)


def test_two_norms_of_one_value(tracing: ModuleType) -> None:
    def both(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x + r
        return rms_norm(h, w), rms_norm(h, v), h

    args = tensor(2, 3, N), tensor(2, 3, N, seed=1), tensor(N, seed=2), tensor(N, seed=3)
    with torch.no_grad():
        traced = tracing.trace(both, *args, gate="always")
    assert [s.pattern for s in traced.report.sites] == ["add_rms_norm", "rms_norm"]
    assert traced.report.rewritten["rms_norm"] == 2
    tracing.assert_as_good_as_eager(traced.result, both, *args)


def test_one_normalised_value_with_two_weights(tracing: ModuleType) -> None:
    # Neither weight can go into the operator; the normalisation can.
    def both(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        f = x.float()
        n = (f * torch.rsqrt(mean_square(f) + EPS)).to(x.dtype)
        return n * w, n * v

    args = tensor(2, 3, N), tensor(N, seed=1), tensor(N, seed=2)
    with torch.no_grad():
        traced = tracing.trace(both, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == traced.report.counts["rms_norm"] == 1
    assert "weight=" not in traced.after
    tracing.assert_as_good_as_eager(traced.result, both, *args)


# --------------------------------------------------------------------------------------------- views and memory order

VIEWS: dict[str, tuple[Callable, str]] = {
    "heads": (lambda x, w: rms_norm(x.view(2, 3, 4, 16), w[:16]), "[2, 3, 4, 16]"),
    "heads, then transposed": (lambda x, w: rms_norm(x.view(2, 3, 4, 16), w[:16]).transpose(1, 2), "[2, 3, 4, 16]"),
    "transposed, then heads": (lambda x, w: rms_norm(x.view(2, 3, 4, 16).transpose(1, 2), w[:16]), "[2, 3, 4, 16]"),
    "batch and sequence exchanged": (lambda x, w: rms_norm(x.transpose(0, 1), w), "[2, 3, 64]"),
    "a slice of the columns": (lambda x, w: rms_norm(x[..., :32], w[:32]), "[2, 3, 32]"),
    "one row of the batch": (lambda x, w: rms_norm(x[:, -1], w), "[2, 64]"),
    "one vector": (lambda x, w: rms_norm(x[0, 0], w), "[64]"),
    "five dimensions": (lambda x, w: rms_norm(x.view(1, 2, 3, 4, 16), w[:16]), "[1, 2, 3, 4, 16]"),
}


@pytest.mark.parametrize(("norm", "shape"), VIEWS.values(), ids=VIEWS)
def test_norms_of_views(norm: Callable, shape: str, tracing: ModuleType) -> None:
    args = tensor(2, 3, N), tensor(N, seed=1)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == traced.report.counts["rms_norm"] == 1
    call = re.search(r"portable_ops.rms_norm.default\([^)]*\) : (.*)", " ".join(traced.after.split("\n    ")))
    assert call.group(1) == f"bf16{shape}"  # contiguous, in memory order
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


def test_transposed_heads_are_normalised_in_memory_order(tracing: ModuleType) -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm(x.view(2, 3, 4, 16).transpose(1, 2), w)

    with torch.no_grad():
        traced = tracing.trace(norm, tensor(2, 3, N), tensor(16, seed=1), gate="always")
    assert_expected_inline(
        traced.after,
        """\
%0 = input : bf16[2, 3, 64]
%1 = input : bf16[16]
%2 = aten.view.default(%0, [2, 3, 4, 16]) : bf16[2, 3, 4, 16]
%3 = aten.permute.default(%2, [0, 2, 1, 3]) : bf16[2, 4, 3, 16] strides [192, 16, 64, 1]
%4 = aten.permute.default(%3, [0, 2, 1, 3]) : bf16[2, 3, 4, 16]
%5 = portable_ops.rms_norm.default(x=%4, weight=%1, eps=1e-05, weight_offset=0.0, weight_dtype=bf16,
    norm_dtype=bf16, product_dtype=bf16, out_dtype=bf16) : bf16[2, 3, 4, 16]
%6 = aten.permute.default(%5, [0, 2, 1, 3]) : bf16[2, 4, 3, 16] strides [192, 16, 64, 1]
return (%6,)
""",
    )


def test_columns_that_are_not_innermost_are_recognised_and_left_alone(tracing: ModuleType) -> None:
    def norm(x: Tensor) -> Tensor:  # Inkling's, of a token's neighbours
        return rms_norm(x.transpose(1, 2), torch.ones(3, dtype=BF16))

    with torch.no_grad():
        traced = tracing.trace(norm, tensor(2, 3, N), gate="always")
        assert traced.after == tracing.stock_graph(norm, tensor(2, 3, N))
    assert traced.report.counts["rms_norm"] == 1 and not traced.report.misses
    assert [s.reason for s in traced.report.declined] == ["the last dimension of x is not contiguous"]


def test_a_weight_that_is_not_contiguous_is_recognised_and_left_alone(tracing: ModuleType) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight[::2])

    args = tensor(2, 3, N), tensor(2 * N, seed=1)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
        assert traced.after == tracing.stock_graph(norm, *args)
    assert [s.reason for s in traced.report.declined] == ["weight is not contiguous"]


# ----------------------------------------------------------------------------------------------------- extra users


def test_inner_values_with_other_users_stay_right(tracing: ModuleType) -> None:
    def norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        f = x.float()
        square = f.pow(2)
        mean = square.mean(-1, keepdim=True)
        inverse = torch.rsqrt(mean + EPS)
        n = f * inverse
        short = n.to(x.dtype)
        return weight * short, f, square, mean, inverse, n, short

    args = tensor(2, 3, N), tensor(N, seed=1)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always")
    assert traced.report.rewritten["rms_norm"] == 1
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


def test_the_default_gate_leaves_shared_work_alone(tracing: ModuleType) -> None:
    def norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        f = x.float()
        inverse = torch.rsqrt(mean_square(f) + EPS)
        return weight * (f * inverse).to(x.dtype), inverse

    args = tensor(2, 3, N), tensor(N, seed=1)
    with torch.no_grad():
        traced = tracing.trace(norm, *args)
        assert traced.after == tracing.stock_graph(norm, *args)
    assert [s.reason for s in traced.report.declined] == [
        "an inner value has other users, so its work would be done twice"
    ]


def test_a_shared_cast_of_the_input_is_no_shared_work() -> None:
    def norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        f = x.float()
        return weight * (f * torch.rsqrt(mean_square(f) + EPS)).to(x.dtype), torch.sin(f)

    report = explained(norm, tensor(2, 3, N), tensor(N, seed=1), gate="table")
    assert report.counts["rms_norm"] == 1
    assert not any("other users" in s.reason for s in report.declined)


def test_a_norm_before_a_product_or_a_cast_up(tracing: ModuleType) -> None:
    # What follows belongs to somebody else, and the bf16 rounding in between stays.
    def gated(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        return (rms_norm(x, weight) * F.silu(gate.float())).to(x.dtype)

    def halved(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        return rms_norm(x, weight) * 0.5

    def widened(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        return rms_norm(x, weight).float().sin()

    args = tensor(2, 3, N), tensor(N, seed=1), tensor(2, 3, N, seed=2)
    for model in (gated, halved, widened):
        with torch.no_grad():
            traced = tracing.trace(model, *args, gate="always")
        assert traced.report.rewritten["rms_norm"] == 1, model
        tracing.assert_as_good_as_eager(traced.result, model, *args)


# ------------------------------------------------------------------------------------------------- dynamic shapes


def test_dynamic_shapes_and_eps_as_an_input(tracing: ModuleType) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Norm()

        def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            total = x + residual
            return self.norm(total), total

    model, args = Block(), (tensor(2, 3, N), tensor(2, 3, N, seed=1))
    with torch.no_grad():
        traced = tracing.trace(model, *args, dynamic=True, gate="always")
    assert [(s.pattern, s.decision) for s in traced.report.sites] == [("add_rms_norm", "rewritten")]
    assert "eps_tensor=%" in traced.after  # a float attribute is an input under dynamic=True
    tracing.assert_as_good_as_eager(traced.result, model, *args)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_marked_dimensions(dims: tuple[int, ...], tracing: ModuleType) -> None:
    x, residual = tensor(4, 5, N), tensor(4, 5, N, seed=1)
    for t in (x, residual):
        torch._dynamo.mark_dynamic(t, dims)
    model = Norm()
    with torch.no_grad():
        traced = tracing.trace(lambda x, r: model(x + r), x, residual, gate="always")
    assert [(s.pattern, s.decision) for s in traced.report.sites] == [("add_rms_norm", "rewritten")]
    assert "[s" in traced.after or ", s" in traced.after
    tracing.assert_as_good_as_eager(traced.result, lambda x, r: model(x + r), x, residual)


def test_sizes_that_only_the_data_knows(tracing: ModuleType) -> None:
    def block(x: Tensor, residual: Tensor, keep: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x[keep] + residual[keep]
        return rms_norm(total, weight), total

    args = tensor(6, N), tensor(6, N, seed=1), torch.arange(6) % 3 > 0, tensor(N, seed=2)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        traced = tracing.trace(block, *args, gate="always")
    assert [(s.pattern, s.decision) for s in traced.report.sites] == [("add_rms_norm", "rewritten")]
    tracing.assert_as_good_as_eager(traced.result, block, *args)


def test_a_hidden_size_that_is_dynamic_is_declined() -> None:
    x = tensor(2, 3, N)
    torch._dynamo.mark_dynamic(x, 2)
    report = explained(lambda x: x * torch.rsqrt(mean_square(x.float()) + EPS), x)
    assert [s.reason for s in report.declined] == ["the hidden size of x is dynamic"]


@pytest.mark.parametrize("mean", [lambda s, n: s / n, lambda s, n: s * (1 / n), lambda s, n: (1 / n) * s])
def test_a_sum_divided_by_a_dynamic_hidden_size(mean: Callable) -> None:
    x = tensor(2, 3, N, dtype=F32)
    torch._dynamo.mark_dynamic(x, 2)
    report = explained(lambda x: x * torch.rsqrt(mean(x.pow(2).sum(-1, keepdim=True), x.shape[-1]) + EPS), x)
    assert [s.reason for s in report.declined] == ["the hidden size of x is dynamic"] and not report.misses
    report = explained(lambda x: x * torch.rsqrt(mean(x.pow(2).sum(-1, keepdim=True), 2 * x.shape[-1]) + EPS), x)
    assert report.counts["rms_norm"] == 0


def test_a_marked_sequence_of_transposed_heads(tracing: ModuleType) -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm(x.unflatten(-1, (4, 16)).transpose(1, 2), w)

    x = tensor(2, 5, N)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        traced = tracing.trace(norm, x, tensor(16, seed=1), gate="always")
    assert traced.report.rewritten["rms_norm"] == 1
    tracing.assert_as_good_as_eager(traced.result, norm, x, tensor(16, seed=1))


# ----------------------------------------------------------------------------------------------- autocast, training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, tracing: ModuleType) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(N, N, bias=False)
            self.norm = Norm().float()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype):
                h = x + self.linear(self.norm(x))
                return self.norm(self.linear(h))

    model, x = Model(), tensor(2, 3, N, dtype=F32)
    with torch.no_grad():
        traced = tracing.trace(model, x, gate="always")
        assert traced.report.rewritten["rms_norm"] == traced.report.counts["rms_norm"] == 2
        torch.testing.assert_close(traced.result, model(x), rtol=2e-2, atol=2e-2)


def gradients(model: nn.Module, x: Tensor, result: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(result.float().sin().sum(), [x, *model.parameters()])
    return [g.float() for g in grads]


def test_training_gives_stock_gradients(tracing: ModuleType) -> None:
    model, x = Chain().float(), tensor(2, 3, N, dtype=F32).requires_grad_()
    traced = tracing.trace(model, x, gate="always")
    assert traced.report.rewritten["rms_norm"] == 4
    ours = gradients(model, x, traced.result)
    stock = gradients(model, x, tracing.trace(model, x, gate="never").result)
    for ours_one, stock_one in zip(ours, stock, strict=True):
        torch.testing.assert_close(ours_one, stock_one, rtol=1e-5, atol=1e-5)


def test_training_is_left_to_stock_by_default(tracing: ModuleType) -> None:
    model, x = Chain(), tensor(2, 3, N).requires_grad_()
    traced = tracing.trace(model, x)
    assert traced.after == tracing.stock_graph(model, x)
    assert traced.report.counts["rms_norm"] == 4 and traced.report.rewritten["rms_norm"] == 0
    assert {s.reason for s in traced.report.declined} == {
        "a training graph: stock saves less for backward than a rewrite would"
    }


# ------------------------------------------------------------------------------------------------------ near misses

NOT_FLOAT32 = "the squares are computed in torch.bfloat16, not float32"
OTHER_MEAN = "the mean is not over the last dimension alone with keepdim=True"
OTHER_VALUE = "the value that is normalised is not the one whose squares were averaged"
L2_NORM = "a sum of squares is not divided by their number: an L2 norm"
WEIGHT_FIRST = "the weight is multiplied in first and its product rounded"
MORE_ROWS = "the root is broadcast to more rows than were normalised"
VARIANCE = "a variance stands under the root, as in LayerNorm: RMSNorm subtracts no mean"

NEAR_MISSES: dict[str, tuple[Callable, tuple, str]] = {
    "LayerNorm": (lambda x: F.layer_norm(x, (N,)), (2, 3, N, F32), VARIANCE),
    "normalised by the standard deviation": (
        lambda x: x * torch.rsqrt(x.var(-1, keepdim=True) + EPS),
        (2, 3, N, F32),
        VARIANCE,
    ),
    "Cohere's LayerNorm": (
        lambda x: (lambda d: d * torch.rsqrt(mean_square(d) + EPS))(x - x.mean(-1, keepdim=True)),
        (2, 3, N, F32),
        "a difference is normalised, as LayerNorm does with its mean",
    ),
    "L2 norm": (
        lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS),
        (2, 3, N, F32),
        L2_NORM,
    ),
    "division by the length": (lambda x: x / x.norm(dim=-1, keepdim=True), (2, 3, N, F32), L2_NORM),
    "mean over the middle": (lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True)), (2, 3, N, F32), OTHER_MEAN),
    "mean over two": (lambda x: x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True)), (2, 3, N, F32), OTHER_MEAN),
    "nn.RMSNorm over two": (lambda x: F.rms_norm(x, (3, N)), (2, 3, N, F32), OTHER_MEAN),
    "keepdim=False": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1) + EPS), (N, N, F32), OTHER_MEAN),
    "mean of fourth powers": (
        lambda x: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True)),
        (2, 3, N, F32),
        "the mean is not of squares",
    ),
    "mean of a product": (
        lambda x: x * torch.rsqrt((x * x.sin()).mean(-1, keepdim=True)),
        (2, 3, N, F32),
        "the mean is not of squares",
    ),
    "scaled by another's root": (lambda x: x.sin() * torch.rsqrt(mean_square(x) + EPS), (2, 3, N, F32), OTHER_VALUE),
    "the root alone": (lambda x: torch.rsqrt(mean_square(x) + EPS), (2, 3, N, F32), OTHER_VALUE),
    "bf16 throughout": (lambda x: x * torch.rsqrt(mean_square(x) + EPS), (2, 3, N, BF16), NOT_FLOAT32),
    "bf16 squares": (lambda x: x.float() * torch.rsqrt(mean_square(x).float()), (2, 3, N, BF16), NOT_FLOAT32),
    "bf16 squares, converted": (
        lambda x: x.float() * torch.rsqrt(x.square().float().mean(-1, keepdim=True)),
        (2, 3, N, BF16),
        NOT_FLOAT32,
    ),
    "mean rounded": (
        lambda x: x.float() * torch.rsqrt(mean_square(x.float()).bfloat16() + EPS),
        (2, 3, N, BF16),
        "the mean is rounded to torch.bfloat16 before its root is taken",
    ),
    "mean computed in bf16": (
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=BF16) + EPS),
        (2, 3, N, F32),
        "the mean is computed in torch.bfloat16, its squares in torch.float32",
    ),
    "mean computed in fp16, converted": (
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=torch.float16).float() + EPS),
        (2, 3, N, F32),
        "the mean is computed in torch.float16, its squares in torch.float32",
    ),
    "eps for more rows": (
        lambda x: x * torch.rsqrt(mean_square(x) + torch.full((2, 1), EPS)),
        (1, N, F32),
        MORE_ROWS,
    ),
    "eps with a dimension more": (
        lambda x: x * torch.rsqrt(mean_square(x) + torch.full((2, 1, 1, 1), EPS)),
        (2, 3, N, F32),
        MORE_ROWS,
    ),
    "squares for more rows": (
        lambda x: x * torch.rsqrt(torch.pow(x, torch.full((2, 1), 2.0)).mean(-1, keepdim=True) + EPS),
        (1, N, F32),
        MORE_ROWS,
    ),
    "root rounded, then divided by": (
        lambda x: x / torch.sqrt(mean_square(x.float()) + EPS).to(x.dtype),
        (2, 3, N, BF16),
        "the root is rounded to torch.bfloat16 before it is used",
    ),
    "inverse root rounded, then used for another value": (
        lambda x: x.sin() * torch.rsqrt(mean_square(x.float()) + EPS).to(x.dtype),
        (2, 3, N, BF16),
        "the root is rounded to torch.bfloat16 before it is used",
    ),
    "weight first, rounded": (
        lambda x: (x * x[0, 0]) * torch.rsqrt(mean_square(x.float()) + EPS),
        (2, 3, N, BF16),
        WEIGHT_FIRST,
    ),
    "weight first, inverse root rounded": (
        lambda x: (x * x[0, 0]) * torch.rsqrt(mean_square(x) + EPS).bfloat16(),
        (2, 3, N, F32),
        WEIGHT_FIRST,
    ),
    "weight first, of two dimensions": (
        lambda x: (x * x[:1, 0].sin()) * torch.rsqrt(mean_square(x) + EPS),
        (2, 3, N, F32),
        "what is multiplied in first is no vector of weights",
    ),
    "another value with a weight": (
        lambda x: (x.sin() * x[0, 0]) * torch.rsqrt(mean_square(x) + EPS),
        (2, 3, N, F32),
        OTHER_VALUE,
    ),
    "double": (
        lambda x: x * torch.rsqrt(mean_square(x) + EPS),
        (2, 3, N, torch.float64),
        "the squares are computed in torch.float64, not float32",
    ),
    "complex": (
        lambda x: x * torch.rsqrt(mean_square(x)),
        (2, 3, N, torch.complex64),
        "the squares are computed in torch.complex64, not float32",
    ),
    "integers": (lambda x: x.float() * torch.rsqrt(mean_square(x.float())), (2, 3, N, torch.int64), OTHER_VALUE),
}


@pytest.mark.parametrize(("model", "example", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_say_why(model: Callable, example: tuple, reason: str) -> None:
    report = explained(model, tensor(*example[:-1]).to(example[-1]))
    assert report.counts["rms_norm"] == 0
    assert [m.reason for m in report.misses] == [reason]
    assert all(m.kind == "rms_norm" and "test_pattern_rms_norm.py" in m.source for m in report.misses)


# -------------------------------------------------------------------------------- random spellings, random near misses

SQUARES = {
    "pow": lambda f: f.pow(2),
    "square": torch.square,
    "f * f": lambda f: f * f,
    "power operator": lambda f: f**2.0,
}
MEANS = {
    "mean": lambda s: s.mean(-1, keepdim=True),
    "mean over the last by number": lambda s: s.mean(s.dim() - 1, keepdim=True),
    "sum / N": lambda s: s.sum(-1, keepdim=True) / s.shape[-1],
    "1 / N * sum": lambda s: (1 / s.shape[-1]) * s.sum(-1, keepdim=True),
}
SHIFTS = {"+ eps": lambda m: m + EPS, "eps +": lambda m: EPS + m, "add_": lambda m: m.add_(EPS)}
ROOTS = {
    "rsqrt": lambda x, z: x * torch.rsqrt(z),
    "rsqrt first": lambda x, z: z.rsqrt() * x,
    "pow": lambda x, z: x * z.pow(-0.5),
    "x / sqrt": lambda x, z: x / z.sqrt(),
    "1 / sqrt": lambda x, z: x * (1 / torch.sqrt(z)),
    "reciprocal": lambda x, z: torch.reciprocal(z**0.5) * x,
}
ENDS = {
    "weight after the cast": lambda n, d, w: w * n.to(d),
    "weight before the cast": lambda n, d, w: (n * w).to(d),
    "wide weight": lambda n, d, w: (w.float() * n).to(d),
    "1 + w": lambda n, d, w: (n * (1.0 + w.float())).to(d),
    "no weight": lambda n, d, w: n.to(d),
    "no cast": lambda n, d, w: n * w,
}
INPUTS = {
    "as it is": lambda x: x,
    "heads": lambda x: x.unflatten(-1, (4, 16)),
    "transposed heads": lambda x: x.unflatten(-1, (4, 16)).transpose(1, 2),
    "sum": lambda x: x + x.flip(0),
    "gated": lambda x: x * torch.sigmoid(x),
}
DTYPES = [BF16, torch.float16, F32]

pick = {
    "square": st.sampled_from([*SQUARES.values()]),
    "mean": st.sampled_from([*MEANS.values()]),
    "shift": st.sampled_from([*SHIFTS.values()]),
    "root": st.sampled_from([*ROOTS.values()]),
    "end": st.sampled_from([*ENDS.values()]),
    "view": st.sampled_from([*INPUTS.values()]),
    "dtype": st.sampled_from(DTYPES),
}
few = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@few
@given(**pick, late_cast=st.booleans())
def test_any_spelling(tracing: ModuleType, late_cast: bool, dtype: torch.dtype, **parts: Callable) -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        h = parts["view"](x)
        f = h.float()
        scaled = h if late_cast else f  # T5's; the root is float32 and so is the product
        n = parts["root"](scaled, parts["shift"](parts["mean"](parts["square"](f))))
        return parts["end"](n, x.dtype, w[: h.shape[-1]])

    args = tensor(2, 3, N, dtype=dtype), tensor(N, seed=1, dtype=dtype)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always", enable="rms_norm")
    assert traced.report.rewritten["rms_norm"] == traced.report.counts["rms_norm"] == 1
    assert not [m for m in traced.report.misses if m.kind == "rms_norm"]
    tracing.assert_as_good_as_eager(traced.result, norm, *args)


FLAWS: dict[str, dict[str, Callable]] = {
    "fourth powers": {"square": lambda f: f.pow(4)},
    "a product of two": {"square": lambda f: f * f.cos()},
    "absolute values": {"square": torch.abs},
    "no mean": {"mean": lambda s: s.sum(-1, keepdim=True)},
    "a mean of the wrong number": {"mean": lambda s: s.sum(-1, keepdim=True) / (s.shape[-1] - 1)},
    "a mean over rows": {"mean": lambda s: s.mean(1, keepdim=True)},
    "a largest square": {"mean": lambda s: s.amax(-1, keepdim=True)},
    "a mean over everything": {"mean": lambda s: s.mean((-1, -2), keepdim=True)},
    "a cube root": {"root": lambda x, z: x * z.pow(-1 / 3)},
    "the root itself": {"root": lambda x, z: x * z.sqrt()},
    "another value": {"root": lambda x, z: x.cos() * torch.rsqrt(z)},
    "a logarithm": {"shift": lambda m: m.log1p()},
}


@few
@given(**pick, flaw=st.sampled_from(sorted(FLAWS)))
def test_any_flaw(tracing: ModuleType, dtype: torch.dtype, flaw: str, **parts: Callable) -> None:
    parts |= FLAWS[flaw]

    def norm(x: Tensor, w: Tensor) -> Tensor:
        f = parts["view"](x).float()
        n = parts["root"](f, parts["shift"](parts["mean"](parts["square"](f))))
        return parts["end"](n, x.dtype, w[: f.shape[-1]])

    args = tensor(2, 3, N, dtype=dtype), tensor(N, seed=1, dtype=dtype)
    with torch.no_grad():
        traced = tracing.trace(norm, *args, gate="always", enable="rms_norm")
    assert traced.report.counts["rms_norm"] == 0, flaw


UNRELATED: dict[str, Callable] = {
    "normalize": lambda x: F.normalize(x, dim=-1),
    "an optimizer's step": lambda x: x / (x.square().mul(0.1).sqrt() + 1e-8),
    "an optimizer's step, root last": lambda x: x / (x.square() * 0.1 + 1e-8).sqrt(),
    "BatchNorm in inference": lambda x: F.batch_norm(x, x[0, :, 0].detach(), x[0, :, 1].detach().abs()),
    "softmax with a scale": lambda x: torch.softmax(x * x.shape[-1] ** -0.5, -1),
    "GELU": lambda x: F.gelu(x),
    "a quotient rounded down": lambda x: torch.div(x, torch.sqrt(mean_square(x) + EPS), rounding_mode="floor"),
    "a quotient cut off": lambda x: torch.div(x, torch.sqrt(mean_square(x) + EPS), rounding_mode="trunc"),
    "a reciprocal cut off": lambda x: x * torch.div(1.0, torch.sqrt(mean_square(x) + EPS), rounding_mode="trunc"),
    "a mean rounded down": lambda x: (
        x * torch.rsqrt(torch.div(x.pow(2).sum(-1, keepdim=True), N, rounding_mode="floor") + EPS)
    ),
}


@pytest.mark.parametrize("model", UNRELATED.values(), ids=UNRELATED)
def test_what_is_plainly_something_else_is_not_mentioned(model: Callable) -> None:
    report = explained(model, tensor(2, 3, N, dtype=F32))
    assert report.counts["rms_norm"] == 0
    assert not report.misses


@pytest.mark.parametrize("short", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats_around_a_norm(short: torch.dtype, tracing: ModuleType) -> None:
    def model(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = rms_norm(x.float(), weight.float())
        return y.to(short).float(), F.silu(x.float()) * y

    args = tensor(2, 3, N).to(short), tensor(N, seed=1).to(short)
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="always", enable="rms_norm")
        assert traced.report.rewritten["rms_norm"] == 1
        torch.testing.assert_close(traced.result, model(*args))


def test_an_empty_input_is_recognised_and_left_alone() -> None:
    report = explained(rms_norm, tensor(0, 3, N), tensor(N, seed=1))
    assert report.counts["rms_norm"] == 1 and report.rewritten["rms_norm"] == 0
    assert [s.reason for s in report.declined] == ["x is empty"]


def test_settings_that_decline(tracing: ModuleType) -> None:
    args = tensor(2, 3, N), tensor(N, seed=1)
    with torch.no_grad():
        stock = tracing.stock_graph(rms_norm, *args)
        for options, reason in [({"gate": "never"}, "gate=never"), ({"disable": "rms_norm"}, "rms_norm is disabled")]:
            traced = tracing.trace(rms_norm, *args, **{"gate": "always", **options})
            assert traced.after == stock
            assert [s.reason for s in traced.report.declined] == [reason]


# ------------------------------------------------------------------------------------------------ compiled for real


def compiled(model: Callable, *args: Tensor, **how: object) -> object:
    torch._dynamo.reset()
    return torch.compile(model, backend="portable_ops", options={"portable_ops.gate": "always"}, **how)(*args)


def test_compiled_inference(tracing: ModuleType) -> None:
    model, x = Chain(2), tensor(2, 3, N)
    with torch.no_grad():
        tracing.assert_as_good_as_eager(compiled(model, x, fullgraph=True), model, x)


def test_compiled_with_dynamic_shapes(tracing: ModuleType) -> None:
    def norm(x: Tensor, r: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return rms_norm((x + r).unflatten(-1, (4, 16)).transpose(1, 2), w, eps), x + r

    torch._dynamo.reset()
    run = torch.compile(norm, backend="portable_ops", options={"portable_ops.gate": "always"}, dynamic=True)
    for rows, eps in [(3, 1e-5), (7, 1e-2)]:
        args = tensor(2, rows, N), tensor(2, rows, N, seed=1), tensor(16, seed=2), eps
        with torch.no_grad():
            tracing.assert_as_good_as_eager(run(*args), norm, *args)


def test_compiled_training_gives_stock_gradients() -> None:
    model, x = Chain(2).float(), tensor(2, 3, N, dtype=F32).requires_grad_()
    ours = gradients(model, x, compiled(model, x))
    torch._dynamo.reset()
    stock = gradients(model, x, torch.compile(model)(x))
    for ours_one, stock_one in zip(ours, stock, strict=True):
        torch.testing.assert_close(ours_one, stock_one, rtol=1e-5, atol=1e-5)
