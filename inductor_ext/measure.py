"""``gate=measure``: time a matched subgraph both ways, once per GPU, versions and shape bucket.

The measurement runs in a process of its own, so that it neither disturbs the compilation it serves nor inherits its
state: it compiles the subgraph's nodes with stock Inductor and with ``gate=always``, and replays both as CUDA graphs
with the L2 cache flushed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..kernels.launch import hint
from ..kernels.target import Target
from ..patterns import Match
from .gate import GAIN, Verdict
from .report import versions

_TIMEOUT_S = 600


def measured(match: Match, target: Target) -> Verdict:
    """The stored verdict on a match of this shape, or a fresh one."""
    from rich.console import Console

    if not torch.cuda.is_available():
        return Verdict(False, "gate=measure needs the GPU that it decides for")
    problem = _describe(match)
    path = _store() / f"{_bucket(match, target)}.json"
    if not path.exists():
        console = Console(stderr=True)
        with console.status(f"portable_ops: measuring {match.pattern} ({match.source or 'no source line'})"):
            figures = _measure_elsewhere(problem)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(figures))
        temporary.replace(path)
    figures = json.loads(path.read_text())
    if "error" in figures:
        return Verdict(False, f"the measurement failed: {figures['error']}")
    speedup = figures["stock_us"] / figures["ours_us"]
    words = f"measured {figures['ours_us']:.1f} us, stock {figures['stock_us']:.1f} us"
    return Verdict(speedup >= GAIN, words, speedup)


def _store() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "portable_ops" / "verdicts"


def _bucket(match: Match, target: Target) -> str:
    """Names what a verdict holds for: sizes are rounded up to powers of two."""
    from .rewrite import sources_hash

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return [1 << max(0, hint(s) - 1).bit_length() for s in value.shape], str(value.dtype)
        return str(value)

    values = {name: describe(v) for name, v in match.values().items()}
    gpu = torch.cuda.get_device_name()
    key = (match.pattern, values, match.bound, gpu, target, versions(), sources_hash())
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def _describe(match: Match) -> dict[str, Any]:
    """The matched nodes as Python code, and the metadata of what goes in."""
    graph, boundary = _region(match, set(match.inputs()))
    code = fx.GraphModule(torch.nn.Module(), graph).code
    tensors = [n.meta["val"] for n in boundary]
    return {
        "code": code,
        "inputs": [
            {
                "shape": [hint(s) for s in t.shape],
                "stride": [hint(s) for s in t.stride()],
                "dtype": str(t.dtype).removeprefix("torch."),
            }
            for t in tensors
        ],
    }


def _region(match: Match, inputs: set[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph of the nodes between the match's inputs and its outputs, which overwrites what the operator writes."""
    outputs = [o for o in match.outputs if o is not None]
    written = match.operator.mutated
    wanted: set[fx.Node] = set()
    work = list(outputs)
    while work:
        node = work.pop()
        if node not in wanted:
            wanted.add(node)
            if node not in inputs and node.op == "call_function":
                work.extend(node.all_input_nodes)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    boundary = [n for n in match.anchor.graph.nodes if n in wanted and (n in inputs or n.op != "call_function")]
    for node in boundary:
        copies[node] = graph.placeholder(node.name)
    for node in match.anchor.graph.nodes:
        if node in wanted and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for name, update in zip(written, match.outputs[len(match.outputs) - len(written) :], strict=True):
        graph.call_function(torch.ops.aten.copy_.default, (copies[match.args[name]], copies[update]))
        outputs.remove(update)
    graph.output(tuple(copies[o] for o in outputs))
    return graph, boundary


def _measure_elsewhere(problem: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.json"
        path.write_text(json.dumps(problem))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PORTABLE_OPS_")}
        command = [sys.executable, "-m", __name__, str(path)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {_TIMEOUT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    return json.loads(lines[-1])


# --------------------------------------------------------------------------------- in the measuring process


def replay_us(calls: dict[str, Callable[[], Any]], repetitions: int = 100) -> dict[str, float]:
    """Median microseconds of one CUDA-graph replay of each call, alternating, with the L2 cache flushed before each."""
    graphs = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            call()
    # Flushed by reading: modified lines of a flush that writes would be charged to what is timed.
    flush = torch.zeros(64 * 2**20, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.sum()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def _stock_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    out_order: list[int] | None = None,
) -> torch.Tensor:
    """What stood in the place of a pinned attention; the order of its result is whatever stock makes it."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def both_ways(problem: dict[str, Any], device: str) -> tuple[dict[str, Callable], list[torch.Tensor]]:
    """The described subgraph compiled by stock Inductor and rewritten, and inputs for both."""
    code = problem["code"].replace("torch.ops.portable_ops.attention.default", "_stock_attention")
    namespace: dict[str, Any] = {
        "torch": torch,
        "device": torch.device,
        "inf": float("inf"),
        "nan": float("nan"),
        "_stock_attention": _stock_attention,
    }
    exec(code, namespace)

    def region(*inputs: torch.Tensor) -> Any:
        return namespace["forward"](None, *inputs)

    # A graph break inside would take apart what is to be measured whole.
    compiled = {
        "stock": torch.compile(region, dynamic=False, fullgraph=True),
        "ours": torch.compile(
            region, dynamic=False, fullgraph=True, backend="portable_ops", options={"portable_ops.gate": "always"}
        ),
    }
    return compiled, [_random(**spec, device=device) for spec in problem["inputs"]]


def _main(path: str) -> None:
    compiled, tensors = both_ways(json.loads(Path(path).read_text()), "cuda")
    with torch.no_grad():
        figures = replay_us({name: functools.partial(call, *tensors) for name, call in compiled.items()})
    print(json.dumps({f"{name}_us": us for name, us in figures.items()}))


def _random(shape: list[int], stride: list[int], dtype: str, device: str) -> torch.Tensor:
    """A tensor with these strides; masks are mostly true, as they are where it matters."""
    kind = getattr(torch, dtype)
    tensor = torch.empty_strided(shape, stride, dtype=kind, device=device)
    if kind == torch.bool:
        return tensor.fill_(True)
    return tensor.normal_() if kind.is_floating_point else tensor.zero_()


if __name__ == "__main__":
    _main(sys.argv[1])
