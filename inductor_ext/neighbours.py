"""What stock Inductor would compute in one kernel with a match, and an operator of its own would cut off.

Inductor joins pointwise operations and reductions.  Where such a node feeds a match that is itself made of them, or
reads its result, a kernel of ours in between costs a tensor written and read again, however fast it is.  A node is
no neighbour in that sense if a matrix product stands between the two as well: the two kernels are apart already.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from ..patterns import Match

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
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
)
"""Computed by a library, whatever stands around them.  (An operation that is missing here looks like one that can be
joined, so that a match beside it is declined and costs only the gain.)"""

FURTHEST = 1000
"""Nodes that are looked at between two before they count as neighbours.  A layer of a model has a hundred."""


def cut_off(match: Match) -> str | None:
    """Why ``match`` would cut what stock computes in one kernel, in words for the report; None if it would not."""
    work = {*match.inner, *(o for o in match.outputs if o is not None)}
    inputs = match.inputs()
    if not any(_is_extern(node) for node in work):
        for producer in map(_producer, inputs):
            if _is_joinable(producer) and producer not in work and not _apart([producer], inputs):
                return f"stock computes the {_name(producer)} in front of it in the same kernel"
    outputs = [o for o in match.outputs if o is not None]
    for output in outputs:
        if not _is_joinable(output):
            continue
        for reader in _readers(output):
            if _is_joinable(reader) and reader not in work and not _apart(outputs, reader.all_input_nodes):
                return f"stock computes the {_name(reader)} behind it in the same kernel"
    return None


def _name(node: fx.Node) -> str:
    return node.target.overloadpacket.__name__


def _is_extern(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return packet in _EXTERN or getattr(node.target, "namespace", "aten") not in ("aten", "prims")


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or getattr(node.target, "overloadpacket", None) in (
        aten._unsafe_view,
        aten.reshape,
    ):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info and not r.alias_info.is_write for r in schema.returns)


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
