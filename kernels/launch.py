"""How a kernel is started, as data.

Every operator describes its launches once, as a :class:`Plan`.  The eager implementation runs the plan
(:func:`run`); Inductor's lowering emits the same plan as calls in the generated wrapper.  So there is
one place that knows grids, block sizes and scratch buffers, and the two ways cannot drift apart.

Sizes and strides in a plan may be ``torch.SymInt``: a plan must not branch on them except through
:func:`hint` (a choice that only affects speed).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only torch brings no Triton: meaning, shapes and `explain` work without it
    triton = tl = None

IntLike = int | torch.SymInt


def jit(fn: Callable) -> Any:
    """``triton.jit``, or the plain function where Triton is not installed."""
    return fn if triton is None else triton.jit(fn)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A tensor that a plan asks for: an output, or scratch that lives only between its launches.

    ``stride`` None means contiguous.
    """

    shape: tuple[IntLike, ...]
    dtype: torch.dtype
    stride: tuple[IntLike, ...] | None = None

    @staticmethod
    def like(tensor: torch.Tensor) -> Buffer:
        """A buffer with the shape, strides and dtype of ``tensor`` (real or fake)."""
        return Buffer(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel start.

    ``args`` are run-time arguments by parameter name: a ``str`` names an operand of the operator, an
    output or a scratch buffer; ``None`` is an absent tensor; numbers are passed as they are.
    ``constexprs`` are compile-time arguments.  A kernel takes ``NUM_WARPS`` and ``NUM_STAGES`` as
    constexpr parameters if it is started with more than one value of them: Inductor tells two
    specialisations of a kernel apart by constexprs only (torch 2.11 to 2.14).
    """

    kernel: Any
    grid: tuple[IntLike, ...]
    args: Mapping[str, str | int | float | torch.SymInt | None]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that happens on the device for one call of an operator.

    ``variant`` names the kernel variant for the report, and ``why`` says what made it the one that runs.  ``outputs``
    are in the order in which the operator returns them.  ``mutated``: the operands that it writes, those that the
    operator's schema declares.
    """

    variant: str
    launches: tuple[Launch, ...]
    outputs: Mapping[str, Buffer]
    scratch: Mapping[str, Buffer] = dataclasses.field(default_factory=dict)
    mutated: tuple[str, ...] = ()
    why: str = ""


def hint(value: IntLike) -> int:
    """A representative value of a size, without adding a guard.  Only for choices of speed."""
    if isinstance(value, torch.SymInt):
        known = value.node.hint if value.node.has_hint() else None
        return 8192 if known is None else int(known)
    return value


def ceil_div(a: IntLike, b: IntLike) -> IntLike:
    """``ceil(a / b)`` for plain and symbolic integers."""
    return -(-a // b)


def merged_dims(
    sizes: Sequence[IntLike], *strides: Sequence[IntLike]
) -> tuple[tuple[IntLike, ...], tuple[tuple[IntLike, ...], ...]]:
    """Sizes, and strides of each tensor, of the fewest dimensions that reach the same elements in order; at least one.

    Neighbouring dimensions are merged where that is known to be right for all tensors, without a guard.
    """
    dims: list[tuple[IntLike, list[IntLike]]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if statically_known_true(size == 1):
            continue
        if dims and all(statically_known_true(a == size * b) for a, b in zip(dims[-1][1], steps, strict=True)):
            dims[-1] = (dims[-1][0] * size, steps)
        else:
            dims.append((size, steps))
    dims = dims or [(1, [0] * len(strides))]
    return tuple(size for size, _ in dims), tuple(zip(*(steps for _, steps in dims), strict=True))


def next_power_of_two(n: int) -> int:
    """The least power of two from ``n`` on, at least 1: the size of a tile that holds ``n`` elements."""
    return 1 << max(0, n - 1).bit_length()


def run(plan: Plan, operands: Mapping[str, torch.Tensor | None], device: torch.device) -> list[torch.Tensor]:
    """Run ``plan`` on real tensors and return its outputs in order."""
    tensors = dict(operands)
    for name, buffer in (*plan.outputs.items(), *plan.scratch.items()):
        stride = buffer.stride or dense_strides(buffer.shape)
        tensors[name] = torch.empty_strided(buffer.shape, stride, dtype=buffer.dtype, device=device)
    for launch in plan.launches:
        if 0 in launch.grid:
            continue
        args = {k: tensors[v] if isinstance(v, str) else v for k, v in launch.args.items()}
        launch.kernel[launch.grid](
            **args, **launch.constexprs, num_warps=launch.num_warps, num_stages=launch.num_stages
        )
    return [tensors[name] for name in plan.outputs]


def dense_strides(shape: Sequence[IntLike], order: Sequence[int] | None = None) -> tuple[IntLike, ...]:
    """Strides of a dense tensor whose dimensions lie in ``order``, outermost first; None: contiguous."""
    strides: list[IntLike] = [1] * len(shape)
    step: IntLike = 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        step = step * shape[dim]
    return tuple(strides)


def empty_ordered(
    shape: Sequence[IntLike], order: Sequence[int] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An uninitialised dense tensor whose dimensions lie in ``order``, outermost first; None: contiguous."""
    return torch.empty_permuted(shape, order or tuple(range(len(shape))), dtype=dtype, device=device)


def ordered(x: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    """A copy of ``x`` whose dimensions lie in ``order``: how references obey an operator's ``out_order``."""
    return empty_ordered(x.shape, order, x.dtype, x.device).copy_(x)
