"""Gated activations: ``activation(gate) * up``, as in SwiGLU, GeGLU, ReGLU, GLU and gpt-oss's clamped form.

Matches, with the activation in any spelling (it is recognised by its values), the operands in either order, and casts
and views anywhere between::

    act(clamp(gate)) [clamped, scaled, cast] * (clamp(up) [+ offset])        # silu, also with alpha; gelu, tanh or erf
    sigmoid(gate) * (gate * up)                                              # silu, regrouped
    relu(gate) * up,  relu(gate)^2 * up,  sigmoid(gate) * up,  tanh(gate) * up,  aten.glu     # of matrix products

Replaces with ``portable_ops::swiglu``; where both factors are linear layers of the same few rows, as in decoding, with
``portable_ops::gated_linear``, which computes those as well.  What the activation rounds on its way is rounded once, at
its end.

Declines when: the activation's argument multiplies it (that is an activation, not a gate); one of the factors is
broadcast (squeeze-and-excitation, a gate per token); ReLU, sigmoid or tanh gate something else than a matrix product
of the same operand (the gates of attention, LSTMs and routers are spelled like that).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from ..kernels.activation import ACTIVATIONS, TILE_ACTIVATIONS
from ..kernels.linear import GATED_LINEAR, MAX_ROWS
from ..kernels.swiglu import SWIGLU
from . import algebra
from .algebra import aten, prims
from .match import Call, Match, Pattern, Unmatched, input_of, val, weight_of

_UNITS = ("silu", "gelu", "gelu_tanh")
"""A product with one of these is a gated unit wherever it stands; other activations have other uses as well."""

_MOVES = (*algebra.RESHAPES, *algebra.PERMUTES, aten.expand, aten.slice, aten.select)


def match(anchor: fx.Node) -> Match | None:
    """Match the gated activation whose product is ``anchor``."""
    if algebra.is_op(anchor, aten.glu):
        return _match_glu(anchor)
    found = []
    for factor, other in algebra.commuted(anchor):
        gate = _gate(factor)
        if gate is not None:
            found.append((gate, factor, other))
    # Of two activations the one that is an activation and nothing else.
    found.sort(key=lambda f: f[0].activation.name not in _UNITS)
    if found:
        return _gated(anchor, *found[0])
    _explain_unknown(anchor)
    return None


def _explain_unknown(product: fx.Node) -> None:
    """Say why a product of two projections of one tensor, one behind some other function, is not taken."""
    if next(algebra.univariate_forms(product), None) is not None:
        return
    for factor, other in algebra.commuted(product):
        for form in algebra.nonlinear_forms(factor):
            if algebra.same_projected(form.source, other):
                inside = algebra.between(form.source, product)
                if _peeled(factor) is None:
                    raise Unmatched(
                        "the gate is rounded on its way to the product, to a type that holds other numbers",
                        *inside,
                    )
                if form.loses_precision():
                    raise Unmatched("the gate's activation rounds to a shorter type than its argument has", *inside)
                raise Unmatched(f"the gate's activation is none of {', '.join(ACTIVATIONS)}", *inside)


@dataclasses.dataclass(frozen=True)
class _Gate:
    """A factor that is an activation: rounded to ``dtype``, clamped, then moved by ``moves`` (outermost first)."""

    activation: algebra.Activation
    dtype: torch.dtype
    low: float | None = None
    high: float | None = None
    moves: tuple[fx.Node, ...] = ()


def _gate(factor: fx.Node) -> _Gate | None:
    peeled = _peeled(factor)
    if peeled is None:
        return None
    found = _activation(peeled.x)
    if found is not None:
        return _Gate(found, peeled.dtype, moves=peeled.moves)
    # A clamp rounds as the type of its limits does: it may stand on either side of the cast.
    for clamp in dict.fromkeys((peeled.rounded, peeled.x)):
        limits = algebra.clamped(clamp)
        inner = None if limits is None else _peeled(limits.source)
        if inner is None or inner.moves or algebra.dtype_of(limits.source) != algebra.dtype_of(clamp):
            continue
        found = _activation(inner.x)
        if found is not None and (clamp is peeled.rounded or inner.dtype == algebra.dtype_of(clamp)):
            return _Gate(found, peeled.dtype, limits.low, limits.high, peeled.moves)
    return None


def _activation(x: fx.Node) -> algebra.Activation | None:
    """The activation of the nearest tensor; of a sigmoid's argument the scale is taken as well."""
    found = list(algebra.activations(x))
    if found and found[0].name == "sigmoid":
        return [f for f in found if f.name == "sigmoid"][-1]
    return found[0] if found else None


@dataclasses.dataclass(frozen=True)
class _Peeled:
    """A tensor without the casts and views behind it: ``x`` rounded to ``dtype`` (``rounded``), then ``moves``."""

    x: fx.Node
    rounded: fx.Node
    dtype: torch.dtype
    moves: tuple[fx.Node, ...]


def _peeled(x: Any) -> _Peeled | None:
    """``x`` taken apart, the outermost view first; None if it is rounded twice, or to whole numbers."""
    moves: list[fx.Node] = []
    rounded: fx.Node | None = None
    while True:
        x = algebra.strip_aliases(x)
        if algebra.is_cast(x):
            inner, outer = algebra.dtype_of(x.args[0]), algebra.dtype_of(x)
            if not (inner.is_floating_point and outer.is_floating_point):
                return None
            if not algebra.holds(outer, inner):
                if rounded is not None or not algebra.holds(inner, outer):
                    return None
                rounded = x
            elif rounded is not None and algebra.holds(algebra.dtype_of(rounded), inner):
                rounded = None  # what was widened and cast back
        elif algebra.is_op(x, *_MOVES) and not x.kwargs:
            moves.append(x)
        elif not algebra.is_op(x, aten.clone):
            rounded = x if rounded is None else rounded
            return _Peeled(x, rounded, algebra.dtype_of(rounded), tuple(moves))
        x = x.args[0]


def _gated(anchor: fx.Node, gate: _Gate, factor: fx.Node, other: fx.Node) -> Match | None:
    name, source = gate.activation.name, gate.activation.source
    if next(algebra.univariate_forms(anchor), None) is not None:
        if name not in _UNITS:
            return None  # x * sigmoid(x): an activation in the making
        raise Unmatched(
            f"{name} multiplies a function of its own argument: an activation, not a gate",
            *gate.activation.nodes,
        )
    shape = val(anchor).shape
    if not algebra.same_shape(val(factor).shape, shape):
        if gate.moves:
            return None
        raise Unmatched(
            "the gate is broadcast: it scales whole rows or channels, as in squeeze-and-excitation",
            *gate.activation.nodes,
        )
    if not algebra.same_shape(val(other).shape, shape):
        return None  # an activation times a weight or a scale
    regrouped = _regrouped(gate, other)
    if regrouped is not None:
        gate, other = regrouped
    elif name not in _UNITS and not algebra.same_projected(source, other):
        raise Unmatched(
            f"{name} gates something else than a matrix product of the same operand: no gated MLP",
            *gate.activation.nodes,
        )
    return _build(anchor, gate, other)


def _regrouped(gate: _Gate, other: fx.Node) -> tuple[_Gate, fx.Node] | None:
    """``sigmoid(alpha * g) * (g * up)`` as ``silu(g) * up``."""
    product = algebra.strip_upcast(other)
    plain = gate.activation.name == "sigmoid" and gate.low is gate.high is None and not gate.moves
    if not plain or not algebra.is_op(product, aten.mul) or not all(isinstance(a, fx.Node) for a in product.args):
        return None
    # No rounding between the activation and up: the product is formed in float32 at least.
    wide = torch.promote_types(gate.dtype, torch.float32)
    for found in algebra.activations(gate.activation.nodes[-1]):
        for g, up in algebra.commuted(product):
            same = found.name == "sigmoid" and algebra.strip_upcast(g) is found.source
            if same and algebra.same_shape(val(up).shape, val(product).shape):
                return _Gate(dataclasses.replace(found, name="silu"), wide), up
    return None


def _build(anchor: fx.Node, gate: _Gate, other: fx.Node) -> Match:
    act = gate.activation
    limits = algebra.clamped(act.source)
    source = limits.source if limits is not None else algebra.strip_aliases(act.source)
    up = _up(other)
    product = val(anchor).dtype
    if not _product_fits(gate.dtype, val(up.node).dtype, product):
        # A factor is wider in the graph than what it was rounded to.
        up = _Up(other)
    up_node: Any = up.node
    if not _product_fits(gate.dtype, val(up.node).dtype, product):
        up_node = Call(prims.convert_element_type.default, (other, product))
    out = _rounded(anchor)
    args: dict[str, Any] = {
        "gate": _moved(source, gate.moves),
        "up": up_node,
        "activation": act.name,
        "alpha": 1.0 if isinstance(act.alpha, fx.Node) else act.alpha,
        "alpha_tensor": act.alpha if isinstance(act.alpha, fx.Node) else None,
        "scale": act.scale,
        "gate_min": None if limits is None else limits.low,
        "gate_max": None if limits is None else limits.high,
        "act_min": gate.low,
        "act_max": gate.high,
        "up_min": up.low,
        "up_max": up.high,
        "up_offset": up.offset,
        "act_dtype": gate.dtype,
        "out_dtype": val(out).dtype,
        "out_order": algebra.unless_plain(algebra.memory_order(val(out))),
    }
    bound = {k: v for k, v in args.items() if k not in ("gate", "up", "alpha_tensor") and v is not None}
    inner = _between({source, up.node, act.alpha}, out)
    whole = Match("swiglu", "swiglu", anchor, SWIGLU, args, (out,), inner, bound)
    return _with_linears(whole) or whole


_LIMITS = ("gate_min", "gate_max", "act_min", "act_max", "up_min", "up_max")
_PLAIN = {"scale": 1.0, "up_offset": 0.0, "alpha_tensor": None, "out_order": None, **dict.fromkeys(_LIMITS)}
"""The arguments of a gated activation that ``gated_linear`` does not have, and what they must be."""


def _with_linears(whole: Match) -> Match | None:
    """``whole`` with the two linear layers in front of it, if nobody else reads these."""
    gate, up = whole.args["gate"], whole.args["up"]
    if whole.args["activation"] not in TILE_ACTIVATIONS or any(whole.args[k] != v for k, v in _PLAIN.items()):
        return None
    before = {*_to_product(gate), *_to_product(up)}
    own = {*whole.inner, *before, whole.anchor, *whole.outputs}
    gate_layer, up_layer = _few_row_linear(gate), _few_row_linear(up)
    if gate_layer is None or up_layer is None or any(u not in own for n in before for u in n.users):
        return None
    if gate_layer.product is up_layer.product or not gate_layer.shares_input(up_layer):
        return None
    args = {
        "x": input_of(gate_layer),
        "gate_weight": weight_of(gate_layer),
        "up_weight": weight_of(up_layer),
        **{name: whole.args[name] for name in ("activation", "alpha", "act_dtype", "out_dtype")},
    }
    view = None if gate is gate_layer.product else gate
    inner = tuple(sorted({*whole.inner, *before}))
    changed = {"pattern": "gated_linear", "operator": GATED_LINEAR, "args": args, "inner": inner, "view": view}
    return dataclasses.replace(whole, **changed, instead=whole)


def _few_row_linear(x: Any) -> algebra.Linear | None:
    """The linear layer of few rows in a 16-bit type whose result ``x`` is, behind one reshape of its rows at most."""
    *_, product = _to_product(x) or (None,)
    layer = algebra.linear(product)
    if layer is None or val(product).dtype not in (torch.float16, torch.bfloat16):
        return None
    rows, columns = val(product).shape
    keeps_columns = algebra.same_size(val(x).shape[-1], columns)
    return layer if keeps_columns and isinstance(rows, int) and rows <= MAX_ROWS else None


def _to_product(x: Any) -> tuple[fx.Node, ...]:
    """``x``, and what it is a reshape of."""
    if not isinstance(x, fx.Node):
        return ()
    return (x, x.args[0]) if algebra.is_op(x, *algebra.RESHAPES) else (x,)


def _product_fits(a: torch.dtype, b: torch.dtype, product: torch.dtype) -> bool:
    # In float32, a regrouped product has one rounding less than the graph's.
    return torch.promote_types(torch.promote_types(a, b), product) == torch.promote_types(a, b)


@dataclasses.dataclass(frozen=True)
class _Up:
    """``clamp(node, low, high) + offset`` in the type of ``node``."""

    node: fx.Node
    low: float | None = None
    high: float | None = None
    offset: float = 0.0


def _up(x: fx.Node) -> _Up:
    x = algebra.strip_upcast(x)
    shifted = algebra.plus_scalar(x)
    offset = 0.0
    same = shifted is not None and algebra.same_shape(val(shifted[0]).shape, val(x).shape)  # not ones of more rows
    if same and isinstance(shifted[1], float) and val(shifted[0]).dtype == val(x).dtype:
        x, offset = algebra.strip_aliases(shifted[0]), shifted[1]
    limits = algebra.clamped(x)
    return _Up(x, offset=offset) if limits is None else _Up(limits.source, limits.low, limits.high, offset)


def _moved(source: fx.Node, moves: tuple[fx.Node, ...]) -> fx.Node | Call:
    """The views behind the activation, in front of it instead."""
    gate: fx.Node | Call = source
    for move in reversed(moves):
        gate = Call(move.target, (gate, *move.args[1:]))
    return gate


def _rounded(product: fx.Node) -> fx.Node:
    """The cast to a shorter type behind the product if nobody wants it uncast, else the product."""
    if len(product.users) != 1:
        return product
    (user,) = product.users
    if not algebra.is_cast(user) or not val(user).dtype.is_floating_point:
        return product
    return user if algebra.holds(val(product).dtype, val(user).dtype) else product


def _between(starts: set[Any], end: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that lead from ``starts`` to ``end``, ``end`` left out."""
    found, work = set(), [end]
    while work:
        new = [n for n in work.pop().all_input_nodes if n not in starts and n not in found]
        tensors = [n for n in new if n.all_input_nodes and isinstance(n.meta.get("val"), torch.Tensor)]
        found.update(tensors)
        work.extend(tensors)
    return tuple(sorted(found))


def _match_glu(anchor: fx.Node) -> Match:
    """``torch.nn.functional.glu``: the first half times the sigmoid of the second."""
    x, dim = anchor.args[0], algebra.argument(anchor, "dim") % val(anchor).dim()
    if algebra.projection(x) is None:
        raise Unmatched("sigmoid gates something else than a matrix product of the same operand: no gated MLP")
    half = val(anchor).shape[dim]
    up = Call(aten.slice.Tensor, (x, dim, 0, half))
    gate = Call(aten.slice.Tensor, (x, dim, half, 2 * half))
    dtype = val(anchor).dtype
    args = {
        "gate": gate,
        "up": up,
        "activation": "sigmoid",
        "act_dtype": torch.promote_types(dtype, torch.float32),
        "out_dtype": dtype,
        "out_order": algebra.unless_plain(algebra.memory_order(val(anchor))),
    }
    bound = {k: v for k, v in args.items() if k not in ("gate", "up")}
    return Match("swiglu", "swiglu", anchor, SWIGLU, args, (anchor,), (), bound)


def _is_anchor(node: fx.Node) -> bool:
    if not algebra.is_op(node, aten.mul, aten.glu) or algebra.is_backward(node):
        return False
    return all(_is_float(n) for n in (node, *node.args[: 2 if algebra.is_op(node, aten.mul) else 1]))


def _is_float(x: Any) -> bool:
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dim() > 0


SWIGLU_PATTERN = Pattern("swiglu", "swiglu", _is_anchor, match)
