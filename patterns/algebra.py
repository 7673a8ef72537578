"""The algebra of graphs: what different spellings of the same mathematics have in common.

Everything that a pattern needs to know about ATen is here, so that a new spelling is taught once.  The
functions look at nodes *after* AOTAutograd (functional ATen with Inductor's decompositions); they also know the
undecomposed forms, so that graphs made with another table match as well.

Conventions: ``x`` is a node; a function that fails to recognise its form returns None; sizes may be symbolic
and are compared with :func:`same_size`, which never adds a guard.
"""

from __future__ import annotations

import dataclasses
import itertools
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


def _packet(target: Any) -> Any:
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target


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


def strip_upcast(x: Any) -> Any:
    """``x`` without casts that lose nothing (bf16 or fp16 to fp32, fp32 to fp64)."""
    x = strip_aliases(x)
    while is_cast(x):
        inner = strip_aliases(x.args[0])
        source, result = dtype_of(inner), dtype_of(x)
        if not source.is_floating_point or torch.promote_types(source, result) != result:
            break
        x = inner
    return x


def same_value(a: Any, b: Any) -> bool:
    """Whether two nodes are one value: the same node, or equal casts of it."""
    a, b = strip_aliases(a), strip_aliases(b)
    return a is b or (dtype_of(a) == dtype_of(b) and strip_upcast(a) is strip_upcast(b) is not None)


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
    elif is_op(x, aten.div) and scalar(x.args[0]) == 1:
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
    if is_op(x, aten.div) and scalar(x.args[1]):
        yield strip_aliases(x.args[0]), 1.0 / scalar(x.args[1])
    if is_op(x, aten.mul):
        for a, b in commuted(x):
            if scalar(b) is not None:
                yield strip_aliases(a), scalar(b)


def _is_last_dim_reduction(node: fx.Node) -> bool:
    source = node.args[0].meta.get("val")
    if not isinstance(source, torch.Tensor) or len(node.args) < 2:
        return False
    dims = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
    return [d % source.dim() for d in dims] == [source.dim() - 1] and bool(argument(node, "keepdim"))


# --------------------------------------------------------------------------- views

_RESHAPES = (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze)
_PERMUTES = (aten.permute, aten.transpose, aten.t)
_COPIES = (aten.clone, *_ALIASES)
_VIEWS = (*_RESHAPES, *_PERMUTES, *_COPIES, aten.expand, aten.repeat)


def dense_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from outermost to innermost in memory.

    None if the tensor is not dense, or its last dimension is not the innermost, whatever the symbols in it are.
    """
    plain = tuple(range(value.dim()))
    strided = sorted(plain, key=lambda d: (-hint(value.stride(d)), -hint(value.shape[d]), d))
    return next((o for o in (plain, tuple(strided)) if o[-1:] == plain[-1:] and _is_dense(value, o)), None)


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
    while is_op(x, *_RESHAPES) and _long_sizes(x) == _long_sizes(x.args[0]):
        x = strip_upcast(x.args[0])
    return x


def _long_sizes(x: fx.Node) -> list[Any]:
    return [s for s in x.meta["val"].shape if not same_size(s, 1)]


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
