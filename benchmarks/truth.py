"""What the right answer is, and how far an implementation may be from it.

Everything is judged by its distance from a wider computation, beside eager's own distance from it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclasses.dataclass(frozen=True)
class Error:
    """Distance of an output from the truth: ``relative`` in the Euclidean norm, ``largest`` in one element.

    ``scale``: the largest element of the truth.
    """

    relative: float
    largest: float
    scale: float

    @staticmethod
    def of(value: Tensor, truth: Tensor) -> Error:
        """The distance of ``value`` from ``truth`` (any wider dtype; a NaN in ``value`` gives NaN)."""
        if value.shape != truth.shape:
            raise ValueError(f"output has shape {tuple(value.shape)}, the truth {tuple(truth.shape)}")
        difference = value.to(truth.dtype) - truth
        norm = truth.norm().item()
        relative = difference.norm().item() / norm if norm else difference.norm().item()
        return Error(relative, difference.abs().amax().item(), truth.abs().amax().item())

    def acceptable(self, eager: Error, dtype: torch.dtype) -> bool:
        """No further off than 1.5 times ``eager``'s own error plus one rounding to ``dtype``.

        False for NaN: no comparison with it holds.
        """
        rounding = torch.finfo(dtype).eps
        return (
            self.relative <= 1.5 * eager.relative + rounding
            and self.largest <= 1.5 * eager.largest + rounding * self.scale
        )


def errors(outputs: Tensor | Sequence[Tensor], truths: Tensor | Sequence[Tensor]) -> list[Error]:
    """The error of each output."""
    return [Error.of(o, t) for o, t in zip(as_tuple(outputs), as_tuple(truths), strict=True)]


def all_acceptable(ours: list[Error], eager: list[Error], outputs: Tensor | Sequence[Tensor]) -> bool:
    """Whether every output passes :meth:`Error.acceptable`."""
    dtypes = [o.dtype for o in as_tuple(outputs)]
    return all(a.acceptable(b, dtype) for a, b, dtype in zip(ours, eager, dtypes, strict=True))


def as_tuple(value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One output or several, as a tuple."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def attention_truth(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
    """Attention in float64: ``softmax(q k^T / sqrt(D)) v`` with ``q[B, H, S, D]``, ``k, v[B, K, T, D]``.

    ``mask[B, 1, S, T]`` is boolean.  One head at a time, so that the scores of long sequences fit into memory.
    """
    groups = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        out[b, h] = F.scaled_dot_product_attention(
            q[b, h].double(),
            k[b, h // groups].double(),
            v[b, h // groups].double(),
            attn_mask=None if mask is None else mask[b, 0],
            is_causal=is_causal,
        )
    return out


class Wide(TorchDispatchMode):
    """Casts to a narrower type keep float64."""

    def __torch_dispatch__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Tensor:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in (torch.float32, torch.bfloat16):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
