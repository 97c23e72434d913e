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
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.data.layout import Packed, Packing, PerDocument
from gossamer.data.ordering import Order, SampleOrder
from gossamer.data.stream import Int64, Stream
from gossamer.data.whole_documents import WholeDocuments, learnt_within

LABELS = "labels"
IGNORED = -100  # the label that losses leave out, as in Hugging Face models
Indices: TypeAlias = Iterable[int] | NDArray[np.int64]


class Sequences(ABC):
    """The sequences of one side of a corpus, each a pure function of its index."""

    sequence: int  # tokens in each
    fingerprint: str
    together: int = 1  # neighbors that belong together, in any batch
    labels: str = LABELS  # the key of the labels in a batch

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of sequences."""

    @abstractmethod
    def batch(self, indices: Indices) -> dict[str, Tensor]:
        """Return `input_ids` and `labels`, both int64 (n, sequence), as Hugging Face models take them.

        Labels are not shifted: the model predicts labels[:, 1:] from the tokens before. IGNORED marks padding, what is
        not learnt, and the first token of a sequence and of a document (nothing of its own precedes it). Where
        sequences can be padded, `attention_mask` (n, sequence) is 0 on the padding, which is on the right. With
        `isolate`, `position_ids` (n, sequence) restart at every document, and there is no mask. transformers makes a
        block-diagonal mask from them, provided that the model runs without a cache (use_cache=False).
        """

    @abstractmethod
    def bytes_of(self, indices: Indices) -> int:
        """Return the UTF-8 bytes that the valid labels of these sequences stand for."""

    @abstractmethod
    def labels_of(self, indices: Indices) -> Int64:
        """Return the number of valid labels of each sequence (n,), as `valid_labels` counts them in the batch."""

    @abstractmethod
    def tokens_of(self, index: int) -> int:
        """Return the number of tokens of a sequence, without padding."""

    @abstractmethod
    def is_marked(self, index: int) -> bool:
        """Return whether a part of this sequence alone is learnt, as of conversations."""

    @abstractmethod
    def streams(self) -> tuple[Stream, ...]:
        """Return the token streams that the sequences are cut from."""

    def order(self, seed: int) -> Order:
        """Return the order in which a run with this seed takes the sequences."""
        return SampleOrder(seed, len(self))

    def first(self, count: int) -> Int64:
        """Return the sequences that represent all of them, `count` at most: those that an evaluation computes."""
        return np.arange(min(count, len(self)))


@dataclass(frozen=True)
class Split(Sequences):
    """The sequences of one side of a corpus of one source. Holds no open file, no state."""

    stream: Stream
    layout: Packing
    sequence: int
    isolate: bool
    fingerprint: str

    def __len__(self) -> int:
        return self.layout.count

    def batch(self, indices: Indices) -> dict[str, Tensor]:
        at, real, begins = self._positions(indices)
        ids = self.stream.tokens[at].astype(np.int64)
        ids[~real] = self.stream.separator
        labels = np.where(self._predicted(at, real, begins), ids, IGNORED)
        found = {"input_ids": ids, "labels": labels}
        if (
            self.isolate and self.layout.joins
        ):  # a mask would hide the borders from transformers; no token sees the padding behind it
            found["position_ids"] = _restarting(begins)
        elif self.layout.pads:
            found["attention_mask"] = real.astype(np.int64)
        return {name: torch.from_numpy(values) for name, values in found.items()}

    def bytes_of(self, indices: Indices) -> int:
        at, real, begins = self._positions(indices)
        return int(self.stream.lengths[at[self._predicted(at, real, begins)]].sum(dtype=np.int64))

    def labels_of(self, indices: Indices) -> Int64:
        at, real, begins = self._positions(indices)
        return np.asarray(self._predicted(at, real, begins).sum(1), np.int64)

    def tokens_of(self, index: int) -> int:
        return int(self.layout.positions(np.array([index]))[1].sum())

    def is_marked(self, index: int) -> bool:
        return self.stream.learnt is not None

    def streams(self) -> tuple[Stream, ...]:
        return (self.stream,)

    def _positions(self, indices: Indices) -> tuple[Int64, NDArray[np.bool_], NDArray[np.bool_]]:
        """Return index in the stream, whether there is a token, whether it begins a document; all (n, sequence)."""
        index = np.asarray(indices if isinstance(indices, np.ndarray) else list(indices), np.int64)
        assert index.ndim == 1 and ((index >= 0) & (index < len(self))).all(), f"no such sequences: {index}"
        at, real = self.layout.positions(index)
        document = np.searchsorted(self.stream.starts, at, side="right") - 1
        return at, real, self.stream.starts[document] == at

    def _predicted(self, at: Int64, real: NDArray[np.bool_], begins: NDArray[np.bool_]) -> NDArray[np.bool_]:
        valid = real & ~begins
        valid[:, 0] = False
        return valid if self.stream.learnt is None else valid & (self.stream.learnt[at] == 1)


def split_of(stream: Stream, *, sequence: int, pack: bool, isolate: bool, fingerprint: str) -> Split:
    """Return the split of a token stream under these settings. Conversations stay whole; text is cut in windows."""
    return Split(stream, _layout(stream, sequence, pack=pack), sequence, isolate, fingerprint)


def _layout(stream: Stream, sequence: int, *, pack: bool) -> Packing:
    if stream.learnt is not None:
        kept, ends = learnt_within(stream, sequence)
        return WholeDocuments.of(stream.starts[kept], ends[kept], sequence, pack=pack)
    return Packed(stream.tokens.size, sequence) if pack else PerDocument(stream.starts, stream.ends(), sequence)


def valid_labels(labels: Tensor) -> Tensor:
    """Return the number of valid labels in (n, sequence) labels: the weight of a micro-batch. Scalar, int64."""
    return (labels[:, 1:] != IGNORED).sum()


def _restarting(begins: NDArray[np.bool_]) -> Int64:
    """(n, sequence) positions that count from 0 at the start of each row and at every True."""
    column = np.arange(begins.shape[1])
    return column - np.maximum.accumulate(np.where(begins, column, 0), axis=1)
