"""How long the pass takes (match, gate, rewrite), and how that grows with the graph.

A Hugging Face Llama on the meta device is captured as the backend would see it, without generating code: one graph for
inference (attention pinned) and one for training (joint, attention written out).  Then the pass runs on copies of each.
Times are seconds of one core, whatever else the machine does, and say nothing about a GPU: this is the one benchmark
that needs none.
"""

from __future__ import annotations

import argparse
import cProfile
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from portable_ops.inductor_ext.pin import pin
from portable_ops.inductor_ext.report import Report
from portable_ops.inductor_ext.rewrite import RewritePass, decision_target
from portable_ops.inductor_ext.settings import Settings
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from transformers import LlamaConfig, LlamaForCausalLM

from .harness import progress
from .results import Row

ANYWHERE = True
"""The figures need no GPU."""

IMPLS = ("portable_ops", "portable_ops gate=always")
TINY = {"layers": [1, 2], "repetitions": 2}
TARGET = "sm_90"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32, 80])
    parser.set_defaults(repetitions=5)


def run(args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of one graph after another."""
    for training in (False, True):
        for layers in args.layers:
            start = time.perf_counter()
            graph = captured(layers, training)
            progress.print(f"{layers} layers captured in {time.perf_counter() - start:.1f} s", highlight=False)
            case = f"{'training' if training else 'inference'}, {layers} layers, {len(graph.nodes)} nodes"
            yield [timed(case, impl, graph, args.repetitions) for impl in args.impl]


def timed(case: str, impl: str, graph: fx.Graph, repetitions: int) -> Row:
    """The row of one gate on one graph."""
    gate = "always" if impl.endswith("always") else "table"
    rewrite = RewritePass(Settings.read({"gate": gate, "target": TARGET}, {}))
    times = []
    for _ in range(repetitions):
        own = copied(graph)
        start = time.process_time()
        report = rewrite.rewrite(own)
        times.append((time.process_time() - start) * 1e6)
    us = statistics.median(times)
    return {
        "case": case,
        "impl": impl,
        "us": us,
        "baseline_us": None,
        "variant": _found(report),
        "correct": None,
        "note": f"{us / len(graph.nodes):.0f} us per node",
    }


def calls(graph: fx.Graph, gate: str) -> int:
    """How many functions the pass calls on ``graph``: its work, whatever the machine does at the time."""
    rewrite = RewritePass(Settings.read({"gate": gate, "target": TARGET}, {}))
    rewrite.rewrite(copied(graph))  # caches of single shapes and types fill
    profile, own = cProfile.Profile(), copied(graph)
    profile.runcall(rewrite.rewrite, own)
    return sum(entry.callcount for entry in profile.getstats())


def _found(report: Report) -> str:
    counts, rewritten = report.counts, report.rewritten
    found = [f"{kind} {rewritten[kind]}/{count}" for kind, count in counts.items() if count]
    return ", ".join([*found, f"{len(report.misses)} misses"])


# --------------------------------------------------------------------------------------------- graphs to run on


class _Captured(BaseException):
    """Leaves the compiler as soon as the graph is there; no handler of its own catches this."""


def captured(layers: int, training: bool, device: str = "meta") -> fx.Graph:
    """The joint graph of a Llama in bf16 with ``layers`` layers, as it arrives at the pass."""
    model = llama(layers, "eager" if training else "sdpa", device).train(training).requires_grad_(training)
    tokens = torch.zeros(1, 64, dtype=torch.int64, device=device)
    # Ready-made: Dynamo of torch 2.11 cannot trace on the meta device how transformers makes it.
    mask = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device) if training else None
    keep = _Keep()

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        pin(gm, decision_target(Settings(target=TARGET), torch.device(device)))
        patches = {"joint_custom_pre_pass": keep, "force_disable_caches": True, "cpp_wrapper": False}
        return compile_fx(gm, example_inputs, config_patches=patches)

    torch._dynamo.reset()
    try:
        with torch.set_grad_enabled(training):
            torch.compile(model, backend=backend, dynamic=False, fullgraph=True)(tokens, mask, use_cache=False)
    except _Captured:
        pass
    finally:
        torch._dynamo.reset()
    return keep.graph


class _Keep(CustomGraphPass):
    """Keeps a copy of the graph that it is shown, and stops there."""

    def __call__(self, graph: fx.Graph) -> None:
        self.graph = copied(graph)
        raise _Captured

    def uuid(self) -> None:
        return None


def llama(layers: int, attention: str, device: str) -> LlamaForCausalLM:
    """Small where size does not matter to the pass."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1000,
        attn_implementation=attention,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy that can be rewritten; its example values are shared."""
    copy = fx.Graph(graph.owning_module)
    copy.output(copy.graph_copy(graph, {}))
    return copy
