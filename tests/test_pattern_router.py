"""Routers of mixtures of experts in the spellings of real models: what is one, and what is left to single top-k."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

INF = torch.inf


def logits_of(tokens: int = 6, experts: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different numbers, exact in every type, a choice of which is unambiguous."""
    n = tokens * experts
    return (
        torch.randperm(n, generator=torch.Generator().manual_seed(0))
        .view(tokens, experts)
        .sub(n // 2)
        .div(16)
        .to(dtype)
    )


BIAS = torch.tensor([0.25, -0.5, 0.125, 0.0, 0.375, -0.25, 0.0625, 0.5])


def traced(tracing: ModuleType, model: Callable, *args: Tensor, grad: bool = False, **options: object):
    with torch.set_grad_enabled(grad):
        return tracing.trace(model, *args, **{"gate": "always", **options})


def routers(found) -> list[dict[str, str]]:
    return [dict(s.bound) for s in found.report.sites if s.kind == "router" and s.decision == "rewritten"]


# ---------------------------------------------------------------------------------------------------------- spellings


def mixtral(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(torch.nn.functional.softmax(logits.float(), dim=-1), 2, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights, experts


def qwen3(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(logits.softmax(-1, dtype=torch.float), 3, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype), experts


def olmoe(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(logits.softmax(-1, dtype=torch.float), 3, dim=-1, sorted=False)
    return weights.sort(-1)[0].to(logits.dtype), experts.sort(-1)[0]


def in_groups(scores: Tensor, best: int, top: int) -> Tensor:
    """The mask of the two groups' experts."""
    groups = scores.view(-1, 2, 4).topk(best, dim=-1)[0].sum(-1)
    index = torch.topk(groups, k=top, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(1, index, 1)
    return mask.unsqueeze(-1).expand(-1, 2, 4).reshape(-1, 8).bool()


def deepseek_v3(logits: Tensor, fill: float = -INF, scale: float = 2.5) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    choice = scores + BIAS
    experts = choice.masked_fill(~in_groups(choice, 2, 1), fill).topk(2, dim=-1, sorted=False)[1]
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, experts


def kimi_k2(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    experts = (scores + BIAS.unsqueeze(0)).topk(2, dim=-1)[1]
    weights = scores.gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.827, experts


def gpt_oss(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, experts = torch.topk(logits, 2, dim=-1)
    return torch.nn.functional.softmax(values, dim=1, dtype=values.dtype), experts


def llama_4(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(logits.sigmoid(), 1, dim=1)
    return weights * 1.0, experts


SPELLINGS: dict[str, tuple[Callable, dict[str, str]]] = {
    "mixtral": (mixtral, {"k": "2", "scoring": "softmax", "normalise": "sum", "selections": "1"}),
    "qwen3": (qwen3, {"k": "3", "scoring": "softmax", "normalise": "sum"}),
    "olmoe": (olmoe, {"k": "3", "scoring": "softmax", "normalise": "none"}),
    "deepseek v3": (
        deepseek_v3,
        {"scoring": "sigmoid", "groups": "2", "normalise": "sum", "scale": "2.5", "selections": "3"},
    ),
    "deepseek v3, filled with 0": (lambda x: deepseek_v3(x, fill=0.0), {"groups": "2"}),
    "kimi k2": (kimi_k2, {"scoring": "sigmoid", "groups": "1", "normalise": "sum", "scale": "2.827"}),
    "gpt-oss": (gpt_oss, {"scoring": "none", "normalise": "softmax"}),
    "llama 4": (llama_4, {"k": "1", "scoring": "sigmoid", "normalise": "none"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model", "expected"), SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(model: Callable, expected: dict[str, str], dtype: torch.dtype, tracing: ModuleType) -> None:
    logits = logits_of(dtype=dtype)
    found = traced(tracing, model, logits)
    (router,) = routers(found)
    assert {name: router[name] for name in expected} == expected
    assert found.report.counts["topk"] == 0 and "aten.topk" not in found.after
    (weights, experts), (expected_weights, expected_experts) = found.result, model(logits)
    # Unsorted selections have no order.
    by_weight = weights.sort(-1, descending=True)[0], expected_weights.sort(-1, descending=True)[0]
    torch.testing.assert_close(*by_weight, rtol=1e-6 if weights.dtype == torch.float32 else 8e-3, atol=0)
    assert torch.equal(experts.sort(-1)[0], expected_experts.sort(-1)[0])


@pytest.mark.parametrize("dynamic", [None, True])
def test_dynamic_tokens(dynamic: bool | None, tracing: ModuleType) -> None:
    for model in (qwen3, deepseek_v3):
        logits = logits_of()
        if dynamic is None:
            torch._dynamo.mark_dynamic(logits, 0)
        else:
            torch._dynamo.mark_static(logits, 1)
        found = traced(tracing, model, logits, dynamic=dynamic)
        assert len(routers(found)) == 1
        torch.testing.assert_close(found.result[0].sum(-1), model(logits)[0].sum(-1))


def test_training(tracing: ModuleType) -> None:
    logits = logits_of().requires_grad_()
    mixtral(logits)[0].square().sum().backward()
    expected, logits.grad = logits.grad, None
    found = traced(tracing, mixtral, logits, grad=True)
    found.result[0].square().sum().backward()
    assert len(routers(found)) == 1
    torch.testing.assert_close(logits.grad, expected)


def test_what_else_is_read_stays(tracing: ModuleType) -> None:
    def model(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scores = logits.softmax(-1)
        weights, experts = torch.topk(scores, 2, dim=-1)
        return weights / weights.sum(-1, keepdim=True), experts, weights.clamp(max=0.5), scores.mean(0)

    logits = logits_of()
    found = traced(tracing, model, logits)
    (router,) = routers(found)
    assert router["normalise"] == "none"  # others read the weights before
    torch.testing.assert_close(found.result, model(logits))


# ---------------------------------------------------------------------------------------------------------- negatives

BIASED = "its weights are the choices themselves, biased or masked, and not scores"


def deepseek_v2(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    groups = scores.view(-1, 2, 4).max(-1).values
    index = torch.topk(groups, k=1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(1, index, 1).unsqueeze(-1).expand(-1, 2, 4).reshape(-1, 8)
    return tuple(torch.topk(scores.masked_fill(~mask.bool(), 0.0), k=2, dim=-1))


def biased_values(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(logits.sigmoid() + BIAS, 2, dim=-1)
    return weights / weights.sum(-1, keepdim=True), experts


DECLINED: dict[str, tuple[Callable, str | None]] = {
    "masked scores as weights": (deepseek_v2, BIASED),
    "biased scores as weights": (biased_values, BIASED),
    "plain logits": (lambda x: tuple(v * 2 for v in x.topk(2)), None),
    "experts alone": (lambda x: x.softmax(-1).topk(2)[1] + 1, None),
    "the smallest": (lambda x: tuple(v * 2 for v in x.softmax(-1).topk(2, largest=False)), None),
    "tokens for each expert": (lambda x: tuple(v * 2 for v in x.softmax(-1).topk(2, dim=0)), None),
    "softmax over tokens": (lambda x: tuple(v * 2 for v in x.softmax(0).topk(2)), None),
    "tanh": (lambda x: tuple(v * 2 for v in x.tanh().topk(2)), None),
    "three dimensions": (lambda x: tuple(v * 2 for v in x.view(2, 3, 8).softmax(-1).topk(2)), None),
    "scores rounded and widened": (lambda x: tuple(v * 2 for v in x.sigmoid().bfloat16().float().topk(2)), None),
    "double precision": (lambda x: tuple(v * 2 for v in x.double().softmax(-1).topk(2)), None),
    "a vocabulary": (lambda x: tuple(v * 2 for v in x.repeat(1, 100).softmax(-1).topk(2)), None),
}


@pytest.mark.parametrize(("model", "reason"), DECLINED.values(), ids=DECLINED)
def test_what_is_no_router(model: Callable, reason: str | None, tracing: ModuleType) -> None:
    logits = logits_of()
    found = traced(tracing, model, logits)
    assert not routers(found) and found.report.counts["router"] == 0
    assert [m.reason for m in found.report.misses if m.kind == "router"] == ([] if reason is None else [reason])
    assert found.report.counts["topk"] >= 1


def one_mask_for_all(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The groups of the first token serve every token."""
    scores = logits.sigmoid()
    groups = scores[:1].view(-1, 2, 4).topk(2, dim=-1)[0].sum(-1)
    mask = torch.zeros_like(groups).scatter(1, groups.topk(1, dim=-1)[1], 1)
    mask = mask.unsqueeze(-1).expand(len(logits), 2, 4).reshape(-1, 8).bool()
    experts = scores.masked_fill(~mask, 0.0).topk(2, dim=-1)[1]
    return scores.gather(1, experts), experts


def groups_of_others(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Groups are chosen by scores without the bias that experts are chosen by."""
    scores = logits.sigmoid()
    experts = (scores + BIAS).masked_fill(~in_groups(scores, 2, 1), -INF).topk(2, dim=-1)[1]
    return scores.gather(1, experts), experts


def a_mask_of_its_own(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    experts = scores.masked_fill(scores < 0.25, 0.0).topk(2, dim=-1)[1]
    return scores.gather(1, experts), experts


def weights_of_others(logits: Tensor) -> tuple[Tensor, Tensor]:
    experts = (logits.sigmoid() + BIAS).topk(2, dim=-1)[1]
    return logits.softmax(-1).gather(1, experts), experts


@pytest.mark.parametrize("model", [one_mask_for_all, groups_of_others, a_mask_of_its_own, weights_of_others])
def test_parts_that_do_not_fit(model: Callable, tracing: ModuleType) -> None:
    logits = logits_of()
    found = traced(tracing, model, logits)
    assert not routers(found)
    weights, experts = model(logits)
    torch.testing.assert_close(found.result[0].sort(-1)[0], weights.sort(-1)[0])
    assert torch.equal(found.result[1].sort(-1)[0], experts.sort(-1)[0])


def test_the_graph_before_a_declined_router_is_its_own(tracing: ModuleType) -> None:
    found = traced(tracing, mixtral, logits_of(), gate="table")
    assert [(s.kind, s.decision) for s in found.report.sites] == [("router", "declined"), ("topk", "declined")]
    assert found.after == found.before
