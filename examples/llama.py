"""A Llama in plain PyTorch, as a user would write it: nothing in it knows about ``portable_ops``.

    h = x + Attention(RMSNorm(x))
    y = h + W_down (silu(W_gate n) * W_up n),    n = RMSNorm(h)

RMSNorm is written by hand, the rotary embedding turns the two halves of each head, attention is grouped
(``num_kv_heads`` < ``num_heads``) over a static KV cache that is updated in place and masked by position.

    python -m examples.llama --tokens 16 --compile
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model; a head has ``hidden_size / num_heads`` channels."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    cache_length: int = 256
    rope_theta: float = 5e5
    eps: float = 1e-5


SIZES = {
    "tiny": Config(128, 64, 128, num_layers=2, num_heads=4, cache_length=64),
    "small": Config(),
    "medium": Config(32000, 2048, 5632, num_layers=8, num_heads=32, num_kv_heads=8, cache_length=4096),
    "8b": Config(128256, 4096, 14336, 32, 32, 8, cache_length=4096),
    "70b": Config(128256, 8192, 28672, 80, 64, 8, cache_length=4096),
}


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)``, computed in at least fp32 and rounded before the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        f = x.to(torch.promote_types(x.dtype, torch.float32))
        n = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * n.to(x.dtype)


def rotary_tables(position: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``cos`` and ``sin`` of ``position[s] * theta^(-2i / head_dim)``, each ``[S, head_dim]``."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=position.device, dtype=wide) / head_dim
    angle = position[:, None].to(wide) * theta**-exponent
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair ``(x[i], x[i + D/2])`` of ``x[B, H, S, D]`` by the angles of its position."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def repeat_kv(x: Tensor, groups: int) -> Tensor:
    """``x[B, K, T, D]`` with every head repeated ``groups`` times: ``[B, K * groups, T, D]``."""
    B, K, T, D = x.shape
    return x[:, :, None].expand(B, K, groups, T, D).reshape(B, K * groups, T, D)


class Attention(nn.Module):
    """Grouped-query attention over a static cache."""

    def __init__(self, config: Config, batch: int) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        self.groups = config.num_heads // config.num_kv_heads
        size, kv_size = config.hidden_size, config.hidden_size // self.groups
        self.q = nn.Linear(size, size, bias=False)
        self.k = nn.Linear(size, kv_size, bias=False)
        self.v = nn.Linear(size, kv_size, bias=False)
        self.o = nn.Linear(size, size, bias=False)
        cache = (batch, config.num_kv_heads, config.cache_length, self.head_dim)
        self.register_buffer("k_cache", torch.zeros(cache), persistent=False)
        self.register_buffer("v_cache", torch.zeros(cache), persistent=False)

    def forward(self, x: Tensor, position: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = (f(x).view(B, S, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.k_cache.index_copy_(2, position, k)
        self.v_cache.index_copy_(2, position, v)
        k, v = repeat_kv(self.k_cache, self.groups), repeat_kv(self.v_cache, self.groups)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(y.transpose(1, 2).reshape(B, S, -1))


class SwiGLU(nn.Module):
    """``W_down (silu(W_gate x) * W_up x)``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate = nn.Linear(size, inner, bias=False)
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Config, batch: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.eps)
        self.attention = Attention(config, batch)
        self.mlp_norm = RMSNorm(config.hidden_size, config.eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, position: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), position, mask, cos, sin)
        return h + self.mlp(self.mlp_norm(h))


class Llama(nn.Module):
    """``logits[B, S, vocab]`` of ``tokens[B, S]`` that stand at ``position[S]`` of the cache."""

    def __init__(self, config: Config, batch: int = 1) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, batch) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        c, x = self.config, self.embedding(tokens)
        cos, sin = rotary_tables(position, c.hidden_size // c.num_heads, c.rope_theta, x.dtype)
        mask = torch.arange(c.cache_length, device=position.device) <= position[:, None]
        for block in self.blocks:
            x = block(x, position, mask, cos, sin)
        return self.head(self.norm(x))


def make_model(
    size: str = "small", batch: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """A model with random weights and the inputs of one decoding step; "meta" allocates nothing."""
    with torch.device(device):
        model = Llama(SIZES[size], batch).to(dtype).eval()
        inputs = torch.zeros(batch, 1, dtype=torch.long), torch.full((1,), 8)
    return model.requires_grad_(False), inputs


@torch.no_grad()
def generate(
    model: Callable[[Tensor, Tensor], Tensor], prompt: Tensor, count: int, prefill: Callable | None = None
) -> Tensor:
    """The ``count`` greedy tokens after ``prompt[B, S]``: ``[B, count]``.

    ``prefill`` runs the prompt (``model`` if None): its shape occurs once, so compiling it may not pay.
    """
    device, length = prompt.device, prompt.shape[1]
    tokens = [(prefill or model)(prompt, torch.arange(length, device=device))[:, -1:].argmax(-1)]
    for position in range(length, length + count - 1):
        tokens.append(model(tokens[-1], torch.tensor([position], device=device)).argmax(-1))
    return torch.cat(tokens, 1)


def main(argv: list[str] | None = None) -> None:
    """Print greedy tokens of the model, eager or compiled."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="decode through the backend portable_ops")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model, _ = make_model(args.size, args.batch, args.device, getattr(torch, args.dtype))
    prompt = torch.randint(0, model.config.vocab_size, (args.batch, 8), device=args.device)
    step = torch.compile(model, backend="portable_ops", dynamic=False) if args.compile else model
    print(generate(step, prompt, args.tokens, prefill=model).tolist())


if __name__ == "__main__":
    main()
