"""Gated activations in the spellings that occur in the wild: what is one, what it becomes, what is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from portable_ops.inductor_ext import Report, explain
from portable_ops.inductor_ext.report import Site
from portable_ops.kernels.activation import ACTIVATIONS, TILE_ACTIVATIONS
from portable_ops.kernels.linear import MAX_ROWS
from portable_ops.kernels.swiglu import SWIGLU, swiglu_reference
from portable_ops.kernels.target import named_target
from portable_ops.patterns import algebra
from torch import Tensor, nn

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SQRT_2_PI = math.sqrt(2 / math.pi)


def tensor(*shape: int, dtype: torch.dtype = BF16, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def traced(tracing: ModuleType, model: Callable, *args: Tensor, grad: bool = False, **options: object):
    with torch.set_grad_enabled(grad):
        return tracing.trace(model, *args, **{"gate": "always", **options})


def gated(report: Report) -> list[str]:
    """The activation of each gated activation that was rewritten."""
    return [s.bound["activation"] for s in report.sites if s.kind == "swiglu" and s.decision == "rewritten"]


def the_site(report: Report) -> Site:
    """The only gated activation; layers around it have sites of their own."""
    (site,) = (s for s in report.sites if s.kind == "swiglu")
    return site


def reasons(report: Report) -> list[str]:
    return [m.reason for m in report.misses if m.kind == "swiglu"]


# -------------------------------------------------------------------------------------------- spellings of activations

SPELLINGS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "silu": [
        F.silu,
        nn.SiLU(),
        lambda x: F.silu(x.clone(), inplace=True),
        lambda x: x * torch.sigmoid(x),
        lambda x: x.sigmoid() * x,
        lambda x: x / (1 + torch.exp(-x)),
        lambda x: x / (x.neg().exp() + 1.0),
        lambda x: x * (1 / (1 + torch.exp(-x))),
        lambda x: x * (1 + torch.exp(-x)).reciprocal(),
        lambda x: 0.5 * x * (1 + torch.tanh(0.5 * x)),
        lambda x: x - x * torch.sigmoid(-x),
        lambda x: x * torch.special.expit(x),
    ],
    "gelu": [
        F.gelu,
        nn.GELU(),
        lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: 0.5 * x * (1 + torch.erf(x * 0.7071067811865475)),
        lambda x: (torch.erf(x / 2**0.5) + 1) * (x / 2),
        lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2.0)),
        lambda x: x - 0.5 * x * torch.special.erfc(x * 0.5**0.5),
    ],
    "gelu_tanh": [
        lambda x: F.gelu(x, approximate="tanh"),
        nn.GELU("tanh"),
        lambda x: 0.5 * x * (1.0 + torch.tanh(SQRT_2_PI * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))),
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
        lambda x: x * torch.sigmoid(2 * SQRT_2_PI * (x + 0.044715 * x**3)),
        lambda x: (x / 2) * (torch.tanh((x + x * x * x * 0.044715) * SQRT_2_PI) + 1),
    ],
    "relu": [
        F.relu,
        nn.ReLU(),
        lambda x: x.clamp(min=0),
        lambda x: torch.clamp_min(x, 0.0),
        lambda x: torch.maximum(x, torch.zeros((), dtype=x.dtype)),
        lambda x: torch.maximum(torch.zeros((), dtype=x.dtype), x),
        lambda x: 0.5 * (x + x.abs()) + 0.0 * F.relu(x),
    ],
    "relu2": [
        lambda x: F.relu(x).square(),
        lambda x: F.relu(x) ** 2,
        lambda x: torch.relu(x) * torch.relu(x),
        lambda x: torch.pow(x.clamp(min=0), 2.0),
        lambda x: x * F.relu(x),
    ],
    "sigmoid": [
        torch.sigmoid,
        nn.Sigmoid(),
        lambda x: 1 / (1 + torch.exp(-x)),
        lambda x: (1 + (-x).exp()).reciprocal(),
        lambda x: 0.5 + 0.5 * torch.tanh(x / 2),
        lambda x: 1 - torch.sigmoid(-x),
    ],
    "tanh": [torch.tanh, nn.Tanh(), lambda x: 2 * torch.sigmoid(2 * x) - 1],
}
EACH = [(name, i) for name, spellings in SPELLINGS.items() for i in range(len(spellings))]


class GatedMLP(nn.Module):
    """``(act(x @ gate) * (x @ up))``, in either order."""

    def __init__(self, act: Callable, size: int = 16, dtype: torch.dtype = BF16, swapped: bool = False) -> None:
        super().__init__()
        self.act, self.swapped = act, swapped
        self.gate = nn.Parameter(tensor(32, size, dtype=dtype, seed=1, scale=0.5))
        self.up = nn.Parameter(tensor(32, size, dtype=dtype, seed=2, scale=0.5))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.act(F.linear(x, self.gate)), F.linear(x, self.up)
        return up * gate if self.swapped else gate * up


@pytest.mark.parametrize(("name", "number"), EACH)
def test_every_spelling_of_an_activation(name: str, number: int, tracing: ModuleType) -> None:
    model = GatedMLP(SPELLINGS[name][number], swapped=bool(number % 2))
    x = tensor(2, 3, 16)
    found = traced(tracing, model, x)
    assert gated(found.report) == [name] and found.report.counts["swiglu"] == 1
    assert not reasons(found.report)
    bound = the_site(found.report).bound
    assert (bound["alpha"], bound["scale"], bound["out_dtype"]) == ("1.0", "1.0", str(BF16))
    tracing.assert_as_good_as_eager(found.result, model, x)


@pytest.mark.parametrize("dtype", [F16, F32, F64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_types(name: str, dtype: torch.dtype, tracing: ModuleType) -> None:
    model = GatedMLP(SPELLINGS[name][0], dtype=dtype)
    x = tensor(2, 3, 16, dtype=dtype)
    found = traced(tracing, model, x)
    assert gated(found.report) == [name]
    tracing.assert_as_good_as_eager(found.result, model, x)


SCALED: dict[str, tuple[Callable, str, float, float]] = {
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), "silu", 1.702, 1.0),
    "gpt-oss": (lambda x: x * torch.sigmoid(x * 1.702), "silu", 1.702, 1.0),
    "a steep one": (lambda x: x / (1 + torch.exp(-4.5 * x)), "silu", 4.5, 1.0),
    "doubled": (lambda x: 2 * F.silu(x), "silu", 1.0, 2.0),
    "halved behind the cast": (lambda x: F.silu(x.float()).bfloat16() / 4, "silu", 1.0, 0.25),
    "negative": (lambda x: -F.gelu(x), "gelu", 1.0, -1.0),
    "sigmoid of twice": (lambda x: 2 * torch.sigmoid(2 * x), "sigmoid", 2.0, 2.0),
}


@pytest.mark.parametrize(("act", "name", "alpha", "scale"), SCALED.values(), ids=SCALED)
def test_alpha_and_scale(act: Callable, name: str, alpha: float, scale: float, tracing: ModuleType) -> None:
    model, x = GatedMLP(act), tensor(2, 3, 16)
    found = traced(tracing, model, x)
    assert gated(found.report) == [name]
    bound = the_site(found.report).bound
    assert (float(bound["alpha"]), float(bound["scale"])) == (alpha, scale)
    tracing.assert_as_good_as_eager(found.result, model, x)


# ---------------------------------------------------------------------------------------------------- rounding points

ROUNDING: dict[str, tuple[Callable, torch.dtype, torch.dtype, torch.dtype, torch.dtype]] = {
    # name: (model, types of gate and up, type that the activation is rounded to, type of the result)
    "bf16": (lambda g, u: F.silu(g) * u, BF16, BF16, BF16, BF16),
    "activation kept in float32": (lambda g, u: u.float() * F.silu(g.float()), BF16, BF16, F32, F32),
    "product rounded": (lambda g, u: (u * F.silu(g.float())).to(u.dtype), BF16, BF16, F32, BF16),
    "float32 stream": (lambda g, u: (u * F.silu(g)).to(g.dtype), BF16, F32, BF16, BF16),
    "float32 gate, short activation": (lambda g, u: F.silu(g).to(u.dtype) * u, F32, BF16, BF16, BF16),
    "rounded and widened": (lambda g, u: F.silu(g).float() * u, BF16, F32, BF16, F32),
    "both widened behind the rounding": (lambda g, u: F.silu(g).float() * u.float(), BF16, BF16, BF16, F32),
    "widened one by one": (lambda g, u: F.gelu(g).double() * u.float(), BF16, BF16, BF16, F64),
    "float16 times bf16": (lambda g, u: F.silu(g) * u, F16, BF16, F16, F32),
    "widened twice": (lambda g, u: F.silu(g.float().double()).float() * u, BF16, F32, F32, F32),
    "widened, then stored": (lambda g, u: (F.silu(g) * u).float(), BF16, BF16, BF16, BF16),
}


@pytest.mark.parametrize(("model", "gate", "up", "act_dtype", "out_dtype"), ROUNDING.values(), ids=ROUNDING)
def test_rounding_points(
    model: Callable,
    gate: torch.dtype,
    up: torch.dtype,
    act_dtype: torch.dtype,
    out_dtype: torch.dtype,
    tracing: ModuleType,
) -> None:
    args = tensor(2, 3, 16, dtype=gate), tensor(2, 3, 16, dtype=up, seed=1)
    found = traced(tracing, model, *args)
    assert len(gated(found.report)) == 1 and not reasons(found.report)
    bound = the_site(found.report).bound
    assert (bound["act_dtype"], bound["out_dtype"]) == (str(act_dtype), str(out_dtype))
    tracing.assert_as_good_as_eager(found.result, model, *args)


def test_the_graph_before_and_after(tracing: ModuleType) -> None:
    found = traced(tracing, lambda g, u: F.silu(g) * u, tensor(2, 3, 16), tensor(2, 3, 16, seed=1))
    assert_expected_inline(
        found.before,
        """\
%0 = input : bf16[2, 3, 16]
%1 = input : bf16[2, 3, 16]
%2 = prims.convert_element_type.default(%0, f32) : f32[2, 3, 16]
%3 = aten.neg.default(%2) : f32[2, 3, 16]
%4 = aten.exp.default(%3) : f32[2, 3, 16]
%5 = aten.add.Tensor(%4, 1) : f32[2, 3, 16]
%6 = aten.div.Tensor(%2, %5) : f32[2, 3, 16]
%7 = prims.convert_element_type.default(%6, bf16) : bf16[2, 3, 16]
%8 = aten.mul.Tensor(%7, %1) : bf16[2, 3, 16]
return (%8,)
""",
    )
    assert_expected_inline(
        found.after,
        """\
%0 = input : bf16[2, 3, 16]
%1 = input : bf16[2, 3, 16]
%2 = portable_ops.swiglu.default(gate=%0, up=%1, activation=silu, alpha=1.0, scale=1.0,
    up_offset=0.0, act_dtype=bf16, out_dtype=bf16) : bf16[2, 3, 16]
return (%2,)
""",
    )


# ------------------------------------------------------------------------------------------------- clamps and offsets


class GptOss(nn.Module):
    def __init__(self, limit: float = 0.7, alpha: float = 1.702) -> None:
        super().__init__()
        self.limit, self.alpha = limit, alpha

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_gpt_oss(dtype: torch.dtype, tracing: ModuleType) -> None:
    x = tensor(2, 3, 32, dtype=dtype)
    found = traced(tracing, GptOss(), x)
    assert gated(found.report) == ["silu"] and not reasons(found.report)
    bound = the_site(found.report).bound
    expected = {"alpha": 1.702, "gate_max": 0.7, "up_min": -0.7, "up_max": 0.7, "up_offset": 1.0}
    assert {k: float(bound[k]) for k in expected} == expected and "gate_min" not in bound
    assert "clamp" not in found.after and "aten.add" not in found.after
    tracing.assert_as_good_as_eager(found.result, GptOss(), x)


LIMITS: dict[str, tuple[Callable, dict[str, float]]] = {
    "deepseek": (
        lambda g, u: F.silu(g.clamp(max=1.0)) * u.clamp(-1.0, 1.0),
        {"gate_max": 1.0, "up_min": -1.0, "up_max": 1.0},
    ),
    "clamped activation": (lambda g, u: F.silu(g).clamp(max=0.5) * u, {"act_max": 0.5}),
    "clamped, then rounded": (lambda g, u: F.silu(g.float()).clamp(max=0.3).to(u.dtype) * u, {"act_max": 0.3}),
    "clamped in float32 only": (lambda g, u: u * F.gelu(g.float()).clamp(-0.1, 0.3), {"act_min": -0.1, "act_max": 0.3}),
    "clamped below": (lambda g, u: u.clamp_min(-0.3) * F.gelu(g.clamp_min(-0.3)), {"gate_min": -0.3, "up_min": -0.3}),
    "hardtanh": (lambda g, u: F.silu(F.hardtanh(g)) * F.hardtanh(u, -0.5, 0.5), {"gate_min": -1, "up_max": 0.5}),
    "one clamp after another": (lambda g, u: F.silu(g.clamp(max=2.0).clamp(-1.0, 1.0)) * u, {"gate_max": 1.0}),
    "minimum of a constant": (
        lambda g, u: F.silu(torch.minimum(g, torch.full((), 1.0, dtype=g.dtype))) * u,
        {"gate_max": 1.0},
    ),
    "clamped in float32": (lambda g, u: (F.silu(g.float().clamp(max=0.7)) * u).to(u.dtype), {"gate_max": 0.7}),
    "offset": (lambda g, u: F.silu(g) * (u + 0.5), {"up_offset": 0.5}),
    "offset in front": (lambda g, u: (1 + u) * F.silu(g), {"up_offset": 1.0}),
    "scaled offset is no offset": (lambda g, u: F.silu(g) * torch.add(u, 1, alpha=2), {"up_offset": 0.0}),
    "clamp behind the offset": (lambda g, u: F.silu(g) * (u + 1).clamp(max=0.5), {"up_offset": 0.0, "up_max": 0.5}),
}


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("model", "expected"), LIMITS.values(), ids=LIMITS)
def test_clamps_and_offsets(model: Callable, expected: dict, dtype: torch.dtype, tracing: ModuleType) -> None:
    args = tensor(2, 3, 16, dtype=dtype), tensor(2, 3, 16, dtype=dtype, seed=1)
    found = traced(tracing, model, *args)
    assert len(gated(found.report)) == 1
    bound = the_site(found.report).bound
    assert {k: float(bound[k]) for k in expected} == expected
    tracing.assert_as_good_as_eager(found.result, model, *args)


def test_a_limit_that_varies_stays_outside(tracing: ModuleType) -> None:
    def model(g: Tensor, u: Tensor, limit: Tensor) -> Tensor:
        return F.silu(torch.minimum(g, limit)) * u

    args = tensor(2, 3, 16), tensor(2, 3, 16, seed=1), torch.tensor(0.5, dtype=BF16)
    found = traced(tracing, model, *args)
    assert gated(found.report) == ["silu"] and "aten.minimum" in found.after
    tracing.assert_as_good_as_eager(found.result, model, *args)


def test_an_offset_of_more_rows_stays_outside(tracing: ModuleType) -> None:
    def model(g: Tensor, u: Tensor) -> Tensor:
        return F.silu(g) * (u + torch.ones(4, 1))

    g, u = tensor(4, 8, dtype=F32), tensor(8, dtype=F32, seed=1)
    found = traced(tracing, model, g, u)
    assert the_site(found.report).bound["up_offset"] == "0.0"
    tracing.assert_as_good_as_eager(found.result, model, g, u)


def test_a_product_grouped_the_other_way(tracing: ModuleType) -> None:
    for model in (
        lambda g, u: g * u * torch.sigmoid(g),
        lambda g, u: torch.sigmoid(g) * (u * g),
        lambda g, u: u * g * torch.sigmoid(1.5 * g),
    ):
        args = tensor(2, 3, 16), tensor(2, 3, 16, seed=1)
        found = traced(tracing, model, *args)
        assert gated(found.report) == ["silu"] and not reasons(found.report)
        tracing.assert_as_good_as_eager(found.result, model, *args)


# ------------------------------------------------------------------------------------------ where gate and up come from


def split_halves(x: Tensor, w: Tensor) -> Tensor:
    gate, up = torch.split(x @ w, w.shape[-1] // 2, dim=-1)
    return F.silu(gate) * up


def chunked_the_other_way(x: Tensor, w: Tensor) -> Tensor:
    up, gate = (x @ w).chunk(2, dim=-1)
    return up * F.silu(gate)


def sliced(x: Tensor, w: Tensor) -> Tensor:
    packed, half = x @ w, w.shape[-1] // 2
    return torch.sigmoid(packed[..., half:]) * packed[..., :half]


def strided(x: Tensor, w: Tensor) -> Tensor:
    packed = x @ w
    return F.gelu(packed[..., ::2]) * packed[..., 1::2]


def unbound(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w).unflatten(-1, (2, -1)).unbind(-2)
    return F.relu(gate) * up


def indexed(x: Tensor, w: Tensor) -> Tensor:
    packed = (x @ w).view(*x.shape[:-1], 2, -1)
    return torch.tanh(packed[..., 0, :]) * packed[..., 1, :]


def with_bias(x: Tensor, w: Tensor) -> Tensor:
    gate, up = F.linear(x, w.mT, w[0]).chunk(2, -1)
    return torch.sigmoid(gate) * up


def functional_glu(x: Tensor, w: Tensor) -> Tensor:
    return F.glu(x @ w)


def batched_experts(x: Tensor, w: Tensor) -> Tensor:
    weights = torch.stack([w, 2 * w])
    gate, up = torch.bmm(x.expand(2, *x.shape[-2:]), weights).chunk(2, -1)
    return F.silu(gate) * up


def batched_experts_with_bias(x: Tensor, w: Tensor) -> Tensor:
    weights = torch.stack([w, 2 * w])
    packed = torch.baddbmm(w[:1], x.expand(2, *x.shape[-2:]), weights)
    return F.relu(packed[..., ::2]).square() * packed[..., 1::2]


def two_batched_products(x: Tensor, w: Tensor) -> Tensor:
    weights, tokens = torch.stack([w, 2 * w]), x.expand(2, *x.shape[-2:])
    return F.relu(tokens @ weights) * (tokens @ weights.flip(0))


def viewed_in_between(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w).chunk(2, -1)
    return F.silu(gate).reshape(-1, 2, 4) * up.reshape(-1, 2, 4)


def transposed_in_between(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w).chunk(2, -1)
    return F.gelu(gate).transpose(1, 2) * up.transpose(1, 2).contiguous()


def transposed_around(x: Tensor, w: Tensor) -> Tensor:  # Mamba's
    gate, up = (x @ w).transpose(1, 2).chunk(2, dim=1)
    return F.silu(gate) * up


def activated_before_the_split(x: Tensor, w: Tensor) -> Tensor:
    packed, half = x @ w, w.shape[-1] // 2
    return F.silu(packed)[..., :half] * packed[..., half:]


def expanded_in_between(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w).chunk(2, -1)
    return F.silu(gate[:, :1]).expand_as(up) * up


SOURCES = [
    *(split_halves, chunked_the_other_way, sliced, strided, unbound, indexed, with_bias, functional_glu),
    *(batched_experts, batched_experts_with_bias, two_batched_products, viewed_in_between, transposed_in_between),
    *(transposed_around, activated_before_the_split, expanded_in_between),
]


@pytest.mark.parametrize("model", SOURCES)
def test_where_gate_and_up_come_from(model: Callable, tracing: ModuleType) -> None:
    args = tensor(1, 3, 16), tensor(16, 16, seed=1, scale=0.3)
    found = traced(tracing, model, *args)
    assert len(gated(found.report)) == found.report.counts["swiglu"] == 1 and not reasons(found.report)
    tracing.assert_as_good_as_eager(found.result, model, *args)


def test_experts_in_a_grouped_product(tracing: ModuleType) -> None:
    def model(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        gate, up = torch._grouped_mm(x, w, offs=ends).chunk(2, -1)
        return torch.sigmoid(gate) * up

    args = tensor(8, 16), tensor(2, 16, 32, seed=1), torch.tensor([3, 8], dtype=torch.int32)
    assert explain_counts(model, *args)["swiglu"] == 1


def explain_counts(model: Callable, *args: Tensor, grad: bool = False, **options: object) -> dict:
    with torch.set_grad_enabled(grad):
        return explain(model, **options)(*args).counts


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0)])
def test_the_result_lies_in_memory_as_in_eager(order: tuple[int, ...], tracing: ModuleType) -> None:
    def model(g: Tensor, u: Tensor) -> Tensor:
        return F.silu(g.permute(order)) * u.permute(order)

    args = tensor(2, 3, 16), tensor(2, 3, 16, seed=1)
    found = traced(tracing, model, *args)
    assert gated(found.report) == ["silu"]
    tracing.assert_as_good_as_eager(found.result, model, *args)


# -------------------------------------------------------------------------------------- with the layers in front of it


class Layers(nn.Module):
    """A gated MLP of a decoder: ``combine`` makes of the input and the weights what ``down`` would read."""

    def __init__(self, combine: Callable, *weights: Tensor, columns: int = 64, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.combine = combine
        weights = weights or tuple(tensor(96, columns, dtype=dtype, seed=i, scale=columns**-0.5) for i in (1, 2))
        self.weights = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(x, *self.weights)


def swiglu_mlp(x: Tensor, g: Tensor, u: Tensor) -> Tensor:
    return F.silu(F.linear(x, g)) * F.linear(x, u)


def forms(report: Report) -> list[str]:
    """The patterns of the gated activations and linear layers that were rewritten."""
    return [s.pattern for s in report.sites if s.kind in ("swiglu", "linear") and s.decision == "rewritten"]


FUSED: dict[str, Callable] = {
    "silu": swiglu_mlp,
    "by hand": lambda x, g, u: F.linear(x, u) * ((h := F.linear(x, g)) / (1 + torch.exp(-h))),
    "regrouped": lambda x, g, u: torch.sigmoid(h := F.linear(x, g)) * (h * F.linear(x, u)),
    "geglu": lambda x, g, u: F.gelu(F.linear(x, g)) * F.linear(x, u),
    "geglu, tanh": lambda x, g, u: F.linear(x, u) * F.gelu(F.linear(x, g), approximate="tanh"),
    "reglu": lambda x, g, u: F.relu(F.linear(x, g)) * F.linear(x, u),
    "relu2": lambda x, g, u: F.relu(F.linear(x, g)).square() * F.linear(x, u),
    "glu": lambda x, g, u: torch.sigmoid(F.linear(x, g)) * F.linear(x, u),
    "quick gelu": lambda x, g, u: (h := F.linear(x, g)) * torch.sigmoid(1.702 * h) * F.linear(x, u),
    "activation in float32": lambda x, g, u: F.silu(F.linear(x, g).float()).to(x.dtype) * F.linear(x, u),
    "product in float32": lambda x, g, u: (F.silu(F.linear(x, g).float()) * F.linear(x, u)).to(x.dtype),
    "result in float32": lambda x, g, u: F.silu(F.linear(x, g).float()) * F.linear(x, u),
    "one weight": lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, g),
    "unsqueezed": lambda x, g, u: F.silu(F.linear(r := x[:, 0], g).unsqueeze(1)) * F.linear(r, u).unsqueeze(1),
    "viewed apart": lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x.reshape(-1, 64), u).view(*x.shape[:-1], -1),
    "transposed weights": lambda x, g, u: F.silu(x @ g.T) * (x @ u.mT),
}


@pytest.mark.parametrize("batch", [(1, 1), (4, 1), (2, 8)], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_layers_of_few_rows_go_with_their_gate(name: str, batch: tuple[int, int], tracing: ModuleType) -> None:
    model, x = Layers(FUSED[name]), tensor(*batch, 64)
    if name == "unsqueezed":
        x = x.view(-1, 1, 64)
    found = traced(tracing, model, x)
    assert forms(found.report) == ["gated_linear"] and len(found.report.sites) == 1
    assert the_site(found.report).variant == "portable.stream"
    assert "aten.mm" not in found.after and found.after.count("portable_ops") == 1
    tracing.assert_as_good_as_eager(found.result, model, x)


def test_layers_in_the_graph_before_and_after(tracing: ModuleType) -> None:
    found = traced(tracing, Layers(swiglu_mlp), tensor(4, 1, 64))
    assert_expected_inline(
        found.before,
        """\
%0 = input : bf16[96, 64]
%1 = input : bf16[96, 64]
%2 = input : bf16[4, 1, 64]
%3 = aten.permute.default(%0, [1, 0]) : bf16[64, 96] strides [1, 64]
%4 = aten.view.default(%2, [4, 64]) : bf16[4, 64]
%5 = aten.mm.default(%4, %3) : bf16[4, 96]
%6 = aten.view.default(%5, [4, 1, 96]) : bf16[4, 1, 96]
%7 = prims.convert_element_type.default(%6, f32) : f32[4, 1, 96]
%8 = aten.neg.default(%7) : f32[4, 1, 96]
%9 = aten.exp.default(%8) : f32[4, 1, 96]
%10 = aten.add.Tensor(%9, 1) : f32[4, 1, 96]
%11 = aten.div.Tensor(%7, %10) : f32[4, 1, 96]
%12 = prims.convert_element_type.default(%11, bf16) : bf16[4, 1, 96]
%13 = aten.permute.default(%1, [1, 0]) : bf16[64, 96] strides [1, 64]
%14 = aten.view.default(%2, [4, 64]) : bf16[4, 64]
%15 = aten.mm.default(%14, %13) : bf16[4, 96]
%16 = aten.view.default(%15, [4, 1, 96]) : bf16[4, 1, 96]
%17 = aten.mul.Tensor(%12, %16) : bf16[4, 1, 96]
return (%17,)
""",
    )
    assert_expected_inline(
        found.after,
        """\
%0 = input : bf16[96, 64]
%1 = input : bf16[96, 64]
%2 = input : bf16[4, 1, 64]
%3 = aten.view.default(%2, [4, 64]) : bf16[4, 64]
%4 = portable_ops.gated_linear.default(x=%3, gate_weight=%0, up_weight=%1, activation=silu,
    alpha=1.0, act_dtype=bf16, out_dtype=bf16) : bf16[4, 96]
%5 = aten.view.default(%4, [4, 1, 96]) : bf16[4, 1, 96]
return (%5,)
""",
    )


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("name", "number"), [e for e in EACH if e[0] in TILE_ACTIVATIONS][::2])
def test_every_spelling_goes_with_its_layers(name: str, number: int, dtype: torch.dtype, tracing: ModuleType) -> None:
    act = SPELLINGS[name][number]
    model = Layers(lambda x, g, u: F.linear(x, u) * act(F.linear(x, g)), dtype=dtype)
    x = tensor(3, 1, 64, dtype=dtype)
    found = traced(tracing, model, x)
    expected = "swiglu" if (name, number) == ("silu", 2) else "gated_linear"  # of a copy of the product
    assert forms(found.report)[0] == expected and gated(found.report) == [name]
    tracing.assert_as_good_as_eager(found.result, model, x)


def also_read(x: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    gate = F.linear(x, g)
    return F.silu(gate) * F.linear(x, u), gate.sum(-1)


def up_also_read(x: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    up = F.linear(x, u)
    return F.silu(F.linear(x, g)) * up, up + 1


def gates_two(x: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    act = F.silu(F.linear(x, g))
    return act * F.linear(x, u), act * F.linear(x.sin(), u)


APART: dict[str, tuple[Callable, list[str]]] = {
    # name: (model, what is rewritten)
    "tanh": (lambda x, g, u: torch.tanh(F.linear(x, g)) * F.linear(x, u), ["swiglu", "linear", "linear"]),
    "clamped gate": (
        lambda x, g, u: F.silu(F.linear(x, g).clamp(max=0.5)) * F.linear(x, u),
        ["swiglu", "linear", "linear"],
    ),
    "clamped up": (
        lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u).clamp(-0.5, 0.5),
        ["swiglu", "linear", "linear"],
    ),
    "clamped activation": (
        lambda x, g, u: F.silu(F.linear(x, g)).clamp(max=0.5) * F.linear(x, u),
        ["swiglu", "linear", "linear"],
    ),
    "scaled": (lambda x, g, u: 2 * F.silu(F.linear(x, g)) * F.linear(x, u), ["swiglu", "linear", "linear"]),
    "offset": (lambda x, g, u: F.silu(F.linear(x, g)) * (F.linear(x, u) + 1), ["swiglu", "linear", "linear"]),
    "two inputs": (lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x.sin(), u), ["swiglu", "linear", "linear"]),
    "the gate is read elsewhere": (also_read, ["swiglu", "linear", "linear"]),
    "up is read elsewhere": (up_also_read, ["swiglu", "linear", "linear"]),
    "packed": (
        lambda x, g, u: F.silu((p := F.linear(x, g)).chunk(2, -1)[0]) * p.chunk(2, -1)[1],
        ["swiglu", "linear"],
    ),
    "a bias": (
        lambda x, g, u: F.silu(F.linear(x, g, g[0, :1].expand(96).contiguous())) * F.linear(x, u),
        ["swiglu", "linear"],
    ),
    "columns regrouped": (
        lambda x, g, u: F.silu(F.linear(x, g).unflatten(-1, (2, -1))) * F.linear(x, u).unflatten(-1, (2, -1)),
        ["swiglu", "linear", "linear"],
    ),
    "transposed behind": (
        lambda x, g, u: F.silu(F.linear(x, g).transpose(0, 1)) * F.linear(x, u).transpose(0, 1),
        ["swiglu", "linear", "linear"],
    ),
    "a computed weight": (lambda x, g, u: F.silu(F.linear(x, g + 1)) * F.linear(x, u), ["swiglu", "linear"]),
    "columns first": (lambda x, g, u: F.silu(x @ g.view(64, 96)) * (x @ u.view(64, 96)), ["swiglu"]),
}


@pytest.mark.parametrize("name", APART)
def test_layers_that_stay_apart_from_their_gate(name: str, tracing: ModuleType) -> None:
    (combine, expected), x = APART[name], tensor(4, 1, 64)
    model = Layers(combine)
    found = traced(tracing, model, x)
    assert forms(found.report) == expected
    tracing.assert_as_good_as_eager(found.result, model, x)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "expected"),
    [
        (MAX_ROWS + 1, 64, BF16, ["swiglu"]),
        (4, 64, F32, ["swiglu"]),
        (4, 40, BF16, ["swiglu"]),
        (4, 64, F16, ["gated_linear"]),
    ],
    ids=["17 rows", "float32", "odd columns", "float16"],
)
def test_what_no_kernel_takes_leaves_the_gate(
    rows: int, columns: int, dtype: torch.dtype, expected: list[str], tracing: ModuleType
) -> None:
    """Where the larger form is declined the smaller one is tried."""
    model, x = Layers(swiglu_mlp, columns=columns, dtype=dtype), tensor(rows, 1, columns, dtype=dtype)
    found = traced(tracing, model, x)
    assert forms(found.report) == expected and found.report.counts["swiglu"] == 1
    tracing.assert_as_good_as_eager(found.result, model, x)


def test_a_declined_gate_leaves_its_layers(tracing: ModuleType) -> None:
    """Its report has the reason of the form that has a kernel."""
    model, x = Layers(swiglu_mlp), tensor(4, 1, 64)
    found = traced(tracing, model, x, gate="table", target="gfx942")
    reason = "no measurement on gfx942 says that it pays here (gate=measure takes one)"
    declined = [(s.pattern, s.reason) for s in found.report.declined]
    assert declined == [(name, reason) for name in ("gated_linear", "linear", "linear")]
    assert found.after == found.before
    found = traced(tracing, model, x, disable=("swiglu",))
    assert forms(found.report) == ["linear", "linear"]
    assert [(s.pattern, s.reason) for s in found.report.declined] == [("gated_linear", "swiglu is disabled")]


def test_an_activation_that_two_products_read(tracing: ModuleType) -> None:
    model, x = Layers(gates_two), tensor(4, 1, 64)
    found = traced(tracing, model, x)
    assert forms(found.report) == ["gated_linear", "swiglu", "linear", "linear"]
    tracing.assert_as_good_as_eager(found.result, model, x)
    declined = traced(tracing, model, x, gate="table").report.declined
    twice = "an inner value has other users, so its work would be done twice"
    assert [s.reason for s in declined if s.pattern == "gated_linear"] == [twice]


def test_a_symbolic_batch_keeps_the_layers(tracing: ModuleType) -> None:
    model, x = Layers(swiglu_mlp), tensor(4, 1, 64)
    torch._dynamo.mark_dynamic(x, 0)
    found = traced(tracing, model, x)
    assert forms(found.report) == ["swiglu"] and len(found.report.sites) == 1


def test_a_training_graph_keeps_the_layers(tracing: ModuleType) -> None:
    """Backward reads both products."""
    model, x = Layers(swiglu_mlp), tensor(4, 1, 64).requires_grad_()
    found = traced(tracing, model, x, grad=True)
    assert forms(found.report)[0] == "swiglu" and "gated_linear" not in found.after


def test_the_bits_of_a_product_as_another_type(tracing: ModuleType) -> None:
    def model(x: Tensor, g: Tensor, u: Tensor) -> Tensor:
        return F.silu(F.linear(x, g).view(F16).float()) * F.linear(x, u).view(F16)

    args = tensor(4, 64), tensor(96, 64, seed=1, scale=0.1), tensor(96, 64, seed=2, scale=0.1)
    found = traced(tracing, model, *args)
    assert forms(found.report) == ["swiglu", "linear", "linear"]
    torch.testing.assert_close(found.result, model(*args))


# ---------------------------------------------------------------------------------------------------- what is no gate


def se_block(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.sigmoid(F.linear(x.mean(1, keepdim=True), w))


def token_gate(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(x, w[:1])) * F.linear(x, w)


def silu_of_each_row(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.linear(x[:, :1], w)) * x


def attention_gate(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (F.linear(x, i * w).unflatten(-1, (2, 8)).transpose(1, 2) for i in (1, 2, 3))
    attended = (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)
    return torch.sigmoid(F.linear(x, w)) * attended


def lstm_cell(x: Tensor, w: Tensor) -> Tensor:
    i, g = F.linear(x, w), F.linear(x, w + 1)
    return torch.sigmoid(i) * torch.tanh(g)


def gru_update(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(x, w)) * x


def highway(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(x, w)) * F.relu(F.linear(x, w + 1))


def products_of_two_tensors(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(x, w)) * F.linear(x.flip(1), w + 1)


def gated_convolution(x: Tensor, w: Tensor) -> Tensor:
    return F.glu(F.conv1d(x.mT, w[:, :, None]), dim=1)


def squared_silu(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(x) * x


def gelu_times_its_argument(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh") * (2 * x + 1)


def silu_times_its_sigmoid(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(x) * torch.sigmoid(x)


def softplus_gate(x: Tensor, w: Tensor) -> Tensor:
    return F.softplus(F.linear(x, w)) * F.linear(x, w + 1)


def mish_gate(x: Tensor, w: Tensor) -> Tensor:
    return F.mish(F.linear(x, w)) * F.linear(x, w + 1)


def leaky_gate(x: Tensor, w: Tensor) -> Tensor:
    return F.leaky_relu(F.linear(x, w)) * F.linear(x, w + 1)


def gelu_with_a_constant_of_its_own(x: Tensor, w: Tensor) -> Tensor:
    g = F.linear(x, w)
    return 0.5 * g * (1 + torch.tanh(0.8 * (g + 0.044715 * g**3))) * F.linear(x, w + 1)


def shifted_silu(x: Tensor, w: Tensor) -> Tensor:
    g = F.linear(x, w)
    return g / (2 + torch.exp(-g)) * F.linear(x, w + 1)


def relu_without_nan(x: Tensor, w: Tensor) -> Tensor:
    g = F.linear(x, w)
    return torch.where(g > 0, g, 0.0) * F.linear(x, w + 1)


def threshold(x: Tensor, w: Tensor) -> Tensor:
    return F.threshold(F.linear(x, w), 5e-4, 0.0) * F.linear(x, w + 1)


def sigmoid_and_a_little(x: Tensor, w: Tensor) -> Tensor:
    return (torch.sigmoid(F.linear(x, w)) + 1e-8) * F.linear(x, w + 1)


def relu_where_it_is_not_zero(x: Tensor, w: Tensor) -> Tensor:
    g = F.relu(F.linear(x, w))
    return (g * g.bool()) * F.linear(x, w + 1)  # looks like relu(g)^2 if a cast to bool is taken for one that rounds


def all_but_infinite_gates(x: Tensor, w: Tensor) -> Tensor:
    g = F.linear(x, w)
    return (g * torch.sigmoid(g).bool()) * F.linear(x, w + 1)


def rounded_twice(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.linear(x, w)).half().bfloat16() * F.linear(x, w + 1)


def quantised(x: Tensor, w: Tensor) -> Tensor:
    return (F.silu(F.linear(x, w)) * 16).to(torch.int8).to(x.dtype) * F.linear(x, w + 1)


def rounded_inside(x: Tensor, w: Tensor) -> Tensor:
    g, u = x.float() @ w.float(), x.float() @ (w + 1).float()
    return (g * torch.sigmoid(g).bfloat16().float()) * u


BROADCAST = "the gate is broadcast: it scales whole rows or channels, as in squeeze-and-excitation"
ROUNDED = "the gate is rounded on its way to the product, to a type that holds other numbers"
UNKNOWN = f"the gate's activation is none of {', '.join(ACTIVATIONS)}"


def other(name: str) -> str:
    return f"{name} gates something else than a matrix product of the same operand: no gated MLP"


def own(name: str) -> str:
    return f"{name} multiplies a function of its own argument: an activation, not a gate"


NEGATIVES: list[tuple[Callable, str]] = [
    (se_block, BROADCAST),
    (token_gate, BROADCAST),
    (silu_of_each_row, BROADCAST),
    (attention_gate, other("sigmoid")),
    (lstm_cell, other("sigmoid")),
    (gru_update, other("sigmoid")),
    (highway, other("sigmoid")),
    (products_of_two_tensors, other("sigmoid")),
    (gated_convolution, other("sigmoid")),
    (squared_silu, own("silu")),
    (gelu_times_its_argument, own("gelu_tanh")),
    (silu_times_its_sigmoid, own("silu")),
    (softplus_gate, UNKNOWN),
    (mish_gate, UNKNOWN),
    (leaky_gate, UNKNOWN),
    (gelu_with_a_constant_of_its_own, UNKNOWN),
    (shifted_silu, UNKNOWN),
    (relu_without_nan, UNKNOWN),
    (threshold, UNKNOWN),
    (sigmoid_and_a_little, UNKNOWN),
    (rounded_twice, ROUNDED),
    (quantised, ROUNDED),
    (rounded_inside, "the gate's activation rounds to a shorter type than its argument has"),
]


@pytest.mark.parametrize(("model", "reason"), NEGATIVES, ids=[m.__name__ for m, _ in NEGATIVES])
def test_near_misses_are_declined_with_their_reason(model: Callable, reason: str, tracing: ModuleType) -> None:
    args = tensor(2, 4, 16), tensor(16, 16, seed=1, scale=0.3)
    found = traced(tracing, model, *args, enable=("swiglu",))
    assert found.report.counts.get("swiglu", 0) == 0
    assert reasons(found.report) == [reason]
    assert found.after == found.before


PLAIN: dict[str, Callable] = {
    "a function of booleans": relu_where_it_is_not_zero,
    "a function of booleans, of a sigmoid": all_but_infinite_gates,
    "an activation alone": lambda x, w: F.silu(F.linear(x, w)),
    "quick gelu alone": lambda x, w: x * torch.sigmoid(1.702 * x),
    "gelu alone": lambda x, w: F.gelu(F.linear(x, w), approximate="tanh"),
    "gelu by hand alone": lambda x, w: 0.5 * x * (1 + torch.tanh(SQRT_2_PI * (x + 0.044715 * torch.pow(x, 3)))),
    "scaled by a weight": lambda x, w: F.silu(x) * w[0],
    "scaled by a number": lambda x, w: F.gelu(x) * 0.5,
    "scaled by a 0-d tensor": lambda x, w: F.gelu(x) * w[0, 0],
    "a sum": lambda x, w: F.silu(F.linear(x, w)) + F.linear(x, w + 1),
    "a product without an activation": lambda x, w: F.linear(x, w) * F.linear(x, w + 1),
    "a mask": lambda x, w: F.silu(F.linear(x, w)) * (x > 0),
    "a quotient": lambda x, w: F.silu(F.linear(x, w)) / (F.linear(x, w) ** 2 + 1),
    "positions": lambda x, w: torch.cos(x) * F.linear(x, w),
}


@pytest.mark.parametrize("model", PLAIN.values(), ids=PLAIN)
def test_what_is_plainly_something_else(model: Callable, tracing: ModuleType) -> None:
    args = tensor(2, 4, 16), tensor(16, 16, seed=1, scale=0.3)
    found = traced(tracing, model, *args, enable=("swiglu",))
    assert not found.report.counts.get("swiglu", 0) and not reasons(found.report)
    assert found.after == found.before


# -------------------------------------------------------------------------------------- inference, training, dynamic


def test_recognised_and_left_alone_by_default(tracing: ModuleType) -> None:
    model, x = GatedMLP(F.silu), tensor(2, 9, 16)
    found = traced(tracing, model, x, gate="table")
    (site,) = found.report.sites
    assert (site.decision, site.reason) == ("declined", f"recognised; {SWIGLU.no_kernel}")
    assert found.after == found.before


@pytest.mark.parametrize(("name", "number"), EACH[::3])
def test_a_training_graph_has_as_many(name: str, number: int, tracing: ModuleType) -> None:
    model, x = GatedMLP(SPELLINGS[name][number], dtype=F32), tensor(2, 3, 16, dtype=F32).requires_grad_()
    assert explain_counts(model, x, grad=True)["swiglu"] == explain_counts(model, x)["swiglu"] == 1
    model.zero_grad()
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in (x, *model.parameters())]
    x.grad = None
    model.zero_grad()
    traced(tracing, model, x, grad=True).result.square().sum().backward()
    for ours, theirs in zip((x, *model.parameters()), expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-4, atol=1e-4)


def test_dropout_on_an_activation_is_no_gate() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16))
    report = explain(model, gate="always")(tensor(2, 3, 16, dtype=F32))
    assert report.counts.get("swiglu", 0) == 0 and not reasons(report)


@pytest.mark.parametrize("dynamic", [None, True])
def test_dynamic_sizes(dynamic: bool | None, tracing: ModuleType) -> None:
    model, x = GatedMLP(F.silu), tensor(4, 6, 16)
    if dynamic is None:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
    found = traced(tracing, model, x, dynamic=dynamic)
    assert gated(found.report) == ["silu"] and "s" in found.after
    tracing.assert_as_good_as_eager(found.result, model, x)


def test_dynamic_sizes_in_views(tracing: ModuleType) -> None:
    x, w = tensor(4, 6, 16), tensor(16, 16, seed=1)
    for model in (split_halves, strided, batched_experts, viewed_in_between, transposed_around, functional_glu):
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim) if model is not batched_experts else None
        found = traced(tracing, model, x if model is not batched_experts else x[:1], w)
        assert len(gated(found.report)) == 1, model


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_float_attribute_becomes_a_tensor(dtype: torch.dtype, tracing: ModuleType) -> None:
    model, x = GptOss(), tensor(2, 3, 32, dtype=dtype)
    found = traced(tracing, model, x, dynamic=True)
    assert gated(found.report) == ["silu"] and "alpha_tensor=%" in found.after
    tracing.assert_as_good_as_eager(found.result, model, x)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast(dtype: torch.dtype, tracing: ModuleType) -> None:
    model = GatedMLP(F.silu, dtype=F32)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return model(x)

    x = tensor(2, 3, 16, dtype=F32)
    found = traced(tracing, cast, x)
    assert gated(found.report) == ["silu"] and found.result.dtype == dtype
    torch.testing.assert_close(found.result, cast(x))


# ------------------------------------------------------------------------------------------- neighbours and mutation


def test_values_that_others_read_stay_alive(tracing: ModuleType) -> None:
    def model(g: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        act = F.silu(g)
        out = act * u
        return out, act, out.float(), act.sum(-1)

    args = tensor(2, 3, 16), tensor(2, 3, 16, seed=1)
    found = traced(tracing, model, *args)
    assert gated(found.report) == ["silu"] and "aten.exp" in found.after
    tracing.assert_as_good_as_eager(found.result, model, *args)


def test_detached_and_copied(tracing: ModuleType) -> None:
    def model(g: Tensor, u: Tensor) -> Tensor:
        return F.silu(g.detach()).clone().detach() * u.clone()

    args = tensor(2, 3, 16), tensor(2, 3, 16, seed=1)
    found = traced(tracing, model, *args)
    assert gated(found.report) == ["silu"]
    tracing.assert_as_good_as_eager(found.result, model, *args)


def test_mutation_between_the_pieces(tracing: ModuleType) -> None:
    def model(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        act = F.silu(g)
        g.add_(1)
        u.mul_(2)
        return act * u, F.silu(g) * u

    args = tensor(2, 3, 16), tensor(2, 3, 16, seed=1)
    expected = model(*(a.clone() for a in args))
    ours = [a.clone() for a in args]
    found = traced(tracing, model, *ours)
    assert gated(found.report) == ["silu", "silu"]
    torch.testing.assert_close(found.result, expected)
    torch.testing.assert_close(ours, [args[0] + 1, args[1] * 2])


def test_widened_and_cast_back_again(tracing: ModuleType) -> None:
    def model(g: Tensor, u: Tensor) -> Tensor:
        return F.gelu(g).float().to(g.dtype).float().to(g.dtype) * F.hardtanh(u)

    args = tensor(2, 3, 16), tensor(2, 3, 16, seed=1)
    found = traced(tracing, model, *args)
    assert gated(found.report) == ["gelu"] and the_site(found.report).bound["act_dtype"] == str(BF16)
    tracing.assert_as_good_as_eager(found.result, model, *args)


def test_copied_in_the_middle(tracing: ModuleType) -> None:
    def model(g: Tensor, u: Tensor) -> Tensor:
        return F.silu(g.float().clone(), inplace=True).to(g.dtype) * 0.5 * u

    args = tensor(2, 3, 16), tensor(2, 3, 16, seed=1)
    found = traced(tracing, model, *args)
    assert gated(found.report) == ["silu"] and the_site(found.report).bound["scale"] == "0.5"
    tracing.assert_as_good_as_eager(found.result, model, *args)


def test_two_gates_on_one_activation(tracing: ModuleType) -> None:
    def model(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        act = F.silu(g)
        return act * u, u.exp() * act

    args = tensor(2, 3, 16), tensor(2, 3, 16, seed=1)
    found = traced(tracing, model, *args)
    assert gated(found.report) == ["silu", "silu"]
    tracing.assert_as_good_as_eager(found.result, model, *args)


def test_an_activation_gated_by_an_activation(tracing: ModuleType) -> None:
    def model(g: Tensor, u: Tensor) -> Tensor:
        return torch.sigmoid(u) * F.silu(g)

    args = tensor(2, 3, 16), tensor(2, 3, 16, seed=1)
    found = traced(tracing, model, *args)
    assert gated(found.report) == ["silu"]
    tracing.assert_as_good_as_eager(found.result, model, *args)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_compiled(dtype: torch.dtype, tracing: ModuleType) -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return GptOss()(x @ w) + transposed_around(x, w).mT

    args = tensor(2, 3, 16, dtype=dtype), tensor(16, 16, dtype=dtype, seed=1, scale=0.3)
    torch._dynamo.reset()
    compiled = torch.compile(Block(), backend="portable_ops", options={"portable_ops.gate": "always"})
    with torch.no_grad():
        tracing.assert_as_good_as_eager(compiled(*args), Block(), *args)
    assert explain_counts(Block(), *args)["swiglu"] == 2


# -------------------------------------------------------------------------------------------------- random spellings


def no_view(t: Tensor) -> Tensor:
    return t


VIEWS = [
    no_view,
    lambda t: t.reshape(-1, t.shape[-1]).view(t.shape),
    lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    lambda t: t.unsqueeze(0).squeeze(0),
    lambda t: t.float().to(t.dtype),
    lambda t: t.detach() * 1,
]
CLAMPS = [no_view, lambda t: t.clamp(max=0.75), lambda t: t.clamp(-0.5, 0.5), lambda t: F.hardtanh(t)]
PACKINGS = [
    lambda p: p.chunk(2, -1),
    lambda p: (p[..., : p.shape[-1] // 2], p[..., p.shape[-1] // 2 :]),
    lambda p: (p[..., ::2], p[..., 1::2]),
    lambda p: p.unflatten(-1, (2, -1)).unbind(-2),
    lambda p: p.split(p.shape[-1] // 2, -1)[::-1],
]
examples = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
units = st.sampled_from([e for e in EACH if e[0] in ("silu", "gelu", "gelu_tanh")])


@examples
@given(
    which=st.sampled_from(EACH),
    pack=st.sampled_from(PACKINGS),
    views=st.lists(st.sampled_from(VIEWS), min_size=3, max_size=3),
    clamps=st.lists(st.sampled_from(CLAMPS), min_size=2, max_size=2),
    wide=st.booleans(),
    swapped=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    scale=st.sampled_from([1.0, 0.5, -2.0]),
    dtype=st.sampled_from([BF16, F16, F32]),
)
def test_random_spellings(which, pack, views, clamps, wide, swapped, offset, scale, dtype, tracing) -> None:
    act = SPELLINGS[which[0]][which[1]]

    def model(x: Tensor, w: Tensor) -> Tensor:
        gate, up = pack(x @ w)
        gate, up = clamps[0](views[0](gate)), clamps[1](views[1](up))
        a = act(gate.float()).to(dtype) if wide else act(gate)
        a = a * scale if scale != 1.0 else a
        u = up + offset if offset else up
        return u * views[2](a) if swapped else views[2](a) * u

    args = tensor(2, 3, 16, dtype=dtype), tensor(16, 16, dtype=dtype, seed=1, scale=0.3)
    found = traced(tracing, model, *args)
    assert gated(found.report) == [which[0]] and not reasons(found.report)
    tracing.assert_as_good_as_eager(found.result, model, *args)


@examples
@given(
    which=units,
    off=st.sampled_from([0.97, 1.01, 1.5]),
    spoiled=st.sampled_from(["argument", "shift", "power", "rounding", "own argument", "broadcast"]),
    swapped=st.booleans(),
)
def test_random_near_misses(which, off, spoiled, swapped, tracing) -> None:
    act = SPELLINGS[which[0]][which[1]]

    def model(x: Tensor, w: Tensor) -> Tensor:
        gate, up = (x @ w).chunk(2, -1)
        spoil = {
            "argument": lambda: act(gate) + (off - 1) * torch.tanh(gate) * gate,
            "shift": lambda: act(gate) + 0.1 * off,
            "power": lambda: act(gate) * act(gate) * act(gate),
            "rounding": lambda: act(gate).bfloat16().float() * torch.exp(gate * off),
            "own argument": lambda: act(gate) * (gate + off),
            "broadcast": lambda: act(gate[:, :1]),
        }
        up = torch.exp(gate * off) if spoiled == "own argument" else up
        return up * spoil[spoiled]() if swapped else spoil[spoiled]() * up

    args = tensor(2, 3, 16, dtype=F32), tensor(16, 16, dtype=F32, seed=1, scale=0.3)
    found = traced(tracing, model, *args)
    assert found.report.counts.get("swiglu", 0) == 0
    assert found.after == found.before


# ----------------------------------------------------------------------------------------------- operator and algebra


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_operator(name: str) -> None:
    def formula(g: Tensor, u: Tensor) -> Tensor:
        g = g.double().clamp(max=0.5)
        return (0.5 * SPELLINGS[name][0](g)).clamp(max=0.4) * (u.double().clamp(-1, 1) + 1)

    args = {"activation": name, "scale": 0.5, "gate_max": 0.5, "act_max": 0.4, "up_min": -1.0, "up_max": 1.0}
    for dtype in (BF16, F32, F64):
        g, u = tensor(2, 3, 4, dtype=dtype), tensor(2, 3, 4, dtype=dtype, seed=1)
        out = SWIGLU.op(g, u, **args, up_offset=1.0, act_dtype=F64, out_dtype=F64)
        # The sum is rounded in up's own type.
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, formula(g, u), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("order", [None, [1, 0, 2], [2, 1, 0]])
def test_the_operator_keeps_the_rules_of_torch(order: list[int] | None) -> None:
    kwargs = {"act_dtype": BF16, "out_dtype": BF16, "out_order": order}
    args = tensor(2, 3, 4), tensor(2, 3, 4, seed=1)
    torch.library.opcheck(SWIGLU.op, args, kwargs, test_utils=("test_schema", "test_faketensor"))
    out = SWIGLU.op(*args, **kwargs)
    strides = [out.stride(d) for d in order or range(3)]
    assert strides == sorted(strides, reverse=True) and out.is_contiguous() == (order is None)


def test_what_the_operator_refuses() -> None:
    g, kwargs = tensor(2, 3), {"act_dtype": BF16, "out_dtype": BF16}
    with pytest.raises(ValueError, match="activation='mish', expected one of silu"):
        swiglu_reference(g, g, activation="mish", **kwargs)
    target = named_target("sm_90")
    assert SWIGLU.supports(g, g, **kwargs, target=target) is None
    assert "'mish' is unknown" in SWIGLU.supports(g, g, activation="mish", **kwargs, target=target)
    assert "on meta" in SWIGLU.supports(g, g.to("meta"), **kwargs, target=target)


@pytest.mark.parametrize(
    ("strides", "order"),
    [
        ((12, 4, 1), (0, 1, 2)),
        ((1, 2, 6), (2, 1, 0)),
        ((4, 8, 1), (1, 0, 2)),
        ((1, 8, 2), (1, 2, 0)),
        ((0, 4, 1), (0, 1, 2)),  # not dense
    ],
)
def test_memory_order(strides: tuple[int, ...], order: tuple[int, ...]) -> None:
    assert algebra.memory_order(torch.empty_strided((2, 3, 4), strides, device="meta")) == order
