"""Rotary position embedding of one tensor.

Matches, in any spelling that the algebra knows (commuted, cast, sliced, split, viewed, stacked)::

    x * cos + cat(-x2, x1) * sin                             # halves x1, x2, or even and odd elements, stacked
    cat(x1 * cos - x2 * sin, x2 * cos + x1 * sin)            # or stacked and flattened
    view_as_real(view_as_complex(x) * cis)

with what lets the rest of x pass, ``cat(passed, rotated)``, and with rotations of neighbouring parts of x, each by
its own tables, that are joined again (2-D positions).  cos and sin may come from anywhere, broadcast in any way.

Replaces with ``portable_ops::rope``.  Which elements form a pair is read off the graph as numbers
(:func:`algebra.lanes`), so that all ways to slice and join are one.

Declines when: the elements are not paired by halves or by neighbours, the signs are not those of a rotation forwards,
cosine and sine are seen to be exchanged, the products are of different tensors, or rounded to different types.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..kernels.rope import PAIRINGS, ROPE
from . import algebra
from .algebra import aten
from .match import Call, Match, Pattern, Unmatched, val

BACKWARDS = "it turns backwards: the signs are those of the inverse rotation"


@dataclasses.dataclass(frozen=True)
class _Turned:
    """A rotation: element j of ``node`` is ``base[plus[j]] * cos + base[minus[j]] * sin``, negated where ``~``.

    ``compute`` is the type of the products, ``product`` the one they are rounded to before they are added.
    """

    anchor: fx.Node
    node: fx.Node
    base: fx.Node
    plus: tuple[int, ...]
    minus: tuple[int, ...]
    cos: fx.Node
    sin: fx.Node | None
    compute: torch.dtype
    product: torch.dtype

    @property
    def width(self) -> int:
        return len(self.plus)

    def on(self, base: fx.Node) -> _Turned | None:
        """The same with the elements counted on ``base``, of which ``self.base`` is an arrangement."""
        if base is self.base:
            return self
        inner = algebra.lanes(self.base, base)
        if inner is None or val(base).dim() != val(self.base).dim():
            return None
        plus, minus = (tuple(_compose(inner.index, i) for i in lanes) for lanes in (self.plus, self.minus))
        return dataclasses.replace(self, base=base, plus=plus, minus=minus)


def _compose(index: Sequence[int], lane: int) -> int:
    return index[lane] if lane >= 0 else ~index[~lane]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where the pairs are (see ``portable_ops::rope``)."""

    pairing: str
    out_pairing: str
    offset: int
    sections: int = 1


def match(anchor: fx.Node) -> Match | None:
    """Match the rotation whose sum, join or complex product ``anchor`` is."""
    turned = _turned(anchor)
    if turned is None:
        return None
    try:
        _check(turned)
    except Unmatched as reason:
        raise Unmatched(str(reason), *algebra.between(turned.base, turned.node)) from None
    joint = _joined_with_rest(turned)
    if joint is not None:
        parts, base, layout, node = joint
        if anchor is not min(p.anchor for p in parts):
            return None  # it belongs to the match of the first part
        return _build(anchor, parts, base, layout, node)
    moved = [m for m in map(turned.on, algebra.lane_sources(turned.base)) if m is not None and _layout(m) is not None]
    if not moved:
        raise Unmatched(_why_no_layout(turned), *algebra.between(turned.base, turned.node))
    # The furthest tensor that has just the rotary elements: what rearranges them in between is taken over.
    whole = [m for m in moved if algebra.same_size(val(m.base).shape[-1], m.width)]
    if whole:
        return _build(anchor, (whole[-1],), whole[-1].base, _layout(whole[-1]), turned.node)
    base, layout = moved[0].base, _layout(moved[0])
    part = Call(aten.slice.Tensor, (base, val(base).dim() - 1, layout.offset, layout.offset + turned.width))
    return _build(anchor, (turned,), part, dataclasses.replace(layout, offset=0), turned.node)


def _turned(anchor: fx.Node) -> _Turned | None:
    """The rotation at ``anchor``, with a cast behind it; the layout of its pairs is not looked at yet."""
    if algebra.is_op(anchor, aten.add, aten.sub):
        turned = _by_arrangement(anchor)
    elif algebra.is_op(anchor, aten.mul):
        turned = _by_complex_product(anchor)
    else:
        turned = _by_halves(anchor)
    return None if turned is None else _with_cast(turned)


# ------------------------------------------------------------------------------- x * cos + arrangement(x) * sin


def _by_arrangement(anchor: fx.Node) -> _Turned | None:
    terms = _terms(anchor)
    if terms is None:
        return None
    near = False
    for (sign, cos_term), (sin_sign, sin_term) in (terms, terms[::-1]):
        for (x, cos), (rotated, sin) in itertools.product(algebra.commuted(cos_term), algebra.commuted(sin_term)):
            if not _is_arrangement(rotated):
                continue
            for base in algebra.lane_sources(x):
                found = _vectors(base, x, rotated)
                if found is None:
                    continue
                if sign < 0:
                    raise Unmatched("the cosine's product is subtracted", *algebra.between(base, anchor))
                minus = found[1] if sin_sign > 0 else tuple(~i for i in found[1])
                compute, product = _rounding(terms)
                tables = algebra.strip_upcast(cos), algebra.strip_upcast(sin)
                return _Turned(anchor, anchor, base, found[0], minus, *tables, compute, product)
            near = near or _negates_a_half(rotated)
    if near:
        raise Unmatched(
            "the cosine multiplies another tensor than the one whose halves the sine multiplies",
            *(term for _, term in terms),
        )
    return None


def _is_arrangement(x: Any) -> bool:
    """Whether ``x`` is joined of parts."""
    return isinstance(x, fx.Node) and algebra.joined(algebra.lane_sources(x)[-1]) is not None


def _negates_a_half(x: fx.Node) -> bool:
    """Whether ``x`` is two parts of one tensor, one of them negated."""
    parts = algebra.joined(algebra.lane_sources(x)[-1])
    if len(parts) != 2:
        return False
    for base in algebra.lane_sources(parts[0])[1:]:
        found = algebra.lanes(x, base)
        if found is not None:
            return len({i < 0 for i in found.index}) == 2 and len({max(i, ~i) for i in found.index}) == len(found.index)
    return False


def _vectors(base: fx.Node, *nodes: fx.Node) -> list[tuple[int, ...]] | None:
    """The elements of ``base`` that each of ``nodes`` is made of, if they are equally many."""
    if any(val(n).dim() != val(base).dim() for n in nodes):
        return None
    found = [algebra.lanes(n, base) for n in nodes]
    if None in found or len({f.shape for f in found}) != 1:
        return None
    return [f.index for f in found]


# -------------------------------------------------------------------- join(u * cos - v * sin, v * cos + u * sin)


@dataclasses.dataclass(frozen=True)
class _Halves:
    """One reading of two sums of products: ``signs`` of u cos, v sin, v cos and u sin; the tables of each."""

    signs: tuple[int, int, int, int]
    u: fx.Node
    v: fx.Node
    cos: tuple[fx.Node, fx.Node]
    sin: tuple[fx.Node, fx.Node]


def _by_halves(anchor: fx.Node) -> _Turned | None:
    join = _join_of_two(anchor)
    if join is None:
        return None
    parts, pairing, node = join
    casts = [algebra.is_cast(p) for p in parts]
    sums = [algebra.strip_aliases(p.args[0]) if c else p for p, c in zip(parts, casts, strict=True)]
    terms = [_terms(s) for s in sums]
    if None in terms:
        return None
    readings = list(_readings(*terms))
    reasons = []
    for reading in sorted(readings, key=lambda r: not _is_whole(r, sums[0])):
        turned = _read(reading, anchor, node, pairing)
        if isinstance(turned, _Turned) and _layout_somewhere(turned):
            compute, product = _rounding([*terms[0], *terms[1]])
            if casts[0] != casts[1]:
                raise Unmatched("only one of the two halves is cast", *sums)
            return dataclasses.replace(turned, compute=compute, product=product)
        if turned is not None:
            reasons.append(turned if isinstance(turned, str) else _why_no_layout(turned))
    why = BACKWARDS if BACKWARDS in reasons else next(iter(reasons), _why_unrelated(*terms))
    if why is not None:
        raise Unmatched(why, *(term for _, term in (*terms[0], *terms[1])))
    return None


def _join_of_two(anchor: fx.Node) -> tuple[list[fx.Node], str, fx.Node] | None:
    """The two parts that ``anchor`` joins, the pairing of what results, and the node that has one last dimension."""
    parts = algebra.joined(anchor)
    if parts is None or len(parts) != 2:
        return None
    dims = val(anchor).dim()
    dim = algebra.argument(anchor, "dim") % dims
    parts = [algebra.strip_aliases(p) for p in parts]
    if algebra.is_op(anchor, aten.cat) and dim == dims - 1 and not all(_is_unsqueezed(p, dim) for p in parts):
        return parts, "half", anchor
    if dim < dims - 2:
        return None
    if algebra.is_op(anchor, aten.cat):
        if not all(_is_unsqueezed(p, dim) for p in parts):
            return None
        parts = [algebra.strip_aliases(p.args[0]) for p in parts]
    flat = _only_reader(anchor)
    shape = val(anchor).shape
    if flat is None or not algebra.is_reshape(flat):
        return None
    if not algebra.same_shape(val(flat).shape, (*shape[:-2], shape[-2] * shape[-1])):
        return None
    return parts, "half" if dim == dims - 2 else "interleaved", flat


def _is_unsqueezed(x: fx.Node, dim: int) -> bool:
    return algebra.is_op(x, aten.unsqueeze) and x.args[1] % val(x).dim() == dim


def _readings(first: Any, second: Any) -> Iterator[_Halves]:
    """All ways to read the sums as ``u cos, v sin`` and ``v cos, u sin`` with the same u, v and related tables."""
    for (u_cos, v_sin), (v_cos, u_sin) in itertools.product((first, first[::-1]), (second, second[::-1])):
        products = (u_cos, v_sin, v_cos, u_sin)
        for factors in itertools.product(*(_signed_factors(p) for p in products)):
            (s1, u1, c1), (s2, v1, n1), (s3, v2, c2), (s4, u2, n2) = factors
            if algebra.same_value(u1, u2) and algebra.same_value(v1, v2) and not algebra.same_value(u1, v1):
                signs = (s1, s2, s3, s4)
                yield _Halves(signs, u1, v1, (c1, c2), (n1, n2))


def _signed_factors(term: tuple[int, fx.Node]) -> Iterator[tuple[int, Any, Any]]:
    """Both orders of the factors of a term, with minus signs taken out of the first."""
    sign, product = term
    for a, b in algebra.commuted(product):
        a, b = algebra.strip_upcast(a), algebra.strip_upcast(b)
        negated = sign
        while algebra.is_op(a, aten.neg):
            a, negated = algebra.strip_upcast(a.args[0]), -negated
        yield negated, a, b


def _is_whole(reading: _Halves, part: fx.Node) -> bool:
    """Whether u has the shape of the result: tables are broadcast."""
    return algebra.same_shape(val(reading.u).shape, val(part).shape)


def _read(reading: _Halves, anchor: fx.Node, node: fx.Node, pairing: str) -> _Turned | str | None:
    """The rotation that a reading says (its types left open), why it is none, or None if u and v are of two tensors."""
    vectors, base = None, None
    for base in algebra.lane_sources(reading.u)[1:]:
        if val(base).dim() == val(node).dim():
            vectors = _vectors(base, reading.u, reading.v)
        if vectors is not None:
            break
    if vectors is None:
        return None
    u, v = vectors
    cos, sin = _whole_table(reading.cos, pairing), _whole_table(reading.sin, pairing)
    if cos is None or sin is None:
        return "the halves are multiplied by different cosines or sines"
    if reading.signs != (1, -1, 1, 1):
        if reading.signs == (1, 1, 1, -1):
            return BACKWARDS
        return "the signs are not those of a rotation: u cos - v sin and v cos + u sin"
    if (cos is reading.cos[0]) != (sin is reading.sin[0]):
        return "cosine and sine are not both given for each pair or both for each element"
    plus, minus = _interlace(u, v, pairing), _interlace(tuple(~i for i in v), u, pairing)
    dtype = val(node).dtype
    return _Turned(anchor, node, base, plus, minus, cos, sin, dtype, dtype)


def _interlace(first: Sequence[int], second: Sequence[int], pairing: str) -> tuple[int, ...]:
    if pairing == "half":
        return (*first, *second)
    return tuple(itertools.chain.from_iterable(zip(first, second, strict=True)))


def _whole_table(parts: tuple[fx.Node, fx.Node], pairing: str) -> fx.Node | None:
    """The table that both parts are (one value per pair), or whose two parts they are."""
    if algebra.same_value(*parts):
        return parts[0]
    for table in algebra.lane_sources(parts[0])[1:]:
        found = _vectors(table, *parts)
        if found is not None and _interlace(*found, pairing) == tuple(range(2 * len(found[0]))):
            return table if val(table).shape[-1] == 2 * len(found[0]) else None
    return None


def _why_unrelated(first: Any, second: Any) -> str | None:
    """Words for sums that share some factors, but not as a rotation does."""
    factors = [[algebra.strip_upcast(a) for a in product.args[:2]] for _, product in (*first, *second)]
    shared = {a for a in itertools.chain(*factors[:2]) if a in itertools.chain(*factors[2:])}
    sliced = {a for a in itertools.chain(*factors) if isinstance(a, fx.Node) and len(algebra.lane_sources(a)) > 1}
    if len(shared) < 3 or not sliced:
        return None
    if len(shared) == 3:
        return "the two sums are not of the same two tensors, each with cosine and sine"
    return "the two tensors that are rotated are not parts of one"


# ---------------------------------------------------------------------- view_as_real(view_as_complex(x) * cis)


def _by_complex_product(anchor: fx.Node) -> _Turned | None:
    for z, cis in algebra.commuted(anchor):
        z = algebra.strip_aliases(z)
        if not algebra.is_op(z, aten.view_as_complex) or not isinstance(cis, fx.Node):
            continue
        if not algebra.same_shape(val(z).shape, val(anchor).shape):
            continue
        if not val(cis).dtype.is_complex or not val(cis).dim():
            continue  # a scale, or one angle for all
        real = _only_reader(anchor)
        if not algebra.is_op(real, aten.view_as_real):
            raise Unmatched("the complex product is used as such: it is not turned back into pairs of real numbers", z)
        pairs = z.args[0]
        for base in algebra.lane_sources(pairs):
            found = algebra.lanes(pairs, base) if val(base).dim() == val(z).dim() else None
            if found is not None:
                break
        else:
            return None
        flat = _only_reader(real)
        shape = val(z).shape
        if not algebra.is_reshape(flat) or not algebra.same_shape(val(flat).shape, (*shape[:-1], 2 * shape[-1])):
            raise Unmatched("the rotated pairs are not joined into one dimension again", z, real)
        u, v = found.index[0::2], found.index[1::2]
        plus, minus = _interlace(u, v, "interleaved"), _interlace(tuple(~i for i in v), u, "interleaved")
        dtype = val(real).dtype
        return _Turned(anchor, flat, base, plus, minus, cis, None, dtype, dtype)
    return None


# ------------------------------------------------------------------------------------------- types and tables


def _terms(x: fx.Node) -> tuple[tuple[int, fx.Node], tuple[int, fx.Node]] | None:
    """The two products that ``x`` is the sum or difference of, each with its sign."""
    if not algebra.is_op(x, aten.add, aten.sub) or x.kwargs.get("alpha", 1) != 1:
        return None
    terms = []
    for position, operand in enumerate(x.args[:2]):
        sign = -1 if position == 1 and algebra.is_op(x, aten.sub) else 1
        operand = _uncast(operand)
        while algebra.is_op(operand, aten.neg):
            operand, sign = _uncast(operand.args[0]), -sign
        if not algebra.is_op(operand, aten.mul) or any(algebra.dtype_of(a) is None for a in operand.args[:2]):
            return None
        terms.append((sign, operand))
    return tuple(terms)


def _uncast(x: Any) -> Any:
    x = algebra.strip_aliases(x)
    return algebra.strip_aliases(x.args[0]) if algebra.is_cast(x) else x


def _rounding(terms: Sequence[tuple[int, fx.Node]]) -> tuple[torch.dtype, torch.dtype]:
    """The type of the products, and the one they are rounded to before they are added."""
    computed = {val(product).dtype for _, product in terms}
    casts = {val(u).dtype for _, product in terms for u in product.users if algebra.is_cast(u)}
    bare = {val(product).dtype for _, product in terms if not all(algebra.is_cast(u) for u in product.users)}
    if len(computed) > 1 or len(casts | bare) != 1:
        raise Unmatched("the products with cosine and sine are computed in or rounded to different types")
    return computed.pop(), (casts | bare).pop()


def _with_cast(turned: _Turned) -> _Turned:
    """``turned`` with the cast that is all that happens to it, unless a cast stands in front of it already."""
    user = _only_reader(turned.node)
    if val(turned.node).dtype != turned.product or not _is_rounding(user):
        return turned
    return dataclasses.replace(turned, node=user)


def _is_rounding(x: Any) -> bool:
    """A cast to a floating-point type."""
    return algebra.is_cast(x) and val(x).dtype.is_floating_point


def _check(turned: _Turned) -> None:
    """Refuse tables that do not fit, or are seen to be the wrong ones."""
    if not algebra.same_shape(val(turned.node).shape[:-1], val(turned.base).shape[:-1]):
        raise Unmatched("cosine and sine have more rows than the tensor that they rotate")
    if turned.sin is None:
        return
    widths = [val(t).shape[-1] if val(t).dim() else 0 for t in (turned.cos, turned.sin)]
    if not any(all(algebra.same_size(w, n) for w in widths) for n in (turned.width, turned.width // 2)):
        raise Unmatched(f"cosine and sine of width {widths[0]} and {widths[1]} do not fit {turned.width} elements")
    if algebra.table_function(turned.cos) is aten.sin or algebra.table_function(turned.sin) is aten.cos:
        raise Unmatched("cosine and sine are exchanged")


def _only_reader(x: fx.Node) -> fx.Node | None:
    """The one user of ``x``, looking through aliases; None if there are several."""
    users = [u for u in algebra.readers(x) if not algebra.is_alias(u)]
    return users[0] if len(users) == 1 else None


# ------------------------------------------------------------------------------------------------------ layout


@functools.cache
def _pairs(pairing: str, out_pairing: str, width: int, sections: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``plus`` and ``minus`` of a rotation of a tensor of ``width`` elements."""
    plus, minus = [0] * width, [0] * width
    size, half = width // sections, width // sections // 2
    for start, p in itertools.product(range(0, width, size), range(half)):
        u, v = (p, p + half) if pairing == "half" else (2 * p, 2 * p + 1)
        first, second = (p, p + half) if out_pairing == "half" else (2 * p, 2 * p + 1)
        plus[start + first], minus[start + first] = start + u, ~(start + v)
        plus[start + second], minus[start + second] = start + v, start + u
    return tuple(plus), tuple(minus)


def _layout(turned: _Turned) -> _Layout | None:
    """How the elements are paired, if it is by halves or by neighbours."""
    offset, width = min(turned.plus), turned.width
    if offset < 0 or width % 2:
        return None
    plus = tuple(i - offset for i in turned.plus)
    minus = tuple(i - offset if i >= 0 else ~(~i - offset) for i in turned.minus)
    for pairing, out_pairing in itertools.product(PAIRINGS, PAIRINGS):
        if (plus, minus) == _pairs(pairing, out_pairing, width, 1):
            return _Layout(pairing, out_pairing, offset)
    return None


def _layout_somewhere(turned: _Turned) -> bool:
    moved = (turned.on(base) for base in algebra.lane_sources(turned.base))
    return any(m is not None and _layout(m) is not None for m in moved)


def _why_no_layout(turned: _Turned) -> str:
    if not any(i < 0 for i in turned.minus):
        return "neither half is negated where the sine multiplies it"
    if all(i < 0 for i in turned.minus):
        return "both halves are negated where the sine multiplies them"
    if _layout(dataclasses.replace(turned, minus=tuple(~i for i in turned.minus))) is not None:
        return BACKWARDS
    return "the elements are paired neither by halves nor by neighbours"


def _joined_with_rest(turned: _Turned) -> tuple[tuple[_Turned, ...], fx.Node, _Layout, fx.Node] | None:
    """The join of ``turned`` with the rest of the tensor that it is a part of.

    The rest passes through or is rotated by other tables.
    """
    join = _only_reader(turned.node)
    dims = val(turned.node).dim()
    if not algebra.is_op(join, aten.cat) or algebra.argument(join, "dim") % dims != dims - 1:
        return None
    others = {}
    for part in algebra.joined(join):
        if algebra.strip_aliases(part) is not algebra.strip_aliases(turned.node):
            others[part] = _turned_before(part)
    for base in algebra.lane_sources(turned.base):
        found = _cover(turned, join, others, base)
        if found is not None:
            parts, layout = found
            node = join
            user = _only_reader(join)
            plain = all(val(p.node).dtype == p.product for p in parts)
            if plain and _is_rounding(user):
                node = user
            return parts, base, layout, node
    return None


def _turned_before(x: fx.Node) -> _Turned | None:
    """The rotation that ends at ``x``."""
    x = algebra.strip_aliases(x)
    last = algebra.lane_sources(_uncast(x))[:2]
    if algebra.is_op(last[-1], aten.view_as_real):
        last.append(last[-1].args[0])
    try:
        for node in last:
            turned = _turned(node) if _is_anchor(node) else None
            if turned is not None and turned.node is x:
                _check(turned)
                return turned
    except Unmatched:
        return None
    return None


def _cover(
    turned: _Turned, join: fx.Node, others: dict[fx.Node, _Turned | None], base: fx.Node
) -> tuple[tuple[_Turned, ...], _Layout] | None:
    """The rotations among the parts of ``join`` and their layout, if the parts make up ``base`` in its order."""
    position = 0
    rotations: list[tuple[_Turned, _Layout]] = []
    for part in algebra.joined(join):
        rotation = others.get(part, turned)
        if rotation is None:
            passed = algebra.lanes(part, base)
            if passed is None or passed.index != tuple(range(position, position + passed.shape[-1])):
                return None
            position += passed.shape[-1]
            continue
        rotation = rotation.on(base)
        layout = None if rotation is None else _layout(rotation)
        if layout is None or layout.offset != position or val(part).dtype != val(join).dtype:
            return None
        position += rotation.width
        rotations.append((rotation, layout))
    if position != val(base).shape[-1]:
        return None
    layout = _united(rotations)
    return None if layout is None else (tuple(r for r, _ in rotations), layout)


def _united(rotations: list[tuple[_Turned, _Layout]]) -> _Layout | None:
    """One layout for rotations of neighbouring parts, if there is one."""
    (first, layout), *rest = rotations
    if not rest:
        return layout
    position = layout.offset
    for turned, own in rotations:
        same = (own.pairing, own.out_pairing) == (layout.pairing, layout.out_pairing)
        tables = all(_like(a, b) for a, b in ((turned.cos, first.cos), (turned.sin, first.sin)))
        types = (turned.compute, turned.product) == (first.compute, first.product)
        per_pair = len({algebra.same_size(val(t.cos).shape[-1], t.width) for t in (turned, first)}) == 1
        if not (same and tables and types and per_pair) or own.offset != position:
            return None
        position += turned.width
    if layout.pairing == layout.out_pairing == "interleaved":
        return layout  # neighbours stay neighbours
    if len({turned.width for turned, _ in rotations}) != 1:
        return None
    return dataclasses.replace(layout, sections=len(rotations))


def _like(a: fx.Node | None, b: fx.Node | None) -> bool:
    """Whether tables can be joined along their last dimension."""
    if a is None or b is None:
        return a is b
    return algebra.same_shape(val(a).shape[:-1], val(b).shape[:-1]) and val(a).dtype == val(b).dtype


# ------------------------------------------------------------------------------------------------------- result


def _build(anchor: fx.Node, parts: Sequence[_Turned], x: fx.Node | Call, layout: _Layout, node: fx.Node) -> Match:
    first = parts[0]
    order = _memory_order(val(node))
    bound = {
        "pairing": layout.pairing,
        "out_pairing": layout.out_pairing,
        "rotary_dim": sum(p.width for p in parts),
        "offset": layout.offset,
        "sections": layout.sections,
        "compute_dtype": first.compute,
        "product_dtype": first.product,
        "out_dtype": val(node).dtype,
    }
    cos, sin = _tables(parts)
    args: dict[str, Any] = {
        "x": x,
        "cos": cos,
        "sin": sin,
        **bound,
        "out_order": algebra.unless_plain(order),
    }
    inner = algebra.between(x.args[0] if isinstance(x, Call) else x, node)
    return Match("rope", "rope", anchor, ROPE, args, (node,), inner, bound)


def _tables(parts: Sequence[_Turned]) -> tuple[fx.Node | Call, fx.Node | Call]:
    """Cosine and sine of all parts; those of a complex table are its real and imaginary parts."""
    cos = _table(tuple(p.cos for p in parts))
    if parts[0].sin is not None:
        return cos, _table(tuple(p.sin for p in parts))
    if any(val(p.cos).is_conj() for p in parts):
        raise Unmatched("the complex table is a conjugate that only exists as such")
    numbers = Call(aten.view_as_real.default, (cos,))
    return Call(aten.select.int, (numbers, -1, 0)), Call(aten.select.int, (numbers, -1, 1))


def _table(tables: tuple[fx.Node, ...]) -> fx.Node | Call:
    return tables[0] if len(tables) == 1 else Call(aten.cat.default, (list(tables), -1))


def _memory_order(value: torch.Tensor) -> tuple[int, ...]:
    order = algebra.dense_order(value)
    if order is None:
        raise Unmatched("the last dimension of the result is not the innermost one in memory")
    return order


def _is_anchor(node: fx.Node) -> bool:
    if algebra.is_backward(node):
        return False
    if algebra.is_op(node, aten.add, aten.sub):
        return _terms(node) is not None
    if algebra.is_op(node, aten.mul):
        return any(algebra.is_op(algebra.strip_aliases(a), aten.view_as_complex) for a in node.args[:2])
    join = _join_of_two(node) if algebra.is_op(node, aten.cat, aten.stack) else None
    return join is not None and all(_terms(_uncast(p)) is not None for p in join[0])


ROPE_PATTERN = Pattern("rope", "rope", _is_anchor, match)
