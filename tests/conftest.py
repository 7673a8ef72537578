"""Fixtures and markers shared by all tests."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from portable_ops.kernels.launch import Launch, Plan
from portable_ops.kernels.target import Target


def _load_sibling(name: str) -> ModuleType:
    """Tests are flat files that pytest imports by path, so they cannot import each other by name."""
    full_name = f"portable_ops_tests_{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    spec = importlib.util.spec_from_file_location(full_name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "needs a GPU: torch.cuda.is_available() is False"
    if importlib.util.find_spec("triton") is None:
        return "needs a GPU with Triton: Triton is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return "needs a GPU of compute capability 8.0 or later"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--zoo-all", action="store_true", help="test_zoo.py: every architecture in every configuration")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_no_gpu()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" not in metafunc.fixturenames:
        return
    zoo, everything = _load_sibling("zoo"), metafunc.config.getoption("zoo_all")
    cases = [
        pytest.param(architecture, name, id=f"{architecture.name}-{name}")
        for architecture in (*zoo.CI, *(zoo.OTHERS if everything else ()))
        for name in (metafunc.module.CONFIGURATIONS if everything else metafunc.module.IN_CI)
        if architecture.decodes or not name.endswith("decode")
    ]
    metafunc.parametrize(("architecture", "configuration"), cases)


@pytest.fixture(autouse=True)
def _patterns_do_not_fail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backend survives, a pattern that raises, is an error in every test but those that are about it."""
    if not request.node.get_closest_marker("failing_pattern"):
        from portable_ops.inductor_ext import rewrite

        def fail(pattern: object, node: object, error: Exception) -> None:
            raise error

        monkeypatch.setattr(rewrite, "failed", fail)


@pytest.fixture(scope="session")
def tracing() -> ModuleType:
    """``tests/tracing.py``: the joint graph of a model before and after the rewrite, and what it computes."""
    return _load_sibling("tracing")


@pytest.fixture(scope="session")
def zoo() -> ModuleType:
    """``tests/zoo.py``: tiny Hugging Face models, and what each really calls."""
    return _load_sibling("zoo")


@pytest.fixture(scope="session")
def planted() -> ModuleType:
    """``tests/planted.py``: a small model with matches, and a planted near miss of each sort."""
    return _load_sibling("planted")


@pytest.fixture(scope="session")
def dumped(planted: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of the small model, everything rewritten."""
    from portable_ops.inductor_ext.dump import dump

    folder = tmp_path_factory.mktemp("dump")
    with torch.no_grad():
        dump(planted.Model(), folder, name="planted", gate="always")(planted.inputs())
    return folder


@pytest.fixture(scope="session")
def interpret() -> Iterator:
    """``interpret(plan, operands) -> list[Tensor]``: ``launch.run`` on CPU tensors in Triton's interpreter.

    Fresh buffers are filled with NaN.  ``operands`` may hold all of the operator's arguments by name.
    """
    pytest.importorskip("triton")
    interpreter = _load_sibling("interpret").Interpreter()
    yield interpreter
    interpreter.close()


@pytest.fixture
def poison() -> Iterator[None]:
    """Fills memory that ``torch.empty`` and its kin return with NaN (integers: the largest), on any device.

    Not for every test: torch offers it as a part of deterministic mode, which Inductor reads too.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@dataclasses.dataclass(frozen=True)
class Compiled:
    """``asm``: Triton's intermediate and machine code by name ("ptx", "amdgcn", ...).  ``shared``: bytes of
    shared memory.  ``spilled``: bytes that ptxas stores because registers ran out, or None without ptxas.
    """

    asm: Mapping[str, str | bytes]
    shared: int
    spilled: int | None


@pytest.fixture(scope="session")
def compile_ahead() -> Callable[..., list[Compiled]]:
    """``compile_ahead(plan, operands, target) -> [Compiled, ...]``, one per launch; needs no GPU.

    As at a real launch, pointers are taken to be aligned to 16 bytes, integers that are multiples of 16 are
    known to be, and ones are constants.
    """
    pytest.importorskip("triton")

    def compile_ahead(plan: Plan, operands: Mapping, target: Target) -> list[Compiled]:
        return [_compile(launch, {**operands, **plan.scratch, **plan.outputs}, target) for launch in plan.launches]

    return compile_ahead


def _compile(launch: Launch, tensors: Mapping, target: Target) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    signature, constants, attributes = {}, {}, {}
    for position, name in enumerate(launch.kernel.arg_names):
        value = launch.constexprs[name] if name in launch.constexprs else launch.args[name]
        if name in launch.constexprs or value is None or value == 1:
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, str):
            signature[name] = mangle_type(torch.empty(0, dtype=tensors[value].dtype))
        else:
            signature[name] = mangle_type(value)
        if isinstance(value, str) or (isinstance(value, int) and value % 16 == 0):
            attributes[(position,)] = [["tt.divisibility", 16]]
    kernel = triton.compile(
        ASTSource(launch.kernel, signature, constants, attributes),
        target=GPUTarget(
            target.backend, target.capability if target.backend == "cuda" else target.arch, target.warp_size
        ),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    spilled = _spilled_bytes(kernel.asm["ptx"]) if "ptx" in kernel.asm else None
    return Compiled(kernel.asm, kernel.metadata.shared, spilled)


def _spilled_bytes(ptx: str) -> int:
    import triton

    tools = triton.knobs.nvidia
    arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE).group(1)
    # sm_100 and later: a second ptxas that comes with Triton
    ptxas = getattr(tools, "ptxas_blackwell", tools.ptxas) if int(re.sub(r"\D", "", arch)) >= 100 else tools.ptxas
    output = subprocess.run(
        [ptxas.path, "--verbose", f"--gpu-name={arch}", "--output-file=/dev/null", "-"],
        input=ptx,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    return sum(int(size) for size in re.findall(r"(\d+) bytes spill stores", output))
