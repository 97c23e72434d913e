"""Small models of several kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "qwen3": SIZES | {"head_dim": 8},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}
VOCABULARY = 257
LLAMA: dict[str, Any] = {  # as run.yaml has it, large enough for blocks that differ in memory
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def batch(rows: int = 2, sequence: int = 16, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, sequence), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


class Plain(nn.Module):
    """Embedding, blocks with dropout, head tied to the embedding; forward(x) gives logits."""

    def __init__(self, width: int = 16, layers: int = 3, dropout: float = 0.3, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(h)
        return logits


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = h + self.drop(torch.tanh(self.mix(h)))
        return out
