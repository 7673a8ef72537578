"""The k largest (or smallest) elements along a dimension, with their indices: ``torch.topk`` as an operator.

    values, indices = topk(x, k, dim, largest, sorted)

Where several elements are equal at the edge, which of them is taken is not specified, as in torch.
"""

from __future__ import annotations

import torch

from .launch import IntLike
from .operator import define_operator
from .target import Target

_UNORDERED = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
"""The types that torch sorts, but selects nothing from."""


def topk_reference(
    x: torch.Tensor, k: IntLike, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (of the type of ``x``) and int64 indices, both of the shape of ``x`` with ``k`` at ``dim``.

    ``sorted``: in descending order (ascending for ``largest=False``); without it in any order.
    """
    values, indices = torch.topk(x, k, dim, largest, sorted)
    return values, indices


def topk_supports(
    x: torch.Tensor, k: IntLike, dim: int = -1, largest: bool = True, sorted: bool = True, *, target: Target
) -> str | None:
    """None, or why ``topk_reference`` of these arguments is not what the operator means."""
    if x.dim() == 0:
        return "x has no dimension"
    return f"x is {x.dtype}, of which torch.topk takes none" if x.dtype in _UNORDERED else None


TOPK = define_operator(
    "portable_ops::topk(Tensor x, SymInt k, int dim=-1, bool largest=True, bool sorted=True) "
    "-> (Tensor values, Tensor indices)",
    reference=topk_reference,
    supports=topk_supports,
)
