"""Queries and keys on their way from a packed projection to attention: rotated, normalised before, put into a cache.

rope           q, k [B, H, S, D] rotated by cos, sin [B, S, D]
qk_norm_rope   the same with an RMSNorm of each head in front, q and k pieces of a packed projection [B, S, (H + 2K) D]
append         the same, and k and v written into static caches [B, K, T, D]
rope_append    that without the norms
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import harness, truth
from .harness import kernel_case, progress
from .results import Row

CACHE = 4096
POSITION = 2000
EPS = 1e-6

Problem = tuple[str, int, int, int, int, int]
"""Kind, batch, length, heads of q and of k, head size."""

PROBLEMS: tuple[Problem, ...] = (
    ("rope", 8, 2048, 32, 32, 128),
    ("rope", 8, 2048, 32, 8, 128),
    ("rope", 64, 1, 32, 8, 128),
    ("qk_norm_rope", 8, 2048, 32, 8, 128),
    ("qk_norm_rope", 64, 1, 32, 8, 128),
    ("append", 1, 1, 32, 8, 128),
    ("append", 16, 1, 32, 8, 128),
    ("append", 64, 1, 32, 8, 128),
    ("append", 4, 512, 32, 8, 128),
    ("rope_append", 1, 1, 32, 8, 128),
    ("rope_append", 16, 1, 32, 8, 128),
    ("rope_append", 64, 1, 32, 8, 128),
)
TINY_PROBLEMS: tuple[Problem, ...] = (
    ("rope", 1, 3, 4, 2, 16),
    ("qk_norm_rope", 2, 3, 4, 2, 16),
    ("append", 2, 1, 4, 2, 16),
    ("rope_append", 2, 1, 4, 2, 16),
)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """As Hugging Face's Qwen3RMSNorm spells it."""
    f = x.to(torch.float32)
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * f.to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """The halves of the last dimension exchanged, the second negated."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As Hugging Face's apply_rotary_pos_emb spells it."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def split(qkv: Tensor, heads: int, kv_heads: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, S, heads, size] of a packed projection."""
    sizes = [heads * size, kv_heads * size, kv_heads * size]
    return tuple(part.unflatten(-1, (-1, size)) for part in qkv.split(sizes, -1))


def function(kind: str, heads: int, kv_heads: int, size: int) -> Callable:
    """What is compiled for ``kind``; only ``rope`` does not start from the projection."""

    def qk_norm_rope(
        qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, _ = split(qkv, heads, kv_heads, size)
        return rope(norm(q, q_weight).transpose(1, 2), norm(k, k_weight).transpose(1, 2), cos, sin)

    def append(qkv: Tensor, *rest: Tensor) -> Tensor:
        *tables, position, k_cache, v_cache = rest
        q, k = qk_norm_rope(qkv, *tables)
        return write(q, k, qkv, position, k_cache, v_cache)

    def rope_append(qkv: Tensor, *rest: Tensor) -> Tensor:
        _, _, cos, sin, position, k_cache, v_cache = rest
        q, k, _ = split(qkv, heads, kv_heads, size)
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return write(q, k, qkv, position, k_cache, v_cache)

    def write(q: Tensor, k: Tensor, qkv: Tensor, position: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        v = split(qkv, heads, kv_heads, size)[2].transpose(1, 2)
        positions = torch.arange(qkv.shape[1], device=qkv.device) + position
        k_cache.index_copy_(2, positions, k)
        v_cache.index_copy_(2, positions, v)
        return q

    return {"rope": rope, "qk_norm_rope": qk_norm_rope, "append": append, "rope_append": rope_append}[kind]


def inputs(problem: Problem, args: argparse.Namespace) -> list[Tensor]:
    """Random inputs of ``function``."""
    kind, B, S, H, K, D = problem
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    how = {"device": args.device, "dtype": dtype}
    angles = torch.rand(B, S, D // 2, device=args.device) * 6.3
    angles = torch.cat((angles, angles), -1)
    tables = [angles.cos().to(dtype), angles.sin().to(dtype)]
    if kind == "rope":
        return [torch.randn(B, S, heads, D, **how).transpose(1, 2) for heads in (H, K)] + tables
    tensors = [torch.randn(B, S, (H + 2 * K) * D, **how), torch.rand(D, **how), torch.rand(D, **how), *tables]
    if kind.endswith("append"):
        length = CACHE if args.device != "cpu" else 16
        tensors.append(torch.tensor(min(POSITION, length - S), device=args.device))
        tensors += [torch.zeros(B, K, length, D, **how) for _ in range(2)]
    return tensors


def exact(fn: Callable, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """``fn`` in float64; of caches, what was written."""
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    with truth.Wide():
        outputs = truth.as_tuple(fn(*wide))
    return (*outputs, *written(wide))


def written(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """What a call of ``append`` or ``rope_append`` wrote into its caches; nothing for other kinds."""
    if len(tensors) < 8:
        return ()
    first, length = int(tensors[5]), tensors[0].shape[1]
    return tuple(cache[:, :, first : first + length].clone() for cache in tensors[6:])


def name_of(problem: Problem) -> str:
    kind, B, S, H, K, D = problem
    return f"{kind}, batch {B}, length {S}, {H}/{K} heads of {D}"


def measure(problem: Problem, args: argparse.Namespace) -> list[Row]:
    """The rows of one problem."""
    kind, _, _, H, K, D = problem
    tensors, fn = inputs(problem, args), function(kind, H, K, D)
    if not kind.endswith("append"):
        return kernel_case(name_of(problem), fn, tensors, exact(fn, tensors), args)
    progress.print(name_of(problem), highlight=False)
    truths = exact(fn, [t.clone() for t in tensors])
    eager = truth.errors((fn(*tensors), *written(tensors)), truths)
    torch._dynamo.reset()
    candidates, rows = [], []
    for impl in args.impl:
        for cache in tensors[6:]:
            cache.zero_()
        candidate = harness.prepare(impl, fn, lambda f: f(*tensors))
        candidate.output = (candidate.output, *written(tensors))
        candidates.append(candidate)
        rows.append(harness.check(name_of(problem), candidate, truths, eager))
    clock = harness.Clock(args.device, args.repetitions)
    for row, us in zip(rows, clock.replays([c.call for c in candidates]), strict=True):
        row["us"] = us
    for row, candidate in zip(rows, candidates, strict=True):
        if args.kernels:
            row["kernels"] = harness.kernel_names(candidate.call)
    return harness.with_baseline(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This benchmark has no flags of its own."""


def run(args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of one case after another."""
    for problem in TINY_PROBLEMS if args.tiny else PROBLEMS:
        yield measure(problem, args)
