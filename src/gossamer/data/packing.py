"""Packing of documents into sequences: the tokens of each sequence, and those of them that are labels.

Windows overlap by one token: the last token of a window, a label there, is the first of the next, where it is only
context. So every token of a split but the first of each document is a label exactly once per epoch, and with it every
byte those tokens stand for. (The end of a packed stream that does not fill a window is left out.) Hence
    bits per byte = sum over labels of -ln p(label) / ln 2 / bytes_of(indices)
holds for any tokenizer. Separators are labels that stand for no byte: the model pays for predicting the end of a text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.data.stream import Int64, Stream

IGNORED = -100  # the label that losses leave out, as in Hugging Face models
Indices: TypeAlias = Iterable[int] | NDArray[np.int64]


class Packing(ABC):
    """The layout of sequences in a token stream."""

    count: int  # sequences
    pads: bool  # whether a sequence may hold fewer tokens than its length

    @abstractmethod
    def windows(self, indices: Int64) -> tuple[Int64, Int64]:
        """Return (first token, number of tokens) of each sequence; both (n,)."""


@dataclass(frozen=True)
class Packed(Packing):
    """The packing of full windows over the complete token stream, across documents."""

    tokens: int
    sequence: int
    pads: bool = False

    @property
    def count(self) -> int:  # type: ignore[override]
        return max(0, self.tokens - 1) // (self.sequence - 1)

    def windows(self, indices: Int64) -> tuple[Int64, Int64]:
        return indices * (self.sequence - 1), np.full_like(indices, self.sequence)


@dataclass(frozen=True)
class PerDocument(Packing):
    """The packing of windows within one document each; its last window may be shorter (two tokens at least)."""

    starts: Int64  # (documents,)
    ends: Int64  # (documents,)
    sequence: int
    pads: bool = True

    @property
    def count(self) -> int:  # type: ignore[override]
        return int(self._before[-1])

    @cached_property
    def _before(self) -> Int64:
        """(documents + 1,): sequences before each document."""
        chunks = -(-(self.ends - self.starts - 1) // (self.sequence - 1))
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(chunks)])

    def windows(self, indices: Int64) -> tuple[Int64, Int64]:
        document = np.searchsorted(self._before, indices, side="right") - 1
        first = self.starts[document] + (indices - self._before[document]) * (self.sequence - 1)
        return first, np.minimum(self.sequence, self.ends[document] - first)


@dataclass(frozen=True)
class Split:
    """The sequences of one side of a corpus, each a pure function of its index. Holds no open file, no state."""

    stream: Stream
    layout: Packing
    sequence: int
    isolate: bool
    fingerprint: str

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self.layout.count

    def batch(self, indices: Indices) -> dict[str, Tensor]:
        """Return `input_ids` and `labels`, both int64 (n, sequence), as Hugging Face models take them.

        Labels are not shifted: the model predicts labels[:, 1:] from the tokens before. IGNORED marks padding and the
        first token of a sequence and of a document (nothing of its own precedes it). Where sequences can be padded,
        `attention_mask` (n, sequence) is 0 on the padding, which is on the right. With `isolate`, `position_ids` (n,
        sequence) restart at every document. transformers makes a block-diagonal mask from them, provided that the model
        runs without a cache (use_cache=False).
        """
        at, real, begins = self._positions(indices)
        ids = self.stream.tokens[at].astype(np.int64)
        ids[~real] = self.stream.separator
        labels = np.where(self._predicted(real, begins), ids, IGNORED)
        found = {"input_ids": ids, "labels": labels}
        if self.layout.pads:
            found["attention_mask"] = real.astype(np.int64)
        elif self.isolate:
            found["position_ids"] = _restarting(begins)
        return {name: torch.from_numpy(values) for name, values in found.items()}

    def bytes_of(self, indices: Indices) -> int:
        """Return the UTF-8 bytes that the valid labels of these sequences stand for."""
        at, real, begins = self._positions(indices)
        return int(self.stream.lengths[at[self._predicted(real, begins)]].sum(dtype=np.int64))

    def labels_of(self, indices: Indices) -> Int64:
        """Return the number of valid labels of each sequence (n,), as `valid_labels` counts them in the batch."""
        _, real, begins = self._positions(indices)
        return np.asarray(self._predicted(real, begins).sum(1), np.int64)

    def _positions(self, indices: Indices) -> tuple[Int64, NDArray[np.bool_], NDArray[np.bool_]]:
        """Return index in the stream, whether there is a token, whether it begins a document; all (n, sequence)."""
        index = np.asarray(indices if isinstance(indices, np.ndarray) else list(indices), np.int64)
        assert index.ndim == 1 and ((index >= 0) & (index < len(self))).all(), f"no such sequences: {index}"
        first, size = self.layout.windows(index)
        column = np.arange(self.sequence)
        real = column < size[:, None]
        at = first[:, None] + np.where(real, column, 0)
        document = np.searchsorted(self.stream.starts, at, side="right") - 1
        return at, real, self.stream.starts[document] == at

    @staticmethod
    def _predicted(real: NDArray[np.bool_], begins: NDArray[np.bool_]) -> NDArray[np.bool_]:
        valid = real & ~begins
        valid[:, 0] = False
        return valid


def split_of(stream: Stream, *, sequence: int, pack: bool, isolate: bool, fingerprint: str) -> Split:
    """Return the split of a token stream under these settings."""
    layout = Packed(stream.tokens.size, sequence) if pack else PerDocument(stream.starts, stream.ends(), sequence)
    return Split(stream, layout, sequence, isolate, fingerprint)


def valid_labels(labels: Tensor) -> Tensor:
    """Return the number of valid labels in (n, sequence) labels: the weight of a micro-batch. Scalar, int64."""
    return (labels[:, 1:] != IGNORED).sum()


def _restarting(begins: NDArray[np.bool_]) -> Int64:
    """(n, sequence) positions that count from 0 at the start of each row and at every True."""
    column = np.arange(begins.shape[1])
    return column - np.maximum.accumulate(np.where(begins, column, 0), axis=1)
