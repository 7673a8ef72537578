"""RMSNorm, with or without a residual add in front.

Matches, in any spelling that the algebra knows (commuted, cast, viewed, ``sqrt``/``div``, ``sum``/N)::

    h = x                                    # or h = x + residual
    n = h.float() * rsqrt(mean(h.float() ** 2, -1, keepdim=True) + eps)
    y = [cast](n) [* [cast](weight [+ offset])] [+ bias]

and, where no short type rounds in between, the weight first: ``(weight * h) * rsqrt(...)``, ``h * (weight * rsqrt())``.
Of a grouped norm the weight may stand behind the view that merges groups and columns again.  What gates a norm,
``norm(x) * silu(z)``, stays behind it, and ``x * silu(z)`` or whatever else scales the input in front.

Replaces with ``portable_ops::rms_norm`` or, with a residual, ``portable_ops::add_rms_norm``, which also returns h.

Where the rows lie in another order in memory than in the shape (heads that were transposed before they are
normalised), the operator reads and writes them in memory's order, between two permutes.

Declines when: the mean is not over the last dimension only; the squares, their mean or its inverse root are not
computed in float32 (the rounding would differ); a root that something is divided by is rounded; the weight is
multiplied first and that product rounded; a mean is subtracted (LayerNorm); there is no mean (L2 norm).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..kernels.rms_norm import ADD_RMS_NORM, RMS_NORM
from . import algebra
from .algebra import aten
from .match import Match, Pattern, Permuted, Unmatched, val


def match(anchor: fx.Node) -> Match | None:
    """Match the RMSNorm whose inverse root mean square ``anchor`` computes."""
    radicand = algebra.inverse_square_root(anchor)
    divides = radicand is None
    if divides:
        radicand = algebra.square_root(anchor)
    if radicand is None:
        return None
    found = _mean_of_squares(radicand)
    if found is None:
        return None
    square, eps = found
    try:
        return _match(anchor, square, eps, divides)
    except Unmatched as reason:
        raise Unmatched(str(reason), square, *reason.seen) from None


def _match(anchor: fx.Node, square: fx.Node, eps: float | fx.Node, divides: bool) -> Match:
    computed = algebra.squared(square)
    h = algebra.strip_upcast(computed)
    if algebra.dtype_of(computed) != torch.float32:
        raise Unmatched(f"the squares are computed in {algebra.dtype_of(computed)}, not float32")
    if algebra.is_op(h, aten.sub) and algebra.is_op(algebra.strip_upcast(h.args[1]), aten.mean):
        raise Unmatched("a difference is normalised, as LayerNorm does with its mean")
    if algebra.dtype_of(anchor) != torch.float32:
        raise Unmatched(f"the inverse root is computed in {algebra.dtype_of(anchor)}, not float32")
    normalised = _normalised(anchor, h, divides)
    if not algebra.same_shape(val(normalised.node).shape, val(h).shape):
        raise Unmatched("the root is broadcast to more rows than were normalised", normalised.node)
    return _build(anchor, h, eps, _follow(normalised))


def _mean_of_squares(radicand: Any) -> tuple[fx.Node, float | fx.Node] | None:
    """The squares under the root and eps; None where the root is of something unrelated (an optimizer, say)."""
    shifted = algebra.plus_scalar(algebra.strip_aliases(radicand))
    mean, eps = shifted if shifted is not None else (radicand, 0.0)
    mean = algebra.strip_upcast(mean)
    square = algebra.last_dim_mean(mean)
    if square is None:
        if algebra.last_dim_sum(mean) is not None:
            raise Unmatched("a sum of squares is not divided by their number: an L2 norm", mean)
        if algebra.is_variance(mean):
            raise Unmatched("a variance stands under the root, as in LayerNorm: RMSNorm subtracts no mean", mean)
        if algebra.is_op(mean, aten.mean):
            squares = [n for n in mean.all_input_nodes if algebra.squared(n) is not None]
            raise Unmatched("the mean is not over the last dimension alone with keepdim=True", mean, *squares)
        if algebra.is_cast(mean) and algebra.last_dim_mean(mean.args[0]) is not None:
            raise Unmatched(f"the mean is rounded to {algebra.dtype_of(mean)} before its root is taken", mean.args[0])
        return None
    if not algebra.holds(algebra.dtype_of(mean), algebra.dtype_of(square)):
        raise Unmatched(
            f"the mean is computed in {algebra.dtype_of(mean)}, its squares in {algebra.dtype_of(square)}", mean, square
        )
    square = algebra.strip_upcast(square)
    if algebra.squared(square) is None:
        raise Unmatched("the mean is not of squares", mean)
    return square, eps


@dataclasses.dataclass(frozen=True)
class _Normalised:
    """``node`` is ``h * root.to(root_dtype)``, times ``factor`` where the weight was multiplied in on the way."""

    node: fx.Node
    root_dtype: torch.dtype | None = None
    factor: fx.Node | None = None


def _normalised(anchor: fx.Node, h: fx.Node, divides: bool) -> _Normalised:
    """What the inverse root ``anchor`` makes of ``h`` (the root, if ``divides``)."""
    if divides:
        for user in algebra.readers(anchor):
            if algebra.is_quotient(user) and algebra.strip_upcast(user.args[0]) is h:
                return _Normalised(user)
    roots = {u: val(u).dtype for u in algebra.readers(anchor) if algebra.is_cast(u)}
    for root, dtype in {anchor: None, **roots}.items() if not divides else ():
        for node, factor, exact in _scaled(root, h):
            if factor is None:
                return _Normalised(node, dtype)
            if not exact or dtype is not None:
                raise Unmatched("the weight is multiplied in first and its product rounded", node)
            return _Normalised(node, None, factor)
    if roots:
        raise Unmatched(f"the root is rounded to {next(iter(roots.values()))} before it is used")
    shifted = [user for user in algebra.readers(anchor) if algebra.plus_scalar(user) is not None]
    if shifted:
        raise Unmatched("eps is added to the root, not to the mean under it", *shifted)
    raise Unmatched("the value that is normalised is not the one whose squares were averaged")


def _scaled(root: fx.Node, h: fx.Node) -> Iterator[tuple[fx.Node, fx.Node | None, bool]]:
    """Products of ``h`` and ``root``, each with the weight that is in it already, and whether nothing was rounded."""
    hidden_size = val(h).shape[-1]
    for user in algebra.readers(root):
        for other, scale in algebra.commuted(user) if algebra.is_op(user, aten.mul) else ():
            if algebra.strip_aliases(scale) is not root or not isinstance(other, fx.Node):
                continue
            product = algebra.strip_upcast(other)
            if product is h:
                yield user, None, True
            elif _is_vector(other, hidden_size):
                for outer in algebra.readers(user):
                    if algebra.is_op(outer, aten.mul) and any(algebra.strip_upcast(a) is h for a in outer.args):
                        yield outer, other, val(user).dtype == torch.float32
            elif algebra.is_op(product, aten.mul):
                for a, factor in algebra.commuted(product):
                    if algebra.strip_upcast(a) is h and _is_vector(factor, hidden_size):
                        yield user, factor, val(product).dtype == torch.float32


@dataclasses.dataclass
class _Tail:
    """What happens to the normalised value: the node reached so far and the rounding points on the way."""

    node: fx.Node
    nodes: list[fx.Node]
    norm_dtype: torch.dtype = torch.float32
    product_dtype: torch.dtype | None = None
    weight: fx.Node | None = None
    weight_dtype: torch.dtype | None = None
    offset: float = 0.0
    bias: fx.Node | None = None
    root_dtype: torch.dtype | None = None
    view: fx.Node | None = None

    def advance(self, node: fx.Node) -> None:
        self.node = node
        self.nodes.append(node)


def _follow(normalised: _Normalised) -> _Tail:
    """Follow the normalised value through a cast, the weight, the bias and a last cast, as far as they go."""
    node = normalised.node
    hidden_size = val(node).shape[-1]
    tail = _Tail(node, [node], norm_dtype=val(node).dtype, root_dtype=normalised.root_dtype)
    if normalised.factor is not None:
        _take_weight(tail, node, normalised.factor)
        if tail.weight is None:
            raise Unmatched("what is multiplied in first is no vector of weights", node)
    else:
        if tail.norm_dtype == torch.float32:  # else it is rounded, and a cast would be another rounding point
            _take_cast(tail, hidden_size)
            tail.norm_dtype = val(tail.node).dtype
        weighted = _product_with_vector(tail.node, hidden_size)
        if weighted is None:
            return _behind_a_view(tail)
        _take_weight(tail, weighted, _vector(weighted, tail.node, hidden_size))
    _take_cast(tail, hidden_size)
    tail.product_dtype = val(tail.node).dtype
    biased = _only(u for u in tail.node.users if algebra.is_op(u, aten.add) and _vector(u, tail.node, hidden_size))
    if biased is not None and biased.kwargs.get("alpha", 1) == 1 and _scale_of(biased, tail, hidden_size):
        tail.bias = _scale_of(biased, tail, hidden_size)
        tail.advance(biased)
        _take_cast(tail, hidden_size)
    return tail


def _product_with_vector(x: fx.Node, size: Any) -> fx.Node | None:
    return _only(u for u in x.users if algebra.is_op(u, aten.mul) and _vector(u, x, size))


def _behind_a_view(tail: _Tail) -> _Tail:
    """``tail`` with a weight that stands behind a view: over the columns, or over groups and columns together."""
    x = tail.node
    merged = _only(x.users)
    if merged is None or not algebra.is_reshape(merged) or not _is_contiguous(x) or not _is_contiguous(merged):
        return tail
    *_, groups, hidden_size = (1, *val(x).shape)
    size = val(merged).shape[-1]
    if not (algebra.same_size(size, hidden_size) or algebra.same_size(size, groups * hidden_size)):
        return tail
    behind = dataclasses.replace(tail, node=merged, nodes=[*tail.nodes, merged], view=merged)
    if behind.norm_dtype == torch.float32:
        _take_cast(behind, size)
        behind.norm_dtype = val(behind.node).dtype
    weighted = _product_with_vector(behind.node, size)
    if weighted is None:
        return tail
    _take_weight(behind, weighted, _vector(weighted, behind.node, size))
    if behind.weight is None:
        return tail
    _take_cast(behind, size)
    behind.product_dtype = val(behind.node).dtype
    return behind


def _is_contiguous(x: fx.Node) -> bool:
    return algebra.dense_order(val(x)) == tuple(range(val(x).dim()))


def _take_cast(tail: _Tail, hidden_size: Any) -> None:
    """Move over a cast if it is the only way on: not where the uncast value meets a weight or bias as well."""
    cast = _only(u for u in tail.node.users if algebra.is_cast(u) and algebra.is_float(val(u).dtype))
    scaled = any(_vector(u, tail.node, hidden_size) for u in tail.node.users if algebra.is_op(u, aten.mul, aten.add))
    if cast is not None and not scaled:
        tail.advance(cast)


def _vector(node: fx.Node, x: fx.Node, hidden_size: Any) -> fx.Node | None:
    """The operand of ``node`` beside ``x`` if it is a vector over the hidden dimension."""
    for a, b in algebra.commuted(node):
        if a is x and _is_vector(b, hidden_size):
            return b
    return None


def _is_vector(x: Any, hidden_size: Any) -> bool:
    """Whether ``x`` has one element for each column, whatever the row."""
    if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), torch.Tensor) or val(x).dim() == 0:
        return False
    *leading, last = val(x).shape
    ones = all(algebra.same_size(s, 1) for s in leading)
    return ones and algebra.same_size(last, hidden_size) and not algebra.same_size(hidden_size, 1)


def _scale_of(node: fx.Node, tail: _Tail, hidden_size: Any) -> fx.Node | None:
    """A bias is taken as it stands: a cast would be another rounding point."""
    vector = _vector(node, tail.node, hidden_size)
    return vector if vector is not None and val(vector).dim() == 1 else None


def _take_weight(tail: _Tail, product: fx.Node, factor: fx.Node) -> None:
    for weight, weight_dtype, offset in _weight_forms(factor):
        # The operator multiplies in the type to which torch promotes its factors.
        promoted = torch.promote_types(tail.norm_dtype, weight_dtype)
        if promoted == val(product).dtype and val(weight).dim() == 1:
            tail.weight, tail.weight_dtype, tail.offset = weight, weight_dtype, offset
            tail.advance(product)
            return


def _weight_forms(factor: fx.Node) -> Iterator[tuple[fx.Node, torch.dtype, float]]:
    """Ways to write ``factor`` as ``weight.to(dtype) + offset``, the one that takes over most first."""
    weight = algebra.as_vector(factor)
    shifted = algebra.plus_scalar(weight)
    for dtype in dict.fromkeys((val(weight).dtype, val(factor).dtype)):
        if shifted is not None and isinstance(shifted[1], float) and dtype == val(weight).dtype:
            yield algebra.as_vector(_uncast(shifted[0], dtype)), dtype, shifted[1]
        yield algebra.as_vector(_uncast(weight, dtype)), dtype, 0.0
    yield factor, val(factor).dtype, 0.0


def _uncast(weight: fx.Node, dtype: torch.dtype) -> fx.Node:
    """``weight`` before a cast down to ``dtype``, which the operator makes itself."""
    source = weight.args[0] if algebra.is_cast(weight) and val(weight).dtype == dtype else weight
    return source if algebra.is_float(val(source).dtype) else weight


def _only(nodes: Any) -> fx.Node | None:
    """The single element of ``nodes``; None if there are none or several to choose from."""
    found = list(nodes)
    return found[0] if len(found) == 1 else None


def _build(anchor: fx.Node, h: fx.Node, eps: float | fx.Node, tail: _Tail) -> Match:
    out_dtype = val(tail.node).dtype
    inner = algebra.between(h, tail.node)
    args: dict[str, Any] = {
        "x": h,
        "weight": tail.weight,
        "bias": tail.bias,
        "eps": eps if isinstance(eps, float) else 0.0,
        "eps_tensor": None if isinstance(eps, float) else eps,
        "weight_offset": tail.offset,
        "weight_dtype": tail.weight_dtype or torch.float32,
        "norm_dtype": tail.norm_dtype,
        "product_dtype": tail.product_dtype or tail.norm_dtype,
        "out_dtype": out_dtype,
        "root_dtype": tail.root_dtype,
    }
    bound = {k: v for k, v in args.items() if k not in ("x", "weight", "bias", "eps_tensor") and v is not None}
    order = algebra.dense_order(val(tail.node))
    if order is None:
        if not algebra.strided_columns(val(h)):
            raise Unmatched("the result has gaps in memory", tail.node)
        order = tuple(range(val(h).dim()))  # the operator declines such rows
    if order != tuple(range(len(order))):
        args["x"] = Permuted(h, order)
        return Match("rms_norm", "rms_norm", anchor, RMS_NORM, args, (tail.node,), inner, bound, order)
    summands = _residual(h)
    if summands is None:
        return Match("rms_norm", "rms_norm", anchor, RMS_NORM, args, (tail.node,), inner, bound, view=tail.view)
    args = {"x": summands[0], "residual": summands[1], **{k: v for k, v in args.items() if k != "x"}}
    return Match("add_rms_norm", "rms_norm", anchor, ADD_RMS_NORM, args, (tail.node, h), inner, bound, view=tail.view)


def _residual(h: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two summands if ``h`` is a residual sum that the kernel can take over."""
    if not algebra.is_op(h, aten.add) or h.kwargs.get("alpha", 1) != 1:
        return None
    if algebra.dense_order(val(h)) != tuple(range(val(h).dim())):
        return None
    a, b = h.args[0], h.args[1]
    if not all(isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.Tensor) for n in (a, b)):
        return None
    if not algebra.same_shape(val(a).shape, val(b).shape):
        return None
    return a, b


_ROOTS = (aten.rsqrt, aten.pow, aten.reciprocal, aten.div, aten.sqrt)


def _is_anchor(node: fx.Node) -> bool:
    if not algebra.is_op(node, *_ROOTS):
        return False
    if algebra.inverse_square_root(node) is not None:
        return True
    # A bare square root counts where something is divided by it (but `1 / sqrt` is an anchor of its own).
    if algebra.square_root(node) is None:
        return False
    roots = {node, *(u for u in node.users if algebra.is_cast(u))}
    roots |= {u for r in roots for u in r.users if algebra.plus_scalar(u) is not None}  # eps in the wrong place
    divided = (u for r in roots for u in r.users if algebra.is_quotient(u) and u.args[1] is r)
    return any(algebra.inverse_square_root(u) is None for u in divided)


RMS_NORM_PATTERN = Pattern("rms_norm", "rms_norm", _is_anchor, match)
