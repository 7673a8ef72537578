"""rms_norm and add_rms_norm: the kernels against float64, what they decline, the machine code."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from portable_ops.kernels.rms_norm import (
    ADD_RMS_NORM,
    MAX_COLS,
    RMS_NORM,
    RMSNormConfig,
    choose_config,
)
from portable_ops.kernels.target import named_target
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

SM90 = named_target("sm_90")
TARGETS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100"]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [BF16, FP16, FP32]


def rounding(weight: torch.dtype, norm: torch.dtype, product: torch.dtype, out: torch.dtype) -> dict[str, torch.dtype]:
    return {"weight_dtype": weight, "norm_dtype": norm, "product_dtype": product, "out_dtype": out}


SPELLINGS = {
    # Llama in transformers: weight * h.to(input_dtype)
    "llama": {**rounding(BF16, BF16, BF16, BF16)},
    # torch.nn.RMSNorm: everything in float32, one rounding at the end
    "torch": {**rounding(FP32, FP32, FP32, BF16)},
    # Gemma in transformers: (h * (1.0 + weight.float())).type_as(x)
    "gemma": {**rounding(FP32, FP32, FP32, BF16), "weight_offset": 1.0},
    # 1 + weight in bfloat16, which loses most of a small weight
    "short offset": {**rounding(BF16, FP32, BF16, BF16), "weight_offset": 1.0},
    # float32 weight kept by a bfloat16 model: the product and the result are float32
    "fp32 weight": {**rounding(FP32, BF16, FP32, FP32)},
    # DeepSeek V4: x * rsqrt(...).to(x.dtype)
    "short root": {**rounding(BF16, BF16, BF16, BF16), "root_dtype": BF16},
    # the two halves of mixed types promote to float32 before the product is rounded
    "mixed": {**rounding(FP16, BF16, BF16, FP16)},
}


def same(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return rounding(dtype, dtype, dtype, dtype)


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def arguments(
    x: torch.Tensor, residual: torch.Tensor | None = None, bias: bool = False, **options: Any
) -> dict[str, Any]:
    """The arguments of a call on ``x``, with a weight of x's dtype unless ``options`` has one."""
    args: dict[str, Any] = {"x": x, "eps": 1e-6, **same(x.dtype), **options}
    if "weight" not in args:
        args["weight"] = random(x.shape[-1], dtype=x.dtype, seed=1).to(x.device)
    if bias:
        args["bias"] = random(x.shape[-1], dtype=x.dtype, seed=2).to(x.device)
    if residual is not None:
        args["residual"] = residual
    return args


def operator_of(args: dict[str, Any]):
    return ADD_RMS_NORM if "residual" in args else RMS_NORM


def as_list(result: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def exact(args: dict[str, Any]) -> list[torch.Tensor]:
    """The results in float64, nothing rounded on the way."""
    x = args["x"].double()
    total = x + args["residual"].double() if "residual" in args else x
    eps = args["eps"] if args.get("eps_tensor") is None else args["eps_tensor"].double()
    out = total * torch.rsqrt((total * total).mean(-1, keepdim=True) + eps)
    if args["weight"] is not None:
        weight = args["weight"].double() + args.get("weight_offset", 0.0)
        out = (out.view(*x.shape[:-2], -1) * weight).view(x.shape) if len(weight) != x.shape[-1] else out * weight
    if args.get("bias") is not None:
        out = out + args["bias"].double()
    return [out, total] if "residual" in args else [out]


def assert_as_close_as_reference(args: dict[str, Any], actual: list[torch.Tensor]) -> None:
    """Error at most 1.5 times the reference's largest plus one rounding of the output's dtype."""
    for ours, reference, truth in zip(actual, as_list(operator_of(args).reference(**args)), exact(args), strict=True):
        assert ours.dtype == reference.dtype
        assert ours.shape == reference.shape
        assert ours.stride() == reference.stride()
        if not ours.numel():
            continue
        unit = torch.finfo(ours.dtype).eps / 2
        tiny = torch.finfo(ours.dtype).smallest_normal
        bound = 1.5 * (reference.double() - truth).abs().max() + unit * truth.abs() + tiny
        error = (ours.double() - truth).abs()
        worst = (error - bound).argmax()
        assert (error <= bound).all(), f"error {error.flatten()[worst]} > {bound.flatten()[worst]} at {worst}"


def run_interpreted(
    interpret, args: dict[str, Any], arch: str = "sm_90", config: RMSNormConfig | None = None
) -> list[torch.Tensor]:
    operator, target = operator_of(args), named_target(arch)
    assert operator.supports(**args, target=target) is None
    return interpret(operator.plan(**args, target=target, config=config), args)


SHAPES = [
    (1,),
    (1, 1),
    (7, 1),
    (3, 2),
    (5, 97),
    (31, 64),
    (9, 128),
    (2, 3, 4, 128),
    (1, 4096),
    (3, 5120),
    (2, 16411),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(interpret, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    args = arguments(random(*shape, dtype=dtype), bias=True)
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm(interpret, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    args = arguments(random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=3))
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("n_cols", [32768, 32769, 50021, 65536])
def test_wide_rows(interpret, n_cols: int) -> None:
    args = arguments(random(2, n_cols), random(2, n_cols, seed=3), bias=True)
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("n_cols", [128, 40000])
def test_rounding_points(interpret, name: str, n_cols: int) -> None:
    """Only the order of the sum differs from the reference: all but a few elements are equal bit for bit."""
    options = SPELLINGS[name]
    weight = random(n_cols, dtype=FP32 if name in ("torch", "fp32 weight") else BF16, seed=1)
    args = arguments(random(3, n_cols), random(3, n_cols, seed=3), bias=True, weight=weight, **options)
    actual = run_interpreted(interpret, args)
    assert_as_close_as_reference(args, actual)
    out, total = ADD_RMS_NORM.reference(**args)
    assert torch.equal(actual[1], total)
    if out.dtype != FP32:
        assert (actual[0] == out).double().mean() > 0.99


def test_mutated_rounding_is_noticed(interpret) -> None:
    """The test above can fail: one rounding more changes over a percent of the elements."""
    args = arguments(random(3, 128), **SPELLINGS["torch"])
    (out,) = run_interpreted(interpret, {**args, "norm_dtype": BF16})
    assert (out == RMS_NORM.reference(**args)).double().mean() < 0.99


def test_residual_of_another_dtype(interpret) -> None:
    args = arguments(random(5, 100), random(5, 100, dtype=FP32, seed=3))
    actual = run_interpreted(interpret, args)
    assert actual[1].dtype == FP32
    assert_as_close_as_reference(args, actual)


def test_without_weight(interpret) -> None:
    args = arguments(random(5, 100), weight=None, weight_offset=1.0)
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


def test_bias_without_weight(interpret) -> None:
    args = arguments(random(5, 100), weight=None, bias=True)
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(5, 3, 100), (3, 4, 128), (2, 3, 4, 64), (3, 2048), (2, 2, 33000)], ids=str)
def test_a_weight_for_every_group(interpret, shape: tuple[int, ...], residual: bool) -> None:
    """[..., groups, columns] with the weight of the ungrouped dimension, also where a program holds several rows."""
    weight = random(shape[-2] * shape[-1], seed=1)
    args = arguments(
        random(*shape), random(*shape, seed=3) if residual else None, weight=weight, bias=True, weight_offset=1.0
    )
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("n_cols", [100, 33000])
def test_eps_in_a_tensor(interpret, n_cols: int, dtype: torch.dtype) -> None:
    args = arguments(random(3, n_cols) / 16, eps=123.0, eps_tensor=torch.tensor(0.5, dtype=dtype))
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("eps", [0.0, 1e-45, 1e-300, 0.25])
def test_eps(interpret, eps: float) -> None:
    args = arguments(random(3, 100), eps=eps)
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("n_cols", [64, 4096, 40000])
def test_rows_that_are_not_finite(interpret, n_cols: int) -> None:
    x = random(5, n_cols, dtype=FP32)
    x[0, 7] = torch.nan
    x[1, 3] = torch.inf
    x[2] = 0.0
    x[3, 5] = 1e30  # the square overflows
    args = arguments(x, eps=0.0)
    (actual,) = run_interpreted(interpret, args)
    torch.testing.assert_close(actual, RMS_NORM.reference(**args), equal_nan=True)
    assert actual[0].isnan().all()
    assert actual[4].isfinite().all()


def heads_of_a_packed_projection() -> torch.Tensor:
    packed = random(2, 5, 3 * 4 * 64)
    return packed[..., 256:512].view(2, 5, 4, 64).transpose(1, 2)


STRIDED = {
    "sliced columns": (random(6, 200)[:, 3:131], 1),
    "every other row": (random(6, 200)[::2], 1),
    "transposed batch": (random(4, 3, 100).transpose(0, 1), 2),
    "heads": (heads_of_a_packed_projection(), 3),
    "expanded row": (random(1, 100).expand(5, 100), 1),
    "expanded in the middle": (random(3, 1, 100).expand(3, 4, 100), 2),
    "size one with a wild stride": (random(5, 100).as_strided((5, 1, 100), (100, 7, 1)), 1),
    "mergeable": (random(2, 3, 4, 5, 30), 1),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides(interpret, name: str) -> None:
    x, outer_dims = STRIDED[name]
    args = arguments(x)
    (launch,) = RMS_NORM.plan(**args, target=SM90).launches
    assert launch.constexprs["OUTER_DIMS"] == outer_dims
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


@pytest.mark.parametrize("name", STRIDED)
def test_strides_of_the_residual(interpret, name: str) -> None:
    residual, outer_dims = STRIDED[name]
    args = arguments(random(*residual.shape, seed=3), residual)
    (launch,) = ADD_RMS_NORM.plan(**args, target=SM90).launches
    assert launch.constexprs["OUTER_DIMS"] == outer_dims
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


def test_strides_of_wide_rows(interpret) -> None:
    x = random(2, 2, 34000).transpose(0, 1)
    args = arguments(x, random(2, 2, 34000, seed=3))
    assert_as_close_as_reference(args, run_interpreted(interpret, args))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    outer = draw(st.lists(st.integers(1, 4), max_size=3))
    n_cols = draw(st.integers(1, 300) | st.sampled_from([509, 512, 1024, 1031]))
    seed = draw(st.integers(0, 1000))

    def rows(dtype: torch.dtype, seed: int) -> torch.Tensor:
        order = draw(st.permutations(range(len(outer))))
        padding = draw(st.sampled_from([0, 1, 8]))
        stored = random(*(outer[i] for i in order), n_cols + padding, dtype=dtype, seed=seed)[..., padding:]
        back = [order.index(i) for i in range(len(outer))]
        return stored.permute(*back, len(outer))

    dtype = st.sampled_from(DTYPES)
    x = rows(draw(dtype), seed)
    vector = st.none() | dtype.map(lambda d: random(n_cols, dtype=d, seed=seed + 1))
    args = {
        "x": x,
        "weight": draw(vector),
        "bias": draw(vector),
        "eps": draw(st.sampled_from([1e-6, 1e-5, 0.0])),
        "weight_offset": draw(st.sampled_from([0.0, 1.0])),
        **rounding(*(draw(dtype) for _ in range(4))),
        "root_dtype": draw(st.none() | dtype),
    }
    if draw(st.booleans()):
        args["residual"] = rows(draw(dtype), seed + 2)
    return args


@settings(max_examples=60, deadline=None, derandomize=True)
@given(args=calls(), arch=st.sampled_from(["sm_90", "gfx942"]))
def test_any_call(interpret, args: dict[str, Any], arch: str) -> None:
    assert_as_close_as_reference(args, run_interpreted(interpret, args, arch))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(5, 33), (0, 33), (3, 0), (2, 0, 8)], ids=str)
def test_opcheck(shape: tuple[int, ...], residual: bool) -> None:
    args = arguments(random(*shape), random(*shape, seed=3) if residual else None, bias=True, weight_offset=1.0)
    operator = operator_of(args)
    positional = [
        args.pop(name) for name in operator.params if name in ("x", "residual", "weight", "bias") and name in args
    ]
    torch.library.opcheck(operator.op, tuple(positional), args)


def test_results_are_contiguous_for_permuted_inputs() -> None:
    x = random(4, 3, 100).transpose(0, 1)
    out, total = ADD_RMS_NORM.op(**arguments(x, x))
    assert out.is_contiguous()
    assert total.is_contiguous()


def test_reference_is_the_spelling_of_torch() -> None:
    x, weight = random(5, 100, dtype=FP32), random(100, dtype=FP32, seed=1)
    torch.testing.assert_close(
        RMS_NORM.reference(**arguments(x, weight=weight)),
        torch.nn.functional.rms_norm(x, (100,), weight, 1e-6),
    )


X = random(4, 100)

DECLINED = {
    "float64": ({"x": X.double()}, "x is float64; the kernel takes float32, bfloat16, float16"),
    "complex": ({"x": X.to(torch.complex64)}, "x is complex64; the kernel takes float32, bfloat16, float16"),
    "integers": ({"x": X.int()}, "x is int32; the kernel takes float32, bfloat16, float16"),
    "sparse": ({"x": X.to_sparse()}, "x is not a strided tensor"),
    "scalar": ({"x": torch.tensor(1.0), "weight": None}, "x has no dimension to normalise"),
    "no rows": ({"x": X[:0]}, "x is empty"),
    "no columns": ({"x": X[:, :0], "weight": None}, "x is empty"),
    "too wide": (
        {"x": torch.empty(1, MAX_COLS + 1, device="meta"), "weight": None},
        "the hidden size 65537 is above 65536",
    ),
    "too many rows": (
        {"x": torch.empty(2**31, 1, device="meta"), "weight": None},
        "x has 2^31 rows or more",
    ),
    "columns apart": ({"x": random(100, 4).T}, "the last dimension of x is not contiguous"),
    "expanded columns": (
        {"x": random(4, 1).expand(4, 100)},
        "the last dimension of x is not contiguous",
    ),
    "four outer strides": (
        {"x": random(4, 2, 3, 2, 10).permute(3, 2, 1, 0, 4)},
        "the rows lie in memory along 4 strides, more than 3",
    ),
    "weight too short": ({"weight": random(99)}, "weight has shape (99,), not (100,)"),
    "weight of rank 2": ({"weight": random(1, 100)}, "weight has shape (1, 100), not (100,)"),
    "weight apart": ({"weight": random(200)[::2]}, "weight is not contiguous"),
    "float64 weight": (
        {"weight": random(100).double()},
        "weight is float64; the kernel takes float32, bfloat16, float16",
    ),
    "weight elsewhere": (
        {"weight": torch.empty(100, device="meta")},
        "x is on cpu, weight on meta",
    ),
    "bias too short": ({"bias": random(99)}, "bias has shape (99,), not (100,)"),
    "bias elsewhere": ({"bias": torch.empty(100, device="meta")}, "x is on cpu, bias on meta"),
    "eps of rank 1": ({"eps_tensor": torch.ones(1)}, "eps is a tensor with 1 dimensions, not 0"),
    "integer eps": ({"eps_tensor": torch.tensor(1)}, "eps is int64, not a float"),
    "eps elsewhere": ({"eps_tensor": torch.tensor(1.0, device="meta")}, "x is on cpu, eps on meta"),
    "infinite eps": ({"eps": float("inf")}, "eps or the weight offset is not finite"),
    "offset NaN": ({"weight_offset": float("nan")}, "eps or the weight offset is not finite"),
    "float64 root": ({"root_dtype": FP64}, "rounds to float64; the kernel knows float32, bfloat16, float16"),
    "weight for other groups": ({"x": random(2, 3, 100), "weight": random(200)}, "weight has shape (200,), not (100,)"),
    "bias for every group": ({"bias": random(400)}, "bias has shape (400,), not (100,)"),
    "float64 norm": ({"norm_dtype": FP64}, "rounds to float64; the kernel knows float32, bfloat16, float16"),
    "float64 result": ({"out_dtype": FP64}, "rounds to float64; the kernel knows float32, bfloat16, float16"),
    "residual of another shape": ({"residual": X[:1]}, "x and residual differ in shape"),
    "residual of another rank": ({"residual": X[0]}, "x and residual differ in shape"),
    "residual elsewhere": ({"residual": X.to("meta")}, "x is on cpu, residual on meta"),
    "float64 residual": (
        {"residual": X.double()},
        "residual is float64; the kernel takes float32, bfloat16, float16",
    ),
    "four strides together": (
        {"x": random(2, 3, 2, 2, 10), "residual": random(2, 2, 3, 2, 10).permute(1, 2, 0, 3, 4)},
        None,
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined(name: str) -> None:
    changes, reason = DECLINED[name]
    weight = random(changes.get("x", X).shape[-1]) if changes.get("x", X).dim() else None
    args = {"x": X, "weight": weight, "eps": 1e-6, **same(BF16), **changes}
    assert operator_of(args).supports(**args, target=SM90) == reason


@pytest.mark.parametrize(
    ("arch", "reason"),
    [("cpu", "no kernel for the CPU"), ("sm_75", "needs compute capability 8.0 or later, this is sm_75")],
)
def test_declined_target(arch: str, reason: str) -> None:
    args = arguments(X, X)
    assert ADD_RMS_NORM.supports(**args, target=named_target(arch)) == reason


def test_dynamic_rows_add_no_guard() -> None:
    """A plan for a symbolic batch and length is made without constraining them."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(random(6, 10, 128), symbolic_context=dynamic)
    weight = mode.from_tensor(random(128), static_shapes=True)
    with mode:
        residual = x.transpose(0, 1).contiguous().transpose(0, 1)
        args = arguments(x, residual, weight=weight)
        before = len(env.guards)
        assert ADD_RMS_NORM.supports(**args, target=SM90) is None
        plan = ADD_RMS_NORM.plan(**args, target=SM90)
    assert len(env.guards) == before
    assert isinstance(plan.launches[0].grid[0], torch.SymInt)
    assert plan.launches[0].constexprs["OUTER_DIMS"] == 2


def test_dynamic_columns_are_declined() -> None:
    dynamic = StatelessSymbolicContext([DimDynamic.STATIC, DimDynamic.DYNAMIC])
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(random(6, 128, dtype=FP32), symbolic_context=dynamic)
    with mode:
        assert RMS_NORM.supports(x, **same(FP32), target=SM90) == "the hidden size of x is dynamic"


@given(
    n_cols=st.integers(1, MAX_COLS),
    itemsize=st.sampled_from([2, 4]),
    n_rows=st.integers(1, 10**6),
    arch=st.sampled_from(TARGETS),
)
def test_choose_config(n_cols: int, itemsize: int, n_rows: int, arch: str) -> None:
    target = named_target(arch)
    config = choose_config(n_cols, itemsize, n_rows, target)
    for size in (config.block_rows, config.block_cols, config.num_warps):
        assert size > 0
        assert size & (size - 1) == 0
    assert config.num_warps * target.warp_size <= 1024
    assert config.block_cols >= n_cols if config.one_pass else config.block_rows == 1
    assert target.backend == "cuda" or not config.eviction
    # 64 values a thread in float32 would not leave registers for anything else
    assert config.block_rows * config.block_cols <= 32 * config.num_warps * target.warp_size


def machine_code_cases() -> dict[str, dict[str, Any]]:
    """What the compiler sees: narrow and wide rows, few and many, with everything switched on."""

    def rows(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    heads = rows(8, 2048, 32, 128).transpose(1, 2)
    everything = {"eps_tensor": rows(dtype=FP32), "weight_offset": 1.0}
    return {
        "heads": arguments(heads, heads, weight=rows(128)),
        "decode": arguments(rows(16, 4096), rows(16, 4096), weight=rows(4096)),
        "everything": {
            **arguments(rows(4096, 5120), weight=rows(5120, dtype=FP32), **everything),
            "bias": rows(5120, dtype=FP32),
        },
        "groups": arguments(rows(2048, 8, 1024), weight=rows(8192)),
        "fp32": arguments(rows(4096, 8192, dtype=FP32), rows(4096, 8192), weight=rows(8192, dtype=FP32)),
        "widest in one pass": arguments(rows(2048, 32768), rows(2048, 32768), weight=rows(32768)),
        "two passes": arguments(rows(2048, 65536), rows(2048, 65536), weight=rows(65536)),
    }


CODE = machine_code_cases()


@pytest.mark.parametrize("name", CODE)
def test_machine_code_of_sm_90(compile_ahead, name: str) -> None:
    """Nothing spills, every access of a row is 16 bytes wide, nothing is computed in float64."""
    operator, args = operator_of(CODE[name]), CODE[name]
    assert operator.supports(**args, target=SM90) is None
    (kernel,) = compile_ahead(operator.plan(**args, target=SM90), args, SM90)
    assert kernel.spilled == 0
    ptx = kernel.asm["ptx"]
    widths = re.findall(r"\bld\.global\S*?(\.v4)?\.b(?:16|32)\b", ptx)
    assert widths.count(".v4") >= 2
    assert re.search(r"\bst\.global\S*?\.v4\.b32\b", ptx)
    assert not re.search(r"\bst\.global\.b(?:16|32)\b", ptx)
    assert ".f64" not in ptx


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", ["heads", "everything", "groups", "two passes"])
def test_compiles_ahead_of_time(compile_ahead, arch: str, name: str) -> None:
    target, operator, args = named_target(arch), operator_of(CODE[name]), CODE[name]
    assert operator.supports(**args, target=target) is None
    (kernel,) = compile_ahead(operator.plan(**args, target=target), args, target)
    assert kernel.shared <= target.shared_memory
    assert not kernel.spilled


GPU_SHAPES = [
    *SHAPES,
    (1000, 64),
    (64, 4096),
    (257, 8192),
    (3, 32768),
    (2, 65536),
    (2, 50021),
    (4, 7, 33, 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_on_gpu(poison, shape: tuple[int, ...], dtype: torch.dtype, residual: bool) -> None:
    x = random(*shape, dtype=dtype, device="cuda")
    args = arguments(x, random(*shape, dtype=dtype, seed=3, device="cuda") if residual else None, bias=True)
    operator = operator_of(args)
    assert_as_close_as_reference(args, as_list(operator.op(**args)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", STRIDED)
def test_strides_on_gpu(poison, name: str) -> None:
    x, _ = STRIDED[name]
    whole_storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    moved = whole_storage.cuda().as_strided(x.shape, x.stride(), x.storage_offset())
    args = arguments(moved)
    assert_as_close_as_reference(args, [RMS_NORM.op(**args)])


@pytest.mark.gpu
def test_offsets_beyond_32_bits(poison) -> None:
    rows = 2**31 // 8192 + 3
    if torch.cuda.mem_get_info()[0] < 6 * rows * 8192 * 2:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.ones(rows, 8192, dtype=FP16, device="cuda")
    x[-1] = 3.0
    out, total = ADD_RMS_NORM.op(**arguments(x, x, weight=None))
    assert torch.equal(total[-1], torch.full_like(total[-1], 6.0))
    assert torch.equal(out[-2:], torch.ones_like(out[-2:]))
