"""Every setting in one place: ``options={"portable_ops.NAME": ...}`` or ``PORTABLE_OPS_NAME`` in the environment."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..kernels.target import named_target
from ..patterns import KINDS

PREFIX = "portable_ops."
ENVIRONMENT_PREFIX = "PORTABLE_OPS_"
GATES = ("table", "always", "never", "measure")


_kinds_known = list(KINDS)


def known_kinds() -> tuple[str, ...]:
    """The kinds of subgraph that settings may name: ours, then those that third parties registered."""
    return tuple(_kinds_known)


def add_kind(kind: str) -> None:
    """Let settings name a kind that a third party's pattern brings; nothing happens if it is known."""
    if kind not in _kinds_known:
        _kinds_known.append(kind)


class SettingError(ValueError):
    """A mode, option or environment variable that means nothing; the message names it and the nearest valid one."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user asked for.  An option of ``torch.compile`` wins over the environment variable.

    ``enable``: the kinds of subgraph that may be rewritten (all by default).
    ``gate``: who decides whether a match pays: the measured ``table`` (default), ``always``, ``never``, or
    ``measure`` (time both at compile time).
    ``expect``: kind to the least number of recognised subgraphs; fewer is an error that lists the near misses.
    ``verify``: run stock and rewritten graph on the first call and stay with stock if they differ beyond rounding.
    ``max_rewrites``: rewrite at most this many matches in a graph, in graph order; 0 rewrites nothing.
    ``target``: the architecture that decisions are made for (``sm_90``, ``gfx942``); the device's own by default.
    ``dump``: a folder for graphs, generated code and a page that shows what matched; compiles anew, past the caches.
    """

    enable: tuple[str, ...] = dataclasses.field(default_factory=known_kinds)
    gate: str = "table"
    expect: tuple[tuple[str, int], ...] = ()
    verify: bool = False
    max_rewrites: int | None = None
    target: str | None = None
    dump: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "enable": list(self.enable), "expect": dict(self.expect)}

    @staticmethod
    def read(options: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
        """Settings from options without their prefix (``{"gate": "always"}``) over the environment.

        Raises SettingError for an unknown name or value, in either place.  An empty variable counts as unset, and so
        does one that an option contradicts: what ``enable`` names is enabled whatever PORTABLE_OPS_DISABLE says.
        """
        options = options or {}
        parsed: dict[str, Any] = {}
        settled = {*options, "disable"} if "enable" in options else {*options}
        for variable, text in environ.items():
            if not variable.startswith(ENVIRONMENT_PREFIX):
                continue
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            if name not in _PARSERS or variable != ENVIRONMENT_PREFIX + name.upper():
                known = [n.upper() for n in _PARSERS]
                near = suggest(name.upper(), known, ENVIRONMENT_PREFIX)
                raise SettingError(f"unknown environment variable {variable!r}{near}")
            if text and name not in settled:
                parsed[name] = _PARSERS[name](variable, text)
        for name, value in options.items():
            if name not in _PARSERS:
                raise SettingError(f"unknown option {PREFIX + str(name)!r}{suggest(str(name), _PARSERS, PREFIX)}")
            parsed[name] = _PARSERS[name](PREFIX + name, value)
        disabled = parsed.pop("disable", ())
        parsed["enable"] = tuple(kind for kind in parsed.get("enable", known_kinds()) if kind not in disabled)
        return Settings(**parsed)


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """``"; did you mean 'x'?"`` or the list of what is valid."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {prefix + near[0]!r}?"
    return f"; valid are {', '.join(sorted(prefix + k for k in known))}" if len(known) < 20 else ""


def _kinds(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        kinds = tuple(k.strip() for k in value.split(",") if k.strip())
    elif isinstance(value, Iterable):
        kinds = tuple(value)
    else:
        raise SettingError(f"{name}: expected kinds like ['rms_norm', 'attention'], got {value!r}")
    for kind in kinds:
        if kind not in known_kinds():
            raise SettingError(f"{name}: unknown kind {kind!r}{suggest(str(kind), known_kinds())}")
    return kinds


def _gate(name: str, value: Any) -> str:
    if value not in GATES:
        raise SettingError(f"{name}: {value!r} is not a gate{suggest(str(value), GATES)}")
    return value


def _expect(name: str, value: Any) -> tuple[tuple[str, int], ...]:
    if isinstance(value, str):
        items = [item.partition("=") for item in value.split(",") if item.strip()]
        if not all(equals for _, equals, _ in items):
            raise SettingError(f"{name}: expected numbers like rms_norm=65,attention=32, got {value!r}")
        value = {kind.strip(): number for kind, _, number in items}
    if not isinstance(value, Mapping):
        raise SettingError(f"{name}: expected a mapping like {{'rms_norm': 65}}, got {value!r}")
    _kinds(name, value.keys())
    return tuple(sorted((kind, _count(name, number)) for kind, number in value.items()))


def _count(name: str, value: Any) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not isinstance(value, int | str) or not text.isdecimal():
        raise SettingError(f"{name}: expected a count of 0 or more, got {value!r}")
    return int(text)


def _flag(name: str, value: Any) -> bool:
    flags = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in flags:
        raise SettingError(f"{name}: expected true or false, got {value!r}")
    return flags[str(value).lower()]


def _target(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SettingError(f"{name}: expected an architecture like 'sm_90' or 'gfx942', got {value!r}")
    try:
        named_target(value)
    except ValueError as error:
        raise SettingError(f"{name}: {error}") from error
    return value


def folder(name: str, value: Any) -> str:
    """``value`` as the path of a folder that exists or can be made; SettingError, which names ``name``, otherwise."""
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise SettingError(f"{name}: expected a folder, got {value!r}")
    if Path(value).exists() and not Path(value).is_dir():
        raise SettingError(f"{name}: {str(value)!r} is a file and not a folder")
    return str(value)


_PARSERS = {
    "enable": _kinds,
    "disable": _kinds,
    "gate": _gate,
    "expect": _expect,
    "verify": _flag,
    "max_rewrites": _count,
    "target": _target,
    "dump": folder,
}


def split_options(mode: str | None, options: Mapping[str, Any] | None) -> tuple[dict[str, Any], Settings]:
    """Inductor's config patches and our settings from what ``torch.compile`` was given.

    ``mode`` is one of Inductor's; ``options`` mixes Inductor's keys with ours.  Raises SettingError by name for
    anything that neither knows.
    """
    from torch._inductor import config, list_mode_options

    patches: dict[str, Any] = {}
    if mode is not None:
        modes = list_mode_options()
        if mode not in modes:
            raise SettingError(f"unknown mode {mode!r}{suggest(str(mode), modes)}")
        patches.update(modes[mode])
    ours: dict[str, Any] = {}
    known = config.get_config_copy()
    for key, value in (options or {}).items():
        if not isinstance(key, str):
            raise SettingError(f"unknown option {key!r}: names are strings")
        if key.startswith(PREFIX):
            ours[key.removeprefix(PREFIX)] = value
            continue
        name = key.replace("-", "_")
        if name not in known:
            raise SettingError(f"unknown option {key!r}{suggest(key, [*known, *(PREFIX + n for n in _PARSERS)])}")
        _check_type(key, value, config.get_type(name))
        patches[name] = value
    return patches, Settings.read(ours)


def _check_type(key: str, value: Any, expected: Any) -> None:
    """Refuse a value of the wrong type as Inductor does (types that isinstance cannot judge pass)."""
    try:
        fits = isinstance(value, expected)
    except TypeError:
        return
    if not fits:
        wanted = expected.__name__ if isinstance(expected, type) else str(expected)
        raise SettingError(f"option {key!r}: got {type(value).__name__}, should be {wanted}")
