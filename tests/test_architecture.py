"""The layers, checked on the source: inductor_ext -> patterns -> kernels, never back and never sideways."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("kernels", "patterns", "inductor_ext")
"""Lowest first: a layer may import those before it."""

SHARED = {
    "kernels": {"launch", "target", "operator", "activation", "rotation", "rounding"},
    "patterns": {"algebra", "match", "order"},
}
"""What modules of a layer may import from their own layer; inductor_ext may import all of its own."""

JOINS = {"patterns/qk_rope.py": {"rope", "rms_norm"}}
"""A pattern whose matches are made of those of others."""

PACKAGE = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
BESIDE = [path for folder in ("benchmarks", "examples", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_module = pytest.mark.parametrize("path", PACKAGE, ids=label)


def imports(source: str, package: tuple[str, ...]) -> set[str]:
    """Dotted names of all that a module in ``package`` imports, at the top or inside of functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            kept = len(package) - node.level + 1 if node.level else 0
            base = [*package[:kept], *([node.module] if node.module else [])]
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


def own_imports(path: Path) -> set[tuple[str, str]]:
    """``(layer, module)`` of what ``path`` imports of our own; the module is "" for a layer as a whole."""
    package = ("portable_ops", *path.relative_to(ROOT).parts[:-1])
    found = set()
    for dotted in imports(path.read_text(), package):
        top, *rest = dotted.split(".")
        if top == "portable_ops" and rest and rest[0] in LAYERS:
            layer, module = rest[0], rest[1] if len(rest) > 1 else ""
            found.add((layer, module if (ROOT / layer / f"{module}.py").exists() else ""))
    return found


def test_imports_are_read_in_every_form() -> None:
    top = "import torch.fx as fx\nfrom . import match\nfrom .algebra import x\n"
    source = top + "def f():\n    from ..kernels.launch import y\n"
    assert imports(source, ("portable_ops", "patterns")) == {
        "torch.fx",
        "portable_ops.patterns.match",
        "portable_ops.patterns.algebra.x",
        "portable_ops.kernels.launch.y",
    }


@each_module
def test_imports_go_down_and_not_sideways(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    for other, module in own_imports(path):
        assert LAYERS.index(other) <= LAYERS.index(layer), f"{label(path)} imports {other}, a layer above it"
        is_index = path.name == "__init__.py"
        if other == layer and layer in SHARED and not is_index:
            allowed = SHARED[layer] | JOINS.get(label(path), set())
            assert module in allowed, f"{label(path)} imports its neighbour {module or layer!r}"


@each_module
def test_only_inductor_ext_knows_inductor(path: Path) -> None:
    if path.relative_to(ROOT).parts[0] == "inductor_ext":
        return
    package = ("portable_ops", *path.relative_to(ROOT).parts[:-1])
    internals = ("torch._inductor", "torch._dynamo")
    found = [dotted for dotted in imports(path.read_text(), package) if dotted.startswith(internals)]
    assert not found, f"{label(path)} imports {found}"


@each_module
def test_the_package_needs_nothing_beside_it(path: Path) -> None:
    package = ("portable_ops", *path.relative_to(ROOT).parts[:-1])
    tops = {dotted.split(".")[0] for dotted in imports(path.read_text(), package)}
    assert not tops & {"benchmarks", "examples", "tests", "transformers", "numpy"}, f"{label(path)}: {tops}"


def test_kernels_is_a_namespace_package() -> None:
    # A regular top-level package called `kernels` would shadow the one that transformers imports.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "conftest.py").exists()


@pytest.mark.parametrize("path", [*PACKAGE, *BESIDE], ids=label)
def test_names_say_what_is_inside(path: Path) -> None:
    assert not re.search(r"(^|_)(utils?|helpers?|managers?|misc|common|v\d+)(_|$)", path.stem), label(path)


def test_no_file_names_the_machine_it_was_written_on() -> None:
    personal = re.compile(r"(?<![\w.:/])/(?:home|root|opt|mnt|srv|farm|work|Users)/\w")
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile"]
    pages += [ROOT / ".ci" / "run", *ROOT.glob("benchmarks/results/*/*.json")]
    found = []
    for path in [*PACKAGE, *BESIDE, *pages]:
        found += [f"{label(path)}: {match.group()}" for match in personal.finditer(path.read_text())]
    assert not found


def fresh(code: str) -> str:
    """What ``code`` prints in a process of its own."""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_import_does_not_touch_cuda() -> None:
    code = "import torch, portable_ops.inductor_ext; print(torch.cuda.is_initialized())"
    assert fresh(code) == "False"


def test_the_backend_is_listed_without_an_import() -> None:
    code = (
        "import sys, torch; print('portable_ops' in torch._dynamo.list_backends(exclude_tags=())); "
        "print('portable_ops.inductor_ext' in sys.modules)"
    )
    assert fresh(code).split() == ["True", "False"]
