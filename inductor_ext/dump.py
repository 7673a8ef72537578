"""A dump: a folder with graphs, generated code, the report as JSON and a page that shows what matched and why not.

    index.html                     the page
    report.json                    the report
    dump.json                      the same with where everything stands; what `diff` and `repro` read
    graph_00/0_dynamo.py, .dot     the graphs of each stage, as Python that runs and for Graphviz
    graph_00/wrapper_0.py          what Inductor generated, where code was generated
    graph_00/kernels/              its kernels one by one

No weights and no inputs are in it: only their shapes, strides and types.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing.util
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows: nobody is kept out
    fcntl = None

from . import page
from .backend import check_expected
from .explain import Tracing, explain_settings
from .graph_text import graphviz
from .hints import hint
from .record import Mark, Recording, Row
from .report import Report, short_source
from .settings import Settings

FORMAT = 2
"""Of dump.json; raised when its fields change their meaning."""

_NEIGHBOURS = 60
"""At most so many nodes around a near miss stand in its reproduction."""


class BadDump(ValueError):
    """A folder is no dump, or has no such site."""


def dump(model: Callable[..., Any], folder: str | os.PathLike[str], name: str = "", **options: Any) -> Callable:
    """``dump(model, folder)(*args)`` is ``explain(model)(*args)`` with its report saved into ``folder``.

    A model that fails raises its own error, as ``explain`` does; what was found until then is in the folder.
    """
    settings = dataclasses.replace(explain_settings(options), dump=None)

    def run(*args: Any, **kwargs: Any) -> Report:
        _make(Path(folder))  # not after a minute of tracing
        tracing, error = Tracing(settings), ""
        try:
            tracing.run(model, args, kwargs)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            report = tracing.report()
            save(report, Path(folder), model=name, error=error)
        check_expected(report, settings)
        return report

    return run


def save(report: Report, folder: Path, model: str = "", error: str = "") -> Path:
    """Write the dump of ``report``; returns the page.  An earlier dump in ``folder`` is replaced."""
    page.check_installed()
    _make(folder)
    _clear(folder)
    for index, recording in enumerate(report.recordings):
        _write_graph(folder / graph_name(index), recording)
    return _write_index(report, folder, model, error)


def _make(folder: Path) -> None:
    """Make ``folder`` unless it is there.  Raises BadDump, which names it, where nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadDump(f"no dump can be written to {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadDump(f"no dump can be written to {folder}: permission denied")


# ------------------------------------------------------------------------- what one process compiles, graph by graph


@dataclasses.dataclass
class _Running:
    """What this process has added to one folder.  ``folder``: where it writes; ``lock`` keeps others out of there."""

    folder: Path
    lock: IO[str]
    recordings: list[Recording] = dataclasses.field(default_factory=list)
    stale: bool = True


_LOCK = ".lock"
_running: dict[str, _Running] = {}
_lock = threading.Lock()


def add(recording: Recording, settings: Settings) -> None:
    """Add one compiled graph to the dump that this process writes; the page follows when the process ends.

    A graph that was added before is written again: the backward is compiled later than the forward.  The ranks of a
    distributed job write into folders of their own, and so does a process that finds another at work in the folder.
    """
    with _lock:
        if settings.dump not in _running:
            page.check_installed()
            if not _running:
                # Unlike atexit's, these run in forked workers as well.
                multiprocessing.util.Finalize(None, flush, exitpriority=1)
            rank = f"rank_{os.environ.get('RANK', '0')}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
            folder, lock = _claimed(Path(settings.dump, rank))
            _running[settings.dump] = _Running(folder, lock)
        running = _running[settings.dump]
        if not any(known is recording for known in running.recordings):
            running.recordings.append(recording)
        index = next(i for i, known in enumerate(running.recordings) if known is recording)
        _write_graph(running.folder / graph_name(index), recording)
        running.stale = True


def flush() -> None:
    """Write report, index and page of what was added since the last time; runs by itself at the end of the process."""
    with _lock:
        for running in _running.values():
            if running.stale:
                recordings = tuple(running.recordings)
                done = [r.report for r in recordings if r.report is not None]
                report = dataclasses.replace(Report.merge(done, graphs=len(done)), recordings=recordings)
                errors = "\n".join(dict.fromkeys(r.error for r in recordings if r.error))
                _write_index(report, running.folder, "", errors)
                running.stale = False


def _claimed(folder: Path) -> tuple[Path, IO[str]]:
    """``folder``, or one inside of it while another process writes there, and the open file that says so."""
    for place in (folder, folder / f"process_{os.getpid()}"):
        _make(place)
        earlier = (place / _LOCK).exists()
        lock = (place / _LOCK).open("a")
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        _clear(place, unfinished=earlier)
        return place, lock
    raise BadDump(f"other processes write to {folder} and to {place}")


def _forget() -> None:
    """In a forked process: what the parent has added is the parent's."""
    global _lock
    _lock = threading.Lock()
    _running.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)


# ------------------------------------------------------------------------------------------------------- the files


def graph_name(index: int) -> str:
    """The folder of a graph inside a dump."""
    return f"graph_{index:02d}"


def stage_name(index: int, name: str) -> str:
    """The file of a stage, without its ending."""
    return f"{index}_{name}"


def _clear(folder: Path, unfinished: bool = False) -> None:
    """Remove an earlier dump, or what an ``unfinished`` one left; whatever else is in the folder stays."""
    if unfinished or (folder / "dump.json").exists():
        for old in folder.glob("graph_[0-9]*"):
            shutil.rmtree(old)
        for name in ("dump.json", "report.json", "index.html"):
            (folder / name).unlink(missing_ok=True)


def _write_graph(folder: Path, recording: Recording) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, stage in enumerate(recording.stages):
        path = folder / stage_name(index, stage.name)
        _write(path.with_suffix(".py"), stage.text)
        kinds = _kinds(recording, index)
        _write(path.with_suffix(".dot"), graphviz(stage.rows, kinds, page.COLOURS))
    for index, code in enumerate(dict.fromkeys(recording.code)):
        _write(folder / f"wrapper_{index}.py", code)
        for name, language, text in _KERNEL.findall(code):
            (folder / "kernels").mkdir(exist_ok=True)
            _write(folder / "kernels" / f"{name}.{'cpp' if language.startswith('cpp') else 'py'}", text)


def _write(path: Path, text: str) -> None:
    """Names and source lines are the user's: in any script, and not always valid Unicode."""
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


_KERNEL = re.compile(r"^(\w+) = async_compile\.(\w+)\([^\n]*?'''\n?(.*?)'''", re.MULTILINE | re.DOTALL)


def _kinds(recording: Recording, stage: int) -> dict[str, str]:
    """The kind of each node of a stage that belongs to a site, by name."""
    kinds: dict[str, str] = {}
    sites = recording.report.sites if recording.report is not None else ()
    for site, mark in zip(sites, recording.sites, strict=False):
        if mark is not None and stage == mark.graph:
            kinds |= dict.fromkeys((*mark.nodes, mark.anchor), site.kind)
        elif mark is not None and stage == mark.graph + 1:
            names = (mark.replacement,) if mark.replacement else (*mark.nodes, mark.anchor)
            kinds |= dict.fromkeys(names, site.kind)
    return kinds


def _write_index(report: Report, folder: Path, model: str, error: str) -> Path:
    index = contents(report, model, error)
    _write(folder / "report.json", report.to_json())
    _write(folder / "dump.json", json.dumps(index, separators=(",", ":")))
    path = folder / "index.html"
    _write(path, page.render(report, index))
    return path


def contents(report: Report, model: str = "", error: str = "") -> dict[str, Any]:
    """What dump.json holds: the report's parts with where each of them stands.  Sites and misses share numbers."""
    sites, misses = [], []
    located = [r for r in report.recordings if r.report is not None]
    if located:
        for graph, recording in enumerate(report.recordings):
            if recording.report is not None:
                places = [_Places(stage.rows) for stage in recording.stages]
                sites += _entries(recording.report.sites, recording.sites, graph, places)
                misses += _entries(recording.report.misses, recording.misses, graph, places)
        for entry, site in zip(sites, report.sites, strict=False):
            entry["count"] = site.count
    else:
        sites = _entries(report.sites, [], 0, [])
        misses = _entries(report.misses, [], 0, [])
    for number, entry in enumerate((*sites, *misses)):
        entry["number"] = number
    return {
        "format": FORMAT,
        "model": model,
        "error": error,
        "counts": report.counts,
        "rewritten": report.rewritten,
        "settings": dict(report.settings),
        "target": report.target,
        "versions": dict(report.versions),
        "graph_breaks": list(report.graph_breaks),
        "graphs": [
            {
                "folder": graph_name(index),
                "stages": [stage_name(i, stage.name) for i, stage in enumerate(recording.stages)],
                "wrappers": len(dict.fromkeys(recording.code)),
                "error": recording.error,
            }
            for index, recording in enumerate(report.recordings)
        ],
        "sites": sites,
        "misses": misses,
    }


def _entries(found: Iterable[Any], marks: list[Mark | None], graph: int, places: list[_Places]) -> list[dict[str, Any]]:
    entries = []
    for position, one in enumerate(found):
        mark = marks[position] if position < len(marks) else None
        if mark is not None and mark.anchor not in places[mark.graph].rows:
            mark = None  # of something that the rewrite itself put into the graph
        entry = dataclasses.asdict(one) | {"graph": graph, "source": short_source(one.source), "path": ""}
        entry["nodes"] = []
        entry["hint"] = hint(one.reason) if getattr(one, "decision", "declined") == "declined" else ""
        if "bound" in entry:
            entry["bound"] = {name: str(value) for name, value in one.bound.items()}
        if mark is not None:
            place = places[mark.graph]
            region = place.region(mark)
            nodes = place.taken(mark, region["nodes"])
            entry |= {
                "stage": mark.graph,
                "anchor": mark.anchor,
                "path": place.paths.get(mark.anchor, ""),
                "nodes": nodes,
                "lines": place.lines(nodes),
                "operator": mark.operator,
                "replacement": mark.replacement,
                "features": dict(mark.features),
                "plan": {"variant": mark.variant, "why": mark.why, "launches": list(mark.launches)},
                "region": region,
            }
        entries.append(entry)
    return entries


class _Places:
    """The nodes of one stage by name, with the users' modules and the subgraph around a mark."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self.rows = {row.name: row for row in rows}
        self.order = {row.name: i for i, row in enumerate(rows)}
        self.paths = page.paths(rows)
        self.users: dict[str, list[str]] = {name: [] for name in self.rows}
        for row in rows:
            for argument in row.arguments:
                self.users[argument].append(row.name)

    def taken(self, mark: Mark, region: Iterable[str]) -> list[str]:
        """The nodes that are the match, in graph order: those that it named, and what serves nothing else."""
        nodes = {mark.anchor, *self.known(mark.nodes)}
        if mark.outputs:
            own = set(region)
            nodes.update(name for name in own if self.users[name] and own.issuperset(self.users[name]))
        return sorted(nodes, key=self.order.__getitem__)

    def known(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that stand in this stage: the rewrite puts in nodes of its own."""
        return [name for name in names if name in self.rows]

    def lines(self, names: Iterable[str]) -> list[str]:
        """The user's lines that made these nodes, each once."""
        return list(dict.fromkeys(short_source(self.rows[name].source) for name in names if self.rows[name].source))

    def region(self, mark: Mark) -> dict[str, Any]:
        """Nodes of a subgraph that stands by itself, what goes in, and what comes out."""
        nodes = self._matched(mark) if mark.outputs else self._around(mark)
        inputs = {a for name in nodes for a in self.rows[name].arguments} - nodes
        outputs = mark.outputs or [n for n in nodes if not self.users[n] or any(u not in nodes for u in self.users[n])]
        return {
            "nodes": sorted(nodes, key=self.order.__getitem__),
            "inputs": {name: self.rows[name].spec for name in sorted(inputs, key=self.order.__getitem__)},
            "outputs": sorted(outputs, key=self.order.__getitem__),
            "returned": [n for n in outputs if any(self.rows[u].target == "output" for u in self.users[n])],
        }

    def _matched(self, mark: Mark) -> set[str]:
        """What lies between the inputs of a match and its outputs."""
        wanted: set[str] = set()
        work = list(mark.outputs)
        while work:
            name = work.pop()
            if name not in wanted and name not in mark.inputs and self._computed(name):
                wanted.add(name)
                work += self.rows[name].arguments
        return wanted

    def _around(self, mark: Mark) -> set[str]:
        """What is known to belong, and the nodes of the same module that hang together with it, the nearest first."""
        home = self.paths[mark.anchor]
        ring = list(dict.fromkeys((mark.anchor, *self.known(mark.nodes))))
        found = set(ring)
        while ring and len(found) < _NEIGHBOURS:
            near = [n for name in ring for n in (*self.rows[name].arguments, *self.users[name])]
            ring = [n for n in dict.fromkeys(near) if n not in found and self._computed(n) and self._inside(n, home)]
            found.update(ring[: _NEIGHBOURS - len(found)])
        return found

    def _inside(self, name: str, home: str) -> bool:
        path = self.paths[name]
        return path == home or path.startswith(f"{home}.") or not home

    def _computed(self, name: str) -> bool:
        return self.rows[name].target not in ("placeholder", "output")


def read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The dump.json of a dump.  Raises BadDump, saying what is there instead, for anything else."""
    path = Path(folder) / "dump.json"
    if not path.exists():
        raise BadDump(f"{folder} holds no dump: there is no {path}")
    index: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if index.get("format") != FORMAT:
        raise BadDump(f"{path} was written by another version: format {index.get('format')}, not {FORMAT}")
    return dict(index)
