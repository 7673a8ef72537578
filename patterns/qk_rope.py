"""Queries and keys that are rotated by the same tables, with the norms of their heads in front and the cache behind.

Matches, of what the patterns ``rope`` and ``rms_norm`` match by themselves::

    q, k = rope(q, cos, sin), rope(k, cos, sin)              # in either order, other nodes between them
    q, k = rope(norm(q), cos, sin), rope(norm(k), cos, sin)  # norms over the heads' elements, transposed or not
    k_cache[..., position, :] = k; v_cache[..., position, :] = v     # index_put, index_copy, slice_scatter

Replaces with ``portable_ops::qk_rope`` or ``portable_ops::qk_rope_append``, and counts as the matches that it joins.

The cache is written in place only where the graph does that itself: it is an input of the graph that the graph
overwrites with the update at its end (``copy_``), and nobody reads what was in it before.  Then nobody can tell when it
was written.  Else the update stays as it was.

Declines the larger, for the smaller: norms that differ in more than their weights; keys that are read beside the cache;
keys and values that go to different positions; a cache that is read, written twice or kept as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..kernels.qk_rope import QK_ROPE, QK_ROPE_APPEND
from ..kernels.rms_norm import RMS_NORM
from ..kernels.rotation import heads_dim
from . import algebra, rms_norm, rope
from .algebra import aten
from .match import Call, Match, Pattern, Permuted, Unmatched, val

REACH = 80
"""How many nodes behind the first rotation the second one may stand: more than a layer has between its own."""

_TURN = ("pairing", "out_pairing", "rotary_dim", "offset", "sections", "compute_dtype", "product_dtype", "out_dtype")
_NORM = ("eps", "weight_offset", "root_dtype", "weight_dtype", "norm_dtype", "product_dtype")


def match(anchor: fx.Node) -> Match | None:
    """Match the two rotations of which ``anchor`` is the first's."""
    first = rope.match(anchor)
    if first is None:
        return None
    second = _partner(first)
    rotations = (first, second)
    norms = _norms(rotations)
    candidates: list[Match] = []
    for normed in (norms, None) if norms is not None else (None,):
        try:
            candidates.append(_appending(rotations, normed))
            why = "in place"
        except Unmatched as reason:
            why = str(reason)
        candidates.append(_turning(rotations, normed, why))
    best: Match | None = None
    for candidate in reversed(candidates):
        best = dataclasses.replace(candidate, instead=best)
    return best


# --------------------------------------------------------------------------------------------------- the rotations


def _partner(first: Match) -> Match:
    """The next rotation by the same tables."""
    node = first.anchor
    for _ in range(REACH):
        node = node.next
        if node.op == "output":
            break
        if not rope.ROPE_PATTERN.anchors(node):
            continue
        try:
            second = rope.match(node)
        except Unmatched:
            continue
        if second is None or second.outputs == first.outputs or first.outputs[0] in second.inputs():
            continue
        if _share_tables(first, second):
            _check_together(first, second)
            return second
    raise Unmatched("no second rotation by the same cosine and sine follows")


def _share_tables(a: Match, b: Match) -> bool:
    return all(_same(a.args[table], b.args[table]) for table in ("cos", "sin"))


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are one value."""
    if isinstance(a, Call) and isinstance(b, Call):
        return a.op is b.op and len(a.args) == len(b.args) and all(map(_same, a.args, b.args))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        return algebra.same_value(a, b)
    return not isinstance(a, fx.Node | Call) and bool(a == b)


def _check_together(first: Match, second: Match) -> None:
    differ = [name for name in _TURN if first.args[name] != second.args[name]]
    if differ:
        raise Unmatched(f"the two rotations differ in {', '.join(differ)}")
    try:
        heads_dim(*_examples((first, second)))
    except ValueError as reason:
        raise Unmatched(str(reason)) from None


def _examples(rotations: tuple[Match, Match]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    values = [m.values() for m in rotations]
    return [v["x"] for v in values], [values[0]["cos"], values[0]["sin"]]


# ------------------------------------------------------------------------------------------------------- the norms


@dataclasses.dataclass(frozen=True)
class _Normed:
    """``match``: a norm; ``x``: what it normalises, with its dimensions in the order of what is rotated.

    ``out_dtype``: the type that the result is rounded to at last.
    """

    match: Match
    x: fx.Node | Call
    out_dtype: torch.dtype


def _norms(rotations: tuple[Match, Match]) -> tuple[_Normed, _Normed] | None:
    """The norms in front of both rotations, if they differ in their weights only and nobody else reads them."""
    found = tuple(map(_norm, rotations))
    if None in found or found[0].out_dtype != found[1].out_dtype:
        return None
    same = all(found[0].match.args[name] == found[1].match.args[name] for name in _NORM)
    return found if same else None


def _norm(rotation: Match) -> _Normed | None:
    """The norm whose result is rotated, or a permutation, copy or cast of it."""
    x = rotation.args["x"]
    if not isinstance(x, fx.Node):
        return None
    order, dtype, casts = tuple(range(val(x).dim())), val(x).dtype, 0
    readers = {*rotation.inner, *rotation.outputs}
    while True:
        if not readers.issuperset(x.users):
            return None  # it would be computed twice, and counted twice
        norm = _norm_ending_at(x)
        if norm is not None:
            break
        if algebra.is_op(x, aten.permute):
            dims = [d % len(order) for d in x.args[1]]
            order = tuple(dims[d] for d in order)
        elif not (algebra.is_op(x, aten.clone) or algebra.is_alias(x) or algebra.is_cast(x)):
            return None
        casts += algebra.is_cast(x)
        readers = {x}
        x = x.args[0]
    if norm.args["bias"] is not None or norm.args["eps_tensor"] is not None or norm.shared():
        return None
    if order and order[-1] != len(order) - 1:
        return None  # it is over other elements than those of a head
    if casts > 1 or (casts and val(x).dtype != torch.float32):
        return None  # it is rounded twice
    source = norm.args["x"]
    source = source.node if isinstance(source, Permuted) else source
    weight, size = norm.args["weight"], val(source).shape[-1]
    if not algebra.same_shape(val(source).shape, val(x).shape):
        return None
    if weight is not None and not algebra.same_size(val(weight).shape[0], size):
        return None
    plain = order == tuple(range(len(order)))
    return _Normed(norm, source if plain else Call(aten.permute.default, (source, list(order))), dtype)


_STEPS = (aten.mul, aten.add, aten.div, *algebra.RESHAPES)


def _norm_ending_at(x: fx.Node, depth: int = 6) -> Match | None:
    """The norm whose result ``x`` is."""
    work = [(x, depth)]
    for node, left in work:
        if rms_norm.RMS_NORM_PATTERN.anchors(node):
            try:
                found = rms_norm.match(node)
            except Unmatched:
                continue
            if found is not None and found.operator is RMS_NORM and found.outputs == (x,):
                return found
        elif left and (algebra.is_op(node, *_STEPS) or algebra.is_cast(node)):
            work += [(n, left - 1) for n in node.all_input_nodes]
    return None


# ------------------------------------------------------------------------------------------------------- the cache


@dataclasses.dataclass(frozen=True)
class _Update:
    """``node``: ``cache`` with ``value`` at ``position`` of dimension ``dim``.

    ``position``: a 1-d node; or a 0-d one or None, from which on or from whose sum with ``start`` on positions follow
    each other.  ``count``: how many positions.
    """

    node: fx.Node
    cache: fx.Node
    value: fx.Node
    dim: int
    position: fx.Node | None
    start: int
    count: Any


def _updates(value: fx.Node) -> Iterator[_Update]:
    """The updates that write ``value``."""
    for user in value.users:
        update = _update(user)
        if update is not None and update.value is value:
            yield update


def _update(node: fx.Node) -> _Update | None:
    """The update of a cache that ``node`` is."""
    if algebra.is_op(node, aten.index_put):
        indices = [(d, index) for d, index in enumerate(node.args[1]) if index is not None]
        if len(indices) != 1 or algebra.argument(node, "accumulate"):
            return None
        dim, index = indices[0]
        cache, value = node.args[0], node.args[2]
    elif algebra.is_op(node, aten.index_copy):
        cache, dim, index, value = node.args
    elif algebra.is_op(node, aten.slice_scatter):
        cache, value = node.args[0], _copied(node.args[1])
        dim, start = algebra.argument(node, "dim"), algebra.argument(node, "start")
        if algebra.argument(node, "step") != 1 or not isinstance(start or 0, int) or (start or 0) < 0:
            return None
        if not algebra.same_shape(val(value).shape, val(node.args[1]).shape):
            return None
        dim %= val(cache).dim()
        return _Update(node, cache, value, dim, None, start or 0, val(value).shape[dim])
    else:
        return None
    if not isinstance(index, fx.Node) or val(index).dim() != 1 or val(index).dtype not in (torch.int32, torch.int64):
        return None
    position, start = _first_position(index)
    return _Update(node, cache, value, dim % val(cache).dim(), position, start, val(index).shape[0])


def _copied(x: fx.Node) -> fx.Node:
    """What a slice-assignment writes: ``copy(slice(cache), value)`` is the value."""
    return x.args[1] if algebra.is_op(x, aten.copy) and algebra.dtype_of(x.args[1]) == algebra.dtype_of(x) else x


def _first_position(index: fx.Node) -> tuple[fx.Node | None, int]:
    """``index`` as ``start + arange`` or ``position + start + arange`` with a 0-d position, else as it is."""
    node, start, position = index, 0, None
    while algebra.is_op(node, aten.add) and node.kwargs.get("alpha", 1) == 1:
        for other, shift in algebra.commuted(node):
            if isinstance(shift, int) and not isinstance(shift, bool):
                node, start = other, start + shift
                break
            if position is None and _is_number(shift, index) and isinstance(other, fx.Node) and val(other).dim() == 1:
                node, position = other, shift
                break
        else:
            return index, 0
    if algebra.is_op(node, torch.ops.prims.iota):
        first, step = node.kwargs.get("start"), node.kwargs.get("step")
        if isinstance(first, int) and step == 1:
            return position, start + first
    return index, 0


def _is_number(x: Any, index: fx.Node) -> bool:
    """Whether ``x`` is a 0-d integer where ``index`` is."""
    if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), torch.Tensor):
        return False
    return val(x).dim() == 0 and val(x).dtype == val(index).dtype and val(x).device == val(index).device


def _check_in_place(update: _Update, what: str) -> None:
    """Refuse a cache that the graph does not itself overwrite, or of which anybody could see when it is."""
    cache, node = update.cache, update.node
    if cache.op != "placeholder":
        raise Unmatched(f"the {what} go to a tensor that is no input of the graph")
    epilogues = [u for u in cache.users if u.target is aten.copy_.default and u.args[0] is cache]
    if len(epilogues) != 1 or epilogues[0].args[1] is not node:
        raise Unmatched(f"the graph does not overwrite the cache of the {what} with the update")
    feeding = {node, epilogues[0]}
    if algebra.is_op(node, aten.slice_scatter):
        feeding |= {u for u in cache.users if algebra.is_op(u, aten.slice) and set(u.users) <= {node.args[1]}}
    if not set(cache.users) <= feeding or update.value in (cache, *feeding):
        raise Unmatched(f"what the cache of the {what} held before is read as well")
    if not algebra.same_shape(val(cache).stride(), val(node).stride()):
        raise Unmatched(f"the update of the {what} lies otherwise in memory than the cache")
    storage = val(cache).untyped_storage()._cdata
    for other in cache.graph.find_nodes(op="placeholder"):
        value = other.meta.get("val")
        if other is not cache and isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage:
            raise Unmatched(f"the cache of the {what} shares memory with another input")


def _fits(update: _Update, what: str) -> None:
    value, cache = val(update.value), val(update.cache)
    if value.dtype != cache.dtype:
        raise Unmatched(f"the {what} are {value.dtype}, their cache {cache.dtype}")
    same = value.dim() == cache.dim() and all(
        d == update.dim or algebra.same_size(value.shape[d], cache.shape[d]) for d in range(cache.dim())
    )
    if not same:
        raise Unmatched(f"the {what} have shape {tuple(value.shape)}, their cache {tuple(cache.shape)}")
    if not algebra.same_size(update.count, value.shape[update.dim]):
        raise Unmatched(f"the {what} are repeated along their positions")


@dataclasses.dataclass(frozen=True)
class _Append:
    """The updates with the keys of ``rotation`` (0 or 1), permuted in ``order``, and with the values."""

    rotation: int
    order: tuple[int, ...]
    keys: _Update
    values: _Update


def _append(rotations: tuple[Match, Match]) -> _Append:
    for index, rotation in enumerate(rotations):
        found = _written(rotation.outputs[0])
        if found is None:
            continue
        keys, order = found
        _fits(keys, "keys")
        _check_in_place(keys, "keys")
        values = _values_beside(keys)
        _fits(values, "values")
        _check_in_place(values, "values")
        if values.cache is keys.cache:
            raise Unmatched("keys and values go to one cache")
        return _Append(index, order, keys, values)
    raise Unmatched("neither result goes to a cache and nowhere else")


def _written(x: fx.Node) -> tuple[_Update, tuple[int, ...]] | None:
    """The update that is all that is made of ``x``, or of a permutation of it."""
    order = tuple(range(val(x).dim()))
    while len(x.users) == 1:
        (user,) = x.users
        update = next(_updates(x), None)
        if update is not None:
            return update, order
        if algebra.is_op(user, aten.copy) and user.args[1] is x and len(user.users) == 1:
            update = _update(next(iter(user.users)))
            return None if update is None or update.value is not x else (update, order)
        if algebra.is_op(user, aten.permute):
            order = tuple(order[d % len(order)] for d in user.args[1])
        elif not (algebra.is_alias(user) or algebra.is_op(user, aten.clone)):
            return None
        x = user
    return None


def _values_beside(keys: _Update) -> _Update:
    """The update with the values: the nearest other one at the same positions."""
    ways = {"next": keys.node, "prev": keys.node}
    differ = False
    for _ in range(REACH):
        for way in ways:
            ways[way] = getattr(ways[way], way)
            node = ways[way]
            if node.op != "call_function":
                continue
            update = _update(node)
            if update is None or node is keys.node:
                continue
            if update.dim == keys.dim and update.start == keys.start and _same(update.position, keys.position):
                return update
            differ = True
    if differ:
        raise Unmatched("keys and values go to different positions")
    raise Unmatched("no values are written beside the keys")


# ------------------------------------------------------------------------------------------------------ the result


def _arguments(rotations: tuple[Match, Match], norms: tuple[_Normed, _Normed] | None) -> dict[str, Any]:
    """What both operators are called with, but for q and k themselves."""
    first = rotations[0].args
    args = {"cos": first["cos"], "sin": first["sin"], **{name: first[name] for name in _TURN}}
    if norms is not None:
        norm = norms[0].match.args
        args |= {
            "eps": norm["eps"],
            "weight_offset": norm["weight_offset"],
            "root_dtype": norm["root_dtype"],
            "weight_dtype": norm["weight_dtype"],
            "norm_dtype": norm["norm_dtype"],
            "norm_product_dtype": norm["product_dtype"],
            "norm_out_dtype": norms[0].out_dtype,
        }
    return args


def _turning(rotations: tuple[Match, Match], norms: tuple[_Normed, _Normed] | None, why: str) -> Match:
    """Both rotations in one launch; ``why`` nothing is appended."""
    args = _arguments(rotations, norms)
    for i, name in enumerate("qk"):
        args |= _operand(name, i, rotations, norms)
        args[f"{name}_order"] = rotations[i].args["out_order"]
    outputs = tuple(m.outputs[0] for m in rotations)
    return _joined("qk_rope", QK_ROPE, args, outputs, (outputs[0], outputs[1]), rotations, norms, why)


def _appending(rotations: tuple[Match, Match], norms: tuple[_Normed, _Normed] | None) -> Match:
    """Both rotations and both updates in one launch."""
    if algebra.is_training_graph(rotations[0].anchor.graph):
        raise Unmatched("a training graph")
    append = _append(rotations)
    queries = 1 - append.rotation
    args = _arguments(rotations, norms)
    args |= _operand("q", queries, rotations, norms) | _operand("k", append.rotation, rotations, norms)
    args |= {
        "q_order": rotations[queries].args["out_order"],
        "v": append.values.value,
        "k_cache": append.keys.cache,
        "v_cache": append.values.cache,
        "position": append.keys.position,
        "start": append.keys.start,
        "dim": append.keys.dim,
        "cache_order": algebra.unless_plain(append.order),
    }
    rotated_q = rotations[queries].outputs[0]
    if append.values.value is rotated_q:
        raise Unmatched("what is written beside the keys is the other rotation")
    outputs = (rotated_q, append.keys.node, append.values.node)
    ends = (rotated_q, append.keys.node) if queries == 0 else (append.keys.node, rotated_q)
    return _joined("qk_rope_append", QK_ROPE_APPEND, args, outputs, ends, rotations, norms, "in place")


def _operand(
    name: str, i: int, rotations: tuple[Match, Match], norms: tuple[_Normed, _Normed] | None
) -> dict[str, Any]:
    if norms is None:
        return {name: rotations[i].args["x"]}
    return {name: norms[i].x, f"{name}_weight": norms[i].match.args["weight"]}


def _joined(
    name: str,
    operator: Any,
    args: dict[str, Any],
    outputs: tuple[fx.Node, ...],
    ends: tuple[fx.Node, fx.Node],
    rotations: tuple[Match, Match],
    norms: tuple[_Normed, _Normed] | None,
    append: str,
) -> Match:
    bound = {"norm": norms is not None, "append": append}
    inner: set[fx.Node] = set()
    for i, end in enumerate(ends):
        inner |= (
            set(rotations[i].inner) | {rotations[i].outputs[0]} | set(() if norms is None else norms[i].match.inner)
        )
        start = rotations[i].args["x"] if norms is None else norms[i].x
        inner |= set(algebra.between(start.args[0] if isinstance(start, Call) else start, end))
    found = (*(() if norms is None else (n.match for n in norms)), *rotations)
    parts = tuple(
        dataclasses.replace(p, bound={**p.bound, "joined": name}) for p in sorted(found, key=lambda m: m.anchor)
    )
    inner -= set(outputs)
    return Match(name, "rope", rotations[0].anchor, operator, args, outputs, tuple(sorted(inner)), bound, parts=parts)


QK_ROPE_PATTERN = Pattern("qk_rope", "rope", rope.ROPE_PATTERN.anchors, match, first=True)
