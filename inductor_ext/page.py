"""The page of a dump: one HTML file with its data, styles and script inside."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import importlib.util
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .record import Recording, Row
from .report import short_source

COLOURS = {
    "rms_norm": "#E69F00",
    "rope": "#009E73",
    "swiglu": "#CC79A7",
    "attention": "#0072B2",
    "topk": "#F0E442",
    "router": "#999999",
    "linear": "#56B4E9",
}
"""Okabe and Ito's palette, which colour-blind readers tell apart, with grey for its black, on which nothing could be
read; a kind of a third party's gets vermilion."""

OTHER_COLOUR = "#D55E00"

_LARGEST_DRAWING = 400
"""Nodes of one drawing: a longer block is shown in parts, since layout and reader both tire beyond this."""

_AT_A_GLANCE = 60
"""Nodes of a block that is taken in without lines for the modules inside of it."""

_LAYOUT_S = 25.0
"""Seconds for all layouts of a page; what is left then is listed in one column."""


class MissingExtra(ImportError):
    """A dump needs packages that are not installed; the message says what installs them."""


def check_installed() -> None:
    """Raise MissingExtra where a package of the extra `dump` is missing."""
    missing = [name for name in ("jinja2", "grandalf") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(f"a dump needs {' and '.join(missing)}: pip install 'portable_ops[dump]'")


def render(report: Any, index: Mapping[str, Any]) -> str:
    """The page as text.  ``index``: the contents of dump.json."""
    import jinja2

    templates = Path(__file__).parent / "templates"
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(templates), autoescape=True, trim_blocks=True)
    data = _Data(report.recordings, index)
    script = json.dumps(data.as_dict(), separators=(",", ":"), ensure_ascii=False)
    return environment.get_template("page.html.j2").render(
        index=index,
        inputs=_inputs(report.recordings),
        colours={kind: COLOURS.get(kind, OTHER_COLOUR) for kind in index["counts"]},
        breaks=collections.Counter(b.strip().splitlines()[0] for b in index["graph_breaks"] if b.strip()),
        # Inside of a script element only this could end it.
        data=script.replace("<", "\\u003c"),
        script=(templates / "page.js").read_text(encoding="utf-8"),
        style=(templates / "page.css").read_text(encoding="utf-8"),
    )


def paths(rows: Sequence[Row]) -> dict[str, str]:
    """The user's module of each node by name; a node that none is recorded for goes with those that it serves."""
    found = {row.name: row.path for row in rows}
    for row in reversed(rows):
        if found[row.name] and row.target != "output":
            for argument in row.arguments:
                found[argument] = found[argument] or found[row.name]
    for row in rows:
        if not found[row.name] and row.target not in ("placeholder", "output"):
            found[row.name] = next((found[a] for a in row.arguments if found[a]), "")
    return found


def _inputs(recordings: Sequence[Recording]) -> list[str]:
    """What the model was called with, in the words of the first graph: ``input_ids i64[1, 128]``."""
    if not recordings or not recordings[0].stages:
        return []
    rows = [r for r in recordings[0].stages[0].rows if r.target == "placeholder"]
    names = {r.name: re.sub(r"^l_(kwargs_)?", "", r.name.strip("_"), flags=re.IGNORECASE).strip("_") for r in rows}
    own = re.compile(r"_(parameters|buffers|modules)_|^self_")
    return [f"{names[r.name]} {r.type}" for r in rows if not own.search(names[r.name])]


# ------------------------------------------------------------------------------------------------- blocks of nodes


def block_of(path: str) -> str:
    """What is folded into one line: a layer (``model.layers.3``), else a module at most two levels down."""
    parts = path.split(".") if path else []
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:2])


@dataclasses.dataclass
class _Block:
    """Nodes of one module.  ``marks``: the number of the site or miss of a node, by name."""

    rows: list[Row]
    marks: Mapping[str, int]
    signature: str


@dataclasses.dataclass
class _Line:
    """One line of the page: a block before and after, and all the modules where it is the same.

    ``parent``: the line that it is folded into, or -1.  ``entries``: for each of ``paths`` the sites and misses whose
    anchors stand there.
    """

    graph: int
    parent: int
    title: str
    module: str
    before: int
    after: int
    paths: list[str]
    entries: list[list[int]]


class _Data:
    """The data of the page: strings once, equal blocks once."""

    def __init__(self, recordings: Sequence[Recording], index: Mapping[str, Any]) -> None:
        self.index = index
        self.entries = [*index["sites"], *index["misses"]]
        self.strings: dict[str, int] = {"": 0}
        self.blocks: list[dict[str, Any]] = []
        self.drawn: dict[str, int] = {}
        self.lines: list[_Line] = []
        self.home: dict[int, int] = {}
        self.deadline = time.monotonic() + _LAYOUT_S
        for graph, recording in enumerate(recordings):
            for stage, kept in enumerate(recording.stages):
                following = recording.stages[stage + 1 : stage + 2]
                if kept.name == "joint":
                    after = following[0].rows if following and following[0].name == "rewritten" else ()
                    self._add_graph(graph, stage, kept.rows, after)
            if recording.stages and not any(s.name == "joint" for s in recording.stages):
                self._add_graph(graph, -1, recording.stages[-1].rows, ())

    def as_dict(self) -> dict[str, Any]:
        lines = [dataclasses.asdict(line) for line in self.lines]
        entries = []
        for number, entry in enumerate(self.entries):
            kept = {k: v for k, v in entry.items() if k not in ("region",) and v not in ("", [], {}, None)}
            kept |= {k: self._text(kept[k]) for k in ("reason", "hint", "source", "pattern", "variant") if k in kept}
            kept["home"] = self.home.get(number, -1)
            kept["lines"] = [self._text(line) for line in entry.get("lines", ())]
            if entry.get("plan", {}).get("variant"):
                plan = entry["plan"]
                kept["plan"] = [self._text(text) for text in (plan["variant"], plan["why"], *plan["launches"])]
            else:
                kept.pop("plan", None)
            entries.append(kept)
        return {
            "strings": list(self.strings),
            "blocks": self.blocks,
            "lines": lines,
            "entries": entries,
            "colours": COLOURS,
            "other": OTHER_COLOUR,
            "firstMiss": len(self.index["sites"]),
        }

    def _text(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings))

    def _add_graph(self, graph: int, stage: int, before: Sequence[Row], after: Sequence[Row]) -> None:
        here = [e for e in self.entries if e["graph"] == graph and e.get("stage") == stage]
        words = {e["number"]: _words(e) for e in here}
        sides = _Side(before, _marks(here, after=False), words), _Side(after, _marks(here, after=True), words)
        known: dict[Any, int] = {}
        self._add_lines(graph, sides, [side.blocks(side.rows, block_of) for side in sides], -1, known)

    def _add_lines(
        self,
        graph: int,
        sides: Sequence[_Side],
        blocks: Sequence[Mapping[tuple[str, int], _Block]],
        parent: int,
        known: dict[Any, int],
    ) -> None:
        """A line for each block of either side, and inside of it lines for the modules of the next level."""
        for path, part in dict.fromkeys((*blocks[0], *blocks[1])):
            halves = [side.get((path, part)) for side in blocks]
            signatures = tuple(half.signature if half else "" for half in halves)
            group = (parent, re.sub(r"\d+", "#", path), part, signatures)
            if group not in known:
                known[group] = len(self.lines)
                title = (path or "(the model itself)") + (f" part {part + 1}" if part else "")
                module = next((r.module for half in halves if half for r in half.rows if r.path == path), "")
                drawn = [self._draw(half) if half else -1 for half in halves]
                self.lines.append(_Line(graph, parent, title, module, *drawn, paths=[], entries=[]))
            line = self.lines[known[group]]
            line.paths.append(path)
            line.entries.append(self._settle(halves[0], known[group]) if halves[0] else [])
            if max(len(half.rows) for half in halves if half) > _AT_A_GLANCE:
                inner = [side.inside(path, half) if half else {} for side, half in zip(sides, halves, strict=True)]
                if len({*inner[0], *inner[1]}) > 1:
                    self._add_lines(graph, sides, inner, known[group], known)

    def _settle(self, block: _Block, line: int) -> list[int]:
        """The entries with their anchors in ``block``; ``line`` is where they are shown if nothing of them is outside.

        Of lines inside each other the innermost counts.
        """
        names = {row.name for row in block.rows}
        numbers = sorted(n for name, n in block.marks.items() if self.entries[n]["anchor"] == name)
        for number in numbers:
            if self.lines[line].parent < 0 or names.issuperset(self.entries[number]["nodes"]):
                self.home[number] = line
        return numbers

    def _draw(self, block: _Block) -> int:
        """The index of the drawing of a block; blocks of equal structure and marks share one."""
        key = block.signature + repr(sorted(set(block.marks.values())))
        if key in self.drawn:
            return self.drawn[key]
        names = [row.name for row in block.rows]
        own = {name: i for i, name in enumerate(names)}
        outside = list(dict.fromkeys(a for row in block.rows for a in row.arguments if a not in own))
        position = own | {name: len(names) + i for i, name in enumerate(outside)}
        edges = sorted({(position[a], own[row.name]) for row in block.rows for a in row.arguments})
        widths = [_width(row.name, _short(row.target), row.type) for row in block.rows]
        widths += [_width(name) for name in outside]
        points = layout(tuple(widths), tuple(edges), time.monotonic() > self.deadline)
        nodes = [
            [
                *map(self._text, (row.name, row.target, row.type, row.path, short_source(row.source))),
                block.marks.get(row.name, -1),
            ]
            for row in block.rows
        ]
        nodes += [[self._text(name), self._text("outside"), 0, 0, 0, -2] for name in outside]
        places = [(round(x), round(y), width) for (x, y), width in zip(points, widths, strict=True)]
        self.blocks.append({"nodes": nodes, "places": places, "edges": edges})
        self.drawn[key] = len(self.blocks) - 1
        return self.drawn[key]


def _marks(entries: Iterable[Mapping[str, Any]], after: bool) -> dict[str, int]:
    """Which entry a node belongs to, by name; before the rewrite all nodes of a site, afterwards what replaced them."""
    marks: dict[str, int] = {}
    for entry in entries:
        names = [entry["replacement"]] if after and entry.get("replacement") else entry.get("nodes", ())
        for name in names:
            marks.setdefault(name, entry["number"])
        if not (after and entry.get("replacement")):
            marks[entry["anchor"]] = entry["number"]
    return marks


def _words(entry: Mapping[str, Any]) -> str:
    """What must be equal for two layers to share a line."""
    return repr([entry.get(k) for k in ("kind", "pattern", "decision", "reason", "variant", "bound", "source")])


class _Side:
    """The nodes of a graph before or after the rewrite, to be taken apart by modules."""

    def __init__(self, rows: Sequence[Row], marks: Mapping[str, int], words: Mapping[int, str]) -> None:
        self.rows, self.marks, self.words = rows, marks, words
        self.home = paths(rows)
        self.types = {row.name: row.type for row in rows}

    def blocks(self, rows: Iterable[Row], fold: Callable[[str], str]) -> dict[tuple[str, int], _Block]:
        """``rows`` by what ``fold`` makes of their modules, long modules in parts."""
        grouped: dict[str, list[Row]] = {}
        for row in rows:
            if row.target not in ("placeholder", "output", "get_attr"):
                grouped.setdefault(fold(self.home[row.name]), []).append(row)
        blocks = {}
        for path, members in grouped.items():
            for part, start in enumerate(range(0, len(members), _LARGEST_DRAWING)):
                piece = members[start : start + _LARGEST_DRAWING]
                own = {row.name: self.marks[row.name] for row in piece if row.name in self.marks}
                blocks[path, part] = _Block(piece, own, _signature(piece, own, self.types, self.words))
        return blocks

    def inside(self, path: str, block: _Block) -> dict[tuple[str, int], _Block]:
        """The nodes of ``block`` by the modules of the next level below ``path``; its own nodes are in none."""
        start = f"{path}." if path else ""
        deeper = [row for row in block.rows if self.home[row.name].startswith(start) and self.home[row.name] != path]
        return self.blocks(deeper, lambda home: start + home[len(start) :].partition(".")[0])


def _signature(
    rows: Sequence[Row], marks: Mapping[str, int], types: Mapping[str, str], words: Mapping[int, str]
) -> str:
    """Equal for blocks of the same nodes, types, edges, lines of code and marks, whatever the names."""
    numbers: dict[str, int] = {}
    order: dict[int, int] = {}
    digest = hashlib.sha256()
    for row in rows:
        arguments = [(numbers.setdefault(a, len(numbers)), types.get(a, "")) for a in row.arguments]
        numbers.setdefault(row.name, len(numbers))
        number = marks.get(row.name)
        mark = (order.setdefault(number, len(order)), words[number]) if number is not None else None
        kept = (row.target, row.type, row.source, re.sub(r"\d+", "#", row.path), arguments, numbers[row.name], mark)
        digest.update(repr(kept).encode())
    return digest.hexdigest()


def _short(target: str) -> str:
    return target.removeprefix("aten.").removesuffix(".default")


def _width(*texts: str) -> int:
    """Of the box of a node, from its longest line (the type is cut by the page)."""
    return min(210, 14 + round(6.3 * max(len(text) for text in texts)))


# --------------------------------------------------------------------------------------------------------- layout

HEIGHT = 44


@functools.lru_cache(maxsize=512)
def layout(widths: tuple[int, ...], edges: tuple[tuple[int, int], ...], plain: bool) -> list[tuple[float, float]]:
    """Centres of boxes of these widths such that edges lead down (Sugiyama's method, by grandalf).

    ``plain``: one column, for what there is no time for.
    """
    if plain:
        return [(0.0, i * HEIGHT * 1.3) for i in range(len(widths))]
    from grandalf.graphs import Edge, Graph, Vertex
    from grandalf.layouts import SugiyamaLayout, VertexViewer

    vertices = [Vertex(i) for i in range(len(widths))]
    for vertex, width in zip(vertices, widths, strict=True):
        vertex.view = VertexViewer(width, HEIGHT)
    graph = Graph(vertices, [Edge(vertices[a], vertices[b]) for a, b in edges])
    left = 0.0
    for component in graph.C:
        members = list(component.V())
        if len(members) == 1:
            members[0].view.xy = (0.0, 0.0)
        else:
            drawing = SugiyamaLayout(component)
            drawing.xspace, drawing.yspace = 12, 26
            drawing.init_all(roots=[v for v in members if not v.e_in()], optimize=False)
            drawing.draw(2)
        low = min(v.view.xy[0] - v.view.w / 2 for v in members)
        top = min(v.view.xy[1] for v in members)
        for vertex in members:
            x, y = vertex.view.xy
            vertex.view.xy = (x - low + left, y - top)
        left = max(v.view.xy[0] + v.view.w / 2 for v in members) + 30
    return [vertex.view.xy for vertex in vertices]
