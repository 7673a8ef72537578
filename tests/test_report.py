"""What the user reads: the report, its printed form and its log line, ``explain`` and the command line."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from portable_ops.inductor_ext import ExpectationError, Report, SettingError, Site, explain, reports
from portable_ops.inductor_ext.cli import main
from portable_ops.inductor_ext.report import WIDTH, short_source
from portable_ops.patterns import KINDS, Miss
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent


class Norm(nn.Module):
    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, head_dim: int = 16) -> None:
        super().__init__()
        self.norm, self.head_dim = Norm(), head_dim

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(x).view(2, 8, -1, self.head_dim).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture
def x() -> Tensor:
    return torch.rand(2, 8, 64)


def only(counts: dict[str, int]) -> dict[str, int]:
    """``counts`` without zeros."""
    return {kind: n for kind, n in counts.items() if n}


SOURCE = "/somewhere/lib/python3.11/site-packages/a_package/models/a_model.py:64: y = cache[layer] + x[0]"
REASON = (
    "no measurement on sm_90 says that it pays here, and this reason is longer than a line of the table can be " * 2
)
REPORT = Report(
    sites=(
        Site("rms_norm", "rms_norm", "declined", REASON.strip(), SOURCE, bound={"eps": "1e-06"}),
        Site("rms_norm", "rms_norm", "declined", REASON.strip(), SOURCE, count=64),
        Site("attention", "attention", "rewritten", "gate=always", SOURCE, variant="portable.decode", count=32),
    ),
    misses=(Miss("rms_norm", "rms_norm", "rsqrt", "the mean is not of squares", f"{os.getcwd()}/mine.py:3: z"),),
    graph_breaks=(f"{os.getcwd()}/mine.py:9: print [red]\n  Explanation: long", "unsupported"),
    settings={"gate": "table", "expect": {"rms_norm": 1}},
    target="sm_90",
    versions={"torch": "2.11.0", "triton": "3.6.0"},
    graphs=3,
)


# ------------------------------------------------------------------------------------ the report itself


def test_counts_are_of_sites() -> None:
    assert REPORT.counts == {**dict.fromkeys(KINDS, 0), "rms_norm": 65, "attention": 32}
    assert REPORT.rewritten == {**dict.fromkeys(KINDS, 0), "attention": 32}
    assert [s.kind for s in REPORT.declined] == ["rms_norm", "rms_norm"]


def test_json_round_trip() -> None:
    assert Report.from_json(REPORT.to_json()) == REPORT
    data = json.loads(REPORT.to_json())
    assert data["counts"]["rms_norm"] == 65
    assert data["misses"][0]["reason"] == "the mean is not of squares"


def test_one_line() -> None:
    expected = "rms_norm 0/65, attention 32/32 rewritten, 1 near misses (gate=table, target=sm_90)"
    assert REPORT.one_line() == expected
    assert Report(settings={"gate": "never"}, target="cpu").one_line().startswith("nothing recognised, 0 near misses")


def test_merge() -> None:
    both = Report.merge([REPORT, REPORT], ("broken",), 2)
    assert both.counts["rms_norm"] == 130
    assert (both.graph_breaks, both.graphs, len(both.misses)) == (("broken",), 2, 2)
    assert Report.merge([]).counts == dict.fromkeys(KINDS, 0)
    assert REPORT.times(3).rewritten["attention"] == 96


def test_a_printed_report_fits_and_cuts_nothing() -> None:
    text = str(REPORT)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= WIDTH
    assert "…" not in text
    flat = " ".join(text.replace("│", " ").split())
    for part in ("3 graph(s), target sm_90", "portable.decode", "cache[layer] + x[0]", "print [red]", "gate=table"):
        assert part in flat, part
    reason = " ".join(line.split("│")[3].strip() for line in lines if line.count("│") == 5)
    assert REASON.strip() in reason
    assert "a_package/models/a_model.py:64" in text
    assert "site-packages" not in text and os.getcwd() not in text
    assert "Explanation" not in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_console_of_any_width_cuts_nothing(width: int) -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(REPORT)
    text = console.file.getvalue()
    assert "…" not in text and "[layer]" in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_short_source() -> None:
    assert short_source("/x/site-packages/a/b.py:3: c: d") == "a/b.py:3: c: d"
    assert short_source("/x/dist-packages/a.py:3: c") == "a.py:3: c"
    assert short_source(f"{os.getcwd()}/a/b.py:3: c") == "a/b.py:3: c"
    assert short_source("/elsewhere/b.py:3: c") == "/elsewhere/b.py:3: c"
    assert short_source("") == ""


# ----------------------------------------------------------------------------- where the report goes


def test_one_log_line_for_each_graph(x: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "portable_ops"):
        torch.compile(Norm(), backend="portable_ops", options={"portable_ops.gate": "always"})(x)
    lines = [r.message for r in caplog.records if r.name == "portable_ops.inductor_ext.report"]
    assert lines == ["rms_norm 1/1 rewritten, 0 near misses (gate=always, target=sm_90)"]
    assert reports()[-1].one_line() == lines[0]


SCRIPT = """
import torch

def norm(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

def compile_it(gate="always"):
    with torch.no_grad():
        return torch.compile(norm, backend="portable_ops", options={"portable_ops.gate": gate})(torch.rand(2, 64))
"""


def run_script(body: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PORTABLE_OPS_", "TORCH_LOGS", "TORCH_TRACE"))}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(body)],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run


def test_torch_logs_and_structured_trace(tmp_path: Path) -> None:
    run = run_script("compile_it()", TORCH_LOGS="portable_ops", TORCH_TRACE=str(tmp_path))
    assert "rms_norm 1/1 rewritten, 0 near misses (gate=always, target=sm_90)" in run.stderr
    trace = "".join(path.read_text() for path in tmp_path.iterdir()).splitlines()
    (start,) = [i for i, line in enumerate(trace) if '"portable_ops_report"' in line]
    payload = trace[start + 1 :]
    end = next(i for i, line in enumerate(payload) if not line.startswith("\t"))
    report = Report.from_json("\n".join(line.removeprefix("\t") for line in payload[:end]))
    assert only(report.rewritten) == {"rms_norm": 1}


WITHOUT_TRITON = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def test_everything_but_the_kernels_works_without_triton() -> None:
    modules = [
        f"portable_ops.{folder}.{path.stem}"
        for folder in ("kernels", "patterns", "inductor_ext")
        for path in sorted((ROOT / folder).glob("*.py"))
        if path.stem != "__init__"
    ]
    body = f"""
    import importlib
    for name in {modules!r}:
        importlib.import_module(name)
    assert "triton" not in sys.modules
    from portable_ops.inductor_ext import explain, reports
    with torch.no_grad():
        report = explain(norm, gate="always")(torch.rand(2, 64))
    torch.testing.assert_close(compile_it().mean(), torch.tensor(1.0), rtol=1, atol=1)
    print(report.counts["rms_norm"], report.declined[0].reason, reports()[-1].counts["rms_norm"], sep="|")
    """
    run = run_script(WITHOUT_TRITON + textwrap.dedent(body))
    assert run.stdout.strip() == "1|Triton is not installed|1"


# -------------------------------------------------------------------------------------------- explain


def test_explain_on_a_cpu_decides_for_sm_90(x: Tensor) -> None:
    report = explain(Attention())(x)
    assert only(report.counts) == {"rms_norm": 1, "attention": 1}
    assert report.target == report.settings["target"] == "sm_90"
    assert all(s.decision == "declined" or "measured" in s.reason for s in report.sites)
    assert explain(Attention(), gate="always")(x).rewritten == report.counts
    assert str(Path(__file__)) in report.sites[0].source


@pytest.mark.parametrize("target", ["sm_80", "sm_120", "gfx942"])
def test_explain_for_another_target(target: str, x: Tensor) -> None:
    report = explain(Attention(), target=target, gate="always")(x)
    assert report.target == target
    assert only(report.rewritten) == {"rms_norm": 1, "attention": 1}


def test_explain_for_a_target_that_no_kernel_serves(x: Tensor) -> None:
    report = explain(Norm(), target="sm_75", gate="always")(x)
    assert only(report.counts) == {"rms_norm": 1}
    assert [s.reason for s in report.declined] == ["needs compute capability 8.0 or later, this is sm_75"]


def test_explain_on_the_meta_device() -> None:
    with torch.device("meta"):
        model, x = Attention(), torch.rand(2, 8, 64)
    assert only(explain(model, gate="always")(x).rewritten) == {"rms_norm": 1, "attention": 1}


def test_explain_under_fake_tensor_mode() -> None:
    with torch._subclasses.FakeTensorMode():
        model, x = Attention(), torch.rand(2, 8, 64)
        report = explain(model, gate="always")(x)
    assert only(report.rewritten) == {"rms_norm": 1, "attention": 1}


def test_the_parts_of_a_wrapper_subclass_are_plain_tensors(x: Tensor) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    norm = Norm()
    report = explain(norm, gate="always")(TwoTensor(x, 2 * x))
    assert only(report.counts) == only(report.rewritten) == {"rms_norm": 2}
    result = torch.compile(norm, backend="portable_ops", options={"portable_ops.gate": "always"})(TwoTensor(x, x + 1))
    assert isinstance(result, TwoTensor)
    torch.testing.assert_close((result.a, result.b), (norm(x), norm(x + 1)))


def test_explain_in_training(x: Tensor) -> None:
    with torch.enable_grad():
        report = explain(Attention())(x)
    reasons = {s.kind: s.reason for s in report.declined}
    assert "gradient" in reasons["attention"] and "training" in reasons["rms_norm"]


def test_explain_says_why_attention_is_not_taken(x: Tensor) -> None:
    report = explain(Attention(head_dim=8), gate="always")(x)
    assert [s.kind for s in report.declined] == ["attention"]
    assert "8" in report.declined[0].reason


def test_explain_lists_graph_breaks_with_their_lines(x: Tensor) -> None:
    norm = Norm()

    def broken(x: Tensor) -> Tensor:
        y = norm(x)
        print("a side effect")
        return norm(y) + 1

    report = explain(broken, gate="always")(x)
    assert report.graphs == 2 and only(report.rewritten) == {"rms_norm": 2}
    (reason,) = report.graph_breaks
    line = broken.__code__.co_firstlineno + 2
    assert reason.startswith(f"{__file__}:{line}: ") and "print" in reason
    assert f"test_report.py:{line}: " in " ".join(str(report).split())


def test_explain_counts_a_graph_as_often_as_it_runs(x: Tensor) -> None:
    norm = Norm()

    def broken(x: Tensor) -> Tensor:
        for _ in range(3):
            x = norm(x)
            print("a side effect")
        return x

    report = explain(broken, gate="always", expect={"rms_norm": 3})(x)
    assert report.graphs == 1 and only(report.counts) == only(report.rewritten) == {"rms_norm": 3}
    with pytest.raises(ExpectationError, match="rms_norm: expected 4, recognised 3"):
        explain(broken, expect={"rms_norm": 4})(x)


def test_explain_generates_no_code(x: Tensor) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("code is generated")

    with (
        mock.patch("torch._inductor.graph.GraphLowering.codegen", refuse),
        mock.patch("torch._inductor.codecache.PyCodeCache.load_by_key_path", refuse),
    ):
        explain(Attention(), gate="always")(x)


def test_explain_leaves_no_trace(x: Tensor) -> None:
    torch._dynamo.utils.counters["graph_break"]["an earlier one"] += 1
    before = copy.deepcopy(dict(torch._dynamo.utils.counters)), torch._inductor.config.get_config_copy(), len(reports())
    explain(Attention(), gate="always")(x)
    after = dict(torch._dynamo.utils.counters), torch._inductor.config.get_config_copy(), len(reports())
    assert before == after
    torch._dynamo.utils.counters.clear()


def test_a_model_that_was_compiled_before_still_works(x: Tensor) -> None:
    norm = Norm()
    compiled = torch.compile(norm, backend="portable_ops")
    first = compiled(x)
    explain(norm)(x)
    torch.testing.assert_close(compiled(x), first)


def test_an_error_of_the_model_reaches_the_user(x: Tensor) -> None:
    norm = Norm()

    def fails(x: Tensor) -> Tensor:
        norm(x)
        raise KeyError("the model's own")

    with pytest.raises(KeyError, match="the model's own"):
        explain(fails)(x)


def test_a_wrong_option_of_explain_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match=r"unknown option 'portable_ops.taget'; did you mean 'portable_ops.target'"):
        explain(Norm(), taget="sm_90")


def test_explain_with_no_graph_at_all() -> None:
    report = explain(lambda: 3)()
    assert (report.graphs, only(report.counts)) == (0, {})
    assert str(report).splitlines()[0] == "portable_ops: 0 graph(s)"
    assert report.one_line() == "nothing recognised, 0 near misses (gate=table)"
    with pytest.raises(ExpectationError):
        explain(lambda: 3, expect={"rms_norm": 1})()


def test_explain_a_whole_8b_model_without_memory_for_it() -> None:
    """About 15 s, nearly all of it Dynamo's and AOTAutograd's tracing."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
        ids = torch.zeros(1, 64, dtype=torch.long)
    expect = {"rms_norm": 65, "attention": 32}
    report = explain(model, gate="always", expect=expect)(ids, use_cache=False)
    assert {kind: report.rewritten[kind] for kind in expect} == expect
    assert report.graph_breaks == ()


# ------------------------------------------------------------------------------------- command line

FACTORIES = """
import torch

class Norm(torch.nn.Module):
    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

def make():
    return Norm(), (torch.rand(2, 64),)

def make_with_names():
    return Norm(), {"x": torch.rand(2, 64)}

def make_wrong():
    return Norm()

def make_of(size):
    return Norm(), (torch.rand(2, size),)

not_a_function = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder."""
    (tmp_path / "cli_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "cli_factories", raising=False)
    return "cli_factories"


def test_cli_prints_a_table(factories: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", f"{factories}:make", "--gate", "always"]) == 0
    output = capsys.readouterr().out
    assert "portable_ops: 1 graph(s), target sm_90" in output
    assert "rms_norm" in output and "gate=always" in output
    assert not [line for line in output.splitlines() if line != line.rstrip()]


def test_cli_json_and_target(factories: str, capsys: pytest.CaptureFixture) -> None:
    call = ["explain", f"{factories}:make_with_names", "--json", "--gate=always", "--target=gfx942"]
    assert main(call) == 0
    report = Report.from_json(capsys.readouterr().out)
    assert report.target == "gfx942"
    assert only(report.rewritten) == {"rms_norm": 1}


def test_cli_training(factories: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", "--training", "--json", f"{factories}:make"]) == 0
    assert only(Report.from_json(capsys.readouterr().out).counts) == {"rms_norm": 1}


def test_cli_expect(factories: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", f"{factories}:make", "--expect", "rms_norm=1"]) == 0
    assert main(["explain", f"{factories}:make", "--expect", "rms_norm=2"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("portable-ops: rms_norm: expected 2, recognised 1\nnear misses:\n  none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cli_factories"], "'cli_factories' is not of the form MODULE:FUNCTION"),
        ([".cli_factories:make"], "'.cli_factories:make' is not of the form MODULE:FUNCTION"),
        (["no_such_module:make"], "module 'no_such_module' cannot be imported: No module named 'no_such_module'"),
        (["cli_factories:mak"], "module 'cli_factories' has no function 'mak'"),
        (["cli_factories:not_a_function"], "module 'cli_factories' has no function 'not_a_function'"),
        (["cli_factories:make_of"], "cli_factories:make_of must be callable without arguments: missing a required"),
        (["cli_factories:make_wrong"], "cli_factories:make_wrong must return (model, example inputs), got Norm"),
        (["cli_factories:make", "--target", "h100"], "portable_ops.target: target 'h100' is not an architecture"),
        (["cli_factories:make", "--expect", "norm=1"], "portable_ops.expect: unknown kind 'norm'; did you mean 'rms"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("factories")
def test_cli_refuses_a_wrong_call_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"portable-ops: {message}")
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_cli_refuses_a_wrong_gate(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["explain", "a:b", "--gate", "alway"])
    assert stop.value.code == 2
    assert "invalid choice: 'alway'" in capsys.readouterr().err


def test_the_console_script_is_installed() -> None:
    from importlib.metadata import entry_points

    (script,) = [e for e in entry_points(group="console_scripts") if e.name == "portable-ops"]
    assert script.load() is main
