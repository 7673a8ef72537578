"""Measures where each operator pays, and writes the gate's table from it.

Each case is a cell of a grid of sizes; a size between two grid points belongs to the nearer one (by ratio), and
beyond the last one to the last.  ``python -m benchmarks tables`` turns the cells of all committed results into the
rules of ``inductor_ext/gate_tables/<arch>.json``: take a rewrite where it is at least 2 % faster than stock Inductor.
``--write-table`` does that after the sweep.

``--frozen`` judges the table instead, on shapes that are in no grid (``frozen_rope.json``: random ones, drawn before
anything was tuned): the default gate beside stock, and the worst ratio of the two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from portable_ops.inductor_ext.gate import GAIN, TABLES
from portable_ops.kernels.attention import MAX_DECODE_ROWS
from portable_ops.kernels.linear import MAX_ROWS
from portable_ops.kernels.target import device_target
from torch import Tensor

from . import decode_attention, linear, prefill_attention, rms_norm, rope, topk
from .harness import kernel_case, progress
from .results import BASELINE, RESULTS, Row
from .truth import attention_truth

OURS = "portable_ops gate=always"
IMPLS = (BASELINE, OURS)
OPERATORS = ("decode", "prefill", "rms_norm", "linear", "rope", "topk", "router")
FROZEN = Path(__file__).with_name("frozen_rope.json")
TILE_ROWS = 16
"""One tile of the decode kernel; more rows (speculative decoding) have a larger tile and were not measured."""

# The grids: every combination of sizes is a cell.
WIDE = {"kv_len": (512, 4096, 32768), "batch_heads": (8, 128), "head_dim": (128,)}
NARROW = {"kv_len": (4096,), "batch_heads": (8, 128), "head_dim": (128,)}
# Spelling, query heads of a KV head, mask, grid.
DECODE = (
    ("repeat_kv", 4, "bool", WIDE),
    ("enable_gqa", 4, "bool", NARROW),
    ("enable_gqa", 4, "none", NARROW),
    ("plain", 1, "bool", NARROW),
)
TINY_DECODE = {"kv_len": (64,), "batch_heads": (2,), "head_dim": (16,)}
PREFILL = {"q_len": (512, 2048, 8192), "head_dim": (64, 128, 256)}
PREFILL_SPELLINGS = (("enable_gqa", 4, True), ("repeat_kv", 4, True), ("plain", 1, True), ("plain", 1, False))
PREFILL_TOKENS = 16384
# out_features: of all weights together.
LINEAR = {
    "linear": {
        "out_features": (1024, 2048, 4096, 8192, 16384, 131072),
        "in_features": (1024, 2048, 4096, 8192, 14336),
    },
    "qkv_linear": {"out_features": (1536, 3072, 6144, 12288), "in_features": (1024, 2048, 4096, 8192)},
    "gated_linear": {"out_features": (6144, 16384, 28672), "in_features": (1024, 2048, 4096)},
}
MAX_WEIGHT = 2**29
LINEAR_ROWS = {1: {"max": 1}, MAX_ROWS: {"min": 2, "max": MAX_ROWS}}
"""One row has a kernel of its own; for more the time is that of MAX_ROWS, and so is stock's where weights are large."""
ROPE = {
    "rope": {"tokens": (16, 256, 2048, 16384), "heads": (16, 40, 64), "head_dim": (128,)},
    "qk_norm_rope": {"tokens": (1, 64, 512, 2048, 16384), "heads": (16, 40, 64), "head_dim": (128,)},
    "append": {"tokens": (1, 16, 64, 2048), "heads": (16, 40, 64), "head_dim": (128,)},
    "rope_append": {"tokens": (1, 16, 64), "heads": (16, 40, 64), "head_dim": (128,)},
}
_FROZEN_KINDS = ("rope", "qk_norm_rope", "append")
ROPE_HEADS = {6: (4, 2), 16: (14, 2), 40: (32, 8), 64: (32, 32)}
ROPE_OPERATORS = {
    "rope": "qk_rope",
    "qk_norm_rope": "qk_rope",
    "append": "qk_rope_append",
    "rope_append": "qk_rope_append",
}
TOPK = ((1, 16384), (1, 131072), (64, 16384), (64, 131072), (4096, 8192))
"""Rows, and elements of a row: these are cells of their own, as a table of all sizes would be of long runs."""
TOPK_FLOATS = ["float32", "bfloat16", "float16"]
ROUTER_TOKENS = (64, 8192)
NORM = {"rows": (16, 2048, 16384), "hidden_size": (2048, 4096, 8192)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the sweep."""
    parser.add_argument("--only", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--frozen", action="store_true", help="judge the table on frozen shapes instead")
    parser.add_argument(
        "--kinds", nargs="+", choices=_FROZEN_KINDS, default=list(_FROZEN_KINDS), help="which frozen shapes, of rope"
    )
    parser.add_argument("--write-table", action="store_true", help="write the gate's table for this GPU's architecture")


def run(args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of one cell after another; ``--write-table`` is done where the results are written."""
    if args.frozen:
        yield from _frozen(args)
        return
    arch = device_target(torch.device(args.device)).arch
    for operator in args.only:
        for name, cell, rows in _CASES[operator](args):
            yield [{**row, "operator": f"portable_ops::{name}", "arch": arch, "cell": cell} for row in rows]


Case = tuple[str, dict[str, Any], list[Row]]
"""The operator's name, the cell that the case stands for, its rows."""


def _decode_cases(args: argparse.Namespace) -> Iterator[Case]:
    problems = (
        (spelling, groups, mask_kind, sizes, cell)
        for spelling, groups, mask_kind, grid in DECODE
        for sizes in [TINY_DECODE if args.tiny else grid]
        for cell in itertools.product(*sizes.values())
    )
    for spelling, groups, mask_kind, sizes, (T, batch_heads, D) in problems:
        K = min(8, batch_heads)
        B = batch_heads // K
        q = torch.randn(B, K * groups, 1, D, device=args.device, dtype=_dtype(args))
        k, v = (torch.randn(B, K, T, D, device=args.device, dtype=_dtype(args)) for _ in range(2))
        mask = None
        if mask_kind == "bool":
            mask = (torch.arange(T, device=args.device)[None, None, None] < T - 6).expand(B, 1, 1, T).contiguous()
        fn = _plain if spelling == "plain" else decode_attention.SPELLINGS[spelling]
        case = f"decode, {spelling}, mask {mask_kind}, batch {B}, KV {T}, {K * groups}/{K} heads of {D}"
        cell = {
            "rows": {"max": TILE_ROWS},
            "repeated": spelling == "repeat_kv",
            "groups": {"min": 2} if groups > 1 else 1,
            "mask": mask_kind,
            "is_causal": False,
            "kv_len": _between(T, sizes["kv_len"]),
            "batch_heads": _between(batch_heads, sizes["batch_heads"]),
            "head_dim": _between(D, sizes["head_dim"]),
        }
        yield "attention", cell, kernel_case(case, fn, (q, k, v, mask), attention_truth(q, k, v, mask), args)


def _prefill_cases(args: argparse.Namespace) -> Iterator[Case]:
    sizes = {"q_len": (48,), "head_dim": (16,)} if args.tiny else PREFILL
    for (S, D), (spelling, groups, causal) in itertools.product(itertools.product(*sizes.values()), PREFILL_SPELLINGS):
        H = 4 if args.tiny else 32 * 128 // max(D, 128)
        B = 1 if args.tiny else max(1, PREFILL_TOKENS // S)
        q = torch.randn(B, H, S, D, device=args.device, dtype=_dtype(args))
        k, v = (torch.randn(B, H // groups, S, D, device=args.device, dtype=_dtype(args)) for _ in range(2))
        spelled = {"plain": prefill_attention.all_heads}.get(spelling) or getattr(prefill_attention, spelling)

        def fn(q: Tensor, k: Tensor, v: Tensor, spelled: Any = spelled, causal: bool = causal) -> Tensor:
            return spelled(q, k, v, is_causal=causal)

        kind = "causal" if causal else "full"
        case = f"prefill, {spelling}, {kind}, batch {B}, length {S}, {H}/{H // groups} heads of {D}"
        cell = {
            "rows": {"min": MAX_DECODE_ROWS + 1},
            "repeated": spelling == "repeat_kv",
            "groups": {"min": 2} if groups > 1 else 1,
            "mask": "none",
            "is_causal": causal,
            "q_len": _between(S, sizes["q_len"]),
            # Shorter keys than queries (or longer) are another problem than the square one that is measured.
            "square": True,
            "head_dim": _between(D, sizes["head_dim"]),
        }
        yield "attention", cell, kernel_case(case, fn, (q, k, v), attention_truth(q, k, v, is_causal=causal), args)


def _norm_cases(args: argparse.Namespace) -> Iterator[Case]:
    sizes = {"rows": (3,), "hidden_size": (96,)} if args.tiny else NORM
    for M, N in itertools.product(*sizes.values()):
        x, r = (torch.randn(M, N, device=args.device, dtype=_dtype(args)) for _ in range(2))
        w = torch.rand(N, device=args.device, dtype=_dtype(args))
        exact = rms_norm.exact_add_rms_norm(x, r, w)
        columns = _between(N, sizes["hidden_size"], open_ends=False)
        cell = {"rows": _between(M, sizes["rows"]), "hidden_size": columns}
        case = f"x + r, rms_norm, {M} x {N}"
        yield "add_rms_norm", cell, kernel_case(case, rms_norm.add_rms_norm, (x, r, w), exact, args)


def _linear_cases(args: argparse.Namespace) -> Iterator[Case]:
    for name, grid in LINEAR.items():
        sizes = {"out_features": (12,), "in_features": (32,)} if args.tiny else grid
        for M, N, K in itertools.product(LINEAR_ROWS, *sizes.values()):
            if N * K > MAX_WEIGHT:
                continue
            widths = linear.WIDTHS[name](N)
            tensors = linear.inputs(M, K, widths, args)
            cell = {
                "rows": LINEAR_ROWS[M],
                "out_features": _between(N, sizes["out_features"], open_ends=False),
                "in_features": _between(K, sizes["in_features"], open_ends=False),
            }
            if name == "linear":
                # One layer is what max-autotune tunes; several in one launch, or with the activation, it cannot have.
                cell["tuned"] = False
            case = f"{name}, {M} rows, {K} -> {' + '.join(map(str, widths))}"
            fn = linear.FUNCTIONS[name]
            yield name, cell, kernel_case(case, fn, tensors, linear.exact(fn, *tensors), args)


def _rope_cases(args: argparse.Namespace) -> Iterator[Case]:
    for kind, grid in ROPE.items():
        sizes = {"tokens": (3,), "heads": (6,), "head_dim": (16,)} if args.tiny else grid
        for tokens, heads, D in itertools.product(*sizes.values()):
            decodes = kind.endswith("append") and tokens <= 64
            B, S = (tokens, 1) if decodes else (1, tokens) if tokens < 2048 else (tokens // 1024, 1024)
            cell = {
                "tokens": _between(tokens, sizes["tokens"]),
                "heads": _between(heads, sizes["heads"], open_ends=False),
                "head_dim": D,
                "norm": not kind.startswith("rope"),
                "append": kind.endswith("append"),
                "partial": False,
                "pairing": "half",
            }
            yield ROPE_OPERATORS[kind], cell, rope.measure((kind, B, S, *ROPE_HEADS[heads], D), args)


def _frozen(args: argparse.Namespace) -> Iterator[list[Row]]:
    """The default gate beside stock on shapes that no table was made from."""
    args.impl = [BASELINE, "portable_ops"]
    shapes = json.loads(FROZEN.read_text())
    ratios: list[tuple[float, str]] = []
    for sizes in itertools.chain(*zip(*(shapes[kind] for kind in args.kinds), strict=True)):
        kind = args.kinds[len(ratios) % len(args.kinds)]
        rows = rope.measure((kind, *((1, 2, 4, 2, 16) if args.tiny else sizes)), args)
        ours = rows[-1]
        ratios.append((ours["baseline_us"] / ours["us"], ours["case"]))
        yield rows
        if args.tiny:
            break
    ratio, case = min(ratios)
    progress.print(f"worst of {len(ratios)} frozen shapes: {ratio:.3f}x stock ({case})", highlight=False)


def _topk_cases(args: argparse.Namespace) -> Iterator[Case]:
    lengths = sorted({n for _, n in TOPK})
    for name, in_order in (("topk_indices", False), ("topk_indices", True), ("topk", True)):
        for rows, n in ((2, 300),) if args.tiny else TOPK:
            k = 16 if args.tiny else topk.K
            cell = {
                "dtype": TOPK_FLOATS,
                "rows": {1: {"max": 8}, 64: {"min": 9, "max": 512}}.get(rows, {"min": 513}),
                "row_length": _between(n, (n,) if args.tiny or rows == 4096 else lengths[1:], open_ends=False),
                "k": {"min": k // 2, "max": 2 * k},
                "sorted": in_order,
                "last_dim": True,
            }
            (found,) = topk.selection_rows(rows, n, k, in_order, args, values=name == "topk")
            yield name, cell, found


def _router_cases(args: argparse.Namespace) -> Iterator[Case]:
    for name, (_, experts) in topk.FUNCTIONS.items():
        for tokens in (3,) if args.tiny else ROUTER_TOKENS:
            cell = {
                "dtype": TOPK_FLOATS,
                "rows": _between(tokens, (tokens,) if args.tiny else ROUTER_TOKENS),
                "experts": {"min": 8, "max": 2 * experts},
                "k": {"max": 10},
                "groups": 1 if experts == 128 else {"min": 2},
            }
            yield "router", cell, topk.router_rows(name, tokens, args)


_CASES = {
    "decode": _decode_cases,
    "prefill": _prefill_cases,
    "rms_norm": _norm_cases,
    "linear": _linear_cases,
    "rope": _rope_cases,
    "topk": _topk_cases,
    "router": _router_cases,
}


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _dtype(args: argparse.Namespace) -> torch.dtype:
    return torch.float32 if args.device == "cpu" else torch.bfloat16


def _between(value: int, grid: Sequence[int], *, open_ends: bool = True) -> dict[str, int]:
    """The sizes that lie nearer to ``value`` than to its neighbours in ``grid``.

    The first and the last point speak for everything beyond them, or for sizes up to twice away if the ends are not
    open; a single point always for sizes up to twice away.
    """
    if len(grid) == 1:
        return {"min": value // 2, "max": value * 2}
    index = grid.index(value)
    bounds = {}
    if index > 0:
        bounds["min"] = math.isqrt(grid[index - 1] * value) + 1
    elif not open_ends:
        bounds["min"] = value // 2
    if index < len(grid) - 1:
        bounds["max"] = math.isqrt(value * grid[index + 1])
    elif not open_ends:
        bounds["max"] = value * 2
    return bounds


def write_tables() -> list[Path]:
    """Write the gate's tables from the committed results of sweeps; returns the tables' paths."""
    rows: dict[str, list[Row]] = {}
    for path in sorted(RESULTS.glob("*/sweep.json")):
        for row in json.loads(path.read_text())["rows"]:
            if row["impl"] == OURS:
                rows.setdefault(row["arch"], []).append(row)
    written = []
    for arch, measured in rows.items():
        written.append(TABLES / f"{arch}.json")
        written[-1].parent.mkdir(exist_ok=True)
        written[-1].write_text(json.dumps({"rules": rules_of(measured)}, indent=1) + "\n")
    return written


def rules_of(measured: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """The rules by operator that say what ``measured`` cells say."""
    operators = dict.fromkeys(row["operator"] for row in measured)
    return {
        name: merged([_rule(row["cell"], row) for row in measured if row["operator"] == name]) for name in operators
    }


def _rule(cell: dict[str, Any], row: Row) -> dict[str, Any]:
    speedup = row["baseline_us"] / row["us"]
    take = bool(speedup >= GAIN and row["correct"])
    when = {"dtype": ["bfloat16", "float16"], **cell}
    return {"when": when, "take": take, "speedup": round(speedup, 3), "case": row["case"]}


SIZES = (
    "tokens",
    "heads",
    "kv_len",
    "batch_heads",
    "q_len",
    "head_dim",
    "rows",
    "row_length",
    "hidden_size",
    "out_features",
    "in_features",
)


def merged(rules: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fewer rules that say the same: where the verdict is one for all cells along a size, they are one cell.

    Each merged rule keeps the worst speed-up of its cells.
    """
    families: dict[str, list[dict[str, Any]]] = {}
    for rule in rules:
        spelling = {f: c for f, c in rule["when"].items() if f not in SIZES}
        families.setdefault(json.dumps(spelling), []).append(rule)
    return [
        {
            "when": r["when"],
            "take": r["take"],
            "speedup": r["speedup"],
            "why": f"measured {r['speedup']:.2f}x stock ({r['case']})",
        }
        for family in families.values()
        for r in _merged_family(family)
    ]


def _merged_family(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for size in SIZES:
        cells = {json.dumps(rule["when"].get(size)) for rule in rules}
        if len(cells) < 2:
            continue
        groups: dict[str, list[dict[str, Any]]] = {}
        for rule in rules:
            rest = {f: c for f, c in rule["when"].items() if f != size}
            groups.setdefault(json.dumps(rest), []).append(rule)
        rules = [rule for group in groups.values() for rule in _without(size, group, len(cells))]
    return rules


def _without(size: str, group: list[dict[str, Any]], cells: int) -> list[dict[str, Any]]:
    if len(group) < cells or len({rule["take"] for rule in group}) > 1:
        return group
    ranges = [rule["when"][size] for rule in group if size in rule["when"]]
    if not _touch(ranges):
        return group
    worst = min(group, key=lambda rule: rule["speedup"])
    when = {f: c for f, c in worst["when"].items() if f != size}
    hull = _hull(ranges)
    return [{**worst, "when": {**when, **({size: hull} if hull else {})}}]


def _touch(ranges: Sequence[Any]) -> bool:
    """Whether no sizes between the ``ranges`` were left unmeasured; sizes that are one number each stand alone."""
    if len(ranges) > 1 and not all(isinstance(r, dict) for r in ranges):
        return False
    ordered = sorted(ranges, key=lambda r: r.get("min", 0))
    return all(b.get("min", 0) <= a.get("max", math.inf) + 1 for a, b in itertools.pairwise(ordered))


def _hull(ranges: Sequence[dict[str, int]]) -> dict[str, int]:
    """The smallest range that holds all ``ranges``: open where one of them is."""
    ends = {"min": min, "max": max}
    return {end: of(r[end] for r in ranges) for end, of in ends.items() if all(end in r for r in ranges)}
