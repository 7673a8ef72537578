"""Queries and keys together: what is joined with which norms and caches, what is left apart; caches stay right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from portable_ops.inductor_ext import Report, measure, reports
from portable_ops.patterns import Match, Miss
from portable_ops.patterns.qk_rope import QK_ROPE_PATTERN
from torch import Tensor, nn

B, H, K, S, D, T = 2, 4, 2, 5, 16, 14
BF16, F32 = torch.bfloat16, torch.float32


def tensor(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(length: int = S, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    angles = torch.rand(1, length, D // 2, generator=torch.Generator().manual_seed(7)) * 6.3
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight.float())).type_as(x)


class Heads(nn.Module):
    """From a packed projection to rotated heads, and on to what ``then`` makes of q, k and v."""

    def __init__(
        self,
        normalise: Callable = norm,
        rotate: Callable = rope,
        then: Callable | None = None,
        late: bool = False,
        length: int = S,
    ) -> None:
        super().__init__()
        self.normalise, self.rotate, self.then, self.late = normalise, rotate, then, late
        self.q_weight = nn.Parameter(tensor(D, seed=1) * 0.2 + 1, requires_grad=False)
        self.k_weight = nn.Parameter(tensor(D, seed=2) * 0.2 + 1, requires_grad=False)
        self.register_buffer("k_cache", tensor(B, K, T, D, seed=3))
        self.register_buffer("v_cache", tensor(B, K, T, D, seed=4))
        self.register_buffer("position", torch.tensor(3))

    def forward(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k, v = (p.unflatten(-1, (-1, D)) for p in qkv.split((H * D, K * D, K * D), -1))
        if self.late:
            q, k = self.normalise(q.transpose(1, 2), self.q_weight), self.normalise(k.transpose(1, 2), self.k_weight)
        else:
            q, k = self.normalise(q, self.q_weight).transpose(1, 2), self.normalise(k, self.k_weight).transpose(1, 2)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        return (q, k) if self.then is None else self.then(self, q, k, v.transpose(1, 2))


def inputs(length: int = S) -> tuple[Tensor, ...]:
    return tensor(B, length, (H + 2 * K) * D), *tables(length)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def run(tracing: ModuleType, model: nn.Module, *args: Tensor, steps: int = 1, **options: Any) -> Any:
    """Trace ``model`` and check results and buffers of each step against eager; returns what the last step traced."""
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    with torch.no_grad():
        for _ in range(steps):
            before = dict(zip(("eager", "wide"), map(state, (eager, wide)), strict=True))
            traced = tracing.trace(model, *args, **{"gate": "always", **options})
            results = eager(*args)
            with tracing.Widened():
                exact = wide(*(a.double() for a in args))
            tracing.assert_no_further_than(_tensors(traced.result), _tensors(results), _tensors(exact))
            ours, theirs, true = (state(m) for m in (model, eager, wide))
            floats = [name for name, t in ours.items() if t.is_floating_point()]
            tracing.assert_no_further_than(*([own[name] for name in floats] for own in (ours, theirs, true)))
            for name in ours:
                unwritten = theirs[name] == before["eager"][name]
                assert torch.equal(ours[name][unwritten], theirs[name][unwritten]), name
    return traced


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def joined(report: Report) -> list[str]:
    """The operator that each rewritten norm and rotation is a part of."""
    kinds = ("rms_norm", "rope")
    return [s.bound.get("joined", "") for s in report.sites if s.kind in kinds and s.decision == "rewritten"]


# ------------------------------------------------------------------------------------------------- rotations and norms


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return x


ROTATIONS: dict[str, Callable] = {
    "halves": rope,
    "neighbours": lambda x, cos, sin: (
        x * cos.unsqueeze(1) + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin.unsqueeze(1)
    ),
    "partial": lambda x, cos, sin: torch.cat((rope(x[..., :6], cos[..., :6], sin[..., :6]), x[..., 6:]), -1),
    "in float32": lambda x, cos, sin: rope(x.float(), cos.float(), sin.float()).type_as(x),
    "by parts": lambda x, cos, sin: (
        lambda a, b, c, s: torch.cat((a * c - b * s, b * c + a * s), -1)
    )(*x.chunk(2, -1), cos[:, None, :, : D // 2], sin[:, None, :, : D // 2]),
}  # fmt: skip


@pytest.mark.parametrize("rotate", ROTATIONS.values(), ids=ROTATIONS)
def test_two_rotations_are_one_launch(rotate: Callable, tracing: ModuleType) -> None:
    traced = run(tracing, Heads(plain, rotate), *inputs())
    assert traced.report.counts["rope"] == traced.report.rewritten["rope"] == 2
    assert joined(traced.report) == ["qk_rope"] * 2
    assert traced.after.count("portable_ops.qk_rope.default") == 1
    assert "portable_ops.rope.default" not in traced.after and not traced.report.misses


def test_complex_tables(tracing: ModuleType) -> None:
    def both(q: Tensor, k: Tensor, cis: Tensor) -> Any:
        pairs = (torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) for x in (q, k))
        return tuple(torch.view_as_real(p * cis).flatten(-2).bfloat16() for p in pairs)

    cos, sin = tables(dtype=F32)
    cis = torch.complex(cos, sin)[:, None, :, : D // 2]
    args = tensor(B, H, S, D), tensor(B, K, S, D, seed=1), cis
    with torch.no_grad():
        traced = tracing.trace(both, *args, gate="always")
        ours, theirs = traced.result, both(*args)
    assert joined(traced.report) == ["qk_rope"] * 2
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-2, atol=1e-6)


NORMS = {"llama": norm, "gemma": gemma_norm, "torch": lambda x, w: nn.functional.rms_norm(x, (D,), w, 1e-6)}


@pytest.mark.parametrize("late", [False, True], ids=["before the transpose", "behind it"])
@pytest.mark.parametrize("normalise", NORMS.values(), ids=NORMS)
def test_norms_in_front_are_taken_over(normalise: Callable, late: bool, tracing: ModuleType) -> None:
    traced = run(tracing, Heads(normalise, late=late), *inputs())
    assert traced.report.counts["rope"] == traced.report.counts["rms_norm"] == 2
    assert joined(traced.report) == ["qk_rope"] * 4
    assert traced.after.count("portable_ops.") == 1
    assert "rsqrt" not in traced.after and "aten.mul" not in traced.after


def test_keys_first(tracing: ModuleType) -> None:
    class KeysFirst(Heads):
        def forward(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
            q, k, v = (p.unflatten(-1, (-1, D)).transpose(1, 2) for p in qkv.split((H * D, K * D, K * D), -1))
            k = rope(norm(k, self.k_weight), cos, sin)
            return append(self, rope(norm(q, self.q_weight), cos, sin), k, v)

    traced = run(tracing, KeysFirst(), *inputs())
    assert joined(traced.report) == ["qk_rope_append"] * 4


def test_layers_are_joined_one_by_one(tracing: ModuleType) -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for _ in range(3):
            q, k = rope(x, cos, sin), rope(x * 2, cos, sin)
            x = torch.softmax(q @ k.mT, -1) @ x
        return x

    with torch.no_grad():
        traced = tracing.trace(model, tensor(B, H, S, D), *tables(), gate="always", disable="attention")
    assert traced.report.counts["rope"] == 6
    assert joined(traced.report) == ["qk_rope"] * 6


# ----------------------------------------------------------------------------------------------------------- the cache


def positions(model: Heads, k: Tensor) -> Tensor:
    return torch.arange(k.shape[2], device=k.device) + model.position


def append(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    where = positions(model, k)
    model.k_cache.index_copy_(2, where, k)
    model.v_cache.index_copy_(2, where, v)
    return q @ model.k_cache.repeat_interleave(H // K, 1).mT


def by_index_put(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    where = positions(model, k)
    model.k_cache[:, :, where] = k
    model.v_cache[:, :, where] = v
    return q


def by_slice(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    model.k_cache[:, :, 2 : 2 + S] = k
    model.v_cache[:, :, 2 : 2 + S] = v
    return q + model.v_cache.sum()


def counting(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Hugging Face's static layers do: the position is a buffer that goes on."""
    where = positions(model, k)
    model.position.add_(k.shape[2])
    model.k_cache.index_copy_(2, where, k)
    model.v_cache.index_copy_(2, where, v)
    return q


APPENDS = {"index_copy": append, "index_put": by_index_put, "slice": by_slice, "counting": counting}


@pytest.mark.parametrize("normalise", [norm, plain], ids=["normed", "plain"])
@pytest.mark.parametrize("then", APPENDS.values(), ids=APPENDS)
def test_keys_and_values_are_appended_in_place(then: Callable, normalise: Callable, tracing: ModuleType) -> None:
    model = Heads(normalise, then=then)
    traced = run(tracing, model, *inputs(), steps=2 if then is not counting else 1)
    assert joined(traced.report) == ["qk_rope_append"] * (2 if normalise is plain else 4)
    assert traced.after.count("auto_functionalized_v2(portable_ops.qk_rope_append.default") == 1
    assert all(word not in traced.after for word in ("index_put", "index_copy", "slice_scatter"))
    assert traced.before.count("copy_") == traced.after.count("copy_")


@pytest.mark.parametrize("length", [1, S])
def test_step_after_step(length: int, tracing: ModuleType) -> None:
    run(tracing, Heads(then=counting), *inputs(length), steps=2)


def test_a_cache_with_tokens_before_heads(tracing: ModuleType) -> None:
    class Slots(Heads):
        def __init__(self) -> None:
            super().__init__()
            self.k_cache, self.v_cache = (tensor(B, T, K, D, seed=s) for s in (3, 4))

    def then(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = positions(model, k)
        model.k_cache[:, where] = k.transpose(1, 2)
        model.v_cache[:, where] = v.transpose(1, 2)
        return q

    model = Slots()
    model.then = then
    traced = run(tracing, model, *inputs(), steps=2)
    assert joined(traced.report) == ["qk_rope_append"] * 4


# ---------------------------------------------------------------------------------------------------------- left apart


def reads_before(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    old = model.k_cache * 2
    return append(model, q, k, v), old


def twice(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    model.k_cache.index_copy_(2, positions(model, k), k)
    model.k_cache.index_copy_(2, positions(model, k) + 1, k.flip(2))
    model.v_cache.index_copy_(2, positions(model, k), v)
    return q


def functional(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    where = positions(model, k)
    return q, model.k_cache.index_copy(2, where, k), model.v_cache.index_copy(2, where, v)


def half_functional(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    where = positions(model, k)
    model.k_cache.index_copy_(2, where, k)
    return q, model.v_cache.index_copy(2, where, v)


def another_place(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    model.k_cache.index_copy_(2, positions(model, k), k)
    model.v_cache.index_copy_(2, positions(model, k) + 1, v)
    return q


def keys_only(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    model.k_cache.index_copy_(2, positions(model, k), k)
    return q


def keys_returned(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return append(model, q, k, v), k


def scaled_keys(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return append(model, q, k * 2, v)


def added(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    where = positions(model, k)
    torch.ops.aten.index_put_(model.k_cache, [None, None, where], k, True)
    torch.ops.aten.index_put_(model.v_cache, [None, None, where], v, True)
    return q


def changed_afterwards(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    append(model, q, k, v)
    model.k_cache.mul_(2)
    return q


def made_here(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    where = positions(model, k)
    return q, torch.zeros_like(model.k_cache).index_copy(2, where, k), torch.zeros_like(k).index_copy(2, where % S, v)


def a_part(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Only the first sequence's."""
    model.k_cache[:1].index_copy_(2, positions(model, k), k[:1])
    model.v_cache[:1].index_copy_(2, positions(model, k), v[:1])
    return q


def moved_in_the_cache(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The values come from where others of them go."""
    model.k_cache[:, :, 2 : 2 + S] = k
    model.v_cache[:, :, 2 : 2 + S] = model.v_cache[:, :, 4 : 4 + S]
    return q


NOWHERE = "neither result goes to a cache and nowhere else"
APART: dict[str, tuple[Callable, str]] = {
    "the old keys are read": (reads_before, "what the cache of the keys held before is read as well"),
    "written twice": (twice, NOWHERE),
    "functional": (functional, "the graph does not overwrite the cache of the keys with the update"),
    "values functional": (half_functional, "the graph does not overwrite the cache of the values with the update"),
    "different positions": (another_place, "keys and values go to different positions"),
    "keys only": (keys_only, "no values are written beside the keys"),
    "keys returned": (keys_returned, NOWHERE),
    "keys scaled": (scaled_keys, NOWHERE),
    "accumulated": (added, NOWHERE),
    "changed afterwards": (changed_afterwards, "the graph does not overwrite the cache of the keys with the update"),
    "a tensor of the graph": (made_here, "the keys go to a tensor that is no input of the graph"),
    "a part of a cache": (a_part, NOWHERE),
    "moved in the cache": (moved_in_the_cache, "what the cache of the values held before is read as well"),
}


@pytest.mark.parametrize(("then", "reason"), APART.values(), ids=APART)
def test_a_cache_that_is_left_as_it_was(then: Callable, reason: str, tracing: ModuleType) -> None:
    found: list[Match] = []
    traced = run(tracing, Heads(then=then), *inputs(), steps=2)
    assert joined(traced.report) == ["qk_rope"] * 4
    assert "qk_rope_append" not in traced.after
    found = matches(tracing, Heads(then=then), *inputs())
    assert [m.bound["append"] for m in found] == [reason]


def matches(tracing: ModuleType, model: Callable, *args: Tensor) -> list[Match | Miss]:
    """What the pattern says of every anchor, before anything is rewritten."""
    said: list[Match | Miss] = []

    class Asking(tracing.RewritePass):
        def rewrite(self, graph: torch.fx.Graph) -> Report:
            said.extend(QK_ROPE_PATTERN.try_match(n) for n in graph.nodes if QK_ROPE_PATTERN.anchors(n))
            return super().rewrite(graph)

    original, tracing.RewritePass = tracing.RewritePass, Asking
    try:
        with torch.no_grad():
            tracing.trace(model, *args, gate="never")
    finally:
        tracing.RewritePass = original
    return [s for s in said if isinstance(s, Match)] or [s for s in said if s is not None]


@pytest.mark.parametrize("offset", [0, "position"])
def test_one_token_for_several_positions(offset: Any, tracing: ModuleType) -> None:
    def then(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = torch.arange(2, 5) + (model.position if offset else 0)
        model.k_cache[:, :, where] = k
        model.v_cache[:, :, where] = v
        return q

    traced = run(tracing, Heads(then=then), *inputs(1))
    assert joined(traced.report) == ["qk_rope"] * 4
    args = inputs(1)
    assert [m.bound["append"] for m in matches(tracing, Heads(then=then), *args)] == [
        "the keys are repeated along their positions"
    ]


def test_two_views_of_one_cache(tracing: ModuleType) -> None:
    """The two halves of one buffer: AOTAutograd gives the graph the buffer, whose parts are written."""

    class Shared(Heads):
        def __init__(self) -> None:
            super().__init__(then=append)
            self.register_buffer("both", tensor(2, B, K, T, D, seed=3))
            del self.k_cache, self.v_cache

        @property
        def k_cache(self) -> Tensor:
            return self.both[0]

        @property
        def v_cache(self) -> Tensor:
            return self.both[1]

    traced = run(tracing, Shared(), *inputs(), steps=2)
    assert "qk_rope_append" not in traced.after
    assert joined(traced.report) == ["qk_rope"] * 4


def test_aliased_inputs(tracing: ModuleType) -> None:
    def step(base: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        where = torch.arange(S)
        k_cache.index_copy_(2, where, rope(k, cos, sin))
        v_cache.index_copy_(2, where, k)
        return rope(q, cos, sin) + base.sum()

    def arguments() -> list[Tensor]:
        base = tensor(2, B, K, T, D, seed=3)
        return [base, tensor(B, H, S, D), tensor(B, K, S, D, seed=1), *tables(), base[0], base[1]]

    ours, theirs = arguments(), arguments()
    with torch.no_grad():
        traced = tracing.trace(step, *ours, gate="always")
        expected = step(*theirs)
    assert "qk_rope_append" not in traced.after
    torch.testing.assert_close(traced.result, expected, rtol=2e-2, atol=2e-1)
    torch.testing.assert_close(ours[0], theirs[0])


# ------------------------------------------------------------------------------------------- what stays two launches


def other_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return rope(q, cos, sin), rope(k, cos + 1, sin)


def other_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return rope(q, cos, sin), ROTATIONS["neighbours"](k, cos, sin)


def other_types(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return rope(q, cos, sin), rope(k.float(), cos, sin).bfloat16()


def other_lengths(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return rope(q, cos[:, :1], sin[:, :1]), rope(k[:, :, :3], cos[:, :1], sin[:, :1])


def one(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return rope(q, cos, sin), k


def turned_again(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return rope(rope(q, cos, sin), cos, sin), k


LONELY = "no second rotation by the same cosine and sine follows"
TWO: dict[str, tuple[Callable, str]] = {
    "other tables": (other_tables, LONELY),
    "other pairs": (other_pairs, "the two rotations differ in pairing, out_pairing"),
    "other types": (other_types, "the two rotations differ in compute_dtype, product_dtype"),
    "one alone": (one, LONELY),
    "turned again": (turned_again, LONELY),
}


@pytest.mark.parametrize(("both", "reason"), TWO.values(), ids=TWO)
def test_rotations_that_stay_apart(both: Callable, reason: str, tracing: ModuleType) -> None:
    args = tensor(B, H, S, D), tensor(B, K, S, D, seed=1), *tables()
    with torch.no_grad():
        traced = tracing.trace(both, *args, gate="always")
    assert joined(traced.report) == [""] * traced.report.counts["rope"]
    assert traced.after.count("portable_ops.rope.default") == traced.report.counts["rope"] > 0
    tracing.assert_as_good_as_eager(traced.result, both, *args)
    assert reason in {m.reason for m in matches(tracing, both, *args)}


def test_lengths_that_differ_stay_apart(tracing: ModuleType) -> None:
    args = tensor(B, K, S, D), tensor(B, H, S, D, seed=1), *tables()
    with torch.no_grad():
        traced = tracing.trace(other_lengths, *args, gate="always")
    assert joined(traced.report) == ["", ""]
    tracing.assert_as_good_as_eager(traced.result, other_lengths, *args)


class _OwnEps(Heads):
    def forward(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k, _ = (p.unflatten(-1, (-1, D)).transpose(1, 2) for p in qkv.split((H * D, K * D, K * D), -1))
        return rope(norm(q, self.q_weight, 1e-5), cos, sin), rope(norm(k, self.k_weight), cos, sin)


class _OneNorm(Heads):
    def forward(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k, _ = (p.unflatten(-1, (-1, D)).transpose(1, 2) for p in qkv.split((H * D, K * D, K * D), -1))
        return rope(norm(q, self.q_weight), cos, sin), rope(k, cos, sin)


class _WholeNorm(Heads):
    """As OLMo 2 does: over all heads together."""

    def forward(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k, _ = qkv.split((H * D, K * D, K * D), -1)
        q, k = norm(q, self.q_weight.repeat(H)), norm(k, self.k_weight.repeat(K))
        return [rope(x.unflatten(-1, (-1, D)).transpose(1, 2), cos, sin) for x in (q, k)]


@pytest.mark.parametrize("model", [_OwnEps, _OneNorm, _WholeNorm], ids=["own eps", "one norm", "whole rows"])
def test_norms_that_are_not_taken_over(model: type[Heads], tracing: ModuleType) -> None:
    traced = run(tracing, model(), *inputs())
    norms = 1 if model is _OneNorm else 2
    assert traced.report.counts["rms_norm"] == traced.report.rewritten["rms_norm"] == norms
    assert sorted(joined(traced.report)) == [""] * norms + ["qk_rope"] * 2


class _ReadNorm(Heads):
    """The normalised heads are read beside the rotation as well."""

    def forward(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k, _ = (p.unflatten(-1, (-1, D)).transpose(1, 2) for p in qkv.split((H * D, K * D, K * D), -1))
        q, k = norm(q, self.q_weight), norm(k, self.k_weight)
        return rope(q, cos, sin), rope(k, cos, sin), k


def test_norms_that_others_read_count_once(tracing: ModuleType) -> None:
    traced = run(tracing, _ReadNorm(), *inputs())
    assert traced.report.counts["rms_norm"] == traced.report.rewritten["rms_norm"] == 2
    assert sorted(joined(traced.report)) == ["", "", "qk_rope", "qk_rope"]


def test_norms_over_another_dimension(tracing: ModuleType) -> None:
    """The transposed result lies as if each head had been normalised."""

    def model(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        weight = torch.ones(D, dtype=BF16)
        return [rope(norm(x.mT, weight).mT, cos, sin) for x in (q, k)]

    args = tensor(B, H, D, D), tensor(B, K, D, D, seed=1), *tables(D)
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="always")
    assert traced.report.counts["rms_norm"] == 2 and not traced.report.rewritten["rms_norm"]
    assert joined(traced.report) == ["qk_rope"] * 2
    tracing.assert_as_good_as_eager(traced.result, model, *args)


def values_rotated_too(model: Heads, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The rotation that follows that of the keys is that of the values."""
    k, v = rope(k, *model.tables), rope(v, *model.tables)
    return append(model, rope(q, *model.tables), k, v)


def test_values_that_are_rotated_too(tracing: ModuleType) -> None:
    model = Heads(plain, lambda x, cos, sin: x, then=values_rotated_too)
    model.tables = tables()
    traced = run(tracing, model, *inputs())
    assert "qk_rope_append" not in traced.after
    assert sorted(joined(traced.report)) == ["", "qk_rope", "qk_rope"]


# --------------------------------------------------------------------------------------------------- gate and settings


def test_the_default_gate_leaves_all_as_it_was(tracing: ModuleType) -> None:
    model = Heads(then=append)
    with torch.no_grad():
        traced = tracing.trace(model, *inputs(), gate="table")
        assert traced.after == traced.before == tracing.stock_graph(Heads(then=append), *inputs())
    assert traced.report.counts["rope"] == traced.report.counts["rms_norm"] == 2
    assert not any(traced.report.rewritten.values())


@pytest.mark.parametrize("kind", ["rope", "rms_norm"])
def test_a_kind_that_is_disabled_is_not_taken_along(kind: str, tracing: ModuleType) -> None:
    traced = run(tracing, Heads(then=append), *inputs(), disable=kind)
    assert not traced.report.rewritten[kind]
    assert traced.report.counts["rope"] == traced.report.counts["rms_norm"] == 2
    expected = ["qk_rope_append"] * 2 if kind == "rms_norm" else [""] * 2
    assert joined(traced.report) == expected


@pytest.mark.parametrize("then", [append, counting], ids=["read afterwards", "counting"])
def test_generated_code_writes_the_caller_s_cache(then: Callable, tracing: ModuleType) -> None:
    """Inductor's code for the CPU, which calls the operator on the buffers themselves; one step after the other."""
    torch._dynamo.reset()
    model = Heads(then=then)
    eager, wide, address = copy.deepcopy(model), copy.deepcopy(model).double(), model.k_cache.data_ptr()
    compiled = torch.compile(model, backend="portable_ops", options={"portable_ops.gate": "always"}, fullgraph=True)
    with torch.no_grad():
        for step in range(3):
            args = tensor(B, 2, (H + 2 * K) * D, seed=step), *tables(2)
            ours, theirs = _tensors(compiled(*args)), _tensors(eager(*args))
            with tracing.Widened():
                exact = _tensors(wide(*(a.double() for a in args)))
            tracing.assert_no_further_than(ours, theirs, exact)
            for name in ("k_cache", "v_cache"):
                tracing.assert_no_further_than(*([getattr(m, name)] for m in (model, eager, wide)))
            assert torch.equal(model.position, eager.position)
    assert model.k_cache.data_ptr() == address
    assert reports()[-1].rewritten["rope"] == 2


@pytest.mark.parametrize("then", [append, by_slice], ids=["index_copy", "slice"])
def test_what_is_measured_writes_the_cache_too(then: Callable, tracing: ModuleType) -> None:
    problems: list[dict[str, Any]] = []

    class Describing(tracing.RewritePass):
        def rewrite(self, graph: torch.fx.Graph) -> Report:
            found = (QK_ROPE_PATTERN.try_match(n) for n in graph.nodes if QK_ROPE_PATTERN.anchors(n))
            problems.extend(measure._describe(m) for m in found if isinstance(m, Match))
            return super().rewrite(graph)

    original, tracing.RewritePass = tracing.RewritePass, Describing
    try:
        with torch.no_grad():
            tracing.trace(Heads(then=then), *inputs(), gate="never")
    finally:
        tracing.RewritePass = original
    (problem,) = problems
    assert problem["code"].count("copy_.default") == 2
    torch.manual_seed(0)  # it draws the inputs
    compiled, tensors = measure.both_ways(problem, "cpu")
    results = {}
    with torch.no_grad():
        for name, run_it in compiled.items():
            own = [t.clone() for t in tensors]
            results[name] = [*run_it(*own), *own]
    changed = 0
    for ours, stock, before in zip(results["ours"], results["stock"], [None, *tensors], strict=True):
        torch.testing.assert_close(ours, stock, rtol=2e-2, atol=2e-2)
        changed += before is not None and not torch.equal(ours, before)
    assert changed == 2


def test_a_training_graph_appends_nothing(tracing: ModuleType) -> None:
    model = Heads(then=by_index_put)
    model.q_weight.requires_grad_()
    with torch.enable_grad():
        traced = tracing.trace(model, *inputs(), gate="always")
    assert "qk_rope_append" not in traced.after
    assert traced.report.counts["rope"] == 2


# ------------------------------------------------------------------------------------------------------ whole models


def _tiny(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
    }
    if name == "Gemma3":
        config = transformers.Gemma3TextConfig(**sizes, sliding_window=64)
        return transformers.Gemma3ForCausalLM(config)
    if name == "Olmo2":
        sizes.pop("head_dim")
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))


MODELS = {"Qwen3": (["qk_rope_append"] * 8, 2 * 4 + 1), "Llama": (["qk_rope_append"] * 4, 2 * 2 + 1)}
MODELS |= {"Gemma3": (["qk_rope_append"] * 8, 2 * 6 + 1), "Olmo2": (["qk_rope_append"] * 4, 2 * 4 + 1)}


@pytest.mark.parametrize("length", [1, 6], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_models_with_a_static_cache(name: str, length: int, tracing: ModuleType) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = _tiny(name).to(BF16).eval()
    wide = copy.deepcopy(model).double()
    expected, norms = MODELS[name]

    def fresh(of: Any) -> Any:
        cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        of(torch.arange(10).view(2, 5), None, None, cache, use_cache=True)
        return cache

    ours, theirs, true = fresh(model), fresh(model), fresh(wide)
    for step in range(2):
        ids = torch.arange(2 * length).view(2, length) + step
        traced = tracing.trace(lambda i: model(i, None, None, ours, use_cache=True).logits, ids, gate="always")
        eager = model(ids, None, None, theirs, use_cache=True).logits
        with tracing.Widened():
            exact = wide(ids, None, None, true, use_cache=True).logits
        report = traced.report
        assert (report.counts["rope"], report.counts["rms_norm"]) == (4, norms)
        assert [j for j in joined(report) if j] == expected
        tracing.assert_no_further_than([traced.result], [eager], [exact])
        for layer, other, truth in zip(ours.layers, theirs.layers, true.layers, strict=True):
            caches = [[c.keys, c.values] for c in (layer, other, truth)]
            tracing.assert_no_further_than(*caches)
            filled = int(other.cumulative_length)
            assert int(layer.cumulative_length) == filled == 5 + length * (step + 1)
            for mine, its in zip(*caches[:2], strict=True):
                assert torch.equal(mine[:, :, filled:], its[:, :, filled:])


# ------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("normalise", [norm, plain], ids=["normed", "plain"])
@pytest.mark.parametrize("then", APPENDS.values(), ids=APPENDS)
def test_appended_on_gpu(then: Callable, normalise: Callable, mode: str, tracing: ModuleType) -> None:
    from torch._inductor import list_mode_options

    torch._dynamo.reset()
    model = Heads(normalise, then=then).cuda()
    for buffer in (model.k_cache, model.v_cache, model.position):
        torch._dynamo.mark_static_address(buffer)
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    options = {**list_mode_options(mode), "portable_ops.gate": "always"}
    compiled = torch.compile(model, backend="portable_ops", options=options)
    with torch.no_grad():
        for step in range(5):
            args = tuple(a.cuda() for a in (tensor(B, S, (H + 2 * K) * D, seed=step), *tables()))
            for m in (model, eager, wide):
                m.position.fill_(step)
            ours = [t.clone() for t in _tensors(compiled(*args))]
            theirs = _tensors(eager(*args))
            with tracing.Widened():
                exact = _tensors(wide(*(a.double() for a in args)))
            tracing.assert_no_further_than(ours, theirs, exact)
            for name in ("k_cache", "v_cache"):
                tracing.assert_no_further_than(*([getattr(m, name)] for m in (model, eager, wide)))
            assert torch.equal(model.position, eager.position)


@pytest.mark.gpu
@pytest.mark.parametrize("then", [None, append], ids=["joined", "appended"])
def test_one_launch_on_gpu(then: Callable | None) -> None:
    from torch.profiler import ProfilerActivity, profile

    torch._dynamo.reset()
    model = Heads(then=None if then is None else by_index_put).cuda()
    compiled = torch.compile(model, backend="portable_ops", options={"portable_ops.gate": "always"})
    args = [a.cuda() for a in inputs()]
    with torch.no_grad():
        for _ in range(2):
            compiled(*args)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            compiled(*args)
            torch.cuda.synchronize()
    kernels = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1 and "rotation_kernel" in kernels[0], kernels
