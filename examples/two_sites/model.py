"""A small language model: token ids (batch, tokens) in, logits (batch, tokens, vocabulary) out."""

from __future__ import annotations

from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(input_ids))
        return self.head(hidden)


def make(vocab_size: int, width: int = 96) -> Net:
    return Net(vocab_size, width)
