"""The router of a mixture of experts.

Matches the top-k over up to 512 experts of each token with all that belongs to it::

    scores = logits.softmax(-1), logits.sigmoid() or logits           # in a type of its own
    choice = scores + bias
    choice = choice.masked_fill(other groups, fill)                   # as DeepSeek-V3 groups experts
    indices = choice.topk(k)[1]
    weights = scores.gather(1, indices)                               # or the values of the top-k
    weights = weights / (weights.sum(-1, keepdim=True) + eps), or weights.softmax(-1)
    weights = (weights * scale).to(dtype)

Replaces with ``portable_ops::router``.  What follows and is nothing of that stays behind it.

Declines where weights are the biased or masked choices themselves: a masked one can be chosen, and would weigh what
it is filled with.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..kernels.router import MAX_EXPERTS, MAX_K, ROUTER
from . import algebra
from .algebra import aten
from .match import Match, Pattern, Unmatched, val

_SHORT = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class _Groups:
    """The choices before those of other groups were filled, and how groups are chosen."""

    choice: fx.Node
    count: int
    top: int
    best: int
    fill: float
    selections: int


@dataclasses.dataclass(frozen=True)
class _Weights:
    """The last node of the weights, and how it is computed from those that were gathered."""

    node: fx.Node
    normalise: str = "none"
    eps: float = 0.0
    scale: float = 1.0


def match(anchor: fx.Node) -> Match | None:
    """Match the router that chooses by ``anchor``, a ``topk``."""
    if not _chooses_experts(anchor):
        return None
    values, indices = _result(anchor, 0), _result(anchor, 1)
    groups = _groups(anchor.args[0])
    choice = anchor.args[0] if groups is None else groups.choice
    scores, bias = _unbiased(choice)
    scored = _scored(scores)
    if scored is None:
        return None
    scoring, logits = scored
    if scoring == "none" and groups is None:
        logits, bias = choice, None  # that of the layer which made them
        scores = choice
    if val(logits).dtype not in _SHORT or val(scores).dtype not in _SHORT:
        return None
    if values is not None and (groups is not None or bias is not None):
        raise Unmatched("its weights are the choices themselves, biased or masked, and not scores")
    start = values if values is not None else _gathered(scores, indices)
    if start is None:
        return None
    weights = _weights(start)
    if scoring == "none" and weights.normalise != "softmax":
        return None
    score_dtype = torch.float32 if weights.normalise == "softmax" else val(scores).dtype
    args = {
        "logits": logits,
        "bias": bias,
        "k": algebra.argument(anchor, "k"),
        "scoring": scoring,
        "groups": 1 if groups is None else groups.count,
        "top_groups": 1 if groups is None else groups.top,
        "group_best": 1 if groups is None else groups.best,
        "fill": 0.0 if groups is None else groups.fill,
        "normalise": weights.normalise,
        "eps": weights.eps,
        "scale": weights.scale,
        "score_dtype": score_dtype,
        "weight_dtype": val(weights.node).dtype,
    }
    named = ("k", "scoring", "groups", "normalise", "scale")
    bound = {**{name: args[name] for name in named}, "selections": 1 if groups is None else groups.selections}
    outputs = (weights.node, indices)
    inner = tuple(n for n in algebra.between(logits, weights.node) if n not in outputs)
    return Match("router", "router", anchor, ROUTER, args, outputs, inner, bound)


def _chooses_experts(anchor: fx.Node) -> bool:
    if not isinstance(anchor.args[0].meta.get("val"), torch.Tensor) or algebra.is_backward(anchor):
        return False
    shape, k = val(anchor.args[0]).shape, algebra.argument(anchor, "k")
    if len(shape) != 2 or not isinstance(shape[1], int) or not isinstance(k, int):
        return False
    dim = algebra.argument(anchor, "dim")
    return dim % 2 == 1 and algebra.argument(anchor, "largest") and shape[1] <= MAX_EXPERTS and 1 <= k <= MAX_K


def _result(anchor: fx.Node, index: int) -> fx.Node | None:
    """The node of the values (0) or the indices (1), if anybody reads them."""
    return next((u for u in anchor.users if u.target is operator.getitem and u.args[1] == index and u.users), None)


# --- from the choice back to the logits


def _scored(scores: Any) -> tuple[str, fx.Node] | None:
    """How ``scores`` are made of logits: the scoring, and the logits."""
    x = algebra.strip_aliases(scores)
    if algebra.is_cast(x):
        wide = algebra.strip_aliases(x.args[0])
        if not algebra.holds(val(wide).dtype, val(x).dtype):
            return None  # rounded to the shorter type, and used in the wider one
        x = wide
    if algebra.is_op(x, aten.sigmoid):
        return "sigmoid", algebra.strip_upcast(x.args[0])
    source = algebra.softmax_source(x)
    if source is not None:
        return "softmax", algebra.strip_upcast(source)
    return ("none", scores) if x is algebra.strip_aliases(scores) else None


def _unbiased(choice: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """``choice`` without a bias of each expert, and that bias."""
    choice = algebra.strip_aliases(choice)
    if not algebra.is_op(choice, aten.add) or choice.kwargs.get("alpha", 1) != 1:
        return choice, None
    for scores, bias in algebra.commuted(choice):
        if not all(isinstance(a, fx.Node) and isinstance(a.meta.get("val"), torch.Tensor) for a in (scores, bias)):
            continue
        while algebra.is_op(bias, aten.unsqueeze, aten.expand):
            bias = bias.args[0]
        experts = val(choice).shape[1:]
        if algebra.same_shape(val(bias).shape, experts) and algebra.same_shape(val(scores).shape, val(choice).shape):
            return algebra.strip_aliases(scores), bias
    return choice, None


def _groups(choice: Any) -> _Groups | None:
    """How ``choice`` is filled outside of the best groups, if it is."""
    choice = algebra.strip_aliases(choice)
    if not algebra.is_op(choice, aten.where):
        return None
    condition, filled, kept = choice.args
    inverted = algebra.is_op(condition, aten.bitwise_not, aten.logical_not)
    if inverted:
        condition = condition.args[0]
    else:
        filled, kept = kept, filled
    fill = _number(filled)
    chosen = _chosen_groups(condition)
    if fill is None or chosen is None or not isinstance(kept, fx.Node):
        return None
    selection, count = chosen
    scored = _group_scores(selection.args[0], algebra.strip_aliases(kept), count)
    if scored is None:
        return None
    best, selections = scored
    top = algebra.argument(selection, "k")
    return _Groups(kept, count, top, best, fill, 2 + selections) if isinstance(top, int) else None


def _number(x: Any) -> float | None:
    """The number that ``x`` is, which may be -inf."""
    if algebra.is_op(x, aten.scalar_tensor, aten.full):
        number = x.args[0] if algebra.is_op(x, aten.scalar_tensor) else x.args[1]
        return float(number) if isinstance(number, int | float) and number in (0, -torch.inf) else algebra.scalar(x)
    return algebra.scalar(x)


def _chosen_groups(mask: Any) -> tuple[fx.Node, int] | None:
    """The top-k of groups that ``mask`` [tokens, experts] says, and the number of groups."""
    mask = algebra.strip_casts(mask)
    shape = val(mask).shape
    spread = mask
    while algebra.is_op(spread, aten.view, aten.reshape, aten._unsafe_view, aten.clone):
        spread = algebra.strip_aliases(spread.args[0])
    if not algebra.is_op(spread, aten.expand) or val(spread).dim() != 3 or len(shape) != 2:
        return None
    ones = algebra.strip_casts(spread.args[0])
    count, size = val(spread).shape[1:]
    if not algebra.is_op(ones, aten.unsqueeze) or not algebra.same_size(val(ones).shape[2], 1):
        return None
    if not isinstance(count, int) or not isinstance(size, int) or count * size != shape[1]:
        return None
    scatter = algebra.strip_casts(ones.args[0])
    if not algebra.same_size(val(scatter).shape[0], shape[0]):
        return None  # one choice of groups for several tokens
    if not algebra.is_op(scatter, aten.scatter) or scatter.args[1] % 2 != 1 or val(scatter).dim() != 2:
        return None
    if algebra.scalar(scatter.args[0]) != 0 or scatter.args[3] not in (1, True) or val(scatter).shape[1] != count:
        return None
    index = scatter.args[2]
    if not algebra.is_op(index, operator.getitem) or index.args[1] != 1 or not algebra.is_op(index.args[0], aten.topk):
        return None
    selection = index.args[0]
    whole = algebra.argument(selection, "dim") % 2 == 1 and algebra.argument(selection, "largest")
    return (selection, count) if whole else None


def _group_scores(scores: Any, choice: fx.Node, count: int) -> tuple[int, int] | None:
    """How many of the best of each group ``scores`` [tokens, groups] adds up, and how many top-k it takes for that."""
    scores = algebra.strip_aliases(scores)
    best, selections, grouped = 1, 0, None
    if algebra.is_op(scores, aten.sum) and val(scores).dim() == 2:
        values = scores.args[0]
        dims = algebra.argument(scores, "dim")
        if not _is_item(values, 0, aten.topk) or [d % 3 for d in dims] != [2]:
            return None
        selection = values.args[0]
        best, selections, grouped = algebra.argument(selection, "k"), 1, selection.args[0]
        if algebra.argument(selection, "dim") % 3 != 2 or not algebra.argument(selection, "largest"):
            return None
    elif algebra.is_op(scores, aten.amax) and [d % 3 for d in scores.args[1]] == [2]:
        grouped = scores.args[0]
    elif _is_item(scores, 0, aten.max) and scores.args[0].args[1] % 3 == 2:
        grouped = scores.args[0].args[0]
    if not algebra.is_op(grouped, aten.view, aten.reshape) or val(grouped).dim() != 3 or val(grouped).shape[1] != count:
        return None
    same = algebra.strip_aliases(grouped.args[0]) is choice
    return (best, selections) if same and isinstance(best, int) else None


def _is_item(x: Any, index: int, op: Any) -> bool:
    return algebra.is_op(x, operator.getitem) and x.args[1] == index and algebra.is_op(x.args[0], op)


# --- from the chosen scores on to the weights


def _gathered(scores: fx.Node, indices: fx.Node | None) -> fx.Node | None:
    """The node that takes the scores of the chosen experts."""
    for user in () if indices is None else indices.users:
        if not algebra.is_op(user, aten.gather) or user.args[2] is not indices or user.args[1] % 2 != 1:
            continue
        if algebra.strip_aliases(user.args[0]) is scores:
            return user
    return None


def _weights(start: fx.Node) -> _Weights:
    """As far as nobody else reads what comes in between."""
    found = _softmax_of(start) or _share_of_sum(start) or _Weights(start)
    readers = list(found.node.users)
    if len(readers) == 1 and algebra.is_op(readers[0], aten.mul) and found.normalise != "softmax":
        numbers = [algebra.scalar(a) for a in readers[0].args if a is not found.node]
        if numbers and numbers[0] is not None and val(readers[0]).dtype == val(found.node).dtype:
            found = dataclasses.replace(found, node=readers[0], scale=numbers[0])
    readers = list(found.node.users)
    if len(readers) == 1 and algebra.is_cast(readers[0]) and val(readers[0]).dtype in _SHORT:
        found = dataclasses.replace(found, node=readers[0])
    return found


def _share_of_sum(start: fx.Node) -> _Weights | None:
    """``start / (start.sum(-1, keepdim=True) + eps)``."""
    for user in start.users:
        if not algebra.is_quotient(user) or algebra.is_backward(user) or user.args[0] is not start:
            continue
        total, eps = user.args[1], 0.0
        added = algebra.plus_scalar(total)
        if added is not None and isinstance(added[1], float):
            total, eps = added
        if algebra.last_dim_sum(total) is start and set(start.users) <= {user, algebra.strip_aliases(total)}:
            return _Weights(user, "sum", eps)
    return None


def _softmax_of(start: fx.Node) -> _Weights | None:
    """``start.softmax(-1)``, computed in float32."""
    for node in _readers_within(start, 5):
        source = algebra.softmax_source(node) if val(node).dtype == torch.float32 else None
        if source is not None and algebra.strip_upcast(source) is start:
            inside = {*algebra.between(start, node), node}
            return _Weights(node, "softmax") if all(user in inside for user in start.users) else None
    return None


def _readers_within(start: fx.Node, steps: int) -> Iterator[fx.Node]:
    level = [start]
    for _ in range(steps):
        level = [u for n in level for u in n.users if isinstance(u.meta.get("val"), torch.Tensor)]
        yield from level


ROUTER_PATTERN = Pattern("router", "router", lambda node: algebra.is_op(node, aten.topk), match)
