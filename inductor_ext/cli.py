"""The command line: ``portable-ops explain my_module:make_model``, ``dump``, ``diff``, ``repro`` and ``doctor``."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .backend import ExpectationError
from .diff import compare
from .doctor import examine
from .dump import BadDump, dump, read
from .explain import explain
from .page import MissingExtra, check_installed
from .repro import reproduction
from .settings import GATES, SettingError, Settings, folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (2 for a wrong call, 1 for an unmet expectation)."""
    parser = argparse.ArgumentParser(prog="portable-ops", description="What portable_ops does to a model, and why.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("explain", help="trace a model and say what matches, what is rewritten and why not")
    _model_arguments(command)
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(run=_explain)
    command = commands.add_parser("dump", help="the same as a folder with graphs and a page that shows them")
    _model_arguments(command)
    command.add_argument("--out", required=True, metavar="DIR", help="the folder to write; an earlier dump is replaced")
    command.set_defaults(run=_dump)
    command = commands.add_parser("diff", help="which sites matched in one dump and not in another, and why")
    command.add_argument("a", metavar="A", help="the folder of a dump")
    command.add_argument("b", metavar="B", help="the folder of another")
    command.set_defaults(run=_diff)
    command = commands.add_parser("repro", help="a pytest file of one site or near miss of a dump")
    command.add_argument("folder", metavar="DIR", nargs="?", default=".", help="the folder of the dump (default: here)")
    command.add_argument("--site", type=int, required=True, metavar="N", help="its number, as on the page")
    command.add_argument("--out", metavar="FILE", help="where to write it (default: print it)")
    command.set_defaults(run=_repro)
    command = commands.add_parser("doctor", help="versions, targets, kernel variants, caches and one tiny compilation")
    command.set_defaults(run=_doctor)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (SettingError, _BadFactory, BadDump, MissingExtra) as error:
        print(f"portable-ops: {error}", file=sys.stderr)
        return 2
    except ExpectationError as error:
        print(f"portable-ops: {error}", file=sys.stderr)
        return 1


def _model_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "factory",
        help="MODULE:FUNCTION; the function returns a model, or a torch.export program, and its example inputs "
        "(a tuple or a dict)",
    )
    command.add_argument("--target", help="decide for this architecture (sm_90, gfx942); default: this GPU, else sm_90")
    command.add_argument("--gate", choices=GATES, help="who decides whether a match pays (default: table)")
    command.add_argument("--expect", help="least numbers of recognised subgraphs, like rms_norm=65,attention=32")
    command.add_argument("--training", action="store_true", help="trace with gradients (default: inference)")


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(arguments, name) for name in ("target", "gate", "expect") if getattr(arguments, name)}
    Settings.read(options)  # a wrong setting is refused before the model is built
    return options


class _BadFactory(Exception):
    """The factory cannot be found or returns something else than a model and its inputs."""


def _explain(arguments: argparse.Namespace) -> int:
    options = _options(arguments)
    model, args, kwargs = _load(arguments.factory)
    with torch.set_grad_enabled(arguments.training):
        report = explain(model, **options)(*args, **kwargs)
    if arguments.json:
        print(report.to_json())
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(report)
    else:
        print(report)  # a console would fill lines up with blanks
    return 0


def _dump(arguments: argparse.Namespace) -> int:
    options = _options(arguments)
    check_installed()
    folder("--out", arguments.out)
    model, args, kwargs = _load(arguments.factory)
    run = dump(model, arguments.out, name=arguments.factory, **options)
    with torch.set_grad_enabled(arguments.training):
        try:
            report = run(*args, **kwargs)
        except (ExpectationError, BadDump):
            raise
        except Exception:
            traceback.print_exc()
            print(f"portable-ops: the model failed; {Path(arguments.out, 'index.html')} has what was found until then")
            return 1
    print(f"{report.one_line()}\n{Path(arguments.out, 'index.html')}")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    """0 where nothing differs, 1 where something does, as diff does."""
    difference = compare(read(arguments.a), read(arguments.b))
    print(difference)
    return 1 if difference else 0


def _repro(arguments: argparse.Namespace) -> int:
    text = reproduction(arguments.folder, read(arguments.folder), arguments.site)
    if arguments.out:
        Path(arguments.out).write_text(text, encoding="utf-8")
        print(f"pytest {arguments.out}")
    else:
        print(text)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    """1 where something is broken; what is merely not there does no harm."""
    from rich.console import Console
    from rich.text import Text

    console, part, broken = Console(soft_wrap=True), "", False
    for finding in examine():
        if finding.part != part:
            part = finding.part
            console.print(Text(f"\n{part}", style="bold"))
        style = {"ok": "green", "off": "yellow", "broken": "bold red"}[finding.state]
        console.print(Text.assemble("  ", (f"{finding.state:7}", style), f"{finding.name}: {finding.words}"))
        broken = broken or finding.state == "broken"
    return 1 if broken else 0


def _load(factory: str) -> tuple[Any, tuple, dict[str, Any]]:
    module_name, _, function = factory.partition(":")
    if not module_name or not function or module_name.startswith("."):
        raise _BadFactory(f"{factory!r} is not of the form MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _BadFactory(f"module {module_name!r} cannot be imported: {error}") from error
    make = getattr(module, function, None)
    if not callable(make):
        raise _BadFactory(f"module {module_name!r} has no function {function!r}")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise _BadFactory(f"{factory} must be callable without arguments: {error}") from error
    made = make()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise _BadFactory(f"{factory} must return (model, example inputs), got {type(made).__name__}")
    model, inputs = made
    if isinstance(inputs, dict):
        return model, (), inputs
    return model, tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,), {}
