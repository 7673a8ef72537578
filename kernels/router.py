"""The router of a mixture of experts: scores, the best experts of each token, and their weights, in one launch.

    weights, indices = router(logits, bias, k=8, scoring="softmax", normalise="sum", ...)

One row of logits is a token.  Its steps, of which most routers have some:

    scores = softmax(logits), sigmoid(logits) or logits
    choice = scores + bias
    choice = fill, outside of the ``top_groups`` groups of experts with the largest sum of their ``group_best`` choices
    indices = topk(choice, k)
    weights = scores[indices]
    weights = weights / (sum(weights) + eps), or softmax(weights)
    weights = weights * scale

A token is as many maxima as it has experts to choose, each of them two reductions in one warp.  Equal choices are
taken in the order of the experts.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .launch import Buffer, IntLike, Launch, Plan, ceil_div, hint, jit, next_power_of_two, tl
from .operator import check_target, define_operator
from .rounding import DTYPE_NAMES, round_to
from .target import Target

SCORINGS = ("softmax", "sigmoid", "none")
NORMALISATIONS = ("none", "sum", "softmax")
MAX_EXPERTS = 512
MAX_K = 32
"""Each expert that is chosen is a step of an unrolled loop."""


# --- meaning ------------------------------------------------------------------------------------------------


def router_reference(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    k: int,
    scoring: str = "softmax",
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
    fill: float = 0.0,
    normalise: str = "none",
    eps: float = 0.0,
    scale: float = 1.0,
    score_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of ``weight_dtype`` and int64 indices, both [tokens, k], the best first, of ``logits`` [tokens, experts].

    Scores are rounded to ``score_dtype``, and so is every step from there to the weights; a choice with a bias is of
    the type to which torch promotes both.  Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V2 and V3 and GPT-OSS have such routers.

    Raises ValueError for an unknown ``scoring`` or ``normalise``.
    """
    for name, value, known in (("scoring", scoring, SCORINGS), ("normalise", normalise, NORMALISATIONS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}, needs one of {', '.join(known)}")
    scores = logits.float()
    if scoring == "softmax":
        scores = scores.softmax(-1)
    elif scoring == "sigmoid":
        scores = scores.sigmoid()
    scores = scores.to(score_dtype)
    choice = scores if bias is None else scores + bias
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.topk(group_best, -1)[0].sum(-1)
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(top_groups, -1)[1], True)
        choice = grouped.masked_fill(~chosen.unsqueeze(-1), fill).flatten(-2)
    indices = choice.topk(k, -1)[1]
    weights = scores.gather(-1, indices)
    if normalise == "sum":
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + eps if eps else total)
    elif normalise == "softmax":
        weights = weights.float().softmax(-1).to(score_dtype)
    if scale != 1.0:
        weights = weights * scale
    return weights.to(weight_dtype), indices


# --- device code --------------------------------------------------------------------------------------------
# Parameter lists of device code stay in groups.
# fmt: off


@jit
def _ordered_bits(x):
    """int32 in the order of fp32 numbers; NaN is the largest, both zeros are one."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 2147483647, tl.where(bits < 0, -2147483648 - bits, bits))


@jit
def _scores(logits, peak, total, SCORING: tl.constexpr, SCORE_DTYPE: tl.constexpr):
    """Rounded scores of fp32 logits; ``peak`` and ``total`` are those of the softmax."""
    if SCORING == "softmax":
        logits = tl.div_rn(tl.exp(logits - peak), total)
    elif SCORING == "sigmoid":
        logits = tl.div_rn(tl.full(logits.shape, 1.0, tl.float32), 1.0 + tl.exp(-logits))
    return round_to(logits, SCORE_DTYPE)


@jit
def _first_largest(keys, numbers):
    """The number of the largest of ``keys`` [rows, n], the least number among equal ones: [rows, 1]."""
    peak = tl.max(keys, axis=1, keep_dims=True)
    return tl.min(tl.where(keys == peak, numbers, 2147483647), axis=1, keep_dims=True)


@jit
def _choose_groups(
    choice, inside, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, CHOICE_DTYPE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_CEIL: tl.constexpr, SIZE_CEIL: tl.constexpr,
):
    """Which elements of ``choice`` [ROWS, GROUPS_CEIL * SIZE_CEIL] lie in the best groups."""
    keys = tl.where(inside, _ordered_bits(choice), -2147483648)
    grouped = tl.reshape(keys, [ROWS * GROUPS_CEIL, SIZE_CEIL])
    numbers = tl.arange(0, SIZE_CEIL)[None, :]
    values = tl.reshape(choice, [ROWS * GROUPS_CEIL, SIZE_CEIL])
    best = tl.zeros([ROWS * GROUPS_CEIL], tl.float32)
    for _ in tl.static_range(GROUP_BEST):
        taken = numbers == _first_largest(grouped, numbers)
        best += tl.sum(tl.where(taken, values, 0.0), axis=1)
        grouped = tl.where(taken, -2147483648, grouped)
    best = tl.reshape(round_to(best, CHOICE_DTYPE), [ROWS, GROUPS_CEIL])
    group = tl.arange(0, GROUPS_CEIL)[None, :]
    keys = tl.where(group < GROUPS, _ordered_bits(best), -2147483648)
    chosen = tl.zeros([ROWS, GROUPS_CEIL], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        taken = group == _first_largest(keys, group)
        chosen = tl.where(taken, 1, chosen)
        keys = tl.where(taken, -2147483648, keys)
    spread = tl.broadcast_to(tl.reshape(chosen, [ROWS, GROUPS_CEIL, 1]), [ROWS, GROUPS_CEIL, SIZE_CEIL])
    return tl.reshape(spread, [ROWS, GROUPS_CEIL * SIZE_CEIL]) != 0


@jit
def _router_kernel(
    logits, bias, weights, indices, tokens, stride,
    K: tl.constexpr, K_CEIL: tl.constexpr, SCORING: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, FILL: tl.constexpr, LOWEST: tl.constexpr,
    NORMALISE: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
    SCORE_DTYPE: tl.constexpr, CHOICE_DTYPE: tl.constexpr,
    SIZE: tl.constexpr, GROUPS_CEIL: tl.constexpr, SIZE_CEIL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, NUM_WARPS: tl.constexpr,
):
    """BLOCK_ROWS tokens; experts are GROUPS times SIZE, each padded to a power of two."""
    token = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, GROUPS_CEIL * SIZE_CEIL)[None, :]
    if SIZE == SIZE_CEIL:
        expert = col
        known = col < GROUPS * SIZE
    else:
        expert = col // SIZE_CEIL * SIZE + col % SIZE_CEIL
        known = (col % SIZE_CEIL < SIZE) & (col < GROUPS * SIZE_CEIL)
    row = logits + token.to(tl.int64) * stride
    inside = (token < tokens) & known
    x = tl.load(row + expert, mask=inside, other=0.0).to(tl.float32)

    peak, total = 0.0, 1.0
    if SCORING == "softmax":
        lowest = tl.where(known, x, float("-inf"))
        peak = tl.max(lowest, axis=1, keep_dims=True)
        total = tl.sum(tl.exp(lowest - peak), axis=1, keep_dims=True)
    choice = x  # scores have the order of logits, unless something is added to them or compared with them
    if bias is not None or GROUPS > 1:
        choice = _scores(x, peak, total, SCORING, SCORE_DTYPE)
    if bias is not None:
        choice = round_to(choice + tl.load(bias + expert, mask=known, other=0.0).to(tl.float32), CHOICE_DTYPE)
    if GROUPS > 1:
        chosen = _choose_groups(
            choice, inside, TOP_GROUPS, GROUP_BEST, CHOICE_DTYPE, BLOCK_ROWS, GROUPS, GROUPS_CEIL, SIZE_CEIL
        )
        choice = tl.where(chosen, choice, float("-inf") if LOWEST else FILL)

    keys = tl.where(inside, _ordered_bits(choice), -2147483648)
    place = tl.arange(0, K_CEIL)[None, :]
    best = tl.zeros([BLOCK_ROWS, K_CEIL], tl.int32)
    for i in tl.static_range(K):
        number = _first_largest(keys, expert)
        best = tl.where(place == i, number, best)
        keys = tl.where(expert == number, -2147483648, keys)

    take = (token < tokens) & (place < K)
    weight = tl.load(row + best, mask=take, other=0.0).to(tl.float32)
    weight = tl.where(take, _scores(weight, peak, total, SCORING, SCORE_DTYPE), 0.0)
    if NORMALISE == "sum":
        divisor = round_to(tl.sum(weight, axis=1, keep_dims=True), SCORE_DTYPE)
        if EPS != 0.0:
            divisor = round_to(divisor + EPS, SCORE_DTYPE)
        weight = round_to(tl.div_rn(weight, tl.broadcast_to(divisor, weight.shape)), SCORE_DTYPE)
    if NORMALISE == "softmax":
        lowest = tl.where(take, weight, float("-inf"))
        power = tl.exp(lowest - tl.max(lowest, axis=1, keep_dims=True))
        divisor = tl.sum(power, axis=1, keep_dims=True)
        weight = round_to(tl.div_rn(power, tl.broadcast_to(divisor, power.shape)), SCORE_DTYPE)
    if SCALE != 1.0:
        weight = round_to(weight * SCALE, SCORE_DTYPE)
    out = token.to(tl.int64) * K + place
    tl.store(weights + out, weight.to(weights.dtype.element_ty), mask=take)
    tl.store(indices + out, best.to(tl.int64), mask=take)


# fmt: on


# --- configuration ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """``block_rows``: tokens of one program of ``num_warps`` warps."""

    block_rows: int
    num_warps: int


def choose_config(experts: int, tokens: int, target: Target) -> RouterConfig:
    """The configuration for ``tokens`` (a hint) rows of ``experts`` elements, a power of two: a warp for each row."""
    per_warp = max(1, 4 * target.warp_size // max(experts, 4 * 8)) if tokens > 4 * target.num_processors else 1
    num_warps = 1 if tokens <= target.num_processors else 4
    return RouterConfig(per_warp * num_warps, num_warps)


# --- supports -----------------------------------------------------------------------------------------------


def router_supports(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    k: int,
    scoring: str = "softmax",
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
    fill: float = 0.0,
    normalise: str = "none",
    eps: float = 0.0,
    scale: float = 1.0,
    score_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    target: Target,
) -> str | None:
    """None, or in one line which argument stands in the way and what would be needed."""
    return (
        check_target(target)
        or _logits_reason(logits)
        or _bias_reason(logits, bias)
        or _numbers_reason(logits.shape[1], k, groups, top_groups, group_best)
        or _dtypes_reason(score_dtype, weight_dtype)
    )


def _logits_reason(logits: torch.Tensor) -> str | None:
    if logits.dtype not in DTYPE_NAMES:
        return f"logits is {logits.dtype}, needs float32, bfloat16 or float16"
    if logits.dim() != 2:
        return f"logits has {logits.dim()} dimensions, needs [tokens, experts]"
    experts = logits.shape[1]
    if not isinstance(experts, int) or not 1 <= experts <= MAX_EXPERTS:
        return f"logits has {experts} experts, needs a constant from 1 to {MAX_EXPERTS}"
    if logits.layout != torch.strided or not statically_known_true(logits.stride(1) == 1):
        return "logits has rows that are not contiguous, needs stride 1 along the experts"
    return None


def _bias_reason(logits: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    if bias is None:
        return None
    if bias.dtype not in DTYPE_NAMES or bias.device != logits.device:
        return f"bias is {bias.dtype} on {bias.device}, needs a floating-point type on {logits.device}"
    if bias.dim() != 1 or not statically_known_true(bias.shape[0] == logits.shape[1]):
        return f"bias has shape {tuple(bias.shape)}, needs ({logits.shape[1]},)"
    if not statically_known_true(bias.stride(0) == 1):
        return "bias is not contiguous"
    return None


def _numbers_reason(experts: int, k: int, groups: int, top_groups: int, group_best: int) -> str | None:
    if not 1 <= k <= min(MAX_K, experts):
        return f"k is {k}, needs one from 1 to {min(MAX_K, experts)}"
    if groups < 1 or experts % groups:
        return f"{experts} experts do not divide into {groups} groups"
    if not 1 <= top_groups <= groups or not 1 <= group_best <= experts // groups:
        return f"{top_groups} of {groups} groups by their {group_best} best is more than there are"
    if next_power_of_two(groups) * next_power_of_two(experts // groups) > 2 * MAX_EXPERTS:
        return f"{groups} groups of {experts // groups} experts are padded to more than {2 * MAX_EXPERTS}"
    return None


def _dtypes_reason(*dtypes: torch.dtype) -> str | None:
    unknown = [dtype for dtype in dtypes if dtype not in DTYPE_NAMES]
    return f"rounds to {unknown[0]}, needs float32, bfloat16 or float16" if unknown else None


# --- plan ---------------------------------------------------------------------------------------------------


def router_plan(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    k: int,
    scoring: str = "softmax",
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
    fill: float = 0.0,
    normalise: str = "none",
    eps: float = 0.0,
    scale: float = 1.0,
    score_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    target: Target,
    config: RouterConfig | None = None,
) -> Plan:
    """The launch for one call that ``router_supports`` accepts; ``config`` overrides the choice, for sweeps."""
    tokens: IntLike = logits.shape[0]
    experts = logits.shape[1]
    size = experts // groups
    size_ceil, groups_ceil = next_power_of_two(size), next_power_of_two(groups)
    config = config or choose_config(size_ceil * groups_ceil, hint(tokens), target)
    choice_dtype = score_dtype if bias is None else torch.promote_types(score_dtype, bias.dtype)
    launch = Launch(
        _router_kernel,
        (ceil_div(tokens, config.block_rows),),
        {
            "logits": "logits",
            "bias": None if bias is None else "bias",
            "weights": "weights",
            "indices": "indices",
            "tokens": tokens,
            "stride": logits.stride(0),
        },
        {
            "K": k,
            "K_CEIL": max(2, next_power_of_two(k)),
            "SCORING": scoring,
            "GROUPS": groups,
            "TOP_GROUPS": top_groups,
            "GROUP_BEST": group_best,
            "FILL": 0.0 if fill == -torch.inf else float(fill),
            "LOWEST": fill == -torch.inf,
            "NORMALISE": normalise,
            "EPS": float(eps),
            "SCALE": float(scale),
            "SCORE_DTYPE": DTYPE_NAMES[score_dtype],
            "CHOICE_DTYPE": DTYPE_NAMES[choice_dtype],
            "SIZE": size,
            "GROUPS_CEIL": groups_ceil,
            "SIZE_CEIL": size_ceil,
            "BLOCK_ROWS": config.block_rows,
            "NUM_WARPS": config.num_warps,
        },
        config.num_warps,
        1,
    )
    outputs = {"weights": Buffer((tokens, k), weight_dtype), "indices": Buffer((tokens, k), torch.int64)}
    why = "the scores of a token fit the registers of one warp"
    return Plan("portable.rows", (launch,), outputs, why=why)


ROUTER = define_operator(
    "portable_ops::router(Tensor logits, Tensor? bias=None, *, int k, str scoring='softmax', int groups=1, "
    "int top_groups=1, int group_best=1, float fill=0.0, str normalise='none', float eps=0.0, float scale=1.0, "
    "ScalarType score_dtype, ScalarType weight_dtype) -> (Tensor weights, Tensor indices)",
    reference=router_reference,
    supports=router_supports,
    plan=router_plan,
)
