"""What would make a near miss match, or a recognised subgraph be rewritten: advice for each reason that has some."""

from __future__ import annotations

import re

HINTS: tuple[tuple[str, str], ...] = (
    # rms_norm
    ("the squares are computed in", "convert x to float32 before it is squared: h = x.float(); h.pow(2).mean(-1, ...)"),
    ("a difference is normalised", "nothing: this is a LayerNorm, which subtracts the mean, and Inductor fuses it"),
    ("the inverse root is computed in", "take the root in float32, and cast the normalised value afterwards"),
    ("the root is broadcast", "multiply the root into the tensor whose squares were averaged, row by row"),
    ("a sum of squares is not divided", "use .mean(-1, keepdim=True) where .sum(-1, keepdim=True) stands"),
    ("a variance stands under the root", "use x.pow(2).mean(-1, keepdim=True) if no mean is to be subtracted"),
    ("the mean is not over the last", "take the mean over the last dimension alone: .mean(-1, keepdim=True)"),
    ("the mean is rounded to", "leave the mean in float32 until its root is taken"),
    ("the mean is computed in", "compute mean and squares in one type, float32"),
    ("the mean is not of squares", "square the same tensor that is normalised: x.pow(2).mean(-1, keepdim=True)"),
    ("the weight is multiplied in first", "multiply x by the root first, then by the weight"),
    ("the root is rounded to", "multiply x by the root in float32 and round the product"),
    (
        "eps is added to the root",
        "add eps to the mean: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)",
    ),
    ("the value that is normalised is not", "multiply the root into the tensor whose squares were averaged"),
    ("what is multiplied in first is no vector", "multiply by the weight after x was multiplied by the root"),
    ("the result has gaps in memory", "call .contiguous() on the input"),
    # attention
    ("the softmax has", "give the mask no more dimensions than the scores: [batch, heads, queries, keys]"),
    ("what goes into the softmax", "keep softmax(q @ k.transpose(-1, -2) * scale + mask) together in one graph"),
    ("a factor has two dimensions", "give queries, keys and values a batch dimension: x[None]"),
    (
        "the scores go through another function",
        "leave only scale, mask and bias between product and softmax",
    ),
    ("it arrives already lowered", "call scaled_dot_product_attention outside of sdpa_kernel, without gradients"),
    (
        "the mask may hold -inf",
        "make the mask in the graph from a condition and torch.finfo(dtype).min, or call scaled_dot_product_attention",
    ),
    ("the mask holds -inf", "fill with torch.finfo(dtype).min, or call scaled_dot_product_attention"),
    ("the masks may overflow", "join the conditions of the masks before they become numbers"),
    ("masked scores are scaled after", "scale the scores before they are masked"),
    ("masked scores are replaced by", "join the conditions of the masks and fill once"),
    ("masked scores are ", "fill with torch.finfo(dtype).min, which leaves no weight"),
    ("the scores are multiplied by a tensor", "multiply the queries or the keys instead"),
    ("the scores are transposed behind", "transpose before mask, bias and scale"),
    ("the scores are regrouped", "keep [batch, heads, queries, keys] from the product to the softmax"),
    ("the scores are computed in", "compute scores and values in one type; only the softmax may be wider"),
    ("only a part of the probabilities", "multiply all of the probabilities with the values"),
    ("the probabilities have dropout", "set dropout to 0, or call model.eval()"),
    ("the scores are capped by tanh", "nothing: the operator has no softcap, and Inductor compiles it as ever"),
    ("attention sinks stand beside", "nothing: the operator has no sinks, and Inductor compiles them as ever"),
    ("the last dimension of the result is not", "call .contiguous() on the input"),
    # rope
    ("the cosine's product is subtracted", "add both products: x * cos + rotate_half(x) * sin"),
    ("the cosine multiplies another tensor", "rotate the halves of the very tensor that the cosine multiplies"),
    ("only one of the two halves is cast", "cast both halves, or the joined result"),
    ("the complex product is used as such", "turn it back: torch.view_as_real(...).flatten(-2)"),
    ("the rotated pairs are not joined", "join the pairs: .flatten(-2)"),
    ("the complex table is a conjugate", "resolve it: cis.conj().resolve_conj()"),
    ("the products with cosine and sine are", "compute both products in one type"),
    ("cosine and sine have more rows", "index the tables by position before they are multiplied"),
    ("cosine and sine of width", "give cosine and sine as many elements as are rotated, or half of them"),
    ("cosine and sine are exchanged", "multiply x by the cosine and the rotated x by the sine"),
    ("the two sums are not of the same", "use x1 * cos - x2 * sin and x2 * cos + x1 * sin of two halves of one tensor"),
    ("the two tensors that are rotated", "rotate two halves of one tensor"),
    ("neither half is negated", "negate the second half: torch.cat((-x2, x1), -1)"),
    ("both halves are negated", "negate the second half alone: torch.cat((-x2, x1), -1)"),
    ("it turns backwards", "negate the second half and not the first: torch.cat((-x2, x1), -1)"),
    ("the elements are paired neither", "pair the elements by halves or by neighbours"),
    # swiglu
    ("the gate's activation rounds", "keep the activation in the type of its argument"),
    ("the gate's activation is none of", "use one of these activations, or register a pattern of your own"),
    (r"\w+ multiplies a function of its own", "multiply the activation of one half by the other half: silu(gate) * up"),
    ("the gate is rounded on its way", "multiply the activation by the other half in the type that it is computed in"),
    ("the gate is broadcast", "nothing: a gate has the shape of what it multiplies"),
    (r"\w+ gates something else", "nothing, unless gate and up are meant to be projections of one tensor"),
    # topk
    ("the whole sorted tensor is read", "call torch.topk for the first k, and leave the sort to its other readers"),
    ("other elements of a sort", "take the first k of a descending sort: values[..., :k]"),
    ("pieces of different sizes", "take one k of values and indices, and slice the result further"),
    ("the gradient of the sort reads", "call torch.topk, whose gradient needs the first k alone"),
    ("the sort is of a tensor that is not contiguous", "call torch.topk, or .contiguous() on the input"),
    (
        "the sort is stable",
        "call torch.topk, if the order of equal elements is of no account",
    ),
    ("a piece of a sort is returned", "call torch.topk"),
    ("the number of elements taken", "make k a number that the graph is specialised for"),
    # router
    ("its weights are the choices themselves", "gather the weights from the scores: scores.gather(1, indices)"),
    # the gate
    ("no measurement on", 'set "portable_ops.gate" to "measure", which takes one, or to "always"'),
    ("a training graph", "run under torch.no_grad() or torch.inference_mode()"),
    ("a gradient is needed", "run under torch.no_grad() or torch.inference_mode()"),
    ("an inner value has other users", "read the result, and nothing from inside of it"),
    (
        r"stock computes .+ in the same kernel",
        "nothing: what stock joins there is quicker than a kernel of ours beside it",
    ),
    ("gate=never", 'set "portable_ops.gate" to "table"'),
    ("max_rewrites=", 'raise "portable_ops.max_rewrites"'),
    (r"\w+ is disabled", 'leave the kind out of "portable_ops.disable"'),
    ("an argument is computed only after", "compute the weight before the result of the norm is used"),
    ("an argument is itself one of the results", "nothing: one operator cannot read what it computes itself"),
    ("the pattern itself failed", "report it: this is an error of the pattern, and the graph is as it was"),
)
"""How a reason begins (a regular expression), and the advice; the first that fits counts."""


def hint(reason: str) -> str:
    """What would make it match, or "" where nobody knows."""
    return next((advice for start, advice in HINTS if re.match(start, reason)), "")
