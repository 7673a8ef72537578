"""Compile one decoding step of the ``llama`` benchmark once and print how long that took, as JSON.

Started by ``python -m benchmarks llama --only compile`` in a fresh process with empty caches.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from torch._inductor.async_compile import AsyncCompile

from . import harness, llama


def main(argv: list[str]) -> None:
    """Print ``{"seconds": ...}``: from ``torch.compile`` to the first result of the compiled step."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--impl", required=True)
    llama.add_arguments(parser)
    args = parser.parse_args(argv)

    with torch.no_grad():
        model = llama.make_model(args)
        step = llama.DecodeStep(model, args, args.batch[-1], position=8)
        # The context, cuBLAS and the like are there before the clock starts, and so are the compile workers.
        step.run(model)
        AsyncCompile.warm_pool()
        AsyncCompile.wait_pool_ready()
        clock = harness.Clock(args.device, 1)
        clock.wait()
        start = time.perf_counter()
        step.run(harness.compile_as(args.impl, model, fullgraph=True))
        clock.wait()
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main(sys.argv[1:])
