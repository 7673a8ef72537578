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


@jit
def scale(
    normed,
    weight,
    WEIGHT_OFFSET: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
    SCALED_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
):
    """What follows RMSNorm's normalisation, in float32: the weight, if there is one, rounded as the reference does."""
    y = round_to(normed, NORM_DTYPE)
    if weight is not None:
        w = round_to(weight.to(tl.float32), WEIGHT_DTYPE)
        if WEIGHT_OFFSET != 0.0:
            w = round_to(w + tl.full([], WEIGHT_OFFSET, tl.float32), WEIGHT_DTYPE)
        y = round_to(y * w, SCALED_DTYPE)
    return round_to(y, PRODUCT_DTYPE)
