"""Attention: ``softmax(q k^T * scale + mask) v`` over heads.

Matches a pinned ``scaled_dot_product_attention`` (``portable_ops::attention``, put there before autograd tracing by
``inductor_ext.pin``) and whatever stands around it that attention does not need::

    k = repeat_kv(k, n);  v = repeat_kv(v, n)        # any spelling: the heads are read once, unrepeated
    mask = mask.expand(B, H, L, S)                   # the source is read with stride 0

Replaces with ``portable_ops::attention(..., enable_gqa=True)`` on the unrepeated heads.

The backend-specific ATen forms of attention (``_scaled_dot_product_flash_attention`` and so on) are recognised and
declined: they arrive where attention could not be pinned, and the reason is the pin's.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..kernels.attention import ATTENTION
from . import algebra
from .algebra import aten
from .match import Match, Pattern, Permuted, Unmatched, val


def match(anchor: fx.Node) -> Match:
    """Match pinned attention at ``anchor`` together with the head repetition in front of it."""
    args = ATTENTION.bind(anchor.args, dict(anchor.kwargs))
    inner: list[fx.Node] = []
    bound: dict[str, Any] = {"is_causal": args["is_causal"], "scale": args["scale"], "repeat_kv": 1}
    repeats = _repeated_heads(args["q"], args["k"], args["v"])
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


def _repeated_heads(q: fx.Node, k: fx.Node, v: fx.Node) -> tuple[algebra.HeadRepeat, algebra.HeadRepeat] | None:
    if val(q).dim() != 4 or val(k).dim() != 4:
        return None
    repeats = algebra.head_repeat(k), algebra.head_repeat(v)
    if None in repeats or not algebra.same_size(repeats[0].groups, repeats[1].groups):
        return None
    heads = repeats[0].base.meta["val"].shape[repeats[0].order[1]]
    return repeats if algebra.same_size(heads * repeats[0].groups, val(q).shape[1]) else None


def decline(anchor: fx.Node) -> None:
    """Say why attention that arrives as a backend-specific ATen op is not taken."""
    gradient = any(n.op == "placeholder" and n.name.startswith("tangents") for n in anchor.graph.nodes)
    if gradient:
        raise Unmatched("a gradient is needed and the attention kernels have no backward")
    raise Unmatched(f"it arrives already lowered to {algebra.aten_name(anchor)}")


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
    "lowered_attention", "attention", lambda node: algebra.is_op(node, *_ATEN_PACKETS), decline
)
