"""An operator: one torch op with its meaning, its fake, and its kernels.

The plain-torch reference *is* the meaning.  It is the CPU implementation, the oracle of the tests and the
shape function; kernels are ways to compute the same on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .launch import Plan, run
from .target import Target, device_target


@dataclasses.dataclass(frozen=True)
class Operator:
    """A torch op together with what its users need to decide about it.

    ``op``: the overload that stands in graphs.  ``reference(*args)``: plain torch, any device.
    ``supports(*args, target=...)``: None, or why no kernel here can do it, in one line; works on fake and
    meta tensors.  ``plan(*args, target=...)``: the launches; only called when ``supports`` said None; None for an
    operator that has no kernel, only its meaning.  ``params``: the operator's argument names in order.  ``no_kernel``:
    why there is none, in one line.

    An op is functional, but for the operands that its schema declares to be written (``Tensor(a!) cache``).
    """

    op: torch._ops.OpOverload
    reference: Callable[..., Any]
    supports: Callable[..., str | None]
    plan: Callable[..., Plan] | None
    params: tuple[str, ...]
    no_kernel: str = "there is no kernel for it yet"

    @property
    def name(self) -> str:
        return self.op.name()

    @property
    def mutated(self) -> tuple[str, ...]:
        """The operands that the op writes, in order."""
        written = (a for a in self.op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        return tuple(a.name for a in written)

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, defaults filled in."""
        schema = self.op._schema.arguments
        bound = {a.name: a.default_value for a in schema if a.has_default_value()}
        bound.update(zip(self.params, args, strict=False))
        bound.update(kwargs)
        return bound


def define_operator(
    schema: str,
    *,
    reference: Callable[..., Any],
    supports: Callable[..., str | None],
    plan: Callable[..., Plan] | None = None,
    fake: Callable[..., Any] | None = None,
    autocast: bool = False,
    no_kernel: str = Operator.no_kernel,
) -> Operator:
    """Define the torch op ``schema`` (``"my_namespace::my_op(Tensor x, ...) -> Tensor"``).

    The op returns fresh tensors and writes only what the schema declares.  On a GPU it runs ``plan``; where
    ``supports`` objects, and on every other device, it runs ``reference``.  ``fake`` defaults to
    ``reference`` run on fake tensors, so that strides are those of the plain-torch code.  ``autocast``: under
    autocast all floating-point tensors are cast to its dtype first, as torch does for matmuls and attention.
    """
    qualname, arguments = schema.split("(", 1)
    torch.library.define(qualname, "(" + arguments, tags=(torch.Tag.pt2_compliant_tag,))
    namespace, name = qualname.split("::")
    op = getattr(getattr(torch.ops, namespace), name).default
    operator = Operator(op, reference, supports, plan, tuple(a.name for a in op._schema.arguments), no_kernel)

    def on_gpu(*args: Any, **kwargs: Any) -> Any:
        bound = operator.bind(args, kwargs)
        tensors = {k: v for k, v in bound.items() if isinstance(v, torch.Tensor)}
        device = next(iter(tensors.values())).device
        target = device_target(device)
        if supports(**bound, target=target) is not None:
            return reference(**bound)
        with torch.cuda.device(device):
            outputs = run(plan(**bound, target=target), {**bound, **tensors}, device)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    torch.library.impl(qualname, "CompositeExplicitAutograd")(reference)
    if plan is not None:
        torch.library.impl(qualname, "CUDA")(on_gpu)
    torch.library.register_fake(qualname)(fake or reference)
    if autocast:
        for device_type in ("CUDA", "CPU"):
            torch.library.impl(qualname, f"Autocast{device_type}")(_autocast(operator, device_type.lower()))
    return operator


_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def _autocast(operator: Operator, device_type: str) -> Callable[..., Any]:
    """The autocast kernel; ``register_autocast`` would fix one dtype for good."""

    def cast_and_call(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        bound = operator.bind(args, kwargs)
        for name, value in reversed(bound.items()):  # torch's own casts stand in this order in a graph
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
                bound[name] = value.to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            return operator.op(**bound)

    return cast_and_call


def check_target(target: Target) -> str | None:
    """Why no Triton kernel can run on ``target`` at all, or None."""
    if target.backend == "cpu":
        return "no kernel for the CPU"
    if target.triton_version == (0, 0):
        return "Triton is not installed"
    if target.backend == "cuda" and target.capability < 80:
        return f"needs compute capability 8.0 or later, this is {target.arch}"
    return None
