"""The pass over the joint ATen graph: match, gate, rewrite, report.

It runs once for every graph, in inference and in training, before Inductor's own passes
(``joint_custom_pre_pass``): the graph is functional, normalised, and its shapes are known.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import logging
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..kernels.attention import ATTENTION
from ..kernels.target import DEFAULT_ARCH, Target, device_target, named_target
from ..patterns import PATTERNS, Match, Miss, Pattern, Recognised, Unmatched
from ..patterns.algebra import is_training_graph
from ..patterns.match import source_line
from . import gate, record
from .graphs import graph_device, region_calls
from .lowering import registered_operators
from .pin import unpin
from .report import Report, Site, publish, versions
from .settings import Settings, add_kind

log = logging.getLogger(__name__)

_patterns: list[Pattern] = list(PATTERNS)


def register_pattern(pattern: Pattern) -> None:
    """Add a pattern of your own; it is tried after the built-in ones, in the order of registration.

    Its sources belong to the cache key: the modules that define ``pattern.match`` and the operators that were
    registered.
    Raises ValueError for a name that is taken.
    """
    if any(p.name == pattern.name for p in _patterns):
        raise ValueError(f"pattern name {pattern.name!r} is taken; choose another")
    add_kind(pattern.kind)
    _patterns.append(pattern)


def decision_target(settings: Settings, device: torch.device) -> Target:
    """The target that decisions are made for: the one that settings name, else the device's own.

    ``gate=always`` on a CPU decides for the default GPU target, so that the rewritten graph can be tested there
    with the reference implementations.
    """
    if settings.target is not None:
        return named_target(settings.target)
    target = device_target(device)
    return named_target(DEFAULT_ARCH) if target.backend == "cpu" and settings.gate == "always" else target


@dataclasses.dataclass
class RewritePass(CustomGraphPass):
    """Match, gate and rewrite; see the module's docstring.

    ``after`` is the user's own pass in the same hook.  ``cacheable`` False keeps the graph out of the caches.
    """

    settings: Settings
    after: Callable[[fx.Graph], None] | None = None
    cacheable: bool = True

    def __call__(self, graph: fx.Graph) -> None:
        publish(self.rewrite(graph), graph, region_calls(graph))
        if self.after is not None:
            self.after(graph)

    def rewrite(self, graph: fx.Graph) -> Report:
        """Rewrite ``graph`` in place, in graph order, and say what was done."""
        return _Rewriting(graph, self.settings).run()

    def uuid(self) -> Any:
        return joined_uuid(self.settings, self.after) if self.cacheable else None


class _Rewriting:
    """The state of one graph while it is rewritten."""

    def __init__(self, graph: fx.Graph, settings: Settings) -> None:
        self.graph, self.settings = graph, settings
        self.device = graph_device(graph)
        self.target = decision_target(settings, self.device)
        self.training = is_training_graph(graph)
        self.sites: list[Site] = []
        self.misses: list[Miss] = []
        self.taken = 0
        self.erased: set[fx.Node] = set()
        self.traced: dict[Any, fx.Graph] = {}
        self.recording = record.active()
        self.before = 0

    def run(self) -> Report:
        if self.recording is not None:
            self.before = self.recording.keep("joint", self.graph)
        for sweep in ((True, False), (False, False), (False, True)):
            patterns = [p for p in _patterns if (p.first, p.last) == sweep]
            for node in list(self.graph.nodes):
                if node.op != "call_function":
                    continue
                for pattern in patterns:
                    if node not in self.erased and pattern.anchors(node):
                        self._try(pattern, node)
        if self.recording is not None:
            self.recording.keep("rewritten", self.graph)
        return Report(
            sites=tuple(self.sites),
            misses=tuple(self.misses),
            settings=self.settings.to_dict(),
            target=self.target.arch,
            versions=versions(),
        )

    def _try(self, pattern: Pattern, node: fx.Node) -> None:
        try:
            found = pattern.try_match(node)
        except Exception as error:
            found = failed(pattern, node, error)
        if isinstance(found, Match):
            self._decide(found)
        elif isinstance(found, Recognised):
            bound = {k: str(v) for k, v in found.bound.items()}
            site = Site(found.kind, found.pattern, "declined", found.reason, found.source, bound=bound)
            self._add(site, self._mark(found))
        elif found is not None and not pattern.first:
            self.misses.append(found)
            if self.recording is not None:
                self.recording.mark_miss(self.before, found)
        if node not in self.erased and node.target is ATTENTION.op:
            unpin(node, self.traced)
            self.erased.add(node)

    def _decide(self, match: Match) -> None:
        """Take ``match``, or the first of the smaller ones instead of it that the gate takes."""
        decided = self._decided(match)
        smaller = match.instead
        while smaller is not None and decided[0][0].decision == "declined":
            instead = self._decided(smaller)
            decided = instead if instead[0][0].decision == "rewritten" else decided
            smaller = smaller.instead
        if match.parts and decided[0][0].decision == "declined":
            return  # each part is decided on where it stands
        for site, mark in decided:
            self._add(site, mark)

    def _add(self, site: Site, mark: record.Mark | None) -> None:
        self.sites.append(site)
        if self.recording is not None:
            self.recording.sites.append(mark)

    def _mark(self, found: Match | Recognised) -> record.Mark | None:
        """Where ``found`` stands, if somebody wants to know."""
        return None if self.recording is None else self.recording.mark_site(self.before, found, self.target)

    def _decided(self, match: Match) -> list[tuple[Site, record.Mark | None]]:
        """What becomes of ``match``: a site for each of its parts, or one."""
        parts = match.parts or (match,)
        marks = [self._mark(part) for part in parts]
        verdict = gate.decide(match, self.target, self.settings, training=self.training, taken=self.taken)
        variant = ""
        if verdict.take:
            variant = self._variant(match)
            watched = self.recording.watched(match) if self.recording is not None else ()
            try:
                call = match.replace()
                if self.recording is not None:
                    self.recording.replaced(watched)
                    named = {"operator": match.operator.name, "replacement": call.name}
                    marks = [dataclasses.replace(mark, **named) for mark in marks]
            except Unmatched as reason:
                verdict, variant = gate.Verdict(False, str(reason)), ""
        if verdict.take:
            self.taken += 1
            self.erased |= _erase_unused(match)
        decision = "rewritten" if verdict.take else "declined"
        sites = (
            Site(
                p.kind, p.pattern, decision, verdict.reason, p.source, variant, {k: str(v) for k, v in p.bound.items()}
            )
            for p in parts
        )
        return list(zip(sites, marks, strict=True))

    def _variant(self, match: Match) -> str:
        """What will run: a kernel variant, or the operator's reference where there is no kernel for the device."""
        on_cpu = self.settings.target is None and device_target(self.device).backend == "cpu"
        if on_cpu or match.operator.plan is None:
            return "reference"
        return match.operator.plan(**match.values(), target=self.target).variant


def failed(pattern: Pattern, node: fx.Node, error: Exception) -> Miss:
    """The near miss that a pattern's own failure is: no reason to end the user's compilation.

    Matching changes nothing in the graph, so that it is as it was.
    """
    log.warning("pattern %s failed at %s, which is left to Inductor", pattern.name, node, exc_info=error)
    reason = f"the pattern itself failed: {type(error).__name__}: {error}"
    return Miss(pattern.name, pattern.kind, node.name, reason, source_line(node))


def joined_uuid(settings: Settings, after: Callable[[fx.Graph], None] | None) -> str | None:
    """Our cache key with that of the user's own pass; None (no caching) where that pass has none."""
    theirs = after.uuid() if isinstance(after, CustomGraphPass) else None
    if after is not None and theirs is None:
        return None
    return hashlib.sha256(repr((cache_key(settings), theirs)).encode()).hexdigest()


@dataclasses.dataclass
class _Chain(CustomGraphPass):
    """Several passes of the user's in one hook (torch 2.13 and later allow a list)."""

    passes: tuple[Callable[[fx.Graph], None], ...]

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        uuids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if None in uuids else repr(uuids)


def chain(configured: Any) -> Callable[[fx.Graph], None] | None:
    """What stands in one of Inductor's hooks, as one pass or None."""
    return _Chain(tuple(configured)) if isinstance(configured, list | tuple) else configured


def _erase_unused(match: Match) -> set[fx.Node]:
    """Remove what the match took over, and what only fed it, as far as nobody reads it any more."""
    work = [match.anchor, *match.inner, *(o for o in match.outputs if o is not None)]
    erased: set[fx.Node] = set()
    while work:
        node = work.pop()
        if node in erased or node.users or node.op != "call_function" or node.is_impure():
            continue
        work.extend(node.all_input_nodes)
        node.graph.erase_node(node)
        erased.add(node)
    return erased


@functools.cache
def sources_hash() -> str:
    """A hash of every file of the package: patterns, kernels, passes and gate tables."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    folders = [here, *(Path(p) for name in ("patterns", "kernels") for p in _package_paths(name))]
    for folder in folders:
        for path in sorted((*folder.glob("*.py"), *folder.glob("gate_tables/*.json"))):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _package_paths(name: str) -> list[str]:
    import importlib

    return list(importlib.import_module(f"..{name}", __package__).__path__)


def cache_key(settings: Settings) -> tuple:
    """All that the rewritten graph depends on beside the graph: sources, settings, versions and target."""
    added = [(p.name, _module_source(p.match)) for p in _patterns[len(PATTERNS) :]]
    added += [(o.name, _module_source(o.reference), _module_source(o.plan)) for o in registered_operators()]
    gpu = device_target(torch.device("cuda")) if torch.cuda.is_available() else None
    return (sources_hash(), settings, tuple(versions().items()), gpu, tuple(added))


_THIS_PROCESS = uuid.uuid4().hex


def _module_source(function: Callable | None) -> str:
    """The source of the module that defines ``function``; where there is none (a notebook), this process only."""
    if function is None or function.__module__.startswith(f"{__package__.rpartition('.')[0]}."):
        return ""  # nothing, or a part of sources_hash
    try:
        return inspect.getsource(sys.modules[function.__module__])
    except (OSError, TypeError, KeyError):
        return _THIS_PROCESS
