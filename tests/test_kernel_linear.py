"""linear, qkv_linear and gated_linear: the kernels against float64, what they decline, the machine code."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from portable_ops.kernels.activation import ACTIVATIONS, TILE_ACTIVATIONS, activate
from portable_ops.kernels.linear import GATED_LINEAR, LINEAR, MAX_ROWS, QKV_LINEAR
from portable_ops.kernels.operator import Operator
from portable_ops.kernels.target import named_target
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

SM90 = named_target("sm_90")
TARGETS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100"]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHORT = [BF16, FP16]
ROWS = [1, 2, 3, 7, 16]
WEIGHTS = ("weight", "q_weight", "k_weight", "v_weight", "gate_weight", "up_weight")


def random(
    rows: int, columns: int, dtype: torch.dtype = BF16, seed: int = 0, padding: int = 0, device: str = "cpu"
) -> torch.Tensor:
    """Normal numbers; ``padding``: unused elements behind each row."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns + padding, generator=generator).to(device, dtype)[:, :columns]


def layer(out_features: int, x: torch.Tensor, seed: int = 1, padding: int = 0) -> torch.Tensor:
    """A weight for ``x`` of the size that initialisation gives it."""
    columns = x.shape[1]
    weight = random(out_features, columns + padding, FP32, seed) / max(1, columns) ** 0.5
    return weight.to(x.device, x.dtype)[:, :columns]


def one(x: torch.Tensor, out_features: int, padding: int = 0) -> dict[str, Any]:
    return {"x": x, "weight": layer(out_features, x, padding=padding)}


def three(x: torch.Tensor, *widths: int, padding: int = 0) -> dict[str, Any]:
    names = ("q_weight", "k_weight", "v_weight")
    return {"x": x, **{name: layer(n, x, i, padding) for i, (name, n) in enumerate(zip(names, widths, strict=True), 1)}}


def gated(x: torch.Tensor, out_features: int, padding: int = 0, **options: Any) -> dict[str, Any]:
    weights = {"gate_weight": layer(out_features, x, 1, padding), "up_weight": layer(out_features, x, 2, padding)}
    return {
        "x": x,
        **weights,
        "activation": "silu",
        "alpha": 1.0,
        "act_dtype": x.dtype,
        "out_dtype": x.dtype,
        **options,
    }


def operator_of(args: dict[str, Any]) -> Operator:
    return LINEAR if "weight" in args else QKV_LINEAR if "q_weight" in args else GATED_LINEAR


def as_list(result: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def exact(args: dict[str, Any]) -> list[torch.Tensor]:
    """The results in float64, nothing rounded on the way."""
    products = [args["x"].double() @ args[name].double().T for name in WEIGHTS if name in args]
    if operator_of(args) is not GATED_LINEAR:
        return products
    gate, up = products
    return [activate(gate, args["activation"], args["alpha"]) * up]


def assert_as_close_as_reference(args: dict[str, Any], actual: list[torch.Tensor]) -> None:
    """Error at most 1.5 times the reference's largest plus one rounding of the output's dtype."""
    for ours, reference, truth in zip(actual, as_list(operator_of(args).reference(**args)), exact(args), strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (reference.dtype, reference.shape, reference.stride())
        unit = torch.finfo(ours.dtype).eps / 2
        tiny = torch.finfo(ours.dtype).smallest_normal
        bound = 1.5 * (reference.double() - truth).abs().max() + unit * truth.abs() + tiny
        error = (ours.double() - truth).abs()
        worst = (error - bound).argmax()
        assert (error <= bound).all(), f"error {error.flatten()[worst]} > {bound.flatten()[worst]} at {worst}"


def run_interpreted(interpret, args: dict[str, Any], arch: str = "sm_90") -> list[torch.Tensor]:
    operator, target = operator_of(args), named_target(arch)
    assert operator.supports(**args, target=target) is None
    return interpret(operator.plan(**args, target=target), args)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("columns", "out_features"), [(16, 1), (256, 16), (272, 33), (528, 100)])
def test_linear(interpret, rows: int, columns: int, out_features: int, dtype: torch.dtype) -> None:
    args = one(random(rows, columns, dtype), out_features)
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("widths", [(64, 16, 16), (33, 7, 65), (1, 1, 1), (16, 100, 1)], ids=str)
def test_qkv_linear(interpret, rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    """The programs of each weight start where those of the one before it end, whatever its width."""
    args = three(random(rows, 272, dtype), *widths)
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("columns", "out_features"), [(16, 1), (512, 64), (560, 73)])
def test_gated_linear(interpret, rows: int, columns: int, out_features: int, dtype: torch.dtype) -> None:
    args = gated(random(rows, columns, dtype), out_features)
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("wide", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("activation", TILE_ACTIVATIONS)
def test_activations_and_rounding_points(
    interpret, activation: str, dtype: torch.dtype, wide: tuple[bool, bool]
) -> None:
    """Only the order of the sums differs from the reference: nearly all elements are equal bit for bit."""
    act_dtype, out_dtype = (FP32 if w else dtype for w in wide)
    for rows in (1, 3):
        args = gated(random(rows, 528, dtype), 700, activation=activation, act_dtype=act_dtype, out_dtype=out_dtype)
        (out,) = run_interpreted(interpret, args)
        assert_as_close_as_reference(args, [out])
        reference = GATED_LINEAR.reference(**args)
        if out_dtype == dtype:
            assert (out == reference).double().mean() > 0.97
        else:
            close = (out - reference).abs() <= 1e-5 * reference.abs()
            assert close.double().mean() > 0.97


@pytest.mark.parametrize("change", [{"act_dtype": FP32}, {"activation": "gelu"}, {"alpha": 1.01}], ids=str)
def test_another_rounding_point_is_noticed(interpret, change: dict[str, Any]) -> None:
    """The test above can fail."""
    args = gated(random(3, 528), 700)
    (out,) = run_interpreted(interpret, {**args, **change})
    assert (out == GATED_LINEAR.reference(**args)).double().mean() < 0.97


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("alpha", [1.702, 0.5, -3.0])
def test_alpha(interpret, activation: str, alpha: float) -> None:
    for rows in (1, 2):
        args = gated(random(rows, 64), 33, activation=activation, alpha=alpha)
        assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("padding", [16, 48])
def test_weights_with_padded_rows(interpret, rows: int, padding: int) -> None:
    for args in (
        one(random(rows, 272, padding=padding), 37, padding=padding),
        three(random(rows, 272), 37, 5, 18, padding=padding),
        gated(random(rows, 272, padding=padding), 37, padding=padding),
    ):
        assert_as_close_as_reference(args, run_interpreted(interpret, args))


def test_each_weight_has_strides_of_its_own(interpret) -> None:
    packed = layer(96, random(3, 272), padding=16)
    x = random(16, 272 + 32)[::4, 16 : 16 + 272]
    weights = {"q_weight": packed[:40], "k_weight": packed[40:57].clone(), "v_weight": packed[57::2]}
    args = {"x": x, **weights}
    assert len({w.stride(0) for w in weights.values()}) == 3
    assert_as_close_as_reference(args, run_interpreted(interpret, args))
    args = {**gated(x, 20), "gate_weight": packed[40:60], "up_weight": packed[::2][:20]}
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


def test_one_tensor_in_several_roles(interpret) -> None:
    x = random(16, 48)
    for args in (
        {"x": x, "weight": x},
        {"x": x, "q_weight": x, "k_weight": x, "v_weight": x},
        {**gated(x, 16), "gate_weight": x, "up_weight": x},
    ):
        assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_without_a_stride(interpret, rows: int) -> None:
    x = random(1, 272).expand(rows, 272)
    weight = layer(1, x).expand(19, 272)
    args = {"x": x, "weight": weight}
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


def reference_of(args: dict[str, Any]) -> torch.Tensor:
    """``gated_linear_reference``, but right about gelu: in vectors, on a CPU, torch's gelu of infinity is NaN."""
    if args["activation"] != "gelu":
        return GATED_LINEAR.reference(**args)
    gate = F.linear(args["x"], args["gate_weight"]).float()
    act = 0.5 * gate * (1 + torch.erf(gate * 0.5**0.5))
    return (act.to(args["act_dtype"]) * F.linear(args["x"], args["up_weight"])).to(args["out_dtype"])


def assert_same_specials(actual: torch.Tensor, expected: torch.Tensor) -> None:
    for of_kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(of_kind(actual), of_kind(expected)), of_kind.__name__


def special(rows: int, dtype: torch.dtype) -> torch.Tensor:
    x = random(rows, 272, dtype)
    x[0, -1] = torch.inf
    x[1 % rows, 7] = -torch.inf
    x[2 % rows, 256] = torch.nan
    return x


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_values_that_are_not_finite(interpret, rows: int, dtype: torch.dtype) -> None:
    """They reach exactly the results that they reach in torch: no tail and no row beside them."""
    x = special(rows, dtype)
    args = three(x, 33, 5, 16)
    args["k_weight"][3, 3] = torch.inf
    args["v_weight"][1] = 0.0
    for ours, expected in zip(run_interpreted(interpret, args), QKV_LINEAR.reference(**args), strict=True):
        assert_same_specials(ours, expected)
    if rows > 3:
        assert run_interpreted(interpret, one(x, 33))[0][3:].isfinite().all()


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("activation", TILE_ACTIVATIONS)
def test_activations_of_values_that_are_not_finite(interpret, activation: str, rows: int, dtype: torch.dtype) -> None:
    args = gated(special(rows, dtype), 33, activation=activation)
    args["up_weight"] = args["up_weight"].abs()
    (out,) = run_interpreted(interpret, args)
    assert_same_specials(out, reference_of(args))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("sign", [1, -1])
def test_products_beyond_half_precision(interpret, rows: int, sign: int) -> None:
    """A sum over 65504 is an infinity in float16, in a gate as well, though it is finite in float32."""
    x = torch.full((rows, 64), 100.0, dtype=FP16)
    weight = torch.full((18, 64), sign * 100.0, dtype=FP16)
    weight[3] = 1.0
    (out,) = run_interpreted(interpret, {"x": x, "weight": weight})
    assert torch.equal(out, LINEAR.reference(x, weight))
    assert out.isinf().sum() == rows * 17
    for activation in TILE_ACTIVATIONS:
        for act_dtype in (FP16, FP32):
            options = {"activation": activation, "act_dtype": act_dtype, "out_dtype": act_dtype}
            args = {**gated(x, 18, **options), "gate_weight": weight, "up_weight": torch.full_like(weight, 0.001)}
            (out,) = run_interpreted(interpret, args)
            torch.testing.assert_close(out, reference_of(args), equal_nan=True)


def test_sums_beyond_the_digits_of_short_types(interpret) -> None:
    """They are float32: in a short type, ones would stop adding up at 256 or 2048."""
    for dtype in SHORT:
        for rows in (1, 2):
            x, weight = torch.ones(rows, 4096, dtype=dtype), torch.ones(3, 4096, dtype=dtype)
            (out,) = run_interpreted(interpret, {"x": x, "weight": weight})
            assert (out == 4096).all()


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    dtype = draw(st.sampled_from(SHORT))
    columns = 16 * draw(st.integers(1, 40))
    padding = st.sampled_from([0, 16, 32])
    x = random(draw(st.integers(1, MAX_ROWS)), columns, dtype, draw(st.integers(0, 1000)), draw(padding))
    width = st.integers(1, 90)
    kind = draw(st.sampled_from(["one", "three", "gated"]))
    if kind == "one":
        return one(x, draw(width), draw(padding))
    if kind == "three":
        return three(x, draw(width), draw(width), draw(width), padding=draw(padding))
    options = {
        "activation": draw(st.sampled_from(TILE_ACTIVATIONS)),
        "alpha": draw(st.sampled_from([1.0, 1.702])),
        "act_dtype": draw(st.sampled_from([dtype, FP32])),
        "out_dtype": draw(st.sampled_from([dtype, FP32])),
    }
    return gated(x, draw(width), draw(padding), **options)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(args=calls(), arch=st.sampled_from(["sm_90", "sm_89", "gfx942"]))
def test_any_call(interpret, args: dict[str, Any], arch: str) -> None:
    assert_as_close_as_reference(args, run_interpreted(interpret, args, arch))


# -------------------------------------------------------------------------------------------------- operators, supports


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_opcheck(rows: int) -> None:
    x = random(rows, 33)
    for args in (one(x, 7), three(x, 7, 3, 1), gated(x, 7), gated(x, 7, activation="tanh", out_dtype=FP32)):
        operator = operator_of(args)
        tensors = tuple(args.pop(name) for name in operator.params if isinstance(args.get(name), torch.Tensor))
        torch.library.opcheck(operator.op, tensors, args)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_is_the_spelling_of_torch(activation: str) -> None:
    x = random(4, 32)
    args = gated(x, 8, activation=activation)
    product = activate(F.linear(x, args["gate_weight"]).float(), activation).bfloat16() * F.linear(x, args["up_weight"])
    assert torch.equal(GATED_LINEAR.op(**args), product)
    out = GATED_LINEAR.op(**{**args, "act_dtype": FP32, "out_dtype": FP32})
    assert out.dtype == FP32 and not torch.equal(out, product.float())


def test_fakes() -> None:
    mode = FakeTensorMode()
    x = random(4, 32)
    for args in (one(x, 7), three(x, 7, 3, 1), gated(x, 7, out_dtype=FP32)):
        fakes = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        with mode:
            results = as_list(operator_of(args).op(**fakes))
        for fake, real in zip(results, as_list(operator_of(args).op(**args)), strict=True):
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


X = random(4, 64)
W = layer(24, X)

DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"x": X.float()}, "x is torch.float32, needs float16 or bfloat16"),
    "float64": ({"x": X.double()}, "x is torch.float64, needs float16 or bfloat16"),
    "integers": ({"x": X.int()}, "x is torch.int32, needs float16 or bfloat16"),
    "one dimension": ({"x": X[0]}, "x has 1 dimensions, needs [rows, in_features]"),
    "three dimensions": ({"x": X[:, None]}, "x has 3 dimensions, needs [rows, in_features]"),
    "no rows": ({"x": X[:0]}, "x has 0 rows, needs a constant from 1 to 16"),
    "many rows": ({"x": random(17, 64)}, "x has 17 rows, needs a constant from 1 to 16"),
    "no columns": ({"x": X[:, :0], "weight": W[:, :0]}, "x has 0 columns, needs a constant of at least 1"),
    "odd columns": (
        {"x": random(4, 65, padding=15), "weight": random(24, 65, padding=15)},
        "x has 65 columns, needs a multiple of 16",
    ),
    "columns of x apart": (
        {"x": random(64, 4).T},
        "x has rows that are not contiguous, needs stride 1 along in_features",
    ),
    "sparse": ({"x": X.to_sparse()}, "x has rows that are not contiguous, needs stride 1 along in_features"),
    "rows of x": ({"x": random(4, 64, padding=8)}, "x has rows 72 elements apart, needs a multiple of 16"),
    "start of x": ({"x": random(4, 80)[:, 1:65]}, "x starts 1 elements into its storage, needs a multiple of 8"),
    "another type": ({"weight": W.half()}, "weight is torch.float16, needs x's torch.bfloat16"),
    "another device": ({"weight": W.to("meta")}, "weight is on meta, needs x's device cpu"),
    "vector": ({"weight": W[0]}, "weight has shape (64,), needs [out_features, 64]"),
    "batched": ({"weight": W[None]}, "weight has shape (1, 24, 64), needs [out_features, 64]"),
    "other columns": ({"weight": W[:, :48]}, "weight has shape (24, 48), needs [out_features, 64]"),
    "empty": ({"weight": W[:0]}, "weight has 0 rows, needs a constant of at least 1"),
    "column-major": (
        {"weight": random(64, 24).T},
        "weight has rows that are not contiguous, needs stride 1 along in_features",
    ),
    "rows of the weight": (
        {"weight": random(24, 64, padding=8)},
        "weight has rows 72 elements apart, needs a multiple of 16",
    ),
    "start of the weight": (
        {"weight": random(24, 80)[:, 4:68]},
        "weight starts 4 elements into its storage, needs a multiple of 8",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined(name: str) -> None:
    changes, reason = DECLINED[name]
    args = {"x": X, "weight": W, **changes}
    assert LINEAR.supports(**args, target=SM90) == reason


@pytest.mark.parametrize("name", DECLINED)
def test_declined_in_every_role(name: str) -> None:
    """Every weight of the other two operators must be what the one of ``linear`` must be."""
    changes, reason = DECLINED[name]
    x, weight = changes.get("x", X), changes.get("weight", W)
    own = {"activation": "silu", "act_dtype": x.dtype, "out_dtype": x.dtype}
    for operator, names, rest in ((QKV_LINEAR, WEIGHTS[1:4], {}), (GATED_LINEAR, WEIGHTS[4:], own)):
        for role in names:
            good = weight if name in ("no columns", "odd columns") else W
            args = {"x": x, **dict.fromkeys(names, good), role: weight, **rest}
            expected = reason if "weight" not in changes else reason.replace("weight", role)
            assert operator.supports(**args, target=SM90) == expected


DECLINED_GATED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"activation": "mish"}, f"the activation 'mish' is unknown, needs one of {', '.join(ACTIVATIONS)}"),
    "tanh": ({"activation": "tanh"}, f"no kernel computes tanh, needs one of {', '.join(TILE_ACTIVATIONS)}"),
    "activation type": ({"act_dtype": FP16}, "act_dtype is torch.float16, needs x's torch.bfloat16 or float32"),
    "double result": ({"out_dtype": FP64}, "out_dtype is torch.float64, needs x's torch.bfloat16 or float32"),
    "shapes": ({"up_weight": W[:8]}, "up_weight has shape (8, 64), needs gate_weight's (24, 64)"),
}


@pytest.mark.parametrize("name", DECLINED_GATED)
def test_declined_gated(name: str) -> None:
    changes, reason = DECLINED_GATED[name]
    assert GATED_LINEAR.supports(**{**gated(X, 24), **changes}, target=SM90) == reason


@pytest.mark.parametrize(
    ("arch", "reason"),
    [("cpu", "no kernel for the CPU"), ("sm_75", "needs compute capability 8.0 or later, this is sm_75")],
)
def test_declined_target(arch: str, reason: str) -> None:
    for args in (one(X, 24), three(X, 24, 8, 8), gated(X, 24)):
        assert operator_of(args).supports(**args, target=named_target(arch)) == reason


@pytest.mark.parametrize(
    ("x_dims", "weight_dims", "reason"),
    [
        ((True, False), (False, False), r"x has s\w+ rows, needs a constant from 1 to 16"),
        ((False, True), (False, True), r"x has s\w+ columns, needs a constant of at least 1"),
        ((False, False), (True, False), r"weight has s\w+ rows, needs a constant of at least 1"),
        ((False, False), (False, True), r"weight has shape \(24, s\w+\), needs \[out_features, 64\]"),
    ],
    ids=["rows", "columns", "out_features", "in_features"],
)
def test_symbolic_sizes_are_declined_without_a_guard(
    x_dims: tuple[bool, ...], weight_dims: tuple[bool, ...], reason: str
) -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)

    def symbolic(t: torch.Tensor, dims: tuple[bool, ...]) -> torch.Tensor:
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC if d else DimDynamic.STATIC for d in dims])
        return mode.from_tensor(t.clone(), symbolic_context=context)

    x, weight = symbolic(X, x_dims), symbolic(W, weight_dims)
    before = len(env.guards)
    assert re.fullmatch(reason, LINEAR.supports(x, weight, target=SM90))
    assert len(env.guards) == before


# ------------------------------------------------------------------------------------------------- plans, machine code


def test_plans() -> None:
    """One launch each, a program for each block of columns, results of the type of x."""
    for rows in (1, 4):
        x = random(rows, 64)
        cases = {
            "one": (one(x, 100), {"out": (rows, 100)}),
            "three": (three(x, 100, 33, 1), {"q": (rows, 100), "k": (rows, 33), "v": (rows, 1)}),
            "gated": (gated(x, 100, out_dtype=FP32), {"out": (rows, 100)}),
        }
        for name, (args, shapes) in cases.items():
            plan = operator_of(args).plan(**args, target=SM90)
            (launch,) = plan.launches
            block = launch.constexprs["BLOCK_N"]
            programs = sum(-(-shape[1] // block) for shape in shapes.values())
            assert launch.grid == (programs, 1, 1)
            assert {k: b.shape for k, b in plan.outputs.items()} == shapes
            assert {b.dtype for b in plan.outputs.values()} == {FP32 if name == "gated" else BF16}
            assert not plan.scratch and plan.variant == "portable.stream"
            assert launch.constexprs["BLOCK_M"] == (1 if rows == 1 else MAX_ROWS)
            assert not launch.constexprs["EVEN_K"]
            assert (launch.num_warps, launch.num_stages) == (
                launch.constexprs["NUM_WARPS"],
                launch.constexprs["NUM_STAGES"],
            )


def test_whole_blocks_need_no_masks() -> None:
    for rows in (1, 4):
        x = random(rows, 1024)
        for args in (one(x, 24), three(x, 24, 8, 8), gated(x, 24)):
            (launch,) = operator_of(args).plan(**args, target=SM90).launches
            assert launch.constexprs["EVEN_K"]


@pytest.mark.parametrize("arch", [*TARGETS, "sm_86", "sm_75", "gfx1200"])
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_the_stages_fit_the_shared_memory(arch: str, rows: int) -> None:
    target = named_target(arch)
    x = random(rows, 64)
    for args in (one(x, 24), three(x, 24, 8, 8), gated(x, 24)):
        (launch,) = operator_of(args).plan(**args, target=target).launches
        sizes = launch.constexprs
        stage = (sizes["BLOCK_M"] + sizes["BLOCK_N"]) * sizes["BLOCK_K"] * 2
        assert launch.num_stages >= 1 and launch.num_stages * stage <= target.shared_memory
        assert target.backend == "cuda" or launch.num_stages <= 2
        for size in (sizes["BLOCK_M"], sizes["BLOCK_N"], sizes["BLOCK_K"], launch.num_warps):
            assert size > 0 and size & (size - 1) == 0


def stored(rows: int, columns: int, padding: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty_strided((rows, columns), (columns + padding, 1), dtype=dtype, device="meta")


def machine_code_cases() -> dict[str, dict[str, Any]]:
    """What the compiler sees: one row and several, whole blocks and tails, one weight, three, and two."""
    K, N = 4096, 14336
    row, rows = stored(1, K), stored(16, K)
    weights = dict.fromkeys(WEIGHTS[4:], stored(N, K))
    short = {"activation": "silu", "alpha": 1.0, "act_dtype": BF16, "out_dtype": BF16}
    wide = {"activation": "gelu", "alpha": 1.0, "act_dtype": FP32, "out_dtype": FP32}
    qkv = {"q_weight": stored(K, K), "k_weight": stored(1024, K), "v_weight": stored(1024, K)}
    tails = {"q_weight": stored(1001, 1040), "k_weight": stored(33, 1040, 16), "v_weight": stored(1, 1040)}
    return {
        "one row": {"x": row, "weight": stored(K, K)},
        "one row of float16": {"x": stored(1, N, dtype=FP16), "weight": stored(K, N, dtype=FP16)},
        "one row, three weights": {"x": row, **qkv},
        "one row, gated": {"x": row, **weights, **short},
        "one row, wide gelu": {"x": row, **weights, **wide},
        "one row, tails": {"x": stored(1, 1040), **tails},
        "rows": {"x": rows, "weight": stored(128256, K)},
        "rows, three weights": {"x": rows, **qkv},
        "rows, gated": {"x": rows, **weights, **short},
        "rows, gelu_tanh": {"x": rows, **weights, **short, "activation": "gelu_tanh"},
        "rows far apart, tails": {"x": stored(3, 1040, 2**28), **tails},
    }


CODE = machine_code_cases()


@pytest.mark.parametrize("name", CODE)
def test_machine_code_of_sm_90(compile_ahead, name: str) -> None:
    """Weights come by asynchronous copies of 16 bytes, all of them; nothing spills; several rows meet matrix units."""
    operator, args = operator_of(CODE[name]), CODE[name]
    assert operator.supports(**args, target=SM90) is None
    plan = operator.plan(**args, target=SM90)
    (kernel,) = compile_ahead(plan, args, SM90)
    assert kernel.spilled == 0
    ptx = kernel.asm["ptx"]
    widths = re.findall(r"\bcp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    sizes = plan.launches[0].constexprs
    tiles = 2 if operator is GATED_LINEAR else 1
    copies = tiles * sizes["NUM_STAGES"] * sizes["BLOCK_N"] * sizes["BLOCK_K"] * 2 // (32 * sizes["NUM_WARPS"] * 16)
    assert [int(w, 0) for w in widths].count(16) >= copies
    assert not re.search(r"\bld\.global", ptx)
    assert ("mma.sync" in ptx) == (args["x"].shape[0] > 1)
    assert ".f64" not in ptx


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_relu_keeps_nan(compile_ahead, activation: str) -> None:
    """Which the interpreter cannot tell: it always does."""
    args = {**CODE["rows, gated"], "activation": activation}
    (kernel,) = compile_ahead(GATED_LINEAR.plan(**args, target=SM90), args, SM90)
    assert "max.NaN.f32" in kernel.asm["ptx"]


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", ["one row, tails", "one row, wide gelu", "rows, three weights", "rows, gated"])
def test_compiles_ahead_of_time(compile_ahead, arch: str, name: str) -> None:
    target, operator, args = named_target(arch), operator_of(CODE[name]), CODE[name]
    assert operator.supports(**args, target=target) is None
    (kernel,) = compile_ahead(operator.plan(**args, target=target), args, target)
    assert kernel.shared <= target.shared_memory
    assert not kernel.spilled


# --------------------------------------------------------------------------------------------------------------- on GPU


GPU_CASES = {
    "one": lambda x: one(x, 4096),
    "one odd": lambda x: one(x, 1001),
    "one padded": lambda x: one(x, 100, padding=48),
    "three": lambda x: three(x, 4096, 1024, 1024),
    "three odd": lambda x: three(x, 33, 7, 1),
    "gated": lambda x: gated(x, 14336),
    "gated odd": lambda x: gated(x, 1001, padding=16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("columns", [16, 1040, 4096])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", GPU_CASES)
def test_on_gpu(poison, name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    args = GPU_CASES[name](random(rows, columns, dtype, device="cuda"))
    first, second = (as_list(operator_of(args).op(**args)) for _ in range(2))
    assert_as_close_as_reference(args, first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("activation", TILE_ACTIVATIONS)
def test_activations_on_gpu(poison, activation: str, rows: int, wide: tuple[bool, bool]) -> None:
    act_dtype, out_dtype = (FP32 if w else BF16 for w in wide)
    options = {"activation": activation, "act_dtype": act_dtype, "out_dtype": out_dtype}
    args = gated(random(rows, 4096, device="cuda"), 2000, **options)
    assert_as_close_as_reference(args, [GATED_LINEAR.op(**args)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("activation", TILE_ACTIVATIONS)
def test_values_that_are_not_finite_on_gpu(poison, activation: str, rows: int, dtype: torch.dtype) -> None:
    args = gated(special(rows, dtype).cuda(), 33, activation=activation)
    args["up_weight"] = args["up_weight"].abs()
    assert_same_specials(GATED_LINEAR.op(**args), reference_of(args))
    args = three(args["x"], 33, 5, 16)
    for ours, expected in zip(QKV_LINEAR.op(**args), QKV_LINEAR.reference(**args), strict=True):
        assert_same_specials(ours, expected)


@pytest.mark.gpu
def test_rows_of_x_beyond_32_bits(poison) -> None:
    """The last tokens of long prompts, as the last layer reads them."""
    apart = 2**28
    if torch.cuda.mem_get_info()[0] < 20 * apart * 2:
        pytest.skip("needs 10 GiB of free GPU memory")
    x = torch.empty(15 * apart + 64, dtype=BF16, device="cuda").as_strided((16, 64), (apart, 1))
    x.copy_(random(16, 64))
    args = one(x, 33)
    assert_as_close_as_reference(args, [LINEAR.op(**args)])


@pytest.mark.gpu
def test_weights_beyond_32_bits(poison) -> None:
    x = random(2, 4096, device="cuda")
    out_features = 2**31 // 4096 + 40
    if torch.cuda.mem_get_info()[0] < 2 * out_features * 4096 * 2:
        pytest.skip("needs 9 GiB of free GPU memory")
    weight = torch.zeros(out_features, 4096, dtype=BF16, device="cuda")
    weight[-33:] = layer(33, x)
    (out,) = as_list(LINEAR.op(x, weight))
    assert not out[:, :-33].any()
    assert_as_close_as_reference({"x": x, "weight": weight[-33:].clone()}, [out[:, -33:].contiguous()])
