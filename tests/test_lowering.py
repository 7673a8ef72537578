"""Inductor's generated code for a GPU that is not there: our launches as they stand in the wrapper.

Nothing runs. The device's queries are answered by a description of an H100-like GPU, inputs are fake tensors, and the
wrapper is kept instead of being loaded.
"""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from portable_ops.inductor_ext import Report, inductor_compat, register_operator, reports
from portable_ops.inductor_ext import rewrite as rewrite_module
from portable_ops.inductor_ext.backend import compile_graph
from portable_ops.inductor_ext.settings import split_options
from portable_ops.kernels import target as target_module
from portable_ops.kernels.launch import Buffer, Launch, Plan, jit, tl
from portable_ops.kernels.operator import define_operator
from portable_ops.patterns import Match, Pattern
from torch import Tensor, fx, nn
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.source import ConstantSource
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

pytest.importorskip("triton", reason="code is generated for Triton, which is not installed")

PROPERTIES = types.SimpleNamespace(
    name="described only",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    shared_memory_per_multiprocessor=228 * 1024,
    L2_cache_size=50 << 20,
    total_memory=80 << 30,
    gcnArchName="",
    uuid="0",
)


class _Driver:
    """Answers Triton's questions about the current device."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


ANSWERS = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.get_device_properties": lambda *_: PROPERTIES,
    "torch.cuda.get_device_capability": lambda *_: (9, 0),
    "torch.cuda.get_device_name": lambda *_: PROPERTIES.name,
    "torch.cuda.synchronize": lambda *_: None,
    "torch.cuda._lazy_init": lambda: None,
    "torch.cuda.device": lambda _: contextlib.nullcontext(),
    "torch.cuda.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "torch.cuda.set_rng_state": lambda *_: None,
    "torch.cuda.random.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "torch.cuda.random.set_rng_state": lambda *_: None,
    "torch.utils._triton.has_triton": lambda *_: True,
    "torch._inductor.scheduler.has_triton": lambda *_: True,
    "torch._subclasses.fake_tensor.init_gpu_context": lambda _: None,
    # These trace patterns on real GPU tensors.
    "torch._inductor.fx_passes.joint_graph.lazy_init": lambda *_: None,
    "torch._inductor.fx_passes.post_grad.lazy_init": lambda *_: None,
}
INTERFACE = {
    "is_available": lambda: True,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "get_compute_capability": lambda *_: 90,
    "get_device_properties": lambda *_: PROPERTIES,
    "get_raw_stream": lambda _: 0,
    "synchronize": lambda *_: None,
}


@contextlib.contextmanager
def described_gpu() -> Iterator[None]:
    """Every question about the device is answered from PROPERTIES."""
    import triton
    from torch._inductor.fx_passes import joint_graph, post_grad  # noqa: F401  (so that they can be patched)

    with contextlib.ExitStack() as stack:
        for name, answer in ANSWERS.items():
            stack.enter_context(mock.patch(name, answer))
        for name, answer in INTERFACE.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(answer)))
        for name in ("current_device", "get_device_properties"):
            stack.enter_context(mock.patch.object(CudaInterface.Worker, name, staticmethod(INTERFACE[name])))
        stack.enter_context(mock.patch("torch._C._cuda_getCurrentRawStream", lambda _: 0, create=True))
        target_module._gpu_target.cache_clear()
        stack.callback(target_module._gpu_target.cache_clear)
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", _Driver()))
        yield


class Generated:
    """The wrapper's source, and the report."""

    def __init__(self, code: str, report: Report) -> None:
        self.code, self.report = code, report

    @property
    def call(self) -> str:
        """The function that runs the graph."""
        start = self.code.index("def call(")
        return self.code[start : self.code.index("\n\n", start)]

    def launches(self, kernel: str) -> list[list[str]]:
        """The arguments of each start of ``kernel``, the stream left out; the grid comes last."""
        lines = re.findall(rf"^ +{kernel}_\d+\.run\((.*), stream=\w+\)$", self.call, re.MULTILINE)
        return [line.split(", ") for line in lines]

    def definitions(self, kernel: str) -> list[str]:
        """The kernel objects made of ``kernel``."""
        return re.findall(rf"^{kernel}_\d+ = ", self.code, re.MULTILINE)

    def buffers(self) -> list[str]:
        """The shapes that the wrapper allocates, as it writes them."""
        return re.findall(r"empty_strided_cuda\(\((.*?),?\),", self.call)


@pytest.fixture
def generate(tmp_path: Path) -> Iterator[Callable[..., Generated]]:
    """``generate(fn, shapes, **options)``: what Inductor writes for ``fn`` on a GPU, under ``gate=always``.

    ``shapes``: tuples, with a dtype last where it is not bfloat16; a size that is a string is symbolic.
    """
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: tests marked gpu run what is generated")
    codes: list[str] = []

    def keep(graph: Any) -> Any:
        code = graph.codegen()[0].value
        codes.append(code)
        path = tmp_path / f"wrapper_{len(codes)}.py"
        path.write_text(code)
        graph.cache_key, graph.cache_path, graph.cache_linemap = path.stem, str(path), []
        return types.SimpleNamespace(__file__=str(path), call=lambda args: None)

    def run(fn: Callable[..., Any], *shapes: tuple, **options: Any) -> Generated:
        codes.clear()
        patches, settings = split_options(None, {"portable_ops.gate": "always", **options})
        patches |= {"force_disable_caches": True, "joint_graph_constant_folding": False, "fallback_random": True}
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with (
            described_gpu(),
            torch.no_grad(),
            mock.patch("torch._inductor.graph.GraphLowering.compile_to_module", keep),
        ):
            inputs = _fakes(mode, shapes)
            gm = fx.symbolic_trace(fn)
            FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
            compile_graph(gm, inputs, patches, settings)
        return Generated(codes[-1], reports()[-1])

    yield run
    torch._dynamo.reset()


def _fakes(mode: FakeTensorMode, shapes: tuple[tuple, ...]) -> list[Tensor]:
    symbols: dict[str, Any] = {}

    def size(s: int | str) -> Any:
        if isinstance(s, int):
            return s
        if s not in symbols:
            env, source = mode.shape_env, ConstantSource(s)
            symbol = env.create_symbol(4, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            symbols[s] = env.create_symintnode(symbol, hint=4, source=source)
        return symbols[s]

    tensors = []
    for shape in shapes:
        dtype = shape[-1] if isinstance(shape[-1], torch.dtype) else torch.bfloat16
        sizes = [size(s) for s in shape if not isinstance(s, torch.dtype)]
        with mode:
            tensors.append(torch.empty(sizes, dtype=dtype, device="cuda:0"))
    return tensors


def norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(torch.bfloat16)


def repeat_kv(x: Tensor, n: int) -> Tensor:
    batch, heads, length, size = x.shape
    return x.unsqueeze(2).expand(batch, heads, n, length, size).reshape(batch, heads * n, length, size)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = repeat_kv(k, 4), repeat_kv(v, 4)
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


CACHE = (2, 8, 4096, 128)
DECODE = ((2, 32, 1, 128), CACHE, CACHE, (2, 1, 1, 4096, torch.bool))
KERNELS = "_decode_kernel", "_merge_splits_kernel"


def test_decode_attention_stands_in_the_wrapper(generate: Callable[..., Generated]) -> None:
    made = generate(attention, *DECODE)
    assert made.report.rewritten["attention"] == 1
    assert made.report.target == "sm_90"
    (variant,) = {s.variant for s in made.report.sites}
    assert "decode" in variant
    for kernel in KERNELS:
        assert len(made.launches(kernel)) == len(made.definitions(kernel)) == 1


def test_the_repeated_heads_are_gone_and_nothing_is_copied(generate: Callable[..., Generated]) -> None:
    made = generate(attention, *DECODE)
    assert "triton_" not in made.call, "something runs beside our kernels"
    # No buffer is as large as the repeated keys, and the caches are not copied either.
    cache = 2 * 8 * 4096 * 128
    for shape in made.buffers():
        numel = 1
        for size in shape.split(","):
            numel *= int(size)
        assert numel < cache // 4, shape
    (arguments,) = made.launches("_decode_kernel")
    assert all(name.startswith("arg") for name in arguments[:4]), arguments
    stock = generate(attention, *DECODE, **{"portable_ops.gate": "never"})
    assert "triton_" in stock.call or "extern_kernels" in stock.call or "torch.ops.aten" in stock.call
    assert "_decode_kernel" not in stock.code


def test_no_kernel_is_said_to_write_its_inputs(generate: Callable[..., Generated]) -> None:
    made = generate(attention, *DECODE)
    mutated = re.findall(r"'mutated_arg_names': \[(.*?)\]", made.code)
    for names in mutated:
        assert not {"'q'", "'k'", "'v'", "'mask'"} & set(names.split(", "))
    assert "copy_(" not in made.call and "clone" not in made.call


def test_a_grid_has_three_entries(generate: Callable[..., Generated]) -> None:
    made = generate(lambda x, w: norm(x, w), (3, 5, 4096), (4096,))
    (arguments,) = made.launches("rms_norm_one_pass_kernel")
    assert arguments[-3:] == ["15", "1", "1"]


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = norm(x, w) + x.sin()
    return x


def test_equal_layers_share_one_kernel(generate: Callable[..., Generated]) -> None:
    made = generate(lambda x, a, b, c, d: layers(x, a, b, c, d), (4, 4096), *[(4096,)] * 4)
    assert made.report.rewritten["rms_norm"] == 4
    kernel = "rms_norm_one_pass_kernel"
    # The first is a plain norm; those after it take the residual sum over: two specialisations at most.
    assert len(made.launches(kernel)) == 4
    assert len(made.definitions(kernel)) <= 2


def test_generating_again_after_a_reset(generate: Callable[..., Generated]) -> None:
    """Newer versions of ``torch._dynamo.reset`` forget the kernels that were registered with it."""
    first = generate(lambda x, w: norm(x, w), (4, 4096), (4096,))
    torch._dynamo.reset()
    other = generate(lambda x, w: norm(x, w), (4, 64), (64,))
    torch._dynamo.reset()
    again = generate(lambda x, w: norm(x, w), (4, 4096), (4096,))
    assert len(other.launches("rms_norm_one_pass_kernel")) == 1
    assert again.call == first.call


def test_the_report_stands_in_the_wrapper(generate: Callable[..., Generated]) -> None:
    made = generate(lambda x, w: norm(x, w), (4, 4096), (4096,))
    assert "from portable_ops.inductor_ext.report import restore as _restore_report" in made.code
    assert made.code.count("\n_restore_report('") == 1


@pytest.mark.parametrize("sizes", [("batch",), ("batch", "length")], ids=str)
def test_symbolic_sizes_reach_grid_and_strides(generate: Callable[..., Generated], sizes: tuple) -> None:
    made = generate(lambda x, w: norm(x, w), (*sizes, 4096), (4096,))
    assert made.report.rewritten["rms_norm"] == 1
    (arguments,) = made.launches("rms_norm_one_pass_kernel")
    symbols = set(re.findall(r"\bs\d+\b", arguments[-3]))
    assert len(symbols) == len(sizes), arguments
    assert arguments[-2:] == ["1", "1"]


def pinned_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Torch's own attention falls back to its maths where no GPU is found, and that fixes symbolic sizes."""
    k, v = repeat_kv(k, 4), repeat_kv(v, 4)
    return torch.ops.portable_ops.attention(q, k, v, mask)


def test_attention_with_a_symbolic_batch(generate: Callable[..., Generated]) -> None:
    cache = ("batch", 8, 4096, 128)
    made = generate(pinned_attention, ("batch", 32, 1, 128), cache, cache, ("batch", 1, 1, 4096, torch.bool))
    assert made.report.rewritten["attention"] == 1
    (arguments,) = made.launches("_decode_kernel")
    assert re.search(r"\bs\d+\b", arguments[-3]), arguments
    assert "triton_" not in made.call


def test_a_declined_match_generates_what_stock_generates(generate: Callable[..., Generated]) -> None:
    declined = generate(lambda x, w: norm(x, w), (4, 4096), (4096,), **{"portable_ops.max_rewrites": 0})
    assert declined.report.counts["rms_norm"] == 1
    assert not declined.launches("rms_norm_one_pass_kernel")
    assert "triton_" in declined.call


def test_the_cpp_wrapper_starts_our_kernels(generate: Callable[..., Generated]) -> None:
    if torch.__version__ < "2.13":
        pytest.skip("this torch runs the kernels while it generates a C++ wrapper, which takes a GPU")
    made = generate(lambda x, w: norm(x, w), (4, 4096), (4096,), cpp_wrapper=True)
    assert re.search(r"rms_norm_one_pass_kernel_\d+", made.code)
    assert made.code.count("\n_restore_report('") == 1


# ------------------------------------------------------------------------------------------- linear layers of few rows


def projections(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


QKV = (4096, 4096), (1024, 4096), (1024, 4096)
MLP = (14336, 4096), (14336, 4096), (4096, 14336)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_three_layers_are_one_launch(generate: Callable[..., Generated], rows: int) -> None:
    made = generate(projections, (rows, 1, 4096), *QKV)
    assert made.report.rewritten["linear"] == made.report.counts["linear"] == 1
    (arguments,) = made.launches("_linear_kernel")
    block = 16 if rows == 1 else 32
    assert arguments[-3:] == [str(6144 // block), "1", "1"]
    assert "extern_kernels" not in made.call and "triton_" not in made.call
    assert sorted(made.buffers()) == sorted(f"{rows}, {n}" for n in (4096, 1024, 1024))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_gated_mlp_is_two_launches(generate: Callable[..., Generated], rows: int) -> None:
    made = generate(mlp, (rows, 1, 4096), *MLP)
    assert made.report.rewritten["swiglu"] == made.report.rewritten["linear"] == 1
    assert len(made.launches("_gated_linear_kernel")) == len(made.launches("_linear_kernel")) == 1
    assert "extern_kernels" not in made.call and "triton_" not in made.call
    assert sorted(made.buffers()) == [f"{rows}, 14336", f"{rows}, 4096"]
    stock = generate(mlp, (rows, 1, 4096), *MLP, **{"portable_ops.gate": "never"})
    assert stock.call.count("extern_kernels.mm(") == 3 and "_linear_kernel" not in stock.code


def test_a_decoder_layer_starts_no_matrix_library(generate: Callable[..., Generated]) -> None:
    def layer(h: Tensor, w: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, g: Tensor, u: Tensor, d: Tensor):
        q, k, v = projections(norm(h, w), q, k, v)
        h = h + F.linear(q * repeated(k) + repeated(v), o)
        return h + mlp(norm(h, w), g, u, d)

    def repeated(x: Tensor) -> Tensor:
        return x.repeat(1, 1, 4)

    made = generate(layer, (4, 1, 4096), (4096,), *QKV, QKV[0], *MLP)
    assert made.report.rewritten["linear"] == 3 and made.report.rewritten["swiglu"] == 1
    assert len(made.launches("_linear_kernel")) == 3 and len(made.launches("_gated_linear_kernel")) == 1
    assert "extern_kernels" not in made.call


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("model", "shapes"), [(projections, QKV), (mlp, MLP)], ids=["projections", "mlp"])
def test_linear_kernels_write_their_results_only(
    generate: Callable[..., Generated], monkeypatch: pytest.MonkeyPatch, model: Callable, shapes: tuple, rows: int
) -> None:
    """Inductor's analysis of the kernels finds the stores to all results, and no others."""
    written = []
    emit = inductor_compat.launch

    def remembered(launch: Launch, args: Any) -> list[str]:
        names = emit(launch, args)
        written.append({launch.args[name] for name in names})
        return names

    monkeypatch.setattr(inductor_compat, "launch", remembered)
    made = generate(model, (rows, 1, 4096), *shapes)
    assert written == ([{"q", "k", "v"}] if model is projections else [{"out"}, {"out"}])
    assert "copy_(" not in made.call and "clone" not in made.call


def test_weights_are_read_where_they_are(generate: Callable[..., Generated]) -> None:
    """Pieces of a packed weight, and the last token of each prompt, are not copied."""

    def model(h: Tensor, packed: Tensor) -> tuple[Tensor, ...]:
        pieces = (packed.narrow(0, start, size) for start, size in ((0, 4096), (4096, 1024), (5120, 1024)))
        return projections(h.select(1, 127), *pieces)

    made = generate(model, (4, 128, 4096), (6144, 4096))
    assert len(made.launches("_linear_kernel")) == 1 and len(made.buffers()) == 3
    assert "extern_kernels" not in made.call and "triton_" not in made.call
    views = re.findall(r"reinterpret_tensor\(\w+, (\(.*?\), \(.*?\), \d+)\)", made.call)
    rows = f"({128 * 4096}, 1), {127 * 4096}"
    assert views == [f"(4, 4096), {rows}"] + [
        f"({size}, 4096), (4096, 1), {start * 4096}" for start, size in ((0, 4096), (4096, 1024), (5120, 1024))
    ]


def test_equal_linear_layers_share_one_kernel(generate: Callable[..., Generated]) -> None:
    def model(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        for w in (a, b, c):
            x = F.linear(x.sin(), w)
        return x

    made = generate(lambda x, a, b, c: model(x, a, b, c), (4, 4096), *[(4096, 4096)] * 3)
    assert len(made.launches("_linear_kernel")) == 3
    assert len(made.definitions("_linear_kernel")) == 1


@pytest.mark.parametrize("shape", [("batch", 1, 4096), (17, 1, 4096), (4, 1, 4096, torch.float32)], ids=str)
def test_other_products_are_left_to_the_matrix_library(generate: Callable[..., Generated], shape: tuple) -> None:
    weight = (1024, 4096, *(s for s in shape if isinstance(s, torch.dtype)))
    made = generate(lambda x, w: F.linear(x, w), shape, weight)
    assert not made.report.rewritten["linear"]
    assert made.call.count("extern_kernels.mm(") == 1


def test_the_cpp_wrapper_starts_linear_kernels(generate: Callable[..., Generated]) -> None:
    if torch.__version__ < "2.13":
        pytest.skip("this torch runs the kernels while it generates a C++ wrapper, which takes a GPU")
    made = generate(mlp, (4, 1, 4096), *MLP, cpp_wrapper=True)
    assert re.search(r"_gated_linear_kernel_\d+", made.code) and re.search(r"\b_linear_kernel_\d+", made.code)


# ------------------------------------------------------------------------------------------ rotations and their caches


def qkv_to_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (qkv.narrow(-1, start, size).unflatten(-1, (-1, 128)) for start, size in _PACKED)
    return *(_rotated(norm(x, w).transpose(1, 2), cos, sin) for x, w in ((q, q_weight), (k, k_weight))), v.transpose(
        1, 2
    )


_PACKED = ((0, 4096), (4096, 1024), (5120, 1024))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _positions(position: Tensor, length: int) -> Tensor:
    how = {"dtype": torch.int64, "device": position.device, "requires_grad": False}
    return torch.ops.prims.iota(length, start=0, step=1, **how) + position


fx.wrap("_positions")


def step_over_a_cache(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *cache: Tensor) -> Any:
    position, keys, values = cache
    q, k, v = qkv_to_heads(qkv, q_weight, k_weight, cos, sin)
    where = _positions(position, 1)
    keys.index_copy_(2, where, k)
    values.index_copy_(2, where, v)
    return q, keys.sum(2)


HEADS = (64, 1, 6144), (128,), (128,), (1, 1, 1, 128), (1, 1, 1, 128)
KV = (64, 8, 4096, 128)


@pytest.fixture
def fake_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets AOTAutograd trace ``copy_``, whose autograd kernel asks for the device."""

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.aten.copy_.default(self, source)

    monkeypatch.setattr(Tensor, "copy_", copy_)


def test_a_step_writes_its_cache_in_one_launch(generate: Callable[..., Generated], fake_copies: None) -> None:
    def step(qkv, q_weight, k_weight, cos, sin, position, keys, values):
        return step_over_a_cache(qkv, q_weight, k_weight, cos, sin, position, keys, values)

    made = generate(step, *HEADS, (torch.int64,), KV, KV)
    assert made.report.rewritten["rope"] == made.report.rewritten["rms_norm"] == 2
    (arguments,) = made.launches("rotation_kernel")
    assert arguments[-3:] == ["768", "1", "1"]
    # q is the only buffer of ours, beside what stock makes of the sum; the caches are written where they are.
    assert made.buffers()[0] == "64, 32, 1, 128" and len(made.buffers()) == 2
    assert "arg6_1" in arguments and "arg7_1" in arguments
    assert made.call.count(".run(") == 2 and "copy_(" not in made.call and "clone" not in made.call
    # What reads the cache stands behind the launch.
    assert made.call.index("rotation_kernel_0.run") < made.call.index("sum_0.run(arg6_1")


def test_heads_are_normalised_and_rotated_in_one_launch(generate: Callable[..., Generated]) -> None:
    def heads(qkv, q_weight, k_weight, cos, sin):
        return qkv_to_heads(qkv, q_weight, k_weight, cos, sin)

    made = generate(heads, (8, 2048, 6144), *HEADS[1:3], (1, 1, 2048, 128), (1, 1, 2048, 128))
    assert len(made.launches("rotation_kernel")) == 1
    assert "triton_" not in made.call
    stock = generate(heads, *HEADS, **{"portable_ops.gate": "never"})
    assert "rotation_kernel" not in stock.code


def test_rotations_with_symbolic_sizes(generate: Callable[..., Generated]) -> None:
    def heads(qkv, q_weight, k_weight, cos, sin):
        return qkv_to_heads(qkv, q_weight, k_weight, cos, sin)

    tables = (1, 1, "length", 128)
    made = generate(heads, ("batch", "length", 6144), *HEADS[1:3], tables, tables)
    (arguments,) = made.launches("rotation_kernel")
    assert len(set(re.findall(r"\bs\d+\b", arguments[-3]))) == 2, arguments


# --------------------------------------------------------------------- an operator that breaks the contract


@jit
def _overwrites_its_input(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n)
    tl.store(x + offsets, value, mask=offsets < n)
    tl.store(out + offsets, value * value * value, mask=offsets < n)


@jit
def _writes_nothing(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.load(x + offsets, mask=offsets < n)


def _toy(name: str, kernel: Any) -> Pattern:
    def plan(x: Tensor, *, target: Any) -> Plan:
        launch = Launch(kernel, (4,), {"x": "x", "out": "out", "n": 4096}, {"BLOCK": 1024})
        return Plan("toy", (launch,), {"out": Buffer(tuple(x.shape), x.dtype)})

    operator = define_operator(
        f"portable_ops_tests::{name}(Tensor x) -> Tensor",
        reference=lambda x: x**3,
        supports=lambda x, *, target: None,
        plan=plan,
    )
    register_operator(operator)

    def match(anchor: fx.Node) -> Match:
        return Match(name, "rms_norm", anchor, operator, {"x": anchor.args[0]}, (anchor,), ())

    return Pattern(name, "rms_norm", lambda n: n.target is torch.ops.aten.pow.Tensor_Scalar, match)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            _overwrites_its_input,
            r"_overwrites_its_input of portable_ops_tests::\w+ should write its results only.*\['x'\]",
        ),
        (_writes_nothing, r"_writes_nothing of portable_ops_tests::\w+ should write its results only.*nothing"),
    ],
    ids=["overwrites", "nothing"],
)
def test_an_operator_that_writes_something_else_is_refused(
    generate: Callable[..., Generated], monkeypatch: pytest.MonkeyPatch, kernel: Any, message: str
) -> None:
    pattern = _toy(f"toy{kernel.__name__}", kernel)
    monkeypatch.setattr(rewrite_module, "_patterns", [pattern])
    with pytest.raises(Exception, match=message):
        generate(lambda x: x**3, (4, 1024))


def test_nothing_stays_patched(generate: Callable[..., Generated]) -> None:
    from torch._higher_order_ops import triton_kernel_wrap

    before = dict(vars(triton_kernel_wrap)), config.get_config_copy()
    generate(lambda x, w: norm(x, w), (4, 4096), (4096,))
    assert (dict(vars(triton_kernel_wrap)), config.get_config_copy()) == before
    assert not torch.cuda.is_available()


SELECTIONS = {
    "a row to a program": ((4096, 8192), ["_row_kernel"]),
    "several programs to a row": ((2, 131072), ["_group_maxima_kernel", "_filter_kernel", "_finish_kernel"]),
    "many rows": (
        (64, 131072),
        ["_group_maxima_kernel", "_bound_kernel", "_filter_kernel", "_finish_kernel"],
    ),
}


@pytest.mark.parametrize("sorted", [False, True])
@pytest.mark.parametrize(("shape", "kernels"), SELECTIONS.values(), ids=SELECTIONS)
def test_selections(generate: Callable[..., Generated], shape: tuple, kernels: list[str], sorted: bool) -> None:
    made = generate(lambda x: torch.topk(x, 2048, sorted=sorted)[1], (*shape, torch.float32))
    assert made.report.rewritten["topk"] == 1 and "aten.topk" not in made.call and "triton_" not in made.call
    assert re.findall(r"^ +(_\w+_kernel)_\d+\.run", made.call, re.MULTILINE) == kernels
    assert "copy_(" not in made.call and "clone" not in made.call


def test_a_span_is_an_argument(generate: Callable[..., Generated]) -> None:
    def longest(x: Tensor, lengths: Tensor) -> Tensor:
        outside = torch.arange(131072, device=x.device) >= lengths.unsqueeze(1)
        return x.masked_fill(outside, -torch.inf).topk(2048)[1]

    made = generate(longest, (2, 131072, torch.float32), (2, torch.int64))
    assert made.report.rewritten["topk"] == 1
    assert "triton_" not in made.call, "a mask is made"


def test_a_router(generate: Callable[..., Generated]) -> None:
    def router(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = torch.topk(logits.softmax(-1, dtype=torch.float32), 8, dim=-1)
        return weights / weights.sum(-1, keepdim=True), experts

    made = generate(router, ("tokens", 128))
    assert made.report.rewritten["router"] == 1 and len(made.launches("_router_kernel")) == 1
    assert "triton_" not in made.call and "aten.topk" not in made.call
