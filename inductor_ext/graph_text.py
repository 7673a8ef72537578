"""A graph as text: Python that runs again, with types and source lines, and Graphviz.

The values of constants are not written; where the text is run they are made up, as inputs are.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import fx
from torch.fx import graph_module
from torch.package.importer import sys_importer

from ..kernels.launch import hint

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}


def type_text(value: Any) -> str:
    """``f32[2, 3]``, with strides where the tensor is not contiguous; "" for what is no tensor or number."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return f"{value.dtype}{list(value.shape)} {value.layout}".removeprefix("torch.")
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        strides = "" if _contiguous(value) else f" strides {[_plain(s) for s in value.stride()]}"
        return f"{dtype}{[_plain(s) for s in value.shape]}{strides}".replace("'", "")
    return str(value) if isinstance(value, int | float | bool | torch.SymInt) else ""


def _contiguous(value: torch.Tensor) -> bool:
    step: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if str(size) != "1" and str(stride) != str(step):
            return False
        step = step * size
    return True


def _plain(size: Any) -> Any:
    return size if isinstance(size, int) else str(size)


def size_symbols(graph: fx.Graph) -> set[Any]:
    """The symbols that sizes of the graph's inputs are made of; others are numbers that the model was called with."""
    values = (_value(node) for node in graph.nodes if node.op == "placeholder")
    sizes = (size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    return {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def input_spec(value: Any, sizes: Set[Any] = frozenset()) -> dict[str, Any]:
    """What is needed to make up such a value: for a tensor its shape, strides and dtype, with hints for symbols.

    ``sizes``: the symbols whose hints may be told; a number of any other sort becomes 2.
    """
    if isinstance(value, torch.Tensor):
        strided = value.layout == torch.strided
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [hint(s) for s in value.shape],
            "stride": [hint(s) for s in value.stride()] if strided else None,
        }
    if isinstance(value, torch.SymInt) and value.node.expr.free_symbols <= sizes:
        return {"number": hint(value)}
    return {"number": 2 if isinstance(value, int | torch.SymInt) else 1}


def runnable(graph: fx.Graph, name: str) -> str:
    """A Python module whose class ``Graph`` is ``graph``; run as a script it calls it on made-up inputs."""
    owner = graph.owning_module if graph.owning_module is not None else torch.nn.Module()
    classes, imports = _classes(graph, owner, "Graph", {})
    inputs = {}
    sizes = size_symbols(graph)
    device = "cpu"
    for node in graph.nodes:
        if node.op == "placeholder":
            value = _value(node)
            inputs[node.name] = input_spec(value, sizes)
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                device = value.device.type
    rows = "".join(f"    {input!r}: {spec!r},\n" for input, spec in inputs.items())
    return _FILE.format(
        name=name,
        imports="\n".join(sorted(imports)),
        classes="\n\n".join(classes),
        inputs=rows,
        device=device,
    )


_FILE = '''"""{name}: a graph on its way through portable_ops.  Inputs and constants are made up where this runs.

    python FILE [DEVICE]
"""

import sys

import torch
import portable_ops.inductor_ext  # defines the operators
{imports}


def made_up(dtype=None, shape=(), stride=None, number=None, device="cpu"):
    """A tensor of this description, or the number."""
    if number is not None:
        return number
    kind = getattr(torch, dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if stride is not None and 0 not in shape else 0
    if stride is None or 0 in shape:
        storage, tensor = None, torch.zeros(shape, dtype=kind, device=device)
    else:
        storage = torch.zeros(extent, dtype=kind, device=device)
        tensor = storage.as_strided(shape, stride)
    if storage is not None and kind.is_floating_point and kind.itemsize > 1:
        storage.normal_()
    return tensor


{classes}


INPUTS = {{
{inputs}}}


def main(device={device!r}):
    with torch.no_grad():
        graph = Graph().to(device)
        results = graph(*(made_up(**spec, device=device) for spec in INPUTS.values()))
    for result in results if isinstance(results, (tuple, list)) else (results,):
        if isinstance(result, torch.Tensor):
            print(result.dtype, tuple(result.shape), tuple(result.stride()))
        else:
            print(result)
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
'''


def _classes(graph: fx.Graph, owner: torch.nn.Module, name: str, done: dict[int, str]) -> tuple[list[str], set[str]]:
    """The source of ``graph`` as a class, after those of the graphs that it calls, and the imports of all."""
    classes: list[str] = []
    imports: set[str] = set()
    attributes = []
    for target in dict.fromkeys(n.target for n in graph.nodes if n.op in ("get_attr", "call_module")):
        value = _attribute(owner, target)
        if isinstance(value, fx.GraphModule):
            if id(value) not in done:
                done[id(value)] = f"{name}_{target.replace('.', '_')}"
                inner, more = _classes(value.graph, value, done[id(value)], done)
                classes += inner
                imports |= more
            made = f"torch.fx.symbolic_trace({done[id(value)]}())"
        elif isinstance(value, torch.Tensor):
            made = f"made_up(**{input_spec(value)!r})"
        else:
            made = f"None  # {type(value).__name__}, which no text can hold"
        keep = "_keep(self, {target!r}, {made})" if "." in target else "self.{target} = {made}"
        attributes.append(f"        {keep.format(target=target, made=made)}\n")
    code = _code(graph)
    block = graph_module._format_import_block(code.globals, sys_importer)
    imports |= {line for line in block.splitlines() if line.strip()}
    lines = (_shortened(line) for line in code.src.strip("\n").split("\n"))
    body = "".join(f"    {line}\n" if line.strip() else "\n" for line in lines)
    start = "    def __init__(self):\n        super().__init__()\n" + "".join(attributes) + "\n" if attributes else ""
    keep = _KEEP if any("_keep(" in line for line in attributes) else ""
    classes.append(f"{keep}class {name}(torch.nn.Module):\n{start}{body}")
    return classes, imports


def _shortened(line: str) -> str:
    """``line``, or its beginning where it is a comment with a source line that nobody wrote by hand."""
    return line if len(line) < 1000 or not line.lstrip().startswith("#") else f"{line[:1000]}..."


def _code(graph: fx.Graph) -> Any:
    """The graph as a function of its placeholders: a joint graph is one of nested structures otherwise."""
    usual = graph._codegen
    graph.set_codegen(fx.graph.CodeGen())
    try:
        return graph.python_code("self", verbose=True, include_stride=True, include_device=True)
    finally:
        graph.set_codegen(usual)


_KEEP = '''def _keep(owner, path, value):
    """Put ``value`` where ``path`` with its dots looks for it."""
    *parents, last = path.split(".")
    for name in parents:
        if not hasattr(owner, name):
            setattr(owner, name, torch.nn.Module())
        owner = getattr(owner, name)
    setattr(owner, last, value)


'''


def _attribute(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def graphviz(rows: Iterable[Any], marks: dict[str, str], colours: dict[str, str]) -> str:
    """The nodes of a graph for ``dot``: ``marks`` gives the kind of a node that belongs to a site."""
    lines = ["digraph {", "  node [shape=box, fontname=Helvetica, fontsize=10, style=filled, fillcolor=white]"]
    for row in rows:
        label = "\\n".join(_quoted(part) for part in (row.name, row.target, row.type) if part)
        colour = f', fillcolor="{colours.get(marks[row.name], "#cccccc")}"' if row.name in marks else ""
        lines.append(f'  "{_quoted(row.name)}" [label="{label}"{colour}]')
        lines += [f'  "{_quoted(argument)}" -> "{_quoted(row.name)}"' for argument in row.arguments]
    return "\n".join([*lines, "}\n"])


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
