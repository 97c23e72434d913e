"""What every method trains: a GPT of 14.4 million parameters, as a plain module, on the source of Python's library."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.data import Corpus, SampleOrder, open_corpus
from gossamer.model.origin import origin_of
from gossamer.spec.config import ModelSection

STAGES, MICROBATCHES, SEQUENCE = 4, 8, 256
WIDTH, HEADS, BLOCKS = 384, 6, 8
LR, DECAY, BETAS = 3e-4, 0.1, (0.9, 0.95)
ADAMW = {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "decay_1d": True}  # as torch's own, which the peer has
SEED = 0
DATA = {"source": "stdlib", "tokenizer": "byte", "sequence": SEQUENCE, "validation": 0.0}
MODEL: dict[str, Any] = {"factory": "pipeline.setting:Gpt"}
CUTS = ["embed", *(f"blocks.{BLOCKS * stage // STAGES}" for stage in range(1, STAGES))]


class Block(nn.Module):
    """Attention and a network of two layers, each on the normed stream and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.read(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split.unbind(0), is_causal=True)
        x = x + self.write(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Embed(nn.Module):
    """Tokens and their places."""

    def __init__(self, vocabulary: int, sequence: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]


class Gpt(nn.Module):
    """Returns logits."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = Embed(vocabulary, SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@cache
def corpus() -> Corpus:
    """Made once into the user's cache, and read from there by every process."""
    return open_corpus(**DATA)


def whole() -> Gpt:
    """The model as ours begins with it, bit for bit."""
    origin = origin_of(ModelSection(**MODEL)).fitted_to_tokenizer(
        corpus().tokenizer.vocabulary, corpus().tokenizer.separator
    )
    module = origin.build(SEED)
    assert isinstance(module, Gpt)
    return module


def stage_of(module: Gpt, stage: int) -> nn.Sequential:
    """What a stage of the peer runs; the borders are those of CUTS."""
    borders = [BLOCKS * s // STAGES for s in range(STAGES + 1)]
    parts: list[nn.Module] = list(module.blocks[borders[stage] : borders[stage + 1]])
    if stage == 0:
        parts.insert(0, module.embed)
    if stage == STAGES - 1:
        parts += [module.norm, module.head]
    return nn.Sequential(*parts)


def batch_of(step: int, rows: int) -> dict[str, Tensor]:
    """`input_ids` and `labels` of a step, (rows, SEQUENCE), in the order that Gossamer's own runs have."""
    split = corpus().train
    return split.batch(SampleOrder(SEED, len(split))(np.arange(step * rows, (step + 1) * rows)))
