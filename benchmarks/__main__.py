"""Measure one benchmark: ``python -m benchmarks NAME [flags]``; ``NAME --help`` lists the flags.

    decode_attention   attention of one query over a static KV cache
    prefill_attention  attention of whole prompts
    rms_norm           RMSNorm with a residual sum
    linear             linear layers for few rows, as in decoding
    rope               queries and keys rotated, normalised before, put into a cache
    topk               top-k of long rows, and routers of mixtures of experts
    llama              a Hugging Face Llama from end to end; needs transformers
    pass_speed         how long the pass takes, and how that grows with the graph; needs transformers, but no GPU
    sweep              where each operator pays; --write-table writes the gate's table
    report             write docs/performance.md from the results
    tables             write the gate's tables from the results of sweeps

On a GPU the figures are written to benchmarks/results/<gpu>/<NAME>.json.  Where torch and Triton are there
already, ``pip install --no-index --no-deps --no-build-isolation -e .`` installs the rest without a network.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path
from types import ModuleType

import torch

from . import harness, report, results

BENCHMARKS = (
    "decode_attention",
    "prefill_attention",
    "rms_norm",
    "linear",
    "rope",
    "topk",
    "llama",
    "pass_speed",
    "sweep",
)
TINY_IMPLS = ("eager", results.BASELINE, "portable_ops", "portable_ops gate=always")
DEFAULT_IMPLS = (*TINY_IMPLS, "portable_ops gate=never")


def make_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """The flags that every benchmark has, and those of ``module``."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--impl", nargs="+", choices=harness.IMPLEMENTATIONS, help="what to measure")
    parser.add_argument("--repetitions", type=int, default=100, help="of each implementation, in turns")
    parser.add_argument("--host", action="store_true", help="also the time until a call returns")
    parser.add_argument("--kernels", action="store_true", help="also the names of the kernels, by the profiler")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, a few repetitions: does it run?")
    parser.add_argument("--out", type=Path, help="file to write (default on a GPU: benchmarks/results/...)")
    parser.add_argument("--fresh", action="store_true", help="drop the rows that the file already holds")
    parser.add_argument("--commit", default=None, help="what is measured, where git cannot tell")
    module.add_arguments(parser)
    return parser


def parse(name: str, module: ModuleType, argv: list[str]) -> argparse.Namespace:
    """The settings of one run; ``--tiny`` sets the sizes, whatever else is given."""
    parser = make_parser(name, module)
    args = parser.parse_args(argv)
    if args.tiny:
        args.repetitions = 3
        vars(args).update(getattr(module, "TINY", {}))
    elif not args.device.startswith("cuda") and not getattr(module, "ANYWHERE", False):
        parser.error("figures mean something on a GPU only; without one, --tiny checks that all of it runs")
    args.impl = args.impl or list(TINY_IMPLS if args.tiny else getattr(module, "IMPLS", DEFAULT_IMPLS))
    if args.out is None and not args.tiny and args.device.startswith("cuda"):
        gpu = torch.cuda.get_device_name(args.device)
        args.out = results.RESULTS / results.slug(gpu) / f"{name}.json"
    return args


def command_line(name: str, argv: list[str]) -> str:
    """The command that measures the same again; where its figures go is left out."""
    kept, skip = [], False
    for word in argv:
        if word in ("--out", "--commit"):
            skip = True
        elif skip:
            skip = False
        elif word != "--fresh" and not word.startswith(("--out=", "--commit=")):
            kept.append(word)
    return shlex.join(["python", "-m", "benchmarks", name, *kept])


def tables() -> int:
    """Write the gate's tables from the results of sweeps that lie in benchmarks/results."""
    from . import sweep

    for path in sweep.write_tables():
        harness.progress.print(f"written to {path}", highlight=False)
    return 0


def main(argv: list[str]) -> int:
    """Run what ``argv`` says; the exit status is 1 if an implementation was wrong."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    name, *rest = argv
    if name == "report":
        return report.main(rest)
    if name == "tables":
        return tables()
    if name not in BENCHMARKS:
        print(f"no benchmark is called {name!r}; there are {', '.join(BENCHMARKS)}, report and tables", file=sys.stderr)
        return 2
    module = importlib.import_module(f".{name}", __package__)
    args = parse(name, module, rest)
    on, commit = results.machine(args.device), args.commit or results.commit()
    run = results.Results(args.out, on, command_line(name, rest), commit, args.fresh)
    torch.manual_seed(0)
    with torch.no_grad():
        for rows in module.run(args):
            run.add(rows)
    versions = ", ".join(f"{what} {version}" for what, version in on.items() if what != "gpu")
    where = on["gpu"] if args.device.startswith("cuda") else "a CPU, where times mean little"
    run.show(f"{name} on {where} ({versions}), commit {commit[:12]}")
    if args.out is not None:
        harness.progress.print(f"written to {args.out}", highlight=False)
    if getattr(args, "write_table", False) and args.out is not None:
        tables()
    return 0 if all(row["correct"] in (True, None) for row in run.rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
