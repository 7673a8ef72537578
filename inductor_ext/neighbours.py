"""What stock Inductor would compute in one kernel with a match, and an operator of its own would cut off.

Inductor joins pointwise operations and reductions.  Where such a node feeds a match that is itself made of them, or
reads its result, a kernel of ours in between costs a tensor written and read again.  A node is no neighbour in that
sense if a matrix product stands between the two as well: the two kernels are apart already.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from ..kernels.launch import hint
from ..patterns import Match, algebra

aten = torch.ops.aten

_EXTERN = (
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten._scaled_mm,
    aten._int_mm,
    aten._grouped_mm,
    aten.convolution,
    aten.topk,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
)
"""Computed by a library, whatever stands around them.  (An operation that is missing here looks like one that can be
joined, so that a match beside it is declined and costs only the gain.)"""

_UPDATES = (aten.index_put, aten.index_copy, aten.slice_scatter, aten.select_scatter, aten.scatter)
"""Written in place, and read only when they are complete."""

FURTHEST = 1000
"""Nodes that are looked at between two before they count as neighbours.  A layer of a model has a hundred."""


def cut_off(match: Match, speedup: float) -> str | None:
    """Why ``match`` should be left to stock for the sake of its neighbours, in words for the report; or None.

    Both sides are bound by memory: stock moves ``speedup`` times the bytes that the operator moves, which may cost
    no more than what is cut off.
    """
    if match.kind == "router":
        return None  # what is in front of it and behind it is little beside the kernels of stock's selection
    cuts = [*_cut_inputs(match), *_cut_outputs(match)]
    extra = 2 * sum(_bytes(tensor) for tensor, _ in cuts)
    moved = sum(_bytes(node) for node in {*match.inputs(), *(o for o in match.outputs if o is not None)})
    if not cuts or speedup * moved >= moved + extra:
        return None
    return f"stock computes {cuts[0][1]} in the same kernel, which saves more than the operator does"


def _cut_inputs(match: Match) -> Iterator[tuple[fx.Node, str]]:
    """Tensors that stock would not write for the match to read, and what makes them."""
    inputs, outputs = match.inputs(), [o for o in match.outputs if o is not None]
    work = {match.anchor, *match.inner, *outputs}
    if any(_is_extern(node) for node in work):
        return
    for producer in dict.fromkeys(map(_producer, inputs)):
        if not _is_joinable(producer) or producer in work or _apart([producer], inputs):
            continue
        others = [reader for reader in _readers(producer) if reader not in work]
        # What a later layer reads as well (cosines and sines) is written anyway.
        if not others or not _apart(outputs, min(others).all_input_nodes):
            yield producer, f"the {_name(producer)} in front of it"


def _cut_outputs(match: Match) -> Iterator[tuple[fx.Node, str]]:
    """Tensors that stock would not write for others to read, and who reads them."""
    outputs = [o for o in match.outputs if o is not None]
    work = {match.anchor, *match.inner, *outputs}
    for output in outputs:
        if not _is_joinable(output) or output.target.overloadpacket in _UPDATES:
            continue
        for reader in _readers(output):
            if _is_joinable(reader) and reader not in work and not _apart(outputs, reader.all_input_nodes):
                yield output, f"the {_name(reader)} behind it"
                break


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return hint(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0


def _name(node: fx.Node) -> str:
    return node.target.overloadpacket.__name__


def _is_extern(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return packet in _EXTERN or getattr(node.target, "namespace", "aten") not in ("aten", "prims")


def _is_view(node: fx.Node) -> bool:
    known = node.target is operator.getitem or algebra.is_op(node, aten._unsafe_view, aten.reshape)
    return known or algebra.shares_memory(node)


def _is_joinable(node: fx.Node) -> bool:
    """Whether Inductor makes a loop of its own of ``node``, which it can join with others."""
    return isinstance(node.target, torch._ops.OpOverload) and not _is_view(node) and not _is_extern(node)


def _producer(node: fx.Node) -> fx.Node:
    """Whose memory ``node`` is a view of."""
    while _is_view(node):
        node = node.args[0]
    return node


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads ``node``, or a view of it."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _apart(starts: list[fx.Node], ends: Iterable[fx.Node]) -> bool:
    """Whether a way from one of ``starts`` to one of ``ends`` leads through a library."""
    first = min(starts)
    work = [(node, False) for node in ends]
    seen = set(work)
    while work:
        node, through = work.pop()
        if node in starts:
            if through:
                return True
            continue
        through = through or _is_extern(node) if node.op == "call_function" else through
        for before in node.all_input_nodes:
            if before >= first and (before, through) not in seen:
                seen.add((before, through))
                work.append((before, through))
        if len(seen) > FURTHEST:
            return False
    return False
