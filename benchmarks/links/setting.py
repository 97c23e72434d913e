"""What every method trains: GPT-2 of 17.4 million parameters or a Llama of 12.9, on the source of Python's library."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.data import Corpus, SampleOrder, open_corpus

ROWS, SEQUENCE, VOCABULARY = 4, 256, 8192  # sequences per rank and step; tokens per sequence
_GPT2: dict[str, Any] = {
    "n_embd": 384,
    "n_layer": 8,
    "n_head": 6,
    "n_positions": SEQUENCE,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
}
_LLAMA: dict[str, Any] = {
    "hidden_size": 320,
    "intermediate_size": 896,
    "num_hidden_layers": 6,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "tie_word_embeddings": False,
    "max_position_embeddings": SEQUENCE,
    "use_cache": False,
}
GPT2, LLAMA = "gpt2", "llama"
MODELS: dict[str, dict[str, Any]] = {  # as a run.yaml says them
    GPT2: {"hf": "gpt2", "config": _GPT2},  # tied embeddings
    LLAMA: {"hf": "llama", "config": _LLAMA},  # untied: the head's gradient is ready first, the looked-up rows' last
}
PARAMETERS = {GPT2: 17_440_512, LLAMA: 12_865_600}
DATA = {"source": "stdlib", "tokenizer": f"bpe:{VOCABULARY}", "sequence": SEQUENCE}
LR, CLIP, WEIGHT_DECAY, BETAS = 3e-4, 1.0, 0.1, (0.9, 0.95)  # of the speed rounds
SEED = 0


def tokens(hosts: int) -> int:
    """Per step, of all hosts together."""
    return hosts * ROWS * SEQUENCE


@cache
def corpus() -> Corpus:
    """Tokenized once into the user's cache, and read from there by every process."""
    return open_corpus(**DATA)


def module(name: str = GPT2, seed: int = SEED) -> nn.Module:
    """The model of MODELS with random weights that are a function of `seed`."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    last = VOCABULARY - 1
    common = {"vocab_size": VOCABULARY, "bos_token_id": last, "eos_token_id": last}
    if name == GPT2:
        model: nn.Module = GPT2LMHeadModel(GPT2Config(**common, **_GPT2))
    else:
        model = LlamaForCausalLM(LlamaConfig(**common, **_LLAMA))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    return model.train()


def rows_of(step: int, rank: int, hosts: int, seed: int = SEED) -> dict[str, Tensor]:
    """What `rank` computes in `step`: the order Gossamer's own runs have."""
    split = corpus().train
    first = (step * hosts + rank) * ROWS
    return split.batch(SampleOrder(seed, len(split))(np.arange(first, first + ROWS)))
