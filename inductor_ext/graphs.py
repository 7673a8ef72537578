"""Small questions about whole graphs."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx


def clone(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph and its nested graphs that shares parameters and buffers (Inductor consumes its input)."""
    shared = {id(t): t for t in (*gm.parameters(), *gm.buffers())}
    return copy.deepcopy(gm, shared)


def region_calls(graph: fx.Graph) -> list[tuple[fx.Graph, int]]:
    """The graphs of nested regions (``torch.compiler.nested_compile_region``) that ``graph`` calls, and how often."""
    calls: collections.Counter[str] = collections.Counter(
        node.args[0].target
        for node in graph.nodes
        if node.target is torch.ops.higher_order.invoke_subgraph and node.args[0].op == "get_attr"
    )
    return [(graph.owning_module.get_submodule(name).graph, n) for name, n in calls.items()]


def input_device(example_inputs: Sequence[Any]) -> torch.device:
    """The device that a graph with these inputs computes on."""
    return _compute_device(t.device for t in example_inputs if isinstance(t, torch.Tensor))


def graph_device(graph: fx.Graph) -> torch.device:
    """The device that ``graph`` computes on, from the example values of its inputs."""
    values = (node.meta.get("val", node.meta.get("example_value")) for node in graph.nodes if node.op == "placeholder")
    return _compute_device(v.device for v in values if isinstance(v, torch.Tensor))


def _compute_device(devices: Iterable[torch.device]) -> torch.device:
    """The first accelerator, else the first device."""
    found = list(devices)
    accelerators = [d for d in found if d.type not in ("cpu", "meta")]
    return (accelerators or found or [torch.device("cpu")])[0]
