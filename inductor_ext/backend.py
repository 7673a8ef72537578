"""The ``torch.compile`` backend: pin, then Inductor with our pass in its joint-graph hook."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..patterns.attention import LOWERED_ATTENTION_PATTERN
from . import inductor_compat as inductor
from . import lowering  # noqa: F401  (teaches Inductor our operators)
from .graphs import graph_device, input_device
from .inductor_compat import EmbedReport
from .pin import Unpinned, pin
from .record import Recording, active, recording
from .report import Report, Site, collecting, finish, short_source, take_payload, versions
from .rewrite import RewritePass, cache_key, chain, decision_target, joined_uuid
from .settings import Settings, split_options

log = logging.getLogger(__name__)

_known: dict[str, Report] = {}
"""Reports of graphs that this process compiled: a wrapper that is loaded a second time does not run its top again."""

_MOST_KNOWN = 1000


class ExpectationError(RuntimeError):
    """Fewer subgraphs were recognised than ``portable_ops.expect`` asks for; the message lists the near misses."""


def portable_ops(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile ``gm`` with Inductor after rewriting the subgraphs for which we have better kernels.

    ``mode``: as Inductor's.  ``options``: Inductor's keys and ours (``portable_ops.gate`` and so on, see
    :class:`~portable_ops.inductor_ext.settings.Settings`).  Raises SettingError for anything else, and
    ExpectationError if ``portable_ops.expect`` is not met.
    """
    patches, settings = split_options(mode, options)
    if settings.verify:
        from .verify import verified

        stock = functools.partial(compile_fx, config_patches=dict(patches))
        ours = functools.partial(compile_graph, patches=patches, settings=settings)
        return verified(gm, example_inputs, stock, ours)
    return compile_graph(gm, example_inputs, patches, settings)


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any], settings: Settings
) -> Callable[..., Any]:
    """Pin, compile with Inductor, report."""
    if settings.dump is not None:
        return _dumped(gm, example_inputs, patches, settings)
    compiled, report = _compiled(gm, example_inputs, patches, settings)
    check_expected(report, settings)
    finish(report)
    return compiled


def _compiled(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: Mapping[str, Any],
    settings: Settings,
    inner_compile: Callable[..., Any] = compile_fx_inner,
) -> tuple[Callable[..., Any], Report]:
    key = _graph_key(gm, example_inputs, settings)
    unpinned = pin(gm, decision_target(settings, input_device(example_inputs)))
    kept = active()
    if kept is not None:
        kept.keep("pinned", gm.graph)
    with collecting() as collection:
        patched = {**patches, **hooks(settings, patches)}
        compiled = compile_fx(gm, example_inputs, inner_compile=inner_compile, config_patches=patched)
    parts = collection.reports
    report = with_unpinned(Report.merge(parts), unpinned) if parts else _known.get(key)
    if report is None:
        report = Report(settings=settings.to_dict(), versions=versions(), target="unknown")
    _known[key] = report
    if len(_known) > _MOST_KNOWN:
        _known.pop(next(iter(_known)))
    return compiled, report


def _dumped(
    gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any], settings: Settings
) -> Callable[..., Any]:
    """Compile past the caches, which would bring no graphs, and add the graph to the dump even if it fails."""
    from . import dump

    kept = Recording()
    kept.keep("dynamo", gm.graph)

    def generate(gm: fx.GraphModule, example_inputs: Sequence[Any], **how: Any) -> Any:
        """Inductor's code generation; of a training graph it is called again when the backward is first needed."""
        if inductor.freezes():  # weights have become constants, and small ones numbers in the code
            return compile_fx_inner(gm, example_inputs, **how)
        kept.keep("backward" if how.get("is_backward") else "forward", gm.graph)
        try:
            with inductor.generated_code(kept.code.append):
                return compile_fx_inner(gm, example_inputs, **how)
        finally:
            if how.get("is_backward"):
                dump.add(kept, settings)

    # The harness that Inductor appends to a wrapper holds the numbers that the model was called with.
    patches = {**patches, "force_disable_caches": True, "benchmark_harness": False}
    try:
        with recording(kept):
            compiled, kept.report = _compiled(gm, example_inputs, patches, settings, generate)
    except Exception as error:
        kept.error = f"{type(error).__name__}: {error}"
        raise
    finally:
        dump.add(kept, settings)
    report = dataclasses.replace(kept.report, recordings=(kept,))
    check_expected(report, settings)
    finish(report)
    return compiled


def config_patches(options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Inductor config patches that bring our passes to paths that never call a backend (ahead-of-time packages).

    ``torch._inductor.aoti_compile_and_package(program, inductor_configs=config_patches())``.  ``options`` are ours,
    as for ``torch.compile``.
    """
    patches, settings = split_options(None, options)
    if settings.dump is not None:
        log.warning("an ahead-of-time package writes no dump: call explain(program)(*inputs).save(folder) for one")
    pin_pass = PinPass(settings, chain(_in_hook("pre_grad_custom_pass", patches)))
    return {**patches, **hooks(settings, patches), "pre_grad_custom_pass": pin_pass}


def hooks(settings: Settings, patches: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Our passes in Inductor's hooks, each followed by whatever the user or another library had put there.

    ``patches``: the Inductor options that came with this compilation, which may fill a hook as well.
    """
    post_fusion = _in_hook("_post_fusion_custom_pass", patches or {})
    # A pass that cannot be named in a cache key turns the caches off, as it does without us.
    named = post_fusion is None or hasattr(post_fusion, "uuid")
    key = (cache_key(settings), post_fusion.uuid() if post_fusion is not None and named else None)
    return {
        "joint_custom_pre_pass": RewritePass(
            settings, chain(_in_hook("joint_custom_pre_pass", patches or {})), cacheable=named
        ),
        "_post_fusion_custom_pass": EmbedReport(
            take_payload, post_fusion, hashlib.sha256(repr(key).encode()).hexdigest()
        ),
    }


def _in_hook(name: str, patches: Mapping[str, Any]) -> Any:
    """The user's pass in one of Inductor's hooks: from the options of this compilation, else from the global config."""
    from torch._inductor import config

    return patches[name] if name in patches else getattr(config, name)


@dataclasses.dataclass
class PinPass(CustomGraphPass):
    """Pinning as a pre-grad pass, for exported graphs."""

    settings: Settings
    after: Callable[[fx.Graph], None] | None = None

    def __call__(self, graph: fx.Graph) -> None:
        pin(graph.owning_module, decision_target(self.settings, graph_device(graph)))
        if self.after is not None:
            self.after(graph)

    def uuid(self) -> Any:
        return joined_uuid(self.settings, self.after)


def check_expected(report: Report, settings: Settings) -> None:
    """Raise ExpectationError, with the near misses, where fewer subgraphs were recognised than expected."""
    counts = report.counts
    short = {kind: n for kind, n in settings.expect if counts.get(kind, 0) < n}
    if short:
        lines = [f"{kind}: expected {n}, recognised {counts.get(kind, 0)}" for kind, n in short.items()]
        near = [f"  {m.kind}: {m.reason} [{short_source(m.source)}]" for m in report.misses if m.kind in short]
        raise ExpectationError("\n".join([*lines, "near misses:", *(near or ["  none"])]))


def with_unpinned(report: Report, unpinned: Sequence[Unpinned]) -> Report:
    """Give the attention calls that were not pinned their reasons.

    Such a call usually arrives as a backend-specific ATen op, recognised and declined at the same source line; where
    it arrived as plain matmuls, it is added.
    """
    sites = list(report.sites)
    open_sites = [i for i, s in enumerate(sites) if s.pattern == LOWERED_ATTENTION_PATTERN.name]
    for call in unpinned:
        index = next((i for i in open_sites if sites[i].source == call.source), None)
        site = Site("attention", LOWERED_ATTENTION_PATTERN.name, "declined", call.reason, call.source)
        if index is None:
            sites.append(site)
        else:
            open_sites.remove(index)
            sites[index] = dataclasses.replace(site, count=sites[index].count)
    return dataclasses.replace(report, sites=tuple(sites))


def _graph_key(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings) -> str:
    """Tells graphs of one process apart: their code, their inputs' metadata, our settings."""
    metadata = [
        (str(t.shape), str(t.stride()), t.dtype, t.device, t.requires_grad) if isinstance(t, torch.Tensor) else str(t)
        for t in example_inputs
    ]
    code = [m.code for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return hashlib.sha256(repr((code, metadata, settings, torch.is_grad_enabled())).encode()).hexdigest()


def reset() -> None:
    """Called by ``torch.compiler.reset``: forget CUDA-graph trees, as Inductor's own backend does."""
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


portable_ops.reset = reset
