"""Hugging Face architectures: everything that a model really calls is recognised, and the results stay right.

A dozen by default; all of them in every configuration with ``--zoo-all``.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.zoo

BF16, FP32 = torch.bfloat16, torch.float32


@dataclasses.dataclass(frozen=True)
class Remainder:
    """``missed`` of a model's ``kind`` are not recognised, and ``why``; negative where more is recognised than hooks
    count.  ``only``: in which configurations (words of their ids).
    """

    kind: str
    missed: int
    why: str
    only: str = ""


REMAINDERS: dict[str, tuple[Remainder, ...]] = {
    "mpt": (Remainder("attention", 2, "a graph break of the model's own (Tensor.item) stands inside", "decode"),),
    "nanochat": (Remainder("rope", 4, "it rotates by the negative angle, which the operator cannot say"),),
}
"""Exactly what is left, so that it can neither grow nor shrink unseen."""

AMPLIFIES = ("deepseek_v4", "qwen2_moe")
"""Models that amplify roundings: eager is no measure for what Inductor's decompositions alone make of them."""

CONFIGURATIONS = {
    f"{'bf16' if dtype == BF16 else 'fp32'}-{attention}-{phase}": (dtype, attention, phase)
    for dtype in (BF16, FP32)
    for attention in ("sdpa", "eager")
    for phase in ("prefill", "decode")
}
IN_CI = ("bf16-sdpa-prefill", "fp32-eager-decode")


@torch.no_grad()
def test_counts_and_results(architecture: Any, configuration: str, zoo: ModuleType, tracing: ModuleType) -> None:
    reason = zoo.missing(architecture)
    if reason is not None:
        pytest.skip(reason)
    dtype, attention, phase = CONFIGURATIONS[configuration]
    model = zoo.build(architecture, dtype, attention)

    def rewritten(gate: str) -> Any:
        arguments = zoo.inputs(architecture, model, phase)
        return tracing.trace(lambda arguments: model(**arguments), arguments, gate=gate)

    expected = zoo.count_calls(model, zoo.inputs(architecture, model, phase))
    traced = rewritten("always")

    found = dict(traced.report.counts)
    routers = [site for site in traced.report.sites if (site.kind, site.decision) == ("router", "rewritten")]
    found["topk"] += sum(site.count * int(site.bound["selections"]) for site in routers)
    missed = {kind: n - found[kind] for kind, n in expected.items() if n != found[kind]}
    known = REMAINDERS.get(architecture.name, ())
    assert missed == {r.kind: r.missed for r in known if all(w in configuration.split("-") for w in r.only.split())}, (
        traced.report.misses
    )

    eager = zoo.results(model(**zoo.inputs(architecture, model, phase)))
    wide = zoo.widened(model)
    with tracing.Widened():
        exact = zoo.results(wide(**zoo.inputs(architecture, wide, phase)))
    ours = zoo.results(traced.result)
    judged_by = zoo.results(rewritten("never").result) if architecture.name in AMPLIFIES else eager
    tracing.assert_no_further_than(ours, judged_by, exact)
