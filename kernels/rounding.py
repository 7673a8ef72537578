"""Rounding inside of kernels that compute in float32, wherever the spelling that they stand for rounds."""

from __future__ import annotations

import torch

from .launch import jit, tl

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The types that :func:`round_to` knows, by their names in constexprs."""


@jit
def round_to(value, DTYPE: tl.constexpr):
    """``value`` (float32) as if it had been stored in DTYPE and loaded again."""
    if DTYPE == "bf16":
        value = value.to(tl.bfloat16).to(tl.float32)
    if DTYPE == "fp16":
        value = value.to(tl.float16).to(tl.float32)
    return value
