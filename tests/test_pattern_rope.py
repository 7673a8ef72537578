"""RoPE in the spellings that occur in the wild: what is matched, what it becomes, what is left alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from portable_ops.inductor_ext import Report, explain
from portable_ops.kernels.rope import ROPE, rope_reference
from torch import Tensor, nn

B, H, S, D = 2, 3, 5, 16
BF16, F32 = torch.bfloat16, torch.float32


def tensor(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(width: int, *lead: int, seed: int = 7) -> Tensor:
    return torch.rand((*lead, S, width), generator=torch.Generator().manual_seed(seed)) * 6.3


def tables(width: int = D, repeat: str = "half", dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """cos and sin, [B, S, width]; ``repeat``: how the angles of the pairs are laid out."""
    pairs = angles(width // 2, B)
    full = {"half": torch.cat((pairs, pairs), -1), "interleaved": pairs.repeat_interleave(2, -1), "none": pairs}[repeat]
    return full.cos().to(dtype), full.sin().to(dtype)


def explained(model: Callable, *args: Tensor, grad: bool = False, **options: object) -> Report:
    with torch.set_grad_enabled(grad):
        return explain(model, **{"gate": "always", **options})(*args)


def assert_matched(tracing: ModuleType, model: Callable, *args: Tensor, count: int = 1) -> dict[str, str]:
    """All rotations of ``model`` become operators, the result is as good as eager's; what the first match found."""
    with torch.no_grad():
        traced = tracing.trace(model, *args, gate="always")
        report = traced.report
        assert not report.misses, report.misses
        assert report.rewritten["rope"] == report.counts["rope"] == count
        both = traced.after.count("portable_ops.qk_rope.default")
        assert traced.after.count("portable_ops.rope.default") + 2 * both == count
        tracing.assert_as_good_as_eager(traced.result, model, *args)
    return dict(report.sites[0].bound)


def layout(bound: dict[str, str]) -> tuple[str, str, int, int, int]:
    numbers = (int(bound[name]) for name in ("rotary_dim", "offset", "sections"))
    return bound["pairing"], bound["out_pairing"], *numbers


def rotate_half(x: Tensor) -> Tensor:
    h = x.shape[-1] // 2
    return torch.cat((-x[..., h:], x[..., :h]), -1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def llama(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


# -------------------------------------------------------------------------------- ways to rearrange what is rotated

HALVES: dict[str, Callable[[Tensor], Tensor]] = {
    "slices": rotate_half,
    "chunk": lambda x: (lambda a, b: torch.cat((-b, a), -1))(*x.chunk(2, -1)),
    "split": lambda x: (lambda a, b: torch.cat((b.neg(), a), -1))(*x.split(D // 2, -1)),
    "uneven split, then halves": lambda x: torch.cat([-t for t in x.split([8, 4, 4], -1)[1:]] + [x[..., :8]], -1),
    "narrow": lambda x: torch.cat((x.narrow(-1, D // 2, D // 2) * -1, x.narrow(-1, 0, D // 2)), x.dim() - 1),
    "unflatten, unbind, stack": lambda x: (lambda a, b: torch.stack((-b, a), -2).flatten(-2))(
        *x.unflatten(-1, (2, -1)).unbind(-2)
    ),
    "view, select": lambda x: (lambda y: torch.cat((-y[..., 1, :], y[..., 0, :]), -1))(
        x.reshape(*x.shape[:-1], 2, D // 2)
    ),
    "negated before it is cut": lambda x: torch.cat(((-x)[..., D // 2 :], x[..., : D // 2]), -1),
    "negated afterwards": lambda x: -torch.cat((x[..., D // 2 :], -x[..., : D // 2]), -1),
    "contiguous": lambda x: rotate_half(x.contiguous()).contiguous(),
}


@pytest.mark.parametrize("rotate", HALVES.values(), ids=HALVES)
def test_every_way_to_rotate_halves(rotate: Callable, tracing: ModuleType) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos.unsqueeze(1) + rotate(x) * sin.unsqueeze(1)

    bound = assert_matched(tracing, rope, tensor(B, H, S, D), *tables())
    assert layout(bound) == ("half", "half", D, 0, 1)


NEIGHBOURS: dict[str, Callable[[Tensor], Tensor]] = {
    "stack, flatten": rotate_every_two,
    "unflatten, unbind, stack": lambda x: (lambda a, b: torch.stack((-b, a), dim=-1).flatten(-2))(
        *x.unflatten(-1, (-1, 2)).unbind(dim=-1)
    ),
    "stack, view": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).view_as(x),
    "stack, reshape": lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape),
    "cat of unsqueezed": lambda x: torch.cat((-x[..., 1::2, None], x[..., 0::2, None]), -1).flatten(-2),
    "view, select": lambda x: (lambda y: torch.stack((-y[..., 1], y[..., 0]), -1).flatten(-2))(
        x.reshape(*x.shape[:-1], -1, 2)
    ),
}


@pytest.mark.parametrize("rotate", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_every_way_to_rotate_neighbours(rotate: Callable, tracing: ModuleType) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos.unsqueeze(1) + rotate(x) * sin.unsqueeze(1)

    bound = assert_matched(tracing, rope, tensor(B, H, S, D), *tables(repeat="interleaved"))
    assert layout(bound) == ("interleaved", "interleaved", D, 0, 1)


# ---------------------------------------------------------------------------------------- ways to add the products

SUMS: dict[str, Callable] = {
    "commuted factors": lambda x, r, c, s: c * x + s * r,
    "commuted terms": lambda x, r, c, s: r * s + x * c,
    "in place": lambda x, r, c, s: (x * c).add_(r * s),
    "subtracted": lambda x, r, c, s: x * c - (-r) * s,
    "negated product": lambda x, r, c, s: x * c - (-(r * s)),
}


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
def test_every_way_to_add(add: Callable, tracing: ModuleType) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return add(x, rotate_half(x), cos.unsqueeze(1), sin.unsqueeze(1))

    assert_matched(tracing, rope, tensor(B, H, S, D), *tables())


def by_parts(u: Tensor, v: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return u * c - v * s, v * c + u * s


# name: (x, cos, sin) -> rotated, and where the pairs are before and after
PARTS: dict[str, tuple[Callable, tuple[str, str]]] = {
    "gpt_oss": (lambda x, c, s: torch.cat(by_parts(*x.chunk(2, -1), c, s), -1), ("half", "half")),
    "slices": (
        lambda x, c, s: torch.cat(by_parts(x[..., : D // 2], x[..., D // 2 :], c, s), -1),
        ("half", "half"),
    ),
    "deepseek_v3: neighbours to halves": (
        lambda x, c, s: torch.cat(by_parts(x[..., ::2], x[..., 1::2], c, s), -1),
        ("interleaved", "half"),
    ),
    "neighbours": (
        lambda x, c, s: torch.stack(by_parts(x[..., ::2], x[..., 1::2], c, s), -1).flatten(-2),
        ("interleaved", "interleaved"),
    ),
    "halves to neighbours": (
        lambda x, c, s: torch.stack(by_parts(*x.chunk(2, -1), c, s), -1).flatten(-2),
        ("half", "interleaved"),
    ),
    "halves stacked": (
        lambda x, c, s: torch.stack(by_parts(*x.chunk(2, -1), c, s), -2).flatten(-2),
        ("half", "half"),
    ),
    "neighbours of a view": (
        lambda x, c, s: torch.stack(by_parts(*x.unflatten(-1, (-1, 2)).unbind(-1), c, s), -1).reshape(x.shape),
        ("interleaved", "interleaved"),
    ),
    "each half sliced twice": (
        lambda x, c, s: torch.cat((x[..., :8] * c - x[..., 8:] * s, x[..., 8:] * c + x[..., :8] * s), -1),
        ("half", "half"),
    ),
    "gpt-fast: neighbours of a view, each read twice": (
        lambda x, c, s: (
            lambda v: torch.stack((v[..., 0] * c - v[..., 1] * s, v[..., 1] * c + v[..., 0] * s), -1).flatten(3)
        )(x.reshape(*x.shape[:-1], -1, 2)),
        ("interleaved", "interleaved"),
    ),
    "commuted": (
        lambda x, c, s: (lambda u, v: torch.cat((c * u - s * v, s * u + c * v), -1))(*x.chunk(2, -1)),
        ("half", "half"),
    ),
    "negated": (
        lambda x, c, s: (lambda u, v: torch.cat((u * c + (-v) * s, v * c - (-u) * s), -1))(*x.chunk(2, -1)),
        ("half", "half"),
    ),
}


@pytest.mark.parametrize(("rope", "pairings"), PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_parts_computed_by_themselves(
    rope: Callable, pairings: tuple[str, str], dtype: torch.dtype, tracing: ModuleType
) -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(x, cos.unsqueeze(1), sin.unsqueeze(1))

    bound = assert_matched(tracing, model, tensor(B, H, S, D, dtype=dtype), *tables(repeat="none", dtype=dtype))
    assert layout(bound) == (*pairings, D, 0, 1)


def test_parts_with_the_two_halves_of_a_full_table(tracing: ModuleType) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        (u, v), (c1, c2), (s1, s2) = (t.chunk(2, -1) for t in (x, cos.unsqueeze(1), sin.unsqueeze(1)))
        return torch.cat((u * c1 - v * s1, v * c2 + u * s2), -1)

    cos, sin = tensor(B, S, D, seed=1), tensor(B, S, D, seed=2)  # of no rotation: the two halves differ
    assert_matched(tracing, rope, tensor(B, H, S, D), cos, sin)


def test_parts_cast_before_they_are_joined(tracing: ModuleType) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        u, v = x.float().chunk(2, -1)
        return torch.cat([t.to(x.dtype) for t in by_parts(u, v, cos.unsqueeze(1), sin.unsqueeze(1))], -1)

    bound = assert_matched(tracing, rope, tensor(B, H, S, D), *tables(repeat="none", dtype=F32))
    assert bound["compute_dtype"] == str(F32) and bound["out_dtype"] == str(BF16)


def test_neighbours_are_brought_to_halves_first(tracing: ModuleType) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # transformers' deepseek_v3
        b, h, s, d = x.shape
        return llama(x.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d), cos, sin)

    bound = assert_matched(tracing, rope, tensor(B, H, S, D), *tables())
    assert layout(bound) == ("interleaved", "half", D, 0, 1)


# ------------------------------------------------------------------------------------------------ complex numbers


def complex_rope(x: Tensor, cis: Tensor) -> Tensor:
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * cis.unsqueeze(1)).flatten(3).type_as(x)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
def test_complex_product(dtype: torch.dtype, tracing: ModuleType) -> None:
    cis = torch.polar(torch.ones(B, S, D // 2), angles(D // 2, B))
    bound = assert_matched(tracing, complex_rope, tensor(B, H, S, D, dtype=dtype), cis)
    assert layout(bound) == ("interleaved", "interleaved", D, 0, 1)


def test_complex_product_of_a_part(tracing: ModuleType) -> None:
    def rope(x: Tensor, angle: Tensor) -> Tensor:
        passed, rotary = x.split([6, 10], -1)
        return torch.cat((passed, complex_rope(rotary, torch.polar(torch.ones_like(angle), angle))), -1)

    bound = assert_matched(tracing, rope, tensor(B, H, S, D), angles(5, B))
    assert layout(bound) == ("interleaved", "interleaved", 10, 6, 1)


# -------------------------------------------------------------------------------------------------- rotary parts


def in_front(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r = cos.shape[-1]
    return torch.cat((llama(x[..., :r], cos, sin), x[..., r:]), -1)


# name: (x, cos, sin) -> rotated, rotary_dim and offset
PARTIAL: dict[str, tuple[Callable, tuple[int, int]]] = {
    "in front": (in_front, (10, 0)),
    "behind": (lambda x, c, s: torch.cat((x[..., :6], llama(x[..., 6:], c, s)), -1), (10, 6)),
    "in the middle": (
        lambda x, c, s: torch.cat((x[..., :2], llama(x[..., 2:12], c, s), x[..., 12:]), -1),
        (10, 2),
    ),
    "passing in two pieces": (
        lambda x, c, s: torch.cat((llama(x[..., :10], c, s), x[..., 10:12], x[..., 12:]), -1),
        (10, 0),
    ),
    "split": (lambda x, c, s: (lambda p, r: torch.cat((p, llama(r, c, s)), -1))(*x.split([6, 10], -1)), (10, 6)),
    "by parts": (
        lambda x, c, s: torch.cat(
            (
                torch.cat(by_parts(x[..., :5], x[..., 5:10], c[..., :5].unsqueeze(1), s[..., :5].unsqueeze(1)), -1),
                x[..., 10:],
            ),
            -1,
        ),
        (10, 0),
    ),
    "cast": (
        lambda x, c, s: torch.cat((llama(x[..., :10].float(), c, s).to(x.dtype), x[..., 10:]), -1),
        (10, 0),
    ),
    "cast after the join": (
        lambda x, c, s: torch.cat((llama(x.float()[..., :10], c, s), x.float()[..., 10:]), -1).to(x.dtype),
        (10, 0),
    ),
    "joined in another order": (
        lambda x, c, s: torch.cat((x[..., 10:], llama(x[..., :10], c, s)), -1),
        (10, 0),
    ),
    "joined with another tensor": (
        lambda x, c, s: torch.cat((2 * x[..., :6], llama(x[..., 6:], c, s)), -1),
        (10, 0),
    ),
    "halves that are cut from the whole": (
        lambda x, c, s: torch.cat(
            by_parts(x[..., 6:11], x[..., 11:], c[..., :5].unsqueeze(1), s[..., :5].unsqueeze(1)), -1
        ),
        (10, 0),
    ),
}


@pytest.mark.parametrize(("rope", "where"), PARTIAL.values(), ids=PARTIAL)
def test_a_part_is_rotated(rope: Callable, where: tuple[int, int], tracing: ModuleType) -> None:
    bound = assert_matched(tracing, rope, tensor(B, H, S, D), *tables(10))
    assert (int(bound["rotary_dim"]), int(bound["offset"])) == where


def test_the_part_that_passes_is_taken_over(tracing: ModuleType) -> None:
    with torch.no_grad():
        traced = tracing.trace(in_front, tensor(B, H, S, D), *tables(10), gate="always")
    assert_expected_inline(
        traced.after,
        """\
%0 = input : bf16[2, 5, 10]
%1 = input : bf16[2, 3, 5, 16]
%2 = input : bf16[2, 5, 10]
%3 = aten.unsqueeze.default(%0, 1) : bf16[2, 1, 5, 10]
%4 = aten.unsqueeze.default(%2, 1) : bf16[2, 1, 5, 10]
%5 = portable_ops.rope.default(x=%1, cos=%3, sin=%4, pairing=half, out_pairing=half, rotary_dim=10,
    offset=0, sections=1, compute_dtype=bf16, product_dtype=bf16, out_dtype=bf16) : bf16[2, 3, 5,
    16]
return (%5,)
""",
    )


def test_neighbouring_parts_turn_by_tables_of_their_own(tracing: ModuleType) -> None:
    def rope(x: Tensor, *cos_sin: Tensor) -> Tensor:  # V-JEPA 2
        parts = [x[..., :4], x[..., 4:10], x[..., 10:14]]
        turned = [p * c + rotate_every_two(p) * s for p, c, s in zip(parts, cos_sin[::2], cos_sin[1::2], strict=True)]
        return torch.cat((*turned, x[..., 14:]), -1)

    args = [tensor(S, w, seed=i) for i, w in enumerate((4, 4, 6, 6, 4, 4), 1)]
    bound = assert_matched(tracing, rope, tensor(B, H, S, D), *args)
    assert layout(bound) == ("interleaved", "interleaved", 14, 0, 1)


def test_two_dimensions_of_halves(tracing: ModuleType) -> None:
    def rope(x: Tensor, *cos_sin: Tensor) -> Tensor:
        parts = x.chunk(2, -1)
        turned = [p * c + rotate_half(p) * s for p, c, s in zip(parts, cos_sin[::2], cos_sin[1::2], strict=True)]
        return torch.cat(turned, -1)

    bound = assert_matched(tracing, rope, tensor(B, H, S, D), *(tensor(S, 8, seed=i) for i in range(1, 5)))
    assert layout(bound) == ("half", "half", D, 0, 2)


def test_parts_that_have_no_common_layout_turn_by_themselves(tracing: ModuleType) -> None:
    def rope(x: Tensor, *cos_sin: Tensor) -> Tensor:
        a, b = x.split([10, 6], -1)
        turned = a * cos_sin[0] + rotate_half(a) * cos_sin[1], b * cos_sin[2] + rotate_half(b) * cos_sin[3]
        return torch.cat(turned, -1)

    args = [tensor(S, w, seed=i) for i, w in enumerate((10, 10, 6, 6), 1)]
    assert_matched(tracing, rope, tensor(B, H, S, D), *args, count=2)


def test_prefix_tokens_pass(tracing: ModuleType) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # DINOv3
        prefix, patches = x.split((2, S), -2)
        return torch.cat((prefix, patches * cos + rotate_half(patches) * sin), -2)

    assert_matched(tracing, rope, tensor(B, H, S + 2, D), *(t[0] for t in tables()))


# --------------------------------------------------------------------------------------------------------- tables

TABLES: dict[str, Callable] = {
    "unsqueezed by the caller": lambda x, a: (lambda c, s: x * c + rotate_half(x) * s)(
        torch.cat((a, a), -1).cos()[:, None].to(x.dtype), torch.cat((a, a), -1).sin()[:, None].to(x.dtype)
    ),
    "scaled": lambda x, a: llama(x, 0.7 * torch.cat((a, a), -1).cos(), 0.7 * torch.cat((a, a), -1).sin()),
    "repeat": lambda x, a: llama(x, a.cos().repeat(1, 1, 2), a.sin().repeat(1, 1, 2)),
    "repeat_interleave": lambda x, a: (lambda c, s: x * c[:, None] + rotate_every_two(x) * s[:, None])(
        a.cos().repeat_interleave(2, -1), a.sin().repeat_interleave(2, -1)
    ),
    "cut and repeated": lambda x, a: (
        lambda c, s: x * c[..., : D // 2].repeat_interleave(2, -1) + rotate_every_two(x) * s.repeat_interleave(2, -1)
    )(torch.cat((a, a), -1).cos()[:, None], a.sin()[:, None]),
    "cut": lambda x, a: (lambda c, s: torch.cat(by_parts(*x.chunk(2, -1), c[..., : D // 2], s[..., : D // 2]), -1))(
        torch.cat((a, a), -1).cos()[:, None], torch.cat((a, a), -1).sin()[:, None]
    ),
    "an inverse by a negated sine": lambda x, a: llama(x, torch.cat((a, a), -1).cos(), -torch.cat((a, a), -1).sin()),
    "looked up": lambda x, a: (lambda c, s, i: llama(x, c[0][i][None], s[0][i][None]))(
        torch.cat((a, a), -1).cos(), torch.cat((a, a), -1).sin(), torch.arange(S)
    ),
    "positions times frequencies": lambda x, a: (
        lambda f: x * torch.cat((f, f), -1).cos() + rotate_half(x) * torch.cat((f, f), -1).sin()
    )(torch.arange(S)[:, None] * (1.0 / 100 ** (torch.arange(0, D, 2) / D))[None]),
}


@pytest.mark.parametrize("rope", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_tables_from_anywhere(rope: Callable, dtype: torch.dtype, tracing: ModuleType) -> None:
    assert_matched(tracing, rope, tensor(B, H, S, D, dtype=dtype), angles(D // 2, B))


def test_heads_behind_the_sequence(tracing: ModuleType) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos.unsqueeze(2) + rotate_half(x) * sin.unsqueeze(2)

    assert_matched(tracing, rope, tensor(B, S, H, D), *tables())


def test_transposed_heads_keep_their_order_in_memory(tracing: ModuleType) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return llama(x.view(B, S, H, D).transpose(1, 2), cos, sin)

    with torch.no_grad():
        traced = tracing.trace(rope, tensor(B, S, H * D), *tables(), gate="always")
    assert "out_order=[0, 2, 1, 3]" in " ".join(traced.after.split())
    assert_matched(tracing, rope, tensor(B, S, H * D), *tables())


def test_sequence_first(tracing: ModuleType) -> None:
    def rope(x: Tensor, table: Tensor) -> Tensor:  # Wav2Vec2-Conformer
        y = x.view(B, S, H, D).transpose(0, 1)
        turned = y * table[0, :S] + rotate_half(y) * table[1, :S]
        return turned.transpose(0, 1).reshape(B, S, H * D)

    assert_matched(tracing, rope, tensor(B, S, H * D), tensor(2, S + 3, 1, 1, D, seed=1))


# ------------------------------------------------------------------------------------------------ rounding points

# name: (x, cos, sin, their type) -> rotated, and compute, product and result types
ROUNDINGS: dict[str, tuple[Callable, torch.dtype, tuple]] = {
    "none": (llama, BF16, (BF16, BF16, BF16)),
    "float32 tables, result promoted": (llama, F32, (F32, F32, F32)),
    "float32 tables, rounded": (lambda x, c, s: llama(x, c, s).to(x.dtype), F32, (F32, F32, BF16)),
    "x in float32": (lambda x, c, s: llama(x.float(), c, s).to(x.dtype), BF16, (F32, F32, BF16)),
    "rotated, then in float32": (
        lambda x, c, s: (x.float() * c[:, None] + rotate_half(x).float() * s[:, None]).to(x.dtype),
        BF16,
        (F32, F32, BF16),
    ),
    "all in float32": (lambda x, c, s: llama(x.float(), c.float(), s.float()).to(x.dtype), BF16, (F32, F32, BF16)),
    "products rounded": (
        lambda x, c, s: (x * c[:, None]).to(x.dtype) + (rotate_half(x) * s[:, None]).to(x.dtype),
        F32,
        (F32, BF16, BF16),
    ),
    "tables rounded": (lambda x, c, s: llama(x, c.to(x.dtype), s.to(x.dtype)), F32, (BF16, BF16, BF16)),
    "result in float32": (lambda x, c, s: llama(x, c, s).float(), BF16, (BF16, BF16, F32)),
}


@pytest.mark.parametrize(("rope", "table_dtype", "types"), ROUNDINGS.values(), ids=ROUNDINGS)
def test_rounding_points(rope: Callable, table_dtype: torch.dtype, types: tuple, tracing: ModuleType) -> None:
    bound = assert_matched(tracing, rope, tensor(B, H, S, D), *tables(dtype=table_dtype))
    names = ("compute_dtype", "product_dtype", "out_dtype")
    assert tuple(bound[name] for name in names) == tuple(map(str, types))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
def test_results_are_bitwise_those_of_eager(dtype: torch.dtype, tracing: ModuleType) -> None:
    x, (cos, sin) = tensor(B, H, S, D, dtype=dtype), tables(dtype=dtype)
    with torch.no_grad():
        assert torch.equal(tracing.trace(llama, x, cos, sin, gate="always").result, llama(x, cos, sin))


# ---------------------------------------------------------------------------------------- users, mutation, modules


def test_queries_and_keys_count_apart(tracing: ModuleType) -> None:
    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return llama(q, cos, sin), llama(k, cos, sin)

    assert_matched(tracing, both, tensor(B, H, S, D), tensor(B, 1, S, D, seed=1), *tables(), count=2)


def test_inner_values_with_other_users_stay_right(tracing: ModuleType) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        rotated, scaled = rotate_half(x), x * cos.unsqueeze(1)
        total = scaled + rotated * sin.unsqueeze(1)
        return total, rotated, scaled * 2, total.sum(-1)

    assert_matched(tracing, rope, tensor(B, H, S, D), *tables())


def test_a_rotated_part_that_is_used_by_itself_too(tracing: ModuleType) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned = llama(x[..., :10], cos, sin)
        return torch.cat((turned, x[..., 10:]), -1), turned

    bound = assert_matched(tracing, rope, tensor(B, H, S, D), *tables(10))
    assert layout(bound) == ("half", "half", 10, 0, 1)


def test_a_sum_that_is_rounded_and_used_unrounded(tracing: ModuleType) -> None:
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        total = llama(x, cos, sin)
        return total.to(x.dtype), total * 3

    bound = assert_matched(tracing, rope, tensor(B, H, S, D), *tables(dtype=F32))
    assert bound["out_dtype"] == str(F32)


def test_an_input_that_is_written_between_the_pieces(tracing: ModuleType) -> None:
    def changed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        scaled = x * cos.unsqueeze(1)
        x.add_(1)
        return scaled + rotate_half(x) * sin.unsqueeze(1)

    def unchanged(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        scaled = x * cos.unsqueeze(1)
        total = scaled + rotate_half(x) * sin.unsqueeze(1)
        x.zero_()
        return total

    for model, count in ((changed, 0), (unchanged, 1)):
        x, (cos, sin) = tensor(B, H, S, D), tables()
        theirs = x.clone()
        with torch.no_grad():
            expected = model(theirs, cos, sin)
            traced = tracing.trace(model, x, cos, sin, gate="always")
        assert traced.report.counts["rope"] == count
        assert torch.equal(traced.result, expected) and torch.equal(x, theirs)


def test_rotated_keys_are_written_into_a_cache(tracing: ModuleType) -> None:
    def step(k: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(2, at, llama(k, cos, sin))
        return cache.sum(-1)

    k, (cos, sin), at = tensor(B, H, S, D), tables(), torch.arange(3, 3 + S)
    ours, theirs = torch.zeros(B, H, 12, D, dtype=BF16), torch.zeros(B, H, 12, D, dtype=BF16)
    with torch.no_grad():
        expected = step(k, cos, sin, theirs, at)
        traced = tracing.trace(step, k, cos, sin, ours, at, gate="always")
    assert traced.report.rewritten["rope"] == 1
    assert torch.equal(traced.result, expected) and torch.equal(ours, theirs)


def test_the_default_gate_recognises_and_leaves_alone(tracing: ModuleType) -> None:
    args = tensor(B, H, S, D), *tables()
    with torch.no_grad():
        traced = tracing.trace(llama, *args)
        assert traced.after == traced.before == tracing.stock_graph(llama, *args)
    assert [(s.kind, s.decision, s.reason) for s in traced.report.sites] == [
        ("rope", "declined", "no measurement on sm_90 says that it pays here (gate=measure takes one)")
    ]


# ------------------------------------------------------------------------------------------------- dynamic shapes

DYNAMIC: dict[str, tuple[Callable, int, str]] = {
    "halves": (llama, D, "half"),
    "partial": (in_front, 10, "half"),
    "neighbours": (
        lambda x, c, s: x * c[:, None] + rotate_every_two(x) * s[:, None],
        D,
        "interleaved",
    ),
    "transposed": (lambda x, c, s: llama(x.transpose(1, 2).contiguous().transpose(1, 2), c, s), D, "half"),
    "by parts": (lambda x, c, s: torch.cat(by_parts(*x.chunk(2, -1), c[:, None], s[:, None]), -1), D, "none"),
}


@pytest.mark.parametrize(("rope", "width", "repeat"), DYNAMIC.values(), ids=DYNAMIC)
@pytest.mark.parametrize("everything", [False, True], ids=["marked", "dynamic=True"])
def test_dynamic_shapes(rope: Callable, width: int, repeat: str, everything: bool, tracing: ModuleType) -> None:
    args = tensor(B, H, S, D), *tables(width, repeat)
    if not everything:
        torch._dynamo.mark_dynamic(args[0], (0, 2))
        for table in args[1:]:
            torch._dynamo.mark_dynamic(table, (0, 1))
    # With dynamic=True the width of a slice that a table's width decides is a symbol as well.
    static = [torch._dynamo.mark_static(t, t.dim() - 1) for t in args] if everything else []
    torch._dynamo.mark_static(args[0], 1)  # kernels are made for a number of heads
    assert len(static) in (0, 3)
    with torch.no_grad():
        traced = tracing.trace(rope, *args, gate="always", dynamic=True if everything else None)
    assert traced.report.rewritten["rope"] == 1 and not traced.report.misses
    tracing.assert_as_good_as_eager(traced.result, rope, *args)


# ----------------------------------------------------------------------------------------------- autocast, training


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast(dtype: torch.dtype, tracing: ModuleType) -> None:
    def project(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return llama((x @ weight).view(B, S, H, D).transpose(1, 2), cos, sin)

    args = tensor(B, S, 8, dtype=F32), tensor(8, H * D, dtype=F32, seed=1), *tables(dtype=F32)
    with torch.no_grad():
        traced = tracing.trace(project, *args, gate="always")
    assert traced.report.rewritten["rope"] == 1
    bound = traced.report.sites[0].bound
    assert (bound["compute_dtype"], bound["out_dtype"]) == (str(F32), str(F32))
    with torch.no_grad():
        assert torch.equal(traced.result, project(*args))


class Rotated(nn.Module):
    """A projection whose heads are rotated in one of the spellings."""

    def __init__(self, rope: Callable) -> None:
        super().__init__()
        self.rope = rope
        self.weight = nn.Parameter(tensor(8, H * D, seed=1, dtype=F32))

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        return self.rope((x @ self.weight).view(B, S, H, D).transpose(1, 2), *tables)


CIS = torch.polar(torch.ones(B, S, D // 2), angles(D // 2, B))
TRAINED: dict[str, tuple[Callable, tuple[Tensor, ...]]] = {
    "halves": (llama, tables(dtype=F32)),
    "neighbours": (
        lambda x, c, s: x * c[:, None] + NEIGHBOURS["unflatten, unbind, stack"](x) * s[:, None],
        tables(repeat="interleaved", dtype=F32),
    ),
    "by parts": (
        lambda x, c, s: torch.cat(by_parts(*x.chunk(2, -1), c[:, None], s[:, None]), -1),
        tables(repeat="none", dtype=F32),
    ),
    "complex": (complex_rope, (CIS,)),
    "partial": (in_front, tables(10, dtype=F32)),
}


@pytest.mark.parametrize(("rope", "cos_sin"), TRAINED.values(), ids=TRAINED)
def test_a_training_graph_has_as_many_and_the_same_gradients(
    rope: Callable, cos_sin: tuple, tracing: ModuleType
) -> None:
    model, x = Rotated(rope), tensor(B, S, 8, dtype=F32)
    traced = tracing.trace(model, x, *cos_sin, gate="always")
    assert traced.report.rewritten["rope"] == traced.report.counts["rope"] == 1
    assert not traced.report.misses
    traced.result.square().sum().backward()
    ours, model.weight.grad = model.weight.grad, None
    model(x, *cos_sin).square().sum().backward()
    torch.testing.assert_close(ours, model.weight.grad, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ near misses

BACKWARDS = "it turns backwards: the signs are those of the inverse rotation"
NOT_PAIRED = "the elements are paired neither by halves nor by neighbours"
OTHER_TENSOR = "the cosine multiplies another tensor than the one whose halves the sine multiplies"
OTHER_PARTS = "the two sums are not of the same two tensors, each with cosine and sine"
NO_ROTATION = "the signs are not those of a rotation: u cos - v sin and v cos + u sin"
TWO_TABLES = "the halves are multiplied by different cosines or sines"


def halves_join(make: Callable, **how: int) -> Callable:
    """A model that joins two sums of products of the halves."""

    def model(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        u, v = x.chunk(2, -1)
        return torch.cat(make(u, v, y, cos[:, None, :, : D // 2], sin[:, None, :, : D // 2]), -1)

    return model


def arranged(rotate: Callable, add: Callable | None = None) -> Callable:
    """A model ``x * cos + rotate(x) * sin``."""

    def model(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        products = x * cos.unsqueeze(1), rotate(x) * sin.unsqueeze(1)
        return (add or torch.add)(*products)

    return model


def cut(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.chunk(2, -1)


NEAR_MISSES: dict[str, tuple[Callable, str]] = {
    "no negation": (
        arranged(lambda x: torch.cat(cut(x)[::-1], -1)),
        "neither half is negated where the sine multiplies it",
    ),
    "both negated": (
        arranged(lambda x: torch.cat(cut(-x)[::-1], -1)),
        "both halves are negated where the sine multiplies them",
    ),
    "the other half negated": (arranged(lambda x: torch.cat((cut(x)[1], -cut(x)[0]), -1)), BACKWARDS),
    "subtracted": (arranged(rotate_half, torch.sub), BACKWARDS),
    "cosine subtracted": (arranged(rotate_half, lambda a, b: b - a), "the cosine's product is subtracted"),
    "halves not exchanged": (arranged(lambda x: torch.cat((-cut(x)[0], cut(x)[1]), -1)), NOT_PAIRED),
    "one half twice": (arranged(lambda x: torch.cat((-cut(x)[1], cut(x)[1]), -1)), NOT_PAIRED),
    "unequal parts": (arranged(lambda x: torch.cat((-x[..., 6:], x[..., :6]), -1)), NOT_PAIRED),
    "neighbours cut, halves joined": (
        arranged(lambda x: torch.cat((-x[..., 1::2], x[..., ::2]), -1)),
        NOT_PAIRED,
    ),
    "halves cut, neighbours joined": (
        arranged(lambda x: torch.stack((-cut(x)[1], cut(x)[0]), -1).flatten(-2)),
        NOT_PAIRED,
    ),
    "neighbours without negation": (
        arranged(lambda x: torch.stack((x[..., 1::2], x[..., ::2]), -1).flatten(-2)),
        "neither half is negated where the sine multiplies it",
    ),
    "neighbours backwards": (
        arranged(lambda x: torch.stack((x[..., 1::2], -x[..., ::2]), -1).flatten(-2)),
        BACKWARDS,
    ),
    "another tensor rotated": (
        lambda x, y, cos, sin: x * cos.unsqueeze(1) + rotate_half(y) * sin.unsqueeze(1),
        OTHER_TENSOR,
    ),
    "another tensor in one half": (
        lambda x, y, cos, sin: y * cos.unsqueeze(1) + torch.cat((-cut(x)[1], cut(x)[0]), -1) * sin.unsqueeze(1),
        OTHER_TENSOR,
    ),
    "cosine and sine exchanged": (
        lambda x, y, cos, sin: llama(x, cos.float().sin(), cos.float().cos()),
        "cosine and sine are exchanged",
    ),
    "two cosines": (
        lambda x, y, cos, sin: llama(x, cos.float().cos(), sin.float().cos()),
        "cosine and sine are exchanged",
    ),
    "products of two types": (
        lambda x, y, cos, sin: x.float() * cos[:, None].float() + (rotate_half(x) * sin[:, None]),
        "the products with cosine and sine are computed in or rounded to different types",
    ),
    "one product rounded": (
        lambda x, y, cos, sin: (x * cos[:, None].float()).to(x.dtype) + rotate_half(x) * sin[:, None].float(),
        "the products with cosine and sine are computed in or rounded to different types",
    ),
    "a table of another width": (
        lambda x, y, cos, sin: llama(x, cos[..., :1], sin[..., :1]),
        "cosine and sine of width 1 and 1 do not fit 16 elements",
    ),
    "x is broadcast": (
        lambda x, y, cos, sin: llama(x[:1], cos, sin),
        "cosine and sine have more rows than the tensor that they rotate",
    ),
    "parts: backwards": (halves_join(lambda u, v, y, c, s: (u * c + v * s, v * c - u * s)), BACKWARDS),
    "parts: no minus": (halves_join(lambda u, v, y, c, s: (u * c + v * s, v * c + u * s)), NO_ROTATION),
    "parts: two minuses": (halves_join(lambda u, v, y, c, s: (u * c - v * s, v * c - u * s)), NO_ROTATION),
    "parts: exchanged": (halves_join(lambda u, v, y, c, s: by_parts(u, v, c, s)[::-1]), BACKWARDS),
    "parts: cosine and sine exchanged": (
        halves_join(lambda u, v, y, c, s: by_parts(u, v, c.float().sin(), c.float().cos())),
        "cosine and sine are exchanged",
    ),
    "parts: another tensor": (
        halves_join(lambda u, v, y, c, s: (u * c - cut(y)[1] * s, v * c + u * s)),
        OTHER_PARTS,
    ),
    "parts: two tensors": (
        halves_join(lambda u, v, y, c, s: by_parts(u, cut(y)[1], c, s)),
        "the two tensors that are rotated are not parts of one",
    ),
    "parts: another sine": (
        halves_join(lambda u, v, y, c, s: (u * c - v * s, v * c + u * (s + 1))),
        TWO_TABLES,
    ),
    "parts: two pieces of one sine": (
        lambda x, y, cos, sin: torch.cat(
            (
                x[..., :8] * cos[:, None, :, :8] - x[..., 8:] * sin[:, None, :, :8],
                x[..., 8:] * cos[:, None, :, :8] + x[..., :8] * sin[:, None, :, 4:12],
            ),
            -1,
        ),
        TWO_TABLES,
    ),
    "parts: one cast": (
        halves_join(lambda u, v, y, c, s: (lambda a, b: (a.to(BF16), b))(*by_parts(u.float(), v.float(), c, s))),
        "only one of the two halves is cast",
    ),
    "complex: not joined again": (
        lambda x, y, cos, sin: torch.view_as_real(
            torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.complex(cos, sin)[:, None, :, : D // 2]
        ),
        "the rotated pairs are not joined into one dimension again",
    ),
    "complex: its magnitude": (
        lambda x, y, cos, sin: (
            torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.complex(cos, sin)[:, None, :, : D // 2]
        ).abs(),
        "the complex product is used as such: it is not turned back into pairs of real numbers",
    ),
}


@pytest.mark.parametrize(("model", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_say_why(model: Callable, reason: str) -> None:
    dtype = F32 if reason.startswith(("the complex", "the rotated pairs")) else BF16
    report = explained(model, tensor(B, H, S, D), tensor(B, H, S, D, seed=1), *tables(dtype=dtype))
    assert report.counts["rope"] == 0
    assert [miss.reason for miss in report.misses if miss.kind == "rope"] == [reason]


UNRELATED: dict[str, Callable] = {
    "a gate": lambda x, y, cos, sin: x * torch.sigmoid(y) + y * x,
    "a mix of two": lambda x, y, cos, sin: x * 0.3 + y * 0.7,
    "a lerp of cat": lambda x, y, cos, sin: x * cos[:, None] + torch.cat((y, y), -1)[..., :D] * sin[:, None],
    "token shift": lambda x, y, cos, sin: (
        x * cos[:, None] + torch.cat((x[..., -1:, :], x[..., :-1, :]), -2) * sin[:, None]
    ),
    "join of sums": lambda x, y, cos, sin: torch.cat((x * y + y * x, x * x + y * y), -1),
    "complex product": lambda x, y, cos, sin: torch.complex(x.float(), y.float()) * 2,
    "complex numbers scaled": lambda x, y, cos, sin: torch.view_as_real(
        torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * cos[:, None, :, : D // 2].float()
    ).flatten(-2),
    "complex numbers turned by one angle": lambda x, y, cos, sin: torch.view_as_real(
        torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.complex(cos.float(), sin.float())[0, 0, 0]
    ).flatten(-2),
    "one product": lambda x, y, cos, sin: rotate_half(x) * sin[:, None],
}


@pytest.mark.parametrize("model", UNRELATED.values(), ids=UNRELATED)
def test_what_is_plainly_something_else_is_not_mentioned(model: Callable) -> None:
    report = explained(model, tensor(B, H, S, D), tensor(B, H, S, D, seed=1), *tables())
    assert report.counts["rope"] == 0
    assert not [miss for miss in report.misses if miss.kind == "rope"]


# ------------------------------------------------------------------------------------------------- random spellings


@dataclasses.dataclass(frozen=True)
class Spelling:
    """One way to write a rotation; ``fault`` makes it a near miss."""

    pairing: str
    form: str
    rotate: int
    commute: tuple[bool, bool, bool]
    upcast: bool
    table_dtype: torch.dtype
    offset: int
    rest: int
    heads_last: bool
    fault: str | None = None

    @property
    def width(self) -> int:
        return D - self.offset - self.rest

    def __call__(self, x: Tensor, y: Tensor, angle: Tensor) -> Tensor:
        dim = 2 if self.heads_last else 1
        angle = angle[..., : self.width // 2]
        cos, sin = (t.to(self.table_dtype) for t in (angle.cos(), angle.sin()))
        if self.fault == "exchanged":
            cos, sin = sin, cos
        part = x[..., self.offset : D - self.rest]
        part, other = (t.float() if self.upcast else t for t in (part, y[..., self.offset : D - self.rest]))
        make = self.parts if self.form == "parts" else self.arranged
        turned = make(part, other, cos, sin, dim).to(x.dtype)
        if self.offset + self.rest == 0:
            return turned
        return torch.cat((x[..., : self.offset], turned, x[..., D - self.rest :]), -1)

    def arranged(self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
        cos, sin = (self.full(t).unsqueeze(dim) for t in (cos, sin))
        ways = (
            [HALVES[n] for n in ("slices", "chunk", "negated before it is cut")] if self.width == D else [rotate_half]
        )
        ways = ways if self.pairing == "half" else [*NEIGHBOURS.values()]
        rotated = ways[self.rotate % len(ways)](y if self.fault == "other" else x)
        rotated = -rotated if self.fault == "sign" else rotated
        a, b = self.product(x, cos, 0), self.product(rotated, sin, 1)
        return b + a if self.commute[2] else a + b

    def parts(self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
        u, v = x.chunk(2, -1) if self.pairing == "half" else (x[..., ::2], x[..., 1::2])
        w = v if self.fault != "other" else y.chunk(2, -1)[0]
        cos, sin = cos.unsqueeze(dim), -sin.unsqueeze(dim) if self.fault == "sign" else sin.unsqueeze(dim)
        first = self.product(u, cos, 0) - self.product(w, sin, 1)
        a, b = self.product(v, cos, 0), self.product(u, -sin if self.fault == "sign" else sin, 1)
        second = a - b if self.fault == "sign" else b + a if self.commute[2] else a + b
        if self.pairing == "half":
            return torch.cat((first, second), -1)
        return torch.stack((first, second), -1).flatten(-2)

    def full(self, table: Tensor) -> Tensor:
        return torch.cat((table, table), -1) if self.pairing == "half" else table.repeat_interleave(2, -1)

    def product(self, a: Tensor, b: Tensor, which: int) -> Tensor:
        return b * a if self.commute[which] else a * b


def spellings(faults: tuple[str | None, ...]) -> st.SearchStrategy[Spelling]:
    return st.builds(
        Spelling,
        pairing=st.sampled_from(["half", "interleaved"]),
        form=st.sampled_from(["arranged", "parts"]),
        rotate=st.integers(0, 5),
        commute=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        upcast=st.booleans(),
        table_dtype=st.sampled_from([BF16, F32]),
        offset=st.sampled_from([0, 0, 4]),
        rest=st.sampled_from([0, 0, 2]),
        heads_last=st.booleans(),
        fault=st.sampled_from(faults),
    )


FEW = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def random_args(spelling: Spelling) -> tuple[Tensor, ...]:
    shape = (B, S, H, D) if spelling.heads_last else (B, H, S, D)
    return tensor(*shape), tensor(*shape, seed=1), angles(D // 2, B)


@FEW
@given(spelling=spellings((None,)))
def test_random_spellings_are_matched(spelling: Spelling, tracing: ModuleType) -> None:
    args = random_args(spelling)
    bound = assert_matched(tracing, spelling, *args)
    assert layout(bound) == (spelling.pairing, spelling.pairing, spelling.width, spelling.offset, 1)


@FEW
@given(spelling=spellings(("sign", "other", "exchanged")))
def test_random_near_misses_are_declined(spelling: Spelling) -> None:
    report = explained(spelling, *random_args(spelling))
    assert report.counts["rope"] == 0
    assert len([m for m in report.misses if m.kind == "rope"]) == 1


# -------------------------------------------------------------------------------------------------- the operator


def test_the_operator_refuses_what_does_not_fit() -> None:
    x, (cos, sin) = tensor(B, H, S, D), tables()
    types = {"compute_dtype": BF16, "product_dtype": BF16, "out_dtype": BF16}
    with pytest.raises(ValueError, match="pairing must be one of"):
        rope_reference(x, cos, sin, pairing="halves", out_pairing="half", rotary_dim=D, **types)
    with pytest.raises(ValueError, match="do not fit 16 elements"):
        rope_reference(x, cos, sin, pairing="half", out_pairing="half", rotary_dim=D, offset=2, **types)


def test_the_operator_is_sound() -> None:
    x, (cos, sin) = tensor(B, H, S, D), (t.unsqueeze(1) for t in tables(10))
    kwargs = {"pairing": "half", "out_pairing": "interleaved", "rotary_dim": 10, "offset": 4}
    types = {"compute_dtype": F32, "product_dtype": F32, "out_dtype": BF16, "out_order": [0, 2, 1, 3]}
    torch.library.opcheck(ROPE.op, (x, cos, sin), {**kwargs, **types})


# ------------------------------------------------------------------------------------------------ compiled for real


def compiled(model: Callable, *args: Tensor, **how: object) -> object:
    torch._dynamo.reset()
    return torch.compile(model, backend="portable_ops", options={"portable_ops.gate": "always"}, **how)(*args)


@pytest.mark.parametrize("rope", [llama, in_front], ids=["whole", "part"])
def test_compiled_inference(rope: Callable, tracing: ModuleType) -> None:
    args = tensor(B, S, H, D).transpose(1, 2), *tables(D if rope is llama else 10)
    with torch.no_grad():
        tracing.assert_as_good_as_eager(compiled(rope, *args, fullgraph=True), rope, *args)


def test_compiled_with_dynamic_shapes(tracing: ModuleType) -> None:
    torch._dynamo.reset()
    run = torch.compile(llama, backend="portable_ops", options={"portable_ops.gate": "always"}, dynamic=True)
    for rows in (S, S - 2):
        cos, sin = (t[:, :rows] for t in tables())
        args = tensor(B, H, rows, D), cos, sin
        with torch.no_grad():
            tracing.assert_as_good_as_eager(run(*args), llama, *args)
