"""Keep attention in one piece through autograd tracing.

Before AOTAutograd, ``scaled_dot_product_attention`` is one node with its mask, ``is_causal``, ``scale`` and
``enable_gqa`` intact.  After it, it is one of several backend-specific ops with the mask already expanded and the
keys already repeated, or plain matmuls.  So a call that our kernels could serve is renamed in place to
``portable_ops::attention``, which means the same.  What the rewrite pass then declines goes back through
:func:`unpin` to exactly what stock Inductor would have traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ..kernels.attention import ATTENTION
from ..kernels.target import Target
from ..patterns.algebra import dense_order
from ..patterns.match import source_line

aten = torch.ops.aten
_SDPA = (
    torch._C._nn.scaled_dot_product_attention,
    aten.scaled_dot_product_attention,
    aten.scaled_dot_product_attention.default,
)
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclasses.dataclass(frozen=True)
class Unpinned:
    """An attention call that stays as it is, and why."""

    reason: str
    source: str


def pin(gm: fx.GraphModule, target: Target) -> list[Unpinned]:
    """Rename the attention calls of ``gm`` (and of its nested graphs) that a kernel for ``target`` can serve.

    Returns the calls that were left alone.  Only the node's target and arguments change.
    """
    unpinned = []
    for graph in _graphs(gm):
        context = _context(graph)
        pinned = False
        for node in graph.nodes:
            if node.op != "call_function" or node.target not in _SDPA:
                continue
            reason = context or _pin_node(node, target)
            if reason is None:
                pinned = True
            else:
                unpinned.append(Unpinned(reason, source_line(node)))
        if pinned:
            graph.owning_module.recompile()
    return unpinned


def _graphs(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield module.graph


def _context(graph: fx.Graph) -> str | None:
    """Why nothing in this graph may be pinned, whatever the call looks like."""
    cuda = torch.backends.cuda
    if not (cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled() and cuda.math_sdp_enabled()):
        return "the attention back ends are restricted (torch.nn.attention.sdpa_kernel)"
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if "sdpa_kernel" in name:
            return "the attention back ends are restricted (torch.nn.attention.sdpa_kernel)"
        if name.endswith("_increment_nesting"):
            return "it stands inside a functorch transform"
    return None


def _pin_node(node: fx.Node, target: Target) -> str | None:
    arguments = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    arguments.update(zip(_PARAMETERS, node.args, strict=False))
    arguments.update(node.kwargs)
    out = _example(node)
    values = {name: _example(a) if isinstance(a, fx.Node) else a for name, a in arguments.items()}
    reason = _refusal(values, out)
    if reason is not None:
        return reason
    call = {
        "q": arguments["query"],
        "k": arguments["key"],
        "v": arguments["value"],
        **{name: arguments[name] for name in ("attn_mask", "is_causal", "scale", "enable_gqa")},
    }
    examples = {name: _example(a) if isinstance(a, fx.Node) else a for name, a in call.items()}
    reason = ATTENTION.supports(**examples, target=target)
    if reason is not None:
        return reason
    order = dense_order(out)
    if order is None:
        return "its output has gaps in memory, or head_dim is not innermost"
    call["out_order"] = list(order)
    names = ATTENTION.params
    node.target = ATTENTION.op
    node.args = tuple(call[name] for name in names)
    node.kwargs = {}
    return None


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _refusal(values: dict[str, Any], out: Any) -> str | None:
    tensors = [values[name] for name in ("query", "key", "value")]
    if values["attn_mask"] is not None:
        tensors.append(values["attn_mask"])
    if not all(type(t) in (FakeTensor, torch.Tensor, torch.nn.Parameter) for t in (*tensors, out)):
        return "an argument is not a plain tensor (a subclass, or nothing is known of it)"
    if isinstance(values["dropout_p"], bool) or values["dropout_p"] != 0:
        return f"dropout_p is {values['dropout_p']}: the kernels have no dropout"
    if out.requires_grad:
        return "a gradient is needed and the attention kernels have no backward"
    if not isinstance(values["is_causal"], bool) or not isinstance(values["enable_gqa"], bool):
        return "is_causal and enable_gqa must be known when compiling"
    if values["scale"] is not None and not isinstance(values["scale"], int | float):
        return "scale must be a number that is known when compiling"
    return None


# ------------------------------------------------------------------------------------------------- unpin


def unpin(node: fx.Node, traced: dict[Any, fx.Graph]) -> set[fx.Node]:
    """Put back what stock Inductor would have traced for the pinned attention ``node`` of an ATen graph.

    ``traced`` keeps the traces of one graph, so that equal layers are traced once.  Returns the new nodes.
    """
    arguments = ATTENTION.bind(node.args, dict(node.kwargs))
    tensors = {n: a for n, a in arguments.items() if isinstance(a, fx.Node)}
    literals = {n: a for n, a in arguments.items() if n not in tensors and n != "out_order"}
    values = tuple(t.meta["val"] for t in tensors.values())
    metadata = [(n, str(v.shape), str(v.stride()), v.dtype) for n, v in zip(tensors, values, strict=True)]
    key = (*metadata, *literals.items())
    if key not in traced:
        traced[key] = _stock_graph(tuple(tensors), values, literals)
    graph = traced[key]
    environment = dict(zip((n for n in graph.nodes if n.op == "placeholder"), tensors.values(), strict=True))
    result = None
    with node.graph.inserting_before(node):
        for inner in graph.nodes:
            if inner.op == "output":
                result = environment[inner.args[0]]
            elif inner.op != "placeholder":
                copy = node.graph.node_copy(inner, environment.__getitem__)
                copy.meta = {
                    **node.meta,
                    **{k: inner.meta[k] for k in ("val", "tensor_meta") if k in inner.meta},
                }
                environment[inner] = copy
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return {n for n in environment.values() if n not in tensors.values()}


def _stock_graph(names: tuple[str, ...], values: tuple[Any, ...], literals: dict[str, Any]) -> fx.Graph:
    """The ATen graph of plain attention, traced with Inductor's decompositions."""
    from torch._guards import detect_fake_mode
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    def attention(*tensors: torch.Tensor) -> torch.Tensor:
        call = {**dict(zip(names, tensors, strict=True)), **literals}
        q, k, v = call.pop("q"), call.pop("k"), call.pop("v")
        return F.scaled_dot_product_attention(q, k, v, **call)

    # The fake mode of the values, so that constants which attention makes are fake as well (on the meta device).
    with torch.no_grad(), detect_fake_mode(values) or contextlib.nullcontext():
        graph = make_fx(attention, decomposition_table=select_decomp_table())(*values).graph
    graph.eliminate_dead_code()
    return graph
