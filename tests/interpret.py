"""Runs the Triton kernels of a plan on the CPU, in Triton's interpreter.

Triton decides when a kernel is *decorated* whether it is compiled or interpreted (``TRITON_INTERPRET=1``),
and one test session needs both: interpreted kernels for the values, compiled ones for the machine code.  So
the interpreter lives in a process of its own: ``Interpreter`` starts this file as a script and exchanges
pickles with it.  A kernel travels as its module and name.

Fresh buffers hold NaN (or the largest integer) in that process, so an element that no kernel wrote shows up.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from portable_ops.kernels.launch import Plan, run


class Interpreter:
    """A worker process with interpreted kernels.  Call it like ``launch.run``, with CPU tensors.

    Raises RuntimeError with the worker's traceback where a kernel fails.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TRITON_INTERPRET": "1"},
        )

    def __call__(self, plan: Plan, operands: Mapping[str, Any]) -> list[torch.Tensor]:
        """The outputs of ``plan`` in order; ``operands`` are the operator's arguments by name.

        What the plan declares to write is written in the caller's tensors.
        """
        tensors = {k: v for k, v in operands.items() if isinstance(v, torch.Tensor)}
        if any(t.device.type != "cpu" for t in tensors.values()):
            raise ValueError("the interpreter takes CPU tensors")
        launches = tuple(
            dataclasses.replace(launch, kernel=(launch.kernel.fn.__module__, launch.kernel.fn.__name__))
            for launch in plan.launches
        )
        pickle.dump((dataclasses.replace(plan, launches=launches), tensors), self._process.stdin)
        self._process.stdin.flush()
        try:
            failure, outputs, mutated = pickle.load(self._process.stdout)
        except EOFError:
            raise RuntimeError(f"the interpreter ended with status {self._process.wait()}") from None
        if failure is not None:
            raise RuntimeError(f"in the interpreter:\n{failure}")
        for name, written in zip(plan.mutated, mutated, strict=True):
            tensors[name].copy_(written)
        return outputs

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def _mend_interpreter() -> None:
    """What Triton 3.6's interpreter does unlike any GPU: it truncates float32 to bfloat16 instead of rounding,
    multiplies the bit patterns of bfloat16 in ``tl.dot``, and ends a ``range`` over a kernel's integer with
    NumPy 2.4, which no longer converts an array of one element to ``int``.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert_float, patch_tensor = interpreter._convert_float, interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot

    def convert_float_rounded(data, input_dtype, output_dtype, rounding_mode):
        if (input_dtype.name, output_dtype.name) == ("fp32", "bf16"):
            values = torch.from_numpy(data.astype(np.float32, copy=True))
            return values.to(torch.bfloat16).view(torch.uint16).numpy()
        return convert_float(data, input_dtype, output_dtype, rounding_mode)

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_wide_dot(self, a, b, *rest):
        return create_dot(self, widened(a), widened(b), *rest)

    interpreter._convert_float = convert_float_rounded
    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = create_wide_dot


def _serve() -> None:
    _mend_interpreter()
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a kernel prints must not mix with the replies
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills fresh memory, see torch.utils.deterministic
    while True:
        try:
            plan, operands = pickle.load(requests)
        except EOFError:
            return
        try:
            outputs = run(_with_kernels(plan), operands, torch.device("cpu"))
            reply = None, outputs, [operands[name] for name in plan.mutated]
        except Exception:
            reply = traceback.format_exc(), None, None
        pickle.dump(reply, replies)
        replies.flush()


def _with_kernels(plan: Plan) -> Plan:
    launches = []
    for launch in plan.launches:
        module, name = launch.kernel
        kernel = getattr(importlib.import_module(module), name)
        launches.append(dataclasses.replace(launch, kernel=kernel))
    return dataclasses.replace(plan, launches=tuple(launches))


if __name__ == "__main__":
    _serve()
