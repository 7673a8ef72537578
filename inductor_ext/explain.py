"""What the backend would do to a model, without generating code."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.output_code import MockFXGraphCacheOutput

from ..kernels.target import DEFAULT_ARCH
from .backend import check_expected, hooks, with_unpinned
from .graphs import clone, input_device
from .pin import pin
from .record import Recording, recording
from .report import Report, collecting
from .rewrite import decision_target
from .settings import Settings


def explain(model: Callable[..., Any] | torch.export.ExportedProgram, **options: Any) -> Callable[..., Report]:
    """``explain(model)(*args, **kwargs)`` traces ``model`` and returns the :class:`Report` of all its graphs.

    ``options`` are ours without their prefix (``gate="always"``, ``target="gfx942"``), ``expect`` for the whole
    model.  Works on any device, on the meta device, under ``FakeTensorMode`` and without Triton.  Without a GPU the
    decisions are those for ``sm_90`` unless a target is named.

    The model runs once, eagerly, so a value that a later graph depends on is right, and an error of the model's own
    is what the caller sees.  A graph that runs several times, such as a layer's in a loop that Dynamo had to break, is
    one of ``graphs``, and what was recognised in it counts as often as it ran.

    ``report.save(folder)`` writes all of it as a dump: graphs, decisions and a page that shows them.

    Like ``torch._dynamo.explain``, this resets Dynamo: a model that was compiled before compiles again at its next
    call, from the caches.
    """
    settings = explain_settings(options)

    def run(*args: Any, **kwargs: Any) -> Report:
        tracing = Tracing(settings)
        tracing.run(model, args, kwargs)
        report = tracing.report()
        if settings.dump is not None:
            report.save(settings.dump)
        check_expected(report, settings)
        return report

    return run


def explain_settings(options: Mapping[str, Any]) -> Settings:
    """The settings under which ``explain`` decides: those of a compilation, for a GPU even where there is none."""
    settings = Settings.read(options)
    if settings.target is None and not torch.cuda.is_available():
        settings = dataclasses.replace(settings, target=DEFAULT_ARCH)
    return settings


class Tracing:
    """A model being explained; where its own error ends it, :meth:`report` still tells what was found so far."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.recordings: list[Recording] = []
        self.runs: collections.Counter[int] = collections.Counter()
        self.breaks: tuple[str, ...] = ()

    def run(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run ``model`` once, eagerly, and take every graph that Dynamo finds through the pass."""
        if isinstance(model, torch.export.ExportedProgram):
            model = model.module()
        with _fresh_dynamo():
            try:
                torch.compile(model, backend=self._backend)(*args, **kwargs)
            finally:
                found = torch._dynamo.utils.graph_break_reasons
                self.breaks = tuple(_located(r) for r in found if r.graph_break)

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        index = len(self.recordings)
        self.recordings.append(Recording())
        _explain_graph(gm, example_inputs, self.settings, self.recordings[index])

        def counted(*inputs: Any) -> Any:
            self.runs[index] += 1
            return gm.forward(*inputs)

        return counted

    def report(self) -> Report:
        """One report for all graphs; a graph whose own compilation failed is among the recordings only."""
        whole = [(i, r.report) for i, r in enumerate(self.recordings) if r.report is not None]
        report = Report.merge([graph.times(self.runs[i]) for i, graph in whole], self.breaks, len(whole))
        return dataclasses.replace(report, settings=self.settings.to_dict(), recordings=tuple(self.recordings))


@contextlib.contextmanager
def _fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before and nothing left behind; Dynamo's counters stay as they were."""
    counters = torch._dynamo.utils.counters
    before = copy.deepcopy(counters)
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        counters.clear()
        counters.update(before)


def _located(broken: Any) -> str:
    """The reason of a graph break behind the user's line: ``file:line: reason``."""
    if not broken.user_stack:
        return broken.reason
    frame = broken.user_stack[-1]
    return f"{frame.filename}:{frame.lineno}: {broken.reason}"


def _explain_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, record: Recording) -> None:
    """Take a copy of one Dynamo graph through everything up to code generation."""
    record.keep("dynamo", gm.graph)
    copied = clone(gm)
    unpinned = pin(copied, decision_target(settings, input_device(example_inputs)))
    patches = {
        **hooks(settings),
        "force_disable_caches": True,
        "cpp_wrapper": False,
        "freezing": False,
        # Fails on the meta device (torch 2.11 to 2.13, without us too), and comes after our pass anyway.
        "joint_graph_constant_folding": False,
    }
    record.keep("pinned", copied.graph)
    with collecting() as collection, recording(record):
        compile_fx(copied, example_inputs, inner_compile=_no_code, config_patches=patches)
    record.report = with_unpinned(Report.merge(collection.reports), unpinned)


def _no_code(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> MockFXGraphCacheOutput:
    """Stands in for Inductor's code generation."""
    return MockFXGraphCacheOutput(gm)
