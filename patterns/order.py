"""Whether a value depends on the order in which a selection lists its elements.

Along one axis of a tensor of indices lie the selected elements, in an order of their own for each row.  The axis is
followed through gathers, elementwise operations, views and products.  Where it ends in a sum, a maximum, a
contraction with a tensor in the same order, or the index of a scatter, nobody can tell the order.  What is not known
is taken to depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from . import algebra
from .algebra import aten

_SELECTED = "selected"
_FEW = 200
"""Nodes that are looked at before the answer is no."""

Label = Any
"""What lies along a dimension: the selection, a dimension of the indices that it belongs to, or None: neither."""

_REDUCTIONS = (aten.sum, aten.mean, aten.amax, aten.amin, aten.any)
_SOFTMAX = (aten._softmax, aten._safe_softmax)


def is_free(indices: fx.Node, dim: int) -> bool:
    """Whether everybody reads ``indices``, which a selection lists along ``dim``, without seeing their order."""
    rank = indices.meta["val"].dim()
    labels = {indices: tuple(_SELECTED if d == dim % rank else d for d in range(rank))}
    readers = set(indices.users)
    while readers:
        reader = min(readers)  # in the order of the graph, so that all that it reads is known
        readers.remove(reader)
        found = _after(reader, labels) if reader.op == "call_function" else None
        if found is None or len(labels) > _FEW:
            return False
        if _SELECTED in found:
            labels[reader] = found
            readers.update(reader.users)
    return True


def _after(node: fx.Node, labels: dict[fx.Node, tuple[Label, ...]]) -> tuple[Label, ...] | None:
    """The labels of the dimensions of ``node``; None where the order can be seen, () where it is gone."""
    value = node.meta.get("val")
    known = [a for a in node.all_input_nodes if a in labels]
    if algebra.is_op(node, aten.scatter):
        return _scattered(node, labels)
    if algebra.is_op(node, aten.sort) and node.args[0] in labels:
        return _sorted(node, labels)
    if not isinstance(value, torch.Tensor):
        return None
    if algebra.is_op(node, aten.gather):
        return _gathered(node, labels)
    if algebra.is_op(node, aten.index):
        return _indexed(node, labels)
    if algebra.is_op(node, aten.bmm, aten.mm):
        return _product(node, labels)
    if algebra.is_op(node, *_REDUCTIONS):
        return _reduced(node, labels[known[0]])
    if algebra.is_op(node, *_SOFTMAX):
        own = labels[known[0]]
        axis = algebra.argument(node, "dim") % len(own)
        return own if own[axis] in (_SELECTED, None) else None
    if algebra.is_op(node, *algebra.PERMUTES):
        return _permuted(node, labels[known[0]])
    if algebra.is_op(node, *algebra.RESHAPES, aten.expand):
        return _reshaped(known[0].meta["val"].shape, value.shape, labels[known[0]])
    if algebra.is_cast(node) or algebra.is_op(node, aten.clone) or torch.Tag.pointwise in node.target.tags:
        return _elementwise(node, labels)
    return None


def _elementwise(node: fx.Node, labels: dict[fx.Node, tuple[Label, ...]]) -> tuple[Label, ...] | None:
    """Operands in one order, or without any along the selection."""
    rank = node.meta["val"].dim()
    result: list[Label] = [None] * rank
    for operand in (a for a in node.all_input_nodes if a in labels):
        for d, label in enumerate(labels[operand], rank - len(labels[operand])):
            if label is not None and result[d] not in (None, label):
                return None
            result[d] = label if label is not None else result[d]
    if len(set(found := [r for r in result if r is not None])) != len(found):
        return None
    for operand in node.all_input_nodes:
        tensor = operand.meta.get("val")
        if operand in labels or not isinstance(tensor, torch.Tensor):
            continue
        for d, size in enumerate(tensor.shape, rank - tensor.dim()):
            if result[d] == _SELECTED and not algebra.same_size(size, 1) and not algebra.is_op(operand, aten.full):
                return None
    # What has lost a row's dimension while another operand still has it would mix the orders of rows.
    for operand in (a for a in node.all_input_nodes if a in labels):
        if {r for r in result if r is not None} != {r for r in labels[operand] if r is not None}:
            return None
    return tuple(result)


def _gathered(node: fx.Node, labels: dict[fx.Node, tuple[Label, ...]]) -> tuple[Label, ...] | None:
    """``x.gather(dim, indices)``: in the order of the indices, element by element."""
    x, index = node.args[0], algebra.argument(node, "index")
    return labels[index] if index in labels and x not in labels else None


def _indexed(node: fx.Node, labels: dict[fx.Node, tuple[Label, ...]]) -> tuple[Label, ...] | None:
    """``x[rows, indices]``: the dimensions of the indices in place of those that are indexed, then the others."""
    x, indices = node.args[0], node.args[1]
    used = [i for i in indices if i is not None]
    if x in labels or not used or list(indices[: len(used)]) != used:
        return None
    rank = max(i.meta["val"].dim() for i in used)
    result: list[Label] = [None] * rank
    for index in used:
        own = labels.get(index, (None,) * index.meta["val"].dim())
        for d, label in enumerate(own, rank - len(own)):
            if label is not None and result[d] not in (None, label):
                return None
            result[d] = label if label is not None else result[d]
    for index in used:
        shape = index.meta["val"].shape
        for d, size in enumerate(shape, rank - len(shape)):
            if index not in labels and result[d] == _SELECTED and not algebra.same_size(size, 1):
                return None
    return (*result, *(None for _ in range(node.meta["val"].dim() - rank)))


def _product(node: fx.Node, labels: dict[fx.Node, tuple[Label, ...]]) -> tuple[Label, ...] | None:
    a, b = node.args[0], node.args[1]
    rank = node.meta["val"].dim()
    left, right = labels.get(a, (None,) * rank), labels.get(b, (None,) * rank)
    if (left[-1], right[-2]) == (_SELECTED, _SELECTED):
        return () if left[:-2] == right[:-2] and left[-2] is None and right[-1] is None else None
    if left[-1] is not None or right[-2] is not None:
        return None  # a contraction of one in order with one in another, or of a dimension of rows
    if a in labels and b in labels:
        return None
    return (*(left[:-2] if a in labels else right[:-2]), left[-2], right[-1])


def _reduced(node: fx.Node, own: tuple[Label, ...]) -> tuple[Label, ...] | None:
    dims = algebra.argument(node, "dim") if len(node.args) > 1 else None
    over = {d % len(own) for d in ([dims] if isinstance(dims, int) else dims or range(len(own)))}
    if any(own[d] == _SELECTED for d in over):
        return ()
    if any(own[d] is not None for d in over):
        return None
    return tuple(label for d, label in enumerate(own) if d not in over or algebra.argument(node, "keepdim"))


def _permuted(node: fx.Node, own: tuple[Label, ...]) -> tuple[Label, ...]:
    order = list(range(len(own)))
    if algebra.is_op(node, aten.permute):
        order = [d % len(own) for d in node.args[1]]
    elif algebra.is_op(node, aten.transpose):
        a, b = node.args[1] % len(own), node.args[2] % len(own)
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return tuple(own[d] for d in order)


def _reshaped(old: Sequence[Any], new: Sequence[Any], own: tuple[Label, ...]) -> tuple[Label, ...] | None:
    """Dimensions of one element come and go, others are merged; the selection stays a dimension of its own."""
    if len(old) == len(new) and all(
        algebra.same_size(a, b) or algebra.same_size(a, 1) for a, b in zip(old, new, strict=True)
    ):
        return own  # an expansion; one element has no order
    result: list[Label] = []
    left = [(size, label) for size, label in zip(old, own, strict=True) if not algebra.same_size(size, 1)]
    if any(label is not None for size, label in zip(old, own, strict=True) if algebra.same_size(size, 1)):
        left = list(zip(old, own, strict=True))
    for size in new:
        if algebra.same_size(size, 1) and not (left and algebra.same_size(left[0][0], 1)):
            result.append(None)
            continue
        taken = []
        while left and (not taken or not algebra.same_size(math.prod(s for s, _ in taken), size)):
            taken.append(left.pop(0))
        if not taken or not algebra.same_size(math.prod(s for s, _ in taken), size):
            return None
        merged = tuple(label for _, label in taken)
        result.append(taken[0][1] if len(taken) == 1 else merged if any(m is not None for m in merged) else None)
        if len(taken) > 1 and _SELECTED in merged:
            return None
    return tuple(result) if not left else None


def _scattered(node: fx.Node, labels: dict[fx.Node, tuple[Label, ...]]) -> tuple[Label, ...] | None:
    """A number at every index (a mask), or values in the same order."""
    index, dim = algebra.argument(node, "index"), algebra.argument(node, "dim")
    if index not in labels or node.args[0] in labels or labels[index][dim % len(labels[index])] != _SELECTED:
        return None
    source = node.args[3]
    if not isinstance(source, fx.Node) or algebra.is_op(source, aten.full):
        return ()
    return () if labels.get(source) == labels[index] else None


def _sorted(node: fx.Node, labels: dict[fx.Node, tuple[Label, ...]]) -> tuple[Label, ...] | None:
    """Sorted indices themselves; where they were before is another matter."""
    own = labels[node.args[0]]
    by_place = any(user.args[1] == 1 and user.users for user in node.users)
    return () if own[algebra.argument(node, "dim") % len(own)] == _SELECTED and not by_place else None
