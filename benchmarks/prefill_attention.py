"""Attention of whole prompts: as many queries as keys, causal or not, with all heads or grouped ones.

y[B, H, S, D] = softmax(q k^T / sqrt(D) + causal mask) v
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .harness import kernel_case
from .results import Row
from .truth import attention_truth

# batch, length, query heads, KV heads, head_dim, causal
SHAPES = (
    (8, 2048, 32, 32, 128, True),
    (8, 2048, 32, 32, 128, False),
    (2, 8192, 32, 8, 128, True),
    (1, 16384, 32, 8, 128, True),
    (4, 4096, 32, 8, 64, True),
    (4, 4096, 16, 8, 256, True),
    (64, 512, 32, 8, 128, True),
)
TINY_SHAPES = ((1, 48, 4, 2, 16, True),)


def all_heads(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """As many KV heads as query heads."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def enable_gqa(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Grouped heads by the flag."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def repeat_kv(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Grouped heads, expanded by hand."""
    B, K, T, D = k.shape
    n = q.shape[1] // K
    k = k[:, :, None].expand(B, K, n, T, D).reshape(B, K * n, T, D)
    v = v[:, :, None].expand(B, K, n, T, D).reshape(B, K * n, T, D)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This benchmark has no flags of its own."""


def spellings(H: int, K: int) -> tuple[Callable[..., Tensor], ...]:
    """The ways to write attention with ``H`` query heads over ``K`` KV heads."""
    return (all_heads,) if H == K else (repeat_kv, enable_gqa)


def run(args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of one case after another."""
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    for B, S, H, K, D, causal in TINY_SHAPES if args.tiny else SHAPES:
        q = torch.randn(B, H, S, D, device=args.device, dtype=dtype)
        k, v = (torch.randn(B, K, S, D, device=args.device, dtype=dtype) for _ in range(2))
        exact = attention_truth(q, k, v, is_causal=causal)
        for fn in spellings(H, K):
            shape = f"batch {B}, length {S}, {H}/{K} heads of {D}, {'causal' if causal else 'full'}"
            case = shape if H == K else f"{fn.__name__}, {shape}"
            yield kernel_case(case, functools.partial(fn, is_causal=causal), (q, k, v), exact, args)
