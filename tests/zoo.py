"""Tiny Hugging Face models of many architectures, and what each of them really calls.

Every model is built from its own configuration class with small sizes and random weights; nothing is downloaded.
:func:`count_calls` runs a model eagerly under hooks and counts its norms, rotations, gated activations, attention and
top-k, knowing nothing of patterns or graphs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers
from transformers.modeling_utils import AttentionInterface

transformers.logging.set_verbosity_error()

VOCABULARY, LENGTH, BATCH = 128, 16, 2

# ------------------------------------------------------------------------------------------------------ architectures


@dataclasses.dataclass(frozen=True)
class Architecture:
    """``model``: a class of transformers.  ``sizes``: configuration beyond SIZES.

    ``inputs``: "tokens", "pair" (for an encoder and a decoder) or "pixels".  ``decodes``: it takes a static cache.
    """

    name: str
    model: str
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: str = "tokens"
    decodes: bool = False


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "embed_dim": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "rotary_dim": 8,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 32,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "ffn_dim": 96,
    "d_ff": 96,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_size": 16,
    "patch_size": 4,
}
"""Set wherever a configuration has a field of that name."""

SIZES_IF_SET = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_top_k": 2,
    "shared_expert_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 8,
}
"""Set where the configuration's own default is not None."""

BOTH = ["sliding_attention", "full_attention"]
UNSET = object()


def _decoder(name: str, model: str, decodes: bool = True, **sizes: Any) -> Architecture:
    return Architecture(name, f"{model}ForCausalLM", sizes, decodes=decodes)


CI = (
    _decoder("llama", "Llama"),
    _decoder("gemma2", "Gemma2", layer_types=BOTH),
    _decoder("qwen3", "Qwen3"),
    _decoder("gpt_oss", "GptOss", layer_types=BOTH),
    _decoder(
        "deepseek_v2", "DeepseekV2", topk_method="group_limited_greedy", n_group=2, topk_group=1, num_experts_per_tok=2
    ),
    _decoder("deepseek_v3", "DeepseekV3"),
    _decoder("glm4", "Glm4"),
    _decoder("cohere", "Cohere"),
    _decoder("olmo2", "Olmo2"),
    _decoder("mixtral", "Mixtral"),
    Architecture("t5", "T5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu"}, "pair"),
    Architecture("dinov3_vit", "DINOv3ViTModel", {"use_gated_mlp": True, "pos_embed_shift": None}, "pixels"),
)
"""One for each way to write things that many others share."""

OTHERS = (
    _decoder("arcee", "Arcee"),
    _decoder("bitnet", "BitNet"),
    _decoder("bloom", "Bloom"),
    _decoder("cohere2", "Cohere2", layer_types=BOTH),
    _decoder("cwm", "Cwm", layer_types=BOTH),
    _decoder("deepseek_v4", "DeepseekV4", decodes=False),
    _decoder("diffllama", "DiffLlama"),
    _decoder("ernie4_5", "Ernie4_5"),
    _decoder("exaone4", "Exaone4", layer_types=BOTH),
    _decoder("falcon", "Falcon", head_dim=UNSET, num_kv_heads=2, new_decoder_architecture=True),
    _decoder("gemma", "Gemma"),
    _decoder("gemma3_text", "Gemma3", layer_types=BOTH),
    _decoder("glm", "Glm"),
    _decoder("glm4_moe", "Glm4Moe"),
    _decoder("gpt_neox", "GPTNeoX"),
    _decoder("gptj", "GPTJ"),
    _decoder("granite", "Granite", attention_multiplier=0.25),
    _decoder("granitemoe", "GraniteMoe"),
    _decoder("helium", "Helium"),
    _decoder("hunyuan_v1_dense", "HunYuanDenseV1"),
    _decoder("inkling_text", "Inkling"),
    _decoder("lfm2", "Lfm2", layer_types=["conv", "full_attention"]),
    _decoder("llama4_text", "Llama4", no_rope_layers=[1, 0], intermediate_size_mlp=96),
    _decoder("minimax_m2", "MiniMaxM2"),
    _decoder("mistral", "Mistral"),
    _decoder("mpt", "Mpt"),
    _decoder("nanochat", "NanoChat"),
    _decoder("nemotron", "Nemotron"),
    _decoder("olmo", "Olmo"),
    _decoder("olmo3", "Olmo3", layer_types=BOTH),
    _decoder("olmoe", "Olmoe"),
    _decoder("persimmon", "Persimmon"),
    _decoder("phi", "Phi"),
    _decoder("phi3", "Phi3"),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen2_moe", "Qwen2Moe"),
    _decoder("qwen3_moe", "Qwen3Moe"),
    _decoder("seed_oss", "SeedOss"),
    _decoder("smollm3", "SmolLM3"),
    _decoder("stablelm", "StableLm"),
    _decoder("starcoder2", "Starcoder2"),
    _decoder("vaultgemma", "VaultGemma", layer_types=BOTH),
    Architecture(
        "qwen3_vl_text",
        "Qwen3VLTextModel",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            }
        },
    ),
    Architecture("bert", "BertModel"),
    Architecture("modernbert", "ModernBertModel", {"local_attention": 8}),
    Architecture("bart", "BartForConditionalGeneration", {}, "pair"),
    Architecture("umt5", "UMT5ForConditionalGeneration", {}, "pair"),
    Architecture("clip_vision", "CLIPVisionModel", {}, "pixels"),
    Architecture("siglip_vision", "SiglipVisionModel", {}, "pixels"),
)
"""Run with ``--zoo-all``."""


def missing(architecture: Architecture) -> str | None:
    """Why the architecture cannot be built here, or None."""
    if hasattr(transformers, architecture.model):
        return None
    return f"transformers {transformers.__version__} has no {architecture.model}"


# ------------------------------------------------------------------------------------------------------------- models


def build(architecture: Architecture, dtype: torch.dtype, attention: str) -> nn.Module:
    """The model with tiny sizes, one layer of each type at least, and random weights, in evaluation mode.

    A class that has no SDPA gets eager attention.
    """
    cls = getattr(transformers, architecture.model)
    config = tiny_config(cls.config_class, architecture.sizes)
    config._attn_implementation = attention if getattr(cls, "_supports_sdpa", False) else "eager"
    torch.manual_seed(0)
    model = cls(config)
    _randomize(model)
    return _cast(model, dtype).eval()


def tiny_config(cls: type, sizes: Mapping[str, Any]) -> Any:
    """The configuration ``cls`` with SIZES where it has such fields, then ``sizes``."""
    usual = cls()
    fields = set(inspect.signature(cls.__init__).parameters) | set(getattr(cls, "__dataclass_fields__", ()))
    chosen = {k: v for k, v in SIZES.items() if k in fields}
    chosen |= {k: v for k, v in SIZES_IF_SET.items() if k in fields and getattr(usual, k, None) is not None}
    if "qk_rope_head_dim" in chosen:  # latent attention: every head has its own key
        chosen["num_key_value_heads"] = SIZES["num_attention_heads"]
        chosen.pop("head_dim", None)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        usual_types = getattr(usual, name, None)
        if name in fields and usual_types:
            kinds = list(dict.fromkeys(usual_types))
            chosen[name] = (kinds * 2)[: max(2, len(kinds))]
            chosen["num_hidden_layers"] = max(chosen.get("num_hidden_layers", 2), len(chosen[name]))
    chosen |= sizes
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if name in chosen:  # as many as there are layers
            n = chosen["num_hidden_layers"] if name not in sizes else len(sizes[name])
            chosen["num_hidden_layers"] = n
            chosen[name] = (list(chosen[name]) * n)[:n]
    return cls(**{k: v for k, v in chosen.items() if v is not UNSET})


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Weights that matter: as initialised, a norm's weight is all ones and could be lost unseen."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            embeds = re.search(r"embed|wte|shared", name) is not None
            parameter.copy_(noise if embeds else noise / parameter.shape[-1] ** 0.5)
        elif re.search(r"norm|ln_|sinks", name, re.IGNORECASE):
            parameter.add_(0.25 * noise)


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model.to(dtype)``; rotary frequencies stay in float32, as they do when a checkpoint is loaded."""
    kept = {name: b.clone() for name, b in model.named_buffers() if "inv_freq" in name}
    model = model.to(dtype)
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer
    return model


def widened(model: nn.Module) -> nn.Module:
    """A float64 copy; its experts are called one by one, since grouped matmuls know no float64."""
    wide = copy.deepcopy(model).double()
    wide.config._experts_implementation = "eager"
    return wide


def inputs(architecture: Architecture, model: nn.Module, phase: str) -> dict[str, Any]:
    """Fresh arguments of one call (a cache is written by the call): a whole prompt, or one token after it.

    The static cache of a decoding step is filled by ``model`` itself.
    """
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    if architecture.inputs == "pixels":
        dtype = next(p.dtype for p in model.parameters())
        return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator).to(dtype)}
    arguments: dict[str, Any] = {"input_ids": tokens}
    if architecture.inputs == "pair":
        arguments["decoder_input_ids"] = tokens[:, : LENGTH // 2]
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = False
    if phase == "prefill":
        return arguments
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 8)
    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True)
    return {"input_ids": tokens[:, -1:].clone(), "past_key_values": cache, "use_cache": True}


def results(output: Any) -> list[Tensor]:
    """The floating-point tensors among a model's outputs, caches left out."""
    items = [v for k, v in output.items() if k != "past_key_values"]
    return [t for t in tree_leaves(items) if isinstance(t, Tensor) and t.is_floating_point()]


# ----------------------------------------------------------------------------------------------------------- counting

KINDS = ("rms_norm", "rope", "swiglu", "attention", "topk")

_ROTATES = re.compile(r"^_?apply_\w*(rotary|rope)\w*$")
_GATES = re.compile(r"silu|gelu|swish|relu", re.IGNORECASE)
_SAME = ("view", "_unsafe_view", "reshape", "_to_copy", "transpose", "permute", "slice", "clone", "alias", "expand")
_SAME += ("unsqueeze", "squeeze", "t", "detach", "select", "split", "unbind", "_reshape_alias", "clamp")


def count_calls(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, int]:
    """How often one eager call of ``model`` computes each kind.

    ``rms_norm``: norm modules whose result is ``x / rms(x)`` up to a weight, and gated ones.  ``rope``: tensors that
    come out of functions called ``apply_rotary...``.  ``swiglu``: products of a SiLU, GELU or ReLU with a tensor of the
    same shape.  ``attention``: calls of attention functions, and softmax outside of them that a matmul follows.
    """
    with _Observer(model) as observer, torch.no_grad():
        model(**arguments)
    return {kind: observer.counts[kind] for kind in KINDS}


class _Observer:
    """Hooks, wrapped functions and modes around one call of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.counts: Counter[str] = Counter()
        self.inside: list[str] = []
        self.alive: list[Any] = []  # tensors whose ids are remembered
        self.gates: set[int] = set()
        self.scaled: dict[int, int] = {}
        self.sigmoids: dict[int, int] = {}
        self.probabilities: dict[int, int] = {}
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> _Observer:
        for module in self.model.modules():
            name = type(module).__name__
            if "Norm" in name and not isinstance(module, nn.LayerNorm) and not list(module.children()):
                self._hook(module, "norm", self._saw_norm)
            elif type(module).__module__ == "transformers.activations" and _GATES.search(name):
                self._hook(module, "activation", lambda module, args, out: self._mark(out))
        for owner in self._namespaces():
            for name, function in list(vars(owner).items()):
                if inspect.isfunction(function) and _ROTATES.search(name):
                    self._replace(owner, name, functools.partial(self._rotate, function))
        get = AttentionInterface.get_interface
        self._replace(AttentionInterface, "get_interface", lambda *a: functools.partial(self.attend, get(*a)))
        self._exit.enter_context(_Functions(self))
        self._exit.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: Any) -> None:
        self._exit.close()

    def _namespaces(self) -> list[Any]:
        classes = {c for m in self.model.modules() for c in type(m).__mro__ if c.__module__.startswith("transformers.")}
        return [*{c.__module__: sys.modules[c.__module__] for c in classes}.values(), *classes]

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._exit.callback(setattr, owner, name, vars(owner)[name])
        # A function again, not a partial: a class binds only functions.
        setattr(owner, name, lambda *args, **kwargs: value(*args, **kwargs))

    def _hook(self, module: nn.Module, label: str, saw: Callable[[nn.Module, tuple, Any], None]) -> None:
        def after(module: nn.Module, args: tuple, out: Any) -> None:
            self.inside.remove(label)
            if label not in self.inside:
                saw(module, args, out)

        for handle in (
            module.register_forward_pre_hook(lambda module, args: self.inside.append(label)),
            module.register_forward_hook(after),
        ):
            self._exit.callback(handle.remove)

    @contextlib.contextmanager
    def doing(self, label: str) -> Iterator[bool]:
        """Whether this is the outermost ``label``."""
        self.inside.append(label)
        try:
            yield self.inside.count(label) == 1
        finally:
            self.inside.remove(label)

    def _rotate(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        with self.doing("rope") as outermost:
            out = function(*args, **kwargs)
        if outermost:
            given = {id(t) for t in tree_leaves((args, kwargs))}
            self.counts["rope"] += sum(isinstance(t, Tensor) and id(t) not in given for t in tree_leaves(out))
        return out

    def attend(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        with self.doing("attention") as outermost:
            self.counts["attention"] += outermost
            return function(*args, **kwargs)

    def _saw_norm(self, module: nn.Module, args: tuple, out: Any) -> None:
        with _unobserved():
            self.counts["rms_norm"] += is_rms_norm(module, args, out)

    def _mark(self, gate: Any) -> None:
        self.alive.append(gate)
        self.gates.add(id(gate))

    def saw_operation(self, name: str, args: tuple, out: Any) -> None:
        """Follow activations through views, casts and scalings to the product with another tensor."""
        self.alive.append((args, out))
        operands = [a for a in tree_leaves(args) if isinstance(a, Tensor)]
        name = name if name.startswith("_") else name.rstrip("_")
        if name == "topk":
            self.counts["topk"] += 1
        elif name in ("silu", "gelu", "relu") and "activation" not in self.inside:
            self._mark(out)
        elif name in ("_softmax", "_safe_softmax") and "attention" not in self.inside:
            self.probabilities[id(out)] = id(out)
        elif name == "bmm":
            roots = {self.probabilities[id(a)] for a in operands if id(a) in self.probabilities}
            self.counts["attention"] += len(roots)
            self.probabilities = {k: v for k, v in self.probabilities.items() if v not in roots}
        elif name == "sigmoid":
            self.sigmoids[id(out)] = self.scaled.get(id(operands[0]), id(operands[0]))
        elif name in _SAME or (name in ("mul", "div") and len(operands) == 1):
            for result in tree_leaves(out):
                self.scaled[id(result)] = self.scaled.get(id(operands[0]), id(operands[0]))
                if id(operands[0]) in self.gates:
                    self._mark(result)
                if id(operands[0]) in self.probabilities:
                    self.probabilities[id(result)] = self.probabilities[id(operands[0])]
        elif name == "mul" and "activation" not in self.inside:
            self._saw_product(*operands, out)

    def _saw_product(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        for gate, other in ((a, b), (b, a)):
            if self.sigmoids.get(id(gate)) == self.scaled.get(id(other), id(other)):  # x * sigmoid(k x)
                return self._mark(out)
            if id(gate) in self.gates and gate is not other and gate.shape == other.shape and gate.dim() >= 2:
                self.counts["swiglu"] += 1
                return None
        return None


class _Functions(TorchFunctionMode):
    def __init__(self, observer: _Observer) -> None:
        self.observer = observer

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            return self.observer.attend(func, *args, **kwargs)
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __init__(self, observer: _Observer) -> None:
        super().__init__()
        self.observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.observer.saw_operation(func._schema.name.partition("::")[2], args, out)
        return out


@contextlib.contextmanager
def _unobserved() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        yield


def is_rms_norm(module: nn.Module, args: tuple, out: Any) -> bool:
    """By its numbers: whether ``out`` is ``x / rms(x)`` times a weight; a norm with a gate goes by its name."""
    x = args[0]
    if len([a for a in args if isinstance(a, Tensor)]) > 1:
        return "RMS" in type(module).__name__
    if not isinstance(out, Tensor) or out.shape != x.shape:
        return False
    x, y = x.double(), out.double()
    n = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).flatten(0, -2)
    weight = getattr(module, "weight", None)
    candidates = [torch.ones(x.shape[-1])]
    if isinstance(weight, Tensor) and weight.shape == x.shape[-1:]:
        candidates += [weight.double(), 1 + weight.double()]
    worst = [(y.flatten(0, -2) - n * w).abs().mean() / y.abs().mean() for w in candidates]
    return bool(min(worst) < 0.02)
