"""Top-k: the k largest or smallest elements along a dimension.

Matches::

    values, indices = x.topk(k, dim, largest, sorted)            # both used, or either
    x.sort(dim, descending)[...][..., :k]                        # the first k of a sort or argsort

A group-limited router, which picks groups by one top-k and experts inside of them by another, has a match for each.

Replaces with ``portable_ops::topk``.

Declines, of a sort: when it is stable (top-k promises no order among equal elements); when more than its first k
elements are read, or other than the first; when the strides of the sort, which top-k does not have, can be seen: a
result or a view of it leaves the graph, or the sorted tensor is not contiguous.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..kernels.topk import TOPK
from . import algebra
from .algebra import aten
from .match import Match, Pattern, Unmatched, val


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
    views = (u for u in node.users if algebra.is_alias(u) or u.target is operator.getitem or _is_view(u))
    return any(u.op == "output" for u in node.users) or any(
        algebra.is_op(u, aten.as_strided) or _shows_strides(u) for u in views
    )


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _build(anchor: fx.Node, args: dict[str, Any], outputs: list[fx.Node | None]) -> Match | None:
    if outputs == [None, None]:
        return None
    used = {"values": outputs[0], "indices": outputs[1]}
    bound = {k: v for k, v in args.items() if k != "x"}
    bound["used"] = " and ".join(name for name, node in used.items() if node is not None)
    inner = tuple(o.args[0] for o in outputs if o is not None and o.args[0] is not anchor)
    return Match("topk", "topk", anchor, TOPK, args, tuple(outputs), inner, bound)


TOPK_PATTERN = Pattern("topk", "topk", lambda node: algebra.is_op(node, aten.topk, aten.sort), match)
