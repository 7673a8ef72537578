"""Two dumps compared: which sites matched in one and not in the other, and why."""

from __future__ import annotations

import collections
import dataclasses
import io
from collections.abc import Iterator, Mapping
from typing import Any

from .hints import hint


@dataclasses.dataclass(frozen=True)
class Change:
    """One place that differs.  ``before`` and ``after`` say in words what it is in each dump."""

    kind: str
    path: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Difference:
    """``changes``: of sites.  ``surroundings``: versions, settings, target and graph breaks, name to (A, B)."""

    changes: tuple[Change, ...]
    surroundings: Mapping[str, tuple[str, str]]
    counts: Mapping[str, tuple[str, str]]

    def __bool__(self) -> bool:
        return bool(self.changes or self.surroundings or any(a != b for a, b in self.counts.values()))

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=118, color_system=None)
        console.print(*self._tables(), sep="\n")
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip("\n")

    def _tables(self) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        def table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
            made = Table(*columns, title=title, title_justify="left")
            for column in made.columns:
                column.overflow = "fold"
            for row in rows:
                made.add_row(*(Text(cell) for cell in row))
            return made

        if not self:
            yield Text("no difference")
            return
        if self.surroundings:
            rows = [(name, a, b) for name, (a, b) in self.surroundings.items()]
            yield table("versions and settings", ("", "A", "B"), rows)
        rows = [(kind, a, b) for kind, (a, b) in self.counts.items()]
        yield table("rewritten of recognised", ("kind", "A", "B"), rows)
        grouped: dict[tuple[str, str, str], list[str]] = collections.defaultdict(list)
        for change in self.changes:
            grouped[change.kind, change.before, change.after].append(change.path)
        rows = [
            (kind, f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else paths[0], before, after)
            for (kind, before, after), paths in grouped.items()
        ]
        if rows:
            yield table("sites that differ", ("kind", "module", "A", "B"), rows)


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference:
    """What differs between the contents of two dump.json files.

    A site is the n-th of its kind in its module, so neither names of nodes nor line numbers matter; without modules,
    it is the n-th of its kind in the whole model.
    """
    ours, theirs = _places(a), _places(b)
    changes = []
    for key in dict.fromkeys((*ours, *theirs)):
        before, after = ours.get(key), theirs.get(key)
        words = _words(before, a, key), _words(after, b, key)
        if words[0] != words[1]:
            changes.append(Change(key[0], key[1] or "(the model itself)", *words))
    surroundings = {}
    for part in ("versions", "settings"):
        for name in dict.fromkeys((*a[part], *b[part])):
            one, other = (str(d[part].get(name, "not there")) for d in (a, b))
            if one != other and name != "dump":
                surroundings[name] = (one, other)
    for name in ("model", "target", "error"):
        if a[name] != b[name]:
            surroundings[name] = (a[name] or "none", b[name] or "none")
    if a["graph_breaks"] != b["graph_breaks"]:
        surroundings["graph breaks"] = (str(len(a["graph_breaks"])), str(len(b["graph_breaks"])))
    counts = {
        kind: tuple(f"{d['rewritten'].get(kind, 0)} of {d['counts'].get(kind, 0)}" for d in (a, b))
        for kind in dict.fromkeys((*a["counts"], *b["counts"]))
        if a["counts"].get(kind) or b["counts"].get(kind)
    }
    return Difference(tuple(changes), surroundings, counts)


_Key = tuple[str, str, int]


def _places(dump: Mapping[str, Any]) -> dict[_Key, Mapping[str, Any]]:
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    places = {}
    for site in dump["sites"]:
        where = site["kind"], site["path"]
        places[(*where, seen[where])] = site
        seen[where] += 1
    return places


def _words(site: Mapping[str, Any] | None, dump: Mapping[str, Any], key: _Key) -> str:
    """What a place is in a dump: rewritten, left and why, a near miss and why, or nothing."""
    if site is None:
        kind, path, _ = key
        missed = [m for m in dump["misses"] if m["kind"] == kind and m["path"] == path]
        if not missed:
            return "nothing of the kind in this module"
        advice = hint(missed[0]["reason"])
        return f"near miss: {missed[0]['reason']}" + (f" (to match: {advice})" if advice else "")
    if site["decision"] == "rewritten":
        return f"rewritten, {site['variant']}" if site["variant"] else "rewritten"
    return f"left to Inductor: {site['reason']}"
