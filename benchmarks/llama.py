"""A Hugging Face Llama (or Qwen3) with random weights: decoding over a static cache, prefill, memory, compile time.

Every decoding step runs at the same position: the cache is filled by a real prefill, and the counters by
which it knows its length are set back before each step, outside the timed region.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

from . import harness, truth
from .harness import Candidate, Clock, progress
from .results import BASELINE, ROOT, Row

IMPLS = ("eager", BASELINE, "portable_ops")
"""Fewer than for a single operator: each costs a compilation of the whole model."""

SECTIONS = ("decode", "prefill", "memory", "host", "compile", "tokens")
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
SHAPES = {
    "llama": {},
    "qwen3": {"intermediate_size": 12288, "layers": 36, "vocab_size": 151936},
}
"""What each of MODELS has otherwise than the defaults: the shapes of Llama 3 8B and Qwen3 8B."""

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "vocab_size": 128,
    "batch": [2],
    "cache": 64,
    "position": 20,
    "prefill": (2, 16),
    "tokens": 8,
    "compile_repeats": 1,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark; the defaults are the shapes of Llama 3 8B."""
    parser.add_argument("--model", choices=MODELS, default="llama", action=_Shapes, help="give it before its sizes")
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--intermediate-size", type=int, default=14336)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="batch sizes of decoding")
    parser.add_argument("--cache", type=int, default=4096, help="length of the static cache")
    parser.add_argument("--position", type=int, default=2000, help="valid positions while decoding")
    parser.add_argument("--prefill", type=_shape, default=(4, 2048), metavar="BxS", help="a prompt's shape")
    parser.add_argument("--mode", default="reduce-overhead", help="of torch.compile, for decoding")
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens to compare")
    parser.add_argument("--compile-repeats", type=int, default=3, help="cold compilations of each implementation")
    parser.add_argument("--only", type=_sections, default=SECTIONS, help=f"of {','.join(SECTIONS)}")


class _Shapes(argparse.Action):
    """Sets the sizes of a model along with its name."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: str, *_: object) -> None:
        vars(namespace).update(SHAPES[value], model=value)


def _shape(text: str) -> tuple[int, int]:
    batch, length = text.split("x")
    return int(batch), int(length)


def _prefix(args: argparse.Namespace) -> str:
    """What tells the cases of other models from Llama's."""
    return "" if args.model == "llama" else f"{args.model}: "


def _sections(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown section {unknown[0]!r}; valid are {', '.join(SECTIONS)}")
    return chosen


def make_model(args: argparse.Namespace) -> PreTrainedModel:
    """The model: bf16 on a GPU, fp32 on a CPU."""
    torch.manual_seed(0)
    make_config, make = MODELS[args.model]
    config = make_config(
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.hidden_size // args.heads,
        vocab_size=args.vocab_size,
        max_position_embeddings=max(8192, args.cache),
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        attn_implementation="sdpa",
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if args.device == "cpu" else torch.bfloat16)
    try:
        with torch.device(args.device):
            return make(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)


class DecodeStep:
    """One decoding step at a fixed position: ``run(f)`` gives the logits ``[B, 1, vocab]`` of ``f``, a model.

    ``cache``: keys and values of ``position`` random tokens, computed by ``model``.
    """

    def __init__(
        self, model: PreTrainedModel, args: argparse.Namespace, batch: int, position: int | None = None
    ) -> None:
        self.position = args.position if position is None else position
        self.cache = StaticCache(config=model.config, max_cache_len=args.cache)
        generator = torch.Generator(device=args.device).manual_seed(batch)
        tokens = torch.randint(args.vocab_size, (batch, self.position + 1), device=args.device, generator=generator)
        model(tokens[:, :-1], None, None, self.cache, use_cache=True, logits_to_keep=1)
        self.token = tokens[:, -1:].clone()
        self.position_ids = torch.full((batch, 1), self.position, device=args.device)

    def rewind(self) -> None:
        """Set the cache back to ``position`` tokens: each step advances the counters of its layers."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.position)
        torch.compiler.cudagraph_mark_step_begin()

    def __call__(self, f: Callable) -> Tensor:
        """The logits of ``f`` at wherever the cache stands."""
        return f(self.token, None, self.position_ids, self.cache, use_cache=True).logits

    def run(self, f: Callable) -> Tensor:
        """The logits of ``f`` at ``position``, in memory of their own (a CUDA graph reuses its output's)."""
        self.rewind()
        return self(f).clone()

    def exact(self, wide: PreTrainedModel) -> Tensor:
        """The logits of ``wide``, the model in a wider dtype, over the same keys and values."""
        own = copy.copy(self)
        own.cache = copy.deepcopy(self.cache)
        for layer in own.cache.layers:
            layer.keys, layer.values = layer.keys.to(wide.dtype), layer.values.to(wide.dtype)
        return own.run(wide)


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``model`` in the next wider dtype, the truth (float64 would not fit beside an 8B model)."""
    return copy.deepcopy(model).to(torch.float64 if model.dtype == torch.float32 else torch.float32)


def run(args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of one case after another."""
    if "compile" in args.only:
        # First, before this process holds a model of its own on the GPU.
        yield cold_compile(args)
    if set(args.only) == {"compile"}:
        return
    with torch.no_grad():
        model = make_model(args)
        for batch in args.batch if "decode" in args.only else ():
            yield decode(model, args, batch)
        if "prefill" in args.only:
            yield prefill(model, args)
        for batch in args.batch if {"memory", "host"} & set(args.only) else ():
            yield without_cuda_graphs(model, args, batch)
        if "tokens" in args.only:
            yield tokens(model, args)


def decode(model: PreTrainedModel, args: argparse.Namespace, batch: int) -> list[Row]:
    """One decoding step as users run it: compiled with ``--mode``, over a static cache."""
    case = f"{_prefix(args)}decode, batch {batch}, cache {args.cache}, position {args.position}, {args.mode}"
    step, eager, exact = decode_truth(case, model, args, batch)
    candidates, reserved = [], []
    torch._dynamo.reset()
    for impl in args.impl:
        before = reserved_bytes(args.device)
        # The first run of a CUDA graph tree warms up, the second records, the third replays.
        candidates.append(harness.prepare(impl, model, step.run, args.mode, runs=4, **flags(impl)))
        reserved.append(reserved_bytes(args.device) - before if args.device != "cpu" else None)
    rows = [harness.check(case, candidate, exact, eager) for candidate in candidates]
    clock = Clock(args.device, args.repetitions)
    times = clock.in_turns([timed(step, candidate) for candidate in candidates], before=step.rewind)
    for row, us, count in zip(rows, times, reserved, strict=True):
        row |= {"us": us, "reserved_bytes": count}
    return harness.with_baseline(rows)


def without_cuda_graphs(model: PreTrainedModel, args: argparse.Namespace, batch: int) -> list[Row]:
    """The same step without CUDA graphs: host time of the call and peak memory."""
    case = f"{_prefix(args)}decode, batch {batch}, cache {args.cache}, position {args.position}, no CUDA graphs"
    step, eager, exact = decode_truth(case, model, args, batch)
    torch._dynamo.reset()
    candidates = [harness.prepare(impl, model, step.run, runs=2, **flags(impl)) for impl in args.impl]
    rows = [harness.check(case, candidate, exact, eager) for candidate in candidates]
    calls = [timed(step, candidate) for candidate in candidates]
    clock = Clock(args.device, args.repetitions)
    times = clock.in_turns(calls, before=step.rewind)
    host = clock.host(calls, before=step.rewind) if "host" in args.only else [None] * len(calls)
    for row, us, host_us, call in zip(rows, times, host, calls, strict=True):
        step.rewind()
        peak = harness.peak_bytes(call, args.device) if "memory" in args.only else None
        row |= {"us": us, "host_us": host_us, "peak_bytes": peak}
    return harness.with_baseline(rows)


def decode_truth(
    case: str, model: PreTrainedModel, args: argparse.Namespace, batch: int
) -> tuple[DecodeStep, list[truth.Error], Tensor]:
    """A step, eager's error in it, and its logits in a wider dtype."""
    progress.print(case, highlight=False)
    step = DecodeStep(model, args, batch)
    exact = step.exact(widened(model))
    return step, truth.errors(step.run(model), exact), exact


def timed(step: DecodeStep, candidate: Candidate) -> Callable[[], Tensor]:
    """The part of a step that is timed: the call of the model without setting the position back."""
    (compiled,) = candidate.call.args
    return lambda: step(compiled)


def flags(impl: str) -> dict[str, bool]:
    """Graph breaks are an error wherever something is compiled."""
    return {} if impl == "eager" else {"fullgraph": True}


def reserved_bytes(device: str) -> int:
    """What the allocator holds on to, after it gave back what it could."""
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def prefill(model: PreTrainedModel, args: argparse.Namespace) -> list[Row]:
    """A whole prompt without a cache, last logits only, compiled in the default mode."""
    batch, length = args.prefill
    case = f"{_prefix(args)}prefill, {batch} x {length}"
    progress.print(case, highlight=False)
    ids = torch.randint(args.vocab_size, (batch, length), device=args.device)

    def use(f: Callable) -> Tensor:
        return f(ids, use_cache=False, logits_to_keep=1).logits

    exact = use(widened(model))
    eager = truth.errors(use(model), exact)
    torch._dynamo.reset()
    candidates = [harness.prepare(impl, model, use, runs=2, **flags(impl)) for impl in args.impl]
    rows = [harness.check(case, candidate, exact, eager) for candidate in candidates]
    calls = [candidate.call for candidate in candidates]
    for row, us, call in zip(rows, Clock(args.device, args.repetitions).in_turns(calls), calls, strict=True):
        row |= {"us": us, "peak_bytes": harness.peak_bytes(call, args.device)}
    return harness.with_baseline(rows)


def cold_compile(args: argparse.Namespace) -> list[Row]:
    """Time to the first result of one decoding step in a fresh process: empty caches, workers warm."""
    case = f"{_prefix(args)}cold compile of decode, batch {args.batch[-1]}, {args.layers} layers"
    progress.print(case, highlight=False)
    impls = [impl for impl in args.impl if impl in (BASELINE, "portable_ops")]
    seconds: dict[str, list[float]] = {impl: [] for impl in impls}
    for _ in range(args.compile_repeats):
        for impl in impls:
            seconds[impl].append(compile_once(args, impl))
            progress.print(f"  {impl}: {seconds[impl][-1]:.1f} s", highlight=False)
    rows = [
        {"case": case, "impl": impl, "variant": "", "correct": None, "us": statistics.median(times) * 1e6}
        for impl, times in seconds.items()
    ]
    for row in rows:
        row["note"] = "each: " + ", ".join(f"{s:.1f} s" for s in seconds[row["impl"]])
    return harness.with_baseline(rows)


def compile_once(args: argparse.Namespace, impl: str) -> float:
    """Seconds of one cold compilation, in a process of its own."""
    sizes = ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "vocab_size", "cache")
    command = [sys.executable, "-m", "benchmarks.cold_compile", "--device", args.device, "--impl", impl]
    command += ["--model", args.model]  # before its sizes
    for name in sizes:
        command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    command += ["--batch", str(args.batch[-1])]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        run = subprocess.run(command, cwd=ROOT, env=os.environ | caches, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"cold compilation as {impl} failed:\n{run.stderr[-4000:]}")
    return json.loads(run.stdout.splitlines()[-1])["seconds"]


def tokens(model: PreTrainedModel, args: argparse.Namespace) -> list[Row]:
    """Greedy tokens of eager and of each implementation.

    Every implementation is also fed eager's tokens, so that each choice is made from the same context.
    ``correct``: wherever such a choice differs, eager's own top two logits are closer than the largest error
    of its logits in that place, judged against a wider dtype.
    """
    batch, length = args.batch[-1], 16
    case = f"{_prefix(args)}{args.tokens} greedy tokens, batch {batch}"
    progress.print(case, highlight=False)
    prompt = torch.randint(args.vocab_size, (batch, length), device=args.device)
    cache = StaticCache(config=model.config, max_cache_len=args.cache)
    chosen = greedy(Decoder(model, model, cache), prompt, args.tokens)
    eager = fed(Decoder(model, model, cache), prompt, chosen)
    wide = widened(model)
    exact = fed(Decoder(wide, wide, StaticCache(config=model.config, max_cache_len=args.cache)), prompt, chosen)
    del wide
    best = eager.topk(2).values
    gap, error = best[..., 0] - best[..., 1], (eager - exact).abs().amax(-1)

    rows = []
    torch._dynamo.reset()
    for impl in (impl for impl in args.impl if impl not in ("eager", BASELINE)):
        decoder = Decoder(harness.compile_as(impl, model, args.mode, **flags(impl)), model, cache)
        differ = fed(decoder, prompt, chosen).argmax(-1) != chosen
        free = greedy(decoder, prompt, args.tokens)
        equal = int((free == chosen).int().cumprod(-1).sum())
        note = (
            f"{equal} of {chosen.numel()} equal to eager's up to the first difference of each sequence; "
            f"{int(differ.sum())} choices differ from the same context"
        )
        if differ.any():
            note += f": top two at most {gap[differ].max():.1e} apart, error at least {error[differ].min():.1e}"
        correct = bool((gap[differ] <= error[differ]).all())
        row = {"case": case, "impl": impl, "variant": "", "us": None, "correct": correct, "note": note}
        rows.append(row)
    return harness.with_baseline(rows)


class Decoder:
    """Decodes one sequence after another over one cache: ``by`` runs the prompt, ``f`` the steps.

    The cache stays the same object: compiled code is bound to its addresses.
    """

    def __init__(self, f: Callable, by: PreTrainedModel, cache: StaticCache) -> None:
        self.f, self.by, self.cache = f, by, cache
        self.position = 0

    def start(self, prompt: Tensor) -> Tensor:
        """The logits ``[B, 1, vocab]`` after ``prompt[B, S]``."""
        for layer in self.cache.layers:
            layer.cumulative_length.zero_()
        self.position = prompt.shape[1]
        return self.by(prompt, None, None, self.cache, use_cache=True, logits_to_keep=1).logits

    def step(self, token: Tensor) -> Tensor:
        """The logits ``[B, 1, vocab]`` after ``token[B, 1]``."""
        position_ids = torch.full_like(token, self.position)
        self.position += 1
        torch.compiler.cudagraph_mark_step_begin()
        return self.f(token.clone(), None, position_ids, self.cache, use_cache=True).logits.clone()


def greedy(decoder: Decoder, prompt: Tensor, count: int) -> Tensor:
    """The ``count`` greedy tokens after ``prompt``: ``[B, count]``."""
    chosen = [decoder.start(prompt).argmax(-1)]
    while len(chosen) < count:
        chosen.append(decoder.step(chosen[-1]).argmax(-1))
    return torch.cat(chosen, 1)


def fed(decoder: Decoder, prompt: Tensor, chosen: Tensor) -> Tensor:
    """The logits from which each of ``chosen[B, count]`` would be chosen: ``[B, count, vocab]``."""
    logits = [decoder.start(prompt)]
    for i in range(chosen.shape[1] - 1):
        logits.append(decoder.step(chosen[:, i : i + 1]))
    return torch.cat(logits, 1)
