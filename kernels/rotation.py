"""What the rotating operators share: the meaning of a rotation, one Triton kernel, its configuration and its plan.

The kernel turns one tensor (``rope``) or queries and keys together (``qk_rope``), normalises each head before, and
writes the keys and copies the values into a cache (``qk_rope_append``), all in one launch.  A program has a few heads
of a few tokens and loads both elements of each pair by themselves, so that no element changes its thread: the tables
of a token are read once for all heads, and accesses are as wide as strides allow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .launch import Buffer, IntLike, Launch, Plan, ceil_div, dense_strides, hint, jit, next_power_of_two, tl
from .operator import check_target
from .rounding import DTYPE_NAMES, round_to, scale
from .target import Target

PAIRINGS = ("half", "interleaved")
MAX_HEAD_DIM = 1024


@dataclasses.dataclass(frozen=True)
class Turn:
    """How pairs are turned; the fields are the arguments of ``portable_ops::rope`` of the same names."""

    pairing: str
    out_pairing: str
    rotary_dim: int
    offset: int
    sections: int
    compute_dtype: torch.dtype
    product_dtype: torch.dtype
    out_dtype: torch.dtype


# --- meaning ------------------------------------------------------------------------------------------------


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Turn) -> torch.Tensor:
    """``x`` with its pairs turned; see ``rope_reference``.

    Raises ValueError for a pairing that does not exist and for sizes that do not fit.
    """
    rotary_dim, offset, sections = turn.rotary_dim, turn.offset, turn.sections
    if turn.pairing not in PAIRINGS or turn.out_pairing not in PAIRINGS:
        raise ValueError(f"pairing must be one of {PAIRINGS}, got {turn.pairing!r} and {turn.out_pairing!r}")
    if rotary_dim % (2 * sections) or offset + rotary_dim > x.shape[-1]:
        raise ValueError(f"{sections} sections in {rotary_dim} elements at {offset} do not fit {x.shape[-1]} elements")
    u, v = _pairs(x[..., offset : offset + rotary_dim].to(turn.compute_dtype), turn.pairing, sections)
    cos_u, cos_v = _table(cos.to(turn.compute_dtype), turn)
    sin_u, sin_v = _table(sin.to(turn.compute_dtype), turn)
    turned_u = (u * cos_u).to(turn.product_dtype) - (v * sin_u).to(turn.product_dtype)
    turned_v = (v * cos_v).to(turn.product_dtype) + (u * sin_v).to(turn.product_dtype)
    dim = -2 if turn.out_pairing == "half" else -1
    out = torch.stack((turned_u, turned_v), dim).flatten(-3).to(turn.out_dtype)
    if rotary_dim == x.shape[-1]:
        return out
    before, after = x[..., :offset], x[..., offset + rotary_dim :]
    return torch.cat((before.to(turn.out_dtype), out, after.to(turn.out_dtype)), -1)


def _pairs(x: torch.Tensor, pairing: str, sections: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second elements of the pairs, each (..., sections, pairs of a section)."""
    shape = (sections, 2, -1) if pairing == "half" else (sections, -1, 2)
    return x.unflatten(-1, shape).unbind(-2 if pairing == "half" else -1)


def _table(table: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
    """What multiplies the first and the second elements."""
    if table.shape[-1] == turn.rotary_dim:
        return _pairs(table, turn.out_pairing, turn.sections)
    per_pair = table.unflatten(-1, (turn.sections, -1))
    return per_pair, per_pair


# --- device code --------------------------------------------------------------------------------------------
# Parameter lists of device code stay in groups.
# fmt: off


@jit
def _load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0)


@jit
def _element(pair, SECOND: tl.constexpr, PAIRING: tl.constexpr, SECTION: tl.constexpr, PAIRS: tl.constexpr):
    """Where the first or second element of ``pair`` is; SECTION pairs make up a section."""
    if PAIRING == "interleaved":
        return 2 * pair + SECOND
    elif SECTION == PAIRS:
        return pair + SECOND * SECTION
    else:
        return pair // SECTION * (2 * SECTION) + pair % SECTION + SECOND * SECTION


@jit
def _scaled(
    x, weight,
    WEIGHT_OFFSET: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, NORM_DTYPE: tl.constexpr, SCALED_DTYPE: tl.constexpr,
    NORM_PRODUCT_DTYPE: tl.constexpr, NORM_OUT_DTYPE: tl.constexpr,
):
    """What follows the normalisation, in float32, rounded wherever the reference rounds."""
    y = scale(x, weight, WEIGHT_OFFSET, WEIGHT_DTYPE, NORM_DTYPE, SCALED_DTYPE, NORM_PRODUCT_DTYPE)
    return round_to(y, NORM_OUT_DTYPE)


@jit
def _load_pairs(
    row, pair, in_rows, in_pairs, STEP: tl.constexpr,
    PAIRING: tl.constexpr, SECTION: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):
    """The first and second elements of pairs, in float32; neighbours are loaded together and parted in registers.

    ``row``: pointers [tokens, heads, 1], also to what all heads share.  Loaded once for them, that would lie in other
    threads than theirs and go through shared memory behind a barrier.
    """
    row = tl.broadcast_to(row, [BLOCK_TOKENS, BLOCK_HEADS, 1])
    if PAIRING == "interleaved":
        both = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        if BLOCK_PAIRS != PAIRS:
            in_rows &= both < 2 * PAIRS
        loaded = _load(row + both * STEP, in_rows).to(tl.float32)
        u, v = tl.split(tl.reshape(loaded, [BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS, 2]))
    else:
        u = _load(row + _element(pair, 0, PAIRING, SECTION, PAIRS) * STEP, in_rows & in_pairs).to(tl.float32)
        v = _load(row + _element(pair, 1, PAIRING, SECTION, PAIRS) * STEP, in_rows & in_pairs).to(tl.float32)
    return u, v


@jit
def _store_pairs(
    out_row, u, v, pair, in_rows, in_pairs,
    PAIRING: tl.constexpr, SECTION: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):
    """Store what ``_load_pairs`` would load."""
    u = u.to(out_row.dtype.element_ty)
    v = v.to(out_row.dtype.element_ty)
    if PAIRING == "interleaved":
        both = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        if BLOCK_PAIRS != PAIRS:
            in_rows &= both < 2 * PAIRS
        tl.store(out_row + both, tl.reshape(tl.join(u, v), [BLOCK_TOKENS, BLOCK_HEADS, 2 * BLOCK_PAIRS]), mask=in_rows)
    else:
        tl.store(out_row + _element(pair, 0, PAIRING, SECTION, PAIRS), u, mask=in_rows & in_pairs)
        tl.store(out_row + _element(pair, 1, PAIRING, SECTION, PAIRS), v, mask=in_rows & in_pairs)


@jit
def _load_table(
    row, pair, in_rows, in_pairs, STEP: tl.constexpr, FULL: tl.constexpr, COMPUTE_DTYPE: tl.constexpr,
    PAIRING: tl.constexpr, SECTION: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):
    """What multiplies the first and the second elements of pairs, one value for both unless FULL."""
    if FULL:
        of_u, of_v = _load_pairs(
            row, pair, in_rows, in_pairs, STEP, PAIRING, SECTION, PAIRS, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS
        )
    else:
        row = tl.broadcast_to(row, [BLOCK_TOKENS, BLOCK_HEADS, 1])
        of_u = _load(row + pair * STEP, in_rows & in_pairs).to(tl.float32)
        of_v = of_u
    return round_to(of_u, COMPUTE_DTYPE), round_to(of_v, COMPUTE_DTYPE)


@jit
def _rotate_heads(
    x, out, weight, cos, sin, outer, inner, slot, in_tokens, in_slots, head_block,
    x_0, x_1, x_head, out_0, out_1, out_head, cos_0, cos_1, sin_0, sin_1,
    NUM_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, OFFSET: tl.constexpr, ROTARY_DIM: tl.constexpr, SECTION: tl.constexpr,
    PAIRING: tl.constexpr, OUT_PAIRING: tl.constexpr, FULL_TABLES: tl.constexpr,
    COS_STEP: tl.constexpr, SIN_STEP: tl.constexpr, COMPUTE_DTYPE: tl.constexpr, PRODUCT_DTYPE: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, WEIGHT_HEAD: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
    ROOT_DTYPE: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, NORM_DTYPE: tl.constexpr, SCALED_DTYPE: tl.constexpr,
    NORM_PRODUCT_DTYPE: tl.constexpr, NORM_OUT_DTYPE: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):
    """BLOCK_HEADS heads of BLOCK_TOKENS tokens of one tensor: [tokens, heads, pairs]."""
    PAIRS: tl.constexpr = ROTARY_DIM // 2
    head = (head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[None, :, None]
    in_rows = in_tokens
    if NUM_HEADS % BLOCK_HEADS != 0:
        in_rows &= head < NUM_HEADS
    x_row = x + (outer.to(tl.int64) * x_0 + inner.to(tl.int64) * x_1) + head.to(tl.int64) * x_head
    out_row = out + (outer.to(tl.int64) * out_0 + slot.to(tl.int64) * out_1) + head.to(tl.int64) * out_head
    cos_row = cos + (outer.to(tl.int64) * cos_0 + inner.to(tl.int64) * cos_1)
    sin_row = sin + (outer.to(tl.int64) * sin_0 + inner.to(tl.int64) * sin_1)
    pair = tl.arange(0, BLOCK_PAIRS)[None, None, :]
    in_pairs = tl.full([1, 1, 1], True, tl.int1)
    if BLOCK_PAIRS != PAIRS:
        in_pairs = pair < PAIRS

    u, v = _load_pairs(
        x_row + OFFSET, pair, in_rows, in_pairs, 1, PAIRING, SECTION, PAIRS, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS
    )
    cos_u, cos_v = _load_table(
        cos_row, pair, in_rows, in_pairs, COS_STEP, FULL_TABLES, COMPUTE_DTYPE, OUT_PAIRING, SECTION, PAIRS,
        BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS,
    )
    sin_u, sin_v = _load_table(
        sin_row, pair, in_rows, in_pairs, SIN_STEP, FULL_TABLES, COMPUTE_DTYPE, OUT_PAIRING, SECTION, PAIRS,
        BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS,
    )
    if ROTARY_DIM < HEAD_DIM:  # what passes through, on both sides of the rotary part
        other = tl.arange(0, BLOCK_REST)[None, None, :]
        in_rest = in_rows & (other < HEAD_DIM - ROTARY_DIM)
        other = tl.where(other < OFFSET, other, other + ROTARY_DIM)
        rest = _load(x_row + other, in_rest).to(tl.float32)

    if NORM:
        weight_u = None
        weight_v = None
        weight_rest = None
        if weight is not None:
            w = weight + head * WEIGHT_HEAD
            weight_u, weight_v = _load_pairs(
                w + OFFSET, pair, in_rows, in_pairs, 1, PAIRING, SECTION, PAIRS, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS
            )
            if ROTARY_DIM < HEAD_DIM:
                w = tl.broadcast_to(w, [BLOCK_TOKENS, BLOCK_HEADS, 1])
                weight_rest = _load(w + other, in_rest).to(tl.float32)
        squares = tl.sum(u * u + v * v, axis=2, keep_dims=True)
        if ROTARY_DIM < HEAD_DIM:
            squares += tl.sum(rest * rest, axis=2, keep_dims=True)
        root = round_to(tl.rsqrt(squares / HEAD_DIM + tl.full([], EPS, tl.float32)), ROOT_DTYPE)
        u = _scaled(
            u * root, weight_u, WEIGHT_OFFSET, WEIGHT_DTYPE, NORM_DTYPE, SCALED_DTYPE, NORM_PRODUCT_DTYPE,
            NORM_OUT_DTYPE,
        )
        v = _scaled(
            v * root, weight_v, WEIGHT_OFFSET, WEIGHT_DTYPE, NORM_DTYPE, SCALED_DTYPE, NORM_PRODUCT_DTYPE,
            NORM_OUT_DTYPE,
        )
        if ROTARY_DIM < HEAD_DIM:
            rest = _scaled(
                rest * root, weight_rest, WEIGHT_OFFSET, WEIGHT_DTYPE, NORM_DTYPE, SCALED_DTYPE, NORM_PRODUCT_DTYPE,
                NORM_OUT_DTYPE,
            )

    u = round_to(u, COMPUTE_DTYPE)
    v = round_to(v, COMPUTE_DTYPE)
    u_cos = round_to(round_to(u * cos_u, COMPUTE_DTYPE), PRODUCT_DTYPE)
    v_sin = round_to(round_to(v * sin_u, COMPUTE_DTYPE), PRODUCT_DTYPE)
    v_cos = round_to(round_to(v * cos_v, COMPUTE_DTYPE), PRODUCT_DTYPE)
    u_sin = round_to(round_to(u * sin_v, COMPUTE_DTYPE), PRODUCT_DTYPE)
    _store_pairs(
        out_row + OFFSET, round_to(u_cos - v_sin, PRODUCT_DTYPE), round_to(v_cos + u_sin, PRODUCT_DTYPE), pair,
        in_rows & in_slots, in_pairs, OUT_PAIRING, SECTION, PAIRS, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS,
    )
    if ROTARY_DIM < HEAD_DIM:
        tl.store(out_row + other, rest.to(out.dtype.element_ty), mask=in_rest & in_slots)


@jit
def _copy_heads(
    x, out, outer, inner, slot, in_tokens, in_slots, head_block, x_0, x_1, x_head, out_0, out_1, out_head,
    NUM_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):
    """The same heads of a tensor that is copied as it is."""
    head = (head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[None, :, None]
    column = tl.arange(0, BLOCK_DIM)[None, None, :]
    mask = in_tokens
    if NUM_HEADS % BLOCK_HEADS != 0:
        mask &= head < NUM_HEADS
    if BLOCK_DIM != HEAD_DIM:
        mask &= column < HEAD_DIM
    x_row = x + (outer.to(tl.int64) * x_0 + inner.to(tl.int64) * x_1) + head.to(tl.int64) * x_head
    out_row = out + (outer.to(tl.int64) * out_0 + slot.to(tl.int64) * out_1) + head.to(tl.int64) * out_head
    tl.store(out_row + column, _load(x_row + column, mask), mask=mask & in_slots)


@jit
def rotation_kernel(
    q, k, v, cos, sin, q_weight, k_weight, position, q_out, k_out, v_out,
    n_tokens, size_1, start, position_step, len_cache,
    q_0, q_1, q_head, k_0, k_1, k_head, v_0, v_1, v_head, cos_0, cos_1, sin_0, sin_1,
    q_out_0, q_out_1, q_out_head, k_out_0, k_out_1, k_out_head, v_out_0, v_out_1, v_out_head,
    TOKEN_DIMS: tl.constexpr, CONSECUTIVE: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, OFFSET: tl.constexpr, ROTARY_DIM: tl.constexpr, SECTION: tl.constexpr,
    PAIRING: tl.constexpr, OUT_PAIRING: tl.constexpr, FULL_TABLES: tl.constexpr,
    COS_STEP: tl.constexpr, SIN_STEP: tl.constexpr, COMPUTE_DTYPE: tl.constexpr, PRODUCT_DTYPE: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, Q_WEIGHT_HEAD: tl.constexpr, K_WEIGHT_HEAD: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr, ROOT_DTYPE: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, NORM_DTYPE: tl.constexpr,
    SCALED_DTYPE: tl.constexpr, NORM_PRODUCT_DTYPE: tl.constexpr, NORM_OUT_DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr, NUM_WARPS: tl.constexpr,
):
    """BLOCK_HEADS heads of q, k (K_HEADS above 0) or v (V_DIM above 0) of BLOCK_TOKENS tokens.

    A token is ``(outer, inner)`` with ``inner`` below ``size_1``; strides ``_0`` and ``_1`` are theirs.  With v, k_out
    and v_out are caches, and ``position`` and ``start`` say where ``inner`` lies in them; what lies
    outside is not written.
    """
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    K_BLOCKS: tl.constexpr = (K_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + K_BLOCKS + (K_BLOCKS if V_DIM > 0 else 0)
    program = tl.program_id(0)
    head_block = program % BLOCKS
    token = (program // BLOCKS * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS))[:, None, None]
    always = tl.full([1, 1, 1], True, tl.int1)  # the compiler drops masks that are made of nothing else
    in_tokens = always
    if BLOCK_TOKENS > 1:
        in_tokens = token < n_tokens
    if TOKEN_DIMS == 2:
        outer = token // size_1
        inner = token % size_1
    else:
        outer = token * 0
        inner = token

    if head_block < Q_BLOCKS:
        _rotate_heads(
            q, q_out, q_weight, cos, sin, outer, inner, inner, in_tokens, always, head_block,
            q_0, q_1, q_head, q_out_0, q_out_1, q_out_head, cos_0, cos_1, sin_0, sin_1,
            Q_HEADS, BLOCK_TOKENS, BLOCK_HEADS, HEAD_DIM, OFFSET, ROTARY_DIM, SECTION, PAIRING, OUT_PAIRING,
            FULL_TABLES, COS_STEP, SIN_STEP, COMPUTE_DTYPE, PRODUCT_DTYPE, NORM, EPS, Q_WEIGHT_HEAD, WEIGHT_OFFSET,
            ROOT_DTYPE, WEIGHT_DTYPE, NORM_DTYPE, SCALED_DTYPE, NORM_PRODUCT_DTYPE, NORM_OUT_DTYPE,
            BLOCK_PAIRS, BLOCK_REST,
        )
    elif K_HEADS > 0:
        slot = inner
        in_slots = always
        if V_DIM > 0:
            slot = inner.to(tl.int64) + start
            if position is not None:
                if CONSECUTIVE:
                    slot += tl.load(position).to(tl.int64)
                else:
                    slot = _load(position + inner * position_step, in_tokens).to(tl.int64)
            slot = tl.where(slot < 0, slot + len_cache, slot)
            in_slots = (slot >= 0) & (slot < len_cache)
        if head_block < Q_BLOCKS + K_BLOCKS:
            _rotate_heads(
                k, k_out, k_weight, cos, sin, outer, inner, slot, in_tokens, in_slots, head_block - Q_BLOCKS,
                k_0, k_1, k_head, k_out_0, k_out_1, k_out_head, cos_0, cos_1, sin_0, sin_1,
                K_HEADS, BLOCK_TOKENS, BLOCK_HEADS, HEAD_DIM, OFFSET, ROTARY_DIM, SECTION, PAIRING, OUT_PAIRING,
                FULL_TABLES, COS_STEP, SIN_STEP, COMPUTE_DTYPE, PRODUCT_DTYPE, NORM, EPS, K_WEIGHT_HEAD, WEIGHT_OFFSET,
                ROOT_DTYPE, WEIGHT_DTYPE, NORM_DTYPE, SCALED_DTYPE, NORM_PRODUCT_DTYPE, NORM_OUT_DTYPE,
                BLOCK_PAIRS, BLOCK_REST,
            )
        elif V_DIM > 0:
            _copy_heads(
                v, v_out, outer, inner, slot, in_tokens, in_slots, head_block - Q_BLOCKS - K_BLOCKS,
                v_0, v_1, v_head, v_out_0, v_out_1, v_out_head, K_HEADS, BLOCK_HEADS, V_DIM, BLOCK_V_DIM,
            )


# fmt: on


# --- configuration ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RotationConfig:
    """What a program does: ``block_heads`` heads of ``block_tokens`` tokens (powers of two)."""

    block_tokens: int
    block_heads: int
    num_warps: int


def choose_config(n_tokens: int, q_heads: int, k_heads: int, head_dim: int, target: Target) -> RotationConfig:
    """The configuration for ``n_tokens`` (a hint), counted in bytes of one head and threads.

    Few tokens: one access a thread in as many programs as can be.  From a sweep on an H200 (bf16, 32/8 and 32/32 heads
    of 128, CUDA graphs, cold L2): 64 tokens 5.6 us in programs of 4 heads, 6.0 in programs of 8; 16384 tokens within
    1 % of the best of 40.
    """
    vectors = max(1, next_power_of_two(head_dim) // 8)  # accesses of 16 bytes for one head of a short type
    accesses = 64 if _is_few(n_tokens, q_heads, k_heads, target) else 128
    block_heads = min(next_power_of_two(max(q_heads, k_heads)), max(1, accesses // vectors))
    while block_heads > 1 and sum(-heads % block_heads for heads in (q_heads, k_heads)) * 4 > q_heads + k_heads:
        block_heads //= 2  # a quarter of the rows at most is beside the heads
    threads = max(target.warp_size, block_heads * vectors // 2)
    return RotationConfig(1, block_heads, max(1, min(8, next_power_of_two(threads) // target.warp_size)))


def _is_few(n_tokens: IntLike, q_heads: int, k_heads: int, target: Target) -> bool:
    """Whether programs are too few for all processors to be busy."""
    return hint(n_tokens) * (q_heads + k_heads) <= 64 * target.num_processors


# --- supports and plan --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Norm:
    """An RMSNorm of each head in front; fields as the arguments of ``portable_ops::rms_norm``."""

    eps: float
    weight_offset: float
    root_dtype: torch.dtype
    weight_dtype: torch.dtype
    norm_dtype: torch.dtype
    product_dtype: torch.dtype
    out_dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Append:
    """Where the keys and values of a call go: caches whose dimensions lie as ``order`` says in those of k.

    ``position``: 0-d, the position of the first token beside ``start``; 1-d: of each; None: ``start`` alone.
    ``dim``: the dimension of k along which tokens have positions.
    """

    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    position: torch.Tensor | None
    start: int
    dim: int


@dataclasses.dataclass(frozen=True)
class Rotation:
    """One call: ``xs`` (one tensor, or queries and keys) by the names of operands, and what happens to them."""

    xs: Mapping[str, torch.Tensor]
    cos: torch.Tensor
    sin: torch.Tensor
    turn: Turn
    orders: Mapping[str, Sequence[int] | None]
    norm: Norm | None = None
    weights: Mapping[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    append: Append | None = None

    @property
    def first(self) -> torch.Tensor:
        return next(iter(self.xs.values()))

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos, self.sin

    def tensors(self) -> dict[str, torch.Tensor]:
        """All floating-point operands by name."""
        named = {**self.xs, "cos": self.cos, "sin": self.sin, **self.weights}
        if self.append is not None:
            named |= {"v": self.append.v, "k_cache": self.append.k_cache, "v_cache": self.append.v_cache}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def heads_dim(xs: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> int | None:
    """The dimension that counts heads: where the tensors differ in size, else the last in which tables are repeated.

    None if there is none: every row has an angle of its own.  Raises ValueError where the tensors do not fit together.
    """
    first = xs[0]
    if any(x.dim() != first.dim() for x in xs):
        raise ValueError("q and k have different numbers of dimensions")
    repeated = [d for d in range(first.dim() - 1) if all(_is_repeated(t, first, d) for t in tables)]
    differ = [d for d in range(first.dim()) if not all(statically_known_true(x.shape[d] == first.shape[d]) for x in xs)]
    if differ:
        if len(differ) > 1 or differ[0] not in repeated:
            raise ValueError("q and k differ in more than the number of heads")
        return differ[0]
    long = [d for d in repeated if not statically_known_true(first.shape[d] == 1)]
    return (long or repeated or [None])[-1]


def _is_repeated(table: torch.Tensor, x: torch.Tensor, dim: int) -> bool:
    """Whether ``table`` has one row for all of ``dim`` of ``x``."""
    own = dim - (x.dim() - table.dim())
    return own < 0 or statically_known_true(table.shape[own] == 1)


def token_dims(rotation: Rotation, heads: int | None) -> list[int]:
    """The other dimensions: those of positions in a cache last, those of one element left out."""
    x, append = rotation.first, rotation.append
    along = None if append is None else append.dim
    dims = [d for d in range(x.dim() - 1) if d != heads and d != along and not statically_known_true(x.shape[d] == 1)]
    return dims if along is None else [*dims, along]


def rotation_supports(rotation: Rotation, target: Target) -> str | None:
    """None, or in one line which argument stands in the way and what would be needed."""
    return (
        check_target(target)
        or _check_types(rotation)
        or _check_tables(rotation)
        or _check_rows(rotation)
        or _check_weights(rotation)
        or _check_append(rotation)
    )


def _check_types(rotation: Rotation) -> str | None:
    for name, tensor in rotation.tensors().items():
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES:
            return f"{name} is {tensor.dtype}, needs a strided tensor of {', '.join(DTYPE_NAMES.values())}"
        if tensor.device != rotation.first.device:
            return f"{name} is on {tensor.device}, not on {rotation.first.device}"
    turn, norm = rotation.turn, rotation.norm
    dtypes = [turn.compute_dtype, turn.product_dtype, turn.out_dtype]
    if norm is not None:
        dtypes += [norm.root_dtype, norm.weight_dtype, norm.norm_dtype, norm.product_dtype, norm.out_dtype]
        if not (math.isfinite(norm.eps) and math.isfinite(norm.weight_offset)):
            return "eps or the weight offset is not finite"
    wrong = next((dtype for dtype in dtypes if dtype not in DTYPE_NAMES), None)
    return None if wrong is None else f"rounds to {wrong}, needs one of {', '.join(DTYPE_NAMES.values())}"


def _check_rows(rotation: Rotation) -> str | None:
    for name, tensor in rotation.xs.items():
        if not isinstance(tensor.shape[-1], int) or tensor.shape[-1] > MAX_HEAD_DIM:
            return f"{name} has heads of {tensor.shape[-1]} elements, needs a constant of at most {MAX_HEAD_DIM}"
        if not statically_known_true(tensor.stride(-1) == 1):
            return f"the last dimension of {name} is not contiguous"
        if statically_known_true(tensor.numel() == 0):
            return f"{name} is empty"
        if hint(tensor.numel()) // tensor.shape[-1] >= 2**31:
            return f"{name} has 2^31 rows or more"
    try:
        heads = heads_dim(list(rotation.xs.values()), rotation.tables)
    except ValueError as reason:
        return str(reason)
    sizes = [1 if heads is None else tensor.shape[heads] for tensor in rotation.xs.values()]
    if not all(isinstance(size, int) for size in sizes):
        return "the number of heads is dynamic"
    if len(token_dims(rotation, heads)) > 2:
        return f"{rotation.first.dim()} dimensions, of which more than two count tokens"
    return None


def _check_tables(rotation: Rotation) -> str | None:
    widths = {table.shape[-1] for table in rotation.tables}
    if len(widths) > 1 or not widths <= {rotation.turn.rotary_dim, rotation.turn.rotary_dim // 2}:
        return f"cos and sin have {rotation.cos.shape[-1]} and {rotation.sin.shape[-1]} columns"
    if not all(isinstance(table.stride(-1), int) for table in rotation.tables):
        return "the columns of cos or sin lie at a dynamic distance"
    if any(table.dim() > rotation.first.dim() for table in rotation.tables):
        return "cos and sin have more dimensions than what they turn"
    return None


def _check_weights(rotation: Rotation) -> str | None:
    heads = heads_dim(list(rotation.xs.values()), rotation.tables)
    for name, weight in rotation.weights.items():
        if weight is None:
            continue
        shape = rotation.xs[name[0]].shape
        allowed = [shape[-1]] if heads is None else [shape[-1], shape[-1] * shape[heads]]
        if weight.dim() != 1 or weight.shape[0] not in allowed or not statically_known_true(weight.stride(0) == 1):
            return f"{name} has shape {tuple(weight.shape)}, needs contiguous [{shape[-1]}], or that for each head"
    return None


def _check_append(rotation: Rotation) -> str | None:
    append = rotation.append
    if append is None:
        return None
    k, heads = rotation.xs["k"], heads_dim(list(rotation.xs.values()), rotation.tables)
    if append.dim == heads or not 0 <= append.dim < k.dim() - 1:
        return f"positions along dimension {append.dim} of k, which does not count tokens"
    for name, value, cache in (("k_cache", k, append.k_cache), ("v_cache", append.v, append.v_cache)):
        if value.dim() != k.dim() or cache.dim() != k.dim():
            return f"{name} has {cache.dim()} dimensions, needs those of k, {k.dim()}"
        same = [d for d in range(k.dim() - 1) if d != append.dim]
        fits = all(statically_known_true(a.shape[d] == k.shape[d]) for a in (value, cache) for d in same)
        fits = fits and statically_known_true(value.shape[append.dim] == k.shape[append.dim])
        if not fits or not statically_known_true(cache.shape[-1] == value.shape[-1]):
            return f"{name} has shape {tuple(cache.shape)}, which does not fit {tuple(value.shape)}"
        if not statically_known_true(cache.stride(-1) == 1) or not statically_known_true(value.stride(-1) == 1):
            return f"the last dimension of {name} or of what goes there is not contiguous"
        if not isinstance(cache.shape[append.dim], int):
            return f"the length of {name} is dynamic"
    if append.k_cache.dtype != rotation.turn.out_dtype or append.v.dtype != append.v_cache.dtype:
        return "the caches have other types than what goes there"
    if append.k_cache.shape[append.dim] != append.v_cache.shape[append.dim]:
        return "the caches have different lengths"
    if not isinstance(append.v.shape[-1], int) or append.v.shape[-1] > MAX_HEAD_DIM:
        return f"v has heads of {append.v.shape[-1]} elements, needs a constant of at most {MAX_HEAD_DIM}"
    return _check_position(append.position, k)


def _check_position(position: torch.Tensor | None, k: torch.Tensor) -> str | None:
    if position is None:
        return None
    if position.dtype not in (torch.int32, torch.int64) or position.dim() > 1:
        return f"position is {position.dtype} with {position.dim()} dimensions, needs int32 or int64 with 0 or 1"
    return None if position.device == k.device else f"position is on {position.device}, not on {k.device}"


def rotation_plan(rotation: Rotation, target: Target, variant: str, config: RotationConfig | None = None) -> Plan:
    """The launch of a call that ``rotation_supports``; ``config`` overrides the choice, for sweeps."""
    x, turn, append = rotation.first, rotation.turn, rotation.append
    names = list(rotation.xs)
    heads = heads_dim(list(rotation.xs.values()), rotation.tables)
    dims = token_dims(rotation, heads)
    n_tokens = math.prod(x.shape[d] for d in dims)
    q, k = x, rotation.xs[names[-1]]
    q_heads = 1 if heads is None else q.shape[heads]
    k_heads = 0 if len(names) == 1 else 1 if heads is None else k.shape[heads]
    if config is None:
        config = choose_config(hint(n_tokens), q_heads, k_heads, x.shape[-1], target)

    outputs = {
        f"{name}_out": Buffer(tuple(t.shape), turn.out_dtype, dense_strides(t.shape, rotation.orders[name]))
        for name, t in rotation.xs.items()
        if name in rotation.orders
    }
    places = {name: buffer.stride for name, buffer in outputs.items()}
    out_names = {"q": f"{names[0]}_out", "k": f"{names[-1]}_out" if k_heads else None, "v": None}
    if append is not None:
        out_names |= {"k": "k_cache", "v": "v_cache"}
        places |= {"k_cache": append.k_cache.stride(), "v_cache": append.v_cache.stride()}
    strides = {
        "q": q.stride(),
        "k": k.stride(),
        "v": k.stride() if append is None else append.v.stride(),
        "cos": _broadcast_strides(rotation.cos, x),
        "sin": _broadcast_strides(rotation.sin, x),
        **{f"{role}_out": places.get(name, q.stride()) for role, name in out_names.items()},
    }
    args: dict[str, str | IntLike | None] = {
        "q": names[0],
        "k": names[-1] if k_heads else None,
        "v": None if append is None else "v",
        "cos": "cos",
        "sin": "sin",
        "q_weight": "q_weight" if rotation.weights.get("q_weight") is not None else None,
        "k_weight": "k_weight" if rotation.weights.get("k_weight") is not None else None,
        "position": None if append is None or append.position is None else "position",
        **{f"{role}_out": name for role, name in out_names.items()},
        "n_tokens": n_tokens,
        "size_1": x.shape[dims[-1]] if dims else 1,
        **_cache_numbers(append),
    }
    for role, steps in strides.items():
        at = ([0, 0] + [steps[d] for d in dims])[-2:]
        args |= {f"{role}_0": at[0], f"{role}_1": at[1]}
        if role not in ("cos", "sin"):
            args[f"{role}_head"] = 0 if heads is None else steps[heads]
    constexprs = {
        "TOKEN_DIMS": max(1, len(dims)),
        "CONSECUTIVE": append is not None and (append.position is None or append.position.dim() == 0),
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "HEAD_DIM": x.shape[-1],
        "V_DIM": 0 if append is None else append.v.shape[-1],
        "OFFSET": turn.offset,
        "ROTARY_DIM": turn.rotary_dim,
        "SECTION": turn.rotary_dim // turn.sections // 2,
        "PAIRING": turn.pairing,
        "OUT_PAIRING": turn.out_pairing,
        "FULL_TABLES": rotation.cos.shape[-1] == turn.rotary_dim,
        "COS_STEP": rotation.cos.stride(-1),
        "SIN_STEP": rotation.sin.stride(-1),
        "COMPUTE_DTYPE": DTYPE_NAMES[turn.compute_dtype],
        "PRODUCT_DTYPE": DTYPE_NAMES[turn.product_dtype],
        **_norm_constexprs(rotation),
        "BLOCK_TOKENS": config.block_tokens,
        "BLOCK_HEADS": config.block_heads,
        "BLOCK_PAIRS": next_power_of_two(turn.rotary_dim // 2),
        "BLOCK_REST": next_power_of_two(x.shape[-1] - turn.rotary_dim),
        "BLOCK_V_DIM": 1 if append is None else next_power_of_two(append.v.shape[-1]),
        "NUM_WARPS": config.num_warps,
    }
    blocks = ceil_div(q_heads, config.block_heads)
    blocks += ceil_div(k_heads, config.block_heads) * (1 if append is None else 2)
    grid = (ceil_div(n_tokens, config.block_tokens) * blocks,)
    launch = Launch(rotation_kernel, grid, args, constexprs, config.num_warps)
    tokens = "few" if _is_few(n_tokens, q_heads, k_heads, target) else "many"
    why = f"{config.block_heads} heads to a program: {tokens} tokens"
    mutated = () if append is None else ("k_cache", "v_cache")
    return Plan(variant, (launch,), outputs, mutated=mutated, why=why)


def _cache_numbers(append: Append | None) -> dict[str, IntLike]:
    if append is None:
        return {"start": 0, "position_step": 0, "len_cache": 0}
    position = append.position
    return {
        "start": append.start,
        "position_step": 0 if position is None or position.dim() == 0 else position.stride(0),
        "len_cache": append.k_cache.shape[append.dim],
    }


def _norm_constexprs(rotation: Rotation) -> dict[str, str | float | bool | int]:
    norm, head_dim = rotation.norm, rotation.first.shape[-1]
    if norm is None:
        plain = dict.fromkeys(
            ("ROOT_DTYPE", "WEIGHT_DTYPE", "NORM_DTYPE", "SCALED_DTYPE", "NORM_PRODUCT_DTYPE", "NORM_OUT_DTYPE"), "fp32"
        )
        return {"NORM": False, "EPS": 0.0, "WEIGHT_OFFSET": 0.0, "Q_WEIGHT_HEAD": 0, "K_WEIGHT_HEAD": 0, **plain}
    per_head = {
        name: head_dim if weight is not None and weight.shape[0] != head_dim else 0
        for name, weight in rotation.weights.items()
    }
    weighted = any(weight is not None for weight in rotation.weights.values())
    scaled = torch.promote_types(norm.norm_dtype, norm.weight_dtype) if weighted else norm.norm_dtype
    return {
        "NORM": True,
        "EPS": float(norm.eps),
        "Q_WEIGHT_HEAD": per_head.get("q_weight", 0),
        "K_WEIGHT_HEAD": per_head.get("k_weight", 0),
        "WEIGHT_OFFSET": float(norm.weight_offset),
        "ROOT_DTYPE": DTYPE_NAMES[norm.root_dtype],
        "WEIGHT_DTYPE": DTYPE_NAMES[norm.weight_dtype],
        "NORM_DTYPE": DTYPE_NAMES[norm.norm_dtype],
        "SCALED_DTYPE": DTYPE_NAMES[scaled],
        "NORM_PRODUCT_DTYPE": DTYPE_NAMES[norm.product_dtype],
        "NORM_OUT_DTYPE": DTYPE_NAMES[norm.out_dtype],
    }


def _broadcast_strides(table: torch.Tensor, x: torch.Tensor) -> list[IntLike]:
    """The strides of ``table`` along the dimensions of ``x``, 0 where it is repeated."""
    missing = x.dim() - table.dim()
    return [0 if _is_repeated(table, x, d) else table.stride(d - missing) for d in range(x.dim() - 1)]
