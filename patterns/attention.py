"""Attention: ``softmax(q k^T * scale + mask) v`` over heads.

Matches a pinned ``scaled_dot_product_attention`` (``portable_ops::attention``, put there before autograd tracing by
``inductor_ext.pin``) and whatever stands around it that attention does not need::

    k = repeat_kv(k, n);  v = repeat_kv(v, n)        # any spelling: the heads are read once, unrepeated
    mask = mask.expand(B, H, L, S)                   # the source is read with stride 0

Replaces with ``portable_ops::attention(..., enable_gqa=True)`` on the unrepeated heads.

The backend-specific ATen forms of attention (``_scaled_dot_product_flash_attention`` and so on) are recognised and
left alone: they arrive where attention could not be pinned, and the reason is the pin's.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..kernels.attention import ATTENTION
from . import algebra
from .algebra import aten
from .match import Match, Pattern, Permuted, Recognised, val


def match(anchor: fx.Node) -> Match:
    """Match pinned attention at ``anchor`` together with the head repetition in front of it."""
    args = ATTENTION.bind(anchor.args, dict(anchor.kwargs))
    inner: list[fx.Node] = []
    bound: dict[str, Any] = {"is_causal": args["is_causal"], "scale": args["scale"], "repeat_kv": 1}
    repeats = algebra.repeated_heads(val(args["q"]), args["k"], args["v"])
    if repeats is not None and not args["enable_gqa"]:
        k, v = repeats
        repeated_k, repeated_v = args["k"], args["v"]
        args |= {"k": Permuted(k.base, k.order), "v": Permuted(v.base, v.order), "enable_gqa": True}
        inner += [repeated_k, repeated_v]
        bound["repeat_kv"] = k.groups
    if args["attn_mask"] is not None:
        args["attn_mask"] = algebra.strip_expand(args["attn_mask"], min_dims=2)
        bound["mask"] = f"{val(args['attn_mask']).dtype} {list(val(args['attn_mask']).shape)}"
    return Match("attention", "attention", anchor, ATTENTION, args, (anchor,), tuple(inner), bound)


def recognise(anchor: fx.Node) -> Recognised:
    """Say why attention that arrives as a backend-specific ATen op is not taken."""
    gradient = algebra.is_training_graph(anchor.graph)
    lowered = f"it arrives already lowered to {algebra.aten_name(anchor)}"
    reason = "a gradient is needed and the attention kernels have no backward" if gradient else lowered
    return Recognised("lowered_attention", "attention", anchor, reason)


ATEN_FORMS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_ATEN_PACKETS = tuple(getattr(aten, name) for name in ATEN_FORMS)

ATTENTION_PATTERN = Pattern("attention", "attention", lambda node: node.target is ATTENTION.op, match)
LOWERED_ATTENTION_PATTERN = Pattern(
    "lowered_attention", "attention", lambda node: algebra.is_op(node, *_ATEN_PACKETS), recognise
)
