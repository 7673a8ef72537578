"""Attention written out: ``matmul``, scale, mask or bias, softmax, ``matmul``.

Matches, in any spelling that the algebra knows (views and ``expand`` between the pieces, ``bmm`` or ``baddbmm``, the
scale on queries, keys or scores, softmax as one op or decomposed, in the type of the scores or in float32)::

    k = repeat_kv(k, n);  v = repeat_kv(v, n)
    s = (q @ k^T) * scale [+ bias] [+ mask]      # or masked_fill(mask, a large negative number)
    y = softmax(s, -1) @ v

Replaces with ``portable_ops::attention(..., enable_gqa=True)`` on the unrepeated heads.  The operator keeps scores in
float32 where the spelling rounds them between the pieces, so its results are nearer to the exact ones.

Recognised and left alone, because the operator does not say it: softcap, attention sinks, dropout, scores or
probabilities that are rounded to a type that cannot hold the values, a scale or a product along the keys, scores made
of several products, and a mask that may hold -inf or overflow to it: a row without any key is NaN when it is written
out and zero in the operator.  So is the ``math`` form of ``scaled_dot_product_attention``, which arrives where the call
could not be pinned.

Declines when what goes into the softmax is no batched product.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..kernels.attention import ATTENTION
from . import algebra
from .algebra import Axes, aten, prims
from .match import Call, Match, Pattern, Permuted, Recognised, Unmatched, val

_ABSORBING = -1e9
"""A score filled with this or less has weight zero beside any that is not filled."""

_FILL = -1e30
"""What the operator's mask says for it at most: float32 scores vanish in the sum, so a row without keys is uniform."""

_MAX_STEPS = 64


def match(anchor: fx.Node) -> Match | Recognised | None:
    """Match the attention whose probabilities ``anchor`` computes."""
    scores = algebra.softmax_source(anchor)
    if scores is None or algebra.is_backward(anchor):
        return None
    weighted = _weighted(anchor)
    if weighted is None:
        return None
    trail = _trail(scores, {})
    if trail is None:
        ends = scores, weighted.product
        if val(anchor).dim() > 4:
            raise Unmatched(
                f"the softmax has {val(anchor).dim()} dimensions, not batch, heads, queries and keys", *ends
            )
        raise Unmatched("what goes into the softmax is not a product of queries and keys", *ends)
    products = trail[-1], weighted.product
    if any(algebra.is_op(p, aten.mm, aten.addmm) for p in products):
        raise Unmatched(
            "a factor has two dimensions, neither batch nor heads: a table and not queries, keys or values",
            *products,
        )
    if any(_transforms(node, inner, trail[-1]) for node, inner in itertools.pairwise(trail)):
        raise Unmatched("the scores go through another function before the softmax", *products)
    ways = (algebra.between(trail[-1], anchor), algebra.between(anchor, weighted.product))
    whole = (trail[-1], *ways[0], anchor, *ways[1], weighted.product)
    safe = weighted.safe or algebra.is_op(anchor, aten._safe_softmax)
    if safe:
        reason = "it arrives already lowered to plain matmuls"
        return Recognised("lowered_attention", "attention", anchor, reason, inner=whole)
    bound: dict[str, Any] = {}
    try:
        return _build(anchor, trail, weighted, bound)
    except Unmatched as reason:
        return Recognised("eager_attention", "attention", anchor, str(reason), bound, whole)


# -------------------------------------------------------------------------------------- from the softmax to the values


@dataclasses.dataclass
class _Weighted:
    """The product of the probabilities with the values, and what happens to the probabilities before it."""

    product: fx.Node
    transposed: bool
    safe: bool = False
    dropout: bool = False
    cut: bool = False
    types: tuple[torch.dtype, ...] = ()


def _weighted(anchor: fx.Node) -> _Weighted | None:
    dims = val(anchor).dim()
    todo: list[tuple[fx.Node, Axes, dict[str, Any]]] = [(anchor, algebra.batch_axes(anchor), {})]
    for node, axes, seen in _limited(todo):
        for user in node.users:
            if algebra.is_backward(user):
                continue
            if algebra.is_op(user, aten.bmm, aten.mm):
                transposed = user.args[0] is not node
                shape = [*range(dims - 2), *((dims - 1, dims - 2) if transposed else (dims - 2, dims - 1))]
                long = [d for d in shape if not algebra.same_size(val(anchor).shape[d], 1)]
                flat = [d for axis in algebra.axis_dims(axes) for d in axis]
                if flat == long and _is_contracted(axes, 1 if transposed else len(axes) - 1, dims - 1, anchor):
                    return _Weighted(user, transposed, **seen)
            elif algebra.is_cast(user):
                todo.append((user, axes, {**seen, "types": (*seen.get("types", ()), algebra.dtype_of(user))}))
            elif algebra.is_view(user):
                after = algebra.axes_after(user, axes)
                if after is not None:
                    todo.append((user, after, seen))
            elif algebra.zeroed_empty_rows(user) is node:
                todo.append((user, axes, {**seen, "safe": True}))
            elif algebra.is_op(user, aten.mul) and (_is_kept(user, node) or seen.get("dropout")):
                todo.append((user, axes, {**seen, "dropout": True}))
            elif algebra.is_op(user, aten.slice) and algebra.argument(user, "dim") in (-1, len(axes) - 1):
                cut = [*axes[:-1], [algebra.Atom(dims - 1, val(user).shape[-1])]]
                todo.append((user, cut, {**seen, "cut": True}))
    return None


def _limited(todo: list) -> Iterator[Any]:
    """The items of a growing list, up to a bound."""
    for index in range(_MAX_STEPS):
        if index == len(todo):
            return
        yield todo[index]


def _is_contracted(axes: Axes, axis: int, dim: int, anchor: fx.Node) -> bool:
    """Whether the product sums over dimension ``dim`` of the probabilities, which is their last."""
    return [a.dim for a in axes[axis]] == ([] if algebra.same_size(val(anchor).shape[dim], 1) else [dim])


def _is_kept(product: fx.Node, probabilities: fx.Node) -> bool:
    """Whether ``product`` is ``probabilities`` times a mask, as dropout multiplies."""
    for a, b in algebra.commuted(product):
        if a is probabilities and isinstance(b, fx.Node):
            return torch.bool in (algebra.dtype_of(b), algebra.dtype_of(b.args[0]) if algebra.is_cast(b) else None)
    return False


# ------------------------------------------------------------------------------------- from the product to the softmax

_PRODUCTS = (aten.bmm, aten.baddbmm, aten.mm, aten.addmm)


def _trail(x: Any, known: dict[fx.Node, list[fx.Node] | None]) -> list[fx.Node] | None:
    """The nodes from ``x`` back to the product of queries and keys, both included."""
    if not isinstance(x, fx.Node) or len(known) > _MAX_STEPS:
        return None
    if x not in known:
        known[x] = [x] if algebra.is_op(x, *_PRODUCTS) else None
        for operand in _operands(x):
            rest = _trail(operand, known)
            if rest is not None:
                known[x] = [x, *rest]
                break
    return known[x]


def _operands(x: fx.Node) -> list[fx.Node]:
    """The operands of ``x`` that may be the scores."""
    if algebra.is_view(x) or algebra.is_cast(x) or algebra.is_op(x, aten.tanh, aten.masked_fill):
        return [x.args[0]]
    if algebra.is_op(x, aten.cat):
        return list(x.args[0])
    operands = []
    if algebra.is_op(x, aten.add, aten.mul):
        operands = x.args[:2]
    elif algebra.is_op(x, aten.sub) or algebra.is_quotient(x):
        operands = x.args[:1]
    elif algebra.is_op(x, aten.where):
        operands = x.args[1:]
    tensors = [o for o in operands if algebra.dtype_of(o) is not None]
    return [o for o in tensors if algebra.same_shape(val(o).shape, val(x).shape)]


def _transforms(node: fx.Node, inner: fx.Node, product: fx.Node) -> bool:
    """Whether ``node`` combines the scores with something made of them, as an activation function does."""
    others = [n for n in node.all_input_nodes if n is not inner and algebra.dtype_of(n) is not None]
    if algebra.is_op(node, aten.mul) and node.args[0] is node.args[1]:
        return True
    if algebra.is_op(node, aten.add, aten.sub):
        others = [n for n in others if not algebra.is_per_row(n)]
    return any(_depends(n, product) for n in others)


def _depends(node: fx.Node, product: fx.Node) -> bool:
    made = {product, *algebra.between(product, node)}
    return node in made or any(n in made for n in node.all_input_nodes)


_NOTHING = algebra.Bounds(0, 0)


@dataclasses.dataclass
class _Scores:
    """``scale * factors * (q @ k^T) + bias``; the bias is laid out as the scores ``[*lead, L, S]``."""

    lead: tuple[Any, ...]
    lead_args: tuple[Any, ...] | None
    scale: float = 1.0
    factors: list[tuple[torch._ops.OpOverload, fx.Node]] = dataclasses.field(default_factory=list)
    bias: Any = None
    filled: float | None = None
    bounds: algebra.Bounds = _NOTHING
    """Of all that was added to the products or put in their place, with what no softmax sees."""
    has_terms: bool = False
    """Whether a tensor has met the scores, in the order of dimensions that they had there."""

    def limit(self, bounds: algebra.Bounds, *dtypes: torch.dtype) -> None:
        """Check that what was added is finite in ``dtypes``, and in the operator's float32."""
        self.bounds = functools.reduce(algebra.Bounds.within, (*dtypes, torch.float32), bounds)
        if not self.bounds.finite:
            raise Unmatched("the masks may overflow to -inf: a row without keys is NaN here and not in the operator")

    def multiply(self, number: float, dtype: torch.dtype) -> None:
        """Multiply by a number; the result is rounded to ``dtype``."""
        if number != 1:
            self.check_not_filled()
        self.scale *= number
        if self.bias is not None and number != 1:
            self.bias = Call(aten.mul.Tensor, (self.bias, number))
            self.limit(self.bounds * algebra.bounds(number), dtype, self.bias.value.dtype)

    def factor(self, op: torch._ops.OpOverload, node: fx.Node, shape: Any, dtype: torch.dtype) -> None:
        """Multiply (or divide) by a tensor that has one value for each row of the scores."""
        self.check_not_filled()
        if not algebra.is_per_row(node):
            raise Unmatched("the scores are multiplied by a tensor along the keys")
        if val(node).dim() > 2 and len(shape) != len(self.lead) + 2:
            raise Unmatched("the scores are multiplied by a tensor where batch and heads are one dimension")
        self.factors.append((op, node))
        if self.bias is not None:
            self.bias = Call(op, (self.bias, node))
            factor = algebra.parameter_bounds(node)
            product = self.bounds / factor if op is aten.div.Tensor else self.bounds * factor
            self.limit(product, dtype, self.bias.value.dtype)

    def add(self, term: Any, weight: float, shape: Any, dtype: torch.dtype) -> None:
        """Add a tensor or a number, times a number, to scores that have ``shape`` and ``dtype`` at that place."""
        added = algebra.bounds(term)
        if not added.finite:
            raise Unmatched("the mask may hold -inf: a row without keys is NaN here and zero in the operator")
        added *= algebra.bounds(weight)
        if algebra.scalar(term) is not None or algebra.dtype_of(term) is None or algebra.is_per_row(term):
            self.limit(self.bounds + added, dtype)
            return  # no softmax sees it
        if self.filled is not None and self.filled > _FILL:
            self.check_one_mask(added)
        self.limit(self.bounds + added.within(val(term).dtype), dtype)
        term = self.laid_out(term if weight == 1 else Call(aten.mul.Tensor, (term, weight)), shape)
        if self.bias is not None:
            wide = [Call(prims.convert_element_type.default, (t, torch.float32)) for t in (self.bias, term)]
            term = Call(aten.add.Tensor, tuple(wide))
        self.bias = term

    def fill(self, drop: Any, value: float, shape: Any, dtype: torch.dtype) -> None:
        """Make the scores negligible where ``drop`` is true: there they are ``value``."""
        value = algebra.bounds(value).within(dtype).low
        if value > _FILL:
            self.check_one_mask(self.bounds)
        self.limit(self.bounds.hull(algebra.bounds(value)), dtype)
        self.filled = value if self.filled is None else max(value, self.filled)
        value = min(value, _FILL)
        drop = self.laid_out(drop, shape)
        if self.bias is None:
            wide = Call(prims.convert_element_type.default, (drop, torch.float32))
            self.bias = Call(aten.mul.Tensor, (wide, value))
        else:
            wide = Call(prims.convert_element_type.default, (self.bias, torch.float32))
            self.bias = Call(aten.where.ScalarSelf, (drop, value, wide))

    def check_not_filled(self) -> None:
        if self.filled is not None:
            raise Unmatched("masked scores are scaled after they were replaced")

    def check_one_mask(self, other: algebra.Bounds) -> None:
        """A row that two masks share out has the greater of their numbers, and not all numbers are kept."""
        if not other.is_small:
            raise Unmatched("masked scores are replaced by a number that is not beyond those of another mask")

    def laid_out(self, term: Any, shape: Any) -> Any:
        """``term``, which broadcasts to ``shape``, such that it broadcasts to ``[*lead, L, S]``."""
        sizes = _size(term)
        rank = len(self.lead) + 2
        if len(shape) == rank or len(sizes) <= 2:
            return algebra.strip_expand(term, min_dims=2) if isinstance(term, fx.Node) else term
        if len(shape) != 3 or rank != 4:
            raise Unmatched(f"a term of the scores has {len(sizes)} dimensions, the softmax {rank}")
        lead = (1, 1) if algebra.same_size(sizes[0], 1) else self.known_lead()
        if not all(isinstance(s, int) for s in sizes[2:]):
            row, column = (1, -1) if algebra.same_size(sizes[1], 1) else (sizes[1], -1)
        else:
            row, column = -1, sizes[2]
        if not isinstance(row, int):
            raise Unmatched("a term of the scores has batch and heads in one dimension and symbolic sizes")
        return Call(aten.view.default, (term, [*lead, row, column]))

    def known_lead(self) -> tuple[Any, ...]:
        if self.lead_args is None:
            raise Unmatched("batch and heads are one dimension, and their sizes are not known")
        return self.lead_args


def _size(x: Any) -> Any:
    return val(x).shape if isinstance(x, fx.Node) else x.value.shape


def _stage(scores: fx.Node) -> fx.Node:
    """The scores where they last had four dimensions, if only a view of three goes into the softmax."""
    node = scores
    while val(node).dim() != 4:
        if not (algebra.is_view(node) or algebra.is_cast(node)):
            return scores
        node = node.args[0]
    return node


def _lead_args(lead: tuple[Any, ...], trail: list[fx.Node]) -> tuple[Any, ...] | None:
    """``lead`` as arguments for a view: numbers, or nodes that a view in the graph has."""
    if all(isinstance(s, int) for s in lead):
        return lead
    for node in trail:
        if algebra.is_op(node, aten.view, aten.reshape) and algebra.same_shape(val(node).shape[:-2], lead):
            return tuple(node.args[1][: len(lead)])
    return None


def _follow(trail: list[fx.Node], scores: _Scores, bound: dict[str, Any]) -> None:
    """Collect what happens to the product on its way to the softmax."""
    product = trail[-1]
    if algebra.is_op(product, aten.baddbmm):
        beta, alpha = algebra.argument(product, "beta"), algebra.argument(product, "alpha")
        scores.scale = float(alpha)
        if beta != 0:
            scores.has_terms = True
            scores.add(product.args[0], beta, val(product).shape, val(product).dtype)
    for node, inner in zip(reversed(trail[:-1]), reversed(trail[1:]), strict=True):
        _step(node, inner, scores, bound)


def _step(node: fx.Node, inner: fx.Node, scores: _Scores, bound: dict[str, Any]) -> None:
    dtype = val(node).dtype
    if algebra.is_view(node) or algebra.is_cast(node):
        moved = algebra.is_op(node, *algebra.PERMUTES) or not algebra.same_size(
            val(node).shape[-1], val(inner).shape[-1]
        )
        if moved and scores.has_terms:
            raise Unmatched("the scores are transposed behind a mask, a bias or a scale")
        scores.limit(scores.bounds, dtype)
        return
    if algebra.is_op(node, aten.tanh):
        bound["softcap"] = algebra.scalar(inner.args[1]) if algebra.is_op(inner, aten.div) else True
        raise Unmatched("the scores are capped by tanh, which the operator does not do")
    if algebra.is_op(node, aten.cat):
        bound["sinks"] = True
        raise Unmatched("attention sinks stand beside the scores, which the operator does not have")
    scores.has_terms |= len([n for n in node.all_input_nodes if algebra.dtype_of(n) is not None]) > 1
    if algebra.is_op(node, aten.where, aten.masked_fill):
        _fill(node, inner, scores)
        return
    other = node.args[1] if node.args[0] is inner else node.args[0]
    if algebra.is_op(node, aten.mul, aten.div):
        _scale(node, other, scores)
        return
    if _trail(other, {}) is not None:
        raise Unmatched("the scores are a sum of several products")
    weight = node.kwargs.get("alpha", 1)
    if node.args[1] is inner:  # alpha multiplies the second operand
        scores.multiply(weight, dtype)
        weight = 1
    scores.add(other, -weight if algebra.is_op(node, aten.sub) else weight, val(node).shape, dtype)


def _scale(node: fx.Node, other: Any, scores: _Scores) -> None:
    """``mul`` or ``div`` by a number or a tensor."""
    number = algebra.scalar(other)
    divides = algebra.is_op(node, aten.div)
    if number is not None:
        if divides and number == 0:
            raise Unmatched("the scores are divided by zero")
        scores.multiply(1.0 / number if divides else number, val(node).dtype)
        return
    if algebra.dtype_of(other) is None:
        raise Unmatched("the scale is a symbolic number")
    if _trail(other, {}) is not None:
        raise Unmatched("the scores are multiplied by scores")
    op = aten.div.Tensor if divides else aten.mul.Tensor
    scores.factor(op, other, val(node).shape, val(node).dtype)


def _fill(node: fx.Node, inner: fx.Node, scores: _Scores) -> None:
    """``where`` or ``masked_fill`` with a number that makes a score negligible."""
    condition, first, second = node.args if algebra.is_op(node, aten.where) else (node.args[1], node.args[2], inner)
    value = _constant(second if first is inner else first)
    if value is None:
        raise Unmatched("the scores are replaced by a tensor where they are masked")
    if value == -math.inf:
        raise Unmatched("the mask holds -inf: a row without keys is NaN here and zero in the operator")
    if value > _ABSORBING:
        raise Unmatched(f"masked scores are {value:g}, which may still weigh beside the others")
    drop = Call(aten.logical_not.default, (condition,)) if first is inner else condition
    scores.fill(drop, value, val(node).shape, val(node).dtype)


def _constant(x: Any) -> float | None:
    """The number that ``x`` is, up to the rounding of its type."""
    x = algebra.strip_aliases(x)
    while algebra.is_cast(x) or algebra.is_op(x, aten.expand, aten.view):
        x = algebra.strip_aliases(x.args[0])
    if algebra.is_op(x, aten.full, aten.scalar_tensor):
        x = x.args[1 if algebra.is_op(x, aten.full) else 0]
    return float(x) if isinstance(x, int | float) else None


# ---------------------------------------------------------------------------------------------------- putting together


def _build(anchor: fx.Node, trail: list[fx.Node], weighted: _Weighted, bound: dict[str, Any]) -> Match:
    if weighted.cut and not any(algebra.is_op(n, aten.cat) for n in trail):
        raise Unmatched("only a part of the probabilities is used")
    stage = _stage(trail[0])
    rank = val(stage).dim()
    lead = tuple(val(stage).shape[:-2])
    scores = _Scores(lead, _lead_args(lead, trail))
    _follow(trail, scores, bound)
    transposed = _transposed(trail[trail.index(stage) :], rank)
    if weighted.dropout:
        raise Unmatched("the probabilities have dropout, which the kernels have not")
    if rank not in (3, 4):
        raise Unmatched(f"the scores have {rank} dimensions, not batch, heads, queries and keys")
    out, out_dims = _result(weighted, lead)

    query, key = trail[-1].args[-2:] if not transposed else reversed(trail[-1].args[-2:])
    value = weighted.product.args[1]
    dtype = val(value).dtype
    q, q_scale = _narrowed(_operand(query, scores, swap=transposed), dtype)
    k, k_scale = _narrowed(_operand(key, scores, swap=not transposed), dtype)
    v = _operand(value, scores, swap=False)
    if _dtype(q) != dtype or _dtype(k) != dtype:
        raise Unmatched(f"the scores are computed in {_dtype(q)}, the result in {dtype}")
    _check_rounding(anchor, trail, weighted, dtype)
    for op, node in scores.factors:
        q = Call(op, (q, node))
        if q.value.dtype != dtype:
            q = Call(prims.convert_element_type.default, (q, dtype))

    scale = scores.scale * q_scale * k_scale
    bound |= {"is_causal": False, "scale": scale, "repeat_kv": 1}
    inner = [*trail, *algebra.between(trail[-1], out), *_views(query, q), *_views(key, k), *_views(value, v)]
    q, k, v = map(_plain, (q, k, v))
    repeats = None
    if isinstance(k, fx.Node) and isinstance(v, fx.Node):
        repeats = algebra.repeated_heads(val(q) if isinstance(q, fx.Node) else q.value, k, v)
    if repeats is not None:
        inner += [k, v]
        k, v = (Permuted(r.base, r.order) for r in repeats)
        bound["repeat_kv"] = repeats[0].groups
    mask = scores.bias
    if mask is not None:
        value = val(mask) if isinstance(mask, fx.Node) else mask.value
        if value.dtype not in (torch.float32, dtype):
            mask = Call(prims.convert_element_type.default, (mask, torch.float32))
        bound["mask"] = f"{value.dtype} {list(value.shape)}"
    order = algebra.dense_order(val(out).permute(out_dims))
    if order is None:
        raise Unmatched("the last dimension of the result is not the innermost one in memory")
    args = {"q": q, "k": k, "v": v, "attn_mask": mask, "is_causal": False, "scale": scale}
    args |= {"enable_gqa": repeats is not None, "out_order": list(order)}
    own = tuple(n for n in dict.fromkeys(inner) if n is not out)
    order = out_dims if out_dims != tuple(range(rank)) else None
    return Match("eager_attention", "attention", anchor, ATTENTION, args, (out,), own, bound, order)


def _check_rounding(anchor: fx.Node, trail: list[fx.Node], weighted: _Weighted, dtype: torch.dtype) -> None:
    """The operator computes in float32 and rounds the probabilities to ``dtype``, that of the values: to no less."""
    scores = [val(n).dtype for n in trail]
    for what, types in (("scores", scores), ("probabilities", [val(anchor).dtype, *weighted.types])):
        narrow = next((t for t in types if not algebra.holds(t, dtype)), None)
        if narrow is not None:
            raise Unmatched(f"the {what} are rounded to {narrow}, which does not hold the values' {dtype}")


def _transposed(trail: list[fx.Node], rank: int) -> bool:
    """Whether the product is that of keys and queries: its rows are the keys."""
    axes: Axes | None = algebra.batch_axes(trail[0])
    for node in trail[:-1]:
        if algebra.is_view(node) and axes is not None:
            axes = algebra.axes_before(node, axes)
    if axes is None or len(axes) != 3:
        raise Unmatched("the scores are regrouped between the product and the softmax")
    long = [d for d in range(rank) if not algebra.same_size(val(trail[0]).shape[d], 1)]
    lead = [d for d in long if d < rank - 2]
    rows, columns = ([d for d in long if d == rank - 2], [d for d in long if d == rank - 1])
    dims = algebra.axis_dims(axes)
    if dims not in ([lead, rows, columns], [lead, columns, rows]):
        raise Unmatched("the scores are regrouped between the product and the softmax")
    return dims != [lead, rows, columns]


def _result(weighted: _Weighted, lead: tuple[Any, ...]) -> tuple[fx.Node, tuple[int, ...]]:
    """The node that is the result, and the order of its dimensions in which it is ``[*lead, queries, head_dim]``."""
    if weighted.transposed:
        raise Unmatched("the result has head_dim before the queries, the operator behind them")
    found = algebra.reflattened(weighted.product, lead)
    if found is None:
        raise Unmatched("the result is used with batch and heads in one dimension")
    return found


def _operand(x: fx.Node, scores: _Scores, swap: bool) -> Permuted | Call:
    """The factor ``x`` of a batched product as ``[*lead, length, head_dim]``."""
    found = algebra.unflattened(x, scores.lead, swap)
    if found is not None:
        return Permuted(*found)
    split = Call(aten.view.default, (x, [*scores.known_lead(), -1, val(x).shape[-1]]))
    if not isinstance(val(x).shape[-1], int):
        split = Call(aten.view.default, (x, [*scores.known_lead(), val(x).shape[-2], -1]))
    if not all(isinstance(s, int) or s == -1 for s in split.args[1][-2:]):
        raise Unmatched("batch and heads are one dimension, and other sizes are symbolic")
    return Call(aten.permute.default, (split, [0, 1, 3, 2])) if swap else split


def _narrowed(x: Permuted | Call, dtype: torch.dtype) -> tuple[Permuted | Call, float]:
    """``x`` before it was converted to a wider type than ``dtype``, and the factor that it got there."""
    if not isinstance(x, Permuted) or val(x.node).dtype == dtype:
        return x, 1.0
    node, scale = algebra.strip_upcast(x.node), 1.0
    while algebra.is_op(node, aten.mul, aten.div) and algebra.scalar(node.args[1]):
        if node.kwargs.get("rounding_mode"):
            break
        number = algebra.scalar(node.args[1])
        scale *= number if algebra.is_op(node, aten.mul) else 1.0 / number
        node = algebra.strip_upcast(node.args[0])
    return (Permuted(node, x.order), scale) if val(node).dtype == dtype else (x, 1.0)


def _views(factor: fx.Node, operand: Permuted | Call) -> Iterator[fx.Node]:
    """The views between what the operator reads and a factor of a product."""
    while isinstance(operand, Permuted) and factor is not operand.node:
        yield factor
        factor = factor.args[0]


def _dtype(x: Permuted | Call) -> torch.dtype:
    return val(x.node).dtype if isinstance(x, Permuted) else x.value.dtype


def _plain(x: Any) -> Any:
    """The node itself where nothing is permuted."""
    return x.node if isinstance(x, Permuted) and x.order == tuple(range(len(x.order))) else x


def _is_anchor(node: fx.Node) -> bool:
    if algebra.is_op(node, aten._softmax, aten._safe_softmax, aten.softmax):
        return True
    if algebra.is_op(node, aten.div, aten.mul):
        return any(algebra.is_op(algebra.strip_aliases(a), aten.exp) for a in node.args[:2])
    return algebra.is_op(node, aten.exp) and algebra.is_op(algebra.strip_casts(node.args[0]), aten.sub)


EAGER_ATTENTION_PATTERN = Pattern("eager_attention", "attention", _is_anchor, match)
