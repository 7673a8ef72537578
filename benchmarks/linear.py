"""Linear layers for few rows, as in decoding: one, three that read the same input, and a gated pair.

y = x w^T;    q, k, v = x w_q^T, x w_k^T, x w_v^T;    y = silu(x w_gate^T) * (x w_up^T)

x[M, K], w[N, K].
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .harness import kernel_case
from .results import Row

ROWS = (1, 2, 4, 8, 16)
SHAPES = (
    ("qkv_linear", 4096, (4096, 1024, 1024)),
    ("linear", 4096, (4096,)),
    ("gated_linear", 4096, (14336, 14336)),
    ("linear", 14336, (4096,)),
    ("linear", 4096, (128256,)),
)
"""Spelling, K, and N of each weight: the layers of Llama 3 8B."""
TINY_SHAPES = (("qkv_linear", 32, (8, 4, 4)), ("linear", 32, (8,)), ("gated_linear", 32, (8, 8)))


def linear(x: Tensor, w: Tensor) -> Tensor:
    """One layer."""
    return F.linear(x, w)


def qkv_linear(x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three layers of one input."""
    return F.linear(x, q_weight), F.linear(x, k_weight), F.linear(x, v_weight)


def gated_linear(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """The first half of a gated MLP, as Hugging Face's LlamaMLP spells it."""
    return F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight)


FUNCTIONS: dict[str, Callable] = {"linear": linear, "qkv_linear": qkv_linear, "gated_linear": gated_linear}
WIDTHS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "linear": lambda N: (N,),
    "qkv_linear": lambda N: (N * 4 // 6, N // 6, N // 6),
    "gated_linear": lambda N: (N // 2, N // 2),
}
"""N of each weight where all together have ``N``: four query heads for each head of keys."""


def exact(fn: Callable, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """``fn`` in float64."""
    return fn(*(x.double() for x in inputs))


def inputs(rows: int, in_features: int, widths: tuple[int, ...], args: argparse.Namespace) -> list[Tensor]:
    """Random x, and weights of the size that initialisation gives them."""
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    x = torch.randn(rows, in_features, device=args.device, dtype=dtype)
    return [x, *(torch.randn(N, in_features, device=args.device, dtype=dtype) / in_features**0.5 for N in widths)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of x: sequences that are decoded")


def run(args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of one case after another."""
    for name, in_features, widths in TINY_SHAPES if args.tiny else SHAPES:
        for rows in (2,) if args.tiny else args.rows:
            tensors = inputs(rows, in_features, widths, args)
            case = f"{name}, {rows} rows, {in_features} -> {' + '.join(map(str, widths))}"
            yield kernel_case(case, FUNCTIONS[name], tensors, exact(FUNCTIONS[name], *tensors), args)
