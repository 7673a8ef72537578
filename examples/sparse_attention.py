"""Sparse attention as in DeepSeek's DSA, in plain PyTorch: nothing in it knows about ``portable_ops``.

An indexer gives each cached position a logit, cheap to compute; each token attends to the k best positions only.

    logit[t] = sum_h w_h relu(q_h . key[t]),    -inf for t >= length
    chosen   = topk(logit, k)
    out      = softmax(q . kv[chosen] / sqrt(d)) kv[chosen]

Of the top-k only the indices are used, the mask is a length, and attention does not see the order of what was chosen.
So all of it but the logits becomes ``topk_indices`` with an end and without sorting, and two products.

    python -m examples.sparse_attention --tokens 16 --compile
"""

from __future__ import annotations

import argparse
import dataclasses

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the layer: keys are values as well, one head of them for all queries (as in multi-latent attention)."""

    hidden_size: int = 256
    num_heads: int = 8
    head_dim: int = 64
    index_heads: int = 4
    index_dim: int = 32
    cache_length: int = 4096
    k: int = 256


SIZES = {
    "tiny": Config(64, num_heads=4, head_dim=16, index_heads=2, index_dim=8, cache_length=64, k=8),
    "small": Config(),
    "deepseek": Config(7168, 128, 576, index_heads=64, index_dim=128, cache_length=131072, k=2048),
}


class SparseAttention(nn.Module):
    """One token of each sequence, with static caches that are written in place."""

    def __init__(self, config: Config, batch: int) -> None:
        super().__init__()
        c = self.config = config
        self.q = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.kv = nn.Linear(c.hidden_size, c.head_dim, bias=False)
        self.index_q = nn.Linear(c.hidden_size, c.index_heads * c.index_dim, bias=False)
        self.index_k = nn.Linear(c.hidden_size, c.index_dim, bias=False)
        self.index_weights = nn.Linear(c.hidden_size, c.index_heads, bias=False)
        self.out = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.register_buffer("cache", torch.zeros(batch, c.cache_length, c.head_dim), persistent=False)
        self.register_buffer("index_cache", torch.zeros(batch, c.cache_length, c.index_dim), persistent=False)

    def select(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The indices [batch, k] of the positions to attend to."""
        c = self.config
        q = self.index_q(x).view(-1, c.index_heads, c.index_dim)
        scores = torch.bmm(q, self.index_cache.transpose(1, 2)).relu()
        logits = (self.index_weights(x).unsqueeze(-1) * scores).sum(1).float()
        outside = torch.arange(c.cache_length, device=x.device) >= lengths[:, None]
        return logits.masked_fill(outside, -torch.inf).topk(min(c.k, c.cache_length), dim=-1)[1]

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` [batch, hidden_size] at ``positions`` [batch]."""
        c = self.config
        rows = torch.arange(len(x), device=x.device)
        self.cache[rows, positions] = self.kv(x)
        self.index_cache[rows, positions] = self.index_k(x)
        lengths = positions + 1
        index = self.select(x, lengths)
        chosen = self.cache.gather(1, index.unsqueeze(-1).expand(-1, -1, c.head_dim))
        q = self.q(x).view(-1, c.num_heads, c.head_dim)
        scores = torch.bmm(q, chosen.transpose(1, 2)) * c.head_dim**-0.5
        beyond = index >= lengths[:, None]  # of a sequence that is shorter than k
        weights = scores.masked_fill(beyond.unsqueeze(1), -torch.inf).softmax(-1)
        return self.out(torch.bmm(weights, chosen).flatten(1))


def make_model(
    size: str = "small", batch: int = 1, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[SparseAttention, tuple[Tensor, Tensor]]:
    """The layer with random weights, and inputs of one step."""
    model = SparseAttention(SIZES[size], batch).to(device=device, dtype=dtype)
    x = torch.randn(batch, SIZES[size].hidden_size, device=device, dtype=dtype)
    return model, (x, torch.full((batch,), SIZES[size].cache_length // 2, device=device))


@torch.no_grad()
def decode(model: nn.Module, xs: Tensor) -> Tensor:
    """The outputs for ``xs`` [tokens, batch, hidden_size], one token after another from position 0 on."""
    batch = xs.shape[1]
    return torch.stack([model(x, torch.full((batch,), i, device=xs.device)) for i, x in enumerate(xs)])


def main(argv: list[str] | None = None) -> None:
    """Decode random tokens and print the mean size of what comes out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model, (x, _) = make_model(args.size, device=args.device)
    xs = torch.randn(args.tokens, *x.shape, device=args.device)
    run = torch.compile(model, backend="portable_ops") if args.compile else model
    print(f"{args.tokens} tokens, mean |y| {decode(run, xs).abs().mean().item():.4f}")


if __name__ == "__main__":
    main()
