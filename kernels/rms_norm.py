"""RMSNorm, alone (``rms_norm``) and with a residual addition in front (``add_rms_norm``).

    n   = x / sqrt(mean(x^2) + eps)          over the last dimension, in float32
    out = n * (weight + weight_offset) + bias

The spellings of RMSNorm in the wild differ in where they round to a short type.  Here every rounding point
is an argument (``root_dtype``, ``weight_dtype``, ``norm_dtype``, ``product_dtype``, ``out_dtype``), so one operator
can stand for all of them, bit for bit up to the order of the sum.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .launch import Buffer, IntLike, Launch, Plan, ceil_div, hint, jit, merged_dims, next_power_of_two, tl
from .operator import check_target, define_operator
from .rounding import DTYPE_NAMES, round_to, scale
from .target import Target

MAX_COLS = 65536
"""The widest row.  One program reduces one row, so wider rows would leave most of a GPU idle."""

_MAX_OUTER_DIMS = 3


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 0.0,
    eps_tensor: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    weight_dtype: torch.dtype,
    norm_dtype: torch.dtype,
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
    root_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """RMSNorm of the last dimension of ``x`` [..., hidden_size]; the result is contiguous, of ``out_dtype``.

    ``weight``, ``bias``: [hidden_size] or None.  For ``x`` [..., groups, hidden_size] the weight may be that of the
    ungrouped dimension, [groups * hidden_size].  ``eps_tensor``: 0-d, replaces ``eps``.  ``weight_offset`` is
    added to the weight in ``weight_dtype`` (Gemma's ``1 + w``).  The inverse root is rounded to ``root_dtype``
    (float32 if None), the normalised value to ``norm_dtype``, its product with the weight is formed in the type to
    which torch promotes the two and rounded to ``product_dtype``, the sum with the bias likewise to ``out_dtype``.
    """
    f = x.float()
    root = torch.rsqrt(torch.mean(f * f, -1, keepdim=True) + (eps if eps_tensor is None else eps_tensor))
    y = (f * root.to(root_dtype or torch.float32)).to(norm_dtype)
    if weight is not None:
        w = weight.to(weight_dtype)
        if weight.shape[0] != x.shape[-1]:
            w = w.view(x.shape[-2:])
        y = y * (w + weight_offset if weight_offset else w)
    y = y.to(product_dtype)
    if bias is not None:
        y = y + bias
    return _contiguous(y.to(out_dtype))


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 0.0,
    eps_tensor: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    weight_dtype: torch.dtype,
    norm_dtype: torch.dtype,
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
    root_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm_reference(sum, ...), sum)`` with ``sum = x + residual`` in torch's promoted type."""
    total = _contiguous(x + residual)
    out = rms_norm_reference(
        total,
        weight,
        bias,
        eps=eps,
        eps_tensor=eps_tensor,
        weight_offset=weight_offset,
        weight_dtype=weight_dtype,
        norm_dtype=norm_dtype,
        product_dtype=product_dtype,
        out_dtype=out_dtype,
        root_dtype=root_dtype,
    )
    return out, total


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """With the strides of a fresh tensor; ``contiguous`` alone keeps odd strides of dimensions of size 1."""
    return tensor.contiguous().view(tensor.shape)


def rms_norm_supports(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 0.0,
    eps_tensor: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    weight_dtype: torch.dtype,
    norm_dtype: torch.dtype,
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
    root_dtype: torch.dtype | None = None,
    target: Target,
) -> str | None:
    """None, or why the kernels here cannot compute ``rms_norm_reference`` of these arguments."""
    return (
        check_target(target)
        or _check_numbers(eps, weight_offset, (root_dtype, weight_dtype, norm_dtype, product_dtype, out_dtype))
        or _check_rows("x", x)
        or _check_vector("weight", weight, x, _groups(weight, x))
        or _check_vector("bias", bias, x)
        or _check_eps_tensor(eps_tensor, x)
        or _check_outer_dims(x)
    )


def add_rms_norm_supports(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 0.0,
    eps_tensor: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    weight_dtype: torch.dtype,
    norm_dtype: torch.dtype,
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
    root_dtype: torch.dtype | None = None,
    target: Target,
) -> str | None:
    """None, or why the kernels here cannot compute ``add_rms_norm_reference`` of these arguments."""
    return (
        check_target(target)
        or _check_numbers(eps, weight_offset, (root_dtype, weight_dtype, norm_dtype, product_dtype, out_dtype))
        or _check_rows("x", x)
        or _check_rows("residual", residual)
        or _check_residual(x, residual)
        or _check_vector("weight", weight, x, _groups(weight, x))
        or _check_vector("bias", bias, x)
        or _check_eps_tensor(eps_tensor, x)
        or _check_outer_dims(x, residual)
    )


def _check_numbers(eps: float, weight_offset: float, dtypes: tuple[torch.dtype | None, ...]) -> str | None:
    if not (math.isfinite(eps) and math.isfinite(weight_offset)):
        return "eps or the weight offset is not finite"
    for dtype in dtypes:
        if dtype is not None and dtype not in DTYPE_NAMES:
            return f"rounds to {_short(dtype)}; the kernel knows {_known_dtypes()}"
    return None


def _check_dtype(name: str, tensor: torch.Tensor) -> str | None:
    if tensor.layout is not torch.strided:
        return f"{name} is not a strided tensor"
    if tensor.dtype not in DTYPE_NAMES:
        return f"{name} is {_short(tensor.dtype)}; the kernel takes {_known_dtypes()}"
    return None


def _check_rows(name: str, tensor: torch.Tensor) -> str | None:
    reason = _check_dtype(name, tensor)
    if reason is not None:
        return reason
    if tensor.dim() == 0:
        return f"{name} has no dimension to normalise"
    n_cols = tensor.shape[-1]
    if isinstance(n_cols, torch.SymInt):
        return f"the hidden size of {name} is dynamic"
    if n_cols > MAX_COLS:
        return f"the hidden size {n_cols} is above {MAX_COLS}"
    if statically_known_true(tensor.numel() == 0):
        return f"{name} is empty"
    if n_cols > 1 and not statically_known_true(tensor.stride(-1) == 1):
        return f"the last dimension of {name} is not contiguous"
    if hint(tensor.numel() // n_cols) >= 2**31:
        return f"{name} has 2^31 rows or more"
    return None


def _check_residual(x: torch.Tensor, residual: torch.Tensor) -> str | None:
    if x.device != residual.device:
        return f"x is on {x.device}, residual on {residual.device}"
    if x.dim() != residual.dim() or not all(
        statically_known_true(a == b) for a, b in zip(x.shape, residual.shape, strict=True)
    ):
        return "x and residual differ in shape"
    return None


def _groups(weight: torch.Tensor | None, x: torch.Tensor) -> int:
    """How many neighbouring rows of ``x`` have weights of their own; 1 unless the weight is the ungrouped one."""
    if weight is None or weight.dim() != 1 or x.dim() < 2 or not isinstance(x.shape[-2], int):
        return 1
    return x.shape[-2] if weight.shape[0] == x.shape[-2] * x.shape[-1] else 1


def _check_vector(name: str, vector: torch.Tensor | None, x: torch.Tensor, groups: int = 1) -> str | None:
    if vector is None:
        return None
    if vector.device != x.device:
        return f"x is on {x.device}, {name} on {vector.device}"
    if vector.dim() != 1 or vector.shape[0] != groups * x.shape[-1]:
        return f"{name} has shape {tuple(vector.shape)}, not ({x.shape[-1]},)"
    if vector.shape[0] > 1 and not statically_known_true(vector.stride(0) == 1):
        return f"{name} is not contiguous"
    return _check_dtype(name, vector)


def _check_eps_tensor(eps_tensor: torch.Tensor | None, x: torch.Tensor) -> str | None:
    if eps_tensor is None:
        return None
    if eps_tensor.device != x.device:
        return f"x is on {x.device}, eps on {eps_tensor.device}"
    if eps_tensor.dim() != 0:
        return f"eps is a tensor with {eps_tensor.dim()} dimensions, not 0"
    if eps_tensor.dtype not in (*DTYPE_NAMES, torch.float64):
        return f"eps is {_short(eps_tensor.dtype)}, not a float"
    return None


def _check_outer_dims(*tensors: torch.Tensor) -> str | None:
    n_dims = len(_outer_dims(*tensors)[0])
    if n_dims > _MAX_OUTER_DIMS:
        return f"the rows lie in memory along {n_dims} strides, more than {_MAX_OUTER_DIMS}"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _known_dtypes() -> str:
    return ", ".join(_short(dtype) for dtype in DTYPE_NAMES)


@jit
def _row_offset(row, size_1, size_2, stride_0, stride_1, stride_2, OUTER_DIMS: tl.constexpr):
    """Where row number ``row`` of a tensor [size_0, size_1, size_2, n_cols] begins."""
    if OUTER_DIMS == 1:
        offset = row.to(tl.int64) * stride_2
    else:
        offset = (row % size_2).to(tl.int64) * stride_2
        row = row // size_2
        if OUTER_DIMS == 3:
            offset += (row % size_1).to(tl.int64) * stride_1
            offset += (row // size_1).to(tl.int64) * stride_0
        else:
            offset += row.to(tl.int64) * stride_1
    return offset


@jit
def _load(pointers, mask, EVICTION: tl.constexpr):
    if mask is None:  # a mask that is always true would cost a predicate per load
        return tl.load(pointers, eviction_policy=EVICTION)
    else:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICTION)


@jit
def _load_sum(x_pointers, residual_pointers, mask, SUM_DTYPE: tl.constexpr, EVICTION: tl.constexpr):
    """``x``, or ``x + residual`` rounded to SUM_DTYPE, in float32."""
    value = _load(x_pointers, mask, EVICTION).to(tl.float32)
    if residual_pointers is not None:
        residual = _load(residual_pointers, mask, EVICTION).to(tl.float32)
        value = round_to(value + residual, SUM_DTYPE)
    return value


@jit
def _inverse_rms(sum_of_squares, eps_ptr, EPS: tl.constexpr, N_COLS: tl.constexpr, ROOT_DTYPE: tl.constexpr):
    eps = tl.full([], EPS, tl.float32) if eps_ptr is None else tl.load(eps_ptr).to(tl.float32)
    return round_to(tl.rsqrt(sum_of_squares / N_COLS + eps), ROOT_DTYPE)


@jit
def _scale_and_shift(
    normed,
    weight,
    bias,
    WEIGHT_OFFSET: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
    SCALED_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    SHIFTED_DTYPE: tl.constexpr,
):
    """What follows the normalisation, in float32, rounded wherever the reference rounds."""
    y = scale(normed, weight, WEIGHT_OFFSET, WEIGHT_DTYPE, NORM_DTYPE, SCALED_DTYPE, PRODUCT_DTYPE)
    if bias is not None:
        y = round_to(y + bias.to(tl.float32), SHIFTED_DTYPE)
    return y


@jit
def rms_norm_one_pass_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    eps_ptr,
    out_ptr,
    sum_ptr,
    n_rows,
    size_1,
    size_2,
    x_stride_0,
    x_stride_1,
    x_stride_2,
    residual_stride_0,
    residual_stride_1,
    residual_stride_2,
    EPS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    ROOT_DTYPE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
    SCALED_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    SHIFTED_DTYPE: tl.constexpr,
    OUTER_DIMS: tl.constexpr,
    WEIGHT_GROUPS: tl.constexpr,
    N_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    EVICTION: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """A program holds BLOCK_ROWS whole rows in registers: every element is read once and written once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    if BLOCK_COLS == N_COLS:
        col_mask = None
        mask = None if BLOCK_ROWS == 1 else (row < n_rows) & (col < N_COLS)
    else:
        col_mask = col < N_COLS
        mask = (row < n_rows) & col_mask

    x_row = _row_offset(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2, OUTER_DIMS)
    x_pointers = x_ptr + x_row + col
    residual_pointers = None
    if residual_ptr is not None:
        residual_row = _row_offset(
            row, size_1, size_2, residual_stride_0, residual_stride_1, residual_stride_2, OUTER_DIMS
        )
        residual_pointers = residual_ptr + residual_row + col
    f = _load_sum(x_pointers, residual_pointers, mask, SUM_DTYPE, EVICTION)

    # Loaded before the reduction, so that they arrive while it waits.
    weight = None
    if weight_ptr is not None:
        if WEIGHT_GROUPS == 1:
            weight = _load(weight_ptr + col, col_mask, EVICTION)
        else:
            weight = _load(weight_ptr + (row % WEIGHT_GROUPS) * N_COLS + col, mask, EVICTION)
    bias = None
    if bias_ptr is not None:
        bias = _load(bias_ptr + col, col_mask, EVICTION)

    out_offset = row.to(tl.int64) * N_COLS + col
    if sum_ptr is not None:
        tl.store(sum_ptr + out_offset, f.to(sum_ptr.dtype.element_ty), mask=mask)
    inverse_rms = _inverse_rms(tl.sum(f * f, axis=1, keep_dims=True), eps_ptr, EPS, N_COLS, ROOT_DTYPE)
    y = _scale_and_shift(
        f * inverse_rms,
        weight,
        bias,
        WEIGHT_OFFSET,
        WEIGHT_DTYPE,
        NORM_DTYPE,
        SCALED_DTYPE,
        PRODUCT_DTYPE,
        SHIFTED_DTYPE,
    )
    tl.store(out_ptr + out_offset, y.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def rms_norm_two_pass_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    eps_ptr,
    out_ptr,
    sum_ptr,
    n_rows,
    size_1,
    size_2,
    x_stride_0,
    x_stride_1,
    x_stride_2,
    residual_stride_0,
    residual_stride_1,
    residual_stride_2,
    EPS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    ROOT_DTYPE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
    SCALED_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    SHIFTED_DTYPE: tl.constexpr,
    OUTER_DIMS: tl.constexpr,
    WEIGHT_GROUPS: tl.constexpr,
    N_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    EVICTION: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """A program walks twice over one row that is too wide for its registers (BLOCK_ROWS is 1).

    The second walk adds the residual again instead of reading back the sum: its inputs are in a cache, and a
    read after a write by another thread would need a barrier.  Unrolled, since that beat both a loop and a
    software pipeline on an H200 (2048 x 65536 bf16: 148, 171 and 180 us).
    """
    row = tl.program_id(0)
    x_row = x_ptr + _row_offset(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2, OUTER_DIMS)
    residual_row = None
    if residual_ptr is not None:
        residual_row = residual_ptr + _row_offset(
            row, size_1, size_2, residual_stride_0, residual_stride_1, residual_stride_2, OUTER_DIMS
        )
    out_row = row.to(tl.int64) * N_COLS

    squares = tl.zeros([BLOCK_COLS], tl.float32)
    for start in tl.static_range(0, N_COLS, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        mask = None if N_COLS % BLOCK_COLS == 0 else col < N_COLS
        residual_pointers = None if residual_row is None else residual_row + col
        f = _load_sum(x_row + col, residual_pointers, mask, SUM_DTYPE, EVICTION)
        squares += f * f
    inverse_rms = _inverse_rms(tl.sum(squares), eps_ptr, EPS, N_COLS, ROOT_DTYPE)
    weight_row = None if weight_ptr is None else weight_ptr + (row % WEIGHT_GROUPS) * N_COLS

    for start in tl.static_range(0, N_COLS, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        mask = None if N_COLS % BLOCK_COLS == 0 else col < N_COLS
        residual_pointers = None if residual_row is None else residual_row + col
        f = _load_sum(x_row + col, residual_pointers, mask, SUM_DTYPE, EVICTION)
        if sum_ptr is not None:
            tl.store(sum_ptr + out_row + col, f.to(sum_ptr.dtype.element_ty), mask=mask)
        y = _scale_and_shift(
            f * inverse_rms,
            None if weight_row is None else _load(weight_row + col, mask, EVICTION),
            None if bias_ptr is None else _load(bias_ptr + col, mask, EVICTION),
            WEIGHT_OFFSET,
            WEIGHT_DTYPE,
            NORM_DTYPE,
            SCALED_DTYPE,
            PRODUCT_DTYPE,
            SHIFTED_DTYPE,
        )
        tl.store(out_ptr + out_row + col, y.to(out_ptr.dtype.element_ty), mask=mask)


@dataclasses.dataclass(frozen=True)
class RMSNormConfig:
    """``one_pass``: a program holds ``block_rows`` whole rows, else it walks over one row twice.

    ``eviction``: the policy of loads, "" or "evict_last".
    """

    one_pass: bool
    block_rows: int
    block_cols: int
    num_warps: int
    eviction: str = ""


def choose_config(n_cols: int, itemsize: int, n_rows: int, target: Target) -> RMSNormConfig:
    """The configuration for ``n_rows`` (a hint) rows of ``n_cols`` elements of ``itemsize`` bytes.

    Counted in threads, since warps are 64 wide on some targets.  Every threshold is from a sweep on an H200
    (bf16, 1 to 655360 rows of 64 to 65536 columns, CUDA graphs, cold L2).
    """
    block_cols = next_power_of_two(n_cols)
    vector = 16 // itemsize  # elements of the widest access
    if block_cols > 32768:  # 64 values in each of 1024 threads would spill
        one_pass, block_rows, block_cols, threads = False, 1, 16384, 1024
    elif block_cols <= 512:  # several rows a program, one access a thread
        block_rows = min(256 * vector // block_cols, next_power_of_two(n_rows))
        one_pass, threads = True, block_rows * block_cols // vector
    elif n_rows <= target.num_processors:  # latency counts: one access a thread
        one_pass, block_rows, threads = True, 1, _floor_power_of_two(n_cols // vector)
    else:  # two accesses a thread: as many bytes in flight, half the warps in the reduction
        block_rows = 2 if block_cols == 1024 and n_rows > 8 * target.num_processors else 1
        one_pass, threads = True, block_rows * _floor_power_of_two(n_cols // (2 * vector))
    num_warps = max(1, min(1024, threads) // target.warp_size)
    # To let results leave the L2 cache before inputs is 2 to 5% quicker above a few MiB, and costs 0.1 us below.
    streams = target.backend == "cuda" and n_rows * n_cols * itemsize > 4 * 2**20
    return RMSNormConfig(one_pass, block_rows, block_cols, num_warps, "evict_last" if streams else "")


def _floor_power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def rms_norm_plan(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 0.0,
    eps_tensor: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    weight_dtype: torch.dtype,
    norm_dtype: torch.dtype,
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
    root_dtype: torch.dtype | None = None,
    target: Target,
    config: RMSNormConfig | None = None,
) -> Plan:
    """The launches that compute ``rms_norm_reference``; ``config`` overrides the choice, for sweeps."""
    rounding = _rounding(weight, bias, root_dtype, weight_dtype, norm_dtype, product_dtype)
    operands = _present(weight=weight, bias=bias, eps_tensor=eps_tensor)
    numbers = {
        "EPS": float(eps),
        "WEIGHT_OFFSET": float(weight_offset),
        "WEIGHT_GROUPS": _groups(weight, x),
        "SUM_DTYPE": "fp32",
        **rounding,
    }
    return _plan(x, None, operands, numbers, {"out": out_dtype}, target, config)


def add_rms_norm_plan(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 0.0,
    eps_tensor: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    weight_dtype: torch.dtype,
    norm_dtype: torch.dtype,
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
    root_dtype: torch.dtype | None = None,
    target: Target,
    config: RMSNormConfig | None = None,
) -> Plan:
    """The launches that compute ``add_rms_norm_reference``; ``config`` overrides the choice, for sweeps."""
    sum_dtype = torch.promote_types(x.dtype, residual.dtype)
    rounding = _rounding(weight, bias, root_dtype, weight_dtype, norm_dtype, product_dtype)
    operands = _present(weight=weight, bias=bias, eps_tensor=eps_tensor)
    numbers = {
        "EPS": float(eps),
        "WEIGHT_OFFSET": float(weight_offset),
        "WEIGHT_GROUPS": _groups(weight, x),
        "SUM_DTYPE": DTYPE_NAMES[sum_dtype],
        **rounding,
    }
    return _plan(x, residual, operands, numbers, {"out": out_dtype, "sum": sum_dtype}, target, config)


def _present(**tensors: torch.Tensor | None) -> dict[str, str | None]:
    return {name: None if tensor is None else name for name, tensor in tensors.items()}


def _rounding(
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    root_dtype: torch.dtype | None,
    weight_dtype: torch.dtype,
    norm_dtype: torch.dtype,
    product_dtype: torch.dtype,
) -> dict[str, str]:
    """The types to which the kernel rounds on its way, those of torch's type promotion included."""
    scaled = norm_dtype if weight is None else torch.promote_types(norm_dtype, weight_dtype)
    shifted = product_dtype if bias is None else torch.promote_types(product_dtype, bias.dtype)
    return {
        "ROOT_DTYPE": DTYPE_NAMES[root_dtype or torch.float32],
        "WEIGHT_DTYPE": DTYPE_NAMES[weight_dtype],
        "NORM_DTYPE": DTYPE_NAMES[norm_dtype],
        "SCALED_DTYPE": DTYPE_NAMES[scaled],
        "PRODUCT_DTYPE": DTYPE_NAMES[product_dtype],
        "SHIFTED_DTYPE": DTYPE_NAMES[shifted],
    }


def _plan(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    operands: dict[str, str | None],
    numbers: dict[str, float | int | str],
    output_dtypes: dict[str, torch.dtype],
    target: Target,
    config: RMSNormConfig | None,
) -> Plan:
    n_cols = x.shape[-1]
    n_rows = math.prod(x.shape[:-1])
    tensors = (x,) if residual is None else (x, residual)
    why = ""
    if config is None:
        itemsize = max(tensor.element_size() for tensor in tensors)
        config = choose_config(n_cols, itemsize, hint(n_rows), target)
        fits = "fits into" if config.one_pass else "does not fit into"
        why = f"a row of {n_cols} elements {fits} the registers of one program"
    sizes, strides = _outer_dims(*tensors)
    missing = _MAX_OUTER_DIMS - len(sizes)
    sizes = (1,) * missing + sizes
    x_strides, residual_strides = ((0,) * missing + s for s in (strides[0], strides[-1]))
    launch = Launch(
        kernel=rms_norm_one_pass_kernel if config.one_pass else rms_norm_two_pass_kernel,
        grid=(ceil_div(n_rows, config.block_rows),),
        args={
            "x_ptr": "x",
            "residual_ptr": None if residual is None else "residual",
            "weight_ptr": operands["weight"],
            "bias_ptr": operands["bias"],
            "eps_ptr": operands["eps_tensor"],
            "out_ptr": "out",
            "sum_ptr": "sum" if "sum" in output_dtypes else None,
            "n_rows": n_rows,
            "size_1": sizes[1],
            "size_2": sizes[2],
            **{f"x_stride_{i}": stride for i, stride in enumerate(x_strides)},
            **{f"residual_stride_{i}": stride for i, stride in enumerate(residual_strides)},
        },
        constexprs={
            **numbers,
            "OUTER_DIMS": len(sizes) - missing,
            "N_COLS": n_cols,
            "BLOCK_ROWS": config.block_rows,
            "BLOCK_COLS": config.block_cols,
            "EVICTION": config.eviction,
            "NUM_WARPS": config.num_warps,
        },
        num_warps=config.num_warps,
    )
    outputs = {name: Buffer(tuple(x.shape), dtype) for name, dtype in output_dtypes.items()}
    return Plan("one_pass" if config.one_pass else "two_pass", (launch,), outputs, why=why)


def _outer_dims(
    *tensors: torch.Tensor,
) -> tuple[tuple[IntLike, ...], tuple[tuple[IntLike, ...], ...]]:
    """Sizes and, per tensor, strides of the fewest dimensions that reach every row, in order; at least one."""
    return merged_dims(tensors[0].shape[:-1], *(tensor.stride()[:-1] for tensor in tensors))


RMS_NORM = define_operator(
    "portable_ops::rms_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, *, float eps=0.0, "
    "Tensor? eps_tensor=None, float weight_offset=0.0, ScalarType weight_dtype, ScalarType norm_dtype, "
    "ScalarType product_dtype, ScalarType out_dtype, ScalarType? root_dtype=None) -> Tensor",
    reference=rms_norm_reference,
    supports=rms_norm_supports,
    plan=rms_norm_plan,
)

ADD_RMS_NORM = define_operator(
    "portable_ops::add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, *, "
    "float eps=0.0, Tensor? eps_tensor=None, float weight_offset=0.0, ScalarType weight_dtype, "
    "ScalarType norm_dtype, ScalarType product_dtype, ScalarType out_dtype, ScalarType? root_dtype=None) "
    "-> (Tensor out, Tensor sum)",
    reference=add_rms_norm_reference,
    supports=add_rms_norm_supports,
    plan=add_rms_norm_plan,
)
