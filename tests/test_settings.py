"""Settings: every option and environment variable, who wins, and how a wrong one is refused."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from portable_ops.inductor_ext import SettingError, Settings, reports
from portable_ops.inductor_ext.settings import GATES, known_kinds, split_options
from portable_ops.patterns import KINDS

ROOT = Path(__file__).resolve().parent.parent

VALUES = [
    # name, as an option, as an environment variable, the field that it sets, what it holds then
    ("enable", ["attention"], "attention", "enable", ("attention",)),
    ("disable", ("rms_norm", "topk"), "rms_norm, topk", "enable", ("rope", "swiglu", "attention")),
    ("gate", "always", "always", "gate", "always"),
    ("expect", {"rms_norm": 65, "attention": 32}, "rms_norm=65,attention=32", "expect", None),
    ("verify", True, "1", "verify", True),
    ("max_rewrites", 7, "7", "max_rewrites", 7),
    ("target", "gfx942", "gfx942", "target", "gfx942"),
    ("dump", Path("a", "folder"), "a/folder", "dump", "a/folder"),
]


@pytest.fixture(autouse=True)
def clean() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set variables here; whatever the surrounding process has of ours is gone."""
    for name in list(os.environ):
        if name.startswith("PORTABLE_OPS_"):
            monkeypatch.delenv(name)
    return monkeypatch


def test_defaults() -> None:
    assert Settings.read({}, {}) == Settings() == Settings(enable=known_kinds(), gate="table", max_rewrites=None)
    assert set(KINDS) <= set(Settings().enable)


@pytest.mark.parametrize(("name", "option", "variable", "field", "value"), VALUES, ids=[v[0] for v in VALUES])
def test_an_option_and_a_variable_say_the_same(name: str, option: Any, variable: str, field: str, value: Any) -> None:
    by_option = Settings.read({name: option}, {})
    by_variable = Settings.read({}, {"PORTABLE_OPS_" + name.upper(): variable})
    assert by_option == by_variable != Settings()
    if field == "expect":
        assert dict(by_option.expect) == {"rms_norm": 65, "attention": 32}
    elif name != "disable":
        assert getattr(by_option, field) == value
    else:
        assert by_option.enable == tuple(k for k in known_kinds() if k not in option)


def test_every_setting_is_tested_above() -> None:
    assert {v[0] for v in VALUES} == {f.name for f in dataclasses.fields(Settings)} | {"disable"}


def test_settings_are_frozen_hashable_and_plain() -> None:
    settings = Settings.read({"expect": {"rms_norm": 1}}, {})
    assert hash(settings) == hash(Settings.read({"expect": {"rms_norm": 1}}, {}))
    assert settings.to_dict()["expect"] == {"rms_norm": 1}
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.gate = "never"  # type: ignore[misc]


def test_an_option_wins_over_the_environment() -> None:
    environ = {"PORTABLE_OPS_GATE": "never", "PORTABLE_OPS_VERIFY": "yes", "PORTABLE_OPS_MAX_REWRITES": "bad"}
    settings = Settings.read({"gate": "always", "max_rewrites": 3}, environ)
    assert (settings.gate, settings.verify, settings.max_rewrites) == ("always", True, 3)


def test_an_option_wins_over_a_variable_of_another_name() -> None:
    environ = {"PORTABLE_OPS_DISABLE": "rms_norm"}
    assert Settings.read({"enable": ["rms_norm"]}, environ).enable == ("rms_norm",)
    assert Settings.read({"enable": ["rms_norm", "rope"], "disable": ["rope"]}, environ).enable == ("rms_norm",)
    assert "rms_norm" in Settings.read({"disable": ["rope"]}, environ).enable
    assert "rms_norm" not in Settings.read({"gate": "always"}, environ).enable
    environ = {"PORTABLE_OPS_ENABLE": "rms_norm,rope"}
    assert Settings.read({"disable": ["rope"]}, environ).enable == ("rms_norm",)


def test_an_empty_variable_is_unset() -> None:
    assert Settings.read({}, {"PORTABLE_OPS_GATE": "", "PORTABLE_OPS_ENABLE": ""}) == Settings()


def test_disable_takes_from_enable() -> None:
    assert Settings.read({"enable": ["attention", "rope"], "disable": ["rope"]}, {}).enable == ("attention",)


@pytest.mark.parametrize("text", ["1", "true", "YES", True, 1])
def test_true(text: Any) -> None:
    assert Settings.read({"verify": text}, {}).verify is True


@pytest.mark.parametrize("text", ["0", "False", "no", False, 0])
def test_false(text: Any) -> None:
    assert Settings.read({"verify": text}, {}).verify is False


WRONG = [
    ({"gat": "always"}, "unknown option 'portable_ops.gat'; did you mean 'portable_ops.gate'?"),
    ({"zzz": 1}, "unknown option 'portable_ops.zzz'; valid are portable_ops.disable, portable_ops.dump"),
    ({"gate": "alway"}, "portable_ops.gate: 'alway' is not a gate; did you mean 'always'?"),
    ({"gate": 3}, "portable_ops.gate: 3 is not a gate; valid are always, measure, never, table"),
    ({"enable": ["rmsnorm"]}, "portable_ops.enable: unknown kind 'rmsnorm'; did you mean 'rms_norm'?"),
    ({"enable": 3}, "portable_ops.enable: expected kinds"),
    ({"disable": "atention"}, "portable_ops.disable: unknown kind 'atention'; did you mean 'attention'?"),
    ({"expect": {"norm": 1}}, "portable_ops.expect: unknown kind 'norm'; did you mean 'rms_norm'?"),
    ({"expect": {"rms_norm": -1}}, "portable_ops.expect: expected a count of 0 or more, got -1"),
    ({"expect": {"rms_norm": True}}, "portable_ops.expect: expected a count of 0 or more, got True"),
    ({"expect": 5}, "portable_ops.expect: expected a mapping like {'rms_norm': 65}, got 5"),
    ({"expect": "rms_norm=1,attention"}, "portable_ops.expect: expected numbers like rms_norm=65,attention=32"),
    ({"max_rewrites": "some"}, "portable_ops.max_rewrites: expected a count of 0 or more, got 'some'"),
    ({"max_rewrites": 1.5}, "portable_ops.max_rewrites: expected a count of 0 or more, got 1.5"),
    ({"verify": "maybe"}, "portable_ops.verify: expected true or false, got 'maybe'"),
    ({"target": "h100"}, "portable_ops.target: target 'h100' is not an architecture; use one of sm_80"),
    ({"target": 90}, "portable_ops.target: expected an architecture like 'sm_90' or 'gfx942', got 90"),
    ({"target": None}, "portable_ops.target: expected an architecture like 'sm_90' or 'gfx942', got None"),
    ({"target": ["sm_90"]}, "portable_ops.target: expected an architecture like 'sm_90' or 'gfx942', got ['sm_90']"),
    ({1: 2}, "unknown option 'portable_ops.1'; valid are portable_ops.disable"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(w[0]) for w in WRONG])
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)):
        Settings.read(options, {})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PORTABLE_OPS_GAET": "always"}, "'PORTABLE_OPS_GAET'; did you mean 'PORTABLE_OPS_GATE'?"),
        ({"PORTABLE_OPS_gate": "always"}, "'PORTABLE_OPS_gate'; did you mean 'PORTABLE_OPS_GATE'?"),
        ({"PORTABLE_OPS_GATE": "alway"}, "PORTABLE_OPS_GATE: 'alway' is not a gate; did you mean 'always'?"),
        ({"PORTABLE_OPS_EXPECT": "rms_norm"}, "PORTABLE_OPS_EXPECT: expected numbers like"),
        ({"PORTABLE_OPS_EXPECT": "rms_norm=x"}, "PORTABLE_OPS_EXPECT: expected a count"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)):
        Settings.read({}, environ)


# ---------------------------------------------------------------------- through torch.compile


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def compiled(**options: Any) -> torch.Tensor:
    return torch.compile(double, backend="portable_ops", **options)(torch.ones(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"mode": "reduce-overhea"}, "unknown mode 'reduce-overhea'; did you mean 'reduce-overhead'?"),
        ({"mode": 5}, "unknown mode 5; valid are "),
        ({"options": {"portable_ops.gat": 1}}, "unknown option 'portable_ops.gat'; did you mean 'portable_ops.gate'?"),
        (
            {"options": {"portable_ops.gate": "tabel"}},
            "portable_ops.gate: 'tabel' is not a gate; did you mean 'table'?",
        ),
        ({"options": {"max_autotun": True}}, "unknown option 'max_autotun'; did you mean 'max_autotune'?"),
        (
            {"options": {"portable_op.gate": "never"}},
            "unknown option 'portable_op.gate'; did you mean 'portable_ops.gate'?",
        ),
        ({"options": {1: 2}}, "unknown option 1: names are strings"),
        ({"options": {"portable_ops.target": None}}, "portable_ops.target: expected an architecture"),
        ({"options": {"max_autotune": "yes"}}, "option 'max_autotune': got str, should be bool"),
        ({"options": {"cpp.threads": "two"}}, "option 'cpp.threads': got str, should be int"),
    ],
)
def test_the_user_of_torch_compile_sees_the_name(call: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        compiled(**call)


def test_the_user_of_torch_compile_sees_the_variable(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PORTABLE_OPS_TARGET", "hopper")
    with pytest.raises(Exception, match="PORTABLE_OPS_TARGET: target 'hopper' is not an architecture"):
        compiled()


def test_the_environment_reaches_a_compilation(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PORTABLE_OPS_GATE", "never")
    environment.setenv("PORTABLE_OPS_MAX_REWRITES", "4")
    compiled(options={"portable_ops.target": "sm_80", "portable_ops.max_rewrites": 5})
    report = reports()[-1]
    assert report.settings == Settings(gate="never", target="sm_80", max_rewrites=5).to_dict()
    assert report.target == "sm_80"


def test_inductors_own_keys_pass() -> None:
    seen = []

    def look(graph: torch.fx.Graph) -> None:
        seen.append((torch._inductor.config.max_autotune, torch._inductor.config.cpp.threads))

    options = {"max-autotune": True, "cpp.threads": 1, "post_grad_custom_post_pass": look}
    assert torch.equal(compiled(options=options), torch.full((3,), 2.0))
    assert seen == [(True, 1)]
    assert torch._inductor.config.max_autotune is False


@pytest.mark.parametrize("mode", list(torch._inductor.list_mode_options()))
def test_every_mode_of_inductor(mode: str) -> None:
    patches, settings = split_options(mode, {"portable_ops.gate": "never"})
    assert patches == torch._inductor.list_mode_options(mode)
    assert settings.gate == "never"
    assert torch.equal(compiled(mode=mode), torch.full((3,), 2.0))


def test_an_option_wins_over_the_mode() -> None:
    patches, _ = split_options("max-autotune", {"triton.cudagraphs": False})
    assert patches["triton.cudagraphs"] is False
    assert patches["max_autotune"] is True


# ------------------------------------------------------------------------------- documentation


@pytest.mark.parametrize("page", ["README.md", "docs/user_guide.md"])
def test_the_documentation_names_every_setting(page: str) -> None:
    text = (ROOT / page).read_text()
    rows = dict(re.findall(r"^\| `(?:portable_ops\.)?(\w+)` (\|.*PORTABLE_OPS_.*)$", text, re.MULTILINE))
    assert set(rows) == {f.name for f in dataclasses.fields(Settings)} | {"disable"}
    for name, row in rows.items():
        assert f"PORTABLE_OPS_{name.upper()}" in row
    assert all(f"`{gate}`" in rows["gate"] for gate in GATES)
