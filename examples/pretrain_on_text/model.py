"""A small language model in plain PyTorch. Any nn.Module that maps token ids to logits will do."""

from __future__ import annotations

from torch import Tensor, nn


class Net(nn.Module):
    """Token ids (batch, tokens) in, logits (batch, tokens, vocabulary) out; Gossamer computes the loss."""

    def __init__(self, vocab_size: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.rnn = nn.GRU(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(input_ids))
        return self.head(hidden)


def make(vocab_size: int, width: int = 128, layers: int = 2) -> Net:
    """Return the model. Gossamer passes `vocab_size` (the tokenizer's); the rest is model.config in run.yaml."""
    return Net(vocab_size, width, layers)
