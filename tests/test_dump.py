"""The folder that a dump is: what is in it, that its graphs run, and that nothing is in it that should not be."""

from __future__ import annotations

import json
import linecache
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from portable_ops.inductor_ext import Report, SettingError, explain, reports
from portable_ops.inductor_ext import dump as dumps
from portable_ops.inductor_ext.cli import main
from portable_ops.inductor_ext.record import Recording, active, module_path, recording
from portable_ops.inductor_ext.settings import Settings
from torch import Tensor, nn

pytest.importorskip("jinja2")
pytest.importorskip("grandalf")

STAGES = ["0_dynamo", "1_pinned", "2_joint", "3_rewritten"]


def run_graph(path: Path) -> list:
    """What the graph of a file computes on inputs that it makes up, as a process of its own would."""
    namespace: dict = {"__name__": "a_graph"}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    torch.manual_seed(0)
    results = namespace["main"]()
    return [r for r in results if isinstance(r, Tensor)]


def test_graphs_of_every_stage_run_and_agree(dumped: Path) -> None:
    graph = dumped / "graph_00"
    assert sorted(p.stem for p in graph.glob("*.py")) == STAGES
    # Inputs come in another order behind AOTAutograd, so these are compared among themselves.
    for pair in (STAGES[:2], STAGES[2:]):
        (before,), (after,) = (run_graph(graph / f"{stage}.py") for stage in pair)
        assert before.shape == (2, 8, 64) and before.abs().max() > 0
        torch.testing.assert_close(before, after)


def test_graphs_are_readable_and_say_where_they_come_from(dumped: Path) -> None:
    joint, rewritten = ((dumped / "graph_00" / f"{stage}.py").read_text() for stage in STAGES[2:])
    assert "torch.ops.aten.rsqrt.default" in joint and "code: h = h * torch.rsqrt" in joint
    assert '"f32[2, 8, 64][512, 64, 1]cpu"' in joint
    assert rewritten.count("torch.ops.portable_ops.rms_norm.default") == 4
    dot = (dumped / "graph_00" / "3_rewritten.dot").read_text()
    assert dot.startswith("digraph {") and "#E69F00" in dot and dot.rstrip().endswith("}")


def test_sites_are_numbered_and_located(dumped: Path) -> None:
    index = dumps.read(dumped)
    entries = [*index["sites"], *index["misses"]]
    assert [e["number"] for e in entries] == list(range(len(entries)))
    assert index["counts"] | {"linear": 0} == index["rewritten"] | {"linear": 0}
    norms = [s for s in index["sites"] if s["kind"] == "rms_norm"]
    assert [s["path"] for s in norms] == ["layers.0.norm", "layers.1.norm", "layers.2.norm", "norm"]
    for site in norms:
        assert site["operator"] == "portable_ops::rms_norm" and site["bound"]["eps"] == "1e-06"
        assert site["plan"]["variant"] == site["variant"] == "one_pass"
        assert site["plan"]["why"] == "a row of 64 elements fits into the registers of one program"
        assert site["plan"]["launches"][0].startswith("rms_norm_one_pass_kernel[grid ")
        assert [line.rpartition(": ")[2] for line in site["lines"]] == [
            "h = h * torch.rsqrt(h.pow(2).mean(self.dim, keepdim=True) + 1e-6)",
            "return self.weight * h.to(x.dtype)",
        ]
        assert site["features"] == {"dtype": "float32", "rows": 16, "hidden_size": 64}
        assert set(site["region"]["nodes"]) >= set(site["nodes"])
        assert {tuple(spec["shape"]) for spec in site["region"]["inputs"].values()} == {(2, 8, 64), (64,)}
    assert [m["path"] for m in index["misses"]] == [f"layers.{i}.odd_norm" for i in range(3)]
    assert all("last dimension" in m["hint"] for m in index["misses"])
    # A near miss is shown from the squares to the root, and not by its anchor alone.
    assert [re.sub(r"_\d+", "", n) for n in index["misses"][0]["nodes"]] == ["pow", "mean", "add", "rsqrt"]


def test_the_report_is_beside_it(dumped: Path) -> None:
    report = Report.from_json((dumped / "report.json").read_text())
    assert report.counts["rms_norm"] == 4 and len(report.misses) == 3


def test_no_values_are_written(tmp_path: Path) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 0.7310586))
            self.table = torch.full((4,), 0.2718281)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight + self.table

    with torch.no_grad():
        explain(Constant())(torch.full((4,), 0.3141592)).save(tmp_path)
    text = "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    assert "f32[4]" in text
    assert not re.search("7310586|2718281|3141592", text)


@pytest.mark.parametrize("factory", ["exported", "on_meta"])
def test_other_forms_of_models(factory: str, planted: ModuleType, tmp_path: Path) -> None:
    model, x = planted.Model(), planted.inputs()
    with torch.no_grad():
        if factory == "exported":
            model = torch.export.export(model, (x,))
        else:
            model, x = model.to("meta"), x.to("meta")
        report = dumps.dump(model, tmp_path, gate="always")(x)
    assert report.counts["rms_norm"] == 4 and report.counts["attention"] == 3 and len(report.misses) == 3
    assert {s["path"] for s in dumps.read(tmp_path)["sites"] if s["kind"] == "attention"} == {
        f"layers.{i}" for i in range(3)
    }


def test_a_failing_model_shows_its_own_error_and_keeps_what_was_found(planted: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="the model's own"), torch.no_grad():
        dumps.dump(planted.Failing(), tmp_path)(planted.inputs())
    index = dumps.read(tmp_path)
    assert index["error"] == 'KeyError: "the model\'s own"'
    assert index["counts"]["rms_norm"] == 2 and len(index["graph_breaks"]) >= 1
    assert "the model&#39;s own" in (tmp_path / "index.html").read_text()


def test_a_pass_that_fails_leaves_the_stages_before_it(
    planted: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from portable_ops.inductor_ext import rewrite

    def fail(*_: object) -> None:
        raise RuntimeError("broken pass")

    monkeypatch.setattr(rewrite._Rewriting, "_decide", fail)
    with pytest.raises(Exception, match="broken pass"), torch.no_grad():
        dumps.dump(planted.Model(), tmp_path)(planted.inputs())
    assert sorted(p.stem for p in (tmp_path / "graph_00").glob("*.py")) == STAGES[:3]
    assert "broken pass" in dumps.read(tmp_path)["error"]


def test_an_earlier_dump_is_replaced_and_other_files_stay(planted: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with torch.no_grad():
        explain(planted.Model(1))(planted.inputs()).save(tmp_path)
        (tmp_path / "graph_07").mkdir()
        page = explain(planted.wrong_axis)(planted.inputs()).save(tmp_path, model="second")
    assert page == tmp_path / "index.html" and "second" in page.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "dump.json",
        "graph_00",
        "index.html",
        "mine.txt",
        "report.json",
    ]


def test_a_report_without_graphs_is_saved_without_them(planted: ModuleType, tmp_path: Path) -> None:
    with torch.no_grad():
        report = Report.from_json(explain(planted.Model(1))(planted.inputs()).to_json())
    report.save(tmp_path)
    index = dumps.read(tmp_path)
    assert index["graphs"] == [] and index["counts"]["rms_norm"] == 2 and len(index["misses"]) == 1


COMPILED = """
import torch
from torch import Tensor

def norm(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

with torch.no_grad():
    for size in (64, 128):
        options = {"portable_ops.gate": "always"}
        torch.compile(norm, backend="portable_ops", dynamic=False, options=options)(torch.rand(2, size))
"""


def test_any_run_dumps_with_the_variable_set(tmp_path: Path) -> None:
    for _ in range(2):  # the second time the caches are warm, and a dump is made nevertheless
        done = run(COMPILED, tmp_path)
        assert done.returncode == 0, done.stderr
        index = dumps.read(tmp_path)
        assert len(index["graphs"]) == 2 and index["rewritten"]["rms_norm"] == 2
        assert index["settings"]["dump"] == str(tmp_path)
        for graph in ("graph_00", "graph_01"):
            wrapper = (tmp_path / graph / "wrapper_0.py").read_text()
            assert "portable_ops.rms_norm" in wrapper and "def call(" in wrapper
        assert (tmp_path / "index.html").exists()


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PORTABLE_OPS_DUMP": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_process_that_finds_another_at_work_writes_beside_it(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "graph_00").mkdir()
    with (tmp_path / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run(COMPILED, tmp_path).returncode == 0
    (inside,) = tmp_path.glob("process_*")
    assert len(dumps.read(inside)["graphs"]) == 2 and (inside / "index.html").exists()
    assert list((tmp_path / "graph_00").iterdir()) == [] and not (tmp_path / "dump.json").exists()


FORKED = """
import multiprocessing
import torch

def norm(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

def work(sizes):
    with torch.no_grad():
        for size in sizes:
            # Rewritten on a CPU, so that the worker needs no C++ compiler pool, which does not survive a fork.
            options = {"portable_ops.gate": "always"}
            torch.compile(norm, backend="portable_ops", dynamic=False, options=options)(torch.rand(2, size))

work([64])
torch.compiler.reset()
worker = multiprocessing.get_context("fork").Process(target=work, args=([32, 128],))
worker.start()
worker.join()
assert worker.exitcode == 0
"""


def test_a_forked_worker_has_a_dump_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    done = run(FORKED, tmp_path)
    assert done.returncode == 0, done.stderr
    (inside,) = tmp_path.glob("process_*")
    assert [len(dumps.read(folder)["graphs"]) for folder in (tmp_path, inside)] == [1, 2]


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_traced(
    planted: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "sealed").mkdir()
    monkeypatch.setattr(dumps.Tracing, "run", lambda *_: pytest.fail("traced"))
    with pytest.raises(dumps.BadDump, match=r"no dump can be written to .*file.inside: Not a directory"):
        dumps.dump(planted.wrong_axis, tmp_path / "file" / "inside")(planted.inputs())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(dumps.BadDump, match=r"no dump can be written to .*sealed: permission denied"):
        dumps.dump(planted.wrong_axis, tmp_path / "sealed")(planted.inputs())
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sealed_factory.py").write_text("def make(): return abs, (1,)")
    assert main(["dump", "sealed_factory:make", "--out", str(tmp_path / "sealed")]) == 2
    assert capsys.readouterr().err.startswith("portable-ops: no dump can be written to")


def test_training_is_dumped_with_its_backward(planted: ModuleType, tmp_path: Path) -> None:
    torch._dynamo.reset()
    norm, x = planted.Norm(), planted.inputs().requires_grad_()
    options = {"portable_ops.dump": str(tmp_path), "portable_ops.gate": "always"}
    torch.compile(norm, backend="portable_ops", options=options)(x).sum().backward()
    dumps.flush()
    graph = tmp_path / "graph_00"
    stages = [*STAGES, "4_forward", "5_backward"]
    assert sorted(p.stem for p in graph.glob("[0-9]*.py")) == stages
    assert dumps.read(tmp_path)["graphs"][0]["stages"] == stages
    for stage in stages:
        assert run_graph(graph / f"{stage}.py")
    forward, backward = ((graph / f"wrapper_{i}.py").read_text() for i in (0, 1))
    assert "tangents_1" in backward and "tangents_1" not in forward
    assert (tmp_path / "index.html").read_text().count("wrapper_1.py") > 0


def test_numbers_and_frozen_weights_are_not_told(tmp_path: Path) -> None:
    """A number that is an input of the graph, and weights that freezing makes constants of the code."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7310586))

        def forward(self, x: Tensor, n: int) -> Tensor:
            return x * self.scale + n

    torch._dynamo.reset()
    options = {"portable_ops.dump": str(tmp_path / "dynamic")}
    with torch.no_grad():
        compiled = torch.compile(Scaled(), backend="portable_ops", dynamic=True, options=options)
        compiled(torch.rand(8), 40 * 1000 + 961)
        with torch._inductor.config.patch(freezing=True):
            options = {"portable_ops.dump": str(tmp_path / "frozen")}
            torch.compile(Scaled().eval(), backend="portable_ops", options=options)(torch.rand(8), 3)
    dumps.flush()
    text = "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    assert not re.search("40961|731058", text)
    assert (tmp_path / "dynamic" / "graph_00" / "wrapper_0.py").exists()
    assert not list((tmp_path / "frozen").rglob("wrapper*"))
    run_graph(tmp_path / "dynamic" / "graph_00" / "3_rewritten.py")


def test_any_text_of_the_users_is_written(tmp_path: Path) -> None:
    """Other scripts, a line of a megabyte, broken Unicode."""
    code = (
        "def größe(x): ζ = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6); z = '"
        + "A" * 1_000_000
        + "💥'; return ζ"
    )
    path, made = str(tmp_path / "файл.py"), {}
    linecache.cache[path] = (len(code), None, [code], path)
    exec(compile(code, path, "exec"), {"torch": torch}, made)
    with torch.no_grad():
        explain(made["größe"])(torch.rand(2, 3, 4)).save(tmp_path / "out", model="\ud800 größe")
    assert "def größe(x): ζ = x" in json.dumps(dumps.read(tmp_path / "out")["misses"], ensure_ascii=False)
    assert sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file()) < 100_000
    run_graph(tmp_path / "out" / "graph_00" / "3_rewritten.py")


def test_graphviz_reads_the_graphs(dumped: Path) -> None:
    dot = shutil.which("dot")
    if dot is None:
        pytest.skip("needs Graphviz (apt-get install graphviz)")
    for path in (dumped / "graph_00").glob("*.dot"):
        done = subprocess.run([dot, "-Tplain", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and not done.stderr, done.stderr
        rows = len(re.findall(r"^  \S+ \[label", path.read_text(), re.MULTILINE))
        assert sum(line.startswith("node ") for line in done.stdout.splitlines()) == rows > 100


def test_kernels_are_cut_out_of_the_wrapper(tmp_path: Path) -> None:
    code = "poi_0 = async_compile.triton('poi_0', '''\nimport triton\nX = 1\n''', device_str='cuda')\n"
    code += "cpp_0 = async_compile.cpp_pybinding(['float*'], r'''\nvoid kernel();\n''')\n"
    dumps._write_graph(tmp_path, Recording(code=[code, code]))
    assert [p.name for p in tmp_path.glob("wrapper*")] == ["wrapper_0.py"]
    assert (tmp_path / "kernels" / "poi_0.py").read_text() == "import triton\nX = 1\n"
    assert (tmp_path / "kernels" / "cpp_0.cpp").read_text() == "void kernel();\n"


def test_nothing_is_recorded_unless_it_is_wanted(planted: ModuleType) -> None:
    assert active() is None
    kept = Recording()
    with recording(kept):
        assert active() is kept
    assert active() is None
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(planted.wrong_axis, backend="portable_ops", options={"portable_ops.gate": "never"})(
            torch.rand(2, 8, 64)
        )

    assert reports()[-1].recordings == () and len(reports()[-1].misses) == 1


def test_the_setting_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Settings.read({"dump": tmp_path}, {}).dump == str(tmp_path)
    for wrong in (3, "", tmp_path / "file"):
        with pytest.raises(SettingError, match=r"portable_ops\.dump"):
            Settings.read({"dump": wrong}, {})


@pytest.mark.parametrize(
    ("entry", "path"),
    [
        ("L['self']._modules['model']._modules['layers']._modules['0'].mlp", "model.layers.0.mlp"),
        ("L['args'][0].model.layers.35.self_attn", "model.layers.35.self_attn"),
        ("L['self'].layers[0].norm", "layers.0.norm"),
        ("L['self']", ""),
        ("G['model'].norm", "norm"),
        ("", ""),
        ("model.norm", "model.norm"),
    ],
)
def test_module_paths(entry: str, path: str) -> None:
    assert module_path(entry) == path


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)
    (tmp_path / "factories.py").write_text(
        "import torch\n"
        "def square(x): return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)\n"
        "def make(): return square, torch.rand(2, 64)\n"
        "def fail(x): raise KeyError('mine')\n"
        "def make_failing(): return fail, torch.rand(2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    assert main(["dump", "factories:make", "--out", str(out), "--gate", "always"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out / "index.html")
    assert json.loads((out / "dump.json").read_text())["model"] == "factories:make"
    assert main(["dump", "factories:make_failing", "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "KeyError: 'mine'" in captured.err and "what was found" in captured.out
    assert main(["dump", "factories:make", "--out", str(out), "--expect", "rms_norm=2"]) == 1
    assert dumps.read(out)["counts"]["rms_norm"] == 1
    assert main(["dump", "factories:make", "--out", str(tmp_path / "factories.py")]) == 2


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
def test_hugging_face_models_list_every_site(name: str, tmp_path: Path, zoo: ModuleType) -> None:
    architecture = next(a for a in (*zoo.CI, *zoo.OTHERS) if a.name == name)
    reason = zoo.missing(architecture)
    if reason is not None:
        pytest.skip(reason)
    model = zoo.build(architecture, torch.float32, "eager" if name == "gpt_oss" else "sdpa")
    arguments = zoo.inputs(architecture, model, "prefill")
    with torch.no_grad():
        expected = zoo.count_calls(model, zoo.inputs(architecture, model, "prefill"))
        dumps.dump(model, tmp_path)(**arguments)
    index = dumps.read(tmp_path)
    assert {kind: index["counts"][kind] for kind in expected} == dict(expected)
    for entry in (*index["sites"], *index["misses"]):
        assert entry["reason"] and entry["source"] and entry["anchor"] and entry["lines"]
        assert len(entry["nodes"]) > 1 or entry["kind"] in ("linear", "topk", "attention")
    located = [s for s in index["sites"] if re.match(r"model\.(layers\.[01]\b|norm)", s["path"])]
    assert len(located) == len(index["sites"])
