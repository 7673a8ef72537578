"""``portable_ops.verify``: both graphs on the first call, and back to stock if they disagree."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from .graphs import clone

log = logging.getLogger(__name__)

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

TOLERANCE = {
    torch.bfloat16: 2.0**-6,
    torch.float16: 2.0**-9,
    torch.float32: 2.0**-12,
    torch.float64: 2.0**-40,
}
"""Largest norm-wise relative difference that counts as rounding: four units in the last place of a bf16, for an fp32
graph what TF32 matmuls may do.  Stock's own distance from eager widens it, since a deep graph amplifies rounding."""


def verified(gm: fx.GraphModule, example_inputs: Sequence[Any], stock: Compile, ours: Compile) -> Callable[..., Any]:
    """Compile ``gm`` both ways; the first call runs stock, ours and eager and picks one for good.

    What the graph writes to is cloned for these runs.  Inference only: a graph that needs gradients is compiled our
    way with a warning.
    """
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs):
        log.warning("portable_ops.verify checks inference only; this graph needs gradients and is not verified")
        return ours(gm, example_inputs)
    eager = clone(gm)
    mutated = mutated_inputs(eager)
    stock_fn = stock(clone(gm), example_inputs)
    ours_fn = ours(gm, example_inputs)
    chosen: list[Callable[..., Any]] = []
    lock = threading.Lock()

    def call(*args: Any) -> Any:
        with lock:
            if not chosen:
                chosen.append(_choose(eager, stock_fn, ours_fn, args, mutated))
        return chosen[0](*args)

    return call


def mutated_inputs(gm: fx.GraphModule) -> frozenset[int]:
    """The positions of the inputs that ``gm`` writes to, found by running it on fake tensors."""
    examples = [node.meta.get("example_value") for node in gm.graph.nodes if node.op == "placeholder"]
    tensors = {i: t for i, t in enumerate(examples) if isinstance(t, FakeTensor)}
    if not tensors:
        return frozenset()
    mode = next(iter(tensors.values())).fake_mode
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        # A tensor made in inference mode does not count its versions.
        with mode, torch.inference_mode(False), torch.no_grad():
            copies = list(examples)
            for i, t in tensors.items():
                copies[i] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            before = {i: copies[i]._version for i in tensors}
            gm(*copies)
            return frozenset(i for i in tensors if copies[i]._version != before[i])
    finally:
        mode.allow_non_fake_inputs = allowed


def _choose(
    eager: Callable, stock: Callable, ours: Callable, args: Sequence[Any], mutated: frozenset[int]
) -> Callable[..., Any]:
    runs = {name: _trial(fn, args, mutated) for name, fn in (("eager", eager), ("stock", stock), ("ours", ours))}
    difference = _difference(runs)
    if difference is None:
        log.info("verified: the rewritten graph agrees with stock Inductor")
        return ours
    log.warning(
        "portable_ops.verify: the rewritten graph differs from stock beyond rounding (%s); "
        "this graph stays with stock Inductor",
        difference,
    )
    return stock


def _trial(fn: Callable, args: Sequence[Any], mutated: frozenset[int]) -> list[Any]:
    """Results of ``fn``, followed by what it wrote to: clones, as are whatever shares memory with them.

    Every trial draws the same random numbers, and the caller's generators stay where they were.
    """
    args = _with_clones(args, mutated)
    devices = {a.device.index for a in args if isinstance(a, torch.Tensor) and a.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices)), torch.no_grad():
        results = fn(*args)
    flat = torch.utils._pytree.tree_leaves(results)
    # Copies, since a CUDA graph reuses the memory of its results.
    written = [args[i] for i in sorted(mutated)]
    return [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in (*flat, *written)]


def _with_clones(args: Sequence[Any], mutated: frozenset[int]) -> list[Any]:
    """``args`` with clones of the mutated ones; tensors that shared memory share their clones' memory."""
    storages: dict[int, torch.UntypedStorage] = {}
    bases: dict[int, torch.Tensor] = {}
    for i in mutated:
        storage = args[i].untyped_storage()
        storages.setdefault(storage._cdata, storage.clone())

    def rebuilt(t: torch.Tensor) -> torch.Tensor:
        storage = storages[t.untyped_storage()._cdata]
        return t.new_empty(0).set_(storage, t.storage_offset(), t.shape, t.stride())

    def cloned(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.layout != torch.strided or t.untyped_storage()._cdata not in storages:
            return t
        base = t._base
        if base is None or base.dtype != t.dtype:
            return rebuilt(t)
        # A view of a clone, so that the graph sees the same relations between its inputs.
        if id(base) not in bases:
            bases[id(base)] = rebuilt(base)
        return bases[id(base)].as_strided(t.shape, t.stride(), t.storage_offset())

    with torch.no_grad():
        return [cloned(a) for a in args]


def _difference(runs: dict[str, list[Any]]) -> str | None:
    """In words, the first result in which ours is further from stock than rounding explains; None if none is."""
    for index, (eager, stock, ours) in enumerate(zip(*runs.values(), strict=True)):
        if not isinstance(stock, torch.Tensor):
            if stock != ours:
                return f"result {index}: {ours!r} instead of {stock!r}"
            continue
        if stock.dtype.is_complex:
            eager, stock, ours = (torch.view_as_real(t.resolve_conj()) for t in (eager, stock, ours))
        if not stock.dtype.is_floating_point:
            if not torch.equal(stock, ours) and torch.equal(stock, eager):
                return f"result {index}: integers differ"
            continue
        if not torch.equal(stock.isnan(), ours.isnan()):
            return f"result {index}: NaN in other places"
        distance, own = _relative(ours, stock), _relative(stock, eager)
        allowed = TOLERANCE.get(stock.dtype, 2.0**-6) + 2 * own
        if not distance <= allowed:
            return f"result {index}: relative difference {distance:.2e}, allowed {allowed:.2e}"
    return None


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``b``, where both are finite; infinities must be equal."""
    a, b = a.double(), b.double()
    finite = a.isfinite() & b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(0.0), b[~finite].nan_to_num(0.0)):
        return float("inf")
    difference = torch.linalg.vector_norm(a[finite] - b[finite])
    return float(difference / torch.linalg.vector_norm(b[finite]).clamp_min(torch.finfo(torch.float64).tiny))
