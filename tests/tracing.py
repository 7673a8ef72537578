"""One model through Dynamo, pinning, AOTAutograd and the rewrite pass, with the joint graphs on record.

No code is generated: what comes out of the pass runs node by node, on the operators' references.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from portable_ops.inductor_ext.pin import pin
from portable_ops.inductor_ext.report import Report
from portable_ops.inductor_ext.rewrite import RewritePass, decision_target
from portable_ops.inductor_ext.settings import Settings
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.output_code import MockFXGraphCacheOutput
from torch.utils._python_dispatch import TorchDispatchMode


@dataclasses.dataclass
class Traced:
    """``result`` of the rewritten graph, the joint graphs ``before`` and ``after`` the pass, and the report."""

    result: Any
    before: str
    after: str
    report: Report


def trace(model: Callable[..., Any], *args: Any, dynamic: bool | None = None, **options: Any) -> Traced:
    """Run ``model(*args)`` as the backend would rewrite it under ``options`` (``gate="always"``, as for explain)."""
    settings = Settings.read({"target": "sm_90", **options})
    passes = _Recorder(RewritePass(settings))

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        pin(gm, decision_target(settings, torch.device("cpu")))
        return _compile(gm, example_inputs, passes)

    result = _run(model, args, backend, dynamic)
    return Traced(result, "\n".join(passes.before), "\n".join(passes.after), Report.merge(passes.reports))


def stock_graph(model: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> str:
    """The joint graphs of ``model(*args)`` in stock Inductor."""
    passes = _Recorder(None)
    _run(model, args, lambda gm, example_inputs: _compile(gm, example_inputs, passes), dynamic)
    return "\n".join(passes.before)


def in_double(model: Callable[..., Any], *args: Any) -> Any:
    """``model(*args)`` with every floating-point type, also those of casts inside, replaced by float64."""
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    if isinstance(model, torch.nn.Module):
        state = {name: t.double() if t.is_floating_point() else t for name, t in model.state_dict().items()}
        with Widened():
            return torch.func.functional_call(model, state, tuple(wide))
    with Widened():
        return model(*wide)


def assert_as_good_as_eager(results: Any, model: Callable[..., Any], *args: Any) -> None:
    """No further from float64 than 1.5 times eager's own error plus one rounding of the output type."""
    with torch.no_grad():
        eager, truth = _tensors(model(*args)), _tensors(in_double(model, *args))
    assert_no_further_than(_tensors(results), eager, truth)


def assert_no_further_than(results: Sequence[Tensor], eager: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """As above, given what eager computes and the truth in float64."""
    for ours, theirs, exact in zip(results, eager, truth, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        if exact.numel():
            rounding = torch.finfo(ours.dtype).eps * exact.abs().max()
            allowed = 1.5 * (theirs.double() - exact).abs().max() + rounding
            assert (ours.double() - exact).abs().max() <= allowed  # false for NaN


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


class Widened(TorchDispatchMode):
    """Replaces every floating-point type that an op is asked for by float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*map(_widen, args), **{name: _widen(a) for name, a in (kwargs or {}).items()})


def _widen(argument: Any) -> Any:
    narrow = isinstance(argument, torch.dtype) and argument.is_floating_point
    return torch.float64 if narrow else argument


def _run(model: Callable[..., Any], args: tuple, backend: Callable[..., Any], dynamic: bool | None) -> Any:
    torch._dynamo.reset()
    try:
        return torch.compile(model, backend=backend, dynamic=dynamic)(*args)
    finally:
        torch._dynamo.reset()


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], passes: _Recorder) -> Callable[..., Any]:
    patches = {"joint_custom_pre_pass": passes, "force_disable_caches": True, "cpp_wrapper": False}
    return compile_fx(gm, example_inputs, inner_compile=_no_code, config_patches=patches)


def _no_code(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> MockFXGraphCacheOutput:
    return _NodeByNode(gm)


class _NodeByNode(MockFXGraphCacheOutput):
    def __call__(self, inputs: list[Any]) -> Any:
        return self.gm(*inputs)


class _Recorder(CustomGraphPass):
    """Runs our pass, if there is one, and checks that it leaves a sound graph with nothing dead of its own."""

    def __init__(self, rewrite: RewritePass | None) -> None:
        self.rewrite = rewrite
        self.before: list[str] = []
        self.after: list[str] = []
        self.reports: list[Report] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.before.append(describe(graph))
        if self.rewrite is None:
            return
        self.reports.append(self.rewrite.rewrite(graph))
        graph.lint()
        dead = [n for n in graph.nodes if "portable_ops" in str(n.target) and not n.users]
        assert not dead, f"dead after the rewrite: {dead}"
        tail = [n.op for n in graph.nodes if n.op != "placeholder"]
        assert [n.op for n in graph.nodes][-len(tail) :] == tail, "the placeholders do not stand together"
        self.after.append(describe(graph))

    def uuid(self) -> None:
        return None


def describe(graph: fx.Graph) -> str:
    """The graph as text that does not depend on node names: ``%2 = aten.mul.Tensor(%0, %1) : f32[2, 3]``."""
    numbers: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        arguments = ", ".join(_words(node.args, node.kwargs, numbers))
        if node.op == "output":
            lines.append(f"return {arguments}")
            continue
        numbers[node] = f"%{len(numbers)}"
        call = "input" if node.op == "placeholder" else f"{_name(node.target)}({arguments})"
        text = f"{numbers[node]} = {call}{_type(node.meta.get('val'))}"
        lines += textwrap.wrap(text, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _name(target: Any) -> str:
    if isinstance(target, str):  # of an attribute
        return target
    return str(target) if isinstance(target, torch._ops.OpOverload) else target.__name__


def _words(args: Iterable[Any], kwargs: dict[str, Any], numbers: dict[fx.Node, str]) -> Iterable[str]:
    for argument in fx.map_arg(list(args), lambda n: _Word(numbers[n])):
        yield _SHORT.get(argument, str(argument)) if isinstance(argument, torch.dtype) else str(argument)
    for name, argument in fx.map_arg(kwargs, lambda n: _Word(numbers[n])).items():
        if argument is not None:
            yield f"{name}={_SHORT.get(argument, argument) if isinstance(argument, torch.dtype) else argument}"


class _Word(str):
    """A string that prints without quotes inside of lists."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.bool: "bool",
    torch.int64: "i64",
}


def _type(value: Any) -> str:
    if not isinstance(value, Tensor):
        return ""
    dtype = _SHORT.get(value.dtype, str(value.dtype))
    layout = "" if _is_contiguous(value) else f" strides {list(value.stride())}"
    return f" : {dtype}{list(value.shape)}{layout}"


def _is_contiguous(value: Tensor) -> bool:
    return list(value.stride()) == list(torch.empty(value.shape, device="meta").stride())
