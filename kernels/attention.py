r"""Scaled dot-product attention: ``out = softmax(scale * q @ k^T + mask) @ v``.

Shapes: q (B, Hq, L, D), k and v (B, Hkv, S, D), out (B, Hq, L, D), or all without the head axis.  Query head
``h`` reads key/value head ``h // (Hq // Hkv)``.  The meaning is that of
``torch.nn.functional.scaled_dot_product_attention`` without dropout: causality is top-left aligned, and a row
that sees no key is zero.

Two variants share one inner step (:func:`_attend_block`):

``decode``
    Few query rows over a long sequence of keys.  The query heads of one key/value head are the rows of one
    tile, so keys and values are read once; the keys are split over programs, and a second kernel merges the
    parts (Flash-Decoding, Dao et al. 2023).
``prefill``
    One program per block of query rows, online softmax over blocks of keys (FlashAttention-2, Dao 2023).

Both look through a mask before they touch keys or values and visit only the blocks that some row sees.
Softmax statistics and sums are fp32, in base 2; ``p`` is rounded to v's dtype before ``p @ v``.  A result is
bitwise reproducible, but depends, within rounding, on the number of splits, which follows from B, Hkv, S and
the number of processors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .launch import (
    Buffer,
    IntLike,
    Launch,
    Plan,
    ceil_div,
    dense_strides,
    empty_ordered,
    hint,
    jit,
    next_power_of_two,
    ordered,
    tl,
)
from .operator import check_target, define_operator
from .target import Target

SCHEMA = (
    "portable_ops::attention(Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, bool is_causal=False, "
    "float? scale=None, bool enable_gqa=False, int[]? out_order=None) -> Tensor"
)


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    out_order: Sequence[int] | None = None,
) -> torch.Tensor:
    """The meaning of ``portable_ops::attention``: torch's own function with ``dropout_p=0``.

    ``out_order``: the dimensions of the result from outermost to innermost in memory (dense; head_dim must be
    the innermost); None means contiguous.  torch's function gives whatever its back end does, so a graph that
    relies on the strides has to say which.
    """
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return ordered(out, out_order)


def attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    out_order: Sequence[int] | None = None,
) -> torch.Tensor:
    """Shape, dtype and strides of the result."""
    return empty_ordered((*q.shape[:-1], v.shape[-1]), out_order, q.dtype, q.device)


# --- device code --------------------------------------------------------------------------------------------
# Parameter lists of device code stay in groups.
# fmt: off


@jit
def _bit_or(a, b):
    return a | b


@jit
def _lowest_set_bit(bits):
    """Index of the lowest set bit of a non-zero int32: the exponent of ``bits & -bits`` as a float."""
    lowest = (bits & -bits).to(tl.float32).to(tl.int32, bitcast=True)
    return ((lowest >> 23) & 0xFF) - 127  # the mask drops the sign that bit 31 leaves


@jit
def _offsets(index, stride, WIDE: tl.constexpr):
    """``index * stride``, in 64 bits if 32 might not do (narrow ones take half the registers)."""
    return index.to(tl.int64) * stride if WIDE else index * stride


@jit
def _mask_bytes(mask, MASK_IS_BOOL: tl.constexpr):
    """Booleans are read as bytes: Triton 3.6 cannot move a tile of 1-bit values between layouts on AMD."""
    return mask.to(tl.pointer_type(tl.int8), bitcast=True) if MASK_IS_BOOL else mask


@jit
def _seen(mask_ptrs, ok, MASK_IS_BOOL: tl.constexpr):
    """Which scores does a part of the mask let through?  What is not ``ok`` is not read and not seen."""
    if MASK_IS_BOOL:
        seen = tl.load(mask_ptrs, mask=ok, other=0) != 0
    else:
        seen = tl.load(mask_ptrs, mask=ok, other=float("-inf")) != float("-inf")
    return seen


@jit
def _seen_by_all_rows(
    mask_rows, first, step, end, stride_mn, BLOCK_N: tl.constexpr, MASK_IS_BOOL: tl.constexpr, WIDE: tl.constexpr
):
    """Which keys of the 32 blocks at ``first + j * step`` does a mask let through whose one row holds for all rows?"""
    n = (first + tl.arange(0, 32) * step)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    return _seen(mask_rows + _offsets(n, stride_mn, WIDE), n < end, MASK_IS_BOOL)


@jit
def _block_bits(seen):
    """Bit j: is anything seen in block j of ``seen`` [32, BLOCK_N]?"""
    return tl.sum(tl.max(seen.to(tl.int32), axis=1) << tl.arange(0, 32), axis=0)


@jit
def _live_blocks(
    mask_rows, row_ok, first, step, end, stride_mn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK_IS_BOOL: tl.constexpr, MASK_PER_ROW: tl.constexpr, WIDE: tl.constexpr,
):
    """Which of 32 blocks of keys does any row see?  Bit j stands for the block at ``first + j * step``.

    ``mask_rows`` points at key 0 of every row, or of one row if all rows share it (MASK_PER_ROW False).
    """
    if MASK_PER_ROW:
        count = tl.minimum(32, tl.cdiv(tl.maximum(end - first, 0), step))
        row_bits = tl.zeros([BLOCK_M], tl.int32)
        for j in tl.range(0, count, num_stages=3):
            n = first + j * step + tl.arange(0, BLOCK_N)
            ok = row_ok[:, None] & (n < end)[None, :]
            seen = _seen(mask_rows[:, None] + _offsets(n, stride_mn, WIDE)[None, :], ok, MASK_IS_BOOL)
            row_bits |= tl.max(seen.to(tl.int32), axis=1) << j
        bits = tl.reduce(row_bits, 0, _bit_or)
    else:
        bits = _block_bits(_seen_by_all_rows(mask_rows, first, step, end, stride_mn, BLOCK_N, MASK_IS_BOOL, WIDE))
    return bits


@jit
def _load_bias(
    mask_rows, row_ok, n, end, stride_mn, MASK_IS_BOOL: tl.constexpr, MASK_PER_ROW: tl.constexpr, WIDE: tl.constexpr
):
    """The mask of the keys ``n``: [BLOCK_M, BLOCK_N], or one row for all (MASK_PER_ROW False)."""
    if MASK_PER_ROW:
        pointers = mask_rows[:, None] + _offsets(n, stride_mn, WIDE)[None, :]
        ok = row_ok[:, None] & (n < end)[None, :]
    else:
        pointers = mask_rows + _offsets(n, stride_mn, WIDE)[None, :]
        ok = (n < end)[None, :]
    return tl.load(pointers, mask=ok, other=0)


@jit
def _load_block(pointers, n, end, offs_d, BOUNDED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys or values of one block; zero at ``n >= end`` if it is BOUNDED, and beyond HEAD_DIM."""
    if BOUNDED and HEAD_DIM != BLOCK_D:
        block = tl.load(pointers, mask=(n < end)[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    elif BOUNDED:
        block = tl.load(pointers, mask=(n < end)[:, None], other=0.0)
    elif HEAD_DIM != BLOCK_D:
        block = tl.load(pointers, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
    else:
        block = tl.load(pointers)
    return block


@jit
def _scores(q, k, ALLOW_TF32: tl.constexpr, PIECES: tl.constexpr):
    """q k^T, summed over PIECES pieces of head_dim."""
    if PIECES > 1:
        q = tl.permute(tl.reshape(q, (q.shape[0], PIECES, q.shape[1] // PIECES)), (1, 0, 2))
        k = tl.permute(tl.reshape(k, (k.shape[0], PIECES, k.shape[1] // PIECES)), (1, 2, 0))
        return tl.sum(tl.dot(q, k, input_precision="ieee"), axis=0)
    else:
        return tl.dot(q, tl.trans(k), input_precision="tf32" if ALLOW_TF32 else "ieee")


@jit
def _attend_block(
    acc, row_max, row_sum, q, k_head, v_head, mask_rows, row_ok, row_pos, start, end,
    stride_kn, stride_vn, stride_mn,
    BOUNDED: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    MASK_IS_BOOL: tl.constexpr, MASK_PER_ROW: tl.constexpr, MASK_AHEAD: tl.constexpr,
    SCALE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, ALLOW_TF32: tl.constexpr, PIECES: tl.constexpr,
):
    """One online-softmax step over the keys ``start .. start + BLOCK_N``.

    BOUNDED: the block may reach past ``end``.  CAUSAL: it may hold keys after a row's position ``row_pos``.
    MASK_AHEAD: ask for the mask before waiting for k, so that its way is not added to k's; costs registers.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    n = start + offs_n
    if MASK_AHEAD:
        bias = _load_bias(mask_rows, row_ok, n, end, stride_mn, MASK_IS_BOOL, MASK_PER_ROW, WIDE)
    # One 64-bit scalar per block, so that a head may span more than 2^31 elements.
    start64 = tl.cast(start, tl.int64)
    k_ptrs = k_head + start64 * stride_kn + _offsets(offs_n, stride_kn, WIDE)[:, None] + offs_d[None, :]
    v_ptrs = v_head + start64 * stride_vn + _offsets(offs_n, stride_vn, WIDE)[:, None] + offs_d[None, :]
    k = _load_block(k_ptrs, n, end, offs_d, BOUNDED, HEAD_DIM, BLOCK_D)
    v = _load_block(v_ptrs, n, end, offs_d, BOUNDED, HEAD_DIM, BLOCK_D)

    scores = _scores(q, k, ALLOW_TF32, PIECES)
    # The factor to base 2, and the scale, ride on the subtraction of the maximum: a fused multiply-add per score.
    LOG2E: tl.constexpr = 1.4426950408889634
    if HAS_MASK and not MASK_IS_BOOL:  # the mask is added in between
        scores = scores * SCALE
        unit: tl.constexpr = LOG2E
    elif SCALE == 0:
        scores = scores * 0.0
        unit: tl.constexpr = 1.0
    elif SCALE < 0:  # keep the factor positive: it is taken out of the maximum
        scores = -scores
        unit: tl.constexpr = -SCALE * LOG2E
    else:
        unit: tl.constexpr = SCALE * LOG2E
    if BOUNDED:
        scores = tl.where((n < end)[None, :], scores, float("-inf"))
    if CAUSAL:
        scores = tl.where(row_pos[:, None] >= n[None, :], scores, float("-inf"))
    if HAS_MASK:
        if not MASK_AHEAD:
            bias = _load_bias(mask_rows, row_ok, n, end, stride_mn, MASK_IS_BOOL, MASK_PER_ROW, WIDE)
        if MASK_IS_BOOL:
            scores = tl.where(bias != 0, scores, float("-inf"))
        else:
            scores += bias.to(tl.float32)
            # finfo.min must stay finite in base 2, or a row made of it would become a row without keys.
            lowest: tl.constexpr = -2.3e38
            scores = tl.where((scores < lowest) & (scores != float("-inf")), lowest, scores)

    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * unit)
    # A row without keys so far: subtract 0, not -inf, so that its weights are 0 and not NaN.
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(scores * unit - reference[:, None])
    rescale = tl.exp2(row_max - reference)
    row_sum = row_sum * rescale + tl.sum(p, axis=1)
    acc = tl.dot(
        p.to(v.dtype), v, acc * rescale[:, None], input_precision="tf32" if ALLOW_TF32 else "ieee"
    )
    return acc, new_max, row_sum


@jit
def _decode_kernel(
    q, k, v, mask, out, weights,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_mb, stride_mh, stride_ml, stride_mn, stride_ob, stride_oh, stride_ol,
    num_heads_kv, group, len_q, len_k,
    IS_CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, MASK_IS_BOOL: tl.constexpr, MASK_PER_ROW: tl.constexpr,
    SCALE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, WIDE: tl.constexpr, ALLOW_TF32: tl.constexpr,
    PIECES: tl.constexpr,
    NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr,
):
    """Rows: (query head of the group, query position) of one key/value head.

    Split s takes the blocks s, s + NUM_SPLITS, ...: the splits stay balanced when only a prefix or a window
    of the keys is visible.  With NUM_SPLITS 1 ``out`` is the result.  Else it holds normalised fp32 parts,
    [..., split, d], and ``weights`` of each the maximum and the sum of exp2 beside it.  (Their log2-sum-exp2, one
    number, would be rounded at its own size, and that error is relative in the result.)  A part without keys has
    -inf and 0, and its ``out`` is not written.
    """
    num_row_blocks = tl.cdiv(group * len_q, BLOCK_M)
    pid = tl.program_id(0)
    split = pid % NUM_SPLITS
    pid = pid // NUM_SPLITS
    row_block = pid % num_row_blocks
    pid = pid // num_row_blocks
    head_kv = pid % num_heads_kv
    batch = (pid // num_heads_kv).to(tl.int64)

    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < group * len_q
    row_pos = rows % len_q
    head = (head_kv * group + rows // len_q).to(tl.int64)
    pos = row_pos.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    in_tile = row_ok[:, None] & (offs_d < HEAD_DIM)[None, :]

    end = len_k
    if IS_CAUSAL:
        end = tl.minimum(len_k, len_q)
    # How many of the blocks split, split + NUM_SPLITS, ... start below end.
    num_blocks = (tl.cdiv(end, BLOCK_N) - split + NUM_SPLITS - 1) // NUM_SPLITS
    step = BLOCK_N * NUM_SPLITS
    MASK_AHEAD: tl.constexpr = HAS_MASK and MASK_IS_BOOL and not MASK_PER_ROW
    if HAS_MASK:
        mask_rows = _mask_bytes(mask, MASK_IS_BOOL) + batch * stride_mb
        if MASK_PER_ROW:
            mask_rows = mask_rows + head * stride_mh + pos * stride_ml
        elif MASK_AHEAD:
            # Asked for before q, which is waited for where it is loaded: the two ways from memory are one.
            seen = _seen_by_all_rows(mask_rows, split * BLOCK_N, step, end, stride_mn, BLOCK_N, MASK_IS_BOOL, WIDE)

    q_rows = q + batch * stride_qb + head * stride_qh + pos * stride_ql
    q_tile = tl.load(q_rows[:, None] + offs_d[None, :], mask=in_tile, other=0.0)
    k_head = k + batch * stride_kb + tl.cast(head_kv, tl.int64) * stride_kh
    v_head = v + batch * stride_vb + tl.cast(head_kv, tl.int64) * stride_vh

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_MASK:
        for base in range(0, num_blocks, 32):
            first = split * BLOCK_N + base * step
            if MASK_AHEAD:
                live = _block_bits(seen)
            else:
                live = _live_blocks(
                    mask_rows, row_ok, first, step, end, stride_mn,
                    BLOCK_M, BLOCK_N, MASK_IS_BOOL, MASK_PER_ROW, WIDE,
                )
            count = tl.sum((live >> tl.arange(0, 32)) & 1, axis=0)
            for _ in tl.range(0, count, num_stages=NUM_STAGES):
                start = first + _lowest_set_bit(live) * step
                live = live & (live - 1)
                acc, row_max, row_sum = _attend_block(
                    acc, row_max, row_sum, q_tile, k_head, v_head, mask_rows, row_ok, row_pos, start, end,
                    stride_kn, stride_vn, stride_mn, True, False, True, MASK_IS_BOOL, MASK_PER_ROW, MASK_AHEAD,
                    SCALE, HEAD_DIM, BLOCK_D, BLOCK_N, WIDE, ALLOW_TF32, PIECES,
                )
            if MASK_AHEAD:
                following = first + 32 * step
                seen = _seen_by_all_rows(mask_rows, following, step, end, stride_mn, BLOCK_N, MASK_IS_BOOL, WIDE)
    else:
        for i in tl.range(0, num_blocks, num_stages=NUM_STAGES):
            start = split * BLOCK_N + i * step
            acc, row_max, row_sum = _attend_block(
                acc, row_max, row_sum, q_tile, k_head, v_head, mask, row_ok, row_pos, start, end,
                stride_kn, stride_vn, 0, True, IS_CAUSAL, False, False, False, False,
                SCALE, HEAD_DIM, BLOCK_D, BLOCK_N, WIDE, ALLOW_TF32, PIECES,
            )

    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if NUM_SPLITS > 1:
        row_index = (batch * (num_heads_kv * group) + head) * len_q + pos
        row_weights = weights + (row_index * NUM_SPLITS + split) * 2
        tl.store(row_weights, row_max, mask=row_ok)
        tl.store(row_weights + 1, row_sum, mask=row_ok)
        in_tile = in_tile & (row_sum != 0.0)[:, None]
    out_rows = out + batch * stride_ob + head * stride_oh + pos * stride_ol + split * HEAD_DIM
    tl.store(out_rows[:, None] + offs_d[None, :], acc.to(out.dtype.element_ty), mask=in_tile)


@jit
def _merge_splits_kernel(
    partial, weights, out, stride_ob, stride_oh, stride_ol, num_heads, len_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NUM_SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
):
    """out row = sum over splits of partial * w / sum of w, w = part_sum * 2^part_max, for BLOCK_D of its elements.

    A part whose sum is 0 was never written and does not count.  Few parts are loaded without waiting for their
    sum to say so, many are not loaded in vain.
    """
    num_chunks: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    offs_d = (pid % num_chunks) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = (pid // num_chunks).to(tl.int64)
    splits = tl.arange(0, PADDED_SPLITS)
    row_weights = weights + (row * NUM_SPLITS + splits) * 2
    part_max = tl.load(row_weights, mask=splits < NUM_SPLITS, other=float("-inf"))
    part_sum = tl.load(row_weights + 1, mask=splits < NUM_SPLITS, other=0.0)
    wanted = splits < NUM_SPLITS
    if NUM_SPLITS > 32:
        wanted = part_sum != 0.0
    parts = tl.load(
        partial + (row * NUM_SPLITS + splits)[:, None] * HEAD_DIM + offs_d[None, :],
        mask=wanted[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )
    top = tl.max(part_max, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    part = part_sum * tl.exp2(part_max - top)
    total = tl.sum(part, axis=0)
    part = part / tl.where(total == 0.0, 1.0, total)
    parts = tl.where((part_sum != 0.0)[:, None], parts, 0.0)
    result = tl.sum(parts * part[:, None], axis=0)
    position = row % len_q
    head = (row // len_q) % num_heads
    batch = row // len_q // num_heads
    out_row = out + batch * stride_ob + head * stride_oh + position * stride_ol
    tl.store(out_row + offs_d, result.to(out.dtype.element_ty), mask=offs_d < HEAD_DIM)


@jit
def _prefill_kernel(
    q, k, v, mask, out,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_mb, stride_mh, stride_ml, stride_mn, stride_ob, stride_oh, stride_ol,
    num_heads, group, len_q, len_k,
    IS_CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, MASK_IS_BOOL: tl.constexpr, MASK_PER_ROW: tl.constexpr,
    SKIP_BLOCKS: tl.constexpr,
    SCALE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDE: tl.constexpr, ALLOW_TF32: tl.constexpr,
    NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr,
):
    """BLOCK_M query rows of one head.  Row blocks of a head are neighbours: its keys and values stay in L2.

    SKIP_BLOCKS: look through the mask first, and visit only the blocks of keys that some row sees.
    """
    num_row_blocks = tl.cdiv(len_q, BLOCK_M)
    pid = tl.program_id(0)
    row_block = pid % num_row_blocks
    if IS_CAUSAL:  # the longest rows first, so that the short ones fill the tail of the launch
        row_block = num_row_blocks - 1 - row_block
    pid = pid // num_row_blocks
    head = (pid % num_heads).to(tl.int64)
    batch = (pid // num_heads).to(tl.int64)

    row_start = row_block * BLOCK_M
    row_pos = row_start + tl.arange(0, BLOCK_M)
    row_ok = row_pos < len_q
    pos = row_pos.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    in_tile = row_ok[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_rows = q + batch * stride_qb + head * stride_qh + pos * stride_ql
    q_tile = tl.load(q_rows[:, None] + offs_d[None, :], mask=in_tile, other=0.0)
    k_head = k + batch * stride_kb + (head // group) * stride_kh
    v_head = v + batch * stride_vb + (head // group) * stride_vh

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_MASK:
        mask_rows = _mask_bytes(mask, MASK_IS_BOOL) + batch * stride_mb + head * stride_mh
        if MASK_PER_ROW:
            mask_rows = mask_rows + pos * stride_ml
        for first in range(0, len_k, 32 * BLOCK_N):
            if SKIP_BLOCKS:
                live = _live_blocks(
                    mask_rows, row_ok, first, BLOCK_N, len_k, stride_mn,
                    BLOCK_M, BLOCK_N, MASK_IS_BOOL, MASK_PER_ROW, WIDE,
                )
                count = tl.sum((live >> tl.arange(0, 32)) & 1, axis=0)
            else:
                live = tl.full([], -1, tl.int32)
                count = tl.minimum(32, tl.cdiv(len_k - first, BLOCK_N))
            for _ in tl.range(0, count, num_stages=NUM_STAGES):
                start = first + _lowest_set_bit(live) * BLOCK_N
                live = live & (live - 1)
                acc, row_max, row_sum = _attend_block(
                    acc, row_max, row_sum, q_tile, k_head, v_head, mask_rows, row_ok, row_pos, start, len_k,
                    stride_kn, stride_vn, stride_mn, True, False, True, MASK_IS_BOOL, MASK_PER_ROW, False,
                    SCALE, HEAD_DIM, BLOCK_D, BLOCK_N, WIDE, ALLOW_TF32, 1,
                )
    else:
        end = len_k
        full_end = len_k // BLOCK_N * BLOCK_N
        if IS_CAUSAL:
            end = tl.minimum(len_k, row_start + BLOCK_M)
            full_end = tl.minimum(full_end, (row_start + 1) // BLOCK_N * BLOCK_N)
        # Blocks that every row sees whole need no comparison per score ...
        for start in tl.range(0, full_end, BLOCK_N, num_stages=NUM_STAGES):
            acc, row_max, row_sum = _attend_block(
                acc, row_max, row_sum, q_tile, k_head, v_head, mask, row_ok, row_pos, start, end,
                stride_kn, stride_vn, 0, False, False, False, False, False, False,
                SCALE, HEAD_DIM, BLOCK_D, BLOCK_N, WIDE, ALLOW_TF32, 1,
            )
        # ... and these are on the diagonal or at the ragged end.
        for start in tl.range(full_end, end, BLOCK_N, num_stages=NUM_STAGES):
            acc, row_max, row_sum = _attend_block(
                acc, row_max, row_sum, q_tile, k_head, v_head, mask, row_ok, row_pos, start, end,
                stride_kn, stride_vn, 0, True, IS_CAUSAL, False, False, False, False,
                SCALE, HEAD_DIM, BLOCK_D, BLOCK_N, WIDE, ALLOW_TF32, 1,
            )

    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_rows = out + batch * stride_ob + head * stride_oh + pos * stride_ol
    tl.store(out_rows[:, None] + offs_d[None, :], acc.to(out.dtype.element_ty), mask=in_tile)


# fmt: on


# --- configuration ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Tile sizes of one variant.  Decode derives ``block_m`` from the number of rows (0 in its table)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


MAX_DECODE_ROWS = 64
"""Up to this many rows (query heads of a group times positions) the decode variant runs: one tile holds them
all.  Above it a prefill tile fills the tensor cores."""

MIN_SPLIT_KEYS = 2048
"""Prefill that would leave half of the device idle is split over keys by the decode kernel instead, if there
are at least this many.  Awaits a measurement."""

MAX_SPLITS = 256
"""Bounds the tile of the merge kernel (NUM_SPLITS x 32 fp32 values at this size)."""

START_BLOCKS, MERGE_BLOCKS = 1.5, 1.25
"""What starting a decode program and merging the parts cost, in the time of one block of keys.  H200, 128 keys of 128
bf16 numbers a block (2 us): a program that finds nothing to do takes 3 to 5 us, the merge 2.5 us."""

_SCAN_STAGES = 3  # mask tiles in flight while looking for live blocks: small ones, but each waits for memory
_MERGE_ELEMENTS = 8192  # fp32 values in a merge program of 128 threads: 64 registers a thread

# Both tables: (family, bytes per element, padded head_dim) -> config.

# Decode reads each key and value once, so what matters is bytes in flight: 64 KiB per multiprocessor and more hide
# the latency of an H200's memory.  sm_90, bf16, D = 128 is measured on an H200: one program of 8 warps with two stages
# of 64 KiB on each multiprocessor is within 3 % of the best of 11 configurations for every batch size and length,
# since whole waves are easy to fill with it.  The other rows are chosen from shared-memory limits.
_DECODE_CONFIGS = {
    ("sm_80", 2, 64): AttentionConfig(0, 128, 4, 3),
    ("sm_80", 2, 128): AttentionConfig(0, 64, 4, 3),
    ("sm_80", 2, 256): AttentionConfig(0, 32, 4, 3),
    ("sm_80", 4, 64): AttentionConfig(0, 64, 4, 3),
    ("sm_80", 4, 128): AttentionConfig(0, 32, 4, 3),
    ("sm_80", 4, 256): AttentionConfig(0, 16, 4, 3),
    ("sm_90", 2, 128): AttentionConfig(0, 128, 8, 3),
    ("sm_90", 2, 256): AttentionConfig(0, 64, 8, 3),
    # CDNA: 64 KiB of LDS per compute unit, wavefronts of 64.
    ("gfx9", 2, 64): AttentionConfig(0, 64, 4, 2),
    ("gfx9", 2, 128): AttentionConfig(0, 64, 4, 2),
    ("gfx9", 2, 256): AttentionConfig(0, 32, 4, 2),
    ("gfx9", 4, 64): AttentionConfig(0, 64, 4, 2),
    ("gfx9", 4, 128): AttentionConfig(0, 32, 4, 2),
    ("gfx9", 4, 256): AttentionConfig(0, 16, 4, 2),
    # RDNA: more keys, or a second stage, spill vector registers.
    ("gfx11", 2, 64): AttentionConfig(0, 32, 4, 1),
    ("gfx11", 2, 128): AttentionConfig(0, 16, 4, 1),
    ("gfx11", 2, 256): AttentionConfig(0, 16, 4, 1),
}

# Prefill.  Starting points are FlexAttention's tables (torch 2.11, _inductor/template_heuristics/triton.py).
# Where a row differs, theirs spills registers here, or shared memory says otherwise: a wgmma takes 64 rows
# per group of four warps, and 128 rows x 256 fp32 sums are 128 registers a thread with 8 warps.
_PREFILL_CONFIGS = {
    ("sm_80", 2, 64): AttentionConfig(128, 64, 4, 3),
    ("sm_80", 2, 128): AttentionConfig(128, 64, 8, 3),
    ("sm_80", 2, 256): AttentionConfig(64, 32, 8, 2),
    ("sm_80", 4, 64): AttentionConfig(64, 32, 8, 2),
    ("sm_80", 4, 128): AttentionConfig(32, 64, 8, 2),
    ("sm_80", 4, 256): AttentionConfig(32, 16, 8, 2),
    # Measured on an H200, the best of 7 to 11: 362 to 459 TFLOP/s (D = 128), 372 (64), 375 (256).
    ("sm_90", 2, 64): AttentionConfig(128, 64, 8, 3),
    ("sm_90", 2, 128): AttentionConfig(128, 128, 8, 3),
    ("sm_90", 2, 256): AttentionConfig(128, 64, 8, 2),
    # 99 KiB of shared memory (sm_86, sm_89, sm_120).
    ("sm_89", 2, 64): AttentionConfig(128, 64, 4, 2),
    ("sm_89", 2, 128): AttentionConfig(128, 32, 8, 2),
    ("gfx9", 2, 64): AttentionConfig(128, 64, 4, 1),
    ("gfx9", 2, 128): AttentionConfig(128, 64, 4, 1),
    ("gfx9", 2, 256): AttentionConfig(64, 32, 4, 1),
    ("gfx9", 4, 64): AttentionConfig(64, 32, 4, 1),
    ("gfx9", 4, 128): AttentionConfig(32, 32, 4, 1),
    ("gfx9", 4, 256): AttentionConfig(32, 16, 4, 1),
    # RDNA: wavefronts of 32, and sums share the vector registers with everything else.
    ("gfx11", 2, 64): AttentionConfig(64, 32, 4, 1),
    ("gfx11", 2, 128): AttentionConfig(64, 32, 8, 1),
    ("gfx11", 2, 256): AttentionConfig(32, 16, 4, 1),
}

# Rows for prefill with a mask, where its tile takes registers that the row above does not leave.
_MASKED_PREFILL_CONFIGS = _PREFILL_CONFIGS | {
    ("sm_80", 2, 64): AttentionConfig(128, 64, 8, 3),
    ("sm_80", 2, 128): AttentionConfig(128, 32, 8, 3),
    ("sm_89", 2, 64): AttentionConfig(128, 64, 8, 2),
    ("sm_90", 2, 64): AttentionConfig(128, 64, 8, 3),
    ("sm_90", 2, 128): AttentionConfig(128, 64, 8, 3),
    ("sm_90", 2, 256): AttentionConfig(128, 32, 8, 2),
}

# Where to look when a family has no row of its own.
_FALLBACK = {"sm_90": "sm_80", "sm_100": "sm_80", "sm_89": "sm_80", "gfx11": "gfx9"}


def _family(target: Target) -> str:
    if target.backend == "hip":
        return "gfx9" if target.warp_size == 64 else "gfx11"
    if target.shared_memory < 128 * 1024:
        return "sm_89"
    return {8: "sm_80", 9: "sm_90"}.get(target.capability // 10, "sm_100")


def _shared_bytes(config: AttentionConfig, block_d: int, element: int, mask_bytes: int, target: Target) -> int:
    """Upper bound of the shared memory that Triton allocates (a test compares it with what it does)."""
    query = config.block_m * block_d * element
    weights = config.block_m * config.block_n * element
    pieces = config.block_n * block_d * element if _pieces(config, block_d, element, target) > 1 else 0
    mask = config.block_m * config.block_n * mask_bytes
    # The asynchronous matrix units of sm_90 and later read a stage while the next ones are being filled.
    asynchronous = target.capability >= 90 and config.block_m >= 64
    buffers = config.num_stages if asynchronous else max(1, config.num_stages - 1)
    stages = buffers * (2 * config.block_n * block_d * element + mask)
    staged = max(stages, _SCAN_STAGES * mask)
    slack = 8192  # reductions across warps, changes of layout
    if target.backend == "hip":  # the query tile stays in registers
        return max(query, staged) + slack
    # A wgmma takes the weights from registers; elsewhere they change layout through shared memory.
    in_registers = target.capability == 90 and config.block_m >= 64 and element == 2
    return query + staged + slack + pieces + (0 if in_registers else 2 * weights)


def _pieces(config: AttentionConfig, block_d: int, element: int, target: Target) -> int:
    """Into how many pieces the sum over head_dim is cut.

    CUDA's exact float32 products are added up one after the other, over 256 elements with three times the error of
    torch's; sums of 16 are as good as its.  Larger tiles do not have the registers for it.
    """
    exact = element == 4 and target.backend == "cuda"
    return block_d // 16 if exact and config.block_m == 16 else 1


def _choose_config(
    q: torch.Tensor, k: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool, target: Target
) -> tuple[bool, AttentionConfig | None]:
    """Does the decode variant run, and with which config?  A config too large for ``target`` is shrunk until
    it fits; None if it cannot be."""
    batch, heads, len_q, head_dim = _sizes(q)
    rows = heads // _sizes(k)[1] * hint(len_q)
    prefill_programs = hint(batch) * heads * ceil_div(hint(len_q), 128)
    decode = rows <= MAX_DECODE_ROWS or (
        not is_causal and prefill_programs * 2 <= target.num_processors and hint(_sizes(k)[2]) >= MIN_SPLIT_KEYS
    )
    table = _PREFILL_CONFIGS if attn_mask is None else _MASKED_PREFILL_CONFIGS
    table = _DECODE_CONFIGS if decode else table
    block_d, element = next_power_of_two(head_dim), q.element_size()
    family, key = _family(target), (element, max(64, block_d))
    while (family, *key) not in table:
        family = _FALLBACK[family]
    config = table[(family, *key)]
    if decode:
        block_m = max(16, min(MAX_DECODE_ROWS, next_power_of_two(rows)))
        config = dataclasses.replace(config, block_m=block_m)
    mask_bytes = 0 if attn_mask is None else attn_mask.element_size()
    while _shared_bytes(config, block_d, element, mask_bytes, target) > target.shared_memory:
        if config.num_stages > 2:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > 32:
            config = dataclasses.replace(config, block_n=config.block_n // 2)
        elif config.num_stages > 1:
            config = dataclasses.replace(config, num_stages=1)
        elif config.block_m > 16:
            config = dataclasses.replace(config, block_m=config.block_m // 2)
        elif config.block_n > 16:
            config = dataclasses.replace(config, block_n=config.block_n // 2)
        else:
            return decode, None
    return decode, config


def _resident_programs(config: AttentionConfig, shared_bytes: int, target: Target) -> int:
    """Decode programs that run at once on ``target``: what shared memory and registers (about 168 a thread) allow."""
    per_processor = min(target.shared_memory // shared_bytes, 12 // config.num_warps)
    return max(1, per_processor * target.num_processors)


def _num_splits(programs: int, num_blocks: int, resident: int) -> int:
    """Splits of the keys that finish first: whole waves of resident programs times the work of one program.

    Counted in blocks of keys: a program reads its share, and starting it costs START_BLOCKS; a second launch merges
    the parts.  Half-full waves are what hurts: 512 programs on 396 places take as long as 792.
    """

    def duration(splits: int) -> float:
        waves = ceil_div(programs * splits, resident)
        merge = MERGE_BLOCKS if splits > 1 else 0.0
        return waves * (ceil_div(num_blocks, splits) + START_BLOCKS) + merge

    return min(range(1, max(1, min(MAX_SPLITS, num_blocks)) + 1), key=duration)


# --- shapes -------------------------------------------------------------------------------------------------


def _sizes(x: torch.Tensor) -> tuple[IntLike, ...]:
    """Sizes as (B, H, L, D); a 3-D tensor has no head axis."""
    b, *h, length, d = x.shape
    return (b, *(h or [1]), length, d)


def _row_strides(stride: Sequence[IntLike]) -> tuple[IntLike, ...]:
    """Strides of b, h and position out of those of a 3-D or 4-D tensor."""
    b, *h, length, _ = stride
    return (b, *(h or [0]), length)


def _mask_strides(mask: torch.Tensor, ndim: int) -> tuple[IntLike, ...]:
    """Strides of a broadcastable mask for b, h, query and key position; 0 along broadcast axes.

    A symbolic size is not 1: torch makes sizes 0 and 1 constants.
    """
    strides = [
        0 if isinstance(size, int) and size == 1 else stride
        for size, stride in zip(mask.shape, mask.stride(), strict=True)
    ]
    strides = [0] * (ndim - len(strides)) + strides
    return (strides[0], 0, *strides[1:]) if ndim == 3 else tuple(strides)


def _is_wide(key_strides: Sequence[IntLike], mask_key_stride: IntLike, block_n: int) -> bool:
    """May an offset inside a block of keys, or of a mask row, pass 2^31?  Unknown counts as yes."""
    narrow = all(isinstance(stride, int) and abs(stride) * block_n < 2**31 for stride in key_strides)
    return not (narrow and isinstance(mask_key_stride, int) and mask_key_stride in (0, 1))


# --- supports -----------------------------------------------------------------------------------------------

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _tensor_reason(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    if q.dim() not in (3, 4):
        return f"q has {q.dim()} dimensions, needs [batch, heads, length, head_dim] or [batch, length, head_dim]"
    for name, x in (("k", k), ("v", v)):
        if x.dim() != q.dim():
            return f"{name} has {x.dim()} dimensions, needs q's {q.dim()}"
        if x.dtype != q.dtype:
            return f"{name} is {x.dtype}, needs q's {q.dtype}"
        if x.device != q.device:
            return f"{name} is on {x.device}, needs q's device {q.device}"
    if q.dtype not in _DTYPES:
        return f"q is {q.dtype}, needs float16, bfloat16 or float32"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.layout != torch.strided:
            return f"{name} is {x.layout}, needs a strided tensor"
        if not statically_known_true(x.stride(-1) == 1):
            return f"{name} has stride {x.stride(-1)} along head_dim, needs 1"
    return None


def _shape_reason(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    batch, _, _, head_dim = _sizes(q)
    if not isinstance(head_dim, int) or not 16 <= head_dim <= 256 or head_dim % 8:
        return f"q has head_dim {head_dim}, needs a multiple of 8 from 16 to 256"
    for name, x in (("k", k), ("v", v)):
        if not statically_known_true(x.shape[-1] == head_dim):
            return f"{name} has head_dim {x.shape[-1]}, needs q's {head_dim}"
        if not statically_known_true(x.shape[0] == batch):
            return f"{name} has batch {x.shape[0]}, needs q's {batch}"
    if not statically_known_true(v.shape[-2] == k.shape[-2]):
        return f"v has length {v.shape[-2]}, needs k's {k.shape[-2]}"
    return None


def _head_reason(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> str | None:
    heads, heads_kv, heads_v = _sizes(q)[1], _sizes(k)[1], _sizes(v)[1]
    if not all(isinstance(count, int) for count in (heads, heads_kv, heads_v)):
        return "the number of heads is symbolic, needs a constant"
    if any(isinstance(size, int) and size == 0 for size in (*q.shape, heads_kv)):
        return "q has no elements, needs at least one"
    if heads_v != heads_kv:
        return f"v has {heads_v} heads, needs k's {heads_kv}"
    if enable_gqa and q.dim() == 3:
        return "enable_gqa with 3-D q, needs a head axis"
    if not enable_gqa and heads != heads_kv:
        return f"k has {heads_kv} heads, needs q's {heads} or enable_gqa"
    if heads % heads_kv:
        return f"q has {heads} heads, needs a multiple of k's {heads_kv}"
    return None


def _mask_reason(q: torch.Tensor, k: torch.Tensor, attn_mask: torch.Tensor, is_causal: bool) -> str | None:
    if is_causal:
        return "attn_mask together with is_causal, needs one of them"
    if attn_mask.dtype not in (torch.bool, torch.float32, q.dtype):
        return f"attn_mask is {attn_mask.dtype}, needs bool, float32 or q's {q.dtype}"
    if attn_mask.device != q.device:
        return f"attn_mask is on {attn_mask.device}, needs q's device {q.device}"
    if attn_mask.layout != torch.strided:
        return f"attn_mask is {attn_mask.layout}, needs a strided tensor"
    if not 1 <= attn_mask.dim() <= q.dim():
        return f"attn_mask has {attn_mask.dim()} dimensions, needs 1 to {q.dim()}"
    scores = (*q.shape[:-1], k.shape[-2])
    for size, full in zip(reversed(attn_mask.shape), reversed(scores), strict=False):
        if not statically_known_true(size == 1) and not statically_known_true(size == full):
            return f"attn_mask of shape {tuple(attn_mask.shape)}, needs one that broadcasts to {scores}"
    return None


def supports(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    out_order: Sequence[int] | None = None,
    *,
    target: Target,
) -> str | None:
    """None, or in one line which argument stands in the way and what would be needed.

    Works on fake and meta tensors and adds no guard on a symbolic size.
    """
    reason = (
        check_target(target)
        or _tensor_reason(q, k, v)
        or _shape_reason(q, k, v)
        or _head_reason(q, k, v, enable_gqa)
        or (None if attn_mask is None else _mask_reason(q, k, attn_mask, is_causal))
    )
    if reason is not None:
        return reason
    if out_order is not None and (sorted(out_order) != list(range(q.dim())) or out_order[-1] != q.dim() - 1):
        return f"out_order is {list(out_order)}, needs a permutation that ends with head_dim"
    if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
        return f"scale is {scale}, needs a finite constant"
    if _choose_config(q, k, attn_mask, is_causal, target)[1] is None:
        return f"head_dim {q.shape[-1]} in {q.dtype} needs more shared memory than {target.arch} has"
    return None


# --- plan ---------------------------------------------------------------------------------------------------


def _allow_tf32(q: torch.Tensor, target: Target) -> bool:
    """fp32 products follow torch's setting for matmuls."""
    if q.dtype != torch.float32 or target.backend != "cuda":
        return False
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    out_order: Sequence[int] | None = None,
    *,
    target: Target,
) -> Plan:
    """The launches for one call that ``supports`` accepts."""
    decode, config = _choose_config(q, k, attn_mask, is_causal, target)
    assert config is not None, "plan() is for calls that supports() accepts"
    out = Buffer(tuple(q.shape), q.dtype, dense_strides(q.shape, out_order))
    _, heads, len_q, head_dim = _sizes(q)
    _, heads_kv, len_k, _ = _sizes(k)
    has_mask = attn_mask is not None
    mask_strides = _mask_strides(attn_mask, q.dim()) if has_mask else (0, 0, 0, 0)
    strides = {
        "q": _row_strides(q.stride()),
        "k": _row_strides(k.stride()),
        "v": _row_strides(v.stride()),
        "m": mask_strides,
        "o": _row_strides(out.stride),
    }
    axes = {"q": "bhl", "k": "bhn", "v": "bhn", "m": "bhln", "o": "bhl"}
    args = {"q": "q", "k": "k", "v": "v", "mask": "attn_mask" if has_mask else None, "out": "out"}
    for name, values in strides.items():
        args |= {f"stride_{name}{axis}": value for axis, value in zip(axes[name], values, strict=True)}
    args |= {"group": heads // heads_kv, "len_q": len_q, "len_k": len_k}
    mask_per_row = any(not isinstance(stride, int) or stride != 0 for stride in mask_strides[1:3])
    constexprs = {
        "IS_CAUSAL": is_causal,
        "HAS_MASK": has_mask,
        "MASK_IS_BOOL": has_mask and attn_mask.dtype == torch.bool,
        "MASK_PER_ROW": mask_per_row,
        "SCALE": float(head_dim**-0.5 if scale is None else scale),
        "HEAD_DIM": head_dim,
        "BLOCK_D": next_power_of_two(head_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "WIDE": _is_wide((strides["k"][2], strides["v"][2]), mask_strides[3], config.block_n),
        "ALLOW_TF32": _allow_tf32(q, target),
        "NUM_WARPS": config.num_warps,
        "NUM_STAGES": config.num_stages,
    }
    if decode:
        mask_bytes = attn_mask.element_size() if has_mask else 0
        pieces = _pieces(config, constexprs["BLOCK_D"], q.element_size(), target)
        constexprs["PIECES"] = 1 if constexprs["ALLOW_TF32"] else pieces
        shared = _shared_bytes(config, constexprs["BLOCK_D"], q.element_size(), mask_bytes, target)
        return _decode_plan(q, k, out, args, constexprs, _resident_programs(config, shared, target))
    # Skipping reads the mask twice.  An additive mask with a value per score is large and seldom holds -inf.
    constexprs["SKIP_BLOCKS"] = constexprs["MASK_IS_BOOL"] or not mask_per_row
    grid = (ceil_div(len_q, config.block_m) * heads * q.shape[0], 1, 1)
    args["num_heads"] = heads
    launch = Launch(_prefill_kernel, grid, args, constexprs, config.num_warps, config.num_stages)
    why = f"more than {MAX_DECODE_ROWS} rows of queries read the keys of a head, so each block of them reads them anew"
    return Plan("portable.prefill", (launch,), {"out": out}, why=why)


def _decode_plan(q: torch.Tensor, k: torch.Tensor, out: Buffer, args: dict, constexprs: dict, resident: int) -> Plan:
    batch, heads, len_q, head_dim = _sizes(q)
    _, heads_kv, len_k, _ = _sizes(k)
    programs = batch * heads_kv * ceil_div(heads // heads_kv * len_q, constexprs["BLOCK_M"])
    visible = min(hint(len_k), hint(len_q)) if constexprs["IS_CAUSAL"] else hint(len_k)
    blocks = ceil_div(visible, constexprs["BLOCK_N"])
    splits = _num_splits(hint(programs), blocks, resident)
    part = Launch(
        _decode_kernel,
        (programs * splits, 1, 1),
        args | {"num_heads_kv": heads_kv, "weights": None},
        constexprs | {"NUM_SPLITS": splits},
        constexprs["NUM_WARPS"],
        constexprs["NUM_STAGES"],
    )
    work = f"{hint(programs)} programs for {resident} places, each with {blocks} block{'s' * (blocks != 1)} of keys"
    if splits == 1:
        why = f"few rows of queries; {work}: split, they would not finish sooner"
        return Plan("portable.decode", (part,), {"out": out}, why=why)

    row = splits * head_dim
    parts = {"out": "partial", "weights": "weights"}
    parts |= {"stride_ob": heads * len_q * row, "stride_oh": len_q * row, "stride_ol": row}
    merge_d = max(16, min(32, next_power_of_two(head_dim), _MERGE_ELEMENTS // next_power_of_two(splits)))
    merge = Launch(
        _merge_splits_kernel,
        (batch * heads * len_q * ceil_div(head_dim, merge_d), 1, 1),
        {name: args[name] for name in ("out", "stride_ob", "stride_oh", "stride_ol", "len_q")}
        | {"partial": "partial", "weights": "weights", "num_heads": heads},
        {"HEAD_DIM": head_dim, "BLOCK_D": merge_d, "NUM_SPLITS": splits, "PADDED_SPLITS": next_power_of_two(splits)},
    )
    scratch = {
        "partial": Buffer((batch, heads, len_q, splits, head_dim), torch.float32),
        "weights": Buffer((batch, heads, len_q, splits, 2), torch.float32),
    }
    launches = (dataclasses.replace(part, args=part.args | parts), merge)
    why = f"few rows of queries; {work}: split {splits} ways, they finish first"
    return Plan("portable.decode_split", launches, {"out": out}, scratch, why=why)


ATTENTION = define_operator(
    SCHEMA, reference=attention_reference, supports=supports, plan=plan, fake=attention_fake, autocast=True
)
