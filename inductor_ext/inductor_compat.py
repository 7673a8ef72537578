"""The only module that touches Inductor's internals.

Checked on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0 (on an H200: 2.11.0; elsewhere the generated code); read on 2.12.0.

=====================================  =====================================================================
internal                               differences between the versions
=====================================  =====================================================================
``ir.UserDefinedTritonKernel``         2.14 also wants ``launch_kwargs``
mutation analysis of a kernel          2.11: ``identify_mutated_tensors``; from 2.12: ``identify_accessed_tensors``
``_post_fusion_custom_pass``           2.11: any callable; from 2.13: a ``CustomSchedulerPass``
``GraphLowering.save_output_code``     2.11 to 2.15: None, or called with the code of every wrapper
=====================================  =====================================================================
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import config, custom_graph_pass, ir, lowering
from torch._inductor.graph import GraphLowering, SubgraphLowering
from torch._inductor.virtualized import V

from ..kernels.launch import Buffer, IntLike, Launch, triton


def register_lowering(op: torch._ops.OpOverload, lower: Callable[..., Any]) -> None:
    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def fallback(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A lowering that calls the op's eager implementation."""
    return lowering.fallback_handler(op, add_to_fallback_set=False)


def tunes_matmuls() -> bool:
    """Whether Inductor, as configured where this is asked, tries several kernels for each matrix product."""
    return bool(config.max_autotune or config.max_autotune_gemm)


def current_node() -> torch.fx.Node:
    """The graph node that is being lowered."""
    return V.graph.current_node


def expression(value: Any) -> Any:
    """A symbolic size as the sympy expression that Inductor prints; anything else as it is."""
    return value.node.expr if isinstance(value, torch.SymInt) else value


def with_strides(box: Any, strides: Sequence[IntLike]) -> Any:
    """``box`` realised with exactly ``strides``; a copy only where it already has others."""
    box.realize()
    return ir.ExternKernel.require_exact_strides(box, [expression(s) for s in strides])


def same_buffer(a: Any, b: Any) -> bool:
    """Whether two realised tensors are one in memory."""
    return a.get_name() == b.get_name() and a.get_layout().offset == b.get_layout().offset


def empty(buffer: Buffer, device: torch.device) -> Any:
    """An uninitialised tensor for a kernel to write."""
    shape = [expression(s) for s in buffer.shape]
    strides = buffer.stride or ir.FlexibleLayout.contiguous_strides(shape)
    make = lowering.lowerings[torch.ops.aten.empty_strided.default]
    return make(shape, [expression(s) for s in strides], dtype=buffer.dtype, device=device)


@functools.cache
def _configured(kernel: Any, num_warps: int, num_stages: int) -> Any:
    """``kernel`` with its launch options (one configuration: nothing is tuned)."""
    config = triton.Config({}, num_warps=num_warps, num_stages=num_stages)
    return triton.autotune([config], key=[])(kernel)


def launch(launch: Launch, args: Mapping[str, Any]) -> list[str]:
    """Emit one kernel start with ``args`` by parameter name; returns the parameters that it stores to."""
    # Equal kernels get the index that they have; from torch 2.12 on, torch._dynamo.reset() empties the table.
    configured = _configured(launch.kernel, launch.num_warps, launch.num_stages)
    index = triton_kernel_wrap.kernel_side_table.add_kernel(configured)
    with _remembered_analysis():
        node = ir.UserDefinedTritonKernel(
            kernel_idx=index,
            grid=[tuple(expression(size) for size in (*launch.grid, 1, 1)[:3])],
            tma_descriptor_metadata={},
            kernel_args={**args, **launch.constexprs},
            **_LAUNCH_KWARGS,
        )
    return [name for name, arg in args.items() if any(arg is buffer for buffer in node.mutable_args)]


_ANALYSIS = (
    "identify_accessed_tensors"
    if hasattr(triton_kernel_wrap, "identify_accessed_tensors")
    else "identify_mutated_tensors"
)
_analyses: dict[Any, Any] = {}
_analysis_lock = threading.RLock()


@contextlib.contextmanager
def _remembered_analysis() -> Iterator[None]:
    """Let the constructor of a kernel node analyse what the kernel writes once per specialisation.

    The analysis compiles the kernel to Triton's IR, some 0.1 s, and equal layers would repeat it.  The result depends
    on the kernel, its constexprs and the types of its arguments, so the answer is the same for everybody who asks in
    the meantime.
    """
    analyse = getattr(triton_kernel_wrap, _ANALYSIS)

    def remembered(kernel: Any, kwargs: Mapping[str, Any], *rest: Any) -> Any:
        constexprs = {p.name for p in kernel.params if p.is_constexpr}
        key = (
            kernel,
            tuple((n, v if n in constexprs else _kind_of_argument(v)) for n, v in kwargs.items()),
            repr(rest),
        )
        if key not in _analyses:
            _analyses[key] = analyse(kernel, kwargs, *rest)
        return _analyses[key]

    with _analysis_lock:
        setattr(triton_kernel_wrap, _ANALYSIS, remembered)
        try:
            yield
        finally:
            setattr(triton_kernel_wrap, _ANALYSIS, analyse)


def _kind_of_argument(value: Any) -> Any:
    return value.get_dtype() if isinstance(value, ir.IRNode) else type(value)


_LAUNCH_KWARGS = (
    {"launch_kwargs": ()}
    if "launch_kwargs" in inspect.signature(ir.UserDefinedTritonKernel.__init__).parameters
    else {}
)


def without_caches() -> contextlib.AbstractContextManager[None]:
    """Compile anew inside the block, whatever the caches hold."""
    return config.patch(force_disable_caches=True)


def freezes() -> bool:
    """Whether Inductor takes the weights of the graph that is being compiled for constants."""
    return bool(config.freezing) and not torch.is_grad_enabled()


@contextlib.contextmanager
def generated_code(keep: Callable[[str], None]) -> Iterator[None]:
    """Give ``keep`` the source of every wrapper that this thread generates inside the block.

    The hook is the one that ``torch._inductor.utils.run_and_get_code`` uses; whoever is in it already is still called.
    """
    before, thread = GraphLowering.save_output_code, threading.get_ident()

    def save(code: str) -> None:
        if threading.get_ident() == thread:
            keep(code)
        if before is not None:
            before(code)

    GraphLowering.save_output_code = save
    try:
        yield
    finally:
        GraphLowering.save_output_code = before


class EmbedReport(getattr(custom_graph_pass, "CustomSchedulerPass", object)):
    """Writes the report of the graph into its generated wrapper, so that it survives a warm cache.

    Runs where the wrapper's code is being generated (``_post_fusion_custom_pass``).  ``payload()`` gives the JSON
    text of the report; ``then`` is the user's own pass in the same hook.
    """

    def __init__(self, payload: Callable[[], str | None], then: Callable | None, key: Any) -> None:
        self._payload, self._then, self._key = payload, then, key

    def __call__(self, nodes: list) -> list:
        # A nested region is part of its parent's wrapper; an ahead-of-time package has no Python wrapper.
        if not isinstance(V.graph, SubgraphLowering) and not V.graph.aot_mode:
            payload = self._payload()
            if payload is not None:
                imports = V.graph.wrapper_code.imports
                imports.writeline("from portable_ops.inductor_ext.report import restore as _restore_report")
                imports.writeline(f"_restore_report({payload!r})")
        return nodes if self._then is None else self._then(nodes)

    def uuid(self) -> Any:
        return self._key
