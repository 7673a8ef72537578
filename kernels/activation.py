"""Activations: their meaning in torch, and the same on a tile in a kernel.

silu       x * sigmoid(alpha * x)                 alpha = 1: SiLU; 1.702: quick GELU, gpt-oss
gelu       x / 2 * (1 + erf(x / sqrt(2)))
gelu_tanh  x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
relu       max(x, 0)
relu2      max(x, 0)^2
sigmoid    sigmoid(alpha * x)
tanh       tanh(x)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .launch import jit, tl

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh")


def activate(x: torch.Tensor, activation: str, alpha: float | torch.Tensor = 1.0) -> torch.Tensor:
    """``activation`` of ``x``, in the type of ``x``; ``alpha`` is used by ``silu`` and ``sigmoid``.

    Raises ValueError for an unknown activation.
    """
    steep = x if isinstance(alpha, float) and alpha == 1.0 else x * alpha
    if activation == "silu":
        return F.silu(x) if steep is x else x * torch.sigmoid(steep)
    if activation == "sigmoid":
        return torch.sigmoid(steep)
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation in ("relu", "relu2"):
        return torch.relu(x) if activation == "relu" else torch.relu(x).square()
    if activation == "tanh":
        return torch.tanh(x)
    raise ValueError(f"activation={activation!r}, expected one of {', '.join(ACTIVATIONS)}")


TILE_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")
"""What :func:`activate_tile` knows.  tanh by exponentials loses the digits of small arguments."""


@jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def activate_tile(x, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """``ACTIVATION`` of an fp32 tile."""
    if ACTIVATION == "silu":
        return x * _sigmoid(x * ALPHA)
    elif ACTIVATION == "sigmoid":
        return _sigmoid(x * ALPHA)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive
