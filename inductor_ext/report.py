"""What the backend did to a graph, and why it left the rest alone."""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..patterns import KINDS, Miss
from .record import Recording

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Site:
    """A recognised subgraph.  ``decision`` is ``"rewritten"`` or ``"declined"``.

    ``reason``: why (the gate's words).  ``variant``: the kernel variant, where rewritten.  ``bound``: what the
    match found.
    """

    kind: str
    pattern: str
    decision: str
    reason: str
    source: str
    variant: str = ""
    bound: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of one graph, or of all graphs of a model.

    ``sites``: recognised subgraphs.  ``misses``: candidates that were not the pattern, each with the first
    condition that failed.  ``graph_breaks``: Dynamo's reasons with the user's line, one for each break.
    ``recordings``: the graphs themselves, where they were wanted (``explain``, ``portable_ops.dump``).
    """

    sites: tuple[Site, ...] = ()
    misses: tuple[Miss, ...] = ()
    graph_breaks: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    target: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    graphs: int = 1
    recordings: tuple[Recording, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def counts(self) -> dict[str, int]:
        """Kind to the number of recognised subgraphs, whatever the gate said."""
        return self._tally(self.sites)

    @property
    def rewritten(self) -> dict[str, int]:
        """Kind to the number of subgraphs that run on our kernels; the same kinds as in ``counts``."""
        tally = self._tally(s for s in self.sites if s.decision == "rewritten")
        return {kind: tally.get(kind, 0) for kind in self.counts}

    @property
    def declined(self) -> tuple[Site, ...]:
        """The recognised subgraphs that were left as stock compiles them, each with its reason."""
        return tuple(s for s in self.sites if s.decision == "declined")

    @staticmethod
    def _tally(sites: Iterable[Site]) -> dict[str, int]:
        tally = dict.fromkeys(KINDS, 0)
        for site in sites:  # a third party's pattern may bring a kind of its own
            tally[site.kind] = tally.get(site.kind, 0) + site.count
        return tally

    def times(self, calls: int) -> Report:
        """The report of a region that runs ``calls`` times in a graph: every site counts that often."""
        return dataclasses.replace(self, sites=tuple(dataclasses.replace(s, count=s.count * calls) for s in self.sites))

    def to_dict(self) -> dict[str, Any]:
        return {
            "counts": self.counts,
            "rewritten": self.rewritten,
            "sites": [
                dataclasses.asdict(s) | {"bound": {k: _plain(v) for k, v in s.bound.items()}} for s in self.sites
            ],
            "misses": [dataclasses.asdict(m) for m in self.misses],
            "graph_breaks": list(self.graph_breaks),
            "settings": dict(self.settings),
            "target": self.target,
            "versions": dict(self.versions),
            "graphs": self.graphs,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Report:
        data = json.loads(text)
        return Report(
            sites=tuple(Site(**s) for s in data["sites"]),
            misses=tuple(Miss(**{**m, "nodes": tuple(m["nodes"])}) for m in data["misses"]),
            graph_breaks=tuple(data["graph_breaks"]),
            settings=data["settings"],
            target=data["target"],
            versions=data["versions"],
            graphs=data["graphs"],
        )

    @staticmethod
    def merge(reports: Sequence[Report], graph_breaks: tuple[str, ...] = (), graphs: int | None = None) -> Report:
        """One report for the parts of a graph, or for all ``graphs`` of a model."""
        if not reports:
            return Report(graph_breaks=graph_breaks, graphs=0)
        return dataclasses.replace(
            reports[0],
            sites=tuple(s for r in reports for s in r.sites),
            misses=tuple(m for r in reports for m in r.misses),
            graph_breaks=graph_breaks or tuple(b for r in reports for b in r.graph_breaks),
            graphs=graphs if graphs is not None else reports[0].graphs,
            recordings=tuple(recording for r in reports for recording in r.recordings),
        )

    def save(self, folder: str | os.PathLike[str], model: str = "") -> Path:
        """Write a dump into ``folder``: graphs, generated code, this report as JSON and a page; returns the page.

        ``model``: how the page calls what was compiled.  A report that came without its graphs (of a compilation
        without ``portable_ops.dump``) is saved without them.
        """
        from .dump import save

        return save(self, Path(folder), model=model)

    def one_line(self) -> str:
        """``rms_norm 0/65, attention 32/32 rewritten (...)``: rewritten of recognised, for each kind found."""
        rewritten = self.rewritten
        found = [f"{kind} {rewritten[kind]}/{n}" for kind, n in self.counts.items() if n]
        text = ", ".join(found) + " rewritten" if found else "nothing recognised"
        target = f", target={self.target}" if self.target else ""
        return f"{text}, {len(self.misses)} near misses (gate={self.settings.get('gate')}{target})"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
        console.print(*self._tables(), sep="\n")
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip("\n")

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield from self._tables()

    def _tables(self) -> list[Any]:
        rewritten = self.rewritten
        target = f", target {self.target}" if self.target else ""
        title = f"portable_ops: {self.graphs} graph(s){target}"
        summary = _table(title, "kind", "recognised", "rewritten", "variants")
        for kind, count in self.counts.items():
            variants = sorted({s.variant for s in self.sites if s.kind == kind and s.variant})
            summary.add_row(kind, str(count), str(rewritten[kind]), _text(", ".join(variants)))
        tables: list[Any] = [summary]
        declined: collections.Counter[tuple[str, str, str]] = collections.Counter()
        for s in self.declined:
            declined[s.kind, s.reason, s.source] += s.count
        missed = collections.Counter((m.kind, m.reason, m.source) for m in self.misses)
        for title, rows in (("recognised, left to Inductor", declined), ("near misses", missed)):
            if rows:
                table = _table(title, "kind", "sites", "reason", "source")
                for (kind, reason, source), n in rows.items():
                    table.add_row(kind, str(n), _text(reason), _text(short_source(source).replace(": ", "\n", 1)))
                tables.append(table)
        for reason, n in collections.Counter(self.graph_breaks).items():
            times = f" ({n} times)" if n > 1 else ""
            tables.append(_text(f"graph break{times}: {short_source(reason.strip().splitlines()[0])}"))
        tables.append(_text("settings: " + ", ".join(f"{k}={v}" for k, v in self.settings.items())))
        return tables


WIDTH = 118
"""Columns of a printed report."""


def _table(title: str, *columns: str) -> Any:
    """A table that wraps what is too long: a reason is never cut."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        number = column in ("recognised", "rewritten", "sites")
        table.add_column(
            column,
            justify="right" if number else "left",
            overflow="fold",
            no_wrap=number or column == "kind",
        )
    return table


def _text(text: str) -> Any:
    """``text`` as it is: rich would take ``cache[layer]`` for markup."""
    from rich.text import Text

    return Text(text, overflow="fold")


def short_source(source: str) -> str:
    """``source`` with its path relative to where it is installed or to the current folder."""
    path, separator, rest = source.partition(":")
    installed = re.split(r"(?:site|dist)-packages[/\\]", path)
    if len(installed) > 1:
        return installed[-1] + separator + rest
    return path.removeprefix(os.path.join(os.getcwd(), "")) + separator + rest


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None.__class__) else str(value)


def versions() -> dict[str, str]:
    from ..kernels.launch import triton

    return {"torch": torch.__version__, "triton": getattr(triton, "__version__", "none")}


# ----------------------------------------------------------------- collecting reports while graphs compile

_local = threading.local()
_history: collections.deque[Report] = collections.deque(maxlen=1000)


@dataclasses.dataclass
class Collection:
    """What one compilation brought in: reports of passes that ran, and reports that came with cached wrappers."""

    fresh: list[_Part] = dataclasses.field(default_factory=list)
    restored: list[Report] = dataclasses.field(default_factory=list)

    @property
    def reports(self) -> list[Report]:
        # A graph that was matched anew may still load a cached wrapper, which brings the same report again.
        return [part.report for part in self.fresh] or self.restored


@dataclasses.dataclass
class _Part:
    """The report of one graph; ``root`` is the outermost graph that is known to call it."""

    report: Report
    root: Any
    embedded: bool = False


@contextlib.contextmanager
def collecting() -> Iterator[Collection]:
    """The reports of all (sub)graphs that this thread compiles, or loads from a cache, inside the block."""
    outer = getattr(_local, "collection", None)
    _local.collection = Collection()
    try:
        yield _local.collection
    finally:
        _local.collection = outer


def publish(report: Report, graph: Any = None, calls: Sequence[tuple[Any, int]] = ()) -> None:
    """Add the report of a (sub)graph whose pass just ran.

    ``graph`` tells it from others; ``calls`` are the graphs of nested regions that it calls, and how often.  Their
    passes ran before.
    """
    collection = getattr(_local, "collection", None)
    if collection is None:
        return
    for region, n in calls:
        for part in collection.fresh:
            if part.root is region:
                part.report, part.root = part.report.times(n), graph
    collection.fresh.append(_Part(report, graph))


def take_payload() -> str | None:
    """The reports that belong into the wrapper that is being generated, packed; None if there are none."""
    collection = getattr(_local, "collection", None)
    parts = [] if collection is None else [part for part in collection.fresh if not part.embedded]
    if not parts:
        return None
    text = Report.merge([part.report for part in parts]).to_json()
    for part in parts:
        part.embedded = True
    return base64.b64encode(zlib.compress(text.encode())).decode()


def restore(payload: str) -> None:
    """Called by generated wrappers when they are loaded: a graph from a warm cache brings its report along."""
    collection = getattr(_local, "collection", None)
    if collection is not None:
        collection.restored.append(Report.from_json(zlib.decompress(base64.b64decode(payload)).decode()))


def finish(report: Report) -> None:
    """Log the report of a whole graph, hand it to structured tracing, and remember it."""
    _history.append(report)
    log.info("%s", report.one_line())
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "portable_ops_report", "encoding": "json"},
        payload_fn=report.to_json,
    )


def reports() -> list[Report]:
    """The reports of the graphs that were compiled or loaded in this process, oldest first."""
    return list(_history)
