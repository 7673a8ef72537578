"""Gated activations: ``activation(gate) * up`` (SwiGLU, GeGLU, ReGLU, GLU and their kin).

    g   = clamp(gate, gate_min, gate_max)
    a   = clamp(scale * activation(g), act_min, act_max)
    out = a * (clamp(up, up_min, up_max) + up_offset)

with ``activation`` one of those in :mod:`.activation`.

The activation is computed in float32 (float64 for a float64 gate) and rounded once, to ``act_dtype``; the product is
formed in the type to which torch promotes ``act_dtype`` and the type of ``up``, and rounded to ``out_dtype``.

Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
"""

from __future__ import annotations

import torch

from .activation import ACTIVATIONS, activate
from .launch import ordered
from .operator import define_operator
from .target import Target


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
    a = activate(g, activation, alpha if alpha_tensor is None else alpha_tensor.to(g.dtype))
    a = _clamp((a * scale if scale != 1.0 else a).to(act_dtype), act_min, act_max)
    u = _clamp(up, up_min, up_max)
    out = (a * (u + up_offset if up_offset else u)).to(out_dtype)
    return ordered(out, out_order)


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
    no_kernel="stock is at the memory's limit with it, and a kernel of its own would tie",
)
