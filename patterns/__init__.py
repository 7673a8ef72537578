"""What the backend looks for: one module a kind, one algebra for all of them."""

from __future__ import annotations

from .attention import ATTENTION_PATTERN, LOWERED_ATTENTION_PATTERN
from .match import KINDS, Match, Miss, Pattern, Unmatched
from .rms_norm import RMS_NORM_PATTERN

PATTERNS: tuple[Pattern, ...] = (
    # Attention first: what it takes over (repeated heads) is never part of another pattern, and its
    # declined sites are put back to plain ATen before anything else looks at the graph.
    ATTENTION_PATTERN,
    LOWERED_ATTENTION_PATTERN,
    RMS_NORM_PATTERN,
)

__all__ = ["KINDS", "PATTERNS", "Match", "Miss", "Pattern", "Unmatched"]
