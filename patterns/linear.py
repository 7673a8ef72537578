"""Linear layers for few rows, as in decoding one token for each of a few sequences.

Matches, on the second way through the graph, what no gated MLP has taken::

    q, k, v = x @ q_weight.T, x @ k_weight.T, x @ v_weight.T      # three products of one x, whatever they are called
    y = x @ weight.T

Replaces with ``portable_ops::qkv_linear`` or ``portable_ops::linear``.

Not a word is said about products of more than MAX_ROWS rows, which belong to the matrix library and of which most
graphs are full, nor about weights that are computed in the graph.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..kernels.linear import LINEAR, MAX_ROWS, QKV_LINEAR
from . import algebra
from .algebra import aten
from .match import Match, Pattern, input_of, weight_of

MOST_READERS = 16
"""Of an input whose layers are taken together.  A mixture of experts may have hundreds, and each would look for all."""


def match(anchor: fx.Node) -> Match | None:
    """Match the linear layer whose product is ``anchor``, with the next two that read the same input."""
    layer = algebra.linear(anchor)
    if layer is None:
        return None
    bound: dict[str, Any] = {"out_features": anchor.meta["val"].shape[1]}
    args = {"x": layer.x, "weight": weight_of(layer)}
    alone = Match("linear", "linear", anchor, LINEAR, args, (anchor,), (), bound)
    if len(layer.source.users) > MOST_READERS:
        return alone
    readers = algebra.linears_of(layer.source)
    together = [one for one in readers if one.shares_input(layer) and _is_anchor(one.product)][:3]
    if len(together) < 3 or together[0].product is not anchor:
        return alone
    names = ("q_weight", "k_weight", "v_weight")
    args = {"x": input_of(layer), **{name: weight_of(one) for name, one in zip(names, together, strict=True)}}
    products = tuple(one.product for one in together)
    bound = {"out_features": [product.meta["val"].shape[1] for product in products]}
    return Match("qkv_linear", "linear", anchor, QKV_LINEAR, args, products, (), bound, instead=alone)


def _is_anchor(node: fx.Node) -> bool:
    if not algebra.is_op(node, aten.mm) or algebra.is_backward(node):
        return False
    rows = node.meta["val"].shape[0]
    return isinstance(rows, int) and rows <= MAX_ROWS and node.meta["val"].dtype.is_floating_point


LINEAR_PATTERN = Pattern("linear", "linear", _is_anchor, match, last=True)
