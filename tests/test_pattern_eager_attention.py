"""Attention written out by hand: what is matched, what is only recognised, what is something else."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from portable_ops.inductor_ext import Report, explain
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

B, H, G, L, S, D = 2, 4, 2, 5, 7, 16
"""Batch, query heads, key/value heads, queries, keys, head_dim."""

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def tensor(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads(kv: int = H, *, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(tensor(B, n, s, D, dtype=dtype, seed=i) for i, (n, s) in enumerate([(H, L), (kv, S), (kv, S)]))


def boolean(*shape: int) -> Tensor:
    """True where a key is seen; one row sees none."""
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6
    seen[..., 0] = True
    if shape[-2] > 2:
        seen[..., 2, :] = False
    return seen


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)


def softmax(s: Tensor) -> Tensor:
    return torch.softmax(s, -1)


def in_float32(s: Tensor) -> Tensor:
    return torch.softmax(s, -1, dtype=torch.float32).to(s.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.3) -> Tensor:
    return softmax(q @ k.mT * scale) @ v


def repeat_kv(x: Tensor, n: int) -> Tensor:
    batch, kv, length, dim = x.shape
    return x[:, :, None].expand(batch, kv, n, length, dim).reshape(batch, kv * n, length, dim)


def llama(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    k, v = repeat_kv(k, H // G), repeat_kv(v, H // G)
    scores = q @ k.transpose(2, 3) * 0.3 + additive(seen, q.dtype)
    return (in_float32(scores) @ v).transpose(1, 2).contiguous()


def explained(model: Callable, *args: object, **options: object) -> Report:
    with torch.no_grad():
        return explain(model, **{"gate": "always", **options})(*args)


def rewritten(tracing: ModuleType, model: Callable, *args: object, **how: object) -> object:
    """The trace of ``model``, which must have one attention, taken, and be right."""
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="always", **how)
    assert traced.report.rewritten["attention"] == traced.report.counts["attention"] == 1, traced.report
    assert "portable_ops.attention" in traced.after and "aten.bmm" not in traced.after
    assert not [m for m in traced.report.misses if m.kind == "attention"]
    tracing.assert_as_good_as_eager(traced.result, model, *args)
    return traced


def bias_of(table: Tensor, buckets: Tensor) -> Tensor:
    """T5's position bias [1, H, L, S]."""
    return F.embedding(buckets, table).permute(2, 0, 1).unsqueeze(0)


q, k, v = heads()
gq, gk, gv = heads(G)
seen = boolean(B, 1, L, S)
table, buckets = tensor(9, H, seed=5), torch.randint(0, 9, (L, S), generator=torch.Generator().manual_seed(6))
flat = tuple(t.flatten(0, 1) for t in (q, k, v))
rows = tuple(t.transpose(1, 2).contiguous() for t in (q, k, v))
"""[batch, length, heads, head_dim]."""


# ----------------------------------------------------------------------------------------------------------- spellings


def codegen(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) / 4.0 + additive(seen, q.dtype)
    return softmax(scores).to(v.dtype) @ v


def megatron_bert(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D)
    return (nn.functional.softmax(scores + additive(seen, q.dtype), dim=-1) @ v).permute(0, 2, 1, 3).contiguous()


def bloom(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, seen: Tensor) -> Tensor:
    alibi = (slopes[:, None] * torch.arange(S)).to(q.dtype).repeat(B, 1).unsqueeze(1)
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    scores = alibi.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=0.3).view(B, H, L, S)
    p = torch.softmax(scores + additive(seen, q.dtype), -1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(p.view(B * H, L, S), v).view(B, H, L, D).permute(0, 2, 1, 3)


def mpt(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, seen: Tensor) -> Tensor:
    alibi = torch.arange(1 - S, 1).view(1, 1, S) * slopes.view(H, 1, 1)
    scores = q @ k.mT * 0.3 + alibi[:, :, -S:]
    scores = scores.masked_fill(~seen, torch.finfo(q.dtype).min)
    return softmax(scores.float()).to(v.dtype) @ v


def opt(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, L, S) + additive(seen, q.dtype)
    return torch.bmm(softmax(scores.view(B * H, L, S)), v).view(B, H, L, D).transpose(1, 2).reshape(B, L, H * D)


def falcon(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2) / math.sqrt(D)).view(B * H, L, S).view(B, H, L, S)
    return (softmax(scores + additive(seen, q.dtype)) @ v).view(B, H, L, D).permute(0, 2, 1, 3).reshape(B, L, H * D)


def gpt_bigcode(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    k, v = k[:, None].expand(B, H, S, D), v[:, None].expand(B, H, S, D)
    return in_float32(q @ k.transpose(2, 3) * 0.3 + additive(seen, q.dtype)) @ v


def beta_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.baddbmm(torch.empty(B * H, L, S, dtype=q.dtype), q, k.mT, beta=0, alpha=0.3)
    return torch.bmm(softmax(scores), v)


def stabilised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    return in_float32(scores - scores.max(-1, keepdim=True).values) @ v


def by_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp((q @ k.mT).float() * 0.3)
    return (e / e.sum(-1, keepdim=True)).to(v.dtype) @ v


def by_reciprocal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp((q @ k.mT).float() * 0.3)
    return (e * e.sum(-1, keepdim=True).reciprocal()).to(v.dtype) @ v


slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

SPELLINGS: dict[str, tuple[Callable, tuple]] = {
    "llama": (llama, (gq, gk, gv, seen)),
    "no scale": (lambda q, k, v: softmax(q @ k.mT) @ v, (q, k, v)),
    "scaled scores": (attention, (q, k, v)),
    "scaled, commuted": (lambda q, k, v: softmax(0.3 * (q @ k.mT)) @ v, (q, k, v)),
    "divided scores": (lambda q, k, v: softmax(q @ k.mT / math.sqrt(D)) @ v, (q, k, v)),
    "scaled queries": (lambda q, k, v: softmax((q * 0.25) @ k.mT) @ v, (q, k, v)),
    "divided queries": (lambda q, k, v: softmax((q / 3.0) @ k.mT) @ v, (q, k, v)),
    "scaled keys": (lambda q, k, v: softmax(q @ (k * 0.3).mT) @ v, (q, k, v)),
    "both scaled": (lambda q, k, v: softmax((q * 0.5) @ (k.mT * 0.5)) @ v, (q, k, v)),
    "scaled everywhere": (lambda q, k, v: softmax((q * 0.5) @ (k.mT * 0.5) * 2.0) @ v, (q, k, v)),
    "a scale for each head": (lambda q, k, v, h: softmax(q @ k.mT * h[:, None, None]) @ v, (q, k, v, tensor(H))),
    "divided by a tensor": (lambda q, k, v, t: softmax(q @ k.mT / t) @ v, (q, k, v, torch.tensor(3.0))),
    "three dimensions": (attention, flat),
    "bmm": (lambda q, k, v: torch.bmm(softmax(torch.bmm(q, k.transpose(1, 2))), v), flat),
    "baddbmm without its first term": (beta_zero, flat),
    "einsum": (
        lambda q, k, v: torch.einsum("bhls,bhsd->bhld", softmax(torch.einsum("bhld,bhsd->bhls", q, k) * 0.3), v),
        (q, k, v),
    ),
    "einsum on rows": (
        lambda q, k, v: torch.einsum("bhls,bshd->blhd", softmax(torch.einsum("blhd,bshd->bhls", q, k) * 0.3), v),
        rows,
    ),
    "einsum of keys and queries": (
        lambda q, k, v: torch.einsum("bhls,bshd->bhld", softmax(torch.einsum("bshd,blhd->bhls", k, q) * 0.3), v),
        rows,
    ),
    "transposed rows": (
        lambda q, k, v: attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).reshape(B, L, H * D),
        rows,
    ),
    "softmax in float32": (lambda q, k, v: in_float32(q @ k.mT * 0.3) @ v, (q, k, v)),
    "scores in float32": (lambda q, k, v: softmax((q.float() @ k.float().mT) * 0.3).to(v.dtype) @ v, (q, k, v)),
    "scaled in float32": (lambda q, k, v: softmax((q.float() * 0.3) @ k.float().mT).to(v.dtype) @ v, (q, k, v)),
    "all in float32": (
        lambda q, k, v: (softmax(q.float() @ k.float().mT * 0.3) @ v.float()).to(q.dtype),
        (q, k, v),
    ),
    "log_softmax": (lambda q, k, v: F.log_softmax(q @ k.mT * 0.3, -1).exp() @ v, (q, k, v)),
    "less its maximum": (stabilised, (q, k, v)),
    "exponentials": (by_exponentials, (q, k, v)),
    "exponentials and reciprocal": (by_reciprocal, (q, k, v)),
    "one head": (attention, (q[:, :1], k[:, :1], v[:, :1])),
    "one batch": (attention, (q[:1], k[:1], v[:1])),
    "one query": (attention, (q[:, :, :1], k, v)),
    "one key head, broadcast": (attention, (q, k[:, :1], v[:, :1])),
    "dropout of zero": (lambda q, k, v: F.dropout(softmax(q @ k.mT), 0.0) @ v, (q, k, v)),
    "position bias": (lambda q, k, v, t, i: softmax(q @ k.mT + bias_of(t, i)) @ v, (q, k, v, table, buckets)),
    "bias, scaled with the scores": (
        lambda q, k, v, t, i: softmax((bias_of(t, i) + q @ k.mT) * 0.3) @ v,
        (q, k, v, table, buckets),
    ),
    "bias less twice": (
        lambda q, k, v, t, i: softmax(torch.sub(q @ k.mT, bias_of(t, i), alpha=2)) @ v,
        (q, k, v, table, buckets),
    ),
    "bias and mask": (
        lambda q, k, v, t, i, m: in_float32(q @ k.mT + bias_of(t, i) + additive(m, q.dtype)) @ v,
        (q, k, v, table, buckets, seen),
    ),
    "bias with mask": (
        lambda q, k, v, t, i, m: in_float32(q @ k.mT + (bias_of(t, i) + additive(m, q.dtype))) @ v,
        (q, k, v, table, buckets, seen),
    ),
    "masked_fill": (
        lambda q, k, v, m: softmax((q @ k.mT * 0.3).masked_fill(~m, torch.finfo(q.dtype).min)) @ v,
        (q, k, v, seen),
    ),
    "masked_fill(-1e9)": (
        lambda q, k, v, m: softmax((q @ k.mT * 0.3).masked_fill(m == 0, -1e9)) @ v,
        (*heads(dtype=F32), seen),
    ),
    "where": (
        lambda q, k, v, m: softmax(torch.where(m, q @ k.mT * 0.3, torch.finfo(q.dtype).min)) @ v,
        (q, k, v, seen),
    ),
    "a constant is added": (lambda q, k, v: softmax(q @ k.mT + 3.0) @ v, (q, k, v)),
    "codegen": (codegen, (q, k, v, seen)),
    "megatron_bert": (megatron_bert, (q, k, v, seen)),
    "bloom": (bloom, (q, k, v, slopes, seen)),
    "mpt": (mpt, (q, k, v, slopes, seen)),
    "opt": (opt, (*flat, seen)),
    "falcon": (falcon, (q, k, v, seen)),
    "gpt_bigcode": (gpt_bigcode, (q, k[:, 0], v[:, 0], seen)),
}


@pytest.mark.parametrize(("model", "args"), SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(model: Callable, args: tuple, tracing: ModuleType) -> None:
    rewritten(tracing, model, *args)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_types(dtype: torch.dtype, tracing: ModuleType) -> None:
    rewritten(tracing, attention, *heads(dtype=dtype))
    traced = rewritten(tracing, llama, *heads(G, dtype=dtype), seen & True | (torch.arange(S) == 1))
    bound = traced.report.sites[0].bound
    assert (bound["repeat_kv"], bound["scale"]) == ("2", "0.3")
    assert bound["mask"] == f"{dtype} [{B}, 1, {L}, {S}]"


def test_repeated_heads_are_read_once(tracing: ModuleType) -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1))

    for model, args in ((llama, (gq, gk, gv, seen)), (grouped, (gq, gk, gv))):
        traced = rewritten(tracing, model, *args)
        assert "enable_gqa=True" in traced.after and f"[{B}, {H}, {S}, {D}]" not in traced.after


def test_scale_from_every_place() -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax((q.float() * 0.5) @ (k.float() / 4.0).mT * 3.0).to(v.dtype) @ v

    report = explained(scaled, q, k, v)
    assert float(report.sites[0].bound["scale"]) == pytest.approx(0.375)


def test_undecomposed_softmax_is_one_too(tracing: ModuleType) -> None:
    from portable_ops.inductor_ext.rewrite import RewritePass
    from portable_ops.inductor_ext.settings import Settings
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    decompositions = {op: f for op, f in select_decomp_table().items() if "softmax" not in str(op)}
    graph = make_fx(lambda *a: attention(*a), decompositions, tracing_mode="fake")(q, k, v)
    assert "_softmax" in graph.code
    report = RewritePass(Settings.read({"target": "sm_90", "gate": "always"})).rewrite(graph.graph)
    assert report.rewritten["attention"] == 1
    graph.recompile()
    tracing.assert_as_good_as_eager(graph(q, k, v), attention, q, k, v)


# ------------------------------------------------------------------------------------------- recognised and left alone


def sinks(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
    """gpt_oss."""
    logits = torch.cat([q @ k.mT * 0.3, s.reshape(1, -1, 1, 1).expand(B, -1, L, -1)], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return F.softmax(logits, dim=-1, dtype=torch.float32)[..., :-1].to(v.dtype) @ v


def grouped_in_five(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (softmax(q.view(B, G, H // G, L, D) @ k[:, :, None].mT) @ v[:, :, None]).view(B, H, L, D)


def regrouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One key head: its queries of all heads are the rows of one product."""
    scores = torch.bmm(q.reshape(B, H * L, D), k[:, 0].mT).view(B, H, L, S).transpose(0, 1)
    return softmax(scores) @ v.transpose(0, 1)


def mla(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return in_float32(q @ k.mT * 0.3 + additive(seen, q.dtype)) @ v


INF = "the mask may hold -inf: a row without keys is NaN here and zero in the operator"
OVERFLOW = "the masks may overflow to -inf: a row without keys is NaN here and not in the operator"
TWO_MASKS = "masked scores are replaced by a number that is not beyond those of another mask"
MIN = torch.finfo(F32).min


def masked(bias: Callable[[Tensor], Tensor]) -> Callable:
    """Attention plus what ``bias`` computes from a boolean mask."""
    return lambda q, k, v, m: softmax(q @ k.mT * 0.3 + bias(m)) @ v


def twice(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return softmax((q @ k.mT * 0.3 + (1.0 - m.float()) * MIN) + (1.0 - m.float()) * MIN) @ v


def rows_and_keys(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """A mask of queries, which no softmax sees, and one of keys."""
    scores = q @ k.mT * 0.3 + torch.where(m[..., :1], 0.0, MIN)
    return softmax(scores + torch.where(m, 0.0, MIN)) @ v


f32 = heads(dtype=F32)
numbers = boolean(B, 1, L, S).float()

INFINITE: dict[str, tuple[Callable, tuple, str]] = {
    "two masks, summed first": (
        masked(lambda m: (1.0 - m.float()) * MIN + (1.0 - m.float()) * MIN),
        (*f32, seen),
        INF,
    ),
    "two masks, one after the other": (twice, (*f32, seen), OVERFLOW),
    "a mask of queries and one of keys": (rows_and_keys, (*f32, seen), OVERFLOW),
    "filled and added": (
        lambda q, k, v, m: softmax((q @ k.mT).masked_fill(~m, MIN) + torch.where(m, 0.0, MIN)) @ v,
        (*f32, seen),
        OVERFLOW,
    ),
    "one over a mask": (masked(lambda m: 1 - 1 / m.float()), (*f32, seen), INF),
    "reciprocal": (masked(lambda m: 1 - m.float().reciprocal()), (*f32, seen), INF),
    "negative power": (masked(lambda m: 1 - m.float() ** -1), (*f32, seen), INF),
    "exponential": (masked(lambda m: -torch.exp(100 * (1 - m.float()))), (*f32, seen), INF),
    "logarithm of a shifted mask": (masked(lambda m: torch.log1p(m.float() - 1)), (*f32, seen), INF),
    "a product with -inf": (
        masked(lambda m: ((1 - m.float()) * -math.inf).nan_to_num(0.0, 0.0, -math.inf)),
        (*f32, seen),
        INF,
    ),
    "a product of an input": (masked(lambda m: m * 2.0), (*f32, numbers), INF),
    "an input from one": (masked(lambda m: (1.0 - m) * MIN), (*f32, numbers), INF),
    "an integer input": (masked(lambda m: (1.0 - m) * MIN), (*f32, seen.long()), INF),
    "too large for half precision": (
        masked(lambda m: ((1.0 - m.float()) * MIN).half()),
        (*heads(dtype=F16), seen),
        INF,
    ),
    "added, then cast to half precision": (
        lambda q, k, v, m: softmax((q.float() @ k.float().mT + (1.0 - m.float()) * MIN).half()) @ v,
        (*heads(dtype=F16), seen),
        OVERFLOW,
    ),
    "filled in half precision": (
        lambda q, k, v, m: softmax(torch.where(m, q @ k.mT, -1e30)) @ v,
        (*heads(dtype=F16), seen),
        OVERFLOW,
    ),
    "scaled behind the mask": (
        lambda q, k, v, m: softmax((q @ k.mT + (1.0 - m.float()) * MIN) * 2.0) @ v,
        (*f32, seen),
        OVERFLOW,
    ),
    "taken twice": (
        lambda q, k, v, m: softmax(torch.add(q @ k.mT, (1.0 - m.float()) * MIN, alpha=2)) @ v,
        (*f32, seen),
        OVERFLOW,
    ),
    "a scale for each head behind the mask": (
        lambda q, k, v, m, h: softmax((q @ k.mT + (1.0 - m.float()) * MIN) * h[:, None, None]) @ v,
        (*f32, seen, tensor(H, dtype=F32) + 5),
        OVERFLOW,
    ),
    "minus infinity everywhere": (lambda q, k, v: softmax(q @ k.mT - math.inf) @ v, f32, INF),
    "filled with less than another mask": (
        lambda q, k, v, m: softmax((q @ k.mT + (1.0 - m.float()) * -1e9).masked_fill(m, -1e9)) @ v,
        (*f32, seen),
        TWO_MASKS,
    ),
    "another mask on filled scores": (
        lambda q, k, v, m: softmax((q @ k.mT).masked_fill(m, -1e9) + (1.0 - m.float()) * -1e9) @ v,
        (*f32, seen),
        TWO_MASKS,
    ),
}

F8 = torch.float8_e4m3fn
ROUNDED: dict[str, tuple[Callable, tuple, str]] = {
    "probabilities in 8 bits": (
        lambda q, k, v: softmax(q @ k.mT).to(F8).float() @ v,
        f32,
        "the probabilities are rounded to torch.float8_e4m3fn, which does not hold the values' torch.float32",
    ),
    "probabilities in bfloat16": (
        lambda q, k, v: softmax(q @ k.mT).to(BF16).float() @ v,
        f32,
        "the probabilities are rounded to torch.bfloat16, which does not hold the values' torch.float32",
    ),
    "probabilities in another half": (
        lambda q, k, v: softmax(q @ k.mT).to(F16).to(BF16) @ v,
        (q, k, v),
        "the probabilities are rounded to torch.float16, which does not hold the values' torch.bfloat16",
    ),
    "scores in 8 bits": (
        lambda q, k, v: softmax((q @ k.mT).to(F8).to(q.dtype)) @ v,
        (q, k, v),
        "the scores are rounded to torch.float8_e4m3fn, which does not hold the values' torch.bfloat16",
    ),
    "scores as integers": (
        lambda q, k, v: softmax((q @ k.mT).int().float()) @ v,
        f32,
        "the scores are rounded to torch.int32, which does not hold the values' torch.float32",
    ),
}

TRANSPOSED = "the scores are transposed behind a mask, a bias or a scale"
column, square = tensor(9, 1, dtype=F32, seed=7), tensor(9, S, dtype=F32, seed=8)
keys_first = tensor(B, H, S, D, dtype=F32, seed=4), *f32[1:]
"""As many queries as keys: nothing but the order of dimensions tells them apart."""

TURNED: dict[str, tuple[Callable, tuple, str]] = {
    "a bias for each key, transposed": (
        lambda q, k, v, t: softmax((k @ q.mT + F.embedding(torch.arange(S), t)).mT) @ v,
        (*keys_first, column),
        TRANSPOSED,
    ),
    "a bias, transposed": (
        lambda q, k, v, t: softmax((k @ q.mT + F.embedding(torch.arange(S), t)).mT) @ v,
        (*keys_first, square),
        TRANSPOSED,
    ),
    "a mask, transposed": (
        lambda q, k, v: softmax((k @ q.mT).masked_fill(torch.ones(S, S, dtype=torch.bool).tril(-1), -1e9).mT) @ v,
        keys_first,
        TRANSPOSED,
    ),
    "a scale for each key, transposed": (
        lambda q, k, v, t: softmax((k @ q.mT * t[:S]).mT) @ v,
        (*keys_first, column),
        TRANSPOSED,
    ),
    "one query, viewed as a row": (
        lambda q, k, v, t: softmax((k @ q.mT + F.embedding(torch.arange(S), t)).view(B, H, 1, S)) @ v,
        (keys_first[0][:, :, :1], *f32[1:], column),
        TRANSPOSED,
    ),
}

RECOGNISED: dict[str, tuple[Callable, tuple, str]] = {
    **TURNED,
    **INFINITE,
    **ROUNDED,
    "softcap": (
        lambda q, k, v: softmax(torch.tanh(q @ k.mT * 0.3 / 50.0) * 50.0) @ v,
        (q, k, v),
        "the scores are capped by tanh, which the operator does not do",
    ),
    "sinks": (
        sinks,
        (q, k, v, tensor(H)),
        "attention sinks stand beside the scores, which the operator does not have",
    ),
    "dropout": (
        lambda q, k, v: F.dropout(softmax(q @ k.mT), 0.1) @ v,
        (q, k, v),
        "the probabilities have dropout, which the kernels have not",
    ),
    "masked_fill(-inf)": (
        lambda q, k, v, m: softmax((q @ k.mT).masked_fill(~m, float("-inf"))) @ v,
        (q, k, v, seen),
        "the mask holds -inf: a row without keys is NaN here and zero in the operator",
    ),
    "-inf added": (
        lambda q, k, v, m: softmax(q @ k.mT + torch.where(m, 0.0, float("-inf")).to(q.dtype)) @ v,
        (q, k, v, seen),
        INF,
    ),
    "triu of -inf": (
        lambda q, k, v: softmax(q @ k.mT + torch.full((L, S), float("-inf")).triu(1).to(q.dtype)) @ v,
        (q, k, v),
        INF,
    ),
    "logarithm of a mask": (lambda q, k, v, m: softmax(q @ k.mT + m.to(q.dtype).log()) @ v, (q, k, v, seen), INF),
    "an unknown mask": (lambda q, k, v, m: softmax(q @ k.mT + m) @ v, (q, k, v, additive(seen, BF16)), INF),
    "a slice of an unknown mask": (
        lambda q, k, v, m: softmax(q @ k.mT + m[:, :, :, :S]) @ v,
        (q, k, v, torch.zeros(B, 1, L, 2 * S, dtype=BF16)),
        INF,
    ),
    "masked_fill(-10000)": (
        lambda q, k, v, m: softmax((q @ k.mT).masked_fill(~m, -10000.0)) @ v,
        (q, k, v, seen),
        "masked scores are -10000, which may still weigh beside the others",
    ),
    "masked_fill(0)": (
        lambda q, k, v, m: softmax((q @ k.mT).masked_fill(~m, 0.0)) @ v,
        (q, k, v, seen),
        "masked scores are 0, which may still weigh beside the others",
    ),
    "scaled after masking": (
        lambda q, k, v, m: softmax((q @ k.mT).masked_fill(~m, -1e9) * 1e-9) @ v,
        (q, k, v, seen),
        "masked scores are scaled after they were replaced",
    ),
    "where with a tensor": (
        lambda q, k, v, m, t, i: softmax(torch.where(m, q @ k.mT, bias_of(t, i))) @ v,
        (q, k, v, seen, table, buckets),
        "the scores are replaced by a tensor where they are masked",
    ),
    "a scale for each key": (
        lambda q, k, v, t: softmax(q @ k.mT * t) @ v,
        (q, k, v, tensor(S)),
        "the scores are multiplied by a tensor along the keys",
    ),
    "a product of scores": (
        lambda q, k, v, r, p: softmax((q @ k.mT) * (r @ p.mT)) @ v,
        (q, k, v, k[:, :, :L], k),
        "the scores are multiplied by scores",
    ),
    "two products": (
        lambda q, k, v, r, p: softmax((q @ k.mT + r @ p.mT) * 0.3) @ v,
        (q, k, v, k[:, :, :L], k),
        "the scores are a sum of several products",
    ),
    "five dimensions": (
        grouped_in_five,
        (gq, gk, gv),
        "the scores have 5 dimensions, not batch, heads, queries and keys",
    ),
    "regrouped scores": (
        regrouped,
        (q, k, v),
        "the scores are regrouped between the product and the softmax",
    ),
    "values before probabilities": (
        lambda q, k, v: torch.bmm(v.mT, softmax(torch.bmm(q, k.mT)).permute(0, 2, 1)),
        flat,
        "the result has head_dim before the queries, the operator behind them",
    ),
    "a part of the keys": (
        lambda q, k, v: softmax(q @ k.mT)[..., : S - 1] @ v[:, :, : S - 1],
        (q, k, v),
        "only a part of the probabilities is used",
    ),
    "float32 queries": (
        lambda q, k, v: softmax(q @ k.mT).to(v.dtype) @ v,
        (*heads(dtype=F32)[:2], v),
        "the scores are computed in torch.float32, the result in torch.bfloat16",
    ),
    "head_dim of the values": (
        mla,
        (tensor(B, H, L, 24), tensor(B, H, S, 24), v, seen),
        "v has head_dim 16, needs q's 24",
    ),
}


@pytest.mark.parametrize(("model", "args", "reason"), RECOGNISED.values(), ids=RECOGNISED)
def test_recognised_and_left_alone(model: Callable, args: tuple, reason: str, tracing: ModuleType) -> None:
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="always")
    (site,) = [s for s in traced.report.sites if s.kind == "attention"]
    assert (site.decision, site.reason, site.pattern) == ("declined", reason, "eager_attention")
    assert not [m for m in traced.report.misses if m.kind == "attention"]
    assert traced.after == traced.before


@pytest.mark.parametrize("name", ["two masks, summed first", "two masks, one after the other", "exponential"])
def test_a_row_without_keys_is_nan_as_in_eager(name: str, tracing: ModuleType) -> None:
    model, args, _ = INFINITE[name]
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="always")
        expected = model(*args)
    assert expected[:, :, 2].isnan().all() and torch.equal(traced.result.isnan(), expected.isnan())


FINITE: dict[str, tuple[Callable, tuple]] = {
    "a mask from one": (masked(lambda m: (1.0 - m.float()) * MIN), (*f32, seen)),
    "a mask from a comparison": (masked(lambda m: (m == 0).float() * -1e9), (*f32, seen.long())),
    "two small masks": (masked(lambda m: (1.0 - m.float()) * -1e9 + torch.where(m, 0.0, -1e30)), (*f32, seen)),
    "two masks, each half": (
        masked(lambda m: (1.0 - m.float()) * (MIN / 2) + torch.where(m, 0.0, MIN / 2)),
        (*f32, seen),
    ),
    "two masks, clamped": (
        masked(lambda m: ((1.0 - m.float()) * MIN + (1.0 - m.float()) * MIN).clamp(min=MIN)),
        (*f32, seen),
    ),
    "an infinite mask, clamped": (masked(lambda m: torch.where(m, 0.0, -math.inf).clamp(min=MIN)), (*f32, seen)),
    "an exponential that fits": (masked(lambda m: -torch.exp(20 * (1 - m.float()))), (*f32, seen)),
    "filled over a mask of the same number": (
        lambda q, k, v, m: softmax((q @ k.mT + torch.where(m, 0.0, MIN)).masked_fill(m.roll(1, -1), MIN)) @ v,
        (*f32, seen),
    ),
    "slopes from powers": (
        lambda q, k, v: (
            softmax(
                q @ k.mT
                + (1.0 / 2 ** torch.arange(1, H + 1))[:, None, None] * (torch.arange(S) - torch.arange(L)[:, None])
            )
            @ v
        ),
        f32,
    ),
    "a learned gate of a distance": (
        lambda q, k, v, h: softmax(q @ k.mT - F.softplus(h)[:, None, None] * torch.arange(S)) @ v,
        (*f32, tensor(H, dtype=F32)),
    ),
}


@pytest.mark.parametrize(("model", "args"), FINITE.values(), ids=FINITE)
def test_masks_that_are_known_to_be_finite(model: Callable, args: tuple, tracing: ModuleType) -> None:
    rewritten(tracing, model, *args)


def test_alpha_of_a_number_that_scores_are_added_to(tracing: ModuleType) -> None:
    rewritten(tracing, lambda q, k, v: softmax(torch.add(torch.ones(()), q @ k.mT * 0.3, alpha=2)) @ v, *f32)


def test_what_was_found_stands_in_the_report() -> None:
    model, args, _ = RECOGNISED["softcap"]
    assert explained(model, *args).sites[0].bound == {"softcap": "50.0"}
    model, args, _ = RECOGNISED["sinks"]
    assert explained(model, *args).sites[0].bound == {"sinks": "True"}


def test_a_sink_by_logsumexp_is_a_gate_behind_attention(tracing: ModuleType) -> None:
    """granite_swa: the scores have a second reader."""

    def model(q: Tensor, k: Tensor, v: Tensor, s: Tensor, seen: Tensor) -> Tensor:
        scores = q @ k.mT * 1.0 + additive(seen, q.dtype)
        gate = torch.sigmoid(torch.logsumexp(scores.float(), -1).to(q.dtype) - s.view(1, H, 1))
        return in_float32(scores) @ v * gate[..., None]

    args = q, k, v, tensor(H), boolean(B, 1, L, S) | (torch.arange(S) == 1)
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="always")
    assert traced.report.counts["attention"] == traced.report.rewritten["attention"] == 1
    tracing.assert_as_good_as_eager(traced.result, model, *args)
    report = explained(model, *args, gate="table")
    assert [s.reason for s in report.sites if s.kind == "attention"] == [
        "an inner value has other users, so its work would be done twice"
    ]


# ------------------------------------------------------------------------------------------------------ something else

TWO = "a factor has two dimensions, neither batch nor heads: a table and not queries, keys or values"
FUNCTION = "the scores go through another function before the softmax"
NO_PRODUCT = "what goes into the softmax is not a product of queries and keys"

NEGATIVES: dict[str, tuple[Callable, tuple, str | None]] = {
    "linear attention": (lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v), (q, k, v), NO_PRODUCT),
    "linear attention with elu": (lambda q, k, v: (F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v), (q, k, v), None),
    "no softmax": (lambda q, k, v: q @ k.mT * 0.3 @ v, (q, k, v), None),
    "sigmoid": (lambda q, k, v: torch.sigmoid(q @ k.mT) @ v, (q, k, v), None),
    "relu, normalised": (lambda q, k, v: ((s := F.relu(q @ k.mT)) / s.sum(-1, keepdim=True)) @ v, (q, k, v), None),
    "softmax over queries": (lambda q, k, v: torch.softmax(q @ k.mT, -2) @ v, (q, k, v), None),
    "softmax over heads": (lambda q, k, v: torch.softmax(q @ k.mT, 1) @ v, (q, k, v), None),
    "another denominator": (
        lambda q, k, v: (torch.exp(q @ k.mT) / torch.exp(q @ k.mT * 2).sum(-1, keepdim=True)) @ v,
        (q, k, v),
        None,
    ),
    "a softmax off by one": (
        lambda q, k, v: ((e := torch.exp(q @ k.mT)) / (e.sum(-1, keepdim=True) + 1)) @ v,
        (q, k, v),
        None,
    ),
    "router": (lambda x, w: softmax(x @ w).amax(-1), (tensor(B, L, D), tensor(D, S)), None),
    "pooling by a sum": (lambda x, w: (softmax((x @ w).mT) * x.mT).sum(-1), (tensor(B, L, D), tensor(D, D)), None),
    "pooling by a product": (
        lambda x, w: softmax((x @ w).unsqueeze(1)) @ x,
        (tensor(B, L, D), tensor(D)),
        NO_PRODUCT,
    ),
    "weights from a matrix": (lambda x, w, v: softmax(x @ w) @ v, (q, tensor(D, S), v), TWO),
    "a table": (lambda x, w: softmax(x @ w.mT) @ w, (tensor(L, D), tensor(S, D)), TWO),
    "weights that are given": (lambda s, v: softmax(s) @ v, (tensor(B, H, L, S), v), NO_PRODUCT),
    "gelu between": (lambda q, k, v: softmax(F.gelu(q @ k.mT)) @ v, (q, k, v), FUNCTION),
    "silu between": (lambda q, k, v: softmax(F.silu(q @ k.mT)) @ v, (q, k, v), FUNCTION),
    "relu between": (lambda q, k, v: softmax(F.relu(q @ k.mT)) @ v, (q, k, v), NO_PRODUCT),
    "scores in steps": (
        lambda q, k, v: softmax(torch.div(q @ k.mT, 0.5, rounding_mode="floor")) @ v,
        (q, k, v),
        NO_PRODUCT,
    ),
    "squared scores": (lambda q, k, v: softmax((s := q @ k.mT) * s) @ v, (q, k, v), FUNCTION),
    "scores over their norm": (
        lambda q, k, v: softmax((s := q @ k.mT) / s.abs().amax(-1, keepdim=True)) @ v,
        (q, k, v),
        FUNCTION,
    ),
    "probabilities are the second factor": (lambda q, k, v: v.mT @ softmax(q @ k.mT).mT.mT, (q, k, v[:, :, :L]), None),
    "nothing is weighted": (lambda q, k: softmax(q @ k.mT), (q, k), None),
    "squared probabilities": (lambda q, k, v: softmax(q @ k.mT) ** 2 @ v, (q, k, v), None),
}


@pytest.mark.parametrize(("model", "args", "reason"), NEGATIVES.values(), ids=NEGATIVES)
def test_something_else(model: Callable, args: tuple, reason: str | None, tracing: ModuleType) -> None:
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="always", enable=("attention",))
    assert traced.report.counts["attention"] == 0, traced.before
    reasons = [m.reason for m in traced.report.misses if m.kind == "attention"]
    assert reasons == ([] if reason is None else [reason])
    assert traced.after == traced.before


# ----------------------------------------------------------------------------------------------- torch's own lowerings


def sdpa(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None = None, **how: object) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, m, **how)


def only_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


wide = tensor(B, H, L, 24), tensor(B, H, S, 24)

MATH_FORMS: dict[str, tuple[Callable, tuple]] = {
    "plain": (sdpa, (*wide, v)),
    "boolean mask": (sdpa, (*wide, v, seen)),
    "float mask": (sdpa, (*wide, v, additive(seen, BF16))),
    "causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), (*wide, v)),
    "float32": (sdpa, tuple(t.float() for t in (*wide, v))),
    "grouped": (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), (wide[0], wide[1][:, :G], gv)),
    "restricted": (only_math, (q, k, v)),
}


@pytest.mark.parametrize(("model", "args"), MATH_FORMS.values(), ids=MATH_FORMS)
def test_the_math_form_is_recognised_once(model: Callable, args: tuple, tracing: ModuleType) -> None:
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="always")  # without the reasons of pinning
    (site,) = traced.report.sites
    assert (site.pattern, site.decision) == ("lowered_attention", "declined")
    assert site.reason == "it arrives already lowered to plain matmuls"
    assert traced.after == traced.before
    report = explained(model, *args)
    (site,) = report.sites
    assert site.decision == "declined" and not report.misses
    assert ("restricted" in site.reason) if model is only_math else ("head_dim" in site.reason)


def test_two_calls_on_one_line_are_two(tracing: ModuleType) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v) + sdpa(k[:, :, :L], k, v)

    report = explained(model, *wide, v)
    assert report.counts["attention"] == 2 and len({s.reason for s in report.sites}) == 1


def test_a_written_attention_beside_a_pinned_one(tracing: ModuleType) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v) + attention(q, k, v)

    with torch.no_grad():
        traced = tracing.trace(model, q, k, v, gate="always")
    assert traced.report.rewritten["attention"] == 2
    assert {s.pattern for s in traced.report.sites} == {"attention", "eager_attention"}
    tracing.assert_as_good_as_eager(traced.result, model, q, k, v)


# ------------------------------------------------------------------------------------------------- readers and writers


def test_probabilities_that_are_returned(tracing: ModuleType) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = in_float32(q @ k.mT * 0.3)
        return p @ v, p

    with torch.no_grad():
        traced = tracing.trace(model, q, k, v, gate="always")
    assert traced.report.rewritten["attention"] == 1
    tracing.assert_as_good_as_eager(traced.result, model, q, k, v)
    (site,) = explained(model, q, k, v, gate="table").sites
    assert site.reason == "an inner value has other users, so its work would be done twice"


def test_the_mask_is_written_between_the_pieces(tracing: ModuleType) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        mask = additive(seen, q.dtype)
        scores = q @ k.mT
        scores.mul_(0.3)
        scores += mask
        mask.fill_(1.0)
        k.zero_()
        p = in_float32(scores)
        return p @ v + mask.sum()

    args = q, k, v, seen
    with torch.no_grad():
        traced = tracing.trace(model, *(a.clone() for a in args), gate="always")
        expected = model(*(a.clone() for a in args))
    assert traced.report.rewritten["attention"] == 1
    torch.testing.assert_close(traced.result, expected, rtol=2e-2, atol=2e-2)


def test_values_that_are_written_after_the_softmax(tracing: ModuleType) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = in_float32(q @ k.mT * 0.3)
        v = v.clone()
        v[:, :, 0].fill_(1.0)
        return p @ v

    with torch.no_grad():
        traced = tracing.trace(model, q, k, v, gate="always")
    assert traced.report.rewritten["attention"] == 1
    tracing.assert_as_good_as_eager(traced.result, model, q, k, v)


# ----------------------------------------------------------------------------------------- training, dynamic, autocast


@pytest.mark.parametrize("name", ["llama", "bloom", "einsum on rows", "position bias", "masked_fill", "codegen"])
def test_a_training_graph_counts_the_same(name: str, tracing: ModuleType) -> None:
    model, args = SPELLINGS[name]
    inputs = [a.clone().requires_grad_() if i < 3 else a for i, a in enumerate(args)]
    traced = tracing.trace(model, *inputs, gate="always")
    assert traced.report.counts["attention"] == traced.report.rewritten["attention"] == 1
    tracing.assert_as_good_as_eager(traced.result.detach(), model, *args)
    gradient = tensor(*traced.result.shape, seed=9)
    ours = torch.autograd.grad(traced.result, inputs[:3], gradient)
    eager = torch.autograd.grad(model(*inputs), inputs[:3], gradient)
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", ["softcap", "sinks", "dropout", "masked_fill(-inf)", "two products"])
def test_a_training_graph_recognises_the_same(name: str, tracing: ModuleType) -> None:
    model, args, reason = RECOGNISED[name]
    traced = tracing.trace(model, *(a.clone().requires_grad_(a.is_floating_point()) for a in args), gate="always")
    assert [s.reason for s in traced.report.sites if s.kind == "attention"] == [reason]


def test_dynamic_shapes(tracing: ModuleType) -> None:
    def known_head_dim(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (t.view(t.shape[0], n, t.shape[2], D) for t, n in ((q, H), (k, G), (v, G)))
        return llama(q, k, v, seen)

    rewritten(tracing, known_head_dim, gq, gk, gv, seen, dynamic=True)

    def model(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(*q.shape[:3], k.shape[2])
        p = in_float32(scores + additive(seen, q.dtype)).flatten(0, 1)
        return torch.bmm(p, v.flatten(0, 1)).view(q.shape)

    args = tuple(t.clone() for t in (q, k, v, seen))
    for argument, dims in zip(args, ((0, 2), (0, 2), (0, 2), (0, 2, 3)), strict=True):
        for dim in dims:
            torch._dynamo.mark_dynamic(argument, dim)
    rewritten(tracing, model, *args)


def test_a_scale_that_dynamic_shapes_make_symbolic(tracing: ModuleType) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = (t.view(-1, H, t.shape[2], D) for t in (q, k, v))
        return softmax(q @ k.mT * scale) @ v

    with torch.no_grad():
        traced = tracing.trace(model, q, k, v, 0.37, gate="always", dynamic=True)
    assert traced.report.counts["attention"] == 1
    tracing.assert_as_good_as_eager(traced.result, lambda *a: model(*a, 0.37), q, k, v)


def test_a_symbolic_head_dim(tracing: ModuleType) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(q @ k.mT / math.sqrt(q.shape[-1]) + q.shape[1]) @ v

    with torch.no_grad():
        traced = tracing.trace(model, q, k, v, gate="always", dynamic=True)
    assert [s.decision for s in traced.report.sites] == ["declined"] and not traced.report.misses
    assert traced.after == traced.before
    tracing.assert_as_good_as_eager(traced.result, model, q, k, v)


def test_autocast(tracing: ModuleType) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return attention(q, k, v)

    args = heads(dtype=F32)
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="always")
        expected = model(*args)
    assert traced.report.rewritten["attention"] == 1 and traced.result.dtype == BF16
    torch.testing.assert_close(traced.result, expected, rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------------------------------------------- random spellings

SCALINGS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda q, k: q @ k.mT * 0.3,
    lambda q, k: 0.3 * torch.matmul(q, k.transpose(-2, -1)),
    lambda q, k: (q * 0.3) @ k.mT,
    lambda q, k: q @ (k.mT * 0.3),
    lambda q, k: (q @ k.mT) / 3.0,
    lambda q, k: torch.einsum("bhld,bhsd->bhls", q, k) * 0.3,
    lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, L, S) * 0.3,
    lambda q, k: (k @ q.mT).mT * 0.3,
]
MASKS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda s, m: s,
    lambda s, m: s + additive(m, s.dtype),
    lambda s, m: additive(m, s.dtype).expand(B, H, L, S) + s,
    lambda s, m: s.masked_fill(~m, torch.finfo(torch.bfloat16).min),
    lambda s, m: torch.where(m, s, -1e30),
    lambda s, m: s + 2.0,
    lambda s, m: s - s.amax(-1, keepdim=True),
]
SOFTMAXES: list[Callable[[Tensor], Tensor]] = [
    softmax,
    in_float32,
    lambda s: s.float().softmax(-1).type_as(s),
    lambda s: s.log_softmax(-1).exp(),
    lambda s: ((e := (s.float() - s.float().amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True)).to(s.dtype),
]
WEIGHTINGS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda p, v: p @ v,
    lambda p, v: torch.einsum("bhls,bhsd->blhd", p, v),
    lambda p, v: (p @ v).transpose(1, 2).reshape(B, L, H * D),
    lambda p, v: torch.bmm(p.flatten(0, 1), v.flatten(0, 1)).view(B, H, L, D),
    lambda p, v: F.dropout(p, 0.5, training=False) @ v,
]


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.data())
def test_random_spellings(tracing: ModuleType, data: st.DataObject) -> None:
    scores, mask, normalise, weigh = (data.draw(st.sampled_from(f)) for f in (SCALINGS, MASKS, SOFTMAXES, WEIGHTINGS))
    dtype = data.draw(st.sampled_from([BF16, F32]))
    n = data.draw(st.sampled_from([1, 2]))

    def model(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        k, v = (repeat_kv(t, n) for t in (k, v)) if n > 1 else (k, v)
        return weigh(normalise(mask(scores(q, k), m)), v)

    rewritten(tracing, model, *heads(H // n, dtype=dtype), seen)


BROKEN_SCORES: list[Callable[[Tensor], Tensor]] = [torch.relu, torch.sin, F.silu, lambda s: s.clamp(-1, 1), torch.sqrt]
BROKEN_SOFTMAXES: list[Callable[[Tensor], Tensor]] = [
    torch.sigmoid,
    lambda s: torch.softmax(s, -2),
    lambda s: torch.softmax(s, 1),
    lambda s: F.normalize(s, dim=-1),
    lambda s: (e := s.exp()) / (e.sum(-1, keepdim=True) + 1),
    lambda s: torch.softmax(s, -1) - 0.1,
    lambda s: torch.softmax(s, -1).flip(-1),
]


@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.data())
def test_random_near_misses(tracing: ModuleType, data: st.DataObject) -> None:
    scores, weigh = (data.draw(st.sampled_from(f)) for f in (SCALINGS, WEIGHTINGS))
    if data.draw(st.booleans()):
        between, normalise = data.draw(st.sampled_from(BROKEN_SCORES)), softmax
    else:
        between, normalise = (lambda s: s), data.draw(st.sampled_from(BROKEN_SOFTMAXES))
    with torch.no_grad():
        traced = tracing.trace(lambda q, k, v: weigh(normalise(between(scores(q, k))), v), q, k, v, gate="always")
    assert traced.report.counts["attention"] == 0
    assert traced.after == traced.before


# ------------------------------------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize("name", ["llama", "bloom", "mpt"])
def test_compiled(name: str, tracing: ModuleType) -> None:
    model, args = SPELLINGS[name]
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="portable_ops", options={"portable_ops.gate": "always"})
        tracing.assert_as_good_as_eager(compiled(*args), model, *args)


def test_left_alone_by_default(tracing: ModuleType) -> None:
    model, args = SPELLINGS["llama"]
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="never")
    assert traced.report.counts["attention"] == 1
    assert traced.after == traced.before
