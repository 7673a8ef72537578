"""The gate: tables, features, and what a measurement would measure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from portable_ops import patterns
from portable_ops.inductor_ext import Settings, explain, gate, measure, reports
from portable_ops.kernels.target import named_target
from portable_ops.patterns.swiglu import SWIGLU_PATTERN
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from benchmarks import sweep

SM_90 = named_target("sm_90")
ATTENTION = "portable_ops::attention"


def attention_call(
    batch: int = 16, kv_len: int = 4096, q_len: int = 1, mask: bool = True, heads: int = 32
) -> dict[str, Any]:
    q = torch.empty(batch, heads, q_len, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, 8, kv_len, 128, dtype=torch.bfloat16, device="meta")
    attn_mask = torch.empty(batch, 1, 1, kv_len, dtype=torch.bool, device="meta") if mask else None
    return {"q": q, "k": k, "v": k, "attn_mask": attn_mask, "is_causal": False, "scale": None, "enable_gqa": True}


@pytest.mark.parametrize(
    ("call", "repeated", "take"),
    [
        ({}, 4, True),
        ({"kv_len": 131072, "batch": 1}, 4, True),
        ({"q_len": 2048}, 4, False),
        ({"mask": False}, 1, False),
        ({"mask": False, "batch": 1}, 1, True),
        ({"kv_len": 65536}, 1, False),
    ],
    ids=["decode", "long", "prefill", "as-fast", "small-batch", "not-measured"],
)
def test_the_shipped_table_says_what_was_measured(call: dict[str, Any], repeated: int, take: bool) -> None:
    verdict = gate.look_up(ATTENTION, attention_call(**call), {"repeat_kv": repeated}, SM_90)
    assert verdict.take is take
    assert ("measured" in verdict.reason) or ("no measurement on sm_90" in verdict.reason)


def test_an_architecture_without_a_table_declines_and_says_what_to_do() -> None:
    verdict = gate.look_up(ATTENTION, attention_call(), {"repeat_kv": 4}, named_target("gfx942"))
    assert not verdict.take
    assert verdict.reason == "no measurement on gfx942 says that it pays here (gate=measure takes one)"


def test_the_tables_are_those_of_the_committed_sweeps(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "TABLES", tmp_path)
    for path in sweep.write_tables():
        assert json.loads(path.read_text()) == json.loads((gate.TABLES / path.name).read_text()), (
            "run `python -m benchmarks tables`"
        )


@pytest.mark.parametrize(
    ("value", "allowed", "admitted"),
    [
        (5, {"min": 4}, True),
        (3, {"min": 4}, False),
        (4096, {"min": 2048, "max": 8192}, True),
        (8193, {"max": 8192}, False),
        ("bool", "bool", True),
        ("bool", ["none", "bool"], True),
        (True, False, False),
        (None, {"min": 1}, False),
    ],
)
def test_a_condition_admits(value: Any, allowed: Any, admitted: bool) -> None:
    assert gate._admits(value, allowed) is admitted


def test_a_symbolic_size_must_fit_over_its_whole_range() -> None:
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    tensor = mode.from_tensor(
        torch.empty(8, 64),
        symbolic_context=torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext(
            dynamic_sizes=[torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC] * 2
        ),
        source=torch._dynamo.source.ConstantSource("t"),
    )
    size = tensor.shape[0]
    assert isinstance(size, torch.SymInt)
    assert gate._admits(size, {"min": 1})
    assert not gate._admits(size, {"max": 1024})
    assert not shape_env.guards


def test_rules_merge_where_a_size_does_not_matter_and_keep_the_worst_case() -> None:
    def cell(kv_len: dict[str, int], us: float) -> dict[str, Any]:
        when = {"mask": "bool", "kv_len": kv_len}
        return {"cell": when, "us": us, "baseline_us": 10.0, "correct": True, "case": str(us), "operator": "op"}

    short, long = {"max": 1000}, {"min": 1001}
    (rule,) = sweep.rules_of([cell(short, 2.0), cell(long, 4.0)])["op"]
    assert rule["take"] and "kv_len" not in rule["when"] and "2.50x" in rule["why"]
    assert [r["take"] for r in sweep.rules_of([cell(short, 2.0), cell(long, 10.0)])["op"]] == [True, False]


def test_a_wrong_result_is_never_taken() -> None:
    row = {"cell": {}, "us": 1.0, "baseline_us": 10.0, "correct": False, "case": "wrong", "operator": "op"}
    assert not sweep.rules_of([row])["op"][0]["take"]


class Decode(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(4, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_a_static_cache_decodes_on_our_kernel_by_default() -> None:
    with torch.device("meta"):
        q, k = torch.empty(2, 32, 1, 128, dtype=torch.bfloat16), torch.empty(2, 8, 4096, 128, dtype=torch.bfloat16)
        mask = torch.empty(2, 1, 1, 4096, dtype=torch.bool)
    with torch.no_grad():
        report = explain(Decode())(q, k, k, mask)
    assert report.rewritten["attention"] == 1
    assert "measured" in report.sites[0].reason


def test_max_rewrites_and_disable_are_the_gates_words() -> None:
    with torch.device("meta"):
        q = torch.empty(2, 4, 8, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        capped = explain(F.scaled_dot_product_attention, gate="always", max_rewrites=0)(q, q, q)
        disabled = explain(F.scaled_dot_product_attention, gate="always", disable=["attention"])(q, q, q)
    assert capped.declined[0].reason == "max_rewrites=0 is reached"
    assert disabled.declined[0].reason == "attention is disabled"


def test_measure_without_a_gpu_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU to measure on")
    with torch.no_grad():
        report = explain(Norm(), gate="measure")(torch.empty(4, 64))
    assert report.declined[0].reason == "gate=measure needs the GPU that it decides for"


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x + 1
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))


def stored(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device="meta")


LINEAR_CALLS: dict[str, dict[str, tuple[int, int]]] = {
    "linear": {"x": (4, 4096), "weight": (1024, 4096)},
    "qkv_linear": {"x": (4, 4096), "q_weight": (4096, 4096), "k_weight": (1024, 4096), "v_weight": (512, 4096)},
    "gated_linear": {"x": (4, 4096), "gate_weight": (14336, 4096), "up_weight": (14336, 4096)},
}


def linear_call(name: str, **changed: Tensor) -> dict[str, Any]:
    options = {"activation": "silu", "alpha": 1.0} if name == "gated_linear" else {}
    return {**{k: stored(*shape) for k, shape in LINEAR_CALLS[name].items()}, **options, **changed}


@pytest.mark.parametrize(("name", "out_features"), [("linear", 1024), ("qkv_linear", 5632), ("gated_linear", 28672)])
def test_features_of_linear_layers(name: str, out_features: int) -> None:
    features = gate.linear_features(linear_call(name), {})
    shape = {"dtype": "bfloat16", "rows": 4, "in_features": 4096, "out_features": out_features}
    assert features == {**shape, "tuned": False}
    assert gate._features[f"portable_ops::{name}"] is gate.linear_features


@pytest.mark.parametrize("option", ["max_autotune", "max_autotune_gemm"])
def test_a_single_layer_is_left_to_max_autotune(option: str) -> None:
    target = named_target("sm_90")
    single, three = linear_call("linear", x=stored(1, 4096), weight=stored(4096, 4096)), linear_call("qkv_linear")
    assert gate.look_up("portable_ops::linear", single, {}, target).take
    with config.patch({option: True}):
        assert not gate.look_up("portable_ops::linear", single, {}, target).take
        assert gate.look_up("portable_ops::qkv_linear", three, {}, target).take


RULE = {
    "when": {
        "dtype": ["bfloat16", "float16"],
        "rows": {"min": 2, "max": 4},
        "out_features": {"min": 1000, "max": 2048},
        "in_features": {"min": 2048, "max": 4096},
    },
    "take": True,
    "why": "measured 2.00x stock",
}


@pytest.mark.parametrize(
    ("x", "weight", "take"),
    [
        (stored(4, 4096), stored(1024, 4096), True),
        (stored(2, 2048, torch.float16), stored(2048, 2048, torch.float16), True),
        (stored(1, 4096), stored(1024, 4096), False),
        (stored(5, 4096), stored(1024, 4096), False),
        (stored(4, 4096), stored(999, 4096), False),
        (stored(4, 4096), stored(2049, 4096), False),
        (stored(4, 1024), stored(1024, 1024), False),
        (stored(4, 8192), stored(1024, 8192), False),
        (stored(4, 4096, torch.float32), stored(1024, 4096, torch.float32), False),
    ],
    ids=["inside", "corner", "fewer rows", "more rows", "narrow", "wide", "short", "long", "float32"],
)
def test_a_linear_layer_is_taken_inside_of_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, x: Tensor, weight: Tensor, take: bool
) -> None:
    monkeypatch.setattr(gate, "table", lambda arch: {"portable_ops::linear": (RULE,)})
    verdict = gate.look_up("portable_ops::linear", {"x": x, "weight": weight}, {}, SM_90)
    assert verdict.take is take
    assert verdict.reason == ("measured 2.00x stock" if take else gate.look_up("none", {}, {}, SM_90).reason)


class SharedInput(nn.Module):
    """Layers that share an input, and what stands in front of them."""

    def __init__(self, combine: Callable[..., Any], widths: tuple[int, ...]) -> None:
        super().__init__()
        self.before, *layers = (
            nn.Linear(64, n, bias=False, device="meta", dtype=torch.bfloat16) for n in (64, *widths)
        )
        self.layers = nn.ModuleList(layers)
        self.combine = combine

    def forward(self, x: Tensor) -> Any:
        h = self.before(x).sin()
        return self.combine(*(layer(h) for layer in self.layers))


@pytest.mark.parametrize(
    ("pattern", "combine", "widths"),
    [
        ("qkv_linear", lambda q, k, v: (q, k, v), (32, 16, 16)),
        ("gated_linear", lambda g, u: F.silu(g) * u, (32, 32)),
        ("linear", lambda y: y, (32,)),
    ],
)
def test_what_is_measured_starts_at_the_input_that_layers_share(
    monkeypatch: pytest.MonkeyPatch, pattern: str, combine: Callable[..., Any], widths: tuple[int, ...]
) -> None:
    """Every ``F.linear`` makes a view of its own; in front of all of them is the rest of the model."""
    problems = {}

    def described(match: patterns.Match, target: Any) -> gate.Verdict:
        problems[match.pattern] = measure._describe(match)
        return gate.Verdict(False, "not today")

    monkeypatch.setattr(measure, "measured", described)
    with torch.no_grad():
        report = explain(SharedInput(combine, widths), gate="measure", target="sm_90")(stored(4, 64)[:, None])
    assert {s.reason for s in report.declined} == {"not today"}
    hidden = [4, 64] if pattern == "linear" else [4, 1, 64]
    shapes = [spec["shape"] for spec in problems[pattern]["inputs"]]
    assert sorted(shapes) == sorted([*([n, 64] for n in widths), hidden])
    assert problems[pattern]["code"].count("aten.mm") == len(widths)


def test_what_is_measured_is_the_matched_subgraph() -> None:
    x, w = torch.randn(6, 64), torch.rand(64)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in (x, w)]
    graph = make_fx(norm, decomposition_table=select_decomp_table())(*fakes).graph
    (match,) = (
        found
        for pattern in patterns.PATTERNS
        for node in graph.nodes
        if node.op == "call_function" and pattern.anchors(node)
        for found in [pattern.try_match(node)]
        if isinstance(found, patterns.Match)
    )
    problem = measure._describe(match)
    assert [spec["shape"] for spec in problem["inputs"]] == [[6, 64], [64]]
    namespace = {"torch": torch, "device": torch.device}
    exec(problem["code"], namespace)
    torch.testing.assert_close(namespace["forward"](None, x, w)[0], norm(x, w))


def test_what_is_measured_starts_at_the_inputs_of_lazily_built_arguments() -> None:
    def gated(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.aten.glu.default(x @ w, -1)

    mode = FakeTensorMode()
    graph = make_fx(gated)(*(mode.from_tensor(t) for t in (torch.randn(6, 64), torch.randn(64, 32)))).graph
    (anchor,) = (node for node in graph.nodes if node.target is torch.ops.aten.glu.default)
    match = SWIGLU_PATTERN.try_match(anchor)
    assert isinstance(match, patterns.Match)
    assert [spec["shape"] for spec in measure._describe(match)["inputs"]] == [[6, 32]]


@pytest.mark.parametrize("spelling", [Decode, Norm], ids=lambda spelling: spelling.__name__)
def test_both_ways_of_a_measurement_compute_the_same(
    spelling: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = []

    def described(match: patterns.Match, *rest: Any, **options: Any) -> gate.Verdict:
        problems.append(measure._describe(match))
        return gate.Verdict(False, "described")

    monkeypatch.setattr(gate, "decide", described)
    q, k = torch.empty(2, 8, 1, 64), torch.empty(2, 2, 48, 64)
    inputs = (q, k, k, torch.empty(2, 1, 1, 48, dtype=torch.bool)) if spelling is Decode else (torch.empty(6, 64),)
    with torch.no_grad():
        explain(spelling(), gate="always")(*inputs)
        monkeypatch.undo()
        torch._dynamo.reset()
        compiled, tensors = measure.both_ways(problems[0], "cpu")
        before = len(reports())
        ours, stock = compiled["ours"](*tensors), compiled["stock"](*tensors)
    (report,) = reports()[before:]
    assert sum(report.rewritten.values()) == 1
    torch.testing.assert_close(ours, stock)


def test_settings_reach_the_gate() -> None:
    assert Settings.read({"gate": "never"}).gate == "never"


def test_cells_are_merged_only_where_nothing_between_them_is_unmeasured() -> None:
    def rules(*tokens: dict[str, int]) -> list[dict[str, Any]]:
        row = {"operator": "op", "baseline_us": 2.0, "us": 1.0, "correct": True, "case": "case"}
        (found,) = sweep.rules_of([{**row, "cell": {"tokens": cell}} for cell in tokens]).values()
        return [rule["when"].get("tokens") for rule in found]

    assert rules({"max": 10}, {"min": 11}) == [None]
    assert rules({"min": 5, "max": 10}, {"min": 11, "max": 20}) == [{"min": 5, "max": 20}]
    assert rules({"max": 10}, {"min": 12}) == [{"max": 10}, {"min": 12}]


@pytest.mark.gpu
def test_measure_takes_a_verdict_and_keeps_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    q = torch.randn(4, 32, 1, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(4, 8, 2048, 128, dtype=torch.bfloat16, device="cuda")
    mask = torch.ones(4, 1, 1, 2048, dtype=torch.bool, device="cuda")
    with torch.no_grad():
        first = explain(Decode(), gate="measure")(q, k, k, mask)
        verdicts = list(tmp_path.rglob("verdicts/*.json"))
        second = explain(Decode(), gate="measure")(q, k, k, mask)
    assert len(verdicts) == 1
    assert first.sites[0].decision == "rewritten" and "us, stock" in first.sites[0].reason
    assert first.sites[0].reason == second.sites[0].reason
