"""Queries and keys rotated together: their heads normalised before or not, keys and values put into a cache or not.

    q', k' = rope(norm(q)), rope(norm(k))                                           qk_rope
    q'     = rope(norm(q));  k_cache[position] = rope(norm(k));  v_cache[position] = v      qk_rope_append

``rope`` is ``portable_ops::rope``; ``norm``, where ``eps`` is given, is ``portable_ops::rms_norm`` of each head,
rounded to ``norm_out_dtype``.  q and k differ in nothing but the number of heads, and share the tables.

Sources: Su et al. 2021, arXiv 2104.09864; Henry et al. 2020, "Query-Key Normalization for Transformers",
arXiv 2010.04245.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .launch import Plan, empty_ordered, ordered
from .operator import define_operator
from .rotation import (
    Append,
    Norm,
    Rotation,
    RotationConfig,
    Turn,
    heads_dim,
    rotated,
    rotation_plan,
    rotation_supports,
)
from .target import Target

_OPTIONS = (
    "Tensor? q_weight=None, Tensor? k_weight=None, *, float? eps=None, float weight_offset=0.0, "
    "ScalarType? root_dtype=None, ScalarType? weight_dtype=None, ScalarType? norm_dtype=None, "
    "ScalarType? norm_product_dtype=None, ScalarType? norm_out_dtype=None, "
    "str pairing, str out_pairing, int rotary_dim, int offset=0, int sections=1, "
    "ScalarType compute_dtype, ScalarType product_dtype, ScalarType out_dtype, int[]? q_order=None"
)
QK_ROPE_SCHEMA = (
    f"portable_ops::qk_rope(Tensor q, Tensor k, Tensor cos, Tensor sin, {_OPTIONS}, int[]? k_order=None) "
    "-> (Tensor, Tensor)"
)
APPEND_SCHEMA = (
    "portable_ops::qk_rope_append(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, "
    f"Tensor(b!) v_cache, Tensor? position=None, {_OPTIONS}, int start=0, int dim, int[]? cache_order=None) -> Tensor"
)


def qk_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    *,
    q_order: Sequence[int] | None = None,
    k_order: Sequence[int] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning of ``portable_ops::qk_rope``.

    q and k (..., D), which differ in the number of heads at most.  ``q_weight``, ``k_weight``: [D], or [heads * D] for
    one of each head.  ``eps`` None: no norm.  The other options are those of ``rope`` and ``rms_norm``, the latter's
    ``product_dtype`` and ``out_dtype`` called ``norm_product_dtype`` and ``norm_out_dtype``.  ``q_order``,
    ``k_order``: the dimensions of the results from outermost to innermost in memory; None means contiguous.
    """
    turn, norm = _turn(**options), _norm(**options)
    heads = heads_dim((q, k), (cos, sin))
    q, k = (_normalised(x, weight, norm, heads) for x, weight in ((q, q_weight), (k, k_weight)))
    return ordered(rotated(q, cos, sin, turn), q_order), ordered(rotated(k, cos, sin, turn), k_order)


def qk_rope_append_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    *,
    start: int = 0,
    dim: int,
    cache_order: Sequence[int] | None = None,
    q_order: Sequence[int] | None = None,
    **options: Any,
) -> torch.Tensor:
    """The meaning of ``portable_ops::qk_rope_append``: ``qk_rope`` whose k goes, with v, into caches in place.

    v, ``k_cache`` and ``v_cache`` have the dimensions of the cache; ``k.permute(cache_order)`` has them too.  Along
    ``dim`` of them the tokens go to ``position``, one for each (1-d), or, from ``start + position`` (0-d) or
    ``start`` on, one after the other.  Negative positions count from the end.  Returns the rotated q.
    """
    rotated_q, rotated_k = qk_rope_reference(q, k, cos, sin, q_weight, k_weight, q_order=q_order, **options)
    rotated_k = rotated_k if cache_order is None else rotated_k.permute(list(cache_order))
    if position is None or position.dim() == 0:
        first = start if position is None else start + position.long()
        position = first + torch.arange(v.shape[dim], device=v.device)
    index = [*[None] * dim, position]
    torch.ops.aten.index_put_(k_cache, index, rotated_k)
    torch.ops.aten.index_put_(v_cache, index, v)
    return rotated_q


def _turn(
    *,
    pairing: str,
    out_pairing: str,
    rotary_dim: int,
    offset: int = 0,
    sections: int = 1,
    compute_dtype: torch.dtype,
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
    **_: object,
) -> Turn:
    return Turn(pairing, out_pairing, rotary_dim, offset, sections, compute_dtype, product_dtype, out_dtype)


def _norm(
    *,
    eps: float | None = None,
    weight_offset: float = 0.0,
    root_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    norm_dtype: torch.dtype | None = None,
    norm_product_dtype: torch.dtype | None = None,
    norm_out_dtype: torch.dtype | None = None,
    **_: object,
) -> Norm | None:
    """The norm in front; a type that is not given is float32."""
    if eps is None:
        return None
    dtypes = (root_dtype, weight_dtype, norm_dtype, norm_product_dtype, norm_out_dtype)
    return Norm(eps, weight_offset, *(dtype or torch.float32 for dtype in dtypes))


def _normalised(x: torch.Tensor, weight: torch.Tensor | None, norm: Norm | None, heads: int | None) -> torch.Tensor:
    if norm is None:
        return x
    f = x.float()
    root = torch.rsqrt(torch.mean(f * f, -1, keepdim=True) + norm.eps).to(norm.root_dtype)
    y = (f * root).to(norm.norm_dtype)
    if weight is not None:
        w = weight.to(norm.weight_dtype)
        if weight.shape[0] != x.shape[-1]:
            w = w.view(x.shape[heads], *[1] * (x.dim() - heads - 2), x.shape[-1])
        y = y * (w + norm.weight_offset if norm.weight_offset else w)
    return y.to(norm.product_dtype).to(norm.out_dtype)


def qk_rope_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    *_: object,
    out_dtype: torch.dtype,
    q_order: Sequence[int] | None = None,
    k_order: Sequence[int] | None = None,
    **__: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes, dtypes and strides of the results."""
    return (
        empty_ordered(q.shape, q_order, out_dtype, q.device),
        empty_ordered(k.shape, k_order, out_dtype, k.device),
    )


def qk_rope_append_fake(
    q: torch.Tensor, *_: object, out_dtype: torch.dtype, q_order: Sequence[int] | None = None, **__: object
) -> torch.Tensor:
    """Shape, dtype and strides of the result."""
    return empty_ordered(q.shape, q_order, out_dtype, q.device)


def _qk_rotation(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    *,
    q_order: Sequence[int] | None = None,
    k_order: Sequence[int] | None = None,
    **options: Any,
) -> Rotation:
    orders = {"q": q_order, "k": k_order}
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    return Rotation({"q": q, "k": k}, cos, sin, _turn(**options), orders, _norm(**options), weights)


def _append_rotation(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    *,
    start: int = 0,
    dim: int,
    cache_order: Sequence[int] | None = None,
    q_order: Sequence[int] | None = None,
    **options: Any,
) -> Rotation:
    order = list(cache_order or range(v.dim()))
    v, k_cache, v_cache = (t.permute([order.index(d) for d in range(len(order))]) for t in (v, k_cache, v_cache))
    return Rotation(
        {"q": q, "k": k},
        cos,
        sin,
        _turn(**options),
        {"q": q_order},
        _norm(**options),
        {"q_weight": q_weight, "k_weight": k_weight},
        Append(v, k_cache, v_cache, position, start, order[dim]),
    )


def qk_rope_supports(*args: Any, target: Target, **kwargs: Any) -> str | None:
    """None, or in one line which argument stands in the way and what would be needed."""
    return rotation_supports(_qk_rotation(*args, **kwargs), target)


def qk_rope_append_supports(*args: Any, target: Target, **kwargs: Any) -> str | None:
    """None, or in one line which argument stands in the way and what would be needed."""
    return rotation_supports(_append_rotation(*args, **kwargs), target)


def qk_rope_plan(*args: Any, target: Target, config: RotationConfig | None = None, **kwargs: Any) -> Plan:
    """The launch for one call that ``qk_rope_supports`` accepts; ``config`` overrides the choice, for sweeps."""
    rotation = _qk_rotation(*args, **kwargs)
    return rotation_plan(rotation, target, "rotation" if rotation.norm is None else "norm + rotation", config)


def qk_rope_append_plan(*args: Any, target: Target, config: RotationConfig | None = None, **kwargs: Any) -> Plan:
    """The launch for one call that ``qk_rope_append_supports`` accepts; ``config`` overrides the choice, for sweeps."""
    rotation = _append_rotation(*args, **kwargs)
    variant = "rotation + append" if rotation.norm is None else "norm + rotation + append"
    return rotation_plan(rotation, target, variant, config)


QK_ROPE = define_operator(
    QK_ROPE_SCHEMA,
    reference=qk_rope_reference,
    supports=qk_rope_supports,
    plan=qk_rope_plan,
    fake=qk_rope_fake,
)
QK_ROPE_APPEND = define_operator(
    APPEND_SCHEMA,
    reference=qk_rope_append_reference,
    supports=qk_rope_append_supports,
    plan=qk_rope_append_plan,
    fake=qk_rope_append_fake,
)
