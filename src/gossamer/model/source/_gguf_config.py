"""What transformers does not read from a GGUF file into the config of a Llama-like model: rotary scaling, biases.

Without them the model would be built with plain frequencies, and the biases in the file would be left out, silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gossamer.model.gguf_architecture import gguf_name
from gossamer.spec.errors import BadInput, bad_input

_LLAMA_LIKE = ("llama", "mistral", "qwen2")
_FACTORS = "rope_freqs.weight"
_LOW, _HIGH = 1.0, 4.0  # of every published model with llama3 scaling; other pairs have equals with another context


def complete(config: Any, opened: Any) -> None:
    """Set the keys of `config` that the file `opened` (a GGUFReader) holds and transformers leaves out.

    Raises BadInput for a tensor or a scaling that the model would not use.
    """
    if config.model_type not in _LLAMA_LIKE:
        return
    names = {tensor.name for tensor in opened.tensors}
    if config.model_type == "llama":
        config.attention_bias = "blk.0.attn_q.bias" in names
        config.mlp_bias = "blk.0.ffn_gate.bias" in names
    _check_places(names - {_FACTORS}, config)
    rope = dict(config.rope_parameters)
    fields = _scaling(opened)
    kind = str(fields.get("type", "none"))
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(fields["factor"])}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = int(fields["original_context_length"])
    elif kind != "none":
        raise _unread(f"rope scaling {kind}")
    if others := sorted(fields.keys() - {"type", "factor", "original_context_length", "finetuned"}):
        raise _unread(f"rope.scaling.{others[0]}")
    if _FACTORS in names:
        found = next(tensor for tensor in opened.tensors if tensor.name == _FACTORS)
        rope |= _llama3(np.asarray(found.data, np.float32).ravel(), float(rope["rope_theta"]))
    config.rope_parameters = rope


def _unread(what: str) -> BadInput:
    return bad_input(
        wanted="a GGUF file whose rotary embedding and tensors all have a place in the model",
        got=what,
        do="give the model's safetensors by model.hf",
    )


def _scaling(opened: Any) -> dict[str, Any]:
    """Return the fields of the architecture under rope.scaling."""
    inside = ".rope.scaling."
    return {key.partition(inside)[2]: field.contents() for key, field in opened.fields.items() if inside in key}


def _check_places(names: set[str], config: Any) -> None:
    """Raise BadInput for a tensor that no parameter of the model has the name of."""
    known = {gguf_name(f"{name}.weight") for name in ("model.embed_tokens", "model.norm", "lm_head")}
    for layer in range(config.num_hidden_layers):
        block = f"model.layers.{layer}"
        known |= {gguf_name(f"{block}.{name}.weight") for name in (*_NORMS, *_ATTENTION, *_MLP)}
        known |= {gguf_name(f"{block}.{name}.bias") for name in _biased(config)}
    if unknown := sorted(names - known):
        raise _unread(f"{unknown[0]} ({len(unknown)} in all), which a {config.model_type} of transformers lacks")


_NORMS = ("input_layernorm", "post_attention_layernorm")
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def _biased(config: Any) -> tuple[str, ...]:
    """Return the projections of a block that have a bias in transformers."""
    if config.model_type == "qwen2":
        return _ATTENTION[:3]
    if config.model_type == "llama":
        return (*(_ATTENTION if config.attention_bias else ()), *(_MLP if config.mlp_bias else ()))
    return ()


def _llama3(factors: NDArray[np.float32], base: float) -> Mapping[str, Any]:
    """Return the parameters of llama3 scaling that give these factors. Raises BadInput if there are none."""
    if bool((factors == 1).all()):
        return {}
    largest = float(factors.max())
    for context in (2**power for power in range(3, 24)):
        if np.allclose(_factors(len(factors), base, largest, context), factors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": context,
            }
    raise _unread(f"factors of rotary frequencies ({_FACTORS}) that llama3 scaling does not give")


def _factors(count: int, base: float, factor: float, context: int) -> NDArray[np.float64]:
    """Return what llama3 scaling divides the frequencies by (transformers, modeling_rope_utils)."""
    wavelengths = 2 * math.pi * base ** (torch.arange(count, dtype=torch.float64) / count)
    smooth = (context / wavelengths - _LOW) / (_HIGH - _LOW)
    between = 1 / ((1 - smooth) / factor + smooth)
    found = torch.where(wavelengths > context / _LOW, factor, between)
    return torch.where(wavelengths < context / _HIGH, 1.0, found).numpy()
