"""Generate text with the model of a run, in three ways: python generate.py [RUN]

Without RUN (a folder in runs/, or "latest") a small model is trained first.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import gossamer


class Net(nn.Module):
    """Token ids (batch, tokens) in, logits (batch, tokens, vocabulary) out."""

    def __init__(self, vocab_size: int = 257, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(input_ids))
        return self.head(hidden)


def make(vocab_size: int) -> Net:
    return Net(vocab_size)


def small_run() -> str:
    """Train for half a minute on the source code of Python's library, and return the run directory."""
    config = {
        "data": {"sequence": 64},
        "train": {"steps": 150, "batch": 16, "optimizer": {"adamw": {"lr": 5e-3}}, "evaluate_every": 0},
        "run": {"display": "quiet"},
    }
    return str(gossamer.train({"factory": "generate:make"}, "stdlib", config)["directory"])


def main() -> None:
    run = sys.argv[1] if len(sys.argv) > 1 else small_run()

    print("1. a function that returns text (gossamer.sample)")
    print("def " + gossamer.sample(run, "def ", tokens=60, temperature=0.7, seed=1))

    print("2. the module, tokenizer and configuration (gossamer.load): your own decoding, here always the likeliest")
    found = gossamer.load(run)
    words = found.words()
    ids = [int(one) for one in words.encode("import ")]
    with torch.no_grad():
        for _ in range(30):
            output = found.module(torch.tensor([ids[-found.config.data.sequence :]]))
            logits = getattr(output, "logits", output)  # models of transformers return an object
            ids.append(int(logits[0, -1].argmax()))
    print(words.decode(ids))

    print("3. how well it predicts a text (gossamer.evaluate)")
    print(f"{gossamer.evaluate(run, [__file__])['bits_per_byte']:.3f} bits per byte of this script")


if __name__ == "__main__":
    main()
