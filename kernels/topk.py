"""The k largest (or smallest) elements along a dimension, as ``torch.topk`` selects them.

    values, indices = topk(x, k, dim, largest, sorted)
    indices = topk_indices(x, k, dim, largest, sorted, start, end)

``topk_indices`` selects between ``start`` and ``end`` of each row and reads nothing else: it is the top-k of a row that
holds -inf (inf, if the smallest are selected) elsewhere.  NaN counts as the largest number, -0.0 equals 0.0.  Where
several elements are equal at the edge, which of them is taken is not specified, as in torch.

Elements become integers of the same order, *keys*.  A threshold is found by guesses between two bounds: how many keys
reach it?  A guess costs a comparison for each element in registers and one sum over the program.

*row*: a program holds a row in registers and finds its threshold.

*tournament*, for longer rows, several programs to a row:

1. The row is dealt to G groups, element i to group i modulo G, and the largest of each group is found.
2. A bound that k of the G largest reach is reached by k elements of the row as well.  Every program looks for it by
   itself; where there are many rows, a launch of its own does.  Everybody reads the row again and writes down what
   lies above the bound (about 1.4 k elements where G is 2 k), and k of those that equal it.
3. One program finds the threshold of what was written down.

The bound holds for every distribution; neighbours are in different groups, so that a sorted row or a cluster of
large elements does not loosen it.  Were more written down than there is room for (at least 2 k), step 3 bisects the
row itself: slow and right.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .launch import Buffer, IntLike, Launch, Plan, ceil_div, hint, jit, merged_dims, next_power_of_two, tl
from .operator import check_target, define_operator
from .target import Target

MAX_K = 4096
"""More would not fit into the registers of one program that sorts them."""

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
_UNORDERED = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
"""The types that torch sorts, but selects nothing from."""
_MAX_OUTER_DIMS = 3
_COUNTERS = 32
"""Numbers between the counters of two rows: a cache line.  The first counts what lies above a row's bound, the second
what equals it, the third the programs that are done."""


# --- meaning ------------------------------------------------------------------------------------------------


def topk_reference(
    x: torch.Tensor, k: IntLike, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (of the type of ``x``) and int64 indices, both of the shape of ``x`` with ``k`` at ``dim``.

    ``sorted``: in descending order (ascending for ``largest=False``); without it in any order.
    """
    values, indices = torch.topk(x, k, dim, largest, sorted)
    return values, indices


def topk_indices_reference(
    x: torch.Tensor,
    k: IntLike,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
) -> torch.Tensor:
    """The indices of ``topk_reference``, where ``x`` counts from ``start`` to ``end`` only.

    ``start`` and ``end`` are integers of the shape of ``x`` without ``dim``, or of one that broadcasts to it.
    """
    if start is not None or end is not None:
        position = torch.arange(x.shape[dim], device=x.device)
        outside = torch.zeros_like(x, dtype=torch.bool).movedim(dim, -1)
        if start is not None:
            outside = outside | (position < start.unsqueeze(-1))
        if end is not None:
            outside = outside | (position >= end.unsqueeze(-1))
        x = x.masked_fill(outside.movedim(-1, dim), lowest(x.dtype) if largest else highest(x.dtype))
    return torch.topk(x, k, dim, largest, sorted)[1]


def lowest(dtype: torch.dtype) -> float | int:
    """The least number of a type: -inf where there is one."""
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float | int:
    """The greatest number of a type: inf where there is one."""
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


# --- device code --------------------------------------------------------------------------------------------
# Parameter lists of device code stay in groups.
# fmt: off


@jit
def _keys(x, valid, LARGEST: tl.constexpr):
    """int32 in the order of ``x``, in the opposite one unless LARGEST; what is not ``valid`` is the least number."""
    if x.dtype.is_floating():
        if x.dtype.primitive_bitwidth == 32:
            bits = x.to(tl.int32, bitcast=True)
            key = tl.where(bits < 0, -2147483648 - bits, bits)  # sign and magnitude; both zeros are 0
        else:
            bits = x.to(tl.int16, bitcast=True).to(tl.int32)
            key = tl.where(bits < 0, -32768 - bits, bits)
        key = tl.where(x != x, 2147483647, key)
    else:
        key = x.to(tl.int32)
    if not LARGEST:
        key = ~key
    return tl.where(valid, key, -2147483648)


@jit
def _threshold(keys, k, low, high, over, SIZE: tl.constexpr, SLACK: tl.constexpr):
    """A number that at most ``k + SLACK`` of the SIZE keys exceed, and that at least ``k`` reach; how many exceed it.

    It lies in ``[low, high]``: ``k`` keys reach ``low``, and ``over``, fewer than ``k``, exceed ``high``.

    A guess is where it would be if keys were spread evenly between both.  Every sixth is their middle, as for some
    distributions guesses are bad, and every sixth the largest key up to ``high``, as many keys may be one number.
    """
    zero = tl.full([], 0, tl.int32)  # a loop carries no constants
    low, high, over, reaching, step = low + zero, high + zero, over + zero, SIZE + zero, zero
    while low < high:
        snap = step % 6 == 5
        if snap:
            guess = tl.max(tl.where(keys <= high, keys, -2147483648))
        else:
            guess = _guess(low, high, k + SLACK // 2, over, reaching, step % 6 == 2)
        count = tl.sum((keys >= guess).to(tl.int32))
        if snap & (count >= k):
            low, high = guess, guess  # no key lies between this and ``high``
        else:
            reaching = tl.where(count > k + SLACK, count, reaching)
            low, high, over = _narrowed(low, high, over, guess, count, k, SLACK)
        step += 1
    return low, over


@jit
def _guess(low, high, k, over, reaching, middle):
    """A number above ``low`` and up to ``high``."""
    share = tl.where(middle, 0.5, (reaching - k).to(tl.float32) / (reaching - over).to(tl.float32))
    width = high.to(tl.int64) - low.to(tl.int64)
    offset = (width.to(tl.float32) * share).to(tl.int64)
    return (low + 1 + tl.minimum(tl.maximum(offset, 0), width - 1)).to(tl.int32)


@jit
def _narrowed(low, high, over, guess, count, k, SLACK: tl.constexpr):
    """The range that is left when ``count`` keys reach ``guess``; empty where that is close to ``k``."""
    many = count > k + SLACK
    left = tl.where(many, guess, tl.where(count >= k, guess - 1, low))
    return left, tl.where(many, high, guess - 1), tl.where(many, over, count)


@jit
def _ranks(above, equal):
    """Of a tile of ``_tile``: for each element how many before it are ``above`` (low 16 bits) and ``equal`` (high 16
    bits), and the same for all of it.  Columns come one after the other.
    """
    flags = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    columns = tl.sum(flags, axis=1)
    upto = tl.cumsum(columns, axis=0)
    before = tl.cumsum(flags, axis=1) - flags + (upto - columns)[:, None]
    return before, tl.sum(columns)


@jit
def _tile(ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, start):
    """Numbers [COLS, ROWS] that grow by one along a column's neighbours and by STEP along a column.

    The compiler is told nothing of neighbours.  It would load several at once, and as their scattered stores go one by
    one, move every element through shared memory in between.  As it is, a column lies in the registers of one thread.
    """
    rows = tl.arange(0, ROWS)[None, :] * STEP
    return tl.max_contiguous(rows + (start + tl.arange(0, COLS))[:, None], [1, 1])


@jit
def _row_offset(row, size_1, size_2, stride_0, stride_1, stride_2):
    """Where row number ``row`` of up to three outer dimensions starts."""
    i_2 = row % size_2
    outer = row // size_2
    i_1 = outer % size_1
    i_0 = outer // size_1
    return i_0.to(tl.int64) * stride_0 + i_1.to(tl.int64) * stride_1 + i_2.to(tl.int64) * stride_2


@jit
def _clipped(first, last, n):
    """The first element of a row that counts, and how many do, where they are said to end before ``last``."""
    first = tl.minimum(tl.maximum(first, 0), n).to(tl.int32)
    last = tl.minimum(tl.maximum(last, 0), n).to(tl.int32)
    return first, tl.maximum(last - first, 0)


@jit
def _steps(position, step, UNIT: tl.constexpr):
    """Where elements lie that are ``step`` apart (UNIT: side by side)."""
    return position if UNIT else position.to(tl.int64) * step


@jit
def _store_some(
    position, take, index, key, x_row, x_step, indices_row, values_row, out_step, packed_row,
    SORTED: tl.constexpr, X_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
):
    """Put elements at their ``position`` of the result, or among those that are sorted later."""
    if SORTED:
        tl.store(packed_row + position, (key.to(tl.int64) << 32) | index.to(tl.int64), mask=take)
    else:
        out = _steps(position, out_step, OUT_UNIT)
        tl.store(indices_row + out, index.to(tl.int64), mask=take)
        if values_row is not None:
            tl.store(values_row + out, tl.load(x_row + _steps(index, x_step, X_UNIT), mask=take), mask=take)


@jit
def _store_selected(
    keys, valid, index, threshold, place, place_equal, wanted,
    x_row, x_step, indices_row, values_row, out_step, packed_row,
    SORTED: tl.constexpr, X_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
):
    """Put what exceeds the threshold from ``place`` on, and what equals it from ``place_equal`` on; the next places."""
    above = keys > threshold
    equal = (keys == threshold) & valid
    before, total = _ranks(above, equal)
    position = tl.where(above, place + (before & 0xFFFF), place_equal + ((before >> 16) & 0xFFFF))
    _store_some(
        position, above | (equal & (position < wanted)), index, keys,
        x_row, x_step, indices_row, values_row, out_step, packed_row, SORTED, X_UNIT, OUT_UNIT,
    )
    return place + (total & 0xFFFF), place_equal + ((total >> 16) & 0xFFFF)


@jit
def _store_row(
    first, length, threshold, over, wanted, n, ROWS: tl.constexpr, COLS: tl.constexpr,
    x_row, x_step, indices_row, values_row, out_step, packed_row,
    LARGEST: tl.constexpr, SORTED: tl.constexpr, X_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
):
    """Read a row of up to ``n`` elements, and put the ``wanted`` largest into the result."""
    place = tl.full([], 0, tl.int32)
    place_equal = over
    for at in range(0, n, ROWS * COLS):
        offset = at + _tile(ROWS, COLS, COLS, 0)
        valid = offset < length
        index = first + offset
        keys = _keys(tl.load(x_row + _steps(index, x_step, X_UNIT), mask=valid), valid, LARGEST)
        place, place_equal = _store_selected(
            keys, valid, index, threshold, place, place_equal, wanted,
            x_row, x_step, indices_row, values_row, out_step, packed_row, SORTED, X_UNIT, OUT_UNIT,
        )


@jit
def _in_order(packed_row, wanted, K_CEIL: tl.constexpr, RUN: tl.constexpr):
    """The ``wanted`` numbers that lie packed, in descending order.

    Runs are sorted in registers and merged two by two, through memory: the place of a number is its place in its own
    run and how many of the other run come before it, which is a binary search.
    """
    least: tl.constexpr = -9223372036854775808
    position = tl.arange(0, K_CEIL)
    here, there = packed_row, packed_row + K_CEIL
    tl.debug_barrier()  # other threads packed them
    x = tl.load(here + position, mask=position < wanted, other=least)
    if K_CEIL <= RUN:
        x = tl.sort(x, descending=True)
    else:
        x = tl.reshape(tl.sort(tl.reshape(x, [K_CEIL // RUN, RUN]), descending=True), [K_CEIL])
        tl.debug_barrier()
        tl.store(here + position, x)
        tl.debug_barrier()
        run = tl.full([], RUN, tl.int32)  # a loop carries no constants
        while run < K_CEIL:
            second = position & run
            pair = position & (0 - 2 * run)
            other = here + pair + (run - second)
            before = tl.zeros([K_CEIL], tl.int32)
            step = run
            while step > 0:
                more = before + step
                y = tl.load(other + more - 1, mask=more <= run, other=least)
                first = (y > x) | ((y == x) & (second != 0))
                before = tl.where((more <= run) & first, more, before)
                step = step // 2
            tl.store(there + pair + (position & (run - 1)) + before, x)
            tl.debug_barrier()
            x = tl.load(there + position)
            here, there = there, here
            run = run * 2
    return x


@jit
def _store_rest(
    wanted, first, length, x_row, x_step, indices_row, values_row, out_step, packed_row,
    K: tl.constexpr, K_CEIL: tl.constexpr, SORTED: tl.constexpr, RUN: tl.constexpr, SPAN: tl.constexpr,
    X_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
):
    """Sort the ``wanted`` elements that lie packed, and fill the result up from outside of the span."""
    position = tl.arange(0, K_CEIL)
    if SORTED:
        index = _in_order(packed_row, wanted, K_CEIL, RUN) & 0xFFFFFFFF
        out = _steps(position, out_step, OUT_UNIT)
        tl.store(indices_row + out, index, mask=position < wanted)
        if values_row is not None:
            value = tl.load(x_row + _steps(index, x_step, X_UNIT), mask=position < wanted)
            tl.store(values_row + out, value, mask=position < wanted)
    if SPAN:
        outside = position - wanted
        index = tl.where(outside < first, outside, outside + length)
        out = _steps(position, out_step, OUT_UNIT)
        tl.store(indices_row + out, index.to(tl.int64), mask=(position >= wanted) & (position < K))


@jit
def _row_kernel(
    x, start, end, indices, values, packed, n, size_1, size_2, x_step, out_step,
    x_0, x_1, x_2, start_0, start_1, start_2, end_0, end_1, end_2, out_0, out_1, out_2,
    K: tl.constexpr, K_CEIL: tl.constexpr, LARGEST: tl.constexpr, SORTED: tl.constexpr, RUN: tl.constexpr,
    X_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, STORE_ROWS: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """A program holds one row, folded to BLOCK_COLS columns of BLOCK_ROWS elements."""
    row = tl.program_id(0)
    first, last = 0, n  # loaded here: to Inductor a function's results depend on the memory that it is given
    if start is not None:
        first = tl.load(start + _row_offset(row, size_1, size_2, start_0, start_1, start_2))
    if end is not None:
        last = tl.load(end + _row_offset(row, size_1, size_2, end_0, end_1, end_2))
    first, length = _clipped(first, last, n)
    x_row = x + _row_offset(row, size_1, size_2, x_0, x_1, x_2)
    out_row = _row_offset(row, size_1, size_2, out_0, out_1, out_2)
    indices_row = indices + out_row
    values_row = None if values is None else values + out_row
    packed_row = None if packed is None else packed + row.to(tl.int64) * (2 * K_CEIL)

    if EVEN:  # all comparisons with it fold away
        length = tl.full([], BLOCK_ROWS * BLOCK_COLS, tl.int32)

    offset = _tile(BLOCK_ROWS, BLOCK_COLS, BLOCK_COLS, 0)
    valid = offset < length
    keys = _keys(tl.load(x_row + _steps(first + offset, x_step, X_UNIT), mask=valid), valid, LARGEST)
    wanted = tl.minimum(length, K)
    low, high = tl.min(keys), tl.max(keys)
    threshold, over = _threshold(keys, wanted, low, high, 0, BLOCK_ROWS * BLOCK_COLS, 0)
    if STORE_ROWS == BLOCK_ROWS:
        _store_selected(
            keys, valid, first + offset, threshold, 0, over, wanted,
            x_row, x_step, indices_row, values_row, out_step, packed_row, SORTED, X_UNIT, OUT_UNIT,
        )
    else:
        # Read again, from a cache, so that the registers of a few rows are enough.
        _store_row(
            first, length, threshold, over, wanted, BLOCK_ROWS * BLOCK_COLS, STORE_ROWS, BLOCK_COLS,
            x_row, x_step, indices_row, values_row, out_step, packed_row, LARGEST, SORTED, X_UNIT, OUT_UNIT,
        )
    SPAN: tl.constexpr = start is not None or end is not None
    _store_rest(
        wanted, first, length, x_row, x_step, indices_row, values_row, out_step, packed_row,
        K, K_CEIL, SORTED, RUN, SPAN, X_UNIT, OUT_UNIT,
    )


@jit
def _group_maxima_kernel(
    x, start, end, maxima, counters, n, size_1, size_2, x_step,
    x_0, x_1, x_2, start_0, start_1, start_2, end_0, end_1, end_2,
    LARGEST: tl.constexpr, X_UNIT: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, COUNTERS: tl.constexpr,
    NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr,
):
    """The largest key of each of BLOCK_COLS groups of a row; the first program of a row clears the row's counters."""
    row = tl.program_id(0) // (GROUPS // BLOCK_COLS)
    block = tl.program_id(0) % (GROUPS // BLOCK_COLS)
    first, last = 0, n
    if start is not None:
        first = tl.load(start + _row_offset(row, size_1, size_2, start_0, start_1, start_2))
    if end is not None:
        last = tl.load(end + _row_offset(row, size_1, size_2, end_0, end_1, end_2))
    first, length = _clipped(first, last, n)
    x_row = x + _row_offset(row, size_1, size_2, x_0, x_1, x_2)
    if block == 0:
        tl.store(counters + row.to(tl.int64) * COUNTERS + tl.arange(0, 4), tl.zeros([4], tl.int32))
    cols = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    offset = tl.arange(0, BLOCK_ROWS)[:, None] * GROUPS + cols[None, :]
    largest = tl.full([BLOCK_ROWS, BLOCK_COLS], -2147483648, tl.int32)
    for at in tl.range(0, length, BLOCK_ROWS * GROUPS, num_stages=NUM_STAGES):
        valid = at + offset < length
        pointers = x_row + _steps(first + at + offset, x_step, X_UNIT)
        largest = tl.maximum(largest, _keys(tl.load(pointers, mask=valid), valid, LARGEST))
    tl.store(maxima + row.to(tl.int64) * GROUPS + cols, tl.max(largest, axis=0))


@jit
def _bound(maxima_row, wanted, GROUPS: tl.constexpr, SLACK: tl.constexpr):
    """What ``wanted`` groups reach, and few more than that exceed."""
    largest = tl.load(maxima_row + tl.arange(0, GROUPS))
    bound, _ = _threshold(largest, wanted, tl.min(largest), tl.max(largest), 0, GROUPS, SLACK)
    return bound


@jit
def _bound_kernel(
    start, end, maxima, bounds, n, size_1, size_2, start_0, start_1, start_2, end_0, end_1, end_2,
    K: tl.constexpr, GROUPS: tl.constexpr, SLACK: tl.constexpr, NUM_WARPS: tl.constexpr,
):
    """The bound of one row."""
    row = tl.program_id(0)
    first, last = 0, n
    if start is not None:
        first = tl.load(start + _row_offset(row, size_1, size_2, start_0, start_1, start_2))
    if end is not None:
        last = tl.load(end + _row_offset(row, size_1, size_2, end_0, end_1, end_2))
    _, length = _clipped(first, last, n)
    bound = _bound(maxima + row.to(tl.int64) * GROUPS, tl.minimum(length, K), GROUPS, SLACK)
    tl.store(bounds + row, bound)


@jit
def _write_down(
    keys, at, bound, first, counters_row, above_row, x_row, x_step,
    LARGEST: tl.constexpr, X_UNIT: tl.constexpr, ROOM: tl.constexpr, STEP: tl.constexpr, PER: tl.constexpr,
):
    """Append the keys above ``bound`` of a tile [lanes, PER], whose first column lies ``at``, with their indices.

    They are few.  So each lane notes in a bit which of its keys they are, and what a store takes is done as many times
    as the lane with the most of them has some.
    """
    above = (keys > bound).to(tl.int32)
    total = tl.sum(above, axis=1)
    bits = tl.sum(above << tl.arange(0, PER)[None, :], axis=1)
    place = tl.atomic_add(counters_row + tl.zeros_like(total), total, mask=total > 0, sem="relaxed")
    while tl.max(bits) > 0:
        take = bits != 0
        lowest = (bits & (0 - bits)).to(tl.float32).to(tl.int32, bitcast=True)
        index = first + at + ((lowest >> 23) - 127) * STEP  # the exponent of a power of two
        key = _keys(tl.load(x_row + _steps(index, x_step, X_UNIT), mask=take), take, LARGEST)
        packed = (key.to(tl.int64) << 32) | index.to(tl.int64)
        tl.store(above_row + place, packed, mask=take & (place < ROOM))
        bits = bits & (bits - 1)
        place += 1


@jit
def _write_down_equal(keys, valid, index, bound, counters_row, equal_row, K: tl.constexpr):
    """Append the indices of a tile's keys that equal ``bound``.  They may be all of them."""
    equal = (keys == bound) & valid
    before, total = _ranks(equal, equal)
    total = total & 0xFFFF
    if total > 0:
        place = tl.atomic_add(counters_row + 1, total, sem="relaxed") + (before & 0xFFFF)
        tl.store(equal_row + place, index, mask=equal & (place < K))


@jit
def _filter_tiles(
    offset, column, first, length, bound, counters_row, above_row, equal_row, x_row, x_step,
    K: tl.constexpr, LARGEST: tl.constexpr, X_UNIT: tl.constexpr, ROOM: tl.constexpr,
    LANES: tl.constexpr, STEP: tl.constexpr, PER: tl.constexpr, STRIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):
    """Write down what lies above the bound in tiles STRIDE apart, and if anything equals it, that as well."""
    equals = tl.zeros([LANES], tl.int32)
    for at in tl.range(0, length, STRIDE, num_stages=NUM_STAGES):
        valid = at + offset < length
        keys = _keys(tl.load(x_row + _steps(first + at + offset, x_step, X_UNIT), mask=valid), valid, LARGEST)
        equals += tl.sum((keys == bound).to(tl.int32), axis=1)
        _write_down(
            keys, at + column, bound, first, counters_row, above_row, x_row, x_step,
            LARGEST, X_UNIT, ROOM, STEP, PER,
        )
    if tl.max(equals) > 0:  # seldom
        for at in range(0, length, STRIDE):
            valid = at + offset < length
            index = first + at + offset
            keys = _keys(tl.load(x_row + _steps(index, x_step, X_UNIT), mask=valid), valid, LARGEST)
            _write_down_equal(keys, valid, index, bound, counters_row, equal_row, K)


@jit
def _filter_kernel(
    x, start, end, maxima, counters, bounds, above, equal, indices, values, packed,
    n, size_1, size_2, x_step, out_step,
    x_0, x_1, x_2, start_0, start_1, start_2, end_0, end_1, end_2, out_0, out_1, out_2,
    K: tl.constexpr, K_CEIL: tl.constexpr, LARGEST: tl.constexpr, SORTED: tl.constexpr, RUN: tl.constexpr,
    X_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    GROUPS: tl.constexpr, ROOM: tl.constexpr, SLACK: tl.constexpr, FUSED: tl.constexpr, ONE_TILE: tl.constexpr,
    BOUNDED: tl.constexpr, LANES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    FINISH_COLS: tl.constexpr, COUNTERS: tl.constexpr,
    NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr,
):
    """Write down what can be among the k largest of BLOCK_COLS groups; FUSED: the last program of a row selects."""
    blocks: tl.constexpr = GROUPS // BLOCK_COLS
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    first, last = 0, n
    if start is not None:
        first = tl.load(start + _row_offset(row, size_1, size_2, start_0, start_1, start_2))
    if end is not None:
        last = tl.load(end + _row_offset(row, size_1, size_2, end_0, end_1, end_2))
    first, length = _clipped(first, last, n)
    x_row = x + _row_offset(row, size_1, size_2, x_0, x_1, x_2)
    wide_row = row.to(tl.int64)
    above_row, equal_row = above + wide_row * ROOM, equal + wide_row * K_CEIL
    wanted = tl.minimum(length, K)

    counters_row = counters + wide_row * COUNTERS
    per: tl.constexpr = BLOCK_ROWS * BLOCK_COLS // LANES
    step: tl.constexpr = LANES // BLOCK_COLS * GROUPS
    lane = tl.arange(0, LANES)
    column = block * BLOCK_COLS + lane % BLOCK_COLS + lane // BLOCK_COLS * GROUPS
    # The compiler is told nothing of neighbours, as in _tile.
    offset = tl.max_contiguous(column[:, None] + tl.arange(0, per)[None, :] * step, [1, 1])
    if ONE_TILE:  # on its way while the bound is looked for
        valid = offset < length
        tile = tl.load(x_row + _steps(first + offset, x_step, X_UNIT), mask=valid)
    if BOUNDED:
        bound = tl.load(bounds + row)
    else:
        bound = _bound(maxima + wide_row * GROUPS, wanted, GROUPS, SLACK)
        if block == 0:
            tl.store(bounds + row, bound)
    if ONE_TILE:
        keys = _keys(tile, valid, LARGEST)
        _write_down(
            keys, column, bound, first, counters_row, above_row, x_row, x_step, LARGEST, X_UNIT, ROOM, step, per
        )
        if tl.max(((keys == bound) & valid).to(tl.int32)) > 0:
            _write_down_equal(keys, valid, first + offset, bound, counters_row, equal_row, K)
    else:
        _filter_tiles(
            offset, column, first, length, bound, counters_row, above_row, equal_row, x_row, x_step,
            K, LARGEST, X_UNIT, ROOM, LANES, step, per, BLOCK_ROWS * GROUPS, NUM_STAGES,
        )
    if FUSED:
        tl.debug_barrier()  # all threads have written
        arrived = tl.atomic_add(counters_row + 2, 1, sem="acq_rel")
        if arrived == blocks - 1:
            _finish(
                row, x_row, first, length, wanted, counters, bounds, above_row, equal_row, indices, values, packed,
                size_1, size_2, x_step, out_step, out_0, out_1, out_2, start is not None or end is not None,
                K, K_CEIL, LARGEST, SORTED, RUN, X_UNIT, OUT_UNIT, ROOM, FINISH_COLS, COUNTERS,
            )


@jit
def _finish_kernel(
    x, start, end, counters, bounds, above, equal, indices, values, packed, n, size_1, size_2, x_step, out_step,
    x_0, x_1, x_2, start_0, start_1, start_2, end_0, end_1, end_2, out_0, out_1, out_2,
    K: tl.constexpr, K_CEIL: tl.constexpr, LARGEST: tl.constexpr, SORTED: tl.constexpr, RUN: tl.constexpr,
    X_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, ROOM: tl.constexpr, FINISH_COLS: tl.constexpr, COUNTERS: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """Select among what was written down of a row."""
    row = tl.program_id(0)
    first, last = 0, n
    if start is not None:
        first = tl.load(start + _row_offset(row, size_1, size_2, start_0, start_1, start_2))
    if end is not None:
        last = tl.load(end + _row_offset(row, size_1, size_2, end_0, end_1, end_2))
    first, length = _clipped(first, last, n)
    x_row = x + _row_offset(row, size_1, size_2, x_0, x_1, x_2)
    above_row, equal_row = above + row.to(tl.int64) * ROOM, equal + row.to(tl.int64) * K_CEIL
    wanted = tl.minimum(length, K)
    _finish(
        row, x_row, first, length, wanted, counters, bounds, above_row, equal_row, indices, values, packed,
        size_1, size_2, x_step, out_step, out_0, out_1, out_2, start is not None or end is not None,
        K, K_CEIL, LARGEST, SORTED, RUN, X_UNIT, OUT_UNIT, ROOM, FINISH_COLS, COUNTERS,
    )


@jit
def _select_written(
    slots, written, wanted, bound, above_row, equal_row, x_row, x_step, indices_row, values_row, out_step, packed_row,
    K_CEIL: tl.constexpr, SORTED: tl.constexpr, X_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, ROOM: tl.constexpr,
):
    """Of what lies above the bound take the largest; if that is not enough, all of it and some that equal the bound."""
    valid = slots < written
    candidates = tl.load(above_row + slots, mask=valid, other=-9223372036854775808)
    keys = (candidates >> 32).to(tl.int32)
    enough = written >= wanted
    high = tl.where(enough, tl.max(keys), bound)
    over = tl.where(enough, 0, written)
    threshold, over = _threshold(keys, wanted, tl.minimum(bound, high), high, over, ROOM, 0)
    _store_selected(
        keys, valid, candidates.to(tl.int32), threshold, 0, over, wanted,
        x_row, x_step, indices_row, values_row, out_step, packed_row, SORTED, X_UNIT, OUT_UNIT,
    )
    more = tl.arange(0, K_CEIL)
    take = written + more < wanted
    index = tl.load(equal_row + more, mask=take)
    _store_some(
        written + more, take, index, tl.zeros([K_CEIL], tl.int32) + bound,
        x_row, x_step, indices_row, values_row, out_step, packed_row, SORTED, X_UNIT, OUT_UNIT,
    )


@jit
def _select_again(
    slots, first, length, wanted, bound, x_row, x_step, indices_row, values_row, out_step, packed_row,
    LARGEST: tl.constexpr, SORTED: tl.constexpr, X_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    ROOM: tl.constexpr, COLS: tl.constexpr,
):
    """Bisect the row itself, ROOM elements at a time."""
    low, high, over = bound, tl.full([], 2147483647, tl.int32), tl.full([], 0, tl.int32)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        count = tl.full([], 0, tl.int32)
        for at in range(0, length, ROOM):
            valid = at + slots < length
            x = tl.load(x_row + _steps(first + at + slots, x_step, X_UNIT), mask=valid)
            count += tl.sum((_keys(x, valid, LARGEST) >= middle).to(tl.int32))
        low, high, over = _narrowed(low, high, over, middle, count, wanted, 0)
    _store_row(
        first, length, low, over, wanted, length, ROOM // COLS, COLS,
        x_row, x_step, indices_row, values_row, out_step, packed_row, LARGEST, SORTED, X_UNIT, OUT_UNIT,
    )


@jit
def _finish(
    row, x_row, first, length, wanted, counters, bounds, above_row, equal_row, indices, values, packed,
    size_1, size_2, x_step, out_step, out_0, out_1, out_2, SPAN: tl.constexpr,
    K: tl.constexpr, K_CEIL: tl.constexpr, LARGEST: tl.constexpr, SORTED: tl.constexpr, RUN: tl.constexpr,
    X_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, ROOM: tl.constexpr, FINISH_COLS: tl.constexpr, COUNTERS: tl.constexpr,
):
    out_row = _row_offset(row, size_1, size_2, out_0, out_1, out_2)
    indices_row = indices + out_row
    values_row = None if values is None else values + out_row
    packed_row = None if packed is None else packed + row.to(tl.int64) * (2 * K_CEIL)
    bound = tl.load(bounds + row)
    written = tl.load(counters + row.to(tl.int64) * COUNTERS)
    slots = _tile(ROOM // FINISH_COLS, FINISH_COLS, FINISH_COLS, 0)
    if written <= ROOM:
        _select_written(
            slots, written, wanted, bound, above_row, equal_row, x_row, x_step, indices_row, values_row, out_step,
            packed_row, K_CEIL, SORTED, X_UNIT, OUT_UNIT, ROOM,
        )
    else:
        _select_again(
            slots, first, length, wanted, bound, x_row, x_step, indices_row, values_row, out_step, packed_row,
            LARGEST, SORTED, X_UNIT, OUT_UNIT, ROOM, FINISH_COLS,
        )
    _store_rest(
        wanted, first, length, x_row, x_step, indices_row, values_row, out_step, packed_row,
        K, K_CEIL, SORTED, RUN, SPAN, X_UNIT, OUT_UNIT,
    )


# fmt: on


# --- configuration ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """How a row is divided.

    ``row``: one program holds it, in ``num_warps`` warps, and writes ``store_rows`` elements a thread at a time.
    ``run``: how many elements of a sorted result are sorted in registers, before such runs are merged.

    All else is about the tournament.  ``groups``: that the row is dealt to, ``block_cols`` of them to a program, which
    reads ``block_rows`` elements of each at a time.  ``slack``: by how much, in 1/16 of k, more than k of the groups'
    largest may reach the bound.  ``room``: for what is written down of a row.  ``fused``: the last program of a row
    finishes it, instead of another launch, whose warps are ``finish_warps``.  ``bounded``: a launch finds the bounds.
    """

    row: bool
    num_warps: int
    run: int = 64
    store_rows: int = 8
    groups: int = 0
    block_cols: int = 0
    block_rows: int = 0
    num_stages: int = 1
    slack: int = 2
    room: int = 0
    fused: bool = False
    bounded: bool = False
    finish_warps: int = 16


def choose_config(n: int, k: int, rows: int, target: Target) -> TopkConfig:
    """The configuration for ``rows`` rows (a hint) of ``n`` elements (a hint as well, if the row is longer)."""
    block = next_power_of_two(n)
    if block <= 8192 or (block <= MAX_ROW and rows > 2 * target.num_processors):
        return row_config(block, target)
    groups = max(1024, next_power_of_two(2 * k))
    tall = ceil_div(n, groups)
    # Programs of about as many elements as there are processors for, but not less than one access of a warp.
    share = n * rows // (2 * target.num_processors)
    block_cols = max(32, min(256, groups, next_power_of_two(share // tall + 1)))
    block_rows = max(min(next_power_of_two(tall), 4096 // block_cols), 128 // block_cols, 1)
    threads = max(128, min(256, block_cols * block_rows // 16))
    return TopkConfig(
        row=False,
        num_warps=threads // target.warp_size,
        groups=groups,
        block_cols=block_cols,
        block_rows=block_rows,
        room=max(1024, next_power_of_two(2 * k)),
        finish_warps=512 // target.warp_size,
        bounded=rows > 16,
    )


MAX_ROW = 32768
"""Elements that the registers of one program hold."""


def row_config(block: int, target: Target) -> TopkConfig:
    """The configuration of one program for a row of up to ``block`` elements, a power of two."""
    threads = max(target.warp_size, min(512, block // 32))
    return TopkConfig(row=True, num_warps=threads // target.warp_size)


# --- supports -----------------------------------------------------------------------------------------------


def topk_supports(
    x: torch.Tensor, k: IntLike, dim: int = -1, largest: bool = True, sorted: bool = True, *, target: Target
) -> str | None:
    """None, or in one line which argument stands in the way and what would be needed."""
    if x.dtype in _UNORDERED:
        return f"x is {x.dtype}, of which torch.topk takes none"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and which of equal elements are taken may change between runs"
    return check_target(target) or _selection_reason(x, k, dim)


def topk_indices_supports(
    x: torch.Tensor,
    k: IntLike,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    *,
    target: Target,
) -> str | None:
    """None, or in one line which argument stands in the way and what would be needed."""
    reason = topk_supports(x, k, dim, largest, sorted, target=target)
    if reason is not None:
        return reason
    if not largest and (start is not None or end is not None):
        return "the smallest between start and end: what is outside would come before NaN, needs largest=True"
    outer = _without(x.shape, dim)
    for name, bound in (("start", start), ("end", end)):
        if bound is not None and bound.dtype not in (torch.int32, torch.int64):
            return f"{name} is {bound.dtype}, needs int32 or int64"
        if bound is not None and bound.device != x.device:
            return f"{name} is on {bound.device}, needs x's device {x.device}"
        if bound is not None and _strides_over(bound, outer) is None:
            return f"{name} has shape {tuple(bound.shape)}, needs one that broadcasts to {tuple(outer)}"
    return None


def _selection_reason(x: torch.Tensor, k: IntLike, dim: int) -> str | None:
    if x.dim() == 0:
        return "x has no dimension"
    if x.dtype not in _DTYPES:
        return f"x is {x.dtype}, needs a type of at most 32 bits"
    if x.layout != torch.strided:
        return f"x is {x.layout}, needs a dense tensor"
    if not isinstance(k, int):
        return "k is dynamic, needs a constant"
    if not 1 <= k <= MAX_K:
        return f"k is {k}, needs one from 1 to {MAX_K}"
    n = x.shape[dim]
    if isinstance(n, int) and n >= 2**31:
        return f"a row has {n} elements, needs fewer than 2^31"
    if len(_outer_dims(x, dim, k)[0]) > _MAX_OUTER_DIMS:
        return f"the rows of x lie in more than {_MAX_OUTER_DIMS} dimensions that cannot be merged"
    return None


# --- plan ---------------------------------------------------------------------------------------------------


def _without(sizes: tuple[IntLike, ...], dim: int) -> tuple[IntLike, ...]:
    dim %= len(sizes)
    return (*sizes[:dim], *sizes[dim + 1 :])


def _strides_over(bound: torch.Tensor, outer: tuple[IntLike, ...]) -> tuple[IntLike, ...] | None:
    """The strides of ``bound`` when it is expanded to ``outer``, or None where it cannot be, without a guard."""
    if bound.dim() > len(outer):
        return None
    strides: list[IntLike] = [0] * (len(outer) - bound.dim())
    for own, size, stride in zip(bound.shape, outer[len(strides) :], bound.stride(), strict=True):
        if statically_known_true(own == 1):
            strides.append(0)
        elif statically_known_true(own == size):
            strides.append(stride)
        else:
            return None
    return tuple(strides)


def _outer_dims(
    x: torch.Tensor, dim: int, k: IntLike, *more: tuple[IntLike, ...]
) -> tuple[tuple[IntLike, ...], tuple[tuple[IntLike, ...], ...]]:
    """Sizes of the fewest dimensions that reach every row, and the strides along them: of x, of a contiguous result,
    and of each of ``more``.
    """
    dim %= x.dim()
    out: list[IntLike] = []
    step: IntLike = 1
    for i in reversed(range(x.dim())):
        if i != dim:
            out.insert(0, step)
        step = step * (k if i == dim else x.shape[i])
    return merged_dims(_without(x.shape, dim), _without(x.stride(), dim), out, *more)


def topk_plan(
    x: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    target: Target,
    config: TopkConfig | None = None,
) -> Plan:
    """The launches for one call that ``topk_supports`` accepts; ``config`` overrides the choice, for sweeps."""
    return _plan(x, k, dim, largest, sorted, None, None, ("values", "indices"), target, config)


def topk_indices_plan(
    x: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    *,
    target: Target,
    config: TopkConfig | None = None,
) -> Plan:
    """The launches for one call that ``topk_indices_supports`` accepts; ``config`` overrides the choice, for sweeps."""
    return _plan(x, k, dim, largest, sorted, start, end, ("indices",), target, config)


def _plan(
    x: torch.Tensor,
    k: int,
    dim: int,
    largest: bool,
    sorted: bool,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    results: tuple[str, ...],
    target: Target,
    config: TopkConfig | None,
) -> Plan:
    dim %= x.dim()
    n = x.shape[dim]
    outer = _without(x.shape, dim)
    spans = [(0,) * len(outer) if s is None else _strides_over(s, outer) for s in (start, end)]
    sizes, strides = _outer_dims(x, dim, k, *spans)
    rows: IntLike = 1
    for size in sizes:
        rows = rows * size
    if config is None:
        config = choose_config(hint(n), k, hint(rows), target)
        if not isinstance(n, int) and config.row:
            config = choose_config(MAX_ROW + 1, k, 1, target)

    missing = _MAX_OUTER_DIMS - len(sizes)
    sizes = (1,) * missing + sizes
    x_strides, out_strides, start_strides, end_strides = ((0,) * missing + s for s in strides)
    out_shape = (*x.shape[:dim], k, *x.shape[dim + 1 :])
    out_step: IntLike = 1
    for size in x.shape[dim + 1 :]:
        out_step = out_step * size
    k_ceil = max(2, next_power_of_two(k))
    reads = {
        "x": "x",
        "start": None if start is None else "start",
        "end": None if end is None else "end",
        "n": n,
        "size_1": sizes[1],
        "size_2": sizes[2],
        "x_step": x.stride(dim),
        **{f"x_{i}": stride for i, stride in enumerate(x_strides)},
        **{f"start_{i}": stride for i, stride in enumerate(start_strides)},
        **{f"end_{i}": stride for i, stride in enumerate(end_strides)},
    }
    writes = {
        "indices": "indices",
        "values": "values" if "values" in results else None,
        "packed": "packed" if sorted else None,
        "out_step": out_step,
        **{f"out_{i}": stride for i, stride in enumerate(out_strides)},
    }
    about_x = {"LARGEST": largest, "X_UNIT": statically_known_true(x.stride(dim) == 1)}
    about_out = {
        "K": k,
        "K_CEIL": k_ceil,
        "SORTED": sorted,
        "RUN": config.run,
        "OUT_UNIT": statically_known_true(out_step == 1),
    }
    dtypes = {"values": x.dtype, "indices": torch.int64}
    outputs = {name: Buffer(out_shape, dtypes[name]) for name in results}
    scratch = {"packed": Buffer((rows, 2 * k_ceil), torch.int64)} if sorted else {}
    if config.row:
        threads = config.num_warps * target.warp_size
        block = next_power_of_two(n)
        block_cols = min(block, threads)
        block_rows = block // block_cols
        tile = {
            "EVEN": start is None and end is None and n == block,
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLS": block_cols,
            "STORE_ROWS": min(block_rows, config.store_rows),
            "NUM_WARPS": config.num_warps,
        }
        launch = Launch(
            _row_kernel, (rows,), {**reads, **writes}, {**about_x, **about_out, **tile}, config.num_warps, 1
        )
        why = f"a row of {hint(n)} elements fits the registers of one program"
        return Plan("portable.row", (launch,), outputs, scratch, why=why)

    blocks = config.groups // config.block_cols
    kept = {name: name for name in ("counters", "bounds", "above", "equal")}
    one_tile = isinstance(n, int) and n <= config.groups * config.block_rows
    tile = {
        "GROUPS": config.groups,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_COLS": config.block_cols,
        "NUM_WARPS": config.num_warps,
        "NUM_STAGES": config.num_stages,
    }
    finish = {
        "COUNTERS": _COUNTERS,
        "ROOM": config.room,
        "FINISH_COLS": min(config.room, (config.num_warps if config.fused else config.finish_warps) * target.warp_size),
    }
    scratch |= {
        "maxima": Buffer((rows, config.groups), torch.int32),
        "counters": Buffer((rows, _COUNTERS), torch.int32),
        "bounds": Buffer((rows,), torch.int32),
        "above": Buffer((rows, config.room), torch.int64),
        "equal": Buffer((rows, k_ceil), torch.int32),
    }
    grid = (rows * blocks,)
    launches = [
        Launch(
            _group_maxima_kernel,
            grid,
            {**reads, "maxima": "maxima", "counters": "counters"},
            {**about_x, **tile, "COUNTERS": _COUNTERS},
            config.num_warps,
            config.num_stages,
        ),
        Launch(
            _filter_kernel,
            grid,
            {**reads, **writes, **kept, "maxima": "maxima"},
            {
                **about_x,
                **about_out,
                **tile,
                **finish,
                "SLACK": k * config.slack // 16,
                "FUSED": config.fused,
                "ONE_TILE": one_tile,
                "BOUNDED": config.bounded,
                "LANES": min(
                    config.block_rows * config.block_cols,
                    max(config.num_warps * target.warp_size, config.block_cols),
                ),
            },
            config.num_warps,
            config.num_stages,
        ),
    ]
    if config.bounded:
        spans = ("start", "end", "n", "size_1", "size_2", *(f"{end}_{i}" for end in ("start", "end") for i in range(3)))
        launch = Launch(
            _bound_kernel,
            (rows,),
            {**{name: reads[name] for name in spans}, "maxima": "maxima", "bounds": "bounds"},
            {"K": k, "GROUPS": config.groups, "SLACK": k * config.slack // 16, "NUM_WARPS": config.finish_warps},
            config.finish_warps,
            1,
        )
        launches.insert(1, launch)
    if not config.fused:
        constexprs = {**about_x, **about_out, **finish, "NUM_WARPS": config.finish_warps}
        launches.append(
            Launch(_finish_kernel, (rows,), {**reads, **writes, **kept}, constexprs, config.finish_warps, 1)
        )
    why = "a row is long enough for several programs, or too long for the registers of one"
    return Plan("portable.tournament", tuple(launches), outputs, scratch, why=why)


TOPK = define_operator(
    "portable_ops::topk(Tensor x, SymInt k, int dim=-1, bool largest=True, bool sorted=True) "
    "-> (Tensor values, Tensor indices)",
    reference=topk_reference,
    supports=topk_supports,
    plan=topk_plan,
)
TOPK_INDICES = define_operator(
    "portable_ops::topk_indices(Tensor x, SymInt k, int dim=-1, bool largest=True, bool sorted=True, "
    "Tensor? start=None, Tensor? end=None) -> Tensor",
    reference=topk_indices_reference,
    supports=topk_indices_supports,
    plan=topk_indices_plan,
)
