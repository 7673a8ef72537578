"""The benchmarks' statistics, judgement of correctness, files and report; no figure means anything here."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import decode_attention, harness, llama, pass_speed, prefill_attention, report, results, rms_norm, truth

MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "python": "3.12.3"}


def row(case: str, impl: str, us: float, **more: Any) -> results.Row:
    return {"case": case, "impl": impl, "us": us, "baseline_us": 2.0, "variant": "", "correct": True, **more}


# --------------------------------------------------------------------------------------------------- timing


def test_candidates_run_in_turns_and_the_order_turns_too() -> None:
    ran: list[str] = []
    clock = harness.Clock("cpu", repetitions=4)
    times = clock.in_turns([lambda: ran.append("a"), lambda: ran.append("b")], before=lambda: ran.append("-"))
    assert "".join(ran) == "-a-b" + "-b-a" + "-a-b" + "-b-a"
    assert len(times) == 2 and all(us > 0 for us in times)


def test_a_time_is_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = harness.Clock("cpu", repetitions=5)
    measured = iter([9.0, 1.0, 5.0, 100.0, 2.0])
    monkeypatch.setattr(clock, "_once", lambda call: next(measured))
    assert clock.in_turns([lambda: None]) == [5.0]


def test_a_gpu_is_timed_with_events_after_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            happened.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 0.25  # milliseconds

    class Flush:
        def sum(self) -> None:
            happened.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    clock = harness.Clock("cpu", repetitions=2)
    clock.on_gpu, clock._flush = True, Flush()
    assert clock.in_turns([lambda: happened.append("call")], before=lambda: happened.append("before")) == [250.0]
    assert happened == ["before", "flush", "event", "call", "event"] * 2 + ["wait"], "nothing waits in between"


def test_host_time_is_measured_for_each_call() -> None:
    ran: list[str] = []
    times = harness.Clock("cpu", repetitions=3).host([lambda: ran.append("a"), lambda: ran.append("b")])
    assert ran == ["a", "b"] * 3 and len(times) == 2


def test_a_mode_and_a_gate_go_together() -> None:
    # torch.compile refuses a mode beside options, so this would raise.
    harness.compile_as("portable_ops gate=never", lambda x: x, "max-autotune-no-cudagraphs")
    assert harness.compile_as("eager", len, "reduce-overhead") is len


def test_the_baseline_is_stock_inductor_in_the_same_turns() -> None:
    rows = harness.with_baseline([{"impl": "eager", "us": 3.0}, {"impl": "inductor", "us": 2.0}])
    assert [r["baseline_us"] for r in rows] == [2.0, 2.0]
    assert harness.with_baseline([{"impl": "eager", "us": 3.0}])[0]["baseline_us"] is None


# ---------------------------------------------------------------------------------------------- correctness


def test_error_is_relative_to_the_truth() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    error = truth.Error.of(torch.tensor([3.0, 4.5]), exact)
    assert error == truth.Error(relative=0.1, largest=0.5, scale=4.0)
    with pytest.raises(ValueError, match="shape"):
        truth.Error.of(torch.zeros(3), exact)


@pytest.mark.parametrize(
    ("ours", "acceptable"),
    [
        pytest.param(truth.Error(1.4e-3, 1.4e-3, 1.0), True, id="within 1.5 times eager's"),
        pytest.param(truth.Error(0.0, 0.0, 1.0), True, id="exact"),
        pytest.param(truth.Error(2e-2, 1e-3, 1.0), False, id="too far in the norm"),
        pytest.param(truth.Error(1e-3, 1e-1, 1.0), False, id="one element too far"),
        pytest.param(truth.Error(float("nan"), float("nan"), 1.0), False, id="NaN"),
    ],
)
def test_an_error_is_judged_beside_eagers(ours: truth.Error, acceptable: bool) -> None:
    assert ours.acceptable(truth.Error(1e-3, 1e-3, 1.0), torch.bfloat16) is acceptable


def test_an_unwritten_output_is_wrong() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    nan = harness.Candidate("portable_ops", lambda: None, "", torch.full((4,), float("nan")))
    checked = harness.check("case", nan, exact, truth.errors(torch.ones(4), exact))
    assert checked["correct"] is False


@pytest.mark.parametrize("spelling", sorted(decode_attention.SPELLINGS))
def test_attention_truth_is_what_decoding_computes(spelling: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 13, 8), torch.randn(2, 2, 13, 8)
    mask = (torch.arange(13) < 7).expand(2, 1, 1, 13)
    exact = truth.attention_truth(q, k, v, mask)
    torch.testing.assert_close(
        decode_attention.SPELLINGS[spelling](q, k, v, mask).double(), exact, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_attention_truth_is_what_prefill_computes(heads: tuple[int, int], causal: bool) -> None:
    torch.manual_seed(0)
    H, K = heads
    q, k, v = torch.randn(1, H, 5, 8), torch.randn(1, K, 5, 8), torch.randn(1, K, 5, 8)
    exact = truth.attention_truth(q, k, v, is_causal=causal)
    for fn in prefill_attention.spellings(H, K):
        torch.testing.assert_close(fn(q, k, v, is_causal=causal).double(), exact, rtol=1e-5, atol=1e-6)


def test_rms_norm_truth_is_what_the_model_computes() -> None:
    torch.manual_seed(0)
    x, r, w = torch.randn(3, 7), torch.randn(3, 7), torch.rand(7)
    for value, exact in zip(rms_norm.add_rms_norm(x, r, w), rms_norm.exact_add_rms_norm(x, r, w), strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def tiny_llama() -> tuple[Any, Any]:
    args = command.parse("llama", llama, ["--tiny", "--device", "cpu"])
    return llama.make_model(args), args


@torch.no_grad()
def test_every_step_runs_at_the_same_position(tiny_llama: tuple[Any, Any]) -> None:
    model, args = tiny_llama
    step = llama.DecodeStep(model, args, batch=2)
    logits = [step.run(model) for _ in range(3)]
    assert all(layer.cumulative_length == args.position + 1 for layer in step.cache.layers)
    torch.testing.assert_close(logits[1:], logits[:1] * 2, rtol=0, atol=0)
    exact = step.exact(llama.widened(model))
    assert exact.dtype == torch.float64
    torch.testing.assert_close(logits[0].double(), exact, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_feeding_eagers_tokens_gives_its_choices(tiny_llama: tuple[Any, Any]) -> None:
    model, args = tiny_llama
    cache = llama.StaticCache(config=model.config, max_cache_len=args.cache)
    prompt = torch.randint(args.vocab_size, (2, 5))
    chosen = llama.greedy(llama.Decoder(model, model, cache), prompt, 6)
    logits = llama.fed(llama.Decoder(model, model, cache), prompt, chosen)
    assert chosen.shape == (2, 6)
    assert torch.equal(logits.argmax(-1), chosen)


# ---------------------------------------------------------------------------------------- speed of the pass


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("gate", ["table", "always"])
def test_the_pass_does_linear_work(training: bool, gate: str) -> None:
    """The function calls that the pass makes grow as the layers do; a wall clock would measure the machine."""
    calls = {layers: pass_speed.calls(pass_speed.captured(layers, training), gate) for layers in (2, 4, 8)}
    per_layer = (calls[4] - calls[2]) / 2, (calls[8] - calls[4]) / 4
    assert per_layer[1] < 1.1 * per_layer[0], calls
    # 33,000 to 48,000 when this was written: 80 layers of Llama take less than a second.
    assert per_layer[1] < 100_000, calls


# ------------------------------------------------------------------------------------ command line and files


def test_a_run_writes_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rms_norm.json"
    argv = ["rms_norm", "--tiny", "--device", "cpu", "--impl", "eager", "--commit", "abc", "--out", str(out)]
    assert command.main(argv) == 0
    data = json.loads(out.read_text())
    assert results.problems(data) == []
    assert data["commit"] == "abc"
    assert data["command"] == "python -m benchmarks rms_norm --tiny --device cpu --impl eager"
    assert [r["impl"] for r in data["rows"]] == ["eager"] and data["rows"][0]["correct"] is True
    assert "rms_norm" in capsys.readouterr().out


def test_the_speed_of_the_pass_needs_no_gpu(tmp_path: Path) -> None:
    out = tmp_path / "pass_speed.json"
    argv = ["pass_speed", "--device", "cpu", "--layers", "1", "--repetitions", "2", "--out", str(out)]
    assert command.main(argv) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [r["impl"] for r in rows] == [*pass_speed.IMPLS] * 2
    assert all("attention" in r["variant"] and r["us"] > 0 for r in rows)


def test_figures_without_a_gpu_are_refused() -> None:
    with pytest.raises(SystemExit):
        command.main(["rms_norm", "--device", "cpu"])
    assert command.main(["rms_nrom"]) == 2


def test_the_command_line_is_kept_without_where_it_writes() -> None:
    argv = shlex.split("--only decode --out x.json --batch 1 16 --commit=abc --fresh --impl 'portable_ops gate=never'")
    expected = "python -m benchmarks llama --only decode --batch 1 16 --impl 'portable_ops gate=never'"
    assert command.command_line("llama", argv) == expected


def test_a_wrong_section_is_named() -> None:
    with pytest.raises(SystemExit):
        command.parse("llama", llama, ["--tiny", "--only", "decode,prefil"])


def test_a_benchmark_can_be_run_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "llama.json"
    results.Results(path, MACHINE, "first", "c1").add([row("a", "inductor", 2.0), row("b", "inductor", 2.0)])
    results.Results(path, MACHINE, "second", "c2").add([row("b", "inductor", 3.0), row("c", "inductor", 4.0)])
    data = json.loads(path.read_text())
    assert data["commit"] == "c2"
    assert [(r["case"], r["us"], r.get("commit"), r.get("command")) for r in data["rows"]] == [
        ("a", 2.0, "c1", "first"),
        ("b", 3.0, None, None),
        ("c", 4.0, None, None),
    ]
    with pytest.raises(ValueError, match="another machine"):
        results.Results(path, MACHINE | {"torch": "2.13.0"}, "third", "c3")
    results.Results(path, MACHINE | {"torch": "2.13.0"}, "third", "c3", fresh=True).add([row("d", "eager", 1.0)])
    assert [r["case"] for r in json.loads(path.read_text())["rows"]] == ["d"]


def test_what_is_wrong_with_a_file_is_named() -> None:
    good = {"machine": MACHINE, "commit": "c", "command": "x", "rows": [row("a", "eager", 1.0)]}
    assert results.problems(good) == []
    assert results.problems([]) == ["not an object"]
    assert results.problems({k: v for k, v in good.items() if k != "commit"}) == ["'commit' is missing"]
    assert results.problems(good | {"machine": {}})[0] == "machine['gpu'] is missing"
    assert results.problems(good | {"rows": [{"case": "a"}]})[0] == "rows[0]['impl'] is missing"
    assert results.problems(good | {"rows": [row("a", "eager", "fast")]}) == ["rows[0]['us'] is 'fast'"]


def test_committed_results_are_complete_and_right() -> None:
    for path in sorted(results.RESULTS.glob("*/*.json")):
        data = json.loads(path.read_text())
        assert results.problems(data) == [], path
        assert results.slug(data["machine"]["gpu"]) == path.parent.name
        assert not [f"{r['case']}: {r['impl']}" for r in data["rows"] if r["correct"] is False], path


@pytest.mark.parametrize(
    ("us", "text"),
    [(None, ""), (4.126, "4.13 us"), (45.06, "45.1 us"), (8020, "8.02 ms"), (5.13e7, "51.3 s")],
)
def test_durations_are_readable(us: float | None, text: str) -> None:
    assert results.duration(us) == text


# --------------------------------------------------------------------------------------------------- report


def test_the_page_says_plainly_that_there_is_nothing(tmp_path: Path) -> None:
    assert "There are no results yet" in report.generate(tmp_path)


def test_the_page_shows_machine_commands_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "nvidia-h200" / "rms_norm.json"
    run = results.Results(path, MACHINE, "python -m benchmarks rms_norm", "0123456789abcdef")
    run.add(
        [
            row("1 x 4096", "inductor", 2.0),
            row("1 x 4096", "portable_ops", 1.0, variant="rms_norm: portable x1"),
        ]
    )
    page = report.generate(tmp_path)
    assert "There are no results yet" not in page
    assert "## rms_norm on NVIDIA H200" in page
    assert "NVIDIA H200; torch 2.11.0, triton 3.6.0, python 3.12.3." in page
    assert "`python -m benchmarks rms_norm` at commit `0123456789ab`" in page
    assert "| 1 x 4096 | portable_ops | 1.00 us | 2.00x | yes | rms_norm: portable x1 |" in page
    assert "peak memory |" not in page, "a column that no row fills is left out"


def test_a_file_in_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="'machine' is missing"):
        report.generate(tmp_path)


def test_the_page_in_docs_is_up_to_date() -> None:
    assert report.PAGE.read_text() == report.generate(), "run `python -m benchmarks report`"
