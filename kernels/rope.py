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

from .launch import empty_ordered, ordered
from .operator import define_operator
from .target import Target

SCHEMA = (
    "portable_ops::rope(Tensor x, Tensor cos, Tensor? sin=None, *, str pairing, str out_pairing, int rotary_dim, "
    "int offset=0, int sections=1, ScalarType compute_dtype, ScalarType product_dtype, "
    "ScalarType out_dtype, int[]? out_order=None) -> Tensor"
)

PAIRINGS = ("half", "interleaved")


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
    if pairing not in PAIRINGS or out_pairing not in PAIRINGS:
        raise ValueError(f"pairing must be one of {PAIRINGS}, got {pairing!r} and {out_pairing!r}")
    if rotary_dim % (2 * sections) or offset + rotary_dim > x.shape[-1]:
        raise ValueError(f"{sections} sections in {rotary_dim} elements at {offset} do not fit {x.shape[-1]} elements")
    if sin is None:
        cos, sin = cos.real, cos.imag
    u, v = _pairs(x[..., offset : offset + rotary_dim].to(compute_dtype), pairing, sections)
    cos_u, cos_v = _table(cos.to(compute_dtype), out_pairing, rotary_dim, sections)
    sin_u, sin_v = _table(sin.to(compute_dtype), out_pairing, rotary_dim, sections)
    turned_u = (u * cos_u).to(product_dtype) - (v * sin_u).to(product_dtype)
    turned_v = (v * cos_v).to(product_dtype) + (u * sin_v).to(product_dtype)
    dim = -2 if out_pairing == "half" else -1
    turned = torch.stack((turned_u, turned_v), dim).flatten(-3).to(out_dtype)
    before, after = x[..., :offset], x[..., offset + rotary_dim :]
    out = torch.cat((before.to(out_dtype), turned, after.to(out_dtype)), -1) if rotary_dim != x.shape[-1] else turned
    return ordered(out, out_order)


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


def _pairs(x: torch.Tensor, pairing: str, sections: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second elements of the pairs, each (..., sections, pairs of a section)."""
    shape = (sections, 2, -1) if pairing == "half" else (sections, -1, 2)
    return x.unflatten(-1, shape).unbind(-2 if pairing == "half" else -1)


def _table(table: torch.Tensor, pairing: str, rotary_dim: int, sections: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What multiplies the first and the second elements."""
    if table.shape[-1] == rotary_dim:
        return _pairs(table, pairing, sections)
    per_pair = table.unflatten(-1, (sections, -1))
    return per_pair, per_pair


def supports(x: torch.Tensor, *, target: Target, **_: object) -> str | None:
    """There is only the meaning so far, and it holds everywhere."""
    return None


ROPE = define_operator(SCHEMA, reference=rope_reference, supports=supports, fake=rope_fake)
