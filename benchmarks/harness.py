"""How everything here is measured, shown and written down.

Implementations of one case run in turns in one process.  A GPU is timed with events around each repetition,
after the L2 cache was flushed; what is short is captured into a CUDA graph first, so that the time
which Python takes to launch it does not count.  Every figure is a median.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch._inductor import list_mode_options

from . import truth
from .results import BASELINE, Row

progress = Console(stderr=True)

IMPLEMENTATIONS = {
    "eager": None,
    BASELINE: {},
    "portable_ops": {"backend": "portable_ops"},
    "portable_ops gate=always": {"backend": "portable_ops", "options": {"portable_ops.gate": "always"}},
    "portable_ops gate=never": {"backend": "portable_ops", "options": {"portable_ops.gate": "never"}},
    "portable_ops gate=measure": {"backend": "portable_ops", "options": {"portable_ops.gate": "measure"}},
}
"""What can be measured: the arguments of ``torch.compile``, None for eager."""

FLUSH_BYTES = 256 * 2**20
"""More than the L2 of any GPU that we know of (H200: 60 MB).  The cache is flushed by reading: a flush that writes
leaves it full of modified lines, and writing those back would be charged to what is timed (12 us on an H200)."""


def compile_as(impl: str, fn: Callable, mode: str | None = None, **flags: Any) -> Callable:
    """``fn`` as ``impl`` (a name of IMPLEMENTATIONS) runs it, with static shapes."""
    arguments = IMPLEMENTATIONS[impl]
    if arguments is None:
        return fn
    if mode and "options" in arguments:
        # torch.compile takes a mode or options, not both; a mode is a set of options.
        options = {**list_mode_options(mode), **arguments["options"]}
        arguments, mode = {**arguments, "options": options}, None
    return torch.compile(fn, dynamic=False, mode=mode, **arguments, **flags)


@dataclasses.dataclass
class Candidate:
    """One implementation of a case, compiled and ready: ``call()`` runs it once.

    ``variant``: which of our kernels it runs, from the backend's report.  ``output``: of the first call.
    """

    impl: str
    call: Callable[[], Any]
    variant: str
    output: Any


def prepare(
    impl: str,
    fn: Callable,
    use: Callable[[Callable], Any],
    mode: str | None = None,
    runs: int = 1,
    **flags: Any,
) -> Candidate:
    """Compile ``fn`` as ``impl`` and run it ``runs`` times; ``use(f)`` calls ``f``, the result."""
    start, known = time.perf_counter(), len(_reports(impl))
    call = functools.partial(use, compile_as(impl, fn, mode, **flags))
    for _ in range(runs - 1):
        call()
    output = call()
    progress.print(f"  {impl}: ready in {time.perf_counter() - start:.1f} s", highlight=False)
    return Candidate(impl, call, _variants(_reports(impl)[known:]), output)


def _reports(impl: str) -> list[Any]:
    if not impl.startswith("portable_ops"):
        return []
    from portable_ops.inductor_ext import reports

    return reports()


def _variants(reports: list[Any]) -> str:
    """``attention: portable x32, rms_norm declined x65``, from the reports of one compilation."""
    tally: dict[str, int] = {}
    for site in (site for report in reports for site in report.sites):
        what = f": {site.variant}" if site.decision == "rewritten" else " declined"
        tally[site.kind + what] = tally.get(site.kind + what, 0) + site.count
    return ", ".join(f"{what} x{count}" for what, count in sorted(tally.items()))


# ------------------------------------------------------------------------------------------------- timing


class Clock:
    """Times repetitions on one device; ``repetitions`` of each candidate, in turns."""

    def __init__(self, device: str, repetitions: int) -> None:
        self.on_gpu, self.repetitions = device.startswith("cuda"), repetitions
        if self.on_gpu:
            self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def in_turns(self, calls: Sequence[Callable[[], Any]], before: Callable[[], Any] = lambda: None) -> list[float]:
        """Microseconds of each call: GPU events around it, or the wall clock on a CPU.

        ``before`` runs ahead of each repetition, outside the timed region.  Nothing waits for the GPU in
        between: a call whose launch takes longer than the flush is timed with the launch, as a user would
        see it.
        """
        measured: list[list[Any]] = [[] for _ in calls]
        for index in range(self.repetitions):
            order = range(len(calls)) if index % 2 == 0 else reversed(range(len(calls)))
            for i in order:
                before()
                measured[i].append(self._once(calls[i]))
        if self.on_gpu:
            torch.cuda.synchronize()
            measured = [[start.elapsed_time(end) * 1e3 for start, end in pairs] for pairs in measured]
        return [statistics.median(times) for times in measured]

    def _once(self, call: Callable[[], Any]) -> Any:
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.sum()
        start.record()
        call()
        end.record()
        return start, end

    def replays(self, calls: Sequence[Callable[[], Any]]) -> list[float]:
        """As :meth:`in_turns`, with each call captured into a CUDA graph and replayed."""
        if not self.on_gpu:
            return self.in_turns(calls)
        graphs = [capture(call) for call in calls]
        return self.in_turns([graph.replay for graph in graphs])

    def host(self, calls: Sequence[Callable[[], Any]], before: Callable[[], Any] = lambda: None) -> list[float]:
        """Microseconds until each call returns, with an idle GPU to launch to."""
        measured: list[list[float]] = [[] for _ in calls]
        for _ in range(self.repetitions):
            for times, call in zip(measured, calls, strict=True):
                before()
                self.wait()
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e6)
        return [statistics.median(times) for times in measured]

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()


def capture(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``call``, warmed up on a side stream as capture demands."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """How far one call raises the allocated memory at its peak, outputs included; None without a GPU."""
    if not device.startswith("cuda"):
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# --------------------------------------------------------------------------------------------------- rows


def kernel_case(
    case: str,
    fn: Callable,
    inputs: Sequence[Tensor | None],
    exact: Tensor | Sequence[Tensor],
    args: argparse.Namespace,
) -> list[Row]:
    """The rows of one small case: correctness first, then CUDA-graph replays, host time and peak memory.

    ``exact``: the outputs in a wider dtype.
    """
    progress.print(case, highlight=False)
    eager = truth.errors(fn(*inputs), exact)
    # Earlier cases compiled the same code for other shapes; their entries would only slow the lookup down.
    torch._dynamo.reset()
    candidates = [prepare(impl, fn, lambda f: f(*inputs)) for impl in args.impl]
    rows = [check(case, candidate, exact, eager) for candidate in candidates]
    calls = [candidate.call for candidate in candidates]
    clock = Clock(args.device, args.repetitions)
    for row, us in zip(rows, clock.replays(calls), strict=True):
        row["us"] = us
    for row, us in zip(rows, clock.host(calls) if args.host else [], strict=args.host):
        row["host_us"] = us
    for row, call in zip(rows, calls, strict=True):
        row["peak_bytes"] = peak_bytes(call, args.device)
    for row, candidate in zip(rows, candidates, strict=True):
        if args.kernels:
            row["kernels"] = kernel_names(candidate.call)
    return with_baseline(rows)


def check(case: str, candidate: Candidate, exact: Tensor | Sequence[Tensor], eager: list[truth.Error]) -> Row:
    """The row of ``candidate`` with everything but its times."""
    ours = truth.errors(candidate.output, exact)
    return {
        "case": case,
        "impl": candidate.impl,
        "variant": candidate.variant,
        "correct": truth.all_acceptable(ours, eager, candidate.output),
        "error": max(e.relative for e in ours),
        "eager_error": max(e.relative for e in eager),
    }


def with_baseline(rows: list[Row]) -> list[Row]:
    """``rows`` of one case with ``baseline_us``: what stock Inductor took in the same turns."""
    baseline = next((row["us"] for row in rows if row["impl"] == BASELINE), None)
    return [{**row, "baseline_us": baseline} for row in rows]


def kernel_names(call: Callable[[], Any]) -> list[str]:
    """The kernels that one call runs on the GPU, in order, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(on_gpu, key=lambda event: event.time_range.start)]
