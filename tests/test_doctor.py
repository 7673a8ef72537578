"""What ``portable-ops doctor`` finds."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from portable_ops.inductor_ext import doctor
from portable_ops.inductor_ext.cli import main


def test_everything_is_looked_at_once() -> None:
    torch._dynamo.reset()
    findings = list(doctor.examine())
    assert list(dict.fromkeys(f.part for f in findings)) == ["versions", "targets", "variants", "caches", "compilation"]
    assert not [f for f in findings if f.state == "broken"]
    variants = {f.name: f for f in findings if f.part == "variants"}
    assert "head_dim 512" in variants["attention, head_dim 512"].words
    if not torch.cuda.is_available():
        whys = {
            name: variants[name].words
            for name in ("rms_norm, long rows", "attention, prompt", "linear", "qk_rope_append")
        }
        assert whys == {
            "rms_norm, long rows": "two_pass on sm_90: a row of 65536 elements does not fit into the registers of one "
            "program",
            "attention, prompt": "portable.prefill on sm_90: more than 64 rows of queries read the keys of a head, so "
            "each block of them reads them anew",
            "linear": "portable.stream on sm_90: one row: the weights are read once and multiplied as they come",
            "qk_rope_append": "rotation + append on sm_90: 4 heads to a program: few tokens",
        }
        decoding = [variants[name].words for name in ("attention, decoding", "attention, decoding, long cache")]
        assert decoding == [
            "portable.decode on sm_90: few rows of queries; 512 programs for 132 places, each with 1 block of keys: "
            "split, they would not finish sooner",
            "portable.decode_split on sm_90: few rows of queries; 8 programs for 132 places, each with 64 blocks of "
            "keys: split 16 ways, they finish first",
        ]
    assert findings[-1].words.count("rms_norm 1/1 rewritten") == 1


def test_what_is_missing_is_no_harm_and_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {f.name: f for f in doctor._installed()}
    assert (found["jinja2"].state, found["jinja2"].words) == ("off", "not installed: pip install 'portable_ops[dump]'")


def test_a_compiler_that_fails_is_told_and_ends_in_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", fail)
    assert main(["doctor"]) == 1
    assert "broken RMSNorm: RuntimeError: no C++ compiler" in capsys.readouterr().out
