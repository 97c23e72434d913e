"""What every habit uses: a small net of four blocks, and what it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, WIDTH, DEPTH = 31, 16, 4
ROWS, LENGTH = 32, 10
STEPS, BATCH, MICROBATCHES, SEED, RATE = 4, 8, 4, 3, 0.05
EVALUATE_EVERY, EVALUATED, SAMPLED = 2, 12, 12  # steps, sequences, tokens


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.mix(x))


class Net(nn.Module):
    """Embedding, four blocks, head. `between` is what its code does with what a block gives."""

    def __init__(self, block: Callable[[], nn.Module] = Block, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        for number, block in enumerate(self.blocks):
            x = self.between(number, block(x))
        return self.head(x)

    def between(self, number: int, x: Any) -> Tensor:
        return x


class Rows(Dataset[dict[str, Tensor]]):
    """Tokens. The last labels of every third row count for nothing, so micro-batches have unequal numbers of them."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(5)
        self.ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=draw)
        self.labels = self.ids.clone()
        self.labels[::3, 6:] = -100

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Padded(Rows):
    """With a mask: every third row ends early."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (self.labels[index] != -100).long()
        return {"input_ids": self.ids[index] * mask, "attention_mask": mask, "labels": self.labels[index]}


def write_texts(folder: Path) -> dict[str, Any]:
    """Some files of words in a folder; what the section `data` says of them."""
    draw = torch.Generator().manual_seed(9)
    words = ("the", "a", "red", "blue", "old", "cat", "dog", "tree", "runs", "sees", "eats", "finds", "and", "not")
    (folder / "texts").mkdir()
    for number in range(12):
        chosen = torch.randint(len(words), (40,), generator=draw).tolist()
        (folder / "texts" / f"{number}.txt").write_text(" ".join(words[i] for i in chosen) + ".\n")
    return {
        "source": f"text:{folder}/texts/*.txt",
        "tokenizer": "byte",
        "sequence": LENGTH,
        "validation": 0.3,
        "cache": str(folder / "cache"),
    }
