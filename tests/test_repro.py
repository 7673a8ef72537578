"""One site of a dump as a test file of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from portable_ops.inductor_ext.cli import main
from portable_ops.inductor_ext.dump import read

pytest.importorskip("jinja2")
pytest.importorskip("grandalf")


def first(index: dict, part: str, kind: str) -> int:
    return next(e["number"] for e in index[part] if e["kind"] == kind)


def run(path: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    return subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)


def test_sites_and_misses_are_reproduced(dumped: Path, tmp_path: Path) -> None:
    index = read(dumped)
    wanted = [first(index, "sites", kind) for kind in ("rms_norm", "attention", "swiglu")]
    wanted.append(first(index, "misses", "rms_norm"))
    for number in wanted:
        assert main(["repro", str(dumped), "--site", str(number), "--out", str(tmp_path / f"test_{number}.py")]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout


def test_it_fails_where_the_subgraph_no_longer_behaves_so(dumped: Path, tmp_path: Path) -> None:
    index = read(dumped)
    path = tmp_path / "test_site.py"
    main(["repro", str(dumped), "--site", str(first(index, "sites", "rms_norm")), "--out", str(path)])
    path.write_text(path.read_text().replace("[-1]", "[1]"))
    assert "the mean is not over the last dimension alone" in run(path).stdout
    main(["repro", str(dumped), "--site", str(first(index, "misses", "rms_norm")), "--out", str(path)])
    path.write_text(path.read_text().replace("[1], True", "[-1], True"))
    assert "it matches now" in run(path).stdout


def test_it_holds_shapes_and_strides_and_the_place(dumped: Path, capsys: pytest.CaptureFixture) -> None:
    index = read(dumped)
    assert main(["repro", str(dumped), "--site", str(first(index, "sites", "attention"))]) == 0
    text = capsys.readouterr().out
    assert "'shape': [2, 4, 8, 16], 'stride': [512, 16, 64, 1]" in text
    assert "attention in layers.0" in text and "planted.py" in text


def test_a_number_that_is_not_there_is_refused(dumped: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["repro", str(dumped), "--site", "999"]) == 2
    assert "sites and near misses 0 to 12" in capsys.readouterr().err
