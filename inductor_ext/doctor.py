"""What is installed, what can run here, and one tiny compilation."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..kernels.attention import ATTENTION
from ..kernels.linear import GATED_LINEAR, LINEAR, QKV_LINEAR
from ..kernels.operator import Operator, check_target
from ..kernels.qk_rope import QK_ROPE, QK_ROPE_APPEND
from ..kernels.rms_norm import ADD_RMS_NORM, RMS_NORM
from ..kernels.router import ROUTER
from ..kernels.target import DEFAULT_ARCH, Target, device_target, named_target
from ..kernels.topk import TOPK, TOPK_INDICES
from . import gate
from . import inductor_compat as inductor
from .report import reports, versions

PACKAGES = ("portable_ops", "rich", "sympy", "jinja2", "grandalf", "transformers")


@dataclasses.dataclass(frozen=True)
class Finding:
    """``part``: what was looked at; ``state``: "ok", "off" (with why, and no harm done) or "broken"."""

    part: str
    name: str
    state: str
    words: str


def examine() -> Iterator[Finding]:
    """Everything that is worth knowing about this installation, one thing after the other."""
    yield from _installed()
    target = _target()
    yield from _targets(target)
    yield from _variants(target)
    yield from _caches()
    yield _compilation()


def _installed() -> Iterator[Finding]:
    yield Finding("versions", "Python", "ok", f"{platform.python_version()}, {platform.platform()}")
    for name, version in versions().items():
        if version == "none":
            yield Finding("versions", name, "off", "not installed: no kernels, references only")
        else:
            yield Finding("versions", name, "ok", version)
    for name in PACKAGES:
        try:
            yield Finding("versions", name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            wanted = {"jinja2": "dump", "grandalf": "dump", "transformers": "hf"}.get(name, "")
            yield Finding("versions", name, "off", f"not installed: pip install 'portable_ops[{wanted}]'")


def _target() -> Target:
    if torch.cuda.is_available():
        return device_target(torch.device("cuda"))
    return named_target(DEFAULT_ARCH)


def _targets(target: Target) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("targets", "GPU", "off", f"none: decisions are made for {target.arch}, nothing is rewritten")
    for index in range(torch.cuda.device_count()):
        device = device_target(torch.device("cuda", index))
        reason = check_target(device)
        words = f"{torch.cuda.get_device_name(index)}, {device.num_processors} processors"
        yield Finding("targets", device.arch, "off" if reason else "ok", f"{words}; {reason}" if reason else words)
    rules = gate.table(target.arch)
    names = ", ".join(name.removeprefix("portable_ops::") for name in rules) or "none"
    yield Finding("targets", f"gate table of {target.arch}", "ok" if rules else "off", f"measured operators: {names}")
    set_here = sorted(name for name in os.environ if name.startswith("PORTABLE_OPS_"))
    yield Finding("targets", "settings", "ok", ", ".join(f"{n}={os.environ[n]}" for n in set_here) or "all defaults")


def _variants(target: Target) -> Iterator[Finding]:
    """Every variant that some ordinary call gets on ``target``, and why another call gets none."""
    for name, operator, values in _calls():
        reason = operator.supports(**values, target=target)
        if reason is None and operator.plan is not None:
            plan = operator.plan(**values, target=target)
            why = f": {plan.why}" if plan.why else ""
            yield Finding("variants", name, "ok", f"{plan.variant} on {target.arch}{why}")
        else:
            yield Finding("variants", name, "off", reason or operator.no_kernel)


def _calls() -> Iterator[tuple[str, Operator, dict[str, Any]]]:
    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def attention(queries: int, keys: int, **more: Any) -> dict[str, Any]:
        dim, batch = more.pop("head_dim", 128), more.pop("batch", 1)
        q, k = tensor(batch, 32, queries, dim), tensor(batch, 8, keys, dim)
        return ATTENTION.bind((q, k, k), {"enable_gqa": True, **more})

    def norm(x: torch.Tensor) -> dict[str, Any]:
        rounding = dict.fromkeys(("weight_dtype", "norm_dtype", "product_dtype", "out_dtype"), x.dtype)
        return RMS_NORM.bind((x,), {"weight": tensor(x.shape[-1]), "eps": 1e-6, **rounding})

    yield "attention, prompt", ATTENTION, attention(1024, 1024, is_causal=True)
    yield "attention, decoding", ATTENTION, attention(1, 128, batch=64)
    yield "attention, decoding, long cache", ATTENTION, attention(1, 8192)
    yield "attention, head_dim 512", ATTENTION, attention(1024, 1024, head_dim=512)
    yield "rms_norm", RMS_NORM, norm(tensor(64, 4096))
    yield "rms_norm, long rows", RMS_NORM, norm(tensor(4, 65536))
    yield "rms_norm, float64", RMS_NORM, norm(tensor(4, 64, dtype=torch.float64))
    x = tensor(64, 4096)
    yield "add_rms_norm", ADD_RMS_NORM, {**norm(x), "residual": x}
    row, weight = tensor(1, 4096), tensor(4096, 4096)
    yield "linear", LINEAR, LINEAR.bind((row, weight), {})
    yield "linear, 64 rows", LINEAR, LINEAR.bind((x, weight), {})
    yield "qkv_linear", QKV_LINEAR, QKV_LINEAR.bind((row, weight, weight, weight), {})
    yield (
        "gated_linear",
        GATED_LINEAR,
        GATED_LINEAR.bind((row, weight, weight), dict.fromkeys(("act_dtype", "out_dtype"), row.dtype)),
    )
    turn = dict.fromkeys(("compute_dtype", "product_dtype", "out_dtype"), row.dtype)
    turn |= {"pairing": "half", "out_pairing": "half", "rotary_dim": 128}
    q, k, v, table = tensor(1, 32, 1, 128), tensor(1, 8, 1, 128), tensor(1, 8, 1, 128), tensor(1, 1, 1, 128)
    cache, position = tensor(1, 8, 4096, 128), tensor(dtype=torch.int64)
    yield "qk_rope", QK_ROPE, QK_ROPE.bind((q, k, table, table), turn)
    appended = (q, k, v, table, table, cache, cache, position)
    yield "qk_rope_append", QK_ROPE_APPEND, QK_ROPE_APPEND.bind(appended, {**turn, "dim": 2})
    yield "topk", TOPK, TOPK.bind((tensor(64, 4096), 64), {})
    yield "topk_indices, long rows", TOPK_INDICES, TOPK_INDICES.bind((tensor(1, 131072), 2048), {})
    dtypes = dict.fromkeys(("score_dtype", "weight_dtype"), torch.float32)
    yield "router", ROUTER, ROUTER.bind((tensor(64, 128),), {"k": 8, **dtypes})


def _caches() -> Iterator[Finding]:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    root = Path(cache_dir())
    places = {
        "Inductor": root,
        "Triton": Path(os.environ.get("TRITON_CACHE_DIR") or root / "triton"),
        "measured verdicts": root / "portable_ops" / "verdicts",
    }
    for name, path in places.items():
        exists = path.exists()
        usable = os.access(path if exists else next(p for p in path.parents if p.exists()), os.W_OK)
        words = f"{path}" if exists else f"{path} (made when it is needed)"
        yield Finding("caches", name, "ok" if usable else "broken", words if usable else f"{path} cannot be written")


def _compilation() -> Finding:
    """Compile an RMSNorm with every match taken, and compare it with eager."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    x = torch.rand(4, 64, device=device) + 0.5
    start = time.perf_counter()
    options = {"portable_ops.gate": "always", "portable_ops.max_rewrites": 1}
    try:
        with torch.no_grad(), inductor.without_caches():
            result = torch.compile(norm, backend="portable_ops", options=options)(x)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip() and "raised:" not in line]
        return Finding("compilation", "RMSNorm", "broken", f"{type(error).__name__}: {' '.join(lines[:3])}")
    seconds = time.perf_counter() - start
    difference = (result - norm(x)).abs().max().item()
    line = reports()[-1].one_line()
    if difference > 1e-5:
        return Finding("compilation", "RMSNorm", "broken", f"differs from eager by {difference:.1e}; {line}")
    return Finding(
        "compilation", "RMSNorm", "ok", f"on {device} in {seconds:.1f} s, {difference:.0e} from eager; {line}"
    )
