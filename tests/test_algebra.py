"""The algebra of graphs: what it sees through, and what it must not."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch
from portable_ops.patterns import algebra
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def traced(function: Callable, *args: Tensor) -> tuple[fx.Node, list[fx.Node]]:
    """The node that ``function`` returns, in an ATen graph, and the graph's inputs."""
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    return graph.output_node().args[0], [n for n in graph.nodes if n.op == "placeholder"]


def x(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


# ---------------------------------------------------------------------------------------------- casts and aliases


@pytest.mark.parametrize(
    ("cast", "dtype", "seen_through"),
    [
        (lambda t: t.float(), BF16, True),
        (lambda t: t.float(), torch.float16, True),
        (lambda t: t.float().double(), BF16, True),
        (lambda t: t.detach().float(), BF16, True),
        (lambda t: t.bfloat16(), F32, False),
        (lambda t: t.half(), BF16, False),
        (lambda t: t.bfloat16(), torch.float16, False),
        (lambda t: t.float(), torch.int64, False),
        (lambda t: t.float(), torch.bool, False),
        (lambda t: t.float() + 0, BF16, False),
        (lambda t: t.float(), torch.float8_e4m3fn, False),
        (lambda t: t.to(torch.float8_e5m2), F32, False),
    ],
)
def test_only_casts_that_lose_nothing_are_seen_through(cast: Callable, dtype: torch.dtype, seen_through: bool) -> None:
    node, (source,) = traced(cast, x(2, dtype=dtype))
    assert (algebra.strip_upcast(node) is source) == seen_through


def test_a_rounding_inside_a_chain_of_casts_stays() -> None:
    node, (source,) = traced(lambda t: t.bfloat16().float(), x(2))
    rounded = algebra.strip_upcast(node)
    assert rounded is not source and algebra.dtype_of(rounded) == BF16


def test_a_product_with_one_is_an_alias() -> None:
    for alias in (lambda t: t * 1, lambda t: t * 1.0, lambda t: torch.ops.aten.alias(t), lambda t: t.detach()):
        node, (source,) = traced(alias, x(2))
        assert algebra.strip_aliases(node) is source
    for other in (lambda t: t * 2, lambda t: t * t, lambda t: 1 - t):
        node, (source,) = traced(other, x(2))
        assert algebra.strip_aliases(node) is node
    node, _ = traced(lambda t: t * 1.5, x(2, dtype=torch.int64))
    assert not algebra.is_alias(node)
    node, _ = traced(lambda t: t * 1.0, x(2, dtype=torch.int64))
    assert not algebra.is_alias(node)  # the type changes


def test_readers_look_through_aliases() -> None:
    def function(t: Tensor) -> Tensor:
        root = t.sqrt()
        return (1.0 * root.reciprocal()) * t

    node, _ = traced(function, x(2))
    reciprocal = next(n for n in node.graph.nodes if algebra.is_op(n, torch.ops.aten.reciprocal))
    assert node in set(algebra.readers(reciprocal))


# -------------------------------------------------------------------------------------------------------- scalars


@pytest.mark.parametrize(
    ("constant", "number"),
    [
        (lambda: torch.full((), 1e-6), 1e-6),
        (lambda: torch.full((4,), 0.5), 0.5),
        (lambda: torch.full((), 1), 1.0),
        (lambda: torch.full((), 1e-6, dtype=F64).float(), 1e-6),
        (lambda: torch.full((), 2.0, dtype=BF16), 2.0),
        (lambda: torch.full((), 1e-6, dtype=BF16), None),
        (lambda: torch.full((), 1e-6).bfloat16(), None),
        (lambda: torch.full((), 1e-6).bfloat16().float(), None),
    ],
)
def test_constants_are_numbers_unless_a_short_type_rounds_them(constant: Callable, number: float | None) -> None:
    node, _ = traced(lambda t: t + constant(), x(4))
    assert algebra.scalar(node.args[1]) == number


def test_python_numbers() -> None:
    assert algebra.scalar(2) == 2.0 and algebra.scalar(0.5) == 0.5
    assert algebra.scalar(True) is None and algebra.scalar(None) is None


@pytest.mark.parametrize("shift", [lambda v, c: v + c, lambda v, c: c + v])
def test_shifts_by_numbers_and_by_tensors_of_one_element(shift: Callable) -> None:
    node, (v,) = traced(lambda v: shift(v, 1e-6), x(3, 1))
    assert algebra.plus_scalar(node) == (v, 1e-6)
    node, (v, c) = traced(shift, x(3, 1), x())
    assert algebra.plus_scalar(node) == (v, c)


def test_what_is_no_shift() -> None:
    for other in (lambda v, c: v - c, lambda v, c: v * c, lambda v, c: torch.add(v, c, alpha=2)):
        node, _ = traced(other, x(3, 1), x())
        assert algebra.plus_scalar(node) is None
    node, _ = traced(lambda v, w: v + w, x(3, 1), x(1))
    assert algebra.plus_scalar(node) is None  # one element, but not a scalar: it may promote


# --------------------------------------------------------------------------------------------- powers and means

INVERSE_ROOTS = [
    lambda z: torch.rsqrt(z),
    lambda z: z**-0.5,
    lambda z: 1 / torch.sqrt(z),
    lambda z: torch.sqrt(z).reciprocal(),
    lambda z: torch.sqrt(z) ** -1,
    lambda z: 1.0 / z**0.5,
    lambda z: torch.div(torch.full((), 1.0), torch.sqrt(z)),
]


@pytest.mark.parametrize("spelling", INVERSE_ROOTS)
def test_inverse_square_roots(spelling: Callable) -> None:
    node, (z,) = traced(spelling, x(3))
    assert algebra.inverse_square_root(node) is z


@pytest.mark.parametrize(
    "other",
    [lambda z: z**0.5, lambda z: 2 / torch.sqrt(z), lambda z: z**-1, lambda z: z**-2, lambda z: 1 / z, lambda z: z],
)
def test_what_is_no_inverse_square_root(other: Callable) -> None:
    node, _ = traced(other, x(3))
    assert algebra.inverse_square_root(node) is None


@pytest.mark.parametrize("square", [lambda f: f * f, lambda f: f**2, lambda f: f.square(), lambda f: f.pow(2.0)])
def test_squares(square: Callable) -> None:
    node, (f,) = traced(square, x(3))
    assert algebra.squared(node) is f


def test_a_square_of_two_casts_of_one_value() -> None:
    node, (f,) = traced(lambda f: f.float() * f.float(), x(3, dtype=BF16))
    assert algebra.strip_upcast(algebra.squared(node)) is f
    node, _ = traced(lambda f: f.float() * f, x(3, dtype=BF16))
    assert algebra.squared(node) is None or algebra.dtype_of(algebra.squared(node)) == F32
    node, _ = traced(lambda f, g: f.float() * g.float(), x(3, dtype=BF16), x(3, dtype=BF16))
    assert algebra.squared(node) is None
    node, _ = traced(lambda f: f.bfloat16().float() * f, x(3))
    assert algebra.squared(node) is None


MEANS = [
    lambda s: s.mean(-1, keepdim=True),
    lambda s: s.mean(2, keepdim=True),
    lambda s: torch.mean(s, (-1,), True),
    lambda s: s.sum(-1, keepdim=True) / 6,
    lambda s: s.sum(-1, keepdim=True) * (1 / 6),
    lambda s: (1 / 6) * s.sum(-1, keepdim=True),
]


@pytest.mark.parametrize("spelling", MEANS)
def test_means_over_the_last_dimension(spelling: Callable) -> None:
    node, (s,) = traced(spelling, x(2, 3, 6))
    assert algebra.last_dim_mean(node) is s


@pytest.mark.parametrize(
    "other",
    [
        lambda s: s.mean(1, keepdim=True),
        lambda s: s.mean(-1),
        lambda s: s.mean((-1, -2), keepdim=True),
        lambda s: s.mean(),
        lambda s: s.sum(-1, keepdim=True),
        lambda s: s.sum(-1, keepdim=True) / 5,
        lambda s: s.sum(-1, keepdim=True) * 6,
        lambda s: s.sum(1, keepdim=True) / 3,
    ],
)
def test_what_is_no_mean_over_the_last_dimension(other: Callable) -> None:
    node, _ = traced(other, x(2, 3, 6))
    assert algebra.last_dim_mean(node) is None


def test_variances() -> None:
    for variance in (lambda s: s.var(-1, keepdim=True), lambda s: torch.var_mean(s, -1, keepdim=True)[0]):
        node, _ = traced(variance, x(2, 6))
        assert algebra.is_variance(node)
    node, _ = traced(lambda s: s.pow(2).mean(-1), x(2, 6))
    assert not algebra.is_variance(node)


# --------------------------------------------------------------------------------------------------- views and memory


def test_the_nodes_between_two() -> None:
    def function(h: Tensor, w: Tensor) -> Tensor:
        f = h.double()
        other = w.exp()
        return f * f.mean() * other

    node, (h, _) = traced(function, x(3), x(3))
    names = [algebra.aten_name(n) for n in algebra.between(h, node)]
    assert names == ["_to_copy", "mean", "mul"]


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (x(2, 3, 4), (0, 1, 2)),
        (x(2, 3, 4).transpose(0, 1), (1, 0, 2)),
        (x(2, 3, 4, 5).permute(2, 0, 1, 3), (1, 2, 0, 3)),
        (x(1, 3, 4).transpose(0, 1), (0, 1, 2)),  # where a dimension of size 1 lies makes no difference
        (x(4), (0,)),
        (x(2, 3, 4).transpose(1, 2), None),  # the last dimension is not innermost
        (x(2, 3, 8)[..., :4], None),  # gaps
        (x(3, 4).expand(2, 3, 4), None),  # overlaps
    ],
)
def test_the_order_of_dimensions_in_memory(tensor: Tensor, order: tuple[int, ...] | None) -> None:
    assert algebra.dense_order(tensor) == order


def test_vectors_with_dimensions_of_size_one() -> None:
    for view in (lambda w: w.view(1, 1, -1), lambda w: w[None].float(), lambda w: w.float().unsqueeze(0).squeeze(0)):
        node, (w,) = traced(view, x(6, dtype=BF16))
        assert algebra.as_vector(node) is w
    for other in (lambda w: w.view(2, 3), lambda w: w.expand(2, 6), lambda w: w.view(6, 1).expand(6, 2)):
        node, (w,) = traced(other, x(6))
        assert algebra.as_vector(node) is not w


def test_expansions_are_stripped_down_to_a_rank() -> None:
    node, (m,) = traced(lambda m: m.expand(3, 4).expand(2, 3, 4), x(4))
    assert algebra.strip_expand(node) is m
    assert algebra.strip_expand(node, min_dims=2).meta["val"].shape == (3, 4)


# ------------------------------------------------------------------------------------------------------ head_repeat


def assert_repeats(function: Callable, base: Tensor) -> algebra.HeadRepeat | None:
    """What head_repeat says about ``function(base)`` must be so, element by element."""
    node, _ = traced(function, base)
    found = algebra.head_repeat(node)
    if found is None:
        return None
    values = _evaluated(function, base, found.base.name)
    result, source = function(base), values.permute(found.order)
    head = torch.arange(result.shape[1]) // found.groups
    torch.testing.assert_close(source[:, head], result, rtol=0, atol=0)
    return found


def _evaluated(function: Callable, base: Tensor, name: str) -> Tensor:
    """The value of the node called ``name`` in the graph of ``function``."""
    gm = make_fx(function, tracing_mode="fake")(base)
    values: dict[str, Tensor] = {}

    class Keep(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            values[n.name] = super().run_node(n)
            return values[n.name]

    Keep(gm).run(base)
    return values[name]


def _random_step(t: Tensor, rng: random.Random) -> Callable[[Tensor], Tensor]:
    """A view or copy that fits ``t``."""
    dim = rng.randrange(t.dim())
    kind = rng.choice(["unsqueeze", "expand", "permute", "merge", "split", "repeat", "interleave", "clone", "squeeze"])
    if kind == "unsqueeze" and t.dim() < 6:
        return lambda x: x.unsqueeze(dim)
    if kind == "expand" and t.shape[dim] == 1:
        n = rng.choice([2, 3])
        return lambda x: x.expand(*(n if d == dim else -1 for d in range(x.dim())))
    if kind == "permute":
        order = rng.sample(range(t.dim()), t.dim())
        return lambda x: x.permute(order)
    if kind == "merge" and dim + 1 < t.dim():
        return lambda x: x.flatten(dim, dim + 1)
    if kind == "split" and t.shape[dim] in (4, 6) and t.dim() < 6:
        n = rng.choice([2, t.shape[dim] // 2])
        return lambda x: x.unflatten(dim, (n, -1))
    if kind == "repeat" and t.numel() < 500:
        return lambda x: x.repeat(*(2 if d == dim else 1 for d in range(x.dim())))
    if kind == "interleave" and t.numel() < 500:
        return lambda x: x.repeat_interleave(2, dim)
    if kind == "squeeze":
        return lambda x: x.squeeze(dim)
    return lambda x: x.clone(memory_format=torch.contiguous_format)


def _composed(steps: list[Callable]) -> Callable[[Tensor], Tensor]:
    return lambda t: functools.reduce(lambda value, step: step(value), steps, t)


def test_whatever_is_called_a_repeat_of_heads_is_one() -> None:
    rng = random.Random(0)
    found = 0
    for _ in range(500):
        base = torch.arange(24.0).view(rng.choice([(1, 2, 3, 4), (2, 2, 6, 1), (2, 1, 3, 4), (4, 6)]))
        steps: list[Callable] = []
        value = base
        while len(steps) < 7:
            steps.append(_random_step(value, rng))
            value = steps[-1](value)

        if value.dim() == 4:
            found += assert_repeats(_composed(steps), base) is not None
    assert found >= 10, f"the random views hold only {found} repeats: nothing is tested"


def test_the_two_orders_of_repetition() -> None:
    base = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    grouped = assert_repeats(lambda t: t.repeat_interleave(2, 1), base)
    assert grouped is not None and grouped.groups == 2 and grouped.order == (0, 1, 2, 3)
    assert assert_repeats(lambda t: t.repeat(1, 2, 1, 1), base) is None
    single = assert_repeats(lambda t: t[:, :1].repeat(1, 2, 1, 1), base)
    assert single is not None and single.groups == 2


def test_no_repetition_of_heads() -> None:
    base = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    for function in (
        lambda t: t.clone(),
        lambda t: t.transpose(1, 2),
        lambda t: t.repeat_interleave(2, 0),
        lambda t: t.repeat_interleave(2, 2),
        lambda t: t[:, :, :, :1].expand(2, 3, 4, 5),
        lambda t: t[:1].expand(2, 3, 4, 5),
        lambda t: t + 1,
    ):
        assert assert_repeats(function, base) is None


# -------------------------------------------------------------------------------------------------------- bounds

INF = float("inf")
MIN = torch.finfo(F32).min


@pytest.mark.parametrize(
    ("function", "dtype", "low", "high"),
    [
        (lambda m: m.float(), torch.bool, 0, 1),
        (lambda m: m.to(BF16), torch.uint8, 0, 255),
        (lambda m: m, F32, -INF, INF),
        (lambda m: m.float(), torch.float8_e5m2, -INF, INF),
        (lambda m: (m > 3).float(), F32, 0, 1),
        (lambda m: 1 - m.float(), torch.bool, 0, 1),
        (lambda m: m - 1, torch.uint8, 0, 255),
        (lambda m: m.float() - 1, torch.uint8, -1, 254),
        (lambda m: m.float() * 2 + 3, torch.bool, 3, 5),
        (lambda m: (1 - m.float()) * MIN, torch.bool, MIN, 0),
        (lambda m: (1 - m.float()) * MIN * 2, torch.bool, -INF, 0),
        (lambda m: ((1 - m.float()) * MIN).bfloat16(), torch.bool, -INF, 0),
        (lambda m: torch.where(m, 1.0, -7.0), torch.bool, -7, 1),
        (lambda m: torch.sub(m.float(), m.float(), alpha=3), torch.bool, -3, 1),
        (lambda m: torch.rsub(m.float(), 5, alpha=2), torch.bool, 3, 5),
        (lambda m: -m.float().abs(), torch.bool, -1, 0),
        (lambda m: m.clamp(-3, 4), F32, -3, 4),
        (lambda m: m.clamp(min=-3), F32, -3, INF),
        (lambda m: torch.where(m, 0.0, -INF), torch.bool, -INF, 0),
        (lambda m: torch.where(m, 0.0, -INF).clamp(min=-9.0), torch.bool, -9, 0),
        (lambda m: torch.where(m, 0.0, -INF) - torch.where(m, 0.0, -INF), torch.bool, -INF, INF),
        (lambda m: m.sigmoid(), F32, 0, 1),
        (lambda m: m.float() / 4, torch.bool, 0, 0.25),
        (lambda m: 1 / (1 + m.float()), torch.bool, 0.5, 1),
        (lambda m: 1 / m.float(), torch.bool, -INF, INF),
        (lambda m: m.float().log(), torch.bool, -INF, INF),
        (lambda m: (m.float() * 1023 + 1).log2(), torch.bool, 0, 10),
        (lambda m: 2 ** m.float(), torch.bool, 1, 2),
        (lambda m: m.float().exp2(), torch.bool, 1, 2),
        (lambda m: m.float().cumsum(-1), torch.bool, 0, 6),
        (lambda m: torch.cat([m.float(), torch.full((2, 1), -4.0)], -1), torch.bool, -4, 1),
        (lambda m: (-200 * m.float()).exp(), torch.bool, 0, 1),
        (lambda m: (-200 * m.float()).exp().log(), torch.bool, -INF, INF),
        (lambda m: 1 / (m.float() * 1e-9 + 1e-9).half().float(), torch.bool, -INF, INF),
        (lambda m: m.float().atan(), torch.bool, -INF, INF),
    ],
)
def test_bounds(function: Callable, dtype: torch.dtype, low: float, high: float) -> None:
    node, _ = traced(function, x(2, 3, dtype=dtype))
    found = algebra.bounds(node)
    assert (found.low, found.high, found.ordinary) == (low, high, False)


def test_what_a_model_computes_is_ordinary() -> None:
    for function in (
        lambda a, b: a @ b,
        lambda a, b: torch.nn.functional.embedding(torch.arange(2), a),
        lambda a, b: (a @ b).exp() * 2 - 3,
        lambda a, b: torch.nn.functional.gelu(a @ b) / (1 + (a @ b).abs()),
        lambda a, b: (a @ b) + torch.full((3, 3), MIN),
    ):
        node, _ = traced(function, x(3, 3), x(3, 3))
        assert algebra.bounds(node).ordinary and algebra.bounds(node).finite
    for function in (lambda a, b: (a @ b).log(), lambda a, b: (a @ b) * MIN, lambda a, b: a * (a @ b)):
        node, _ = traced(function, x(3, 3), x(3, 3))
        assert not algebra.bounds(node).finite


def test_bounds_round_as_the_types_do() -> None:
    generator = random.Random(0)
    for dtype in (torch.float16, BF16, F32, F64):
        largest = torch.finfo(dtype).max
        numbers = [largest, largest * (1 + torch.finfo(dtype).eps / 4.01), 0.1, 1 / 3, 65519.9, 65520.0]
        for number in numbers + [generator.uniform(-7e4, 7e4) for _ in range(50)]:
            rounded = torch.tensor(number, dtype=F64).to(dtype).item()
            found = algebra.Bounds(number, number).within(dtype)
            assert found.low == found.high == rounded


# ------------------------------------------------------------------------------------------------------ equal pieces


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (lambda t: t[..., :2], lambda t: t[..., :2], True),
        (lambda t: t[..., 0].float(), lambda t: t[..., 0].float(), True),
        (lambda t: t.split(2, -1)[1], lambda t: t.split(2, -1)[1], True),
        (lambda t: t.unflatten(-1, (2, 2))[..., 0], lambda t: t.unflatten(-1, (2, 2))[..., 0], True),
        (lambda t: t[..., :2], lambda t: t[..., 2:], False),
        (lambda t: t[:2, :2], lambda t: t[1:, :2], False),
        (lambda t: t.split(2, -1)[1], lambda t: t.split(2, -1)[0], False),
        (lambda t: t[..., :2].float(), lambda t: t[..., :2].double(), False),
        (lambda t: t[..., :2].exp(), lambda t: t[..., :2].exp(), False),
    ],
)
def test_pieces_that_are_taken_twice(a: Callable, b: Callable, same: bool) -> None:
    (first, second), _ = traced(lambda t: (a(t), b(t)), x(3, 4, dtype=BF16))
    assert first is not second
    assert algebra.same_value(first, second) == same


def test_a_limit_with_a_shape_of_its_own() -> None:
    node, _ = traced(lambda t: torch.maximum(t, torch.zeros(3, 1)), x(4))
    assert algebra.clamped(node) is None
