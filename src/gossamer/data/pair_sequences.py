"""Preference pairs as sequences: the two answers of a pair are neighbors, in any batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gossamer.data.ordering import Order, SampleOrder
from gossamer.data.packing import LABELS, Indices, Sequences, Split
from gossamer.data.stream import Int64, Stream
from gossamer.data.whole_documents import WholeDocuments

ANSWERS = "loss.answers"  # read by the loss alone: no parameter of a forward can have this name


@dataclass(frozen=True)
class PairSequences(Sequences):
    """The sequences of one side of a source of pairs: number 2 p is the chosen answer of pair p, 2 p + 1 the rejected.

    `inner`: the same sequences as conversations.
    """

    inner: Split
    sequence: int
    fingerprint: str
    together: int = 2
    labels: str = ANSWERS

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, indices: Indices) -> dict[str, Tensor]:
        """Return `input_ids`, `attention_mask` and `loss.answers`: the labels of the answers, int64 (n, sequence).

        They are not called labels: a model that computes a loss of labels itself would do so in vain.
        """
        found = self.inner.batch(indices)
        return {ANSWERS if name == LABELS else name: values for name, values in found.items()}

    def bytes_of(self, indices: Indices) -> int:
        """Return 0: the loss of pairs is no code length, so it has no bits per byte."""
        return 0

    def labels_of(self, indices: Indices) -> Int64:
        return self.inner.labels_of(indices)

    def tokens_of(self, index: int) -> int:
        return self.inner.tokens_of(index)

    def is_marked(self, index: int) -> bool:
        return True

    def streams(self) -> tuple[Stream, ...]:
        return self.inner.streams()

    def order(self, seed: int) -> Order:
        return PairOrder(SampleOrder(seed, len(self) // 2))

    def first(self, count: int) -> Int64:
        return np.arange(min(count // 2 * 2, len(self)))


@dataclass(frozen=True)
class PairOrder:
    """The order of samples of pairs: global indices 2 k and 2 k + 1 are the two answers of one pair.

    `together`: as many neighbors as stay together, of other groups than pairs.
    """

    pairs: SampleOrder
    together: int = 2

    def __call__(self, indices: int | Iterable[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sequence indices of global indices, in their shape (an int gives shape ()); int64."""
        index = np.asarray(indices if isinstance(indices, (int, np.ndarray)) else list(indices), np.int64)
        return self.pairs(np.asarray(index // self.together)) * self.together + index % self.together


def pairs_of(stream: Stream, *, sequence: int, fingerprint: str) -> PairSequences:
    """Return the pairs of a stream, one sequence per answer; pairs that do not fit are left out."""
    kept = fitting_pairs(stream, sequence)
    layout = WholeDocuments.of(stream.starts[kept], stream.ends()[kept], sequence, pack=False)
    return PairSequences(Split(stream, layout, sequence, False, fingerprint), sequence, fingerprint)


def fitting_pairs(stream: Stream, sequence: int) -> Int64:
    """Return the documents (2 n,) of the pairs of which both answers end within `sequence` tokens.

    A pair that is cut would compare answers that were not given.
    """
    fits = (stream.ends() - stream.starts <= sequence).reshape(-1, 2).all(1)
    return np.flatnonzero(np.repeat(fits, 2))
