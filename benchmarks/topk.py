"""Top-k of long rows, whose indices alone are used, and routers of mixtures of experts.

indices = topk(x, 2048).indices, sorted or not;    weights, experts = topk(softmax(logits), 8), renormalised

"eager call": of torch.topk, or of our operator called without a compiler, its launches from Python included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from portable_ops.kernels.topk import TOPK_INDICES
from torch import Tensor

from .harness import Clock, capture, check, prepare, progress, truth, with_baseline
from .results import Row

K = 2048
SHAPES = ((1, 32768), (1, 131072), (1, 262144), (1, 524288), (64, 32768), (64, 131072), (64, 262144), (4096, 8192))
HARD_SHAPES = ((1, 131072), (64, 131072), (4096, 8192))
"""Where other inputs than normal ones are measured as well."""
ROUTERS = (("softmax, renormalised", 64), ("softmax, renormalised", 8192), ("DeepSeek-V3", 64), ("DeepSeek-V3", 8192))
IMPLS = ("eager", "inductor", "portable_ops gate=always")


def attention_logits(x: Tensor) -> Tensor:
    """A slow wave, noise, and a few positions that stand out, as an indexer sees a long context."""
    wave = torch.linspace(0, 40, x.shape[-1], device=x.device).sin()
    return x + wave + 6 * (torch.rand_like(x) < 0.001)


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "all equal": lambda x: torch.full_like(x, 0.5),
    "two values": lambda x: x.sign(),
    "ascending": lambda x: x.sort(-1)[0],
    "descending": lambda x: x.sort(-1, descending=True)[0],
    "one outlier": lambda x: x.index_fill(-1, torch.tensor([7], device=x.device), 3e38),
    "denormals": lambda x: x * 1e-41,
    "attention logits": attention_logits,
    "softmax": lambda x: (8 * x).softmax(-1),
    "bf16 numbers": lambda x: x.bfloat16().float(),
}
"""Made from normal numbers."""


def selection(k: int, sorted: bool, values: bool = False) -> Callable[[Tensor], Any]:
    """The function that is measured."""

    def indices_only(x: Tensor) -> Tensor:
        return torch.topk(x, k, sorted=sorted)[1]

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        found, indices = torch.topk(x, k, sorted=sorted)
        return found, indices

    return both if values else indices_only


def is_selection(x: Tensor, indices: Tensor, k: int, sorted: bool) -> bool:
    """Whether ``indices`` are of the k largest, each once and in order if ``sorted``."""
    expected = torch.topk(x, k)[0]
    found = x.gather(-1, indices)
    found = found if sorted else found.sort(-1, descending=True)[0]
    distinct = indices.sort(-1)[0].diff(dim=-1) > 0
    return bool(torch.equal(found, expected) and distinct.all())


def selection_rows(
    rows: int,
    n: int,
    k: int,
    sorted: bool,
    args: argparse.Namespace,
    inputs: Sequence[str] = ("normal",),
    values: bool = False,
) -> Iterator[list[Row]]:
    """The rows of one shape, case by case: the input changes in place under what is captured once."""
    x = torch.randn(rows, n, device=args.device)
    normal, fn = x.clone(), selection(k, sorted, values)
    title = f"{'values and indices' if values else 'indices'}, {'sorted' if sorted else 'unsorted'}, {rows} x {n}"
    progress.print(title, highlight=False)
    torch._dynamo.reset()
    candidates = [prepare(impl, fn, lambda f: f(x)) for impl in args.impl]
    clock = Clock(args.device, args.repetitions)
    replays = [capture(c.call).replay if clock.on_gpu else c.call for c in candidates]
    for name in inputs:
        x.copy_(INPUTS[name](normal))
        measured: list[Row] = []
        for candidate in candidates:
            indices = candidate.call()
            right = is_selection(x, indices[1] if values else indices, k, sorted)
            about = {"variant": candidate.variant, "correct": right, "error": None}
            measured.append({"case": f"{title}, {name}", "impl": candidate.impl, **about})
        for row, us in zip(measured, clock.in_turns(replays), strict=True):
            row["us"] = us
        if name == "normal" and not values:
            calls = [lambda: fn(x), lambda: TOPK_INDICES.op(x, k, sorted=sorted)]
            torchs, ours = clock.in_turns(calls)
            for row in measured:
                row["call_us"] = {"eager": torchs}.get(row["impl"], ours if "always" in row["impl"] else None)
        yield with_baseline(measured)


# --- routers


def softmax_router(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As Hugging Face's Qwen3-MoE spells it."""
    weights, experts = torch.topk(logits.softmax(-1, dtype=torch.float32), 8, dim=-1)
    return weights / weights.sum(-1, keepdim=True), experts


def deepseek_router(logits: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's 256 experts in 8 groups, with the bias left at zero."""
    scores = logits.float().sigmoid()
    choice = scores + torch.zeros(256, device=logits.device)
    groups = choice.view(-1, 8, 32).topk(2, dim=-1)[0].sum(-1)
    best = groups.topk(4, dim=-1, sorted=False)[1]
    chosen = torch.zeros_like(groups).scatter_(1, best, 1).unsqueeze(-1).expand(-1, 8, 32).reshape(-1, 256)
    experts = choice.masked_fill(~chosen.bool(), -torch.inf).topk(8, dim=-1)[1]
    weights = scores.gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, experts


FUNCTIONS = {"softmax, renormalised": (softmax_router, 128), "DeepSeek-V3": (deepseek_router, 256)}


def clear_choices(fn: Callable, logits: Tensor, chosen: Tensor) -> Tensor:
    """The tokens for which roundings of the logits do not change the experts; nearly all are.

    Raises RuntimeError if they are not.
    """
    clear = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    for _ in range(4):
        rounded = logits.double() * (1 + 4e-6 * (torch.rand_like(logits, dtype=torch.float64) - 0.5))
        with truth.Wide():
            clear &= (fn(rounded)[1].sort(-1)[0] == chosen.sort(-1)[0]).all(-1)
    if clear.double().mean() < 0.9:
        raise RuntimeError("the experts of too many tokens are chosen by chance: nothing to judge")
    return clear


def router_rows(name: str, tokens: int, args: argparse.Namespace) -> list[Row]:
    """The rows of one router.  Weights are judged, of tokens for which only one choice of experts is right."""
    fn, experts = FUNCTIONS[name]
    logits = torch.randn(tokens, experts, device=args.device)
    case = f"router, {name}, {tokens} tokens, 8 of {experts} experts"
    progress.print(case, highlight=False)
    torch._dynamo.reset()
    with truth.Wide():
        weights, chosen = fn(logits.double())
    clear = clear_choices(fn, logits, chosen)
    exact = weights[clear].sort(-1, descending=True)[0]
    eager = truth.errors(fn(logits)[0][clear].sort(-1, descending=True)[0], exact)
    candidates = [prepare(impl, fn, lambda f: f(logits)) for impl in args.impl]
    clock = Clock(args.device, args.repetitions)
    rows = []
    for candidate in candidates:
        weights, indices = candidate.output
        candidate.output = weights[clear].sort(-1, descending=True)[0]
        row = check(case, candidate, exact, eager)
        row["correct"] &= bool((indices.sort(-1)[0].diff(dim=-1) > 0).all())
        rows.append(row)
    for row, us in zip(rows, clock.replays([c.call for c in candidates]), strict=True):
        row["us"] = us
    return with_baseline(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--shapes", nargs="+", help="of SHAPES those to measure, as 64x32768; routers: as 'routers'")


def run(args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of one case after another."""
    wanted = args.shapes or [*(f"{rows}x{n}" for rows, n in SHAPES), "routers"]
    if args.tiny:
        for sorted in (False, True):
            yield from selection_rows(2, 300, 16, sorted, args, list(INPUTS))
        yield router_rows("softmax, renormalised", 3, args)
        yield router_rows("DeepSeek-V3", 3, args)
        return
    for rows, n in SHAPES:
        if f"{rows}x{n}" in wanted:
            for sorted in (False, True):
                inputs = list(INPUTS) if (rows, n) in HARD_SHAPES and not sorted else ["normal"]
                yield from selection_rows(rows, n, K, sorted, args, inputs)
    for name, tokens in ROUTERS if "routers" in wanted else ():
        yield router_rows(name, tokens, args)
