"""Small models of several kinds, in two sizes, and what is grown from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gossamer import grow
from gossamer.grow import Grown, GrowthTask
from gossamer.model.in_float64 import InFloat64
from gossamer.model.structure.model import structure_of
from gossamer.store.start_folder import start_state

VOCABULARY = 50
HF = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
LLAMA = {
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 6,
}
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
WIDE = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**keys: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**HF, **LLAMA, **keys}))


def qwen3(**keys: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{**HF, **LLAMA, **keys}))


def gpt2(**keys: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**{**HF, **GPT2, "embd_pdrop": 0.0, **keys}))


def neox(**keys: Any) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**{**HF, **WIDE, "max_position_embeddings": 64, **keys}))


def opt(**keys: Any) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 24, "ffn_dim": 36, "num_hidden_layers": 2, "num_attention_heads": 4} | keys
    more = {"max_position_embeddings": 64, "word_embed_proj_dim": sizes["hidden_size"], "pad_token_id": 1}
    return OPTForCausalLM(OPTConfig(**{**HF, **sizes, **more}))


def bert(**keys: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**{**HF, **WIDE, "max_position_embeddings": 64, "pad_token_id": 0, **keys}))


class Block(nn.Module):
    """A pre-norm block of torch's own modules, whose attention is torch's function."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.size = heads, 6
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width, eps=1e-4)
        self.qkv, self.out = nn.Linear(width, 3 * heads * self.size), nn.Linear(heads * self.size, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, tokens, 3, self.heads, self.size).permute(2, 0, 3, 1, 4).unbind()
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, -1))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Plain(nn.Module):
    """A plain module: an embedding, learned positions, blocks, a norm and a head of its own."""

    def __init__(self, width: int = 24, layers: int = 2, heads: int = 4, hidden: int = 36) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def spread_out(module: nn.Module, seed: int = 0) -> nn.Module:
    """Move all parameters away from their initial values, so that zeros, ones and equal biases hide nothing."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=draw).to(p.dtype), alpha=0.1)
    return module


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in start_state(module)}


def task_of(source: nn.Module, target: nn.Module, **more: Any) -> GrowthTask:
    return GrowthTask(source=structure_of(source), target=structure_of(target), tensors=state(source), **more)


@torch.no_grad()
def fill(target: nn.Module, found: Grown, *, eps: bool = True) -> nn.Module:
    """Put what was grown into the target; `eps`: with the epsilon of its norms."""
    for name, tensor in start_state(target):
        if name in found.tensors:
            tensor.copy_(found.tensors[name])
    for weight, value in found.eps.items() if eps else ():
        norm = target.get_submodule(weight.rpartition(".")[0])
        (attribute,) = {"eps", "variance_epsilon"} & vars(norm).keys()
        setattr(norm, attribute, value)
    return target


def logits(module: nn.Module, seed: int = 1) -> Tensor:
    ids = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))
    module.eval()
    with torch.no_grad(), InFloat64():
        out = module(ids)
    return out if isinstance(out, Tensor) else out.logits


def grown(
    make: Callable[..., nn.Module], small: Mapping[str, Any], large: Mapping[str, Any], by: Any, **more: Any
) -> tuple[nn.Module, nn.Module, Grown]:
    """Return source and grown target, both in float64, and what the method returned."""
    torch.manual_seed(0)
    source, target = spread_out(make(**small)).double(), make(**large).double()
    found = grow.build(by).grow(task_of(source, target, **more))
    return source, fill(target, found), found
