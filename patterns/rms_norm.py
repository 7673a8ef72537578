"""RMSNorm, with or without a residual add in front.

Matches, in any spelling that the algebra knows (commuted, cast, viewed, ``sqrt``/``div``, ``sum``/N)::

    h = x                                    # or h = x + residual
    n = h.float() * rsqrt(mean(h.float() ** 2, -1, keepdim=True) + eps)
    y = [cast](n) [* [cast](weight [+ offset])] [+ bias]

Replaces with ``portable_ops::rms_norm`` or, with a residual, ``portable_ops::add_rms_norm``, which also returns h.

Where the rows lie in another order in memory than in the shape (heads that were transposed before they are
normalised), the operator reads and writes them in memory's order, between two permutes.

Declines when: the mean is not over the last dimension only; the squares, their mean or its inverse root are not
computed in float32 (the rounding would differ); a mean is subtracted (LayerNorm); there is no mean (L2 norm).
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
    computed = algebra.squared(square)
    h = algebra.strip_upcast(computed)
    if algebra.dtype_of(computed) != torch.float32:
        raise Unmatched(f"the squares are computed in {algebra.dtype_of(computed)}, not float32")
    if algebra.is_op(h, aten.sub) and algebra.is_op(algebra.strip_upcast(h.args[1]), aten.mean):
        raise Unmatched("a difference is normalised, as LayerNorm does with its mean")
    if algebra.dtype_of(anchor) != torch.float32:
        raise Unmatched(f"the inverse root is computed in {algebra.dtype_of(anchor)}, not float32")
    normalised = _normalised(anchor, h, divides)
    if algebra.dtype_of(normalised) != torch.float32:
        raise Unmatched(f"the normalised value is computed in {algebra.dtype_of(normalised)}, not float32")
    tail = _follow(normalised, h)
    return _build(anchor, h, eps, tail)


def _mean_of_squares(radicand: Any) -> tuple[fx.Node, float | fx.Node] | None:
    """The squares under the root and eps; None where the root is of something unrelated (an optimizer, say)."""
    shifted = algebra.plus_scalar(algebra.strip_aliases(radicand))
    mean, eps = shifted if shifted is not None else (radicand, 0.0)
    mean = algebra.strip_upcast(mean)
    square = algebra.last_dim_mean(mean)
    if square is None:
        if algebra.last_dim_sum(mean) is not None:
            raise Unmatched("a sum of squares is not divided by their number: an L2 norm")
        if algebra.is_variance(mean):
            raise Unmatched("a variance stands under the root, as in LayerNorm: RMSNorm subtracts no mean")
        if algebra.is_op(mean, aten.mean):
            raise Unmatched("the mean is not over the last dimension alone with keepdim=True")
        if algebra.is_cast(mean) and algebra.last_dim_mean(mean.args[0]) is not None:
            raise Unmatched(f"the mean is rounded to {algebra.dtype_of(mean)} before its root is taken")
        return None
    square = algebra.strip_upcast(square)
    if algebra.squared(square) is None:
        raise Unmatched("the mean is not of squares")
    return square, eps


def _normalised(anchor: fx.Node, h: fx.Node, divides: bool) -> fx.Node:
    """The node ``h * rsqrt`` (or ``h / sqrt``)."""
    rounded = None
    for user in algebra.readers(anchor):
        if algebra.is_cast(user):
            rounded = user
        if divides and algebra.is_op(user, aten.div) and algebra.strip_upcast(user.args[0]) is h:
            return user
        if not divides and algebra.is_op(user, aten.mul):
            for a, b in algebra.commuted(user):
                if algebra.strip_aliases(b) is anchor and isinstance(a, fx.Node) and algebra.strip_upcast(a) is h:
                    return user
    if rounded is not None:
        raise Unmatched(f"the inverse root is rounded to {algebra.dtype_of(rounded)} before it is multiplied")
    raise Unmatched("the value that is normalised is not the one whose squares were averaged")


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

    def advance(self, node: fx.Node) -> None:
        self.node = node
        self.nodes.append(node)


def _follow(normalised: fx.Node, h: fx.Node) -> _Tail:
    """Follow ``normalised`` through a cast, the weight, the bias and a last cast, as far as they go."""
    hidden_size = val(normalised).shape[-1]
    tail = _Tail(normalised, [normalised])
    _take_cast(tail, hidden_size)
    tail.norm_dtype = val(tail.node).dtype
    weighted = _only(u for u in tail.node.users if algebra.is_op(u, aten.mul) and _vector(u, tail.node, hidden_size))
    if weighted is None:
        return tail
    _take_weight(tail, weighted, _vector(weighted, tail.node, hidden_size))
    _take_cast(tail, hidden_size)
    tail.product_dtype = val(tail.node).dtype
    biased = _only(u for u in tail.node.users if algebra.is_op(u, aten.add) and _vector(u, tail.node, hidden_size))
    if biased is not None and biased.kwargs.get("alpha", 1) == 1 and _scale_of(biased, tail, hidden_size):
        tail.bias = _scale_of(biased, tail, hidden_size)
        tail.advance(biased)
        _take_cast(tail, hidden_size)
    return tail


def _take_cast(tail: _Tail, hidden_size: Any) -> None:
    """Move over a cast if it is the only way on: not where the uncast value meets a weight or bias as well."""
    cast = _only(u for u in tail.node.users if algebra.is_cast(u) and val(u).dtype.is_floating_point)
    scaled = any(_vector(u, tail.node, hidden_size) for u in tail.node.users if algebra.is_op(u, aten.mul, aten.add))
    if cast is not None and not scaled:
        tail.advance(cast)


def _vector(node: fx.Node, x: fx.Node, hidden_size: Any) -> fx.Node | None:
    """The operand of ``node`` beside ``x`` if it is a vector over the hidden dimension."""
    for a, b in algebra.commuted(node):
        if a is x and isinstance(b, fx.Node) and isinstance(b.meta.get("val"), torch.Tensor):
            shape = b.meta["val"].shape
            leading_ones = len(shape) >= 1 and all(algebra.same_size(s, 1) for s in shape[:-1])
            if leading_ones and algebra.same_size(shape[-1], hidden_size) and not algebra.same_size(hidden_size, 1):
                return b
    return None


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
    return source if val(source).dtype.is_floating_point else weight


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
    }
    bound = {k: v for k, v in args.items() if k not in ("x", "weight", "bias", "eps_tensor")}
    order = algebra.dense_order(val(tail.node))
    if order is None:
        raise Unmatched("the last dimension of the result is not the innermost one in memory")
    if order != tuple(range(len(order))):
        args["x"] = Permuted(h, order)
        return Match("rms_norm", "rms_norm", anchor, RMS_NORM, args, (tail.node,), inner, bound, order)
    summands = _residual(h)
    if summands is None:
        return Match("rms_norm", "rms_norm", anchor, RMS_NORM, args, (tail.node,), inner, bound)
    args = {"x": summands[0], "residual": summands[1], **{k: v for k, v in args.items() if k != "x"}}
    return Match("add_rms_norm", "rms_norm", anchor, ADD_RMS_NORM, args, (tail.node, h), inner, bound)


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


def _is_anchor(node: fx.Node) -> bool:
    if algebra.inverse_square_root(node) is not None:
        return not algebra.is_alias(node)
    # A bare square root counts where something is divided by it (but `1 / sqrt` is an anchor of its own).
    return algebra.square_root(node) is not None and any(
        algebra.is_op(u, aten.div) and u.args[1] is node and algebra.inverse_square_root(u) is None for u in node.users
    )


RMS_NORM_PATTERN = Pattern("rms_norm", "rms_norm", _is_anchor, match)
