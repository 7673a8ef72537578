r"""Rotary position embedding: pairs of elements of the last dimension are turned by an angle.

For pair ``p`` with elements ``u`` and ``v``::

    u' = u * cos_u - v * sin_u
    v' = v * cos_v + u * sin_v

Shapes: x (..., D), cos and sin broadcast to (..., rotary_dim) or, one value per pair, to (..., rotary_dim / 2).
The pairs lie in ``x[..., offset : offset + rotary_dim]``; the rest passes through.
Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .launch import Plan, empty_ordered, ordered
from .operator import define_operator
from .rotation import PAIRINGS, Rotation, RotationConfig, Turn, rotated, rotation_plan, rotation_supports
from .target import Target

__all__ = ["PAIRINGS", "ROPE", "rope_reference"]

SCHEMA = (
    "portable_ops::rope(Tensor x, Tensor cos, Tensor? sin=None, *, str pairing, str out_pairing, int rotary_dim, "
    "int offset=0, int sections=1, ScalarType compute_dtype, ScalarType product_dtype, "
    "ScalarType out_dtype, int[]? out_order=None) -> Tensor"
)


def rope_reference(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor | None = None,
    *,
    pairing: str,
    out_pairing: str,
    rotary_dim: int,
    offset: int = 0,
    sections: int = 1,
    compute_dtype: torch.dtype,
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
    out_order: Sequence[int] | None = None,
) -> torch.Tensor:
    """The meaning of ``portable_ops::rope``.

    ``pairing``: where the pairs are in x, ``"half"`` (element i with i + n/2) or ``"interleaved"`` (2i with 2i + 1);
    ``out_pairing``: where they are in the result.  ``sections``: the rotary part is that many equal pieces, each
    paired by itself (2-D positions).  ``cos`` and ``sin`` of full width are laid out like the result; ``sin`` None:
    ``cos`` is complex, cos + i sin.  x and the tables are converted to ``compute_dtype``; each of the four products is
    rounded to ``product_dtype``, in which they are added, the result to ``out_dtype``.  ``out_order``: the
    dimensions of the result from outermost to innermost in memory (dense); None means contiguous.
    Raises ValueError for a pairing that does not exist and for sizes that do not fit.
    """
    if sin is None:
        cos, sin = cos.real, cos.imag
    turn = Turn(pairing, out_pairing, rotary_dim, offset, sections, compute_dtype, product_dtype, out_dtype)
    return ordered(rotated(x, cos, sin, turn), out_order)


def rope_fake(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    out_order: Sequence[int] | None = None,
    **_: object,
) -> torch.Tensor:
    """Shape, dtype and strides of the result."""
    return empty_ordered(x.shape, out_order, out_dtype, x.device)


def _rotation(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pairing: str,
    out_pairing: str,
    rotary_dim: int,
    compute_dtype: torch.dtype,
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
    offset: int = 0,
    sections: int = 1,
    out_order: Sequence[int] | None = None,
) -> Rotation:
    turn = Turn(pairing, out_pairing, rotary_dim, offset, sections, compute_dtype, product_dtype, out_dtype)
    return Rotation({"x": x}, cos, sin, turn, {"x": out_order})


def rope_supports(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor | None = None, *, target: Target, **rest: object
) -> str | None:
    """None, or in one line which argument stands in the way and what would be needed."""
    if sin is None:
        return "cos is complex, needs cosine and sine apart"
    return rotation_supports(_rotation(x, cos, sin, **rest), target)


def rope_plan(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    target: Target,
    config: RotationConfig | None = None,
    **rest: object,
) -> Plan:
    """The launch for one call that ``rope_supports`` accepts; ``config`` overrides the choice, for sweeps."""
    return rotation_plan(_rotation(x, cos, sin, **rest), target, "rotation", config)


ROPE = define_operator(SCHEMA, reference=rope_reference, supports=rope_supports, plan=rope_plan, fake=rope_fake)
