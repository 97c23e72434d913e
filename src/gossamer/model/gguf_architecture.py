"""The models of transformers that llama.cpp runs alike: names of tensors, sizes and rotary embedding in a GGUF file.

Sources: llama.cpp, conversion/llama.py, conversion/qwen.py, src/models/llama.cpp, src/models/qwen2.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.spec.errors import BadInput, bad_input

_DO = "export with --to hf"
_FIXED = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_TOLERANCE = 1e-5  # of rotary frequencies, computed there in float32 by another order of operations


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """A model of transformers as llama.cpp knows it: `name` there, and how its q and k rows are ordered."""

    name: str
    has_permuted_rows: bool  # llama.cpp rotates neighbours, transformers the two halves of a head
    has_frequency_factors: bool  # reads rope_freqs.weight


_KNOWN = {
    "LlamaForCausalLM": GgufArchitecture("llama", has_permuted_rows=True, has_frequency_factors=True),
    "MistralForCausalLM": GgufArchitecture("llama", has_permuted_rows=True, has_frequency_factors=True),
    "Qwen2ForCausalLM": GgufArchitecture("qwen2", has_permuted_rows=False, has_frequency_factors=False),
}


def architecture_of(module: nn.Module) -> GgufArchitecture:
    """Return the architecture of a model of transformers. Raises BadInput if llama.cpp has no proved equal of it."""
    kind = type(module)
    known = _KNOWN.get(kind.__name__)
    if known is None or not kind.__module__.startswith("transformers.models."):  # a subclass has a forward of its own
        raise bad_input(
            wanted=f"a model that is exported to GGUF: {', '.join(_KNOWN)} of transformers",
            got=f"{kind.__module__}.{kind.__qualname__}",
            do=_DO,
        )
    return known


def gguf_name(name: str) -> str | None:
    """Return the name in a GGUF file of a tensor named as in transformers; None if it has no place there."""
    if (match := _BLOCK.fullmatch(name)) is not None:
        place = _IN_BLOCK.get(match[2])
        return None if place is None else f"blk.{match[1]}.{place}.{match[3]}"
    return _FIXED.get(name)


def heads_of(config: Any) -> Mapping[str, int]:
    """Return the numbers of heads by the GGUF name of the projection whose rows they are."""
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Return `rows` (heads * d, ...) with the two halves of each head's rows interleaved, as llama.cpp rotates them.

    A weight, a bias, or the blocks of a quantized weight: blocks lie within rows.
    """
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Return the rows that `permuted` was given."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class GgufSizes:
    """The metadata of a model, its frequency factors if any (float32, (head size / 2,)), and what is left out."""

    fields: Mapping[str, Any]
    frequency_factors: Tensor | None
    notes: tuple[str, ...]


def sizes_of(module: Any, architecture: GgufArchitecture) -> GgufSizes:
    """Return what a GGUF file says of the sizes of `module`. Raises BadInput for a setting that has no place there."""
    config, at = module.config, architecture.name
    if config.hidden_act != "silu":
        raise _no_place("hidden_act", config.hidden_act, "silu")
    heads, width = config.num_attention_heads, config.hidden_size
    head = getattr(config, "head_dim", None) or width // heads
    context, notes = int(config.max_position_embeddings), []
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < context:
        notes.append(f"context_length is {window}, the sliding window, which {at} has not in llama.cpp")
        context = int(window)
    fields: dict[str, Any] = {
        f"{at}.vocab_size": config.vocab_size,
        f"{at}.context_length": context,
        f"{at}.embedding_length": width,
        f"{at}.block_count": config.num_hidden_layers,
        f"{at}.feed_forward_length": config.intermediate_size,
        f"{at}.attention.head_count": heads,
        f"{at}.attention.head_count_kv": config.num_key_value_heads,
        f"{at}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{at}.rope.dimension_count": head,
    }
    if head * heads != width:
        fields |= {f"{at}.attention.key_length": head, f"{at}.attention.value_length": head}
    rope, factors = _rope(module, architecture, head)
    return GgufSizes({**fields, **rope}, factors, tuple(notes))


def _no_place(key: str, value: object, wanted: str) -> BadInput:
    return bad_input(wanted=f"{key} {wanted}, which is what llama.cpp computes", got=repr(value), do=_DO)


def _rope(module: Any, architecture: GgufArchitecture, head: int) -> tuple[dict[str, Any], Tensor | None]:
    """Return the rotary embedding as fields and factors, compared with the frequencies that the module itself uses."""
    said: dict[str, Any] = dict(module.config.rope_parameters or {})
    kind, base = said.get("rope_type", "default"), float(said["rope_theta"])
    own = module.model.rotary_emb
    used: Tensor = own.inv_freq.detach().float().cpu()
    plain = base ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
    at = f"{architecture.name}.rope"
    fields: dict[str, Any] = {f"{at}.freq_base": base}
    factors: Tensor | None = None
    scaling = 1.0
    there = plain
    if used.shape != plain.shape or said.get("partial_rotary_factor", 1.0) != 1.0:
        raise _no_place("a rotary embedding of", f"{2 * used.numel()} of {head} elements", "whole heads")
    if kind == "linear":
        fields |= _scaling(at, "linear", said)
        there = plain / float(said["factor"])
    elif kind == "llama3" and architecture.has_frequency_factors:
        factors = (plain / used.double()).float()
        there = plain / factors.double()
    elif kind == "yarn":
        fields |= _scaling(at, "yarn", said)
        there, scaling = _yarn(plain, base, said)
    elif kind != "default":
        raise _no_place("rope_type", kind, f"default, linear, llama3 or yarn ({architecture.name})")
    apart = float((there / used.double() - 1).abs().max())
    if apart > _TOLERANCE or abs(scaling / own.attention_scaling - 1) > _TOLERANCE:
        raise _no_place("a rotary embedding", said, f"as {kind} there: frequencies differ by {apart:.1g}")
    return fields, factors


def _scaling(at: str, kind: str, said: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {f"{at}.scaling.type": kind, f"{at}.scaling.factor": float(said["factor"])}
    if kind == "yarn":
        fields[f"{at}.scaling.original_context_length"] = int(said["original_max_position_embeddings"])
    return fields


def _yarn(plain: Tensor, base: float, said: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Return the frequencies and the scale of cos and sin that ggml computes for YaRN with its default settings.

    ggml.c, rope_yarn; YaRN, Peng et al. 2023, arxiv.org/abs/2309.00071.
    """
    head, factor = 2 * plain.numel(), float(said["factor"])
    context = float(said["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return head * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(0.0, math.floor(dimension(32.0)))
    high = min(head - 1.0, math.ceil(dimension(1.0)))
    ramp = ((torch.arange(head // 2, dtype=torch.float64) - low) / max(0.001, high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), 1 + 0.1 * math.log(factor)
