"""A small model whose layers match, with one near miss in each, and functions that just miss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """An RMSNorm over ``dim``."""

    def __init__(self, dim: int = -1, size: int = 64) -> None:
        super().__init__()
        self.weight, self.dim = nn.Parameter(torch.ones(size)), dim

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(self.dim, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.odd_norm = Norm(), Norm(dim=1)
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = h.view(2, 8, 4, 16).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(2, 8, 64)
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return self.odd_norm(x)


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(layers)), Norm()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Failing(Model):
    """Breaks off in the middle, behind a graph break."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        self.layers[1](x)
        raise KeyError("the model's own")


def inputs() -> Tensor:
    return torch.rand(2, 8, 64)


def wrong_axis(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)


def eps_outside(x: Tensor) -> Tensor:
    return x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-6)


def mask_of_five_dimensions(x: Tensor) -> Tensor:
    q = x.view(2, 8, 4, 16).transpose(1, 2)
    return torch.softmax((q @ q.transpose(-1, -2) * 0.25)[None] + torch.zeros(3, 2, 1, 8, 8), -1) @ q


def silu_on_the_wrong_half(x: Tensor) -> Tensor:
    gate, _ = torch.cat([x, x + 1], -1).mul(2).chunk(2, -1)
    return F.silu(gate) * gate


def all_values_of_topk(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, indices = x.sort(-1, descending=True)
    return values[..., :4] + 1, indices[..., :4] + 1, values.sum()


def backwards_rope(x: Tensor) -> Tensor:
    angles = torch.arange(8)[:, None] * torch.rand(32)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([b, a], -1) * sin


MISSES = {
    wrong_axis: ("rms_norm", "the mean is not over the last dimension alone with keepdim=True"),
    eps_outside: ("rms_norm", "eps is added to the root, not to the mean under it"),
    mask_of_five_dimensions: ("attention", "the softmax has 5 dimensions, not batch, heads, queries and keys"),
    silu_on_the_wrong_half: (
        "swiglu",
        "silu multiplies a function of its own argument: an activation, not a gate",
    ),
    all_values_of_topk: ("topk", "the whole sorted tensor is read as well as a piece of it"),
    backwards_rope: ("rope", "neither half is negated where the sine multiplies it"),
}
"""What each function is explained by: its kind and the reason, a true sentence."""
