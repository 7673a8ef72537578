"""RMSNorm of a residual sum, both results kept, as every Llama layer runs it.

h = x + r;    y = w * (h / sqrt(mean(h^2) + eps)),    x, r, h, y[M, N], w[N]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from .harness import kernel_case
from .results import Row

SHAPES = (
    (1, 4096),
    (16, 4096),
    (64, 4096),
    (2048, 4096),
    (16384, 4096),
    (16384, 8192),
    (8192, 16384),
    (32768, 2048),
)
TINY_SHAPES = ((3, 96),)
EPS = 1e-6


def add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The norm as Hugging Face's LlamaRMSNorm spells it, and the sum."""
    h = x + r
    f = h.to(torch.float32)
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS)
    return w * f.to(x.dtype), h


def exact_add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The same in float64."""
    h = x.double() + r.double()
    return w.double() * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS), h


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This benchmark has no flags of its own."""


def run(args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of one case after another."""
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    for M, N in TINY_SHAPES if args.tiny else SHAPES:
        x, r = (torch.randn(M, N, device=args.device, dtype=dtype) for _ in range(2))
        w = torch.rand(N, device=args.device, dtype=dtype)
        case = f"x + r, rms_norm, {M} x {N}"
        yield kernel_case(case, add_rms_norm, (x, r, w), exact_add_rms_norm(x, r, w), args)
