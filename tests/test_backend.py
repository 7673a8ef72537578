"""The backend as a whole, on a CPU: every way to compile, what stays untouched, caches, ``expect`` and ``verify``.

``gate=always`` runs the rewritten graph on the operators' references; ``gate=table`` declines everything on a CPU.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from portable_ops.inductor_ext import (
    ExpectationError,
    Report,
    config_patches,
    explain,
    register_operator,
    register_pattern,
    reports,
)
from portable_ops.inductor_ext import rewrite as rewrite_module
from portable_ops.kernels.launch import Buffer, Plan
from portable_ops.kernels.operator import Operator, check_target, define_operator
from portable_ops.patterns import Match, Pattern, Unmatched
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

ALWAYS = {"portable_ops.gate": "always"}
both_gates = pytest.mark.parametrize("gate", ["table", "always"])


class Norm(nn.Module):
    """As Llama writes it."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Block(nn.Module):
    """A norm, then attention of 4 heads over 2 key/value heads, repeated as Llama does, then the residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm(x)
        q, k, v = (f(h).view(batch, length, -1, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (t[:, :, None].expand(batch, 2, 2, length, 16).reshape(batch, 4, length, 16) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).reshape(batch, length, 64)


class Model(nn.Module):
    """2 blocks and a last norm: 3 norms, 2 attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = Norm()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


FOUND = {"rms_norm": 3, "attention": 2}


def only(counts: dict[str, int]) -> dict[str, int]:
    """``counts`` without zeros."""
    return {kind: n for kind, n in counts.items() if n}


def new_reports(work: Callable[[], Any]) -> list[Report]:
    """The reports that ``work()`` brings."""
    before = len(reports())
    work()
    return reports()[before:]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """A fresh Dynamo; and nothing global that the backend might have patched differs afterwards."""
    torch._dynamo.reset()
    torch.manual_seed(0)

    def state() -> tuple:
        return config.get_config_copy(), dict(vars(triton_kernel_wrap))

    before = state()
    yield
    torch._dynamo.reset()
    assert state() == before


@pytest.fixture
def model() -> Model:
    torch.manual_seed(1)
    return Model().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.rand(2, 8, 64)


# ------------------------------------------------------------------------------------ inference


@both_gates
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference(model: Model, x: Tensor, gate: str, context: Any) -> None:
    compiled = torch.compile(model, backend="portable_ops", fullgraph=True, options={"portable_ops.gate": gate})
    with context():
        (report,) = new_reports(lambda: close(compiled(x), model(x)))
    assert only(report.counts) == FOUND
    assert only(report.rewritten) == (FOUND if gate == "always" else {})
    assert report.settings["gate"] == gate
    assert report.target == ("sm_90" if gate == "always" else "cpu")


def test_a_graph_break_gives_two_graphs_and_two_reports(x: Tensor) -> None:
    first, second = Norm(), Norm()

    def broken(x: Tensor) -> Tensor:
        y = first(x)
        torch._dynamo.graph_break()
        return second(y) * 2

    with torch.no_grad():
        found = new_reports(lambda: close(torch.compile(broken, backend="portable_ops", options=ALWAYS)(x), broken(x)))
        whole = explain(broken, gate="always")(x)
    assert [only(r.rewritten) for r in found] == [{"rms_norm": 1}, {"rms_norm": 1}]
    assert whole.graphs == 2
    assert only(whole.rewritten) == {"rms_norm": 2}
    (reason,) = whole.graph_breaks
    assert reason.startswith(f"{__file__}:") and "graph_break()" in reason
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(broken, backend="portable_ops", fullgraph=True)(x)


@both_gates
def test_autocast(model: Model, x: Tensor, gate: str) -> None:
    compiled = torch.compile(model, backend="portable_ops", options={"portable_ops.gate": gate})
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        (report,) = new_reports(lambda: compiled(x))
        exact = copy.deepcopy(model).double()
        error = (compiled(x).double() - _without_autocast(exact, x.double())).norm()
        own = (model(x).double() - _without_autocast(exact, x.double())).norm()
    assert only(report.counts) == FOUND
    assert error <= 1.5 * own


def _without_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        h = x
        for block in model.blocks:
            n = _exact_norm(block.norm, h)
            q, k, v = (f(n).view(2, 8, -1, 16).transpose(1, 2) for f in (block.q, block.k, block.v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            h = h + out.transpose(1, 2).reshape(2, 8, 64)
        return _exact_norm(model.norm, h)


def _exact_norm(norm: Norm, x: Tensor) -> Tensor:
    return norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@both_gates
def test_dynamic_shapes(model: Model, gate: str) -> None:
    counter = CompileCounterWithBackend("portable_ops")
    compiled = torch.compile(model, backend=_counted(counter, gate), dynamic=True)
    with torch.no_grad():
        found = new_reports(
            lambda: [close(compiled(t), model(t)) for t in (torch.rand(2, 8, 64), torch.rand(3, 5, 64))]
        )
    assert counter.frame_count == len(found) == 1
    assert only(found[0].counts) == FOUND
    assert only(found[0].rewritten) == (FOUND if gate == "always" else {})


@both_gates
def test_a_marked_dimension_does_not_recompile(model: Model, gate: str) -> None:
    counter = CompileCounterWithBackend("portable_ops")
    compiled = torch.compile(model, backend=_counted(counter, gate), fullgraph=True)
    with torch.no_grad():
        for batch in (2, 5, 3):
            x = torch.rand(batch, 8, 64)
            torch._dynamo.mark_dynamic(x, 0)
            close(compiled(x), model(x))
    assert counter.frame_count == 1


def _counted(counter: CompileCounterWithBackend, gate: str) -> Callable[..., Any]:
    """The backend under ``gate``; ``counter`` counts the graphs (it cannot pass options on)."""
    from portable_ops.inductor_ext import portable_ops

    def backend(gm: torch.fx.GraphModule, example_inputs: list) -> Callable[..., Any]:
        counter.frame_count += 1
        return portable_ops(gm, example_inputs, options={"portable_ops.gate": gate})

    return backend


def test_another_dtype_recompiles_with_a_report_of_its_own(x: Tensor) -> None:
    norm = Norm()
    compiled = torch.compile(norm, backend="portable_ops", options=ALWAYS)
    with torch.no_grad():
        found = new_reports(lambda: [compiled(t) for t in (x, x.bfloat16(), x, x[0])])
    assert [only(r.rewritten) for r in found] == [{"rms_norm": 1}] * 3


def test_freezing(model: Model, x: Tensor) -> None:
    compiled = torch.compile(model, backend="portable_ops", options={**ALWAYS, "freezing": True})
    with torch.no_grad():
        (report,) = new_reports(lambda: close(compiled(x), model(x)))
    assert only(report.rewritten) == FOUND


def test_a_nested_region_counts_as_often_as_it_runs(x: Tensor) -> None:
    torch.manual_seed(1)
    blocks, norm = [Block() for _ in range(3)], Norm()

    @torch.compiler.nested_compile_region
    def region(block: Block, x: Tensor) -> Tensor:
        return block(x)

    def run(x: Tensor) -> Tensor:
        for block in blocks:
            x = region(block, x)
        return norm(x)

    compiled = torch.compile(run, backend="portable_ops", options=ALWAYS)
    with torch.no_grad():
        (report,) = new_reports(lambda: close(compiled(x), run(x)))
        assert only(report.rewritten) == only(report.counts) == {"rms_norm": 4, "attention": 3}
        assert explain(run, gate="always")(x).rewritten == report.rewritten
        torch._dynamo.reset()
        (again,) = new_reports(lambda: compiled(x))
    assert again.rewritten == report.rewritten


def test_several_models_in_several_threads(x: Tensor) -> None:
    models = [nn.Sequential(*(Norm() for _ in range(n))).eval() for n in (1, 2, 3, 4)]
    failures: list[BaseException] = []

    def work(model: nn.Module) -> None:
        try:
            with torch.no_grad():
                close(torch.compile(model, backend="portable_ops", options=ALWAYS)(x), model(x))
        except BaseException as error:
            failures.append(error)

    def together() -> None:
        threads = [threading.Thread(target=work, args=(m,)) for m in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    found = new_reports(together)
    assert not failures
    assert sorted(r.rewritten["rms_norm"] for r in found) == [1, 2, 3, 4]


def test_other_backends_compile_beside_ours(model: Model, x: Tensor) -> None:
    with torch.no_grad():
        ours = torch.compile(model, backend="portable_ops", options=ALWAYS)
        close(ours(x), model(x))
        assert not new_reports(lambda: close(torch.compile(model)(x), model(x)))


@pytest.mark.parametrize("reset", [torch._dynamo.reset, torch.compiler.reset])
def test_reset_then_compile_again_from_the_caches(reset: Callable[[], None], x: Tensor) -> None:
    norm = Norm()
    compiled = torch.compile(norm, backend="portable_ops", options=ALWAYS)
    with torch.no_grad():
        (first,) = new_reports(lambda: compiled(x))
        reset()
        (second,) = new_reports(lambda: close(compiled(x), norm(x)))
    assert first == second
    assert only(second.rewritten) == {"rms_norm": 1}


def test_hugging_face_generate() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, pad_token_id=0)).eval()
    ids = torch.randint(1, 128, (2, 5))
    call = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": "static",
    }
    eager = model.generate(ids, **call, disable_compile=True)
    settings = transformers.CompileConfig(backend="portable_ops", mode=None, options=ALWAYS)
    settings._compile_all_devices = True  # transformers compiles on GPUs only unless told so
    found = new_reports(lambda: torch.testing.assert_close(model.generate(ids, **call, compile_config=settings), eager))
    assert {kind: found[-1].rewritten[kind] for kind in FOUND} == {"rms_norm": 5, "attention": 2}


# ------------------------------------------------------------------------------- the user's passes


class Noted(CustomGraphPass):
    """A user's pass that notes that it ran, and whether our operators stand in the graph by then."""

    def __init__(self, seen: list[tuple[str, bool]], name: str) -> None:
        self.seen, self.name = seen, name

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append((self.name, _has_ours(graph)))

    def uuid(self) -> str:
        return self.name


def _has_ours(graph: torch.fx.Graph) -> bool:
    return any(str(node.target).startswith("portable_ops.") for node in graph.nodes)


HOOKS = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
EXPECTED_ORDER = [(hook, hook != "pre_grad_custom_pass") for hook in HOOKS] + [("fusion", True)]


def _passes(seen: list[tuple[str, bool]], form: str) -> dict[str, Any]:
    def note(name: str) -> Any:
        if form == "callable":
            return lambda graph: seen.append((name, _has_ours(graph)))
        return [Noted(seen, name), Noted(seen, name + "_2")] if form == "list" else Noted(seen, name)

    def fusion(nodes: list) -> list:
        seen.append(("fusion", True))
        return nodes

    return {**{hook: note(hook) for hook in HOOKS}, "_post_fusion_custom_pass": fusion}


@pytest.mark.parametrize("where", ["config", "options"])
@pytest.mark.parametrize("form", ["callable", "pass"])
def test_the_users_own_passes_keep_running(x: Tensor, form: str, where: str) -> None:
    norm, seen = Norm(), []
    passes = _passes(seen, form)
    options = {**ALWAYS, **(passes if where == "options" else {})}
    with torch.no_grad(), config.patch(passes if where == "config" else {}):
        (report,) = new_reports(lambda: torch.compile(norm, backend="portable_ops", options=options)(x))
        assert all(getattr(config, name) is hook for name, hook in passes.items()) == (where == "config")
    assert only(report.rewritten) == {"rms_norm": 1}
    assert seen == EXPECTED_ORDER


def test_lists_of_passes(x: Tensor) -> None:
    if "list" not in str(config.get_type("joint_custom_pre_pass")):
        pytest.skip("this torch takes one pass for each hook")
    norm, seen = Norm(), []
    with torch.no_grad(), config.patch(_passes(seen, "list")):
        torch.compile(norm, backend="portable_ops", options=ALWAYS)(x)
    names = [name for name, _ in seen]
    assert names == [n for hook in HOOKS for n in (hook, hook + "_2")] + ["fusion"]


def test_config_patches_say_that_they_write_no_dump(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_patches({"portable_ops.dump": str(tmp_path / "dump")})
    assert "writes no dump" in caplog.text and not (tmp_path / "dump").exists()


def test_config_patches_chain_the_users_passes() -> None:
    seen: list[tuple[str, bool]] = []
    with config.patch(_passes(seen, "pass")):
        patches = config_patches({"portable_ops.gate": "always"})
    graph = torch.fx.symbolic_trace(Norm()).graph
    graph.owning_module = torch.fx.GraphModule(Norm(), graph)
    patches["pre_grad_custom_pass"](graph)
    assert seen == [("pre_grad_custom_pass", False)]


# ------------------------------------------------------------------------------------- training


def gradients(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    run(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


@both_gates
def test_gradients_equal_stock_inductors(x: Tensor, gate: str) -> None:
    model = nn.Sequential(Norm(), nn.Linear(64, 64), Norm())
    stock = gradients(torch.compile(model), model, x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="portable_ops", options={"portable_ops.gate": gate})
    found: list[Tensor] = []
    (report,) = new_reports(lambda: found.extend(gradients(compiled, model, x)))
    assert only(report.counts) == {"rms_norm": 2}
    torch.testing.assert_close(found, stock, rtol=1e-4, atol=1e-4)


def test_attention_that_needs_a_gradient_is_left_alone(x: Tensor) -> None:
    block = Block()
    report = explain(block, gate="always")(x.requires_grad_())
    (site,) = [s for s in report.declined if s.kind == "attention"]
    assert "gradient" in site.reason


def _saved(run: Callable[[Tensor], Tensor], x: Tensor) -> list[tuple]:
    saved: list[tuple] = []

    def pack(t: Tensor) -> Tensor:
        saved.append((tuple(t.shape), t.dtype))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(x.clone().requires_grad_()).sum().backward()
    return sorted(saved, key=str)


def test_the_default_gate_saves_what_stock_saves(x: Tensor) -> None:
    model = nn.Sequential(Norm(), nn.Linear(64, 64), Norm())
    stock = _saved(torch.compile(model), x)
    torch._dynamo.reset()
    assert _saved(torch.compile(model, backend="portable_ops"), x) == stock


@both_gates
def test_activation_checkpointing(x: Tensor, gate: str) -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(Norm(), nn.Linear(64, 64), Norm())

    def run(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    eager = gradients(model, model, x)
    compiled = torch.compile(run, backend="portable_ops", options={"portable_ops.gate": gate})
    torch.testing.assert_close(gradients(compiled, model, x), eager, rtol=1e-4, atol=1e-4)


def test_an_optimizer_step_compiles() -> None:
    parameters = [torch.rand(8, requires_grad=True) for _ in range(2)]
    expected = [p.detach().clone().requires_grad_() for p in parameters]
    for step, tensors in ((True, parameters), (False, expected)):
        optimizer = torch.optim.AdamW(tensors, lr=0.1)
        for p in tensors:
            p.grad = torch.full((8,), 0.5)
        one = torch.compile(optimizer.step, backend="portable_ops", options=ALWAYS) if step else optimizer.step
        one()
        one()
    close(parameters, expected)
    assert only(reports()[-1].counts) == {}
    assert reports()[-1].misses == ()


# --------------------------------------------------------------------------------- what is asked for


def test_expect_that_is_met(model: Model, x: Tensor) -> None:
    with torch.no_grad():
        torch.compile(model, backend="portable_ops", options={"portable_ops.expect": FOUND})(x)
        explain(model, expect=FOUND)(x)


def layer_norm_by_hand(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-6)


def test_expect_that_is_not_met_lists_the_near_misses(x: Tensor) -> None:
    norm = Norm()

    def run(x: Tensor) -> Tensor:
        return norm(layer_norm_by_hand(x))

    message = (
        r"rms_norm: expected 2, recognised 1\nnear misses:\n  rms_norm: a variance .*test_backend.py:\d+: return cent"
    )
    with torch.no_grad():
        with pytest.raises(Exception, match=message):
            torch.compile(run, backend="portable_ops", options={"portable_ops.expect": {"rms_norm": 2}})(x)
        with pytest.raises(ExpectationError, match=message):
            explain(run, expect={"rms_norm": 2})(x)
        with pytest.raises(ExpectationError, match=r"topk: expected 1, recognised 0\nnear misses:\n  none"):
            explain(run, expect={"topk": 1})(x)


def test_expect_holds_for_each_graph_in_the_backend_and_for_the_model_in_explain(x: Tensor) -> None:
    first, second = Norm(), Norm()

    def broken(x: Tensor) -> Tensor:
        y = first(x)
        torch._dynamo.graph_break()
        return second(y)

    with torch.no_grad():
        explain(broken, expect={"rms_norm": 2})(x)
        with pytest.raises(Exception, match="rms_norm: expected 2, recognised 1"):
            torch.compile(broken, backend="portable_ops", options={"portable_ops.expect": {"rms_norm": 2}})(x)


@pytest.mark.parametrize("most", [0, 1, 3, 99])
def test_max_rewrites(model: Model, x: Tensor, most: int) -> None:
    options = {**ALWAYS, "portable_ops.max_rewrites": most}
    with torch.no_grad():
        (report,) = new_reports(
            lambda: close(torch.compile(model, backend="portable_ops", options=options)(x), model(x))
        )
    assert only(report.counts) == FOUND
    assert sum(report.rewritten.values()) == min(most, 5)
    assert sum(f"max_rewrites={most}" in s.reason for s in report.declined) == 5 - min(most, 5)


@pytest.mark.parametrize(
    ("options", "rewritten"),
    [
        ({"portable_ops.enable": ["attention"]}, {"attention": 2}),
        ({"portable_ops.disable": ["attention"]}, {"rms_norm": 3}),
        ({"portable_ops.enable": []}, {}),
        ({"portable_ops.gate": "never"}, {}),
    ],
)
def test_enable_and_disable(model: Model, x: Tensor, options: dict, rewritten: dict) -> None:
    with torch.no_grad():
        compiled = torch.compile(model, backend="portable_ops", options={**ALWAYS, **options})
        (report,) = new_reports(lambda: close(compiled(x), model(x)))
    assert only(report.counts) == FOUND
    assert only(report.rewritten) == rewritten


def test_what_is_declined_compiles_as_stock(model: Model, x: Tensor) -> None:
    from torch._inductor.utils import run_and_get_code

    with torch.no_grad(), config.patch(force_disable_caches=True):
        _, stock = run_and_get_code(torch.compile(model), x)
        torch._dynamo.reset()
        _, ours = run_and_get_code(torch.compile(model, backend="portable_ops"), x)
    assert [_without_report(c) for c in ours] == [_without_report(c) for c in stock]


def _without_report(code: str) -> list[str]:
    return [line for line in code.splitlines() if "restore_report" not in line and not line.startswith("#")]


# ------------------------------------------------------------------------------------------ verify

VERIFY = {**ALWAYS, "portable_ops.verify": True}
VERIFY_LOG = "portable_ops.inductor_ext.verify"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What ``verify`` logged (Inductor's structured trace may be captured as well)."""
    return [record.message for record in caplog.records if record.name == VERIFY_LOG]


def test_verify_agrees(model: Model, x: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(model, backend="portable_ops", options=VERIFY)
    with torch.no_grad(), caplog.at_level(logging.INFO, VERIFY_LOG):
        close(compiled(x), model(x))
        close(compiled(x + 1), model(x + 1))
    assert said(caplog) == ["verified: the rewritten graph agrees with stock Inductor"]


class Cached(nn.Module):
    """Writes to a buffer, to an argument, and to a view of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.register_buffer("cache", torch.zeros(4, 64))

    def forward(self, x: Tensor, position: Tensor, total: Tensor, rows: Tensor) -> Tensor:
        self.cache.index_copy_(0, position, self.norm(x))
        total.add_(self.cache.sum())
        rows[1].mul_(2)
        return self.cache * 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_verify_mutates_nothing_twice(context: Any, caplog: pytest.LogCaptureFixture) -> None:
    ours, eager = Cached(), Cached()
    ours.load_state_dict(eager.state_dict())
    compiled = torch.compile(ours, backend="portable_ops", options=VERIFY)
    with context(), caplog.at_level(logging.WARNING, VERIFY_LOG):
        states = [(torch.zeros(()), torch.ones(3, 5)) for _ in range(2)]
        for step in range(3):
            token = torch.rand(1, 64)
            close(compiled(token, torch.tensor([step]), *states[0]), eager(token, torch.tensor([step]), *states[1]))
            close(ours.cache, eager.cache)
            close(states[0], states[1])
    assert not said(caplog)


def test_verify_with_inputs_that_share_memory() -> None:
    norm = Norm()

    def run(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return norm(b)

    with torch.no_grad():
        base = torch.rand(6, 64)
        compiled = torch.compile(run, backend="portable_ops", options=VERIFY)
        for memory in (base.clone(), base.clone() + 1):
            expected = memory.clone()
            result = run(expected[:4], expected[2:])
            close(compiled(memory[:4], memory[2:]), result)
            close(memory, expected)


def test_verify_takes_broadcast_inputs_and_random_numbers(caplog: pytest.LogCaptureFixture) -> None:
    norm = Norm()
    compiled = torch.compile(lambda x: F.dropout(norm(x)), backend="portable_ops", options=VERIFY)
    with torch.no_grad(), caplog.at_level(logging.WARNING, VERIFY_LOG):
        torch.manual_seed(3)
        compiled(torch.rand(1, 1, 64).expand(2, 3, 64))
        first = torch.rand(1)
        torch.manual_seed(3)
        torch.compile(lambda x: F.dropout(norm(x)), backend="portable_ops", options=ALWAYS)(torch.rand(2, 3, 64))
    assert not said(caplog)
    assert torch.isfinite(first)


def test_verify_leaves_training_alone(caplog: pytest.LogCaptureFixture, x: Tensor) -> None:
    norm = Norm()
    with caplog.at_level(logging.WARNING, VERIFY_LOG):
        gradients(torch.compile(norm, backend="portable_ops", options=VERIFY), norm, x)
    assert ["inference only" in message for message in said(caplog)] == [True]


# -------------------------------------------------------------------------------------- third parties


def cube_reference(x: Tensor) -> Tensor:
    return x * x * x


def cube_supports(x: Tensor, *, target: Any) -> str | None:
    return check_target(target) or (None if x.dtype == torch.float32 else f"cube takes float32, not {x.dtype}")


def cube_plan(x: Tensor, *, target: Any) -> Plan:
    return Plan("toy", (), {"out": Buffer.like(x)})


def cube_operator(name: str, reference: Callable[..., Tensor]) -> Operator:
    operator = define_operator(
        f"portable_ops_tests::{name}(Tensor x) -> Tensor", reference=reference, supports=cube_supports, plan=cube_plan
    )
    register_operator(operator)
    return operator


@pytest.fixture(scope="module")
def operators() -> dict[str, Operator]:
    return {
        "cube": cube_operator("cube", cube_reference),
        "wrong_cube": cube_operator("wrong_cube", lambda x: x * x * x * 1.01),
    }


def cube_pattern(operator: Operator, kind: str) -> Pattern:
    """x ** 3; declines whole numbers, and says so."""

    def match(anchor: torch.fx.Node) -> Match:
        if anchor.args[1] != 3:
            raise Unmatched(f"the power is {anchor.args[1]}, not 3")
        return Match("toy_cube", kind, anchor, operator, {"x": anchor.args[0]}, (anchor,), ())

    return Pattern("toy_cube", kind, lambda n: n.target is torch.ops.aten.pow.Tensor_Scalar, match)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone afterwards."""
    monkeypatch.setattr(rewrite_module, "_patterns", list(rewrite_module._patterns))


def cubes(x: Tensor) -> Tensor:
    return (x**3).sin() + x**4


@pytest.mark.usefixtures("registered")
def test_a_third_party_adds_a_pattern_and_a_kernel(operators: dict[str, Operator], x: Tensor) -> None:
    register_pattern(cube_pattern(operators["cube"], "cube"))
    with torch.no_grad():
        options = {**ALWAYS, "portable_ops.expect": {"cube": 1}}
        compiled = torch.compile(cubes, backend="portable_ops", options=options)
        (report,) = new_reports(lambda: close(compiled(x), cubes(x)))
        assert report.counts["cube"] == report.rewritten["cube"] == 1
        assert [m.reason for m in report.misses] == ["the power is 4, not 3"]
        assert "cube" in str(report)
        assert [s.variant for s in explain(cubes, gate="always")(x).sites] == ["toy"]
        half = explain(cubes, gate="always")(x.bfloat16())
        assert [s.reason for s in half.declined] == ["cube takes float32, not torch.bfloat16"]
        assert explain(cubes, gate="always", disable=["cube"])(x).rewritten["cube"] == 0
    with pytest.raises(ValueError, match="'toy_cube' is taken"):
        register_pattern(cube_pattern(operators["cube"], "cube"))


@pytest.mark.usefixtures("registered")
@pytest.mark.failing_pattern
def test_a_pattern_that_fails_leaves_the_graph_alone(
    operators: dict[str, Operator], x: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(node: torch.fx.Node) -> None:
        raise TypeError("there is no such operand")

    register_pattern(dataclasses.replace(cube_pattern(operators["cube"], "cube"), match=fails))
    # Past the caches: to them two patterns of one module and one name are the same.
    logged = caplog.at_level(logging.WARNING, "portable_ops.inductor_ext.rewrite")
    with torch.no_grad(), logged, config.patch(force_disable_caches=True):
        compiled = torch.compile(cubes, backend="portable_ops", options=ALWAYS)
        (report,) = new_reports(lambda: close(compiled(x), cubes(x)))
    assert not report.sites
    assert {m.reason for m in report.misses} == {"the pattern itself failed: TypeError: there is no such operand"}
    assert "pattern toy_cube failed at pow" in caplog.text
    assert "there is no such operand" in caplog.text


def test_two_operators_of_one_name_are_refused(operators: dict[str, Operator]) -> None:
    register_operator(operators["cube"])
    with pytest.raises(ValueError, match="another operator named 'portable_ops_tests::cube'"):
        register_operator(dataclasses.replace(operators["cube"], plan=lambda: None))


def complex_cubes(x: Tensor) -> Tensor:
    return torch.view_as_complex(cubes(x).unflatten(-1, (-1, 2)))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("function", [cubes, complex_cubes])
def test_verify_stays_with_stock_when_a_rewrite_is_wrong(
    function: Callable, operators: dict[str, Operator], x: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    register_pattern(cube_pattern(operators["wrong_cube"], "cube"))
    with torch.no_grad():
        unverified = torch.compile(function, backend="portable_ops", options=ALWAYS)(x)
        assert not torch.allclose(unverified, function(x), rtol=1e-3)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="portable_ops", options=VERIFY)
        with caplog.at_level(logging.WARNING, VERIFY_LOG):
            close(compiled(x), function(x))
            close(compiled(x + 1), function(x + 1))
    (warning,) = said(caplog)
    assert "differs from stock beyond rounding (result 0: relative difference" in warning


# ------------------------------------------------------------------------------------------- caches

SCRIPT = """
import json, sys, torch
from torch._dynamo.utils import counters
from portable_ops.inductor_ext import reports

class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))
    def forward(self, x):
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

def compile_it(options):
    torch._dynamo.reset()
    counters.clear()
    norm, x = Norm(), torch.rand(4, 64)
    train = options.pop("train", False)
    with torch.set_grad_enabled(train):
        result = torch.compile(norm, backend="portable_ops", options={"portable_ops.gate": "always", **options})(x)
        torch.testing.assert_close(result, norm(x))
    if train:
        result.sum().backward()
    report = reports()[-1]
    return {
        "aot": counters["aot_autograd"]["autograd_cache_hit"],
        "fx": counters["inductor"]["fxgraph_cache_hit"],
        "rewritten": report.rewritten["rms_norm"],
        "sites": len(report.sites),
        "target": report.target,
    }

def compile_all():
    return {
        "plain": compile_it({}),
        "again": compile_it({}),
        "train": compile_it({"train": True}),
        "other settings": compile_it({"portable_ops.max_rewrites": 0}),
        "cpp_wrapper": compile_it({"cpp_wrapper": True}),
    }
"""


def in_process(body: str, cache: Path) -> Any:
    """What ``body`` prints as JSON, run after SCRIPT in a process whose caches are in ``cache``."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PORTABLE_OPS_")}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(body)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What a process with empty caches says, and the folder of its caches and of its saved artifacts."""
    folder = tmp_path_factory.mktemp("cold")
    body = f"""
    found = compile_all()
    data, _ = torch.compiler.save_cache_artifacts()
    open({str(folder / "artifacts")!r}, "wb").write(data)
    print(json.dumps(found))
    """
    return in_process(body, folder), folder


MISSED = {"aot": 0, "fx": 0, "rewritten": 1, "sites": 1, "target": "sm_90"}


def test_the_second_compilation_in_a_process_hits_the_cache_and_has_the_report(cold: tuple[dict, Path]) -> None:
    found, _ = cold
    assert found["plain"] == found["train"] == MISSED
    # The wrapper is not loaded a second time, so it cannot bring its report along.
    assert found["again"]["aot"] == 1
    assert found["again"] == {**MISSED, "aot": 1, "fx": found["again"]["fx"]}


def test_other_settings_are_another_cache_key(cold: tuple[dict, Path]) -> None:
    assert cold[0]["other settings"] == {**MISSED, "rewritten": 0}
    assert cold[0]["cpp_wrapper"] == MISSED


def _warm(found: dict[str, dict]) -> None:
    for name, figures in found.items():
        assert figures["aot"] + figures["fx"] >= 1, name
        expected = {**MISSED, "rewritten": 0 if name == "other settings" else 1}
        assert {**figures, "aot": 0, "fx": 0} == expected, name
    for name in ("plain", "train", "other settings"):
        assert found[name]["aot"] == 1, name


def test_a_second_process_hits_the_caches_and_has_the_report(cold: tuple[dict, Path]) -> None:
    _warm(in_process("print(json.dumps(compile_all()))", cold[1]))


def test_cache_artifacts_carry_the_report(cold: tuple[dict, Path], tmp_path: Path) -> None:
    body = f"""
    torch.compiler.load_cache_artifacts(open({str(cold[1] / "artifacts")!r}, "rb").read())
    print(json.dumps({{"plain": compile_it({{}}), "train": compile_it({{"train": True}})}}))
    """
    found = in_process(body, tmp_path)
    for figures in found.values():
        assert figures["aot"] == 1
        assert {**figures, "aot": 0, "fx": 0} == MISSED


def test_a_pass_without_a_name_turns_the_caches_off(x: Tensor) -> None:
    for hook in ("joint_custom_pre_pass", "_post_fusion_custom_pass"):
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad(), config.patch({hook: lambda graph_or_nodes: graph_or_nodes}):
            torch.compile(Norm(), backend="portable_ops", options=ALWAYS)(x)
        assert counters["inductor"]["fxgraph_cache_bypass"] == 1, hook


@pytest.mark.usefixtures("registered")
def test_what_belongs_to_the_cache_key(operators: dict[str, Operator], monkeypatch: pytest.MonkeyPatch) -> None:
    from portable_ops.inductor_ext.settings import Settings

    def key(**options: Any) -> Any:
        return rewrite_module.RewritePass(Settings.read(options, {})).uuid()

    keys = [key(), key(gate="always"), key(max_rewrites=1), key(target="sm_80"), key(disable="attention")]
    register_pattern(cube_pattern(operators["cube"], "cube"))
    keys.append(key())
    source = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda module: source(module) + "# edited")
    keys.append(key())
    monkeypatch.setattr(inspect, "getsource", mock.Mock(side_effect=OSError("as in a notebook")))
    keys.append(key())
    monkeypatch.setattr(rewrite_module, "sources_hash", lambda: "other sources")
    keys.append(key())
    monkeypatch.setattr(rewrite_module, "versions", lambda: {"torch": "9.9"})
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == key()


def test_the_hash_covers_every_source_file() -> None:
    root = Path(__file__).resolve().parent.parent
    files = [f for folder in ("kernels", "patterns", "inductor_ext") for f in (root / folder).rglob("*") if f.is_file()]
    read: set[str] = set()
    rewrite_module.sources_hash.cache_clear()
    original = Path.read_bytes
    try:
        Path.read_bytes = lambda self: read.add(self.name) or original(self)  # type: ignore[method-assign]
        rewrite_module.sources_hash()
    finally:
        Path.read_bytes = original  # type: ignore[method-assign]
    assert {f.name for f in files if f.suffix in (".py", ".json")} <= read
