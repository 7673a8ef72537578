"""Top-k: the k largest or smallest elements along a dimension.

Matches::

    values, indices = x.topk(k, dim, largest, sorted)            # both used, or either
    x.sort(dim, descending)[...][..., :k]                        # the first k of a sort or argsort

A group-limited router, which picks groups by one top-k and experts inside of them by another, has a match for each
where it is not taken as a whole.

Replaces with ``portable_ops::topk``, or with ``portable_ops::topk_indices`` where the values are not used.  Then

* indices are not sorted if nobody can tell (``order.py``);
* -inf in front of ``start`` and from ``end`` on, wherever both come from (lengths, causal positions), is not filled in
  but left out: ``x.masked_fill(arange >= lengths[:, None], -inf)``.

Declines, of a sort: when it is stable (top-k promises no order among equal elements); when more than its first k
elements are read, or other than the first; when the strides of the sort, which top-k does not have, can be seen: a
result or a view of it leaves the graph, or the sorted tensor is not contiguous.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..kernels.topk import TOPK, TOPK_INDICES
from . import algebra, order
from .algebra import aten, prims
from .match import Call, Match, Pattern, Unmatched, val


def match(anchor: fx.Node) -> Match | None:
    """Match the top-k that ``anchor``, a ``topk`` or a ``sort``, computes."""
    if algebra.is_op(anchor, aten.sort):
        return _match_sort(anchor)
    args = {name: algebra.argument(anchor, name) for name in ("k", "dim", "largest", "sorted")}
    return _build(anchor, {"x": anchor.args[0], **args}, [_result(anchor, 0), _result(anchor, 1)])


def _match_sort(anchor: fx.Node) -> Match | None:
    x, descending = anchor.args[0], bool(algebra.argument(anchor, "descending"))
    dim = algebra.argument(anchor, "dim") % max(1, val(x).dim())
    results = [_result(anchor, 0), _result(anchor, 1)]
    readers = [user for result in results if result is not None for user in result.users]
    pieces = [r for r in readers if _is_piece(r, dim)]
    if not pieces:
        return None
    if len(pieces) != len(readers):
        if all(r in pieces or algebra.is_backward(r) for r in readers):
            raise Unmatched("the gradient of the sort reads all of its indices", *readers)
        raise Unmatched("the whole sorted tensor is read as well as a piece of it", *readers)
    if any(algebra.argument(p, "start") not in (0, None) or algebra.argument(p, "step") != 1 for p in pieces):
        raise Unmatched("other elements of a sort are taken than the first k", *pieces)
    sizes = [val(p).shape[dim] for p in pieces]
    outputs = [next(iter(r.users)) if r is not None and r.users else None for r in results]
    if len(pieces) > sum(o is not None for o in outputs) or not all(algebra.same_size(s, sizes[0]) for s in sizes):
        raise Unmatched("pieces of different sizes are taken from one sort", *pieces)
    if "stable" in [a.name for a in anchor.target._schema.arguments] and algebra.argument(anchor, "stable"):
        raise Unmatched(
            "the sort is stable: it keeps the order of equal elements, which top-k does not promise", *pieces
        )
    if any(_shows_strides(p) for p in pieces):
        raise Unmatched("a piece of a sort is returned from the graph with the strides of the whole", *pieces)
    if any(r is not None and algebra.dense_order(val(r)) != tuple(range(val(r).dim())) for r in results):
        raise Unmatched("the sort is of a tensor that is not contiguous and has its strides", *pieces)
    k = sizes[0]
    if not isinstance(k, int):
        raise Unmatched("the number of elements taken from a sort is dynamic", *pieces)
    return _build(anchor, {"x": x, "k": k, "dim": dim, "largest": descending, "sorted": True}, outputs)


def _result(anchor: fx.Node, index: int) -> fx.Node | None:
    """The node of the values (0) or the indices (1), if anybody reads them."""
    return next((u for u in anchor.users if u.target is operator.getitem and u.args[1] == index and u.users), None)


def _is_piece(node: fx.Node, dim: int) -> bool:
    """A slice along ``dim`` that leaves something out."""
    if not algebra.is_op(node, aten.slice) or algebra.is_noop_slice(node):
        return False
    return algebra.argument(node, "dim") % val(node).dim() == dim


def _shows_strides(node: fx.Node) -> bool:
    """Whether ``node`` or a view of it is returned from the graph, or is read by its strides."""
    views = (u for u in node.users if algebra.is_alias(u) or u.target is operator.getitem or algebra.shares_memory(u))
    return any(u.op == "output" for u in node.users) or any(
        algebra.is_op(u, aten.as_strided) or _shows_strides(u) for u in views
    )


def _build(anchor: fx.Node, args: dict[str, Any], outputs: list[fx.Node | None]) -> Match | None:
    if outputs == [None, None]:
        return None
    inner = tuple(o.args[0] for o in outputs if o is not None and o.args[0] is not anchor)
    if outputs[0] is None:
        return _indices(anchor, args, outputs[1], inner)
    used = "values" if outputs[1] is None else "values and indices"
    bound = {**{k: v for k, v in args.items() if k != "x"}, "used": used}
    return Match("topk", "topk", anchor, TOPK, args, tuple(outputs), inner, bound)


def _indices(anchor: fx.Node, args: dict[str, Any], indices: fx.Node, inner: tuple[fx.Node, ...]) -> Match:
    """The match of a selection whose values nobody reads."""
    args = {**args, "sorted": args["sorted"] and not order.is_free(indices, args["dim"])}
    bound = {**{k: v for k, v in args.items() if k != "x"}, "used": "indices"}
    alone = Match("topk", "topk", anchor, TOPK_INDICES, args, (indices,), inner, bound)
    span = _span(args["x"], args["dim"]) if args["largest"] else None
    if span is None:
        return alone
    x, ends, masks = span
    args = {**args, "x": x, **ends}
    bound = {**bound, "span": " and ".join(ends)}
    return Match("topk", "topk", anchor, TOPK_INDICES, args, (indices,), (*inner, *masks), bound, instead=alone)


# --- spans


def _span(x: Any, dim: int) -> tuple[fx.Node, dict[str, Any], tuple[fx.Node, ...]] | None:
    """Of ``x`` that is -inf outside of a span of the last dimension: the inside, start and end, the masked nodes."""
    ends: dict[str, Any] = {}
    masked: list[fx.Node] = []
    while algebra.is_op(x, aten.where, aten.masked_fill) and dim % val(x).dim() == val(x).dim() - 1:
        condition, inside, keeps = _filled(x)
        found = None if inside is None else _ends(condition, val(x).shape[-1], keeps)
        if not found or set(found) & set(ends) or not algebra.same_shape(val(inside).shape, val(x).shape):
            break
        ends |= found
        masked.append(x)
        x = inside
    return (x, ends, tuple(masked)) if ends else None


def _filled(x: fx.Node) -> tuple[Any, Any, bool]:
    """The condition, what is not -inf, and whether that is where the condition holds."""
    if algebra.is_op(x, aten.masked_fill):
        return (x.args[1], x.args[0], False) if _is_lowest(x.args[2]) else (None, None, False)
    condition, a, b = x.args
    if _is_lowest(b) and isinstance(a, fx.Node):
        return condition, a, True
    return (condition, b, False) if _is_lowest(a) and isinstance(b, fx.Node) else (None, None, False)


def _is_lowest(x: Any) -> bool:
    """Whether ``x`` is -inf, as a number or a tensor that holds nothing else."""
    x = algebra.strip_aliases(x)
    while algebra.is_cast(x) or algebra.is_op(x, aten.expand, aten.view):
        x = x.args[0]
    if algebra.is_op(x, aten.full):
        x = x.args[1]
    elif algebra.is_op(x, aten.scalar_tensor):
        x = x.args[0]
    return isinstance(x, float) and x == -torch.inf


_COMPARISONS = {aten.lt: "<", aten.le: "<=", aten.gt: ">", aten.ge: ">="}
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _ends(condition: Any, n: Any, keeps: bool) -> dict[str, Any] | None:
    """Start and end of where ``condition`` holds (where it does not, unless ``keeps``), if it is about positions."""
    condition = algebra.strip_aliases(condition)
    if algebra.is_op(condition, aten.logical_not, aten.bitwise_not):
        return _ends(condition.args[0], n, not keeps)
    if algebra.is_op(condition, aten.logical_and, aten.bitwise_and):
        parts = [part for part in condition.args if not _is_true(part)]  # as in triu
        if len(parts) == 1:
            return _ends(parts[0], n, keeps)
    both = (aten.logical_and, aten.bitwise_and) if keeps else (aten.logical_or, aten.bitwise_or)
    if algebra.is_op(condition, *both):
        a, b = (_ends(part, n, keeps) for part in condition.args)
        return None if a is None or b is None or set(a) & set(b) else {**a, **b}
    sign = next((sign for op, sign in _COMPARISONS.items() if algebra.is_op(condition, op)), None)
    if sign is None:
        return None
    position, limit = condition.args
    if algebra.is_op(position, aten.sub) and isinstance(limit, int):  # position - row >= number
        position, row = position.args
        limit = None if (row := _per_row(row)) is None else Call(aten.add.Tensor, (row, limit))
        if limit is None or not _is_position(position, n):
            return None
        return _limited(sign, limit, keeps)
    if not _is_position(position, n):
        position, limit, sign = limit, position, _MIRRORED[sign]
    if not _is_position(position, n) or (limit := _per_row(limit)) is None:
        return None
    return _limited(sign, limit, keeps)


def _is_true(x: Any) -> bool:
    return algebra.is_op(x, aten.full) and x.args[1] is True


def _limited(sign: str, limit: Any, keeps: bool) -> dict[str, Any]:
    """The end of the span of positions that compare so with ``limit``."""
    sign = sign if keeps else _OPPOSITE[sign]
    if sign in ("<=", ">"):
        limit = Call(aten.add.Tensor, (limit, 1))
    return {"end" if sign in ("<", "<=") else "start": limit}


def _is_position(x: Any, n: Any) -> bool:
    """Whether ``x`` counts 0, 1, 2, ... along the last dimension, of ``n`` elements."""
    x = algebra.strip_aliases(x)
    while isinstance(x, fx.Node) and algebra.same_size(n, (*val(x).shape, 0)[val(x).dim() - 1]):
        if algebra.is_op(x, prims.iota):
            return algebra.argument(x, "start") == 0 and algebra.argument(x, "step") == 1
        if not algebra.is_op(x, *algebra.RESHAPES, aten.expand):
            return False
        x = algebra.strip_aliases(x.args[0])
    return False


def _per_row(x: Any) -> Any:
    """``x``, an integer for each row, without the last dimension; None if it is something else."""
    if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), torch.Tensor):
        return None
    while algebra.is_op(x, aten.expand) and val(x.args[0]).dim() == val(x).dim():
        x = x.args[0]
    if val(x).dtype not in (torch.int32, torch.int64):
        return None
    if val(x).dim() == 0:
        return x
    return Call(aten.squeeze.dim, (x, -1)) if algebra.same_size(val(x).shape[-1], 1) else None


TOPK_PATTERN = Pattern("topk", "topk", lambda node: algebra.is_op(node, aten.topk, aten.sort), match, last=True)
