"""What a pattern says about a place in a graph: a match, or a miss with the first condition that failed.

A *match* is a proposal.  It names the operator that computes the same values, the operator's arguments and
the graph nodes that its results replace; nothing in the graph changes until :meth:`Match.replace`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..kernels.operator import Operator
from . import algebra

KINDS = ("rms_norm", "rope", "swiglu", "attention", "topk", "router", "linear")
"""The kinds of subgraph that reports count, in report order."""


class Unmatched(Exception):
    """Raised inside a pattern where a condition fails; the message is the reason that the user reads.

    ``seen``: how far the pattern had come.  A dump shows these nodes, and what lies between them and the anchor.
    """

    def __init__(self, reason: str, *seen: fx.Node) -> None:
        super().__init__(reason)
        self.seen = seen


@dataclasses.dataclass(frozen=True)
class Permuted:
    """An argument that is a permutation of a node; it becomes a node of its own only if the match is taken."""

    node: fx.Node
    order: tuple[int, ...]

    @functools.cached_property
    def value(self) -> torch.Tensor:
        return self.node.meta["val"].permute(self.order)

    def insert(self) -> fx.Node:
        if self.order == tuple(range(len(self.order))):
            return self.node
        with self.node.graph.inserting_after(_below_placeholders(self.node)):
            node = self.node.graph.call_function(torch.ops.aten.permute.default, (self.node, list(self.order)))
        node.meta = {**_inherit(self.node), "val": self.value}
        return node


@dataclasses.dataclass(frozen=True)
class Call:
    """An argument that one ATen op makes of nodes; it becomes a node only if the match is taken.

    ``args``: nodes, literals, and again Calls or Permuted.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]

    @functools.cached_property
    def value(self) -> torch.Tensor:
        return self.op(*pytree.tree_map(_example, self.args))

    def insert(self) -> fx.Node:
        args = pytree.tree_map(_inserted, self.args)
        last = max(_nodes(args))
        with last.graph.inserting_after(_below_placeholders(last)):
            node = last.graph.call_function(self.op, args)
        node.meta = {**_inherit(last), "val": self.value}
        return node


@dataclasses.dataclass(frozen=True)
class Miss:
    """A candidate that is not the pattern: which, where, and the first condition that failed.

    ``nodes``: what had been recognised until then, by name and in graph order.
    """

    pattern: str
    kind: str
    anchor: str
    reason: str
    source: str
    nodes: tuple[str, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class Recognised:
    """A subgraph that is the pattern, but that no operator expresses or may take over: counted and left alone.

    ``reason``: what stands in the way, in words that stand in the report.  ``inner``: the nodes that are the pattern,
    as far as they are known.
    """

    pattern: str
    kind: str
    anchor: fx.Node
    reason: str
    bound: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inner: tuple[fx.Node, ...] = ()

    @property
    def source(self) -> str:
        return source_line(self.anchor)


@dataclasses.dataclass(frozen=True)
class Match:
    """A subgraph that ``operator`` computes.

    ``args``: the operator's arguments by name; nodes of the graph, or literals.  ``outputs``: for each result
    of the operator the node that it replaces, or None for a result that nobody asked for.  ``inner``: the nodes
    whose work the operator takes over.  ``bound``: what the match found (eps, rounding points, heads), for the
    report.  ``order``: the order in which a single result has its dimensions, where that is not the graph's.
    ``view``: the view that leads from the shape of the first result to the shape of the node that it replaces.
    ``instead``: a smaller match that is decided on where this one is declined.  ``parts``: the matches that this one
    joins; each counts, and is tried where it stands if this one is declined.

    Of an operator that writes operands, ``outputs`` go on with what stands for these operands afterwards.  They must
    be inputs of the graph that the graph itself overwrites with that, so that nothing has to be copied.
    """

    pattern: str
    kind: str
    anchor: fx.Node
    operator: Operator
    args: Mapping[str, Any]
    outputs: tuple[fx.Node | None, ...]
    inner: tuple[fx.Node, ...]
    bound: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    order: tuple[int, ...] | None = None
    view: fx.Node | None = None
    instead: Match | None = None
    parts: tuple[Match, ...] = ()

    @property
    def source(self) -> str:
        return source_line(self.anchor)

    def inputs(self) -> list[fx.Node]:
        """The nodes that the operator reads."""
        return _nodes(tuple(self.args.values()))

    def values(self) -> dict[str, Any]:
        """The arguments with example values (fake tensors) in place of nodes."""
        return {name: _example(a) for name, a in self.args.items()}

    def shared(self) -> list[fx.Node]:
        """Inner nodes that somebody outside still reads, so that their work is not saved.

        A cast of what exists anyway is no work: whoever reads it casts on the way.
        """
        own = {*self.inner, *(o for o in self.outputs if o is not None)}
        exist = {*self.inputs(), *self.outputs}
        work = [n for n in self.inner if n not in self.outputs and not (algebra.is_cast(n) and n.args[0] in exist)]
        return [n for n in work if any(u not in own for u in n.users)]

    def replace(self) -> fx.Node:
        """Put the operator into the graph and hand its results to the users of the nodes it replaces.

        The operator stands right after its last input and before every user of its outputs; an input that is
        computed only later (a cast of the weight, say) moves up.  Nodes that lose all users are left for dead-code
        elimination.  Raises Unmatched, with the graph unchanged, if an input depends on an output.
        """
        graph = self.anchor.graph
        inputs = self.inputs()
        users = {u for o in self.outputs if o is not None for u in o.users}
        if not {*inputs}.isdisjoint(self.outputs):
            raise Unmatched("an argument is itself one of the results")
        if users:
            first_user = min(users)
            for node in _late(inputs, first_user, users):
                first_user.prepend(node)
        after = _below_placeholders(max(inputs) if inputs else next(iter(graph.nodes)))
        args = {name: _inserted(a) for name, a in self.args.items()}
        after = max(after, *(a for a in args.values() if isinstance(a, fx.Node)))
        with graph.inserting_after(after):
            call = _inserted_call(graph, self.operator, args)
        call.meta = _inherit(next(o for o in self.outputs if o is not None))
        single = len(self.operator.op._schema.returns) == 1 and not self.operator.mutated
        if single and self.order is None and self.view is None:
            self.outputs[0].replace_all_uses_with(call)
            return call
        call.meta["val"] = self._result()
        for index, old in reversed(list(enumerate(self.outputs))):
            if old is None:
                continue
            item = call
            if not single:
                item = _insert(call, operator.getitem, (call, index), old)
                item.meta["val"] = call.meta["val"][index]
            if self.order is not None:
                back = [self.order.index(d) for d in range(len(self.order))]
                item = _insert(call, torch.ops.aten.permute.default, (call, back), old)
            if self.view is not None and index == 0:
                # Behind the view itself, so that its sizes are known.
                item = _insert(max(item, self.view), self.view.target, (item, *self.view.args[1:]), old)
            old.replace_all_uses_with(item)
        return call

    def _result(self) -> Any:
        """The example value of the operator's results; running the operator on fake tensors is slow."""
        if self.order is not None:
            return self.outputs[0].meta["val"].permute(self.order)
        if self.view is not None or (None in self.outputs and not self.operator.mutated):
            return self.operator.op(**self.values())
        return tuple(None if o is None else o.meta["val"] for o in self.outputs)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """One equation that the backend knows.

    ``anchors(node)`` picks candidates cheaply; ``match(node)`` returns a Match, or a Recognised for what is the
    pattern but cannot be rewritten, raises :class:`Unmatched` with the reason, or returns None where the candidate is
    plainly something else and not worth a word.  ``last``: it is tried when the others have been through the whole
    graph, because what it takes may belong to something larger.  ``first``: it is tried before the others, because it
    joins what they would take one by one; nothing is said of it where it does not match.
    """

    name: str
    kind: str
    anchors: Callable[[fx.Node], bool]
    match: Callable[[fx.Node], Match | Recognised | None]
    last: bool = False
    first: bool = False

    def try_match(self, node: fx.Node) -> Match | Recognised | Miss | None:
        try:
            return self.match(node)
        except Unmatched as reason:
            nodes = tuple(n.name for n in _joined(node, reason.seen))
            return Miss(self.name, self.kind, node.name, str(reason), source_line(node), nodes)


def _joined(anchor: fx.Node, others: Iterable[fx.Node]) -> list[fx.Node]:
    """``anchor`` and ``others`` with what lies between them and it, in graph order."""
    nodes = {anchor, *others}
    for node in others:
        nodes.update(algebra.between(min(node, anchor), max(node, anchor)))
    return sorted(n for n in nodes if n.op == "call_function")


_TORCH = str(Path(torch.__file__).parent)
_LONGEST = 300
"""Characters of a source line that are kept: generated code may have everything in one."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)\n\s*(?P<code>[^\n]*)')


def source_line(node: fx.Node) -> str:
    """``file:line: code`` of the user's line that made ``node``, or an empty string where none is recorded."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return ""
    # The line in torch.nn that a call of the user's led to says less than the call.
    outside = [f for f in frames if not f["file"].startswith(_TORCH)]
    last = (outside or frames)[-1]
    code = last["code"].strip()
    return f"{last['file']}:{last['line']}: {code if len(code) <= _LONGEST else code[:_LONGEST] + '...'}"


def _late(arguments: Iterable[fx.Node], first_user: fx.Node, users: set[fx.Node]) -> list[fx.Node]:
    """What has to move up so that ``arguments`` are known before ``first_user``, in the order of moving."""
    late, work = set(), list(arguments)
    while work:
        node = work.pop()
        if node < first_user or node in late:
            continue
        if node in users or node.op != "call_function" or node.is_impure():
            raise Unmatched("an argument is computed only after the first use of a result")
        late.add(node)
        work.extend(node.all_input_nodes)
    return sorted(late)


def _below_placeholders(node: fx.Node) -> fx.Node:
    """``node``, or the last placeholder if it is one: placeholders stay together at the top."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def _nodes(arguments: tuple[Any, ...]) -> list[fx.Node]:
    """The nodes that arguments, lazily built ones included, are made of."""
    found: list[fx.Node] = []
    for a in pytree.tree_leaves(arguments):
        found += [a] if isinstance(a, fx.Node) else []
        found += [a.node] if isinstance(a, Permuted) else []
        found += _nodes(a.args) if isinstance(a, Call) else []
    return found


def _inserted(argument: Any) -> Any:
    return argument.insert() if isinstance(argument, Permuted | Call) else argument


def _inserted_call(graph: fx.Graph, called: Operator, args: dict[str, Any]) -> fx.Node:
    """A call of an operator; one that writes operands stands in a functional graph as AOTAutograd would put it.

    Inductor turns it into the call itself, on copies of the operands unless the graph overwrites them anyway.
    """
    if not called.mutated:
        return graph.call_function(called.op, kwargs=args)
    kwargs = {name: a for name, a in args.items() if name not in called.mutated}
    kwargs |= {f"_{name}_base_index": i for i, name in enumerate(called.mutated)}
    kwargs["_all_bases"] = [args[name] for name in called.mutated]
    return graph.call_function(torch.ops.higher_order.auto_functionalized_v2, (called.op,), kwargs)


def _insert(after: fx.Node, target: Any, args: tuple[Any, ...], old: fx.Node) -> fx.Node:
    """A call behind ``after``, with the metadata of the node that it stands for."""
    with after.graph.inserting_after(after):
        node = after.graph.call_function(target, args)
    node.meta = _inherit(old)
    return node


def _example(argument: Any) -> Any:
    if isinstance(argument, Permuted | Call):
        return argument.value
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _inherit(old: fx.Node) -> dict[str, Any]:
    """The metadata that a replacement takes from the node it stands for."""
    keep = ("val", "tensor_meta", "stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "custom")
    return {key: old.meta[key] for key in keep if key in old.meta}


def input_of(layer: algebra.Linear) -> fx.Node | Call:
    """What a linear layer reads, such that layers that share it start at the same node."""
    if layer.x is layer.source:
        return layer.x
    return Call(torch.ops.aten.view.default, (layer.source, list(layer.x.meta["val"].shape)))


def weight_of(layer: algebra.Linear) -> fx.Node | Permuted:
    """The weight ``[out_features, in_features]`` of a linear layer, as torch.nn.Linear keeps it."""
    node = layer.transposed
    if algebra.is_op(node, *algebra.PERMUTES):
        weight = node.args[0].meta["val"]
        if algebra.same_shape(weight.shape, node.meta["val"].T.shape) and algebra.same_size(weight.stride(-1), 1):
            return node.args[0]
    return Permuted(node, (1, 0))


def val(node: fx.Node) -> torch.Tensor:
    """The example value of a node that stands for a tensor; Unmatched if it has none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise Unmatched(f"{node} is not a tensor")
    return value
