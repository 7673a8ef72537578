"""What a dump needs to know of a compilation: its graphs before and after each stage, and where its sites stand.

Nothing is recorded unless somebody asks for it with :func:`recording`; then the graphs are written down as they pass
by, as text and as rows of strings.  Neither holds the value of a tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import fx

from ..kernels.launch import Launch, Plan, hint
from ..kernels.target import Target
from ..patterns import Match, Miss, Recognised
from ..patterns.match import source_line
from . import gate
from .graph_text import input_spec, runnable, size_symbols, type_text


@dataclasses.dataclass(frozen=True)
class Row:
    """One node of a graph.

    ``arguments``: names of nodes.  ``type``: for people, ``spec``: what is needed to make up such a value.  ``path``:
    the user's module that the node belongs to, ``module`` its class.
    """

    name: str
    target: str
    arguments: tuple[str, ...]
    type: str
    path: str
    module: str
    source: str
    spec: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One graph at one point of its way: ``text`` is Python that runs, ``rows`` are its nodes in order."""

    name: str
    text: str
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a site or a near miss stands in the graphs.

    ``graph``: the position of its graph before the rewrite among the stages of the recording.  ``nodes``: what the
    match took over, in graph order; ``inputs``: what the operator reads, ``outputs``: what it stands for, by the names
    of nodes before the rewrite.  ``operator``: what replaces them and ``replacement`` the node that it is afterwards,
    both empty where nothing was replaced.  ``features``: what the gate was asked about.  ``variant``, ``why`` and
    ``launches``: the kernel variant, what made it the one, and the kernels that it starts, with their configuration.
    """

    graph: int
    anchor: str
    nodes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    operator: str = ""
    replacement: str = ""
    features: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    variant: str = ""
    why: str = ""
    launches: tuple[str, ...] = ()


@dataclasses.dataclass
class Recording:
    """All that was written down about one graph of Dynamo's and the graphs that it became.

    ``sites`` and ``misses`` go with those of the graph's report, in the same order; what the report has more of was
    never in a graph.  ``code``: what Inductor generated.  ``report``: the graph's report.  ``error``: what ended it.
    ``known_as``: what stood before the rewrite where a node stands that was put in, by names.
    """

    stages: list[Stage] = dataclasses.field(default_factory=list)
    sites: list[Mark] = dataclasses.field(default_factory=list)
    misses: list[Mark] = dataclasses.field(default_factory=list)
    code: list[str] = dataclasses.field(default_factory=list)
    report: Any = None
    error: str = ""
    known_as: dict[str, str] = dataclasses.field(default_factory=dict)

    def keep(self, name: str, graph: fx.Graph) -> int:
        """Write ``graph`` down; returns its position among the stages."""
        sources: dict[str, str] = {}
        sizes = size_symbols(graph)
        rows = tuple(_row(node, sources, sizes) for node in graph.nodes)
        self.stages.append(Stage(name, runnable(graph, name), rows))
        return len(self.stages) - 1

    def mark_site(self, graph: int, found: Match | Recognised, target: Target) -> Mark:
        """Where ``found`` stands; asked before anything is replaced."""
        if isinstance(found, Recognised):
            return Mark(graph, self._name(found.anchor), nodes=self._names({*found.inner, found.anchor}))
        outputs = [o for o in found.outputs if o is not None]
        plan = _plan(found, target)
        return Mark(
            graph=graph,
            anchor=self._name(found.anchor),
            nodes=self._names({*found.inner, *outputs, found.anchor}),
            inputs=tuple(dict.fromkeys(self._name(n) for n in found.inputs())),
            outputs=tuple(self._name(o) for o in outputs),
            features=gate.features(found),
            variant=plan.variant if plan is not None else "",
            why=plan.why if plan is not None else "",
            launches=tuple(_launch(launch) for launch in plan.launches) if plan is not None else (),
        )

    def mark_miss(self, graph: int, miss: Miss) -> None:
        nodes = tuple(dict.fromkeys(self.known_as.get(name, name) for name in miss.nodes))
        self.misses.append(Mark(graph, self.known_as.get(miss.anchor, miss.anchor), nodes=nodes))

    def watched(self, match: Match) -> list[tuple[fx.Node, fx.Node, int]]:
        """For each output of ``match`` a user and where it reads the output; for :meth:`replaced`."""
        users = [(o, next(iter(o.users))) for o in match.outputs if o is not None and o.users]
        return [(o, user, user.all_input_nodes.index(o)) for o, user in users]

    def replaced(self, watched: list[tuple[fx.Node, fx.Node, int]]) -> None:
        """Learn what the users of the outputs read now: later matches are marked by what stood there before."""
        for output, user, position in watched:
            if position < len(user.all_input_nodes):
                self.known_as[user.all_input_nodes[position].name] = self._name(output)

    def _names(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._name(node) for node in sorted(nodes)))

    def _name(self, node: fx.Node) -> str:
        return self.known_as.get(node.name, node.name)


_local = threading.local()


@contextlib.contextmanager
def recording(into: Recording | None) -> Iterator[None]:
    """Record what this thread compiles inside the block; None leaves everything as it is."""
    outer = active()
    _local.recording = into if into is not None else outer
    try:
        yield
    finally:
        _local.recording = outer


def active() -> Recording | None:
    """Where to record, or None: nobody wants a dump."""
    return getattr(_local, "recording", None)


def module_path(stack_entry: str) -> str:
    """``model.layers.0.mlp`` from Dynamo's ``L['self']._modules['model'].layers.0.mlp``; "" for the model itself."""
    path = re.sub(r"^[LG]\[[^\]]*\](\[[^\]]*\])*", "", stack_entry)
    path = re.sub(r"(\._modules|\._buffers|\._parameters)?\[['\"]?([^\]'\"]*)['\"]?\]", r".\2", path)
    return path.replace("._modules", "").strip(".")


def _row(node: fx.Node, sources: dict[str, str], sizes: Set[Any]) -> Row:
    trace = node.meta.get("stack_trace") or ""
    if trace not in sources:
        sources[trace] = source_line(node)
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entry, cls = next(reversed(stack.values())) if stack else ("", "")
    value = node.meta.get("val", node.meta.get("example_value"))
    return Row(
        name=node.name,
        target=node.op if node.op in ("placeholder", "output") else _target_name(node.target),
        arguments=tuple(n.name for n in node.all_input_nodes),
        type=type_text(value),
        path=module_path(entry) if isinstance(entry, str) else "",
        module=getattr(cls, "__name__", str(cls).rpartition(".")[2]),
        source=sources[trace],
        spec=input_spec(value, sizes),
    )


def _target_name(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def _plan(match: Match, target: Target) -> Plan | None:
    """The operator's plan on ``target``, or None where it has none for this call."""
    if match.operator.plan is None or match.operator.supports(**match.values(), target=target) is not None:
        return None
    return match.operator.plan(**match.values(), target=target)


def _launch(launch: Launch) -> str:
    """A kernel start in one line."""
    grid = " x ".join(str(hint(size)) for size in launch.grid)
    constexprs = ", ".join(f"{name}={value}" for name, value in launch.constexprs.items() if name.isupper())
    name = getattr(launch.kernel, "__name__", "kernel")
    return f"{name}[grid {grid}, {launch.num_warps} warps, {launch.num_stages} stages] {constexprs}"
