"""What every method trains: a GPT-2 of 17.4 million parameters on the source of Python's own library."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.data import Corpus, SampleOrder, open_corpus

ROWS, SEQUENCE, VOCABULARY = 4, 256, 8192  # sequences per rank and step; tokens per sequence
PARAMETERS = 17_440_512
MODEL: dict[str, Any] = {
    "n_embd": 384,
    "n_layer": 8,
    "n_head": 6,
    "n_positions": SEQUENCE,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
}
GPT2: dict[str, Any] = {"hf": "gpt2", "config": MODEL}  # as a run.yaml says it
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


def gpt2(seed: int = SEED) -> nn.Module:
    """The model with random weights that are a function of `seed`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    last = VOCABULARY - 1
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=last, eos_token_id=last, **MODEL))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS
    return model.train()


def rows_of(step: int, rank: int, hosts: int, seed: int = SEED) -> dict[str, Tensor]:
    """What `rank` computes in `step`: the order Gossamer's own runs have."""
    split = corpus().train
    first = (step * hosts + rank) * ROWS
    return split.batch(SampleOrder(seed, len(split))(np.arange(first, first + ROWS)))
