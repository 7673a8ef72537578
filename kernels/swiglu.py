"""Gated activations: ``activation(gate) * up`` (SwiGLU, GeGLU, ReGLU, GLU and their kin).

    g   = clamp(gate, gate_min, gate_max)
    a   = clamp(scale * activation(g), act_min, act_max)
    out = a * (clamp(up, up_min, up_max) + up_offset)

with ``activation`` one of

    silu       x * sigmoid(alpha * x)                 alpha = 1: SiLU; 1.702: quick GELU, gpt-oss
    gelu       x / 2 * (1 + erf(x / sqrt(2)))
    gelu_tanh  x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
    relu       max(x, 0)
    relu2      max(x, 0)^2
    sigmoid    sigmoid(alpha * x)
    tanh       tanh(x)

The activation is computed in float32 (float64 for a float64 gate) and rounded once, to ``act_dtype``; the product is
formed in the type to which torch promotes ``act_dtype`` and the type of ``up``, and rounded to ``out_dtype``.

Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .launch import ordered
from .operator import define_operator
from .target import Target

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh")


def swiglu_reference(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    alpha_tensor: torch.Tensor | None = None,
    scale: float = 1.0,
    gate_min: float | None = None,
    gate_max: float | None = None,
    act_min: float | None = None,
    act_max: float | None = None,
    up_min: float | None = None,
    up_max: float | None = None,
    up_offset: float = 0.0,
    act_dtype: torch.dtype,
    out_dtype: torch.dtype,
    out_order: list[int] | None = None,
) -> torch.Tensor:
    """``activation(gate) * up`` for ``gate`` and ``up`` of one shape; the result is dense, of ``out_dtype``.

    ``alpha_tensor``: 0-d, replaces ``alpha`` (used by ``silu`` and ``sigmoid``).  A limit that is None does not bind;
    the gate and ``up`` are clamped in their own types, the activation in ``act_dtype``.  ``up_offset`` is added to
    ``up`` in the type of ``up`` (gpt-oss's ``up + 1``).  ``out_order``: the dimensions of the result from outermost to
    innermost in memory; None: contiguous.

    Raises ValueError for an unknown activation.
    """
    g = _clamp(gate, gate_min, gate_max)
    g = g if g.dtype == torch.float64 else g.float()
    a = _activate(g, activation, alpha if alpha_tensor is None else alpha_tensor.to(g.dtype))
    a = _clamp((a * scale if scale != 1.0 else a).to(act_dtype), act_min, act_max)
    u = _clamp(up, up_min, up_max)
    out = (a * (u + up_offset if up_offset else u)).to(out_dtype)
    return ordered(out, out_order)


def _activate(x: torch.Tensor, activation: str, alpha: float | torch.Tensor) -> torch.Tensor:
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


def _clamp(x: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    return x if low is None and high is None else x.clamp(low, high)


def swiglu_supports(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    alpha_tensor: torch.Tensor | None = None,
    scale: float = 1.0,
    gate_min: float | None = None,
    gate_max: float | None = None,
    act_min: float | None = None,
    act_max: float | None = None,
    up_min: float | None = None,
    up_max: float | None = None,
    up_offset: float = 0.0,
    act_dtype: torch.dtype,
    out_dtype: torch.dtype,
    out_order: list[int] | None = None,
    target: Target,
) -> str | None:
    """None, or why ``swiglu_reference`` of these arguments is not what the operator means."""
    if activation not in ACTIVATIONS:
        return f"the activation {activation!r} is unknown"
    if gate.device != up.device:
        return f"the gate is on {gate.device}, up on {up.device}"
    return None


SWIGLU = define_operator(
    "portable_ops::swiglu(Tensor gate, Tensor up, *, str activation='silu', float alpha=1.0, "
    "Tensor? alpha_tensor=None, float scale=1.0, float? gate_min=None, float? gate_max=None, float? act_min=None, "
    "float? act_max=None, float? up_min=None, float? up_max=None, float up_offset=0.0, ScalarType act_dtype, "
    "ScalarType out_dtype, int[]? out_order=None) -> Tensor",
    reference=swiglu_reference,
    supports=swiglu_supports,
)
