"""The command line: ``portable-ops explain my_module:make_model``."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .backend import ExpectationError
from .explain import explain
from .settings import GATES, SettingError, Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (2 for a wrong call, 1 for an unmet expectation)."""
    parser = argparse.ArgumentParser(prog="portable-ops", description="What portable_ops does to a model, and why.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("explain", help="trace a model and say what matches, what is rewritten and why not")
    command.add_argument(
        "factory",
        help="MODULE:FUNCTION; the function returns a model and its example inputs (a tuple or a dict)",
    )
    command.add_argument("--target", help="decide for this architecture (sm_90, gfx942); default: this GPU, else sm_90")
    command.add_argument("--gate", choices=GATES, help="who decides whether a match pays (default: table)")
    command.add_argument("--expect", help="least numbers of recognised subgraphs, like rms_norm=65,attention=32")
    command.add_argument("--training", action="store_true", help="trace with gradients (default: inference)")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = parser.parse_args(argv)
    try:
        return _explain(arguments)
    except (SettingError, _BadFactory) as error:
        print(f"portable-ops: {error}", file=sys.stderr)
        return 2
    except ExpectationError as error:
        print(f"portable-ops: {error}", file=sys.stderr)
        return 1


class _BadFactory(Exception):
    """The factory cannot be found or returns something else than a model and its inputs."""


def _explain(arguments: argparse.Namespace) -> int:
    options = {name: getattr(arguments, name) for name in ("target", "gate", "expect") if getattr(arguments, name)}
    Settings.read(options)  # a wrong setting is refused before the model is built
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
