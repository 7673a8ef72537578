"""Linear layers of few rows: which products are taken, alone, as three or with a gate, and which are left alone."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from portable_ops.inductor_ext import Report, explain
from portable_ops.patterns import algebra
from portable_ops.patterns.linear import LINEAR_PATTERN, MOST_READERS
from torch import Tensor, fx, nn

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
HIDDEN, MIDDLE = 64, 96


def tensor(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(rows: int, columns: int = HIDDEN, dtype: torch.dtype = BF16, seed: int = 1) -> Tensor:
    return tensor(rows, columns, dtype=F32, seed=seed).div(columns**0.5).to(dtype)


def traced(tracing: ModuleType, model: Callable, *args: Tensor, grad: bool = False, **options: object):
    with torch.set_grad_enabled(grad):
        return tracing.trace(model, *args, **{"gate": "always", **options})


def sites(report: Report, decision: str = "rewritten") -> list[str]:
    """The patterns of the sites of a kind that this file is about."""
    return [s.pattern for s in report.sites if s.decision == decision and s.pattern.endswith("linear")]


def reasons(report: Report) -> list[str]:
    return [s.reason for s in report.declined if s.kind == "linear"]


# ---------------------------------------------------------------------------------------------------- a model's layers


def norm(x: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    """A decoder layer of Llama's, on one token of each sequence."""

    def __init__(self, act: Callable, dtype: torch.dtype, heads: int = 4, kv_heads: int = 1) -> None:
        super().__init__()
        self.act, self.heads, self.kv_heads, size = act, heads, kv_heads, HIDDEN // heads
        sizes = {
            "q": (HIDDEN, HIDDEN),
            "k": (kv_heads * size, HIDDEN),
            "v": (kv_heads * size, HIDDEN),
            "o": (HIDDEN, HIDDEN),
            "gate": (MIDDLE, HIDDEN),
            "up": (MIDDLE, HIDDEN),
            "down": (HIDDEN, MIDDLE),
        }
        for seed, (name, shape) in enumerate(sizes.items()):
            layer = nn.Linear(*shape[::-1], bias=False, dtype=dtype)
            layer.weight.data = weight(*shape, dtype, seed)
            setattr(self, name, layer)

    def forward(self, h: Tensor) -> Tensor:
        batch, length, _ = h.shape
        x = norm(h)
        q = self.q(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (p(x).view(batch, length, self.kv_heads, -1).transpose(1, 2) for p in (self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        h = h + self.o(attended.transpose(1, 2).reshape(batch, length, -1))
        x = norm(h)
        return h + self.down(self.act(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    def __init__(self, act: Callable = F.silu, dtype: torch.dtype = BF16, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(act, dtype) for _ in range(layers))
        self.lm_head = nn.Linear(HIDDEN, 112, bias=False, dtype=dtype)
        self.lm_head.weight.data = weight(112, dtype=dtype, seed=9)

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return self.lm_head(norm(h))


ACTS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("act", ACTS)
def test_a_decoding_step(act: str, rows: int, dtype: torch.dtype, tracing: ModuleType) -> None:
    model, h = Llama(ACTS[act], dtype), tensor(rows, 1, HIDDEN, dtype=dtype)
    found = traced(tracing, model, h)
    assert found.report.counts["linear"] == found.report.rewritten["linear"] == 2 * 3 + 1
    assert found.report.counts["swiglu"] == found.report.rewritten["swiglu"] == 2
    each = ["qkv_linear", "linear", "linear"]
    assert sorted(sites(found.report)) == sorted(["gated_linear"] * 2 + each * 2 + ["linear"])
    assert {s.bound["activation"] for s in found.report.sites if s.kind == "swiglu"} == {act}
    assert "aten.mm" not in found.after and found.after.count("portable_ops.gated_linear") == 2
    tracing.assert_as_good_as_eager(found.result, model, h)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_prompt_is_left_to_the_matrix_library(rows: int, tracing: ModuleType) -> None:
    """All but the head, which reads the last token of each sequence."""

    class Prompted(Llama):
        def forward(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                h = layer(h)
            return self.lm_head(norm(h)[:, -1:])

    model, h = Prompted(), tensor(rows, 20, HIDDEN)
    found = traced(tracing, model, h)
    assert sites(found.report) == ["linear"] and not reasons(found.report)
    assert [s.bound["out_features"] for s in found.report.sites if s.kind == "linear"] == ["112"]
    tracing.assert_as_good_as_eager(found.result, model, h)


def test_the_graph_before_and_after(tracing: ModuleType) -> None:
    def model(h: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
        q, k, v = (F.linear(h, w) for w in (q, k, v))
        return F.linear(q.sin() + k * v, o)

    args = tensor(4, 1, 64), weight(32), weight(32, seed=2), weight(32, seed=3), weight(48, 32, seed=4)
    found = traced(tracing, model, *args)
    assert_expected_inline(
        found.before,
        """\
%0 = input : bf16[4, 1, 64]
%1 = input : bf16[32, 64]
%2 = input : bf16[32, 64]
%3 = input : bf16[32, 64]
%4 = input : bf16[48, 32]
%5 = aten.permute.default(%1, [1, 0]) : bf16[64, 32] strides [1, 64]
%6 = aten.view.default(%0, [4, 64]) : bf16[4, 64]
%7 = aten.mm.default(%6, %5) : bf16[4, 32]
%8 = aten.view.default(%7, [4, 1, 32]) : bf16[4, 1, 32]
%9 = aten.permute.default(%2, [1, 0]) : bf16[64, 32] strides [1, 64]
%10 = aten.view.default(%0, [4, 64]) : bf16[4, 64]
%11 = aten.mm.default(%10, %9) : bf16[4, 32]
%12 = aten.view.default(%11, [4, 1, 32]) : bf16[4, 1, 32]
%13 = aten.permute.default(%3, [1, 0]) : bf16[64, 32] strides [1, 64]
%14 = aten.view.default(%0, [4, 64]) : bf16[4, 64]
%15 = aten.mm.default(%14, %13) : bf16[4, 32]
%16 = aten.view.default(%15, [4, 1, 32]) : bf16[4, 1, 32]
%17 = aten.sin.default(%8) : bf16[4, 1, 32]
%18 = aten.mul.Tensor(%12, %16) : bf16[4, 1, 32]
%19 = aten.add.Tensor(%17, %18) : bf16[4, 1, 32]
%20 = aten.permute.default(%4, [1, 0]) : bf16[32, 48] strides [1, 32]
%21 = aten.view.default(%19, [4, 32]) : bf16[4, 32]
%22 = aten.mm.default(%21, %20) : bf16[4, 48]
%23 = aten.view.default(%22, [4, 1, 48]) : bf16[4, 1, 48]
return (%23,)
""",
    )
    assert_expected_inline(
        found.after,
        """\
%0 = input : bf16[4, 1, 64]
%1 = input : bf16[32, 64]
%2 = input : bf16[32, 64]
%3 = input : bf16[32, 64]
%4 = input : bf16[48, 32]
%5 = aten.view.default(%0, [4, 64]) : bf16[4, 64]
%6 = portable_ops.qkv_linear.default(x=%5, q_weight=%1, k_weight=%2, v_weight=%3)
%7 = getitem(%6, 0) : bf16[4, 32]
%8 = getitem(%6, 1) : bf16[4, 32]
%9 = getitem(%6, 2) : bf16[4, 32]
%10 = aten.view.default(%7, [4, 1, 32]) : bf16[4, 1, 32]
%11 = aten.view.default(%8, [4, 1, 32]) : bf16[4, 1, 32]
%12 = aten.view.default(%9, [4, 1, 32]) : bf16[4, 1, 32]
%13 = aten.sin.default(%10) : bf16[4, 1, 32]
%14 = aten.mul.Tensor(%11, %12) : bf16[4, 1, 32]
%15 = aten.add.Tensor(%13, %14) : bf16[4, 1, 32]
%16 = aten.view.default(%15, [4, 32]) : bf16[4, 32]
%17 = portable_ops.linear.default(x=%16, weight=%4) : bf16[4, 48]
%18 = aten.view.default(%17, [4, 1, 48]) : bf16[4, 1, 48]
return (%18,)
""",
    )
    tracing.assert_as_good_as_eager(found.result, model, *args)


# ------------------------------------------------------------------------------------------------- which go together

X, W = tensor(4, 1, HIDDEN), weight(32)
A, B, C = (weight(n, seed=i) for i, n in enumerate((16, 48, 5), 2))
W_HALF, DOUBLE, TALL, BEHIND = W.half(), weight(16, 2 * HIDDEN), weight(16).T.contiguous(), weight(16, 32)
BITS = "one of three of other bits"


class Each(nn.Module):
    """Layers side by side: each a weight, or a function of the input and a weight."""

    def __init__(self, *layers: Tensor | tuple[Callable, Tensor]) -> None:
        super().__init__()
        pairs = [(F.linear, one) if isinstance(one, Tensor) else one for one in layers]
        self.layers = [function for function, _ in pairs]
        self.weights = nn.ParameterList(nn.Parameter(w, requires_grad=False) for _, w in pairs)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x, w) for layer, w in zip(self.layers, self.weights, strict=True))


class Behind(Each):
    """``rest`` beside layers that read what the first one gives."""

    def __init__(self, first: Tensor, *layers: Tensor, rest: tuple[Tensor, ...] = ()) -> None:
        super().__init__(*layers)
        self.first, self.rest = Each(first), Each(*rest)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (*self.rest(x), *super().forward(*self.first(x)))


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(W, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, w) for w in self.packed.split([16, 12, 4]))


TOGETHER: dict[str, tuple[nn.Module, list[str]]] = {
    "one": (Each(W), ["linear"]),
    "two": (Each(W, A), ["linear"] * 2),
    "three": (Each(W, A, B), ["qkv_linear"]),
    "four": (Each(W, A, B, C), ["qkv_linear", "linear"]),
    "seven": (Each(W, A, B, C, W, A, B), ["qkv_linear", "qkv_linear", "linear"]),
    "three of one weight": (Each(W, W, W), ["qkv_linear"]),
    "three, one behind other views": (
        Each(W, (lambda x, w: F.linear(x.unsqueeze(0).squeeze(2), w), A), B),
        ["qkv_linear"],
    ),
    "three that read a result": (Behind(W, BEHIND, BEHIND, BEHIND), ["linear", "qkv_linear"]),
    "three, one of them read by a fourth": (Behind(W, BEHIND, rest=(A, B)), ["qkv_linear", "linear"]),
    "three pieces of one weight": (Each(W[:16], W[16:31], W[31:]), ["qkv_linear"]),
    "three pieces cut in the graph": (Split(), ["qkv_linear"]),
    "three spellings": (
        Each((lambda x, w: x @ w.T, W), (lambda x, w: torch.matmul(x, w.mT), A), B),
        ["qkv_linear"],
    ),
    "one of three with a bias": (Each(W, (lambda x, w: F.linear(x, w, w[0, :16]), A), B), ["linear"] * 2),
    "a bias added behind": (Each((lambda x, w: F.linear(x, w) + w[:, 0], W)), ["linear"]),
    "one of three by columns": (Each(W, (lambda x, w: x @ w, TALL), B), ["linear"] * 2),
    "one of three computed": (Each(W, (lambda x, w: F.linear(x, w + 1), A), B), ["linear"] * 2),
    "one of three of another input": (Each(W, (lambda x, w: F.linear(x + 1, w), A), B), ["linear"] * 3),
    "one of three of other rows": (
        Each(W, (lambda x, w: F.linear(x.view(2, 2 * HIDDEN), w), DOUBLE), B),
        ["linear"] * 3,
    ),
    "one of three in another type": (Each(W, (lambda x, w: F.linear(x.half(), w), W_HALF), B), ["linear"] * 3),
    BITS: (Each(W, (lambda x, w: F.linear(x.view(F16), w), W_HALF), B), ["linear"] * 3),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_which_layers_go_together(name: str, tracing: ModuleType) -> None:
    model, expected = TOGETHER[name]
    found = traced(tracing, model, X)
    assert sites(found.report) == expected and not reasons(found.report)
    assert found.report.counts["linear"] == len(expected)
    if name == BITS:  # float64 has other bits
        torch.testing.assert_close(found.result, model(X))
    else:
        tracing.assert_as_good_as_eager(found.result, model, X)


def test_many_layers_of_one_input_are_taken_one_by_one(tracing: ModuleType) -> None:
    """So that the search does not grow with the square of their number."""
    for n, expected in ((MOST_READERS, MOST_READERS // 3), (MOST_READERS + 1, 0)):
        found = traced(tracing, Each(*[A] * n), X)
        assert sites(found.report).count("qkv_linear") == expected
        assert "aten.mm" not in found.after


def test_the_layers_of_a_declined_three_are_tried_alone(tracing: ModuleType) -> None:
    apart = weight(16, HIDDEN + 8)[:, :HIDDEN]
    for weights in ((apart, A, B), (A, apart, B), (A, B, apart), (A, apart, B, C)):
        found = traced(tracing, Each(*weights), X)
        assert sites(found.report) == ["linear"] * (len(weights) - 1)
        (reason,) = reasons(found.report)
        assert reason.endswith("weight has rows 72 elements apart, needs a multiple of 16")
        tracing.assert_as_good_as_eager(found.result, Each(*weights), X)


def test_a_limit_falls_between_the_three(tracing: ModuleType) -> None:
    apart = weight(16, HIDDEN + 8)[:, :HIDDEN]
    found = traced(tracing, Each(A, apart, B), X, max_rewrites=1)
    assert sites(found.report) == ["linear"]
    assert reasons(found.report) == [
        "weight has rows 72 elements apart, needs a multiple of 16",
        "max_rewrites=1 is reached",
    ]


# ------------------------------------------------------------------------------------------------------- what is none


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def reused(x: Tensor) -> Tensor:
    return F.linear(x, x.view(x.shape[0], -1))


SILENT: dict[str, tuple[Callable, tuple[Tensor, ...]]] = {
    "17 rows": (linear, (tensor(17, HIDDEN), W)),
    "a prompt": (linear, (tensor(2, 9, HIDDEN), W)),
    "a bias": (F.linear, (X, W, tensor(32))),
    "by columns": (lambda x, w: x @ w, (X, TALL)),
    "batched weights": (lambda x, w: torch.bmm(x, w), (tensor(4, 1, HIDDEN), tensor(4, HIDDEN, 8))),
    "scaled": (lambda x, w: F.linear(x, w * 2), (X, W)),
    "dequantised": (lambda x, w: F.linear(x, w.to(x.dtype) * 0.01), (X, tensor(32, HIDDEN).char())),
    "dequantised by groups": (
        lambda x, w, s: F.linear(x, (w.view(32, 4, 16).to(x.dtype) * s).view(32, HIDDEN)),
        (X, tensor(32, HIDDEN).char(), tensor(32, 4, 1)),
    ),
    "cast": (lambda x, w: F.linear(x, w.to(x.dtype)), (X, W.float())),
    "joined": (lambda x, w, v: F.linear(x, torch.cat([w, v])), (X, W, A)),
    "repeated": (lambda x, w: F.linear(x, w.expand(32, -1)), (X, W[:1])),
    "looked up": (lambda x, w: F.linear(x, w[torch.tensor([3, 1])]), (X, W)),
    "changed before": (lambda x, w: F.linear(x, w.clone().add_(1)), (X, W)),
    "an outer product of activations": (lambda x, w: x[:, 0].sin() @ x[:, 0].cos().mT, (X, W)),
    "integers": (lambda x, w: x @ w.mT, (tensor(4, 64).int(), tensor(8, 64).int())),
    "complex": (lambda x, w: x @ w.mT, (tensor(4, 64).to(torch.complex64), tensor(8, 64).to(torch.complex64))),
}


@pytest.mark.parametrize(("model", "args"), SILENT.values(), ids=SILENT)
def test_what_is_none(model: Callable, args: tuple[Tensor, ...], tracing: ModuleType) -> None:
    found = traced(tracing, model, *args)
    assert not found.report.sites and not found.report.misses
    assert found.after == found.before


DECLINED: dict[str, tuple[Callable, tuple[Tensor, ...], str]] = {
    "float32": (linear, (X.float(), W.float()), "x is torch.float32, needs float16 or bfloat16"),
    "float64": (linear, (X.double(), W.double()), "x is torch.float64, needs float16 or bfloat16"),
    "no rows": (linear, (tensor(0, HIDDEN), W), "x has 0 rows, needs a constant from 1 to 16"),
    "odd columns": (linear, (tensor(4, 40), weight(32, 40)), "x has 40 columns, needs a multiple of 16"),
    "padded weight": (
        lambda x, w: F.linear(x, w[:, 8:]),
        (X, weight(32, HIDDEN + 8)),
        "weight has rows 72 elements apart, needs a multiple of 16",
    ),
    "misaligned weight": (
        lambda x, w: F.linear(x, w[:, 1 : HIDDEN + 1]),
        (X, weight(32, HIDDEN + 16)),
        "weight starts 1 elements into its storage, needs a multiple of 8",
    ),
    "padded rows": (
        lambda x, w: F.linear(x[:, 8:], w),
        (tensor(4, HIDDEN + 8), W),
        "x has rows 72 elements apart, needs a multiple of 16",
    ),
    "misaligned rows": (
        lambda x, w: F.linear(x[:, 3 : HIDDEN + 3], w),
        (tensor(4, HIDDEN + 16), W),
        "x starts 3 elements into its storage, needs a multiple of 8",
    ),
    "columns of x apart": (
        lambda x, w: F.linear(x.mT, w),
        (tensor(HIDDEN, 4), W),
        "x has rows that are not contiguous, needs stride 1 along in_features",
    ),
    "one output by columns": (
        lambda x, w: x @ w,
        (X, TALL[:, :1].contiguous()),
        "weight has rows 1 elements apart, needs a multiple of 16",
    ),
}


@pytest.mark.parametrize(("model", "args", "reason"), DECLINED.values(), ids=DECLINED)
def test_declined(model: Callable, args: tuple[Tensor, ...], reason: str, tracing: ModuleType) -> None:
    found = traced(tracing, model, *args)
    assert reasons(found.report) == [reason] and found.report.counts["linear"] == 1
    assert found.after == found.before


def test_disabled(tracing: ModuleType) -> None:
    found = traced(tracing, Each(W, A, B), X, disable=("linear",))
    assert reasons(found.report) == ["linear is disabled"] * 3
    assert found.after == found.before


def test_without_a_measurement_left_as_it_was(tracing: ModuleType) -> None:
    model = Behind(W, BEHIND, BEHIND, rest=(A, B))
    found = traced(tracing, model, X, gate="table", target="gfx942")
    assert not any(found.report.rewritten.values())
    assert set(reasons(found.report)) == {"no measurement on gfx942 says that it pays here (gate=measure takes one)"}
    assert found.after == found.before


def test_a_symbolic_batch(tracing: ModuleType) -> None:
    """Not a word: it may have any number of rows."""
    x = tensor(4, 1, HIDDEN)
    torch._dynamo.mark_dynamic(x, 0)
    found = traced(tracing, linear, x, W)
    assert not found.report.sites and not found.report.misses
    assert found.after == found.before and "s" in found.before.split("return")[0]


def test_a_symbolic_width(tracing: ModuleType) -> None:
    w = weight(32)
    torch._dynamo.mark_dynamic(w, 0)
    found = traced(tracing, linear, X, w)
    (reason,) = reasons(found.report)
    assert reason.startswith("weight has s") and reason.endswith("rows, needs a constant of at least 1")
    assert found.after == found.before


def test_autocast(tracing: ModuleType) -> None:
    """The weights are cast in the graph: they are not as stored."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return F.linear(x, w)

    found = traced(tracing, model, X.float(), W.float())
    assert not found.report.sites and found.after == found.before


def test_a_product_that_is_summed_in_another_type() -> None:
    """``torch.mm(out_dtype=...)``, which only GPUs have."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = tensor(4, HIDDEN), TALL.T.contiguous().T
    plain = graph.call_function(torch.ops.aten.mm.default, (x, w))
    wide = graph.call_function(torch.ops.aten.mm.dtype, (x, w, F32))
    plain.meta["val"] = x.meta["val"] @ w.meta["val"]
    wide.meta["val"] = plain.meta["val"].float()
    assert algebra.linear(plain) is not None and algebra.linear(wide) is None
    assert LINEAR_PATTERN.anchors(wide) and LINEAR_PATTERN.try_match(wide) is None


# -------------------------------------------------------------------------------------------- training, mutation, views


@pytest.mark.parametrize("gate", ["table", "always"])
def test_training(gate: str, tracing: ModuleType) -> None:
    """Declined by default; under gate=always the gradients are right."""
    model, h = Llama(layers=1), tensor(4, 1, HIDDEN).requires_grad_()
    model(h).float().square().sum().backward()
    expected = [p.grad.clone() for p in (h, *model.parameters())]
    h.grad = None
    model.zero_grad()
    found = traced(tracing, model, h, grad=True, gate=gate)
    found.result.float().square().sum().backward()
    for ours, theirs in zip((h, *model.parameters()), expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())
    if gate == "table":
        training = "a training graph: stock saves less for backward than a rewrite would"
        assert training in reasons(found.report) and not sites(found.report)
    else:
        assert sites(found.report).count("qkv_linear") == 1


def test_mutation_between_the_layers(tracing: ModuleType) -> None:
    def model(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = F.linear(x, w)
        x.mul_(2)
        second = F.linear(x, w)
        w.add_(1)
        return first, second, F.linear(x, w)

    args = X[:, 0], W
    expected = model(*(a.clone() for a in args))
    ours = [a.clone() for a in args]
    found = traced(tracing, model, *ours)
    assert sites(found.report) == ["linear"] * 2
    torch.testing.assert_close(found.result, expected)
    torch.testing.assert_close(ours, [args[0] * 2, args[1] + 1])


def test_one_tensor_as_input_and_weight(tracing: ModuleType) -> None:
    x = tensor(8, HIDDEN)
    found = traced(tracing, reused, x)
    assert sites(found.report) == ["linear"]
    tracing.assert_as_good_as_eager(found.result, reused, x)


def test_results_that_others_read(tracing: ModuleType) -> None:
    class Read(Each):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            q, k, v = super().forward(x)
            return q, q.sin(), k.view(-1), v.transpose(0, 1), q.float() + 1

    model = Read(W, A, B)
    found = traced(tracing, model, X)
    assert sites(found.report) == ["qkv_linear"]
    tracing.assert_as_good_as_eager(found.result, model, X)


def test_a_piece_of_another_tensor(tracing: ModuleType) -> None:
    def model(h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return F.linear(h[:, -1], w), F.linear(h[:, 0], w), F.linear(h[1:3, 2], w)

    args = tensor(4, 5, HIDDEN), W
    found = traced(tracing, model, *args)
    assert sites(found.report) == ["linear"] * 3
    tracing.assert_as_good_as_eager(found.result, model, *args)


def test_an_unused_layer_is_gone(tracing: ModuleType) -> None:
    model = Each(W, A, B)
    found = traced(tracing, lambda x: model(x)[::2], X)
    assert sites(found.report) == ["linear"] * 2


@pytest.mark.parametrize("rows", [1, 4])
def test_compiled(rows: int, tracing: ModuleType) -> None:
    model, h = Llama(), tensor(rows, 1, HIDDEN)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="portable_ops", options={"portable_ops.gate": "always"})
    with torch.no_grad():
        tracing.assert_as_good_as_eager(compiled(h), model, h)
        report = explain(model, gate="always", target="sm_90")(h)
    assert report.rewritten["linear"] == 7 and report.rewritten["swiglu"] == 2
    assert {s.variant for s in report.sites if s.kind == "linear"} == {"portable.stream"}


# ------------------------------------------------------------------------------------------------------ random layers

VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.reshape(-1, x.shape[-1]),
    lambda x: x.unsqueeze(1),
    lambda x: x.detach(),
    lambda x: x.transpose(0, 1).transpose(0, 1),
]


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.sampled_from([(1, 1), (2, 3), (16, 1), (4, 4), (17, 1)]),
    columns=st.sampled_from([16, 48, 64]),
    layers=st.lists(st.tuples(st.integers(2, 40), st.sampled_from(range(len(VIEWS)))), min_size=1, max_size=5),
    dtype=st.sampled_from([BF16, F16]),
)
def test_random_layers(rows: tuple, columns: int, layers: list[tuple], dtype: torch.dtype, tracing: ModuleType) -> None:
    weights = [weight(n, columns, dtype, i) for i, (n, _) in enumerate(layers)]

    def model(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        h = x.sin()
        return tuple(F.linear(VIEWS[view](h), w) for w, (_, view) in zip(weights, layers, strict=True))

    args: list[Any] = [tensor(*rows, columns, dtype=dtype), *weights]
    found = traced(tracing, model, *args)
    few = rows[0] * rows[1] <= 16
    assert ("aten.mm" in found.after) == (not few)
    assert not reasons(found.report) and bool(found.report.sites) == few
    tracing.assert_as_good_as_eager(found.result, model, *args)
