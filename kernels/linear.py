r"""Linear layers for few rows, as in decoding: ``y = x @ weight^T`` at the speed at which the weight can be read.

    linear        y = x @ weight^T
    qkv_linear    q, k, v = x @ q_weight^T, x @ k_weight^T, x @ v_weight^T            in one launch
    gated_linear  y = activation(x @ gate_weight^T) * (x @ up_weight^T)               in one launch

Shapes: x (M, K), weights (N, K) as ``torch.nn.Linear`` keeps them, results (M, N); M is at most MAX_ROWS.

With so few rows nothing but the weights' way from memory counts: each program reads whole rows of a weight, once,
with several blocks of them in flight, and nothing is split along K, so that there is nothing to add up in a second
launch.  Products and sums are fp32 and rounded once to the type of x.  ``gated_linear`` rounds both products to it as
the graph does, computes the activation in fp32, rounds it to ``act_dtype``, and the product to ``out_dtype``.

A result is bitwise reproducible; one row is summed in another order than several.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .activation import ACTIVATIONS, TILE_ACTIVATIONS, activate, activate_tile
from .launch import Buffer, IntLike, Launch, Plan, ceil_div, jit, tl
from .operator import check_target, define_operator
from .target import Target

MAX_ROWS = 16
"""One tile of the matrix units; with more rows the arithmetic begins to count and other tiles win."""


# --- meaning ------------------------------------------------------------------------------------------------


def linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight^T``: (M, K) and (N, K) give (M, N)."""
    return F.linear(x, weight)


def qkv_linear_reference(
    x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three products of ``x`` (M, K) with weights (N, K), whose N may differ."""
    return F.linear(x, q_weight), F.linear(x, k_weight), F.linear(x, v_weight)


def gated_linear_reference(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    act_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``activation(x @ gate_weight^T) * (x @ up_weight^T)``: (M, K) and twice (N, K) give (M, N).

    The activation is rounded once, to ``act_dtype``; the product is formed in the type to which torch promotes
    ``act_dtype`` and the type of x, and rounded to ``out_dtype``.

    Raises ValueError for an unknown activation.
    """
    gate = F.linear(x, gate_weight)
    wide = gate if gate.dtype == torch.float64 else gate.float()
    return (activate(wide, activation, alpha).to(act_dtype) * F.linear(x, up_weight)).to(out_dtype)


# --- device code --------------------------------------------------------------------------------------------
# Parameter lists of device code stay in groups.
# fmt: off


@jit
def _multiply_rows(
    x, weight, rows, len_m, len_k, stride_xm, stride_wn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """fp32 products of x with BLOCK_N ``rows`` of a weight: [BLOCK_N] for one row of x, else [BLOCK_M, BLOCK_N]."""
    offs_k = tl.arange(0, BLOCK_K)
    w_ptrs = weight + (rows.to(tl.int64) * stride_wn)[:, None] + offs_k[None, :]
    if BLOCK_M == 1:
        # A sum per element of the tile, added up across it at the end: no multiply waits for another.
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, len_k, BLOCK_K, num_stages=NUM_STAGES):
            if EVEN_K:
                w = tl.load(w_ptrs + start)
                x_row = tl.load(x + start + offs_k)
            else:
                inside = start + offs_k < len_k
                w = tl.load(w_ptrs + start, mask=inside[None, :], other=0.0)
                x_row = tl.load(x + start + offs_k, mask=inside, other=0.0)
            sums += w.to(tl.float32) * x_row.to(tl.float32)[None, :]
        return tl.sum(sums, axis=1)
    else:
        offs_m = tl.arange(0, BLOCK_M)
        x_ptrs = x + (offs_m.to(tl.int64) * stride_xm)[:, None] + offs_k[None, :]
        in_x = (offs_m < len_m)[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, len_k, BLOCK_K, num_stages=NUM_STAGES):
            if EVEN_K:
                w = tl.load(w_ptrs + start)
                x_tile = tl.load(x_ptrs + start, mask=in_x, other=0.0)
            else:
                inside = (start + offs_k < len_k)[None, :]
                w = tl.load(w_ptrs + start, mask=inside, other=0.0)
                x_tile = tl.load(x_ptrs + start, mask=in_x & inside, other=0.0)
            acc = tl.dot(x_tile, tl.trans(w), acc)
        return acc


@jit
def _store_rows(
    y, out, offs_n, len_m, len_n, stride_om, BLOCK_M: tl.constexpr,
):
    """Store what ``_multiply_rows`` gives for the columns ``offs_n`` of ``out``."""
    if BLOCK_M == 1:
        tl.store(out + offs_n, y.to(out.dtype.element_ty), mask=offs_n < len_n)
    else:
        offs_m = tl.arange(0, BLOCK_M)
        tl.store(
            out + (offs_m.to(tl.int64) * stride_om)[:, None] + offs_n[None, :], y.to(out.dtype.element_ty),
            mask=(offs_m < len_m)[:, None] & (offs_n < len_n)[None, :],
        )


@jit
def _linear_kernel(
    x, w_0, w_1, w_2, out_0, out_1, out_2, len_m, len_k, n_0, n_1, n_2,
    stride_xm, stride_w0, stride_w1, stride_w2,
    NUM_WEIGHTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr,
):
    """BLOCK_N columns of one of NUM_WEIGHTS (1 or 3) results, whose programs follow each other."""
    pid = tl.program_id(0)
    weight, out, len_n, stride_wn = w_0, out_0, n_0, stride_w0
    if NUM_WEIGHTS == 3:
        first_1 = tl.cdiv(n_0, BLOCK_N)
        first_2 = first_1 + tl.cdiv(n_1, BLOCK_N)
        in_1, in_2 = pid >= first_1, pid >= first_2
        weight = tl.where(in_2, w_2, tl.where(in_1, w_1, w_0))
        out = tl.where(in_2, out_2, tl.where(in_1, out_1, out_0))
        len_n = tl.where(in_2, n_2, tl.where(in_1, n_1, n_0))
        stride_wn = tl.where(in_2, stride_w2, tl.where(in_1, stride_w1, stride_w0))
        pid -= tl.where(in_2, first_2, tl.where(in_1, first_1, 0))
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(offs_n, len_n - 1)  # what is past the end is read again and not stored
    y = _multiply_rows(
        x, weight, rows, len_m, len_k, stride_xm, stride_wn, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, NUM_STAGES
    )
    _store_rows(y, out, offs_n, len_m, len_n, len_n, BLOCK_M)


@jit
def _gated_linear_kernel(
    x, w_gate, w_up, out, len_m, len_k, len_n, stride_xm, stride_wg, stride_wu,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, ACT_IS_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr,
):
    """BLOCK_N columns of the result: the same rows of both weights."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(offs_n, len_n - 1)
    gate = _multiply_rows(
        x, w_gate, rows, len_m, len_k, stride_xm, stride_wg, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, NUM_STAGES
    )
    up = _multiply_rows(
        x, w_up, rows, len_m, len_k, stride_xm, stride_wu, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, NUM_STAGES
    )
    short = x.dtype.element_ty
    act = activate_tile(gate.to(short).to(tl.float32), ACTIVATION, ALPHA)
    up = up.to(short).to(tl.float32)
    y = act * up if ACT_IS_WIDE else (act.to(short).to(tl.float32) * up).to(short)
    _store_rows(y, out, offs_n, len_m, len_n, len_n, BLOCK_M)


# fmt: on


# --- configuration ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    """Tile of one program: ``block_m`` rows of x, ``block_n`` rows of each weight, ``block_k`` columns at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# (one row of x, weights that a program reads one after the other) -> config.  Measured on an H200 for the layers of
# Llama 8B, among the best of 20 to 30 each; elsewhere the same as far as shared memory goes.
_CONFIGS = {
    (True, 1): LinearConfig(1, 16, 256, 4, 5),
    (True, 2): LinearConfig(1, 8, 512, 4, 4),
    (False, 1): LinearConfig(16, 32, 128, 4, 6),
    (False, 2): LinearConfig(16, 64, 128, 4, 4),
}


def _choose_config(len_m: int, num_weights: int, target: Target) -> LinearConfig:
    """The config for ``num_weights`` weights in one program, with as many stages as ``target`` has room for."""
    config = _CONFIGS[len_m == 1, num_weights]
    stage = (config.block_n + config.block_m) * config.block_k * 2
    stages = min(config.num_stages, target.shared_memory // stage)
    if target.backend == "hip":
        stages = min(stages, 2)  # AMD's compiler keeps the tile in flight in registers
    return dataclasses.replace(config, num_stages=max(1, stages))


# --- supports -----------------------------------------------------------------------------------------------


def _supports(x: torch.Tensor, weights: dict[str, torch.Tensor], target: Target) -> str | None:
    reasons = (_weight_reason(x, name, weight) for name, weight in weights.items())
    return check_target(target) or _x_reason(x) or next((reason for reason in reasons if reason is not None), None)


def _x_reason(x: torch.Tensor) -> str | None:
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"x is {x.dtype}, needs float16 or bfloat16"
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, needs [rows, in_features]"
    if not isinstance(x.shape[0], int) or not 1 <= x.shape[0] <= MAX_ROWS:
        return f"x has {x.shape[0]} rows, needs a constant from 1 to {MAX_ROWS}"
    if not isinstance(x.shape[1], int) or x.shape[1] == 0:
        return f"x has {x.shape[1]} columns, needs a constant of at least 1"
    if x.shape[1] % 16:
        return f"x has {x.shape[1]} columns, needs a multiple of 16"
    return _row_reason("x", x)


def _weight_reason(x: torch.Tensor, name: str, weight: torch.Tensor) -> str | None:
    if weight.dtype != x.dtype:
        return f"{name} is {weight.dtype}, needs x's {x.dtype}"
    if weight.device != x.device:
        return f"{name} is on {weight.device}, needs x's device {x.device}"
    if weight.dim() != 2 or not statically_known_true(weight.shape[1] == x.shape[1]):
        return f"{name} has shape {tuple(weight.shape)}, needs [out_features, {x.shape[1]}]"
    if not isinstance(weight.shape[0], int) or weight.shape[0] == 0:
        return f"{name} has {weight.shape[0]} rows, needs a constant of at least 1"
    return _row_reason(name, weight)


def _row_reason(name: str, tensor: torch.Tensor) -> str | None:
    if tensor.layout != torch.strided or not statically_known_true(tensor.stride(-1) == 1):
        return f"{name} has rows that are not contiguous, needs stride 1 along in_features"
    if not isinstance(tensor.stride(0), int) or tensor.stride(0) % 16:
        return f"{name} has rows {tensor.stride(0)} elements apart, needs a multiple of 16"
    if not isinstance(tensor.storage_offset(), int) or tensor.storage_offset() % 8:
        return f"{name} starts {tensor.storage_offset()} elements into its storage, needs a multiple of 8"
    return None


def linear_supports(x: torch.Tensor, weight: torch.Tensor, *, target: Target) -> str | None:
    """None, or in one line which argument stands in the way and what would be needed."""
    return _supports(x, {"weight": weight}, target)


def qkv_linear_supports(
    x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor, *, target: Target
) -> str | None:
    """None, or in one line which argument stands in the way and what would be needed."""
    return _supports(x, {"q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight}, target)


def gated_linear_supports(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    act_dtype: torch.dtype,
    out_dtype: torch.dtype,
    target: Target,
) -> str | None:
    """None, or in one line which argument stands in the way and what would be needed."""
    if activation not in ACTIVATIONS:
        return f"the activation {activation!r} is unknown, needs one of {', '.join(ACTIVATIONS)}"
    if activation not in TILE_ACTIVATIONS:
        return f"no kernel computes {activation}, needs one of {', '.join(TILE_ACTIVATIONS)}"
    for name, dtype in (("act_dtype", act_dtype), ("out_dtype", out_dtype)):
        if dtype not in (x.dtype, torch.float32):
            return f"{name} is {dtype}, needs x's {x.dtype} or float32"
    reason = _supports(x, {"gate_weight": gate_weight, "up_weight": up_weight}, target)
    if reason is None and gate_weight.shape != up_weight.shape:
        return f"up_weight has shape {tuple(up_weight.shape)}, needs gate_weight's {tuple(gate_weight.shape)}"
    return reason


# --- plan ---------------------------------------------------------------------------------------------------


def _tile(config: LinearConfig, len_k: int) -> dict[str, int | bool]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "EVEN_K": len_k % config.block_k == 0,
        "NUM_WARPS": config.num_warps,
        "NUM_STAGES": config.num_stages,
    }


def _why(len_m: int) -> str:
    if len_m == 1:
        return "one row: the weights are read once and multiplied as they come"
    return f"{len_m} rows, which are one tile of the matrix units: the weights are read once"


def _linear_plan(x: torch.Tensor, weights: dict[str, torch.Tensor], outputs: Sequence[str], target: Target) -> Plan:
    """One launch for one or three weights; a kernel of one reads the first weight only."""
    len_m, len_k = x.shape
    config = _choose_config(len_m, 1, target)
    named = list(weights.items())
    args: dict[str, str | IntLike | None] = {"x": "x", "len_m": len_m, "len_k": len_k, "stride_xm": x.stride(0)}
    for i in range(3):
        name, weight = named[min(i, len(named) - 1)]
        out = outputs[min(i, len(named) - 1)]
        args |= {f"w_{i}": name, f"out_{i}": out, f"n_{i}": weight.shape[0], f"stride_w{i}": weight.stride(0)}
    programs = sum(ceil_div(weight.shape[0], config.block_n) for weight in weights.values())
    constexprs = {"NUM_WEIGHTS": len(named), **_tile(config, len_k)}
    launch = Launch(_linear_kernel, (programs, 1, 1), args, constexprs, config.num_warps, config.num_stages)
    buffers = {
        out: Buffer((len_m, weight.shape[0]), x.dtype) for out, weight in zip(outputs, weights.values(), strict=True)
    }
    return Plan("portable.stream", (launch,), buffers, why=_why(len_m))


def linear_plan(x: torch.Tensor, weight: torch.Tensor, *, target: Target) -> Plan:
    """The launch for one call that ``linear_supports`` accepts."""
    return _linear_plan(x, {"weight": weight}, ["out"], target)


def qkv_linear_plan(
    x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor, *, target: Target
) -> Plan:
    """The launch for one call that ``qkv_linear_supports`` accepts."""
    return _linear_plan(x, {"q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight}, ["q", "k", "v"], target)


def gated_linear_plan(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    act_dtype: torch.dtype,
    out_dtype: torch.dtype,
    target: Target,
) -> Plan:
    """The launch for one call that ``gated_linear_supports`` accepts."""
    len_m, len_k = x.shape
    len_n = gate_weight.shape[0]
    config = _choose_config(len_m, 2, target)
    args = {
        "x": "x",
        "w_gate": "gate_weight",
        "w_up": "up_weight",
        "out": "out",
        "len_m": len_m,
        "len_k": len_k,
        "len_n": len_n,
        "stride_xm": x.stride(0),
        "stride_wg": gate_weight.stride(0),
        "stride_wu": up_weight.stride(0),
    }
    constexprs = {
        "ACTIVATION": activation,
        "ALPHA": float(alpha),
        "ACT_IS_WIDE": act_dtype == torch.float32,
        **_tile(config, len_k),
    }
    grid = (ceil_div(len_n, config.block_n), 1, 1)
    launch = Launch(_gated_linear_kernel, grid, args, constexprs, config.num_warps, config.num_stages)
    return Plan("portable.stream", (launch,), {"out": Buffer((len_m, len_n), out_dtype)}, why=_why(len_m))


LINEAR = define_operator(
    "portable_ops::linear(Tensor x, Tensor weight) -> Tensor",
    reference=linear_reference,
    supports=linear_supports,
    plan=linear_plan,
)
QKV_LINEAR = define_operator(
    "portable_ops::qkv_linear(Tensor x, Tensor q_weight, Tensor k_weight, Tensor v_weight) -> (Tensor, Tensor, Tensor)",
    reference=qkv_linear_reference,
    supports=qkv_linear_supports,
    plan=qkv_linear_plan,
)
GATED_LINEAR = define_operator(
    "portable_ops::gated_linear(Tensor x, Tensor gate_weight, Tensor up_weight, *, str activation='silu', "
    "float alpha=1.0, ScalarType act_dtype, ScalarType out_dtype) -> Tensor",
    reference=gated_linear_reference,
    supports=gated_linear_supports,
    plan=gated_linear_plan,
)
