"""An unmodified Hugging Face Llama: ``generate()`` with a static cache, decoding through ``portable_ops``.

The only line that differs from stock is ``CompileConfig(backend="portable_ops")``. Weights are random, so
nothing is downloaded.

    python -m examples.hf_llama --tokens 32
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, StaticCache

# hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, vocab_size
SIZES = {
    "tiny": (64, 128, 2, 4, 2, 128),
    "small": (256, 704, 4, 8, 2, 1024),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}


def make_model(
    size: str = "small", batch: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[LlamaForCausalLM, tuple[Tensor, None, None, StaticCache]]:
    """The model with random weights and the inputs of one decoding step: tokens, no mask, no positions, a cache."""
    hidden, intermediate, layers, heads, kv_heads, vocab = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        attn_implementation="sdpa",
        # Random weights know no end of text: without this, a token may end the generation early.
        eos_token_id=None,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
        tokens = torch.zeros(batch, 1, dtype=torch.long)
    cache = StaticCache(config=config, max_cache_len=128)
    return model, (tokens, None, None, cache)


def generate(model: LlamaForCausalLM, prompt: Tensor, count: int, config: CompileConfig | None) -> Tensor:
    """The ``count`` greedy tokens after ``prompt[B, S]``, compiled as ``config`` says, eager if None."""
    out = model.generate(
        prompt,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        compile_config=config,
        disable_compile=config is None,
    )
    return out[:, prompt.shape[1] :]


def main(argv: list[str] | None = None) -> int:
    """Compare the greedy tokens of eager and of the compiled model; exit status 1 if they differ."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args(argv)

    from portable_ops.inductor_ext import reports

    torch.manual_seed(0)
    model, _ = make_model(args.size, args.batch, args.device, getattr(torch, args.dtype))
    prompt = torch.randint(0, model.config.vocab_size, (args.batch, 8), device=args.device)
    config = CompileConfig(backend="portable_ops")
    if args.device == "cpu":
        # generate() compiles on accelerators only unless told otherwise, and CUDA graphs need a GPU. The gate
        # is forced because the CPU has no kernels: the operators' plain-torch references run instead.
        config = CompileConfig(backend="portable_ops", mode=None, options={"portable_ops.gate": "always"})
        config._compile_all_devices = True

    eager = generate(model, prompt, args.tokens, None)
    compiled = generate(model, prompt, args.tokens, config)
    for report in reports():
        print(report)
    print(f"equal to eager: {int((compiled == eager).sum())} of {eager.numel()} greedy tokens")
    return 0 if torch.equal(compiled, eager) else 1


if __name__ == "__main__":
    sys.exit(main())
