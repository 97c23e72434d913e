"""Train from Python with a metric, callbacks, early stopping and the best checkpoint: python callbacks_and_metrics.py

The run ends by itself when the metric has not improved in three evaluations, or when the callback says so.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gossamer


class Net(nn.Module):
    """Token ids (batch, tokens) in, logits (batch, tokens, vocabulary) out."""

    def __init__(self, vocab_size: int = 257, width: int = 96) -> None:  # 256 bytes and the end of a document
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(input_ids))
        return self.head(hidden)


def accuracy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many bytes were predicted right, and how many there were: both are summed over batches and ranks."""
    valid = labels != -100
    return ((logits.argmax(-1) == labels) & valid).sum(), valid.sum()


class Notes:
    """An object whose methods are called with the records of the run. `on_save` and `on_end` may be there, too."""

    def on_evaluation(self, record: gossamer.spec.records.Evaluation) -> None:
        print(f"step {record.step}: {record.metrics['accuracy']:.1%} of the held-out bytes predicted right")


def enough(record: gossamer.spec.records.Record) -> str | None:
    """A callback may be a function, too: of every step, evaluation, checkpoint, and the end."""
    return "stop" if record.kind == "step" and record.loss < 1.0 else None


def main() -> None:
    torch.manual_seed(0)
    result = gossamer.train(
        Net(),
        "stdlib",  # the source code of Python's own library; or "text:corpus/*.txt"
        {
            "data": {"sequence": 64},
            "train": {
                "steps": 200,
                "batch": 16,
                "optimizer": {"adamw": {"lr": 5e-3}},
                "evaluate_every": 40,
                "evaluate_sequences": 128,
                "metrics": ["callbacks_and_metrics:accuracy"],  # module:function, found beside this file
                "keep_best": {"highest": "accuracy"},
                "early_stop": {"patience": 3, "monitor": {"highest": "accuracy"}},
            },
            "run": {"display": "quiet"},
        },
        callbacks=[Notes(), enough],
    )
    curve = result.evaluations["validation"]  # arrays: .steps, .losses, .bits_per_byte, .metrics
    best = gossamer.load(result["directory"], Net(), checkpoint="best")
    print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}; the best checkpoint is of step {best.step}")
    assert curve.metrics["accuracy"].max() == curve.metrics["accuracy"][list(curve.steps).index(best.step)]


if __name__ == "__main__":
    main()
