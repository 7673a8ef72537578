"""From an operator in the graph to kernel launches in Inductor's generated wrapper.

Each launch of the operator's plan becomes a user-defined Triton kernel, which the wrapper starts exactly as it
starts Inductor's own: no dispatcher, and CUDA graphs and the C++ wrapper work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..kernels.attention import ATTENTION
from ..kernels.launch import Launch
from ..kernels.linear import GATED_LINEAR, LINEAR, QKV_LINEAR
from ..kernels.operator import Operator
from ..kernels.qk_rope import QK_ROPE, QK_ROPE_APPEND
from ..kernels.rms_norm import ADD_RMS_NORM, RMS_NORM
from ..kernels.rope import ROPE
from ..kernels.router import ROUTER
from ..kernels.swiglu import SWIGLU
from ..kernels.target import device_target
from ..kernels.topk import TOPK, TOPK_INDICES
from . import inductor_compat as inductor

_registered: dict[str, Operator] = {}


def register_operator(operator: Operator) -> None:
    """Teach Inductor to lower ``operator``.  Registering the same operator again does nothing.

    Raises ValueError if another operator has the same name.
    """
    if _registered.get(operator.name, operator) is not operator:
        raise ValueError(f"another operator named {operator.name!r} is registered; choose another name")
    if operator.name not in _registered:
        _registered[operator.name] = operator
        inductor.register_lowering(operator.op, _lowering(operator))


def registered_operators() -> list[Operator]:
    """All operators that Inductor can lower, ours and those of third parties."""
    return list(_registered.values())


def _lowering(operator: Operator) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        node = inductor.current_node()
        bound = operator.bind(args, kwargs)
        values = {
            name: a.meta["val"] if isinstance(a, torch.fx.Node) else a
            for name, a in operator.bind(node.args, dict(node.kwargs)).items()
        }
        tensors = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
        device = next(iter(tensors.values())).device
        target = device_target(device)
        if target.backend == "cpu" or operator.plan is None or operator.supports(**values, target=target) is not None:
            return inductor.fallback(operator.op)(*args, **kwargs)
        plan = operator.plan(**values, target=target)
        boxes = {name: inductor.with_strides(bound[name], v.stride()) for name, v in tensors.items()}
        if any(not inductor.same_buffer(boxes[name], bound[name]) for name in plan.mutated):
            return inductor.fallback(operator.op)(*args, **kwargs)  # a copy would be written instead
        for name, buffer in (*plan.outputs.items(), *plan.scratch.items()):
            boxes[name] = inductor.empty(buffer, device)
        read_only = set(tensors) - set(plan.mutated)
        written = {name for launch in plan.launches for name in _emit(operator, launch, boxes, read_only)}
        unwritten = sorted(set(plan.mutated) - written)
        if unwritten:
            raise RuntimeError(f"{operator.name} should write {unwritten}, but Inductor's analysis says it does not")
        outputs = [boxes[name] for name in plan.outputs]
        return outputs[0] if len(outputs) == 1 else outputs

    return lower


def _emit(operator: Operator, launch: Launch, boxes: dict[str, Any], read_only: set[str]) -> set[str]:
    """Emit one launch; returns what it writes, and insists that Inductor's analysis finds nothing ``read_only`` in it.

    Where the analysis fails, Inductor assumes that a kernel writes everything it is given: right, but it would copy
    the inputs of every launch.
    """
    args = {k: boxes[v] if isinstance(v, str) else inductor.expression(v) for k, v in launch.args.items()}
    written = {launch.args[parameter] for parameter in inductor.launch(launch, args)}
    mutated = sorted(written & read_only)
    if mutated or not written:
        raise RuntimeError(
            f"{launch.kernel.__name__} of {operator.name} should write its results only, but Inductor's analysis says "
            f"{mutated or 'nothing'}; do these versions of torch and Triton fit together?"
        )
    return written


for _operator in (
    ATTENTION,
    RMS_NORM,
    ADD_RMS_NORM,
    ROPE,
    QK_ROPE,
    QK_ROPE_APPEND,
    SWIGLU,
    TOPK,
    TOPK_INDICES,
    ROUTER,
    LINEAR,
    QKV_LINEAR,
    GATED_LINEAR,
):
    register_operator(_operator)
