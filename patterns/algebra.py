"""The algebra of graphs: what different spellings of the same mathematics have in common.

Everything that a pattern needs to know about ATen is here, so that a new spelling is taught once.  The
functions look at nodes *after* AOTAutograd (functional ATen with Inductor's decompositions); they also know the
undecomposed forms, so that graphs made with another table match as well.

Conventions: ``x`` is a node; a function that fails to recognise its form returns None; sizes may be symbolic
and are compared with :func:`same_size`, which never adds a guard.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..kernels.launch import hint

aten = torch.ops.aten
prims = torch.ops.prims

# --------------------------------------------------------------------------- sizes and dtypes


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal whatever the symbols in them are."""
    return statically_known_true(a == b)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


def is_op(node: Any, *packets: Any) -> bool:
    """Whether ``node`` calls any overload of one of ``packets``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and _packet(node.target) in packets


def is_quotient(node: Any) -> bool:
    """Whether ``node`` is ``a / b``, not rounded to a whole number (``rounding_mode``)."""
    return is_op(node, aten.div) and not node.kwargs.get("rounding_mode")


@functools.lru_cache(4096)  # asked for every node, many times
def _packet(target: Any) -> Any:
    """What all overloads of an op have in common; a view as another type has nothing in common with other views."""
    overloaded = isinstance(target, torch._ops.OpOverload) and target is not aten.view.dtype
    return target.overloadpacket if overloaded else target


def aten_name(node: fx.Node) -> str:
    """The name of the op that ``node`` calls, without namespace and overload."""
    return _packet(node.target).__name__


def dtype_of(x: Any) -> torch.dtype | None:
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def argument(node: fx.Node, name: str) -> Any:
    """The argument of a call to an ATen op by its name in the schema, with the schema's default."""
    for position, spec in enumerate(node.target._schema.arguments):
        if spec.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[position] if position < len(node.args) else spec.default_value
    raise KeyError(f"{node.target} has no argument {name!r}")


def between(start: fx.Node, end: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes on the ways from ``start`` to ``end``, both left out, in graph order."""
    behind, work = set(), [end]
    while work:
        new = [n for n in work.pop().all_input_nodes if start < n and n not in behind]
        behind.update(new)
        work.extend(new)
    found = {start}
    for node in sorted(behind):
        if any(n in found for n in node.all_input_nodes):
            found.add(node)
    return tuple(n for n in sorted(found) if n is not start)


# --------------------------------------------------------------------------- casts

_ALIASES = (aten.alias, aten.detach, aten.lift_fresh_copy)


def is_alias(x: Any) -> bool:
    """Whether ``x`` is its first operand unchanged: ``alias``, ``detach``, and ``v * 1`` (``1 / v`` traces to it)."""
    if is_op(x, *_ALIASES):
        return True
    return is_op(x, aten.mul) and x.args[1] == 1 and dtype_of(x) == dtype_of(x.args[0])


def strip_aliases(x: Any) -> Any:
    """``x`` without what changes nothing in a functional graph."""
    while is_alias(x):
        x = x.args[0]
    return x


def readers(x: fx.Node) -> Iterator[fx.Node]:
    """The users of ``x``, and those of its aliases."""
    for user in x.users:
        yield user
        if is_alias(user):
            yield from readers(user)


def is_cast(x: Any) -> bool:
    """A change of dtype and nothing else (``_to_copy`` that also moves to another device is not one)."""
    if is_op(x, prims.convert_element_type):
        return True
    if not is_op(x, aten._to_copy):
        return False
    source, result = x.args[0].meta.get("val"), x.meta.get("val")
    return isinstance(source, torch.Tensor) and source.device == result.device


def is_float(dtype: torch.dtype) -> bool:
    """A floating-point type of 16 bits or more: those of 8 are storage, torch neither promotes nor computes in them."""
    return dtype.is_floating_point and dtype.itemsize > 1


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether ``wide`` is known to hold every value of ``narrow`` (not of an 8-bit float)."""
    if wide == narrow:
        return True
    if any(d.is_floating_point and not is_float(d) for d in (wide, narrow)):
        return False
    return torch.promote_types(narrow, wide) == wide


def strip_upcast(x: Any) -> Any:
    """``x`` without casts that lose nothing (bf16 or fp16 to fp32, fp32 to fp64)."""
    x = strip_aliases(x)
    while is_cast(x):
        inner = strip_aliases(x.args[0])
        source, result = dtype_of(inner), dtype_of(x)
        if not source.is_floating_point or not holds(result, source):
            break
        x = inner
    return x


def same_value(a: Any, b: Any) -> bool:
    """Whether two nodes are one value: the same node, or equal casts and pieces of it (``x[..., 0]`` written twice)."""
    a, b = strip_aliases(a), strip_aliases(b)
    if a is b:
        return True
    wide = dtype_of(a) == dtype_of(b)
    a, b = strip_upcast(a), strip_upcast(b)
    return wide and a is not None and (a is b or _same_piece(a, b))


def _same_piece(a: Any, b: Any) -> bool:
    """Whether two nodes take the same piece or view of one value."""
    if not is_op(a, *_PIECES) or not is_op(b, *_PIECES) or a.target is not b.target or a.kwargs != b.kwargs:
        return False
    return a.args[1:] == b.args[1:] and (same_value(a.args[0], b.args[0]) or _same_piece(a.args[0], b.args[0]))


# --------------------------------------------------------------------------- scalars


def scalar(x: Any) -> float | None:
    """The number that ``x`` is: a Python number, or a 0-d constant made in the graph."""
    if isinstance(x, bool):
        return None
    if isinstance(x, int | float):
        return float(x)
    x = strip_aliases(x)
    number = None
    if is_cast(x) or is_op(x, aten.expand, aten.view, aten.scalar_tensor):
        number = scalar(x.args[0])
    elif is_op(x, aten.full):
        number = scalar(x.args[1])
    # A short type may round the number; small integers are exact in all of them.
    exact = number is None or (number.is_integer() and abs(number) <= 256)
    return number if exact or dtype_of(x) in (torch.float32, torch.float64) else None


def scalar_tensor(x: Any) -> fx.Node | None:
    """``x`` if it is a floating-point tensor of one element whose value is not known."""
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dim() == 0:
        return x
    return None


def commuted(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Both orders of the two operands of a commutative op."""
    a, b = node.args[0], node.args[1]
    yield a, b
    yield b, a


def plus_scalar(x: Any) -> tuple[fx.Node, float | fx.Node] | None:
    """``x = v + c`` with a number or a one-element tensor c: ``(v, c)``."""
    if not is_op(x, aten.add) or x.kwargs.get("alpha", 1) != 1:
        return None
    for v, c in commuted(x):
        if not isinstance(v, fx.Node) or not isinstance(v.meta.get("val"), torch.Tensor):
            continue
        number = scalar(c)
        if number is not None:
            return v, number
        if scalar_tensor(c) is not None and scalar_tensor(v) is None:
            return v, c
    return None


# --------------------------------------------------------------------------- powers


def squared(x: Any) -> fx.Node | None:
    """``x = f * f`` in any spelling: ``f``."""
    x = strip_aliases(x)
    if is_op(x, aten.pow) and scalar(x.args[1]) == 2:
        return x.args[0]
    if is_op(x, aten.square):
        return x.args[0]
    if is_op(x, aten.mul) and same_value(x.args[0], x.args[1]):
        return x.args[0]
    return None


def inverse_square_root(x: Any) -> fx.Node | None:
    """``x = z ** -0.5`` in any spelling that is one value: ``z``."""
    x = strip_aliases(x)
    if is_op(x, aten.rsqrt):
        return x.args[0]
    if is_op(x, aten.pow) and scalar(x.args[1]) == -0.5:
        return x.args[0]
    root = None
    if is_op(x, aten.reciprocal):
        root = x.args[0]
    elif is_quotient(x) and scalar(x.args[0]) == 1:
        root = x.args[1]
    elif is_op(x, aten.pow) and scalar(x.args[1]) == -1:
        root = x.args[0]
    return square_root(root)


def square_root(x: Any) -> fx.Node | None:
    """``x = sqrt(z)``: ``z``."""
    x = strip_aliases(x)
    if is_op(x, aten.sqrt):
        return x.args[0]
    if is_op(x, aten.pow) and scalar(x.args[1]) == 0.5:
        return x.args[0]
    return None


def last_dim_mean(x: Any) -> fx.Node | None:
    """``x = mean(s, -1, keepdim=True)``, also as ``sum(s) / n`` or ``sum(s) * (1 / n)``: ``s``."""
    x = strip_aliases(x)
    if is_op(x, aten.mean) and _is_last_dim_reduction(x):
        return x.args[0]
    for total, factor in _scaled(x):
        if is_op(total, aten.sum) and _is_last_dim_reduction(total):
            source = total.args[0]
            n = source.meta["val"].shape[-1]
            if isinstance(n, int) and n > 0 and abs(factor * n - 1.0) < 1e-6:
                return source
    for total, size in _divided(x):
        if is_op(total, aten.sum) and _is_last_dim_reduction(total):
            source = total.args[0]
            if same_size(source.meta["val"].shape[-1], size):
                return source
    return None


def last_dim_sum(x: Any) -> fx.Node | None:
    """``x = sum(s, -1, keepdim=True)``: ``s``."""
    x = strip_aliases(x)
    return x.args[0] if is_op(x, aten.sum) and _is_last_dim_reduction(x) else None


def is_variance(x: Any) -> bool:
    """``var`` or the first result of ``var_mean``."""
    x = strip_aliases(x)
    if is_op(x, operator.getitem):
        x = x.args[0]
    return is_op(x, aten.var, aten.var_mean)


def _scaled(x: Any) -> Iterator[tuple[Any, float]]:
    if is_quotient(x) and scalar(x.args[1]):
        yield strip_aliases(x.args[0]), 1.0 / scalar(x.args[1])
    if is_op(x, aten.mul):
        for a, b in commuted(x):
            if scalar(b) is not None:
                yield strip_aliases(a), scalar(b)


def _divided(x: Any) -> Iterator[tuple[Any, Any]]:
    """``x = v / n`` or ``v * (1 / n)`` with a size ``n`` that is a symbol."""
    if is_quotient(x) and _symbol(x.args[1]) is not None:
        yield strip_aliases(x.args[0]), _symbol(x.args[1])
    if is_op(x, aten.mul):
        for v, inverse in commuted(x):
            if is_op(inverse, operator.truediv) and inverse.args[0] == 1 and _symbol(inverse.args[1]) is not None:
                yield strip_aliases(v), _symbol(inverse.args[1])


def _symbol(x: Any) -> torch.SymInt | None:
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    return value if isinstance(value, torch.SymInt) else None


def _is_last_dim_reduction(node: fx.Node) -> bool:
    source = node.args[0].meta.get("val")
    if not isinstance(source, torch.Tensor) or len(node.args) < 2:
        return False
    dims = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
    return [d % source.dim() for d in dims] == [source.dim() - 1] and bool(argument(node, "keepdim"))


# --------------------------------------------------------------------------- views

RESHAPES = (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze)
PERMUTES = (aten.permute, aten.transpose, aten.t)
_COPIES = (aten.clone, *_ALIASES)
_VIEWS = (*RESHAPES, *PERMUTES, *_COPIES, aten.expand, aten.repeat)


def dense_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from outermost to innermost in memory.

    None if the tensor is not dense, or its last dimension is not the innermost, whatever the symbols in it are.
    """
    plain = tuple(range(value.dim()))
    return next((o for o in (plain, _by_stride(value)) if o[-1:] == plain[-1:] and _is_dense(value, o)), None)


def strided_columns(value: torch.Tensor) -> bool:
    """Whether neighbours in the last dimension are known not to be neighbours in memory."""
    return not same_size(value.shape[-1], 1) and statically_known_true(value.stride(-1) != 1)


def memory_order(value: torch.Tensor) -> tuple[int, ...]:
    """The dimensions from outermost to innermost in memory; those of a contiguous tensor where that is not clear."""
    plain = tuple(range(value.dim()))
    strided = _by_stride(value)
    return plain if _is_dense(value, plain) or not _is_dense(value, strided) else strided


def unless_plain(order: Sequence[int]) -> list[int] | None:
    """``order`` as an operator's ``out_order``, where None says contiguous."""
    return None if tuple(order) == tuple(range(len(order))) else list(order)


def _by_stride(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(value.dim()), key=lambda d: (-hint(value.stride(d)), -hint(value.shape[d]), d)))


def _is_dense(value: torch.Tensor, order: Sequence[int]) -> bool:
    expected: Any = 1
    for d in reversed(order):
        if not same_size(value.shape[d], 1):
            if not same_size(value.stride(d), expected):
                return False
            expected = expected * value.shape[d]
    return True


def as_vector(x: fx.Node) -> fx.Node:
    """``x`` without lossless casts and without views that only add or drop dimensions of size 1."""
    x = strip_upcast(x)
    while is_op(x, *RESHAPES) and _long_sizes(x) == _long_sizes(x.args[0]):
        x = strip_upcast(x.args[0])
    return x


def _long_sizes(x: fx.Node) -> list[Any]:
    return [s for s in x.meta["val"].shape if not same_size(s, 1)]


def is_reshape(x: Any) -> bool:
    """A view that keeps the row-major order of the elements and says its shape: ``view``, ``reshape``."""
    return is_op(x, aten.view, aten.reshape, aten._unsafe_view)


def is_noop_slice(x: Any) -> bool:
    """A slice that takes everything (dynamic shapes leave ``k[..., 0:MAX]`` behind)."""
    if not is_op(x, aten.slice):
        return False
    start, step = argument(x, "start"), argument(x, "step")
    source, result = x.args[0].meta["val"], x.meta["val"]
    return (start in (0, None)) and step == 1 and same_shape(source.shape, result.shape)


@dataclasses.dataclass(frozen=True)
class Atom:
    """A factor of a dimension: a piece of one dimension of the base, or a repetition (``dim`` None)."""

    dim: int | None
    size: Any
    part: int = 0


Axes = list[list[Atom]]
"""For each dimension of a view of some base: the factors it is made of, outermost first; none of size 1."""


@dataclasses.dataclass(frozen=True)
class HeadRepeat:
    """``x[b, h, s, d] = base.permute(order)[b, h // groups, s, d]``."""

    base: fx.Node
    order: tuple[int, ...]
    groups: Any


def head_repeat(x: fx.Node) -> HeadRepeat | None:
    """Recognise key or value heads that were repeated for grouped-query attention, however it was written.

    Follows views and copies upwards to the nearest node whose dimensions, permuted, are those of ``x`` with
    each head repeated ``groups`` times in a row (``repeat_kv``, ``repeat_interleave``, an expanded single head).
    None if there is no repetition or another order of it (``repeat`` tiles the heads: that is not grouped-query).
    """
    chain = [x]
    while is_op(chain[-1], *_VIEWS) or is_noop_slice(chain[-1]):
        chain.append(chain[-1].args[0])
    for length in range(2, len(chain) + 1):
        found = _head_repeat_from(chain[:length])
        if found is not None:
            return found
    return None


def _head_repeat_from(chain: list[fx.Node]) -> HeadRepeat | None:
    base = chain[-1].meta["val"]
    if base.dim() != 4:
        return None
    axes: Axes | None = [[Atom(i, s)] if not same_size(s, 1) else [] for i, s in enumerate(base.shape)]
    for node in reversed(chain[:-1]):
        axes = _follow(node, axes)
        if axes is None:
            return None
    repeats = [a for a in axes[1] if a.dim is None]
    if len(axes) != 4 or len(repeats) != 1 or axes[1][-1] is not repeats[0]:
        return None
    heads = axes[1][:-1]
    plain = [axes[0], heads, axes[2], axes[3]]
    if any(len(atoms) > 1 for atoms in plain):
        return None
    order = [atoms[0].dim if atoms else None for atoms in plain]
    if None in order[2:]:
        return None
    # Dimensions of size 1 carry no atom: hand the unused ones out in order.
    unused = iter(d for d in range(4) if d not in order)
    order = [next(unused) if d is None else d for d in order]
    whole = all(not a or same_size(a[0].size, base.shape[d]) for a, d in zip(plain, order, strict=True))
    return HeadRepeat(chain[-1], tuple(order), repeats[0].size) if whole else None


def _follow(node: fx.Node, axes: Axes) -> Axes | None:
    """The axes of ``node`` given those of its input."""
    if is_op(node, *_COPIES) or is_noop_slice(node):
        return axes
    if is_op(node, aten.permute):
        return [axes[d] for d in node.args[1]]
    if is_op(node, aten.transpose):
        order = list(range(len(axes)))
        a, b = node.args[1], node.args[2]
        order[a], order[b] = order[b], order[a]
        return [axes[d] for d in order]
    if is_op(node, aten.t):
        return axes[::-1]
    if is_op(node, aten.expand):
        return _expanded(node, axes)
    if is_op(node, aten.repeat):
        return _tiled(node.args[1], axes)
    return _regrouped(list(itertools.chain.from_iterable(axes)), node.meta["val"].shape)


def _expanded(node: fx.Node, axes: Axes) -> Axes:
    shape, source = node.meta["val"].shape, node.args[0].meta["val"].shape
    lead = len(shape) - len(source)
    result: Axes = []
    for i, size in enumerate(shape):
        inner = i - lead
        if inner >= 0 and same_size(source[inner], size):
            result.append(axes[inner])
        else:
            result.append([Atom(None, size)])
    return result


def _tiled(repeats: Sequence[Any], axes: Axes) -> Axes:
    axes = [*([[]] * (len(repeats) - len(axes))), *axes]
    return [a if same_size(n, 1) else [Atom(None, n), *a] for n, a in zip(repeats, axes, strict=True)]


def _regrouped(atoms: list[Atom], shape: Sequence[Any]) -> Axes | None:
    """Distribute row-major factors over the dimensions of a reshape."""
    atoms = list(reversed(atoms))
    result: Axes = []
    for size in shape:
        dim: list[Atom] = []
        product: Any = 1
        while not same_size(product, size):
            if not atoms:
                return None
            atom = atoms.pop()
            room = _quotient(size, product)
            if isinstance(atom.size, int) and isinstance(room, int) and atom.size > room:
                rest = _quotient(atom.size, room)
                if rest is None:
                    return None
                atoms.append(Atom(atom.dim, rest, atom.part + 1))
                atom = Atom(atom.dim, room, atom.part)
            dim.append(atom)
            product = product * atom.size
        result.append(dim)
    return result if not atoms else None


def _quotient(a: Any, b: Any) -> Any:
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else None


def strip_expand(x: fx.Node, min_dims: int = 0) -> fx.Node:
    """``x`` before broadcasting (to no less than ``min_dims`` dimensions): its source says the same once."""
    while is_op(x, aten.expand, *_ALIASES) and x.args[0].meta["val"].dim() >= min_dims:
        x = x.args[0]
    return x


# --------------------------------------------------------------------------- lanes


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Which elements of the last dimension of some base a tensor holds, in the tensor's last ``len(shape)`` dimensions.

    ``index`` is row-major over ``shape``: lane ``i`` of the base, or ``~i`` for its negation.
    """

    shape: tuple[int, ...]
    index: tuple[int, ...]

    def take(self, axis: int, positions: Sequence[int], drop: bool = False) -> Lanes:
        """The given positions along ``axis``; ``drop`` removes the axis (of one position)."""
        n, inner = self.shape[axis], math.prod(self.shape[axis + 1 :])
        starts = range(0, len(self.index), n * inner)
        taken = [self.index[o + i * inner + k] for o in starts for i in positions for k in range(inner)]
        size = () if drop else (len(positions),)
        return Lanes((*self.shape[:axis], *size, *self.shape[axis + 1 :]), tuple(taken))

    def permute(self, order: Sequence[int]) -> Lanes:
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        shape = tuple(self.shape[d] for d in order)
        places = itertools.product(*map(range, shape))
        index = [self.index[sum(i * strides[d] for i, d in zip(p, order, strict=True))] for p in places]
        return Lanes(shape, tuple(index))

    def negated(self) -> Lanes:
        return Lanes(self.shape, tuple(~i for i in self.index))


def lanes(x: Any, base: fx.Node) -> Lanes | None:
    """How ``x`` is made of elements of ``base`` by slicing, joining, negating and viewing the last dimension.

    All leading dimensions must be those of ``base``.  Casts that lose nothing are looked through.
    """
    size = base.meta["val"].shape[-1]
    if not isinstance(size, int):
        return None
    return _lanes(x, base, base.meta["val"].dim() - 1, {base: Lanes((size,), tuple(range(size)))})


def _lanes(x: Any, base: fx.Node, lead: int, known: dict[fx.Node, Lanes | None]) -> Lanes | None:
    x = strip_upcast(x)
    if x in known or not isinstance(x, fx.Node):
        return known.get(x)
    known[x] = None
    parts = joined(x)
    if parts is not None:
        found = [_lanes(p, base, lead, known) for p in parts]
        dim = argument(x, "dim") % x.meta["val"].dim() - lead
        known[x] = None if None in found or dim < 0 else _joined_lanes(found, dim, is_op(x, aten.stack))
    elif lane_source(x) is not None:
        inner = _lanes(lane_source(x), base, lead, known)
        known[x] = None if inner is None else _step(x, inner, lead)
    return known[x]


def joined(x: Any) -> Sequence[fx.Node] | None:
    """The parts of a ``cat`` or ``stack``."""
    return x.args[0] if is_op(x, aten.cat, aten.stack) else None


def _joined_lanes(parts: Sequence[Lanes], axis: int, stacked: bool) -> Lanes | None:
    """The lanes of parts that stand one behind the other along ``axis``."""
    if stacked:
        parts = [Lanes((*p.shape[:axis], 1, *p.shape[axis:]), p.index) for p in parts]
    if len({(p.shape[:axis], p.shape[axis + 1 :]) for p in parts}) != 1:
        return None
    inner = [math.prod(p.shape[axis:]) for p in parts]
    outer = math.prod(parts[0].shape[:axis])
    index = [i for o in range(outer) for p, n in zip(parts, inner, strict=True) for i in p.index[o * n : (o + 1) * n]]
    size = sum(p.shape[axis] for p in parts)
    return Lanes((*parts[0].shape[:axis], size, *parts[0].shape[axis + 1 :]), tuple(index))


_SPLITS = (aten.split, aten.split_with_sizes, aten.unbind, aten.chunk)
_PIECES = (aten.slice, aten.select, operator.getitem, *_SPLITS, *RESHAPES, *PERMUTES, aten.expand)


def lane_source(x: Any) -> fx.Node | None:
    """What ``x`` rearranges, if it may be an arrangement of one tensor's elements (see :func:`lanes`)."""
    if is_op(x, operator.getitem):
        return x.args[0].args[0] if is_op(x.args[0], *_SPLITS) else None
    if is_op(x, aten.mul):
        return x.args[0] if scalar(x.args[1]) == -1 else None
    known = (aten.slice, aten.select, aten.neg, aten.clone, *RESHAPES, *PERMUTES)
    return x.args[0] if is_op(x, *known) else None


def lane_sources(x: Any) -> list[fx.Node]:
    """``x`` without lossless casts, and all that it was sliced, split or viewed from, nearest first."""
    chain = [strip_upcast(x)]
    while lane_source(chain[-1]) is not None:
        chain.append(strip_upcast(lane_source(chain[-1])))
    return chain


def _step(x: fx.Node, inner: Lanes, lead: int) -> Lanes | None:
    """The lanes of ``x`` given those of its :func:`lane_source`; None where a leading dimension changes."""
    source, value = lane_source(x).meta["val"], x.meta["val"]
    if is_op(x, operator.getitem):
        return _split(x, inner, lead)
    if is_op(x, aten.neg, aten.mul):
        return inner.negated()
    if is_op(x, aten.clone) or is_noop_slice(x):
        return inner
    if is_op(x, aten.slice, aten.select):
        axis = argument(x, "dim") % source.dim() - lead
        if axis < 0:
            return None
        if is_op(x, aten.select):
            index = argument(x, "index")
            return inner.take(axis, [index % inner.shape[axis]], drop=True) if isinstance(index, int) else None
        bounds = [argument(x, name) for name in ("start", "end", "step")]
        if not all(b is None or isinstance(b, int) for b in bounds):
            return None
        return inner.take(axis, range(*slice(*bounds).indices(inner.shape[axis])))
    if is_op(x, *PERMUTES):
        axes = _follow(x, [[Atom(d, 1)] for d in range(source.dim())])
        order = [a[0].dim for a in axes]
        return inner.permute([d - lead for d in order[lead:]]) if order[:lead] == list(range(lead)) else None
    shape = tuple(value.shape[lead:])
    whole = same_shape(value.shape[:lead], source.shape[:lead]) and all(isinstance(s, int) for s in shape)
    return Lanes(shape, inner.index) if whole and math.prod(shape) == len(inner.index) else None


def _split(item: fx.Node, inner: Lanes, lead: int) -> Lanes | None:
    """The lanes of one result of ``split``, ``chunk`` or ``unbind``."""
    call, number = item.args[0], item.args[1]
    axis = argument(call, "dim") % call.args[0].meta["val"].dim() - lead
    if axis < 0:
        return None
    if is_op(call, aten.unbind):
        return inner.take(axis, [number], drop=True)
    sizes = [v.shape[axis + lead] for v in call.meta["val"]]
    if not all(isinstance(s, int) for s in sizes):
        return None
    start = sum(sizes[:number])
    return inner.take(axis, range(start, start + sizes[number]))


def table_function(x: Any) -> Any:
    """``aten.cos`` or ``aten.sin`` if ``x`` is seen to be a table of it: cast, scaled, viewed, repeated, looked up."""
    known = (*_VIEWS, aten.slice, aten.select, aten.cat, aten.mul, aten.index, aten.index_select, aten.gather)
    for _ in range(32):
        x = strip_aliases(x)
        if is_op(x, aten.cos, aten.sin):
            return _packet(x.target)
        if not (is_op(x, *known) or is_cast(x)) or (is_op(x, aten.mul) and scalar(x.args[1]) is None):
            return None
        x = x.args[0] if not is_op(x, aten.cat) else x.args[0][0]
    return None


# --------------------------------------------------------------------------- gradients


def is_training_graph(graph: fx.Graph) -> bool:
    """Whether ``graph`` is a joint graph, which computes gradients as well (AOTAutograd names its extra inputs so)."""
    return any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))


def is_backward(x: fx.Node) -> bool:
    """Whether ``x`` belongs to the backward half of a joint graph (AOTAutograd marks it: torch 2.11 to 2.13)."""
    return x.meta.get("partitioner_tag") == "is_backward"


# --------------------------------------------------------------------------- elementwise functions of one value


def _gelu(x: float, approximate: str = "none") -> float:
    if approximate == "tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def logistic(x: float) -> float:
    return 0.0 if x <= -700 else 1 / (1 + math.exp(-x))


def _exp(x: float) -> float:
    return math.inf if x >= 700 else math.exp(x)


def _greater(x: float, y: float) -> float:
    """The greater number; NaN if one of them is NaN, which Python's ``max`` may drop."""
    return x if x > y or x != x else y


def _smaller(x: float, y: float) -> float:
    return x if x < y or x != x else y


def _clamp(x: float, low: float | None = None, high: float | None = None) -> float:
    return min(max(x, -math.inf if low is None else low), math.inf if high is None else high)


def _quotient_of(a: float, b: float) -> float:
    return a / b if b else math.nan


_SCALAR_FUNCTIONS = {
    aten.neg: lambda x: -x,
    aten.abs: abs,
    aten.exp: _exp,
    aten.exp2: lambda x: _exp(x * math.log(2)),
    aten.expm1: lambda x: _exp(x) - 1,
    aten.log1p: math.log1p,
    aten.sigmoid: logistic,
    aten.tanh: math.tanh,
    aten.erf: math.erf,
    aten.erfc: math.erfc,
    aten.reciprocal: lambda x: _quotient_of(1.0, x),
    aten.square: lambda x: x * x,
    aten.pow: lambda x, y: x**y,
    aten.add: lambda x, y, alpha=1: x + alpha * y,
    aten.sub: lambda x, y, alpha=1: x - alpha * y,
    aten.rsub: lambda x, y, alpha=1: y - alpha * x,
    aten.mul: lambda x, y: x * y,
    aten.div: _quotient_of,
    aten.true_divide: _quotient_of,
    aten.addcmul: lambda x, y, z, value=1: x + value * y * z,
    aten.relu: lambda x: max(x, 0.0),
    aten.silu: lambda x: x * logistic(x),
    aten.gelu: _gelu,
    aten.clamp: _clamp,
    aten.hardtanh: lambda x, low=-1.0, high=1.0: _clamp(x, low, high),
    aten.clamp_min: _greater,
    aten.clamp_max: _smaller,
    aten.maximum: _greater,
    aten.minimum: _smaller,
    aten.gt: lambda x, y: x > y,
    aten.ge: lambda x, y: x >= y,
    aten.lt: lambda x, y: x < y,
    aten.le: lambda x, y: x <= y,
    aten.where: lambda c, x, y: x if c else y,
    aten._to_copy: lambda x, **_: x,
    aten.clone: lambda x, **_: x,
    prims.convert_element_type: lambda x, _: x,
}
"""What elementwise ATen ops do to numbers; numbers and not tensors, since graphs are matched under fake modes."""

_COMPARISONS = (aten.gt, aten.ge, aten.lt, aten.le)
"""The functions above that may make booleans: of those, sums and casts are something else than of numbers."""


@dataclasses.dataclass(frozen=True)
class Univariate:
    """``x = f(source; parameter)``: an elementwise function of one tensor and of at most one unknown number.

    ``parameter`` is a 0-d tensor or None.  ``nodes`` compute the function, in graph order.
    """

    x: fx.Node
    source: fx.Node
    parameter: fx.Node | None
    nodes: tuple[fx.Node, ...]

    def __call__(self, value: float, parameter: float = 0.0) -> float:
        """The function at a number; NaN where it is not defined."""
        known: dict[Any, Any] = {self.source: value, self.parameter: parameter}
        try:
            for node, function, args, kwargs in self._program:
                known[node] = function(*[known[a] if isinstance(a, fx.Node) else a for a in args], **kwargs)
        except (ArithmeticError, TypeError, ValueError):  # TypeError: a complex power
            return math.nan
        result = known[self.x]
        return float(result) if isinstance(result, int | float) else math.nan

    @functools.cached_property
    def _program(self) -> list[tuple[fx.Node, Any, list[Any], dict[str, Any]]]:
        """Each node with what it does to numbers; constants and lossless casts are resolved once."""
        known = {self.source, self.parameter, *self.nodes}

        def operand(a: Any) -> Any:
            a = strip_upcast(a) if isinstance(a, fx.Node) else a
            return a if not isinstance(a, fx.Node) or a in known else scalar(a)

        return [
            (n, _SCALAR_FUNCTIONS[_packet(n.target)], [operand(a) for a in n.args], dict(n.kwargs)) for n in self.nodes
        ]

    def loses_precision(self) -> bool:
        """Whether something on the way is rounded to a type that does not hold every value of the source's."""
        source = dtype_of(self.source)
        floats = [d for d in map(dtype_of, self.nodes) if d is not None and d.is_floating_point]
        return any(not holds(d, source) for d in floats)


def univariate_forms(x: fx.Node, limit: int = 48) -> Iterator[Univariate]:
    """The tensors that ``x`` is an elementwise function of, the nearest first.

    A tensor that appears several times in the function counts once, however it is cast.  Ends at what is not
    elementwise, and where the function has grown too large to be an activation.
    """
    x = strip_upcast(x)
    if not isinstance(x.meta.get("val"), torch.Tensor):
        return
    frontier, nodes = {x}, []
    parameter: fx.Node | None = None
    while True:
        latest = max(frontier)
        operands = _elementwise_operands(latest, x.meta["val"].shape)
        if operands is None or len(nodes) == limit:
            return
        nodes.append(latest)
        frontier.remove(latest)
        for operand in operands:
            if operand.meta["val"].dim() or not x.meta["val"].dim():
                frontier.add(operand)
            elif parameter not in (None, operand):
                return
            else:
                parameter = operand
        if not 1 <= len(frontier) <= 8:
            return
        if len(frontier) == 1:
            yield Univariate(x, next(iter(frontier)), parameter, tuple(sorted(nodes)))


def _elementwise_operands(node: fx.Node, shape: Sequence[Any]) -> list[fx.Node] | None:
    """The tensors that ``node`` computes each of its elements from; constants left out.  None if it is no such op."""
    if node.op != "call_function" or _packet(node.target) not in _SCALAR_FUNCTIONS:
        return None
    if is_op(node, aten._to_copy) and not is_cast(node):
        return None
    if dtype_of(node) == torch.bool and not is_op(node, *_COMPARISONS):
        return None
    if set(node.kwargs) - {"alpha", "value", "approximate"} and not is_op(node, aten._to_copy, aten.clone):
        return None
    operands = []
    for a in node.all_input_nodes:
        a = strip_upcast(a)
        value = a.meta.get("val")
        if scalar(a) is not None:
            continue
        if not isinstance(value, torch.Tensor) or not (value.dim() == 0 or same_shape(value.shape, shape)):
            return None
        if not (value.dtype.is_floating_point or value.dtype == torch.bool):
            return None
        operands.append(a)
    return operands


@dataclasses.dataclass(frozen=True)
class Activation:
    """``x = scale * name(source)``, where ``silu`` and ``sigmoid`` have their argument times ``alpha``.

    ``alpha`` is a number or a 0-d tensor.  ``nodes`` compute it, ``x`` (any casts behind it left out) among them.
    """

    name: str
    source: fx.Node
    alpha: float | fx.Node
    scale: float
    nodes: tuple[fx.Node, ...]


_PROBES = tuple(
    s * v
    for v in (1e-7, 1e-3, 0.11, 0.5, 1.0, 1.7, 2.6, 3.3, 5.1, 6.5, 9.2, 15.0, 40.0, 300.0, 1e4, 1e9)
    for s in (-1, 1)
)
_LARGE = 1e4
_NONLINEAR = (
    *(aten.exp, aten.exp2, aten.expm1, aten.sigmoid, aten.tanh, aten.erf, aten.erfc, aten.silu, aten.gelu),
    *(aten.relu, aten.clamp, aten.clamp_min, aten.maximum, aten.where),
)

_ACTIVATIONS = {
    "silu": lambda x, alpha: x * logistic(alpha * x),
    "gelu": lambda x, alpha: _gelu(x),
    "gelu_tanh": lambda x, alpha: _gelu(x, "tanh"),
    "relu": lambda x, alpha: max(x, 0.0),
    "relu2": lambda x, alpha: max(x, 0.0) ** 2,
    "sigmoid": lambda x, alpha: logistic(alpha * x),
    "tanh": lambda x, alpha: math.tanh(x),
}


def activations(x: fx.Node) -> Iterator[Activation]:
    """``x`` as a known activation of some tensor, whatever it is spelled with; of the nearest tensor first.

    The elementwise code in front of ``x`` is evaluated on a few numbers and compared with the known functions: two
    formulas that agree there to single precision are the same.  Code that rounds to less than its source has is left
    out: the function alone would not do that.
    """
    for form in nonlinear_forms(x):
        found = None if form.loses_precision() else _named(form)
        if found is not None:
            yield found


def nonlinear_forms(x: fx.Node) -> Iterator[Univariate]:
    """The tensors that ``x``, in front of casts, is a nonlinear function of, the nearest first."""
    while is_cast(x):
        x = x.args[0]
    return (f for f in univariate_forms(x) if any(is_op(n, *_NONLINEAR) for n in f.nodes))


def _named(form: Univariate) -> Activation | None:
    if form.parameter is not None:
        # The unknown number must be alpha, whatever it is.
        alphas = (0.625, 1.75)
        for name in ("silu", "sigmoid"):
            reference = _ACTIVATIONS[name]
            if all(_agree(lambda v, a=a: form(v, a), lambda v, a=a, r=reference: r(v, a)) for a in alphas):
                return Activation(name, form.source, form.parameter, 1.0, form.nodes)
        return None
    for name, reference in _ACTIVATIONS.items():
        scale = _quotient_of(form(_LARGE), reference(_LARGE, 1.0))
        if not math.isfinite(scale) or not scale:
            continue
        scale = _rounded(scale)
        alpha = 1.0
        if name in ("silu", "sigmoid"):
            at_one = _quotient_of(form(1.0), scale)
            if not 0.5 < at_one < 1.0:
                continue
            alpha = _rounded(math.log(at_one / (1 - at_one)))
        if _agree(form, lambda v, r=reference, a=alpha, s=scale: s * r(v, a)):
            return Activation(name, form.source, alpha, scale, form.nodes)
    return None


def _rounded(number: float) -> float:
    """A constant recovered from a function, without the noise of its last digits."""
    return float(f"{number:.10g}")


def _agree(f: Any, g: Any) -> bool:
    """Whether two functions agree to single precision where they are small as well, and are NaN at NaN.

    Differences of large numbers, as in ``x - x * sigmoid(-x)``, have lost digits of ``x`` in double precision too.
    """
    for v in _PROBES:
        a, b = f(v), g(v)
        if not abs(a - b) <= 1e-7 * abs(b) + 1e-14 * abs(v):  # false for NaN
            return False
    return math.isnan(f(math.nan)) and math.isnan(g(math.nan))


@dataclasses.dataclass(frozen=True)
class Clamped:
    """``x = clamp(source, low, high)`` in the type of ``source``; a limit that is None does not bind."""

    source: fx.Node
    low: float | None
    high: float | None


def clamped(x: fx.Node) -> Clamped | None:
    """``x`` as a clamp with known limits, also one that is computed in a wider type and cast back."""
    x = strip_aliases(x)
    inner = strip_aliases(x.args[0]) if is_cast(x) else x
    low, high = -math.inf, math.inf
    limits = _limits(inner)
    if limits is None:
        return None
    while limits is not None:
        source, least, most = limits
        if least > high or most < low:
            break
        low, high = max(low, least), min(high, most)
        inner = source
        limits = _limits(inner)
    if inner is x or (is_cast(x) and dtype_of(strip_upcast(inner)) != dtype_of(x)):
        return None
    if is_cast(x):
        # The cast rounds a limit as clamping in the short type would.
        inner = strip_upcast(inner)
    deeper = clamped(inner)
    if deeper is not None:
        least, most = (d if d is not None else o for d, o in ((deeper.low, -math.inf), (deeper.high, math.inf)))
        if least <= high and most >= low:
            inner, low, high = deeper.source, max(low, least), min(high, most)
    return Clamped(inner, None if low == -math.inf else low, None if high == math.inf else high)


def _limits(x: Any) -> tuple[fx.Node, float, float] | None:
    """``x = clamp(source, low, high)`` of one op: ``(source, low, high)``, infinite where there is no limit."""
    if is_op(x, aten.clamp, aten.hardtanh):
        names = ("min", "max") if is_op(x, aten.clamp) else ("min_val", "max_val")
        low, high = (argument(x, name) for name in names)
    elif is_op(x, aten.clamp_min, aten.maximum):
        low, high = x.args[1], None
    elif is_op(x, aten.clamp_max, aten.minimum):
        low, high = None, x.args[1]
    else:
        return None
    least = -math.inf if low is None else scalar(low)
    most = math.inf if high is None else scalar(high)
    if least is None or most is None or least > most:
        return None
    if not same_shape(x.args[0].meta["val"].shape, x.meta["val"].shape):
        return None  # the limit has a shape of its own
    return strip_aliases(x.args[0]), least, most


# --------------------------------------------------------------------------- matrix products

_LEFT_FACTOR = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.linear, aten.matmul, aten._grouped_mm, aten._scaled_mm), 0),
    **dict.fromkeys((aten.addmm, aten.baddbmm), 1),
}


def projection(x: Any) -> fx.Node | None:
    """The matrix product whose result ``x`` is, up to views, pieces of it, casts, clamps and a bias."""
    for _ in range(16):
        x = strip_upcast(x)
        if not isinstance(x, fx.Node) or x.op != "call_function":
            return None
        if _packet(x.target) in _LEFT_FACTOR:
            return x
        if is_op(x, *_VIEWS, aten.slice, aten.select, operator.getitem, *_SPLITS) or is_cast(x):
            x = x.args[0]
        elif _limits(x) is not None:
            x = _limits(x)[0]
        elif is_op(x, aten.add) and plus_scalar(x) is not None:
            x = plus_scalar(x)[0]
        elif is_op(x, aten.div) and _is_bias(x.args[1], x):
            x = x.args[0]
        elif is_op(x, aten.add, aten.mul):
            x = next((a for a, b in commuted(x) if _is_bias(b, x)), None)
        else:
            return None
    return None


_SPLITS = (aten.split, aten.split_with_sizes, aten.chunk, aten.unbind)


def _is_bias(b: Any, result: fx.Node) -> bool:
    """A number, or a tensor that is repeated over at least one dimension of ``result``."""
    value = b.meta.get("val") if isinstance(b, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return scalar(b) is not None
    return not same_shape(value.shape, result.meta["val"].shape)


@dataclasses.dataclass(frozen=True)
class Linear:
    """``product = x @ transposed``, an ``aten.mm`` whose second factor is a stored ``[out, in]`` seen from the side.

    ``source``: what ``x`` is a reshape of; products of one source and shape have the same left factor.
    """

    product: fx.Node
    x: fx.Node
    source: fx.Node
    transposed: fx.Node

    def shares_input(self, other: Linear) -> bool:
        return self.source is other.source and same_shape(self.x.meta["val"].shape, other.x.meta["val"].shape)


def linear(product: Any) -> Linear | None:
    """``product`` as a linear layer without bias, or None.

    A weight that is computed in the graph (dequantised, cast, put together) makes none: who computes it may fuse the
    work with the product, and what is known about reading weights from memory says nothing about that.
    """
    if not is_op(product, aten.mm) or product.kwargs or not all(isinstance(a, fx.Node) for a in product.args):
        return None
    x, transposed = product.args
    if not same_size(transposed.meta["val"].stride(0), 1) or not _is_stored(transposed):
        return None
    return Linear(product, x, _unreshaped(x), transposed)


def _is_stored(x: fx.Node) -> bool:
    """Whether ``x`` is an input of the graph, or a piece of one."""
    while is_op(x, *RESHAPES, *PERMUTES, *_ALIASES, aten.slice, aten.select, operator.getitem, *_SPLITS):
        x = x.args[0]
    return x.op in ("placeholder", "get_attr")


def linears_of(source: fx.Node) -> list[Linear]:
    """The linear layers that read ``source``, reshaped or not, in graph order."""
    found, work = [], [source]
    while work:
        for user in work.pop().users:
            if is_op(user, *RESHAPES):
                work.append(user)
            elif (layer := linear(user)) is not None and layer.source is source:
                found.append(layer)
    return sorted(found, key=lambda layer: layer.product)


def _unreshaped(x: fx.Node) -> fx.Node:
    while is_op(x, *RESHAPES):
        x = x.args[0]
    return x


def same_projected(a: Any, b: Any) -> bool:
    """Whether two tensors are pieces of one matrix product, or products of one and the same operand."""
    a, b = projection(a), projection(b)
    return None not in (a, b) and (a is b or bool(_factors(a) & _factors(b)))


def _factors(product: fx.Node) -> set[fx.Node]:
    first = _LEFT_FACTOR[_packet(product.target)]
    return {as_base(n) for n in product.args[first : first + 2]}


def as_base(x: fx.Node) -> fx.Node:
    """``x`` without casts that lose nothing, and without views, copies and repetitions."""
    x = strip_upcast(x)
    while is_op(x, *_VIEWS):
        x = strip_upcast(x.args[0])
    return x


# --------------------------------------------------------------------------- softmax


def softmax_source(x: fx.Node) -> fx.Node | None:
    """``x = softmax(z, -1)`` as one op or decomposed: ``z``, up to something that is constant along each row."""
    if is_op(x, aten._softmax, aten._safe_softmax, aten.softmax):
        dims = x.args[0].meta["val"].dim()
        return x.args[0] if argument(x, "dim") % dims == dims - 1 else None
    exponential = None
    if is_quotient(x):
        exponential, total = strip_aliases(x.args[0]), last_dim_sum(x.args[1])
    elif is_op(x, aten.mul):
        pairs = [(strip_aliases(a), strip_aliases(b)) for a, b in commuted(x)]
        pairs = [(a, last_dim_sum(b.args[0])) for a, b in pairs if is_op(b, aten.reciprocal) and is_op(a, aten.exp)]
        exponential, total = pairs[0] if pairs else (None, None)
    elif is_op(x, aten.exp):  # of log_softmax
        inner = strip_casts(x.args[0])
        log = strip_aliases(inner.args[1]) if is_op(inner, aten.sub) else None
        total = last_dim_sum(log.args[0]) if is_op(log, aten.log) else None
        same = is_op(total, aten.exp) and strip_aliases(total.args[0]) is strip_aliases(inner.args[0])
        return _unshifted(inner.args[0]) if same else None
    if not is_op(exponential, aten.exp) or total is None or not same_value(exponential, total):
        return None
    return _unshifted(exponential.args[0])


def _unshifted(x: fx.Node) -> fx.Node:
    """``z`` if ``x = z - c`` with ``c`` constant along each row, which no softmax sees."""
    x = strip_aliases(x)
    while is_op(x, aten.sub) and isinstance(x.args[1], fx.Node) and is_per_row(x.args[1]):
        x = strip_aliases(x.args[0])
    return x


def is_per_row(x: fx.Node) -> bool:
    """Whether ``x`` has one value for each row (all of the last dimension), or only one."""
    shape = x.meta["val"].shape
    return not shape or same_size(shape[-1], 1)


def strip_casts(x: Any) -> Any:
    """``x`` without casts, those that lose something as well."""
    while is_cast(strip_aliases(x)):
        x = strip_aliases(x).args[0]
    return strip_aliases(x)


def zeroed_empty_rows(x: Any) -> fx.Node | None:
    """``x = where(no element of the row is above -inf, 0, p)``, the second half of a safe softmax: ``p``."""
    if not is_op(x, aten.where) or scalar(x.args[1]) != 0 or not is_op(x.args[0], aten.logical_not):
        return None
    return x.args[2] if is_op(x.args[0].args[0], aten.any) else None


# --------------------------------------------------------------------------- bounds

_ORDINARY = 1000.0
"""How large a value that a model computes is taken to be, where it is multiplied by a number that is not small."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The numbers between which the elements of a tensor lie; infinite where nothing is known.

    ``ordinary``: plus a value as models compute them, of which only that is known: it is nothing beside a mask.
    """

    low: float
    high: float
    ordinary: bool = False

    def __post_init__(self) -> None:
        if not self.low <= self.high:  # one of them is NaN
            object.__setattr__(self, "low", -math.inf)
            object.__setattr__(self, "high", math.inf)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def _size(self) -> float:
        return max(abs(self.low), abs(self.high))

    @property
    def is_small(self) -> bool:
        return self._size <= _ORDINARY

    def within(self, dtype: torch.dtype) -> Bounds:
        """The bounds once the elements are rounded to ``dtype``: too large is infinite, and too small may be zero."""
        if not dtype.is_floating_point:
            return self
        low, high, tiny = _in_type(self.low, dtype), _in_type(self.high, dtype), torch.finfo(dtype).tiny
        return Bounds(0.0 if 0 < low < tiny else low, 0.0 if -tiny < high < 0 else high, self.ordinary)

    def whole(self, limits: torch.iinfo) -> Bounds:
        """The bounds of integers, which wrap around."""
        if self.ordinary or not limits.min <= self.low <= self.high <= limits.max:
            return Bounds(float(limits.min), float(limits.max))
        return Bounds(math.floor(self.low), math.ceil(self.high))

    def hull(self, other: Bounds) -> Bounds:
        """The bounds of what is taken from either."""
        return Bounds(min(self.low, other.low), max(self.high, other.high), self.ordinary or other.ordinary)

    def chosen(self, choose: Any, other: Bounds) -> Bounds:
        """The bounds of the greater of two values, or of the smaller: ``choose`` is ``max`` or ``min``."""
        ordinary = self.ordinary or other.ordinary
        return Bounds(choose(self.low, other.low), choose(self.high, other.high), ordinary)

    def __neg__(self) -> Bounds:
        return Bounds(-self.high, -self.low, self.ordinary)

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.low + other.low, self.high + other.high, self.ordinary or other.ordinary)

    def __mul__(self, other: Bounds) -> Bounds:
        ordinary = self.ordinary or other.ordinary
        if ordinary and not (self.is_small and other.is_small):
            reach = math.prod(b._size + _ORDINARY * b.ordinary for b in (self, other))
            return Bounds(-reach, reach, True)
        return _corners(operator.mul, self, other, ordinary)

    def __truediv__(self, other: Bounds) -> Bounds:
        if other.ordinary:
            return ORDINARY if self.is_small and other.is_small else UNKNOWN
        if other.low <= 0 <= other.high:
            return UNKNOWN
        return self * Bounds(1 / other.high, 1 / other.low)

    def __pow__(self, other: Bounds) -> Bounds:
        if self.ordinary or other.ordinary:
            return ORDINARY if self.is_small and other.is_small else UNKNOWN
        if self.low > 0:
            return _corners(operator.pow, self, other)
        whole = other.low == other.high >= 0 and float(other.low).is_integer()
        return _corners(operator.pow, self, other).hull(Bounds(0, 0)) if whole else UNKNOWN


ORDINARY = Bounds(0.0, 0.0, True)
UNKNOWN = Bounds(-math.inf, math.inf)


def _corners(function: Any, a: Bounds, b: Bounds, ordinary: bool = False) -> Bounds:
    """The bounds of a function of two numbers that takes its extremes where they do."""
    try:
        ends = [function(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    except OverflowError:
        return UNKNOWN
    return UNKNOWN if any(map(math.isnan, ends)) else Bounds(min(ends), max(ends), ordinary)


def _in_type(number: float, dtype: torch.dtype) -> float:
    """``number`` rounded to a floating-point type, infinite if that is too small for it."""
    if not math.isfinite(number):
        return number
    info = torch.finfo(dtype)
    fraction, exponent = math.frexp(number)
    steps = 2 / info.eps
    try:
        rounded = math.ldexp(round(fraction * steps) / steps, exponent)
    except OverflowError:
        return math.copysign(math.inf, number)
    return rounded if abs(rounded) <= info.max else math.copysign(math.inf, number)


def bounds(x: Any) -> Bounds:
    """Between which numbers ``x`` is known to lie, in every type that it is computed in.

    Nothing is known of floating-point inputs of a graph, of 8-bit floats, and of functions that may have a pole.  What
    a model computes, an embedding or a matrix product and what is made of them, is ordinary, but for a logarithm.
    """
    return _Bounding(UNKNOWN).of(x)


def parameter_bounds(x: Any) -> Bounds:
    """The bounds of what cannot be a mask, such as a value for each head: inputs of the graph are ordinary too."""
    return _Bounding(ORDINARY).of(x)


_CHOSEN = {
    **dict.fromkeys((*_VIEWS, aten._to_copy, prims.convert_element_type, aten.slice, aten.select, aten.index), (0,)),
    **dict.fromkeys((aten.index_select, aten.gather, aten.flip, aten.roll, aten.amax, aten.amin, aten.mean), (0,)),
    **dict.fromkeys((aten.slice_scatter, aten.select_scatter), (0, 1)),
    aten.scalar_tensor: (0,),
    aten.full: (1,),
    aten.full_like: (1,),
    aten.copy: (1,),
    aten.fill: (1,),
    aten.where: (1, 2),
    aten.masked_fill: (0, 2),
}
"""The arguments that the elements of a result are taken from."""

_BOUNDS = {
    aten.neg: operator.neg,
    aten.abs: lambda b: b if b.low >= 0 else Bounds(0, max(-b.low, b.high), b.ordinary),
    aten.square: lambda b: b * b,
    aten.reciprocal: lambda b: Bounds(1, 1) / b,
    aten.pow: operator.pow,
    **dict.fromkeys((aten.maximum, aten.clamp_min), lambda a, b: a.chosen(max, b)),
    **dict.fromkeys((aten.minimum, aten.clamp_max), lambda a, b: a.chosen(min, b)),
}
"""What functions of tensors do to bounds."""

_INCREASING = {
    aten.exp: _exp,
    aten.exp2: lambda x: _exp(x * math.log(2)),
    aten.expm1: lambda x: _exp(x) - 1,
    aten.log: math.log,
    aten.log2: math.log2,
    aten.log10: math.log10,
    aten.log1p: math.log1p,
    aten.sqrt: math.sqrt,
    aten.relu: lambda x: max(x, 0.0),
}
_LOGARITHMS = (aten.log, aten.log2, aten.log10)
_RANGES = {
    **dict.fromkeys((aten.sigmoid, aten._softmax), (0.0, 1.0)),
    **dict.fromkeys((aten.tanh, aten.erf, aten.sin, aten.cos, aten.sign), (-1.0, 1.0)),
}
_CONSTANTS = {
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), 0),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), 1),
}


class _Bounding:
    """The bounds of the nodes of a graph whose floating-point inputs have the bounds ``inputs``."""

    def __init__(self, inputs: Bounds) -> None:
        self.inputs = inputs
        self.known: dict[fx.Node, Bounds] = {}

    def of(self, x: Any, depth: int = 0) -> Bounds:
        if isinstance(x, bool | int | float):
            return Bounds(float(x), float(x))
        dtype = dtype_of(x)
        if dtype is None:
            return ORDINARY  # a number made of sizes or arguments
        if dtype == torch.bool:
            return Bounds(0, 1)
        if dtype.is_complex or depth > 64:
            return UNKNOWN
        if x not in self.known:
            found = self._computed(x, depth + 1)
            if dtype.is_floating_point:
                found = found.within(dtype) if is_float(dtype) else UNKNOWN
            else:
                found = found.whole(torch.iinfo(dtype))
            self.known[x] = found
        return self.known[x]

    def _computed(self, x: fx.Node, depth: int) -> Bounds:
        if x.op != "call_function":
            return self.inputs
        if is_op(x, *_LEFT_FACTOR, aten.embedding, aten.convolution):
            return ORDINARY
        parts = _chosen_from(x)
        if parts is not None:
            return functools.reduce(Bounds.hull, (self.of(p, depth) for p in parts), self.of(parts[0], depth))
        packet = _packet(x.target)
        if packet in _RANGES:
            return Bounds(*_RANGES[packet])
        if is_op(x, prims.iota):
            length, start, step = x.args[0], x.kwargs["start"], x.kwargs["step"]
            known = all(isinstance(n, int) for n in (length, start, step))
            last = start + step * max(length - 1, 0) if known else 0
            return Bounds(min(start, last), max(start, last)) if known else UNKNOWN
        if is_op(x, aten.sum, aten.cumsum):
            return self._total(x, depth)
        found = self._increasing(x, depth) if packet in _INCREASING else self._arithmetic(x, depth)
        return self._ordinary(x, depth) if found is None else found

    def _total(self, x: fx.Node, depth: int) -> Bounds:
        """A sum of no more terms than its operand has elements."""
        source, count = self.of(x.args[0], depth), x.args[0].meta["val"].numel()
        if source.ordinary and source.is_small:
            return ORDINARY
        return source.hull(source * Bounds(count, count)).hull(Bounds(0, 0)) if isinstance(count, int) else UNKNOWN

    def _increasing(self, x: fx.Node, depth: int) -> Bounds | None:
        source, function = self.of(x.args[0], depth), _INCREASING[_packet(x.target)]
        if source.ordinary:
            return UNKNOWN if is_op(x, *_LOGARITHMS) else None
        try:
            return Bounds(function(source.low), function(source.high))
        except (ValueError, OverflowError):
            return UNKNOWN

    def _arithmetic(self, x: fx.Node, depth: int) -> Bounds | None:
        """The bounds of sums, products and the like; None for another function."""
        packet = _packet(x.target)
        if packet in _BOUNDS:
            return _BOUNDS[packet](*(self.of(a, depth) for a in x.args))
        if is_op(x, aten.mul):
            return self._factor(x.args[0], x, depth) * self._factor(x.args[1], x, depth)
        if is_quotient(x):
            return self.of(x.args[0], depth) / self._factor(x.args[1], x, depth)
        if is_op(x, aten.add, aten.sub, aten.rsub):
            first, second = (self.of(a, depth) for a in (x.args[1::-1] if is_op(x, aten.rsub) else x.args[:2]))
            second *= self.of(argument(x, "alpha"))
            return first + (second if is_op(x, aten.add) else -second)
        if is_op(x, aten.clamp):
            found = self.of(x.args[0], depth)
            for choose, limit in ((max, argument(x, "min")), (min, argument(x, "max"))):
                found = found if limit is None else found.chosen(choose, self.of(limit, depth))
            return found
        return None

    def _factor(self, factor: Any, product: fx.Node, depth: int) -> Bounds:
        """A factor that is the same for all keys is a parameter, as ALiBi's slopes are, and not a mask."""
        if dtype_of(factor) is None or not is_per_row(factor) or is_per_row(product) or self.inputs is ORDINARY:
            return self.of(factor, depth)
        return _Bounding(ORDINARY).of(factor, depth)

    def _ordinary(self, x: fx.Node, depth: int) -> Bounds:
        """Any other function: ordinary if one of its operands is and none is large."""
        operands = [n for n in x.all_input_nodes if (d := dtype_of(n)) is not None and d.is_floating_point]
        found = [self.of(n, depth) for n in operands]
        return ORDINARY if any(b.ordinary for b in found) and all(b.is_small for b in found) else UNKNOWN


def _chosen_from(x: fx.Node) -> list[Any] | None:
    """What the elements of ``x`` are taken from: constants, and operands whose elements it selects or copies."""
    packet = _packet(x.target)
    if packet in _CHOSEN and len(x.args) > _CHOSEN[packet][-1]:
        return [x.args[i] for i in _CHOSEN[packet]]
    if packet in _CONSTANTS:
        return [_CONSTANTS[packet]]
    if is_op(x, operator.getitem):
        values = is_op(x.args[0], *_SPLITS) or (is_op(x.args[0], aten.max, aten.min) and x.args[1] == 0)
        return [x.args[0].args[0]] if values else None
    if joined(x) is not None:
        return list(joined(x))
    if is_op(x, aten.index_put) and not argument(x, "accumulate"):
        return [x.args[0], x.args[2]]
    if is_op(x, aten.scatter) and not x.kwargs:
        return [x.args[0], x.args[3]]
    if is_op(x, aten.tril, aten.triu):
        return [x.args[0], 0]
    return [x.args[0], argument(x, "value")] if is_op(x, aten.constant_pad_nd) else None


# --------------------------------------------------------------------------- batched products


def batch_axes(x: fx.Node) -> Axes:
    """Axes of ``x`` itself: every dimension is one of its own."""
    return [[] if same_size(s, 1) else [Atom(d, s)] for d, s in enumerate(x.meta["val"].shape)]


def shares_memory(x: fx.Node) -> bool:
    """Whether torch calls the operation of ``x`` a view: its results lie in the memory of its first operand."""
    return isinstance(x.target, torch._ops.OpOverload) and x.target.is_view


def is_view(x: Any) -> bool:
    """A view or copy of all elements of its first operand, none of them repeated."""
    if is_op(x, aten.expand):
        return same_shape(x.meta["val"].shape, x.args[0].meta["val"].shape)
    return is_noop_slice(x) or (is_op(x, *_VIEWS) and not is_op(x, aten.repeat))


def axes_after(x: fx.Node, axes: Axes) -> Axes | None:
    """The axes of the view ``x`` given those of its operand."""
    return axes if is_op(x, aten.expand) else _follow(x, axes)


def axes_before(x: fx.Node, axes: Axes) -> Axes | None:
    """The axes of the operand of the view ``x`` given those of ``x``."""
    if is_op(x, *PERMUTES):
        moved = _follow(x, [[Atom(d, 2)] for d in range(len(axes))])
        return [axes[[m[0].dim for m in moved].index(d)] for d in range(len(axes))]
    if is_op(x, *RESHAPES):
        return _regrouped(list(itertools.chain.from_iterable(axes)), x.args[0].meta["val"].shape)
    return axes


def axis_dims(axes: Axes) -> list[list[int | None]]:
    return [[atom.dim for atom in axis] for axis in axes]


def unflattened(x: fx.Node, lead: Sequence[Any], swap: bool) -> tuple[fx.Node, tuple[int, ...]] | None:
    """``(base, order)`` with ``base.permute(order)[*lead, m, n] == x[row-major(lead), m, n]``, or ``n, m`` if ``swap``.

    Of all nodes that ``x`` is a view of, the furthest that needs no permutation, else the furthest.
    """
    chain, found = [x], None
    while is_op(chain[-1], *_VIEWS) or is_noop_slice(chain[-1]):
        chain.append(chain[-1].args[0])
    for length, base in enumerate(chain):
        order = _lead_order(chain[: length + 1], lead) if base.meta["val"].dim() == len(lead) + 2 else None
        if order is None:
            continue
        order = (*order[:-2], order[-1], order[-2]) if swap else order
        plain = tuple(range(len(order)))
        if found is None or order == plain or found[1] != plain:
            found = base, order
    return found


def _lead_order(chain: Sequence[fx.Node], lead: Sequence[Any]) -> tuple[int, ...] | None:
    axes: Axes | None = batch_axes(chain[-1])
    for node in reversed(chain[:-1]):
        axes = _follow(node, axes)
        if axes is None:
            return None
    return _flattening(axes, chain[-1].meta["val"].shape, lead)


def reflattened(product: fx.Node, lead: Sequence[Any]) -> tuple[fx.Node, tuple[int, ...]] | None:
    """``(view, order)`` with ``view.permute(order)[*lead, m, n] == product[row-major(lead), m, n]``: the nearest."""
    todo = [(product, (product,))]
    for node, chain in todo:
        if node.meta["val"].dim() == len(lead) + 2:
            axes: Axes | None = batch_axes(node)
            for view in reversed(chain[1:]):
                axes = None if axes is None else axes_before(view, axes)
            order = None if axes is None else _flattening(axes, node.meta["val"].shape, lead)
            if order is not None:
                return node, order
        todo += [(user, (*chain, user)) for user in node.users if is_view(user) and len(chain) < 6]
    return None


def _flattening(axes: Axes, shape: Sequence[Any], lead: Sequence[Any]) -> tuple[int, ...] | None:
    """The order of the dimensions of ``shape`` in which ``axes`` are ``[row-major(lead), m, n]``."""
    long = [s for s in lead if not same_size(s, 1)]
    atoms = [a for axis in axes for a in axis]
    if any(a.dim is None or not same_size(a.size, shape[a.dim]) for a in atoms) or any(len(a) > 1 for a in axes[1:]):
        return None
    if not same_shape([a.size for a in axes[0]], long):
        return None
    heads = iter(a.dim for a in axes[0])
    order = [None if same_size(s, 1) else next(heads) for s in lead]
    order += [axis[0].dim if axis else None for axis in axes[1:]]
    unused = iter(d for d in range(len(shape)) if d not in order)
    return tuple(next(unused) if d is None else d for d in order)


def repeated_heads(q: Any, k: fx.Node, v: fx.Node) -> tuple[HeadRepeat, HeadRepeat] | None:
    """How ``k`` and ``v`` repeat their heads to meet those of ``q`` (a tensor of 4 dimensions), if they do."""
    if q.dim() != 4 or k.meta["val"].dim() != 4:
        return None
    repeats = head_repeat(k), head_repeat(v)
    if None in repeats or not same_size(repeats[0].groups, repeats[1].groups):
        return None
    heads = repeats[0].base.meta["val"].shape[repeats[0].order[1]]
    return repeats if same_size(heads * repeats[0].groups, q.shape[1]) else None
