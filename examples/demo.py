"""The main job from beginning to end; ``make demo`` runs it.

A small Llama with random weights is explained, compiled with ``backend="portable_ops"``, compared with
eager in its tokens and with float64 in its error and, on a GPU, timed beside stock Inductor.

    python -m examples.demo [--device cuda] [--size small] [--tokens 32]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch
from portable_ops.inductor_ext import explain, reports
from rich.console import Console
from rich.table import Table
from torch import Tensor

from examples.llama import Llama, generate, make_model

# Where nothing wraps the lines (a pipe, a log), tables may be as wide as they need to be.
console = Console(width=None if sys.stdout.isatty() else 120)


def compile_step(title: str, model: Llama, inputs: tuple[Tensor, Tensor], **settings: object) -> Callable:
    """Compile one decoding step of ``model`` and say how long that took and what was rewritten."""
    before, start = len(reports()), time.perf_counter()
    with console.status(f"compiling {title} (Inductor generates and builds its kernels now) ..."):
        step = torch.compile(model, dynamic=False, **settings)
        with torch.no_grad():
            step(*inputs)
    console.print(f"[bold]{title}[/bold]: compiled in {time.perf_counter() - start:.1f} s")
    for report in reports()[before:]:
        rewritten = ", ".join(f"{count} {kind}" for kind, count in report.rewritten.items() if count)
        console.print(f"  rewritten: {rewritten or 'nothing'}; declined: {len(report.declined)}")
        for reason in sorted({decline.reason for decline in report.declined}):
            console.print(f"  declined because: {reason}")
    return step


@torch.no_grad()
def explain_large() -> None:
    """Explain a model that no laptop holds: on the meta device nothing is allocated."""
    with console.status("tracing Llama 3 8B on the meta device ..."):
        model, inputs = make_model("8b", batch=16, device="meta", dtype=torch.bfloat16)
        report = explain(model)(*inputs)
    console.print(f"The shapes of Llama 3 8B, batch 16: {report.one_line()}\n", highlight=False)


@torch.no_grad()
def step_logits(step: Callable, model: Llama, prompt: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The float64 logits that ``step`` gives for the token after ``prompt`` (which ``model`` prefills)."""
    length = prompt.shape[1] - 1
    model(prompt[:, :length], torch.arange(length, device=prompt.device))
    return step(prompt[:, length:], torch.tensor([length], device=prompt.device)).double()


def relative_error(value: Tensor, truth: Tensor) -> float:
    """``|value - truth| / |truth|`` in the Euclidean norm."""
    return ((value - truth).norm() / truth.norm()).item()


def tokens_agree(tokens: Tensor, eager: Tensor, prompt: Tensor, model: Llama, truth: Llama) -> bool:
    """Whether ``tokens`` equal ``eager``'s, or first differ at a tie that eager's own error could break."""
    rows, columns = (tokens != eager).nonzero(as_tuple=True)
    if not len(rows):
        return True
    first = int(columns.min())
    context = torch.cat((prompt, eager[:, :first]), 1)
    logits, exact = (step_logits(m, m, context)[:, -1] for m in (model, truth))
    error = (logits - exact).abs().amax(-1)
    top = logits.topk(2).values
    differing = rows[columns == first]
    gap = (top[:, 0] - top[:, 1])[differing]
    console.print(f"  first difference at token {first}: eager's top two are {gap.max():.2e} apart,")
    console.print(f"  and its own error against float64 there is {error[differing].min():.2e}")
    return bool((gap <= error[differing]).all())


def tokens_per_second(steps: dict[str, Callable], model: Llama, prompt: Tensor, count: int) -> dict[str, float]:
    """Decoding speed of each step, taken in turns; the median of five rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(5):
        for name, step in steps.items():
            generate(step, prompt, 4, prefill=model)
            torch.cuda.synchronize()
            start = time.perf_counter()
            generate(step, prompt, count, prefill=model)
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: len(prompt) * count / statistics.median(times) for name, times in seconds.items()}


def main(argv: list[str] | None = None) -> int:
    """Run the demo; the exit status is 1 if a compiled model's tokens or error are worse than eager's."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--size", default=None, help="a size of examples/llama.py (small; medium on a GPU)")
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args(argv)
    on_gpu = args.device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    size, batch = args.size or ("medium" if on_gpu else "small"), args.batch or (16 if on_gpu else 2)

    torch.manual_seed(0)
    model, inputs = make_model(size, batch, args.device, dtype)
    truth = copy.deepcopy(model).double()
    prompt = torch.randint(0, model.config.vocab_size, (batch, 8), device=args.device)
    console.print(f"Llama ({size}: {model.config}), batch {batch}, {dtype} on {args.device}\n")

    console.print("What would be rewritten (traced only, no code is generated):")
    with torch.no_grad():
        console.print(explain(model)(*inputs), highlight=False)
    if not on_gpu and args.size is None:
        explain_large()

    if on_gpu:
        settings = {"mode": "reduce-overhead"}
        steps = {
            "stock Inductor": compile_step("stock Inductor", model, inputs, **settings),
            "portable_ops": compile_step("portable_ops", model, inputs, backend="portable_ops", **settings),
        }
    else:
        # There is no kernel for the CPU, so the default gate leaves the graph as it was. With the gate forced
        # the rewritten graph runs the operators' plain-torch references instead.
        forced = {"portable_ops.gate": "always"}
        name = 'portable_ops, gate "always"'
        steps = {
            "portable_ops": compile_step("portable_ops", model, inputs, backend="portable_ops"),
            name: compile_step(name, model, inputs, backend="portable_ops", options=forced),
        }

    eager_tokens = generate(model, prompt, args.tokens)
    exact = step_logits(truth, truth, prompt)
    eager_error = relative_error(step_logits(model, model, prompt), exact)
    speed = tokens_per_second(steps, model, prompt, args.tokens) if on_gpu else {}

    table = Table(title="Compared with eager and with float64")
    titles = ["", "greedy tokens equal to eager's", "error against float64"] + ["tokens per second"] * on_gpu
    for title in titles:
        table.add_column(title, justify="right" if title else "left")
    table.add_row("eager", "", f"{eager_error:.2e}")
    passed = True
    for name, step in steps.items():
        tokens = generate(step, prompt, args.tokens, prefill=model)
        error = relative_error(step_logits(step, model, prompt), exact)
        equal = int((tokens == eager_tokens).sum())
        # The bound of the project: 1.5 times eager's own error plus one rounding of the output type.
        passed &= error <= 1.5 * eager_error + torch.finfo(dtype).eps
        passed &= tokens_agree(tokens, eager_tokens, prompt, model, truth)
        per_second = [f"{speed[name]:.0f}"] if on_gpu else []
        table.add_row(name, f"{equal} of {tokens.numel()}", f"{error:.2e}", *per_second)
    console.print(table)
    console.print("[green]ok[/green]" if passed else "[red]worse than eager[/red]")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
