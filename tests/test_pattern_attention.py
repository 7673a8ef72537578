"""Attention: what is pinned, what the pattern takes over with it, and what goes back to stock."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from portable_ops.inductor_ext import Report, explain
from portable_ops.inductor_ext.pin import pin
from portable_ops.inductor_ext.report import Site
from portable_ops.kernels.target import named_target
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

B, H, G, L, S, D = 2, 8, 2, 5, 7, 16
"""Batch, query heads, key/value heads, queries, keys, head_dim."""

attention = F.scaled_dot_product_attention


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads(q: int = H, kv: int = H, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q_, k, v = tensor(B, q, L, D), tensor(B, kv, S, D, seed=1), tensor(B, kv, S, D, seed=2)
    return q_.to(dtype), k.to(dtype), v.to(dtype)


def boolean(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.7
    return mask | (torch.arange(shape[-1]) == 0)


def explained(model: Callable, *args: Tensor, **options: object) -> Report:
    with torch.no_grad():
        return explain(model, **{"gate": "always", **options})(*args)


def calls(report: Report) -> list[Site]:
    """The attention calls; a layer around them has linear layers as well."""
    return [s for s in report.sites if s.kind == "attention"]


def rewritten(tracing: ModuleType, model: Callable, *args: Tensor, **how: object) -> object:
    """The trace of ``model``, which must have one attention call, taken, and be right."""
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="always", **how)
    assert traced.report.rewritten["attention"] == traced.report.counts["attention"] == 1
    assert "portable_ops.attention" in traced.after and "scaled_dot_product" not in traced.after
    tracing.assert_as_good_as_eager(traced.result, model, *args)
    return traced


# --------------------------------------------------------------------------------------------------- argument forms

FORMS: dict[str, tuple[Callable, tuple]] = {
    "plain": (lambda q, k, v: attention(q, k, v), heads()),
    "causal": (lambda q, k, v: attention(q, k, v, is_causal=True), heads()),
    "scale": (lambda q, k, v: attention(q, k, v, scale=0.3), heads()),
    "scale 1": (lambda q, k, v: attention(q, k, v, scale=1), heads()),
    "scale from the shape": (lambda q, k, v: attention(q, k, v, scale=q.shape[-1] ** -1), heads()),
    "dropout 0": (lambda q, k, v: attention(q, k, v, dropout_p=0.0), heads()),
    "enable_gqa": (lambda q, k, v: attention(q, k, v, enable_gqa=True), heads(H, G)),
    "enable_gqa, one head": (lambda q, k, v: attention(q, k, v, enable_gqa=True), heads(H, 1)),
    "enable_gqa, causal, scale": (
        lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.1, enable_gqa=True),
        heads(H, G),
    ),
    "called by its ATen name": (lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v), heads()),
    "by position": (lambda q, k, v: attention(q, k, v, None, 0.0, True), heads()),
    "three dimensions": (lambda q, k, v: attention(q, k, v), tuple(t[:, 0] for t in heads())),
    "three dimensions, causal": (lambda q, k, v: attention(q, k, v, is_causal=True), tuple(t[:, 0] for t in heads())),
    "one query": (lambda q, k, v: attention(q, k, v), (tensor(B, H, 1, D), *heads()[1:])),
    "bf16": (lambda q, k, v: attention(q, k, v), heads(dtype=torch.bfloat16)),
    "fp16": (lambda q, k, v: attention(q, k, v), heads(dtype=torch.float16)),
    "projections": (
        lambda q, k, v: attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).reshape(B, L, H * D),
        tuple(t.transpose(1, 2).contiguous() for t in heads()),
    ),
    "bert": (lambda q, k, v: attention(q, k, v).permute(2, 0, 1, 3).contiguous(), heads()),
}


@pytest.mark.parametrize(("model", "args"), FORMS.values(), ids=FORMS)
def test_argument_forms(model: Callable, args: tuple, tracing: ModuleType) -> None:
    rewritten(tracing, model, *args)


MASKS: dict[str, Tensor] = {
    "bool, full": boolean(B, H, L, S),
    "bool, one for all heads": boolean(B, 1, L, S),
    "bool, one for the batch": boolean(1, H, L, S),
    "bool, one for all": boolean(1, 1, L, S),
    "bool, padding": boolean(B, 1, 1, S),
    "bool, per query": boolean(B, 1, L, S)[..., :1],
    "bool, three dimensions": boolean(H, L, S),
    "bool, two dimensions": boolean(L, S),
    "bool, one row": boolean(1, S),
    "bool, a column": boolean(L, S)[:, :1],
    "bool, a row sees nothing": boolean(L, S) & (torch.arange(L) != 2)[:, None],
    "float, full": tensor(B, H, L, S, seed=4),
    "float, one for all": tensor(1, 1, L, S, seed=4),
    "float, two dimensions": tensor(L, S, seed=4),
    "float, -inf": torch.where(boolean(B, 1, L, S), 0.0, float("-inf")),
    "float, transposed": tensor(B, H, S, L, seed=4).transpose(2, 3),
    "float, a slice": tensor(B, 1, L, 3 * S, seed=4)[..., S : 2 * S],
    "float, every second": tensor(B, H, L, 2 * S, seed=4)[..., ::2],
    "float, expanded outside": tensor(B, 1, 1, S, seed=4).expand(B, H, L, S),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(mask: Tensor, tracing: ModuleType) -> None:
    rewritten(tracing, lambda q, k, v, m: attention(q, k, v, attn_mask=m), *heads(), mask)


def test_a_float32_mask_with_bf16_heads(tracing: ModuleType) -> None:
    args = *heads(dtype=torch.bfloat16), tensor(B, 1, L, S, seed=4)
    rewritten(tracing, lambda q, k, v, m: attention(q, k, v, m), *args)


def test_a_mask_of_a_three_dimensional_call(tracing: ModuleType) -> None:
    args = tuple(t[:, 0] for t in heads())
    for mask in (boolean(L, S), boolean(B, L, S), boolean(1, L, S)):
        rewritten(tracing, lambda q, k, v, m: attention(q, k, v, m), *args, mask)


MASK_EXPANSIONS: dict[str, tuple[Callable, Tensor, str]] = {
    "padding to full": (lambda m: m.expand(B, H, L, S), boolean(B, 1, 1, S), f"[{B}, 1, 1, {S}]"),
    "heads": (lambda m: m.expand(-1, H, -1, -1), boolean(B, 1, L, S), f"[{B}, 1, {L}, {S}]"),
    "rank": (lambda m: m.expand(B, H, L, S), boolean(L, S), f"[{L}, {S}]"),
    "twice": (lambda m: m.expand(B, 1, L, S).expand(B, H, L, S), boolean(B, 1, 1, S), f"[{B}, 1, 1, {S}]"),
    # torch wants two dimensions, so one expansion stays.
    "vector": (lambda m: m.expand(L, S), boolean(S), f"[{L}, {S}]"),
    "vector, twice": (lambda m: m.expand(L, S).expand(B, H, L, S), boolean(S), f"[{L}, {S}]"),
}


@pytest.mark.parametrize(("expand", "mask", "shape"), MASK_EXPANSIONS.values(), ids=MASK_EXPANSIONS)
def test_an_expanded_mask_is_read_from_its_source(
    expand: Callable, mask: Tensor, shape: str, tracing: ModuleType
) -> None:
    traced = rewritten(tracing, lambda q, k, v, m: attention(q, k, v, expand(m)), *heads(), mask)
    assert traced.report.sites[0].bound["mask"] == f"torch.bool {shape}"


# -------------------------------------------------------------------------------------------------------- repeat_kv


def repeat_kv(x: Tensor, n: int) -> Tensor:
    """Hugging Face's."""
    batch, kv_heads, length, head_dim = x.shape
    x = x[:, :, None, :, :].expand(batch, kv_heads, n, length, head_dim)
    return x.reshape(batch, kv_heads * n, length, head_dim)


def swap(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


R = H // G

# name: how k and v become [B, H, S, D], and what they are before: [B, G, S, D] unless it says otherwise
REPEATS: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "expand, reshape": (lambda x: repeat_kv(x, R), (B, G, S, D)),
    "expand, flatten": (lambda x: x.unsqueeze(2).expand(-1, -1, R, -1, -1).flatten(1, 2), (B, G, S, D)),
    "expand, contiguous, view": (
        lambda x: x[:, :, None].expand(B, G, R, S, D).contiguous().view(B, H, S, D),
        (B, G, S, D),
    ),
    "repeat_interleave": (lambda x: x.repeat_interleave(R, dim=1), (B, G, S, D)),
    "torch.repeat_interleave": (lambda x: torch.repeat_interleave(x, R, -3), (B, G, S, D)),
    "repeat inside of a group": (lambda x: x[:, :, None].repeat(1, 1, R, 1, 1).view(B, H, S, D), (B, G, S, D)),
    "stack": (lambda x: torch.stack([x] * R, 2).flatten(1, 2), (B, G, S, D)),
    "after a transpose": (lambda x: repeat_kv(swap(x), R), (B, S, G, D)),
    "before a transpose": (lambda x: swap(x.repeat_interleave(R, 2)), (B, S, G, D)),
    "before a transpose, expand": (
        lambda x: swap(x[:, :, :, None].expand(B, S, G, R, D).reshape(B, S, H, D)),
        (B, S, G, D),
    ),
    "from a projection": (lambda x: repeat_kv(swap(x.view(B, S, G, D)), R), (B, S, G * D)),
    "sequence first": (lambda x: x.repeat_interleave(R, 2).permute(1, 2, 0, 3), (S, B, G, D)),
    "one head, expanded": (lambda x: x.expand(B, H, S, D), (B, 1, S, D)),
    "one head, added and expanded": (lambda x: x.unsqueeze(1).expand(-1, H, -1, -1), (B, S, D)),
    "one head, repeated": (lambda x: x.repeat(1, H, 1, 1), (B, 1, S, D)),
    "one head, repeat_kv": (lambda x: repeat_kv(x, H), (B, 1, S, D)),
}


@pytest.mark.parametrize("name", REPEATS)
def test_repeated_heads_are_read_once(name: str, tracing: ModuleType) -> None:
    repeat, shape = REPEATS[name]
    args = tensor(B, H, L, D), tensor(*shape, seed=1), tensor(*shape, seed=2)
    traced = rewritten(tracing, lambda q, k, v: attention(q, repeat(k), repeat(v)), *args)
    assert traced.report.sites[0].bound["repeat_kv"] == str(H if name.startswith("one head") else R)
    assert "enable_gqa=True" in traced.after
    assert not any(copy in traced.after for copy in ("expand", "repeat", "clone", "cat"))


NOT_REPEATS: dict[str, Callable] = {
    "tiled": lambda q, k, v: attention(q, k.repeat(1, R, 1, 1), v.repeat(1, R, 1, 1)),
    "tiled by expand": lambda q, k, v: attention(
        q, *(x[:, None].expand(B, R, G, S, D).reshape(B, H, S, D) for x in (k, v))
    ),
    "concatenated": lambda q, k, v: attention(q, torch.cat([k] * R, 1), torch.cat([v] * R, 1)),
    "k in groups, v tiled": lambda q, k, v: attention(q, repeat_kv(k, R), v.repeat(1, R, 1, 1)),
    "in groups of different size": lambda q, k, v: attention(q, repeat_kv(k, R), repeat_kv(repeat_kv(v, 2).cos(), 2)),
    "keys repeated along the sequence": lambda q, k, v: attention(
        q, *(x.repeat_interleave(2, 2) for x in (repeat_kv(k, R).sin(), repeat_kv(v, R).sin()))
    ),
}


@pytest.mark.parametrize("model", NOT_REPEATS.values(), ids=NOT_REPEATS)
def test_other_repetitions_are_kept(model: Callable, tracing: ModuleType) -> None:
    traced = rewritten(tracing, model, *heads(H, G))
    assert traced.report.sites[0].bound["repeat_kv"] == "1"
    assert "enable_gqa=False" in traced.after


def test_only_keys_repeated(tracing: ModuleType) -> None:
    q, k, _ = heads(H, G)
    traced = rewritten(tracing, lambda q, k, v: attention(q, repeat_kv(k, R), v), q, k, tensor(B, H, S, D, seed=2))
    assert traced.report.sites[0].bound["repeat_kv"] == "1"


def test_repeated_heads_with_another_reader_are_still_read_once(tracing: ModuleType) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = repeat_kv(k, R), repeat_kv(v, R)
        return attention(q, k, v), k * 2

    traced = rewritten(tracing, model, *heads(H, G))
    assert traced.report.sites[0].bound["repeat_kv"] == str(R)


@pytest.mark.parametrize("dims", [(0,), (2,), (0, 2)])
def test_repeated_heads_under_dynamic_shapes(dims: tuple[int, ...], tracing: ModuleType) -> None:
    def model(q: Tensor, kv: Tensor, m: Tensor) -> Tensor:
        k, v = kv.unbind()
        mask = m[:, :, :, : k.shape[-2]].expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        return attention(q, repeat_kv(k, R), repeat_kv(v, R), mask).transpose(1, 2).contiguous()

    q, kv, mask = tensor(B, H, L, D), tensor(2, B, G, S, D, seed=1), boolean(B, 1, 1, S)
    for d in dims:
        torch._dynamo.mark_dynamic(q, d)
        torch._dynamo.mark_dynamic(kv, d + 1)
        torch._dynamo.mark_dynamic(mask, {0: 0, 2: 3}[d])
    traced = rewritten(tracing, model, q, kv, mask)
    assert traced.report.sites[0].bound["repeat_kv"] == str(R)
    assert "expand" not in traced.after and "clone" not in traced.after.split("portable_ops.attention")[0]


def test_graph_before_and_after(tracing: ModuleType) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = repeat_kv(swap(k), R), repeat_kv(swap(v), R)
        out = attention(swap(q), k, v, attn_mask=mask.expand(B, H, L, S), scale=0.25)
        return swap(out).reshape(B, L, H * D)

    args = tensor(B, L, H, D), tensor(B, S, G, D, seed=1), tensor(B, S, G, D, seed=2), boolean(B, 1, L, S)
    traced = rewritten(tracing, layer, *args)
    assert_expected_inline(
        traced.before,
        """\
%0 = input : f32[2, 7, 2, 16]
%1 = input : f32[2, 7, 2, 16]
%2 = input : f32[2, 5, 8, 16]
%3 = input : bool[2, 1, 5, 7]
%4 = aten.permute.default(%0, [0, 2, 1, 3]) : f32[2, 2, 7, 16] strides [224, 16, 32, 1]
%5 = aten.unsqueeze.default(%4, 2) : f32[2, 2, 1, 7, 16] strides [224, 16, 224, 32, 1]
%6 = aten.expand.default(%5, [2, 2, 4, 7, 16]) : f32[2, 2, 4, 7, 16] strides [224, 16, 0, 32, 1]
%7 = aten.clone.default(%6, memory_format=torch.contiguous_format) : f32[2, 2, 4, 7, 16]
%8 = aten.view.default(%7, [2, 8, 7, 16]) : f32[2, 8, 7, 16]
%9 = aten.permute.default(%1, [0, 2, 1, 3]) : f32[2, 2, 7, 16] strides [224, 16, 32, 1]
%10 = aten.unsqueeze.default(%9, 2) : f32[2, 2, 1, 7, 16] strides [224, 16, 224, 32, 1]
%11 = aten.expand.default(%10, [2, 2, 4, 7, 16]) : f32[2, 2, 4, 7, 16] strides [224, 16, 0, 32, 1]
%12 = aten.clone.default(%11, memory_format=torch.contiguous_format) : f32[2, 2, 4, 7, 16]
%13 = aten.view.default(%12, [2, 8, 7, 16]) : f32[2, 8, 7, 16]
%14 = aten.permute.default(%2, [0, 2, 1, 3]) : f32[2, 8, 5, 16] strides [640, 16, 128, 1]
%15 = aten.expand.default(%3, [2, 8, 5, 7]) : bool[2, 8, 5, 7] strides [35, 0, 7, 1]
%16 = portable_ops.attention.default(%14, %8, %13, %15, False, 0.25, False, [0, 2, 1, 3]) : f32[2,
    8, 5, 16] strides [640, 16, 128, 1]
%17 = aten.permute.default(%16, [0, 2, 1, 3]) : f32[2, 5, 8, 16]
%18 = aten.view.default(%17, [2, 5, 128]) : f32[2, 5, 128]
return (%18,)
""",
    )
    assert_expected_inline(
        traced.after,
        """\
%0 = input : f32[2, 7, 2, 16]
%1 = input : f32[2, 7, 2, 16]
%2 = input : f32[2, 5, 8, 16]
%3 = input : bool[2, 1, 5, 7]
%4 = aten.permute.default(%0, [0, 2, 1, 3]) : f32[2, 2, 7, 16] strides [224, 16, 32, 1]
%5 = aten.permute.default(%1, [0, 2, 1, 3]) : f32[2, 2, 7, 16] strides [224, 16, 32, 1]
%6 = aten.permute.default(%2, [0, 2, 1, 3]) : f32[2, 8, 5, 16] strides [640, 16, 128, 1]
%7 = portable_ops.attention.default(attn_mask=%3, is_causal=False, scale=0.25, enable_gqa=True,
    out_order=[0, 2, 1, 3], q=%6, k=%4, v=%5) : f32[2, 8, 5, 16] strides [640, 16, 128, 1]
%8 = aten.permute.default(%7, [0, 2, 1, 3]) : f32[2, 5, 8, 16]
%9 = aten.view.default(%8, [2, 5, 128]) : f32[2, 5, 128]
return (%9,)
""",
    )


# -------------------------------------------------------------------------------------------------- several and mixed


class Layer(nn.Module):
    def __init__(self, *, causal: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.qkv = nn.Linear(H * D, (H + 2 * G) * D, bias=False)
        self.out = nn.Linear(H * D, H * D, bias=False)
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).split([H * D, G * D, G * D], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k, v))
        out = attention(q, repeat_kv(k, R), repeat_kv(v, R), attn_mask=mask, is_causal=self.causal and mask is None)
        return self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Three attention calls: causal, masked, and one with dropout that no kernel serves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(causal=True), Layer(seed=1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.first(x)
        x = x + self.second(x, mask)
        q = x.unflatten(-1, (H, D)).transpose(1, 2)
        return x + attention(q, q, q, dropout_p=1e-30).transpose(1, 2).flatten(2)


def test_several_in_one_graph() -> None:
    report = explained(Model(), tensor(B, L, H * D), boolean(B, 1, L, L))
    assert report.counts["attention"] == 3 and report.rewritten["attention"] == 2
    (declined,) = (s for s in calls(report) if s.decision == "declined")
    assert declined.reason == "dropout_p is 1e-30: the kernels have no dropout"
    assert "test_pattern_attention.py" in declined.source


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, tracing: ModuleType) -> None:
    layer = Layer(causal=True)

    def model(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return layer(x)

    def direct(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return attention(q, k, v, enable_gqa=True)

    for run, args in [(model, (tensor(B, L, H * D),)), (direct, heads(H, G))]:
        with torch.no_grad():
            traced = tracing.trace(run, *args, gate="always")
            assert traced.report.rewritten["attention"] == 1
            assert traced.result.dtype == dtype
            torch.testing.assert_close(traced.result, run(*args), rtol=2e-2, atol=2e-2)
            # The order of the casts in front is the evaluation order of C++ arguments: compare without it.
            back, stock = tracing.trace(run, *args, gate="never").after, tracing.stock_graph(run, *args)
            assert sorted(re.sub(r"%\d+", "%", back).splitlines()) == sorted(re.sub(r"%\d+", "%", stock).splitlines())


# --------------------------------------------------------------------------------------------- back to stock's graph


STOCK: dict[str, tuple[Callable, tuple]] = {
    **FORMS,
    **{f"mask: {name}": (lambda q, k, v, m: attention(q, k, v, m), (*heads(), mask)) for name, mask in MASKS.items()},
    "repeat_kv": (lambda q, k, v: attention(q, repeat_kv(k, R), repeat_kv(v, R), is_causal=True), heads(H, G)),
}


@pytest.mark.parametrize(("model", "args"), STOCK.values(), ids=STOCK)
def test_declined_calls_are_traced_as_stock_traces_them(model: Callable, args: tuple, tracing: ModuleType) -> None:
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="never")
        assert "portable_ops.attention" in traced.before and "portable_ops" not in traced.after
        assert traced.after == tracing.stock_graph(model, *args)
    assert [s.reason for s in traced.report.declined] == ["gate=never"]


def test_equal_layers_and_unequal_ones_go_back(tracing: ModuleType) -> None:
    layers = nn.Sequential(Layer(causal=True), Layer(causal=True, seed=1), Layer(seed=2))
    x = tensor(B, L, H * D)
    with torch.no_grad():
        for options in ({"gate": "never"}, {"gate": "always", "max_rewrites": 0}, {"gate": "always", "enable": "topk"}):
            traced = tracing.trace(layers, x, **options)
            assert [s.decision for s in calls(traced.report)] == ["declined"] * 3
            assert traced.after == tracing.stock_graph(layers, x)


def test_dynamic_calls_go_back(tracing: ModuleType) -> None:
    args = heads(H, G)
    for t in args:
        torch._dynamo.mark_dynamic(t, (0, 2))
    with torch.no_grad():
        traced = tracing.trace(lambda q, k, v: attention(q, k, v, enable_gqa=True), *args, gate="never")
        assert traced.after == tracing.stock_graph(lambda q, k, v: attention(q, k, v, enable_gqa=True), *args)


def test_a_part_of_the_calls_is_taken(tracing: ModuleType) -> None:
    layers, x = nn.Sequential(Layer(causal=True), Layer(causal=True, seed=1)), tensor(B, L, H * D)
    with torch.no_grad():
        traced = tracing.trace(layers, x, gate="always", max_rewrites=1)
    assert [s.decision for s in calls(traced.report)] == ["rewritten", "declined"]
    assert traced.after.count("portable_ops.attention") == 1
    tracing.assert_as_good_as_eager(traced.result, layers, x)


def test_on_a_cpu_the_default_gate_leaves_stock(tracing: ModuleType) -> None:
    layer, x = Layer(causal=True), tensor(B, L, H * D)
    with torch.no_grad():
        traced = tracing.trace(layer, x, target="cpu")
        assert "portable_ops" not in traced.before
        assert traced.after == tracing.stock_graph(layer, x)


# ------------------------------------------------------------------------------------------------------- not pinned

NOT_PINNED: dict[str, tuple[Callable, tuple, str]] = {
    "dropout": (
        lambda q, k, v: attention(q, k, v, dropout_p=0.1),
        heads(),
        "dropout_p is 0.1: the kernels have no dropout",
    ),
    "double": (
        lambda q, k, v: attention(q, k, v),
        heads(dtype=torch.float64),
        "q is torch.float64, needs float16, bfloat16 or float32",
    ),
    "head_dim over 256": (
        lambda q, k, v: attention(q, k, v),
        (tensor(1, 2, L, 320),) * 3,
        "q has head_dim 320, needs a multiple of 8 from 16 to 256",
    ),
    "odd head_dim": (
        lambda q, k, v: attention(q, k, v),
        (tensor(1, 2, L, 33),) * 3,
        "q has head_dim 33, needs a multiple of 8 from 16 to 256",
    ),
    "another head_dim of v": (
        lambda q, k, v: attention(q, k, v),
        (*heads()[:2], tensor(B, H, S, 24)),
        "v has head_dim 24, needs q's 16",
    ),
    "one matrix": (
        lambda q, k, v: attention(q, k, v),
        tuple(t[0, 0] for t in heads()),
        "q has 2 dimensions, needs [batch, heads, length, head_dim] or [batch, length, head_dim]",
    ),
    "one key head without enable_gqa": (
        lambda q, k, v: attention(q, k, v),
        heads(H, 1),
        "k has 1 heads, needs q's 8 or enable_gqa",
    ),
    "mask and is_causal": (
        lambda q, k, v, m: attention(q, k, v, m, is_causal=True),
        (*heads(), boolean(L, S)),
        "attn_mask together with is_causal, needs one of them",
    ),
    "no queries at all": (
        lambda q, k, v: attention(q, k, v),
        tuple(t[:0] for t in heads()),
        "q has no elements, needs at least one",
    ),
    "no positions at all": (
        lambda q, k, v: attention(q, k, v),
        tuple(t[:, :, :0] for t in heads()),
        "q has no elements, needs at least one",
    ),
}


@pytest.mark.parametrize(("model", "args", "reason"), NOT_PINNED.values(), ids=NOT_PINNED)
def test_calls_that_no_kernel_serves(model: Callable, args: tuple, reason: str, tracing: ModuleType) -> None:
    report = explained(model, *args)
    assert report.counts["attention"] == 1 and report.rewritten["attention"] == 0
    assert [s.reason for s in report.declined] == [reason]
    assert "test_pattern_attention.py" in report.declined[0].source
    with torch.no_grad():
        assert tracing.trace(model, *args, gate="always").after == tracing.stock_graph(model, *args)


def test_inside_sdpa_kernel(tracing: ModuleType) -> None:
    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attention(q, k, v)

    reason = "the attention back ends are restricted (torch.nn.attention.sdpa_kernel)"
    assert [s.reason for s in explained(inside, *heads()).declined] == [reason]
    with sdpa_kernel(SDPBackend.MATH):
        report = explained(lambda q, k, v: attention(q, k, v), *heads())
    assert [s.reason for s in report.declined] == [reason]
    assert explained(lambda q, k, v: attention(q, k, v), *heads()).rewritten["attention"] == 1


def test_exported_graphs_are_pinned_too(tracing: ModuleType) -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, is_causal=True, enable_gqa=True)

    args = heads(H, G)
    with torch.no_grad():
        gm = torch.export.export(Model(), args).module()
        assert pin(gm, named_target("sm_90")) == []
        assert sum(n.target is torch.ops.portable_ops.attention.default for n in gm.graph.nodes) == 1
        tracing.assert_as_good_as_eager(gm(*args), Model(), *args)


def test_activation_checkpointing() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(attention_call, q, k, v, use_reentrant=False)

    assert explained(model, *heads()).rewritten["attention"] == 1
    report = explain(model, gate="always")(*(t.requires_grad_() for t in heads()))
    assert [s.reason for s in report.declined] == ["a gradient is needed and the attention kernels have no backward"]


def test_inside_a_functorch_transform() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.vmap(lambda a, b, c: attention(a, b, c))(q, k, v)

    report = explained(model, *heads())
    assert report.rewritten["attention"] == 0
    assert [s.reason for s in report.declined] == ["it stands inside a functorch transform"]


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradients_are_stocks(wanted: int, tracing: ModuleType) -> None:
    args = [t.requires_grad_(i == wanted) for i, t in enumerate(heads())]
    report = explain(attention_call, gate="always")(*args)
    assert report.rewritten["attention"] == 0
    assert [s.reason for s in report.declined] == ["a gradient is needed and the attention kernels have no backward"]
    traced = tracing.trace(attention_call, *args, gate="always")
    assert traced.after == tracing.stock_graph(attention_call, *args)


def attention_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, is_causal=True)


def test_leaves_without_grad_mode_are_served() -> None:
    args = [t.requires_grad_() for t in heads()]
    assert explained(attention_call, *args).rewritten["attention"] == 1
    with torch.inference_mode():
        assert explain(attention_call, gate="always")(*heads()).rewritten["attention"] == 1


def test_a_frozen_attention_in_a_training_graph(tracing: ModuleType) -> None:
    # Only what follows needs a gradient: the call can be served, and the gradients do not change.
    weight = tensor(D, D, seed=5).requires_grad_()

    def model(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=True) @ w

    def gradient(gate: str) -> Tensor:
        traced = tracing.trace(model, *heads(), weight, gate=gate)
        assert traced.report.counts["attention"] == 1
        assert traced.report.rewritten["attention"] == (gate == "always")
        return torch.autograd.grad(traced.result.sin().sum(), weight)[0]

    torch.testing.assert_close(gradient("always"), gradient("never"), rtol=1e-5, atol=1e-5)


def test_subclass_tensors() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    args = [TwoTensor(t, t.clone()) for t in heads()]
    report = explained(attention_call, *args)
    assert report.rewritten["attention"] == 0
    # One call of the user's became one for each of the two tensors inside.
    assert report.declined[0].reason == "an argument is not a plain tensor (a subclass, or nothing is known of it)"


def test_lowered_calls_that_no_pin_has_seen() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

    report = explained(model, *heads())
    assert report.counts["attention"] == 1
    assert [s.reason for s in report.declined] == [
        "it arrives already lowered to _scaled_dot_product_flash_attention_for_cpu"
    ]


# ---------------------------------------------------------------------------------------------- what torch refuses

REFUSED: dict[str, tuple[tuple, str]] = {
    "mixed types": ((heads()[0], *heads(dtype=torch.bfloat16)[1:]), "same dtype"),
    "mixed devices": ((heads()[0].to("meta"), *heads()[1:]), "meta"),
    "a mask that cannot broadcast": ((*heads(), boolean(B, 1, L, S - 1)), "broadcast"),
    "a mask of integers": ((*heads(), torch.ones(L, S, dtype=torch.int64)), "attn_mask dtype"),
    "a double mask": ((*heads(), torch.zeros(L, S, dtype=torch.float64)), "attn_mask dtype"),
    "complex": (heads(dtype=torch.complex64), ""),
}


@pytest.mark.parametrize(("args", "words"), REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(args: tuple, words: str) -> None:
    def model(*args: Tensor) -> Tensor:
        return attention(*args)

    messages = []
    for options in ({"backend": "inductor"}, {"backend": "portable_ops", "options": {"portable_ops.gate": "always"}}):
        torch._dynamo.reset()
        with torch.no_grad(), pytest.raises(Exception, match=words or None) as caught:
            torch.compile(model, **options)(*args)
        messages.append((caught.type, str(caught.value)))
    assert messages[0] == messages[1]


# ------------------------------------------------------------------------------------------------ compiled for real


def compiled(model: Callable, *args: Tensor, **how: object) -> object:
    torch._dynamo.reset()
    return torch.compile(model, backend="portable_ops", options={"portable_ops.gate": "always"}, **how)(*args)


def test_compiled_inference(tracing: ModuleType) -> None:
    layer, x, mask = Layer().bfloat16(), tensor(B, L, H * D, dtype=torch.bfloat16), boolean(B, 1, L, L)
    with torch.no_grad():
        result = compiled(layer, x, mask, fullgraph=True)
    tracing.assert_as_good_as_eager(result, layer, x, mask)


def test_compiled_with_dynamic_lengths(tracing: ModuleType) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, repeat_kv(k, R), repeat_kv(v, R), is_causal=True)

    torch._dynamo.reset()
    run = torch.compile(step, backend="portable_ops", options={"portable_ops.gate": "always"})
    for length in (5, 6, 9):
        args = tensor(B, H, length, D), tensor(B, G, length, D, seed=1), tensor(B, G, length, D, seed=2)
        for t in args:
            torch._dynamo.mark_dynamic(t, 2)
        with torch.no_grad():
            tracing.assert_as_good_as_eager(run(*args), step, *args)
