"""Results as data: one JSON file for each machine and benchmark, and the table on the screen.

    {"machine": {"gpu", "torch", "triton", "python", ...}, "commit", "command",
     "rows": [{"case", "impl", "us", "baseline_us", "variant", "correct", ...}]}

Times are medians in microseconds.  A row that was measured at another commit or by another command than the
file says carries its own ``commit`` and ``command``.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BASELINE = "inductor"

Row = dict[str, Any]

_REQUIRED = {
    "case": str,
    "impl": str,
    "us": (int, float, type(None)),
    "baseline_us": (int, float, type(None)),
    "variant": str,
    "correct": (bool, type(None)),
}


def machine(device: str) -> dict[str, str]:
    """What the figures depend on; call it after the benchmark's own imports."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else "no GPU"
    versions = {"torch": torch.__version__, "triton": triton_version, "python": platform.python_version()}
    if "transformers" in sys.modules:
        versions["transformers"] = sys.modules["transformers"].__version__
    return {"gpu": gpu, **versions}


def slug(gpu: str) -> str:
    """``"NVIDIA H200"`` as a folder name: ``"nvidia-h200"``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def commit() -> str:
    """The commit that is measured, marked where the tree differs from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def problems(data: Any) -> list[str]:
    """What is wrong with the contents of a results file; nothing if it has the format above."""
    if not isinstance(data, Mapping):
        return ["not an object"]
    found = [f"{key!r} is missing" for key in ("machine", "commit", "command", "rows") if key not in data]
    if found:
        return found
    found += [f"machine[{k!r}] is missing" for k in ("gpu", "torch", "triton", "python") if k not in data["machine"]]
    for i, row in enumerate(data["rows"]):
        for key, types in _REQUIRED.items():
            if key not in row:
                found.append(f"rows[{i}][{key!r}] is missing")
            elif not isinstance(row[key], types):
                found.append(f"rows[{i}][{key!r}] is {row[key]!r}")
    return found


class Results:
    """The rows of one run of one benchmark, written to ``path`` (if any) as soon as they are there.

    Rows of an older run at ``path`` stay unless the new run measures the same case and implementation: a long
    benchmark may be run in parts.  ``fresh`` drops them.  Raises ValueError where ``path`` holds figures of
    another machine.
    """

    def __init__(self, path: Path | None, on: dict[str, str], command: str, commit: str, fresh: bool = False) -> None:
        self.path, self.rows = path, []
        self._head = {"machine": on, "commit": commit, "command": command}
        self._older: list[Row] = []
        if path is not None and path.exists() and not fresh:
            older = json.loads(path.read_text())
            if older["machine"] != on:
                raise ValueError(f"{path} holds figures of another machine: {older['machine']}; use --fresh")
            own = {"commit": older["commit"], "command": older["command"]}
            self._older = [own | row for row in older["rows"]]

    def add(self, rows: Sequence[Row]) -> None:
        """Take ``rows`` in and write the file."""
        self.rows += rows
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """The contents of the file."""
        measured = {(row["case"], row["impl"]) for row in self.rows}
        kept = [row for row in self._older if (row["case"], row["impl"]) not in measured]
        own = {key: self._head[key] for key in ("commit", "command")}
        rows = [{k: v for k, v in row.items() if k not in own or v != own[k]} for row in kept + self.rows]
        return {**self._head, "rows": rows}

    def show(self, title: str) -> None:
        """Print the rows of this run."""
        table = Table(title=title, title_justify="left")
        columns = columns_of(self.rows)
        for name, _ in columns:
            table.add_column(name, justify="left" if name in ("case", "implementation", "kernels") else "right")
        previous = None
        for row in self.rows:
            if previous not in (None, row["case"]):
                table.add_section()
            cells = [text(row) for _, text in columns]
            table.add_row(*(["", *cells[1:]] if previous == row["case"] else cells))
            previous = row["case"]
        # Not a terminal: nothing wraps the lines, so the table may be as wide as it needs to be.
        Console(width=None if sys.stdout.isatty() else 200).print(table)


def columns_of(rows: Sequence[Row]) -> list[tuple[str, Any]]:
    """The columns that ``rows`` fill: ``(title, function from a row to its text)``."""
    columns = [
        ("case", lambda row: row["case"]),
        ("implementation", lambda row: row["impl"]),
        ("time", lambda row: duration(row["us"])),
        ("speed-up", lambda row: ratio(row["us"], row["baseline_us"])),
        ("eager call", lambda row: duration(row.get("call_us"))),
        ("host time", lambda row: duration(row.get("host_us"))),
        ("peak memory", lambda row: size(row.get("peak_bytes"))),
        ("reserved", lambda row: size(row.get("reserved_bytes"))),
        ("error", lambda row: "" if row.get("error") is None else f"{row['error']:.1e}"),
        ("correct", lambda row: {True: "yes", False: "NO", None: ""}[row["correct"]]),
        ("kernels", lambda row: row["variant"]),
        ("note", lambda row: row.get("note", "")),
    ]
    return [(name, text) for name, text in columns if any(text(row) for row in rows)]


def duration(us: float | None) -> str:
    """Microseconds in a unit that a person reads: ``"45.1 us"``, ``"8.02 ms"``, ``"51.3 s"``."""
    if us is None:
        return ""
    unit, scale = ("us", 1) if us < 1e3 else ("ms", 1e3) if us < 1e6 else ("s", 1e6)
    return f"{us / scale:.2f} {unit}" if us / scale < 10 else f"{us / scale:.1f} {unit}"


def ratio(us: float | None, baseline_us: float | None) -> str:
    """How much faster than stock Inductor: ``"3.04x"``."""
    return f"{baseline_us / us:.2f}x" if baseline_us and us else ""


def size(count: int | None) -> str:
    """Bytes in a unit that a person reads."""
    if count is None:
        return ""
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"
