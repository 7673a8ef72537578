"""docs/performance.md, written from the results: every figure comes with the command that measured it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from .results import RESULTS, ROOT, Row, columns_of, problems

PAGE = ROOT / "docs" / "performance.md"

_HEAD = """\
# Performance

<!-- Written by `python -m benchmarks report` from benchmarks/results; edit neither by hand. -->

Each table was measured in one process: the implementations ran in turns, and each time is the median of at
least 100 repetitions with the L2 cache flushed before each. Single operators are replays of a CUDA graph,
so that the time which Python takes to launch them does not count. "speed-up" is the time of stock Inductor
(`torch.compile(f)`) in the same turns divided by the time of the row. "error" is the relative distance from a
wider computation (float64; float32 for whole models), "correct" says that it is at most 1.5 times eager's own
plus one rounding of the output type. "peak memory" is how far one call raises the allocated memory,
"reserved" is what compiling and warming up left reserved.
"""

_NOTHING = """
There are no results yet. `python -m benchmarks decode_attention` (and `prefill_attention`, `rms_norm`,
`llama`) on a machine with a GPU writes them; this page has no other source of figures.
"""


def generate(folder: Path = RESULTS) -> str:
    """The page for the results in ``folder``.  Raises ValueError for a file that is not in the format."""
    parts = [_HEAD]
    for path in sorted(folder.glob("*/*.json")):
        data = json.loads(path.read_text())
        if found := problems(data):
            raise ValueError(f"{path}: {'; '.join(found)}")
        parts.append(_section(path, data))
    return "".join(parts if len(parts) > 1 else [*parts, _NOTHING])


def _section(path: Path, data: dict) -> str:
    on = data["machine"]
    versions = ", ".join(f"{what} {version}" for what, version in on.items() if what != "gpu")
    lines = [f"\n## {path.stem} on {on['gpu']}\n", f"\n{on['gpu']}; {versions}.\n"]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in data["rows"]:
        source = row.get("commit", data["commit"]), row.get("command", data["command"])
        groups.setdefault(source, []).append(row)
    for (commit, command), rows in groups.items():
        lines.append(f"\n`{command}` at commit `{commit[:12]}`:\n\n")
        lines += _table(rows)
    return "".join(lines)


def _table(rows: list[Row]) -> Iterable[str]:
    columns = columns_of(rows)
    yield _line(title for title, _ in columns)
    yield _line("---" for _ in columns)
    for row in rows:
        yield _line(text(row) for _, text in columns)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main(argv: list[str]) -> int:
    """Write docs/performance.md from benchmarks/results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    args = parser.parse_args(argv)
    page = generate()
    if args.check:
        current = PAGE.read_text() if PAGE.exists() else ""
        if current != page:
            print(f"{PAGE.relative_to(ROOT)} is out of date: run `python -m benchmarks report`", file=sys.stderr)
        return int(current != page)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page)
    print(f"{PAGE.relative_to(ROOT)} written")
    return 0
