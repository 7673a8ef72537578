"""What the backend looks for: one module a kind, one algebra for all of them."""

from __future__ import annotations

from .attention import ATTENTION_PATTERN, LOWERED_ATTENTION_PATTERN
from .eager_attention import EAGER_ATTENTION_PATTERN
from .linear import LINEAR_PATTERN
from .match import KINDS, Match, Miss, Pattern, Recognised, Unmatched
from .qk_rope import QK_ROPE_PATTERN
from .rms_norm import RMS_NORM_PATTERN
from .rope import ROPE_PATTERN
from .router import ROUTER_PATTERN
from .swiglu import SWIGLU_PATTERN
from .topk import TOPK_PATTERN

PATTERNS: tuple[Pattern, ...] = (
    # First: it joins what RMSNorm and RoPE match one by one.
    QK_ROPE_PATTERN,
    # Attention first: what it takes over (repeated heads) is never part of another pattern, and its
    # declined sites are put back to plain ATen before anything else looks at the graph.
    ATTENTION_PATTERN,
    LOWERED_ATTENTION_PATTERN,
    EAGER_ATTENTION_PATTERN,
    RMS_NORM_PATTERN,
    # After RMSNorm, which normalises queries and keys before they are rotated.
    ROPE_PATTERN,
    # Their products and selections stand in none of the others' formulas, so that the order does not matter.
    SWIGLU_PATTERN,
    ROUTER_PATTERN,
    # Last: a product may be a part of a gated MLP, a selection one of a router.
    TOPK_PATTERN,
    LINEAR_PATTERN,
)

__all__ = ["KINDS", "PATTERNS", "Match", "Miss", "Pattern", "Recognised", "Unmatched"]
