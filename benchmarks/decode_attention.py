"""Attention of one query over a long KV cache, masked by position, as decoding with a static cache runs it.

    y[B, H, 1, D] = softmax(q k^T / sqrt(D) + mask) v,    k, v[B, K, T, D] repeated H / K times

``repeat_kv``: K and V are expanded to H heads by hand, as Hugging Face models do.  ``enable_gqa``: the flag
of ``scaled_dot_product_attention`` says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .harness import kernel_case
from .results import Row
from .truth import attention_truth

# batch, length of the cache, valid positions (all but the last six, unless said otherwise)
SHAPES = (
    (1, 4096, 4090),
    (1, 32768, 32762),
    (1, 131072, 131066),
    (16, 4096, 4090),
    (64, 4096, 4090),
    (1, 32768, 100),
)
TINY_SHAPES = ((2, 96, 90),)


def repeat_kv(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention over K and V that are expanded by hand."""
    B, K, T, D = k.shape
    n = q.shape[1] // K
    k = k[:, :, None].expand(B, K, n, T, D).reshape(B, K * n, T, D)
    v = v[:, :, None].expand(B, K, n, T, D).reshape(B, K * n, T, D)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def enable_gqa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same with the flag."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


SPELLINGS = {"repeat_kv": repeat_kv, "enable_gqa": enable_gqa}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--spelling", nargs="+", choices=SPELLINGS, default=list(SPELLINGS))


def run(args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of one case after another."""
    H, K, D = (4, 2, 16) if args.tiny else (32, 8, 128)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    for B, T, valid in TINY_SHAPES if args.tiny else SHAPES:
        q = torch.randn(B, H, 1, D, device=args.device, dtype=dtype)
        k, v = (torch.randn(B, K, T, D, device=args.device, dtype=dtype) for _ in range(2))
        mask = (torch.arange(T, device=args.device)[None, None, None] < valid).expand(B, 1, 1, T).contiguous()
        exact = attention_truth(q, k, v, mask)
        for spelling in args.spelling:
            case = f"{spelling}, batch {B}, KV {T}, {valid} valid, {H}/{K} heads of {D}"
            yield kernel_case(case, SPELLINGS[spelling], (q, k, v, mask), exact, args)
