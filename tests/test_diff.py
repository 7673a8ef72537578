"""Two dumps compared."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from portable_ops.inductor_ext import explain
from portable_ops.inductor_ext.cli import main
from portable_ops.inductor_ext.diff import compare
from portable_ops.inductor_ext.dump import BadDump, read

pytest.importorskip("jinja2")
pytest.importorskip("grandalf")


def saved(model: object, folder: Path, planted: ModuleType, **options: object) -> dict:
    with torch.no_grad():
        explain(model, **options)(planted.inputs()).save(folder)
    return read(folder)


def test_equal_dumps_do_not_differ(dumped: Path, capsys: pytest.CaptureFixture) -> None:
    assert not compare(read(dumped), read(dumped))
    assert main(["diff", str(dumped), str(dumped)]) == 0
    assert capsys.readouterr().out.strip() == "no difference"


def test_an_edit_that_loses_a_match_is_explained(dumped: Path, planted: ModuleType, tmp_path: Path) -> None:
    model = planted.Model()
    model.layers[1].norm.dim = 1
    difference = compare(read(dumped), saved(model, tmp_path, planted, gate="always"))
    (change,) = difference.changes
    assert (change.kind, change.path, change.before) == ("rms_norm", "layers.1.norm", "rewritten, one_pass")
    assert change.after.startswith("near miss: the mean is not over the last dimension alone")
    assert "to match: take the mean over the last dimension" in change.after
    assert difference.counts["rms_norm"] == ("4 of 4", "3 of 3")
    assert not difference.surroundings.keys() - {"model"}


def test_a_setting_that_changes_decisions_is_named(
    dumped: Path, planted: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    difference = compare(read(dumped), saved(planted.Model(), tmp_path, planted, gate="never"))
    assert difference.surroundings["gate"] == ("always", "never")
    assert {c.after for c in difference.changes} == {"left to Inductor: gate=never"}
    assert len(difference.changes) == 10
    assert main(["diff", str(dumped), str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "layers.0.norm and 3 more" in printed and "gate=never" in printed


def test_what_is_gone_altogether(dumped: Path, planted: ModuleType, tmp_path: Path) -> None:
    difference = compare(read(dumped), saved(planted.Model(2), tmp_path, planted, gate="always"))
    gone = [c for c in difference.changes if c.path.startswith("layers.2")]
    assert len(gone) == 3 and {c.after for c in gone} == {"nothing of the kind in this module"}


def test_a_folder_without_a_dump_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(BadDump, match="holds no dump"):
        read(tmp_path)
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
    (tmp_path / "dump.json").write_text('{"format": 99}')
    with pytest.raises(BadDump, match="another version"):
        read(tmp_path)
