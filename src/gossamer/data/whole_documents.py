"""Conversations as sequences: each stays whole, alone or with others that fit beside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gossamer.data.layout import Packing
from gossamer.data.stream import Int64, Stream


@dataclass(frozen=True)
class WholeDocuments(Packing):
    """The layout of sequences that hold whole documents, padded on the right.

    `starts`, `ends` (documents,): the tokens of each, in the order of the sequences; `before` (sequences + 1,): the
    documents before each sequence.
    """

    starts: Int64
    ends: Int64
    before: Int64
    sequence: int
    joins: bool
    pads: bool = True

    @staticmethod
    def of(starts: Int64, ends: Int64, sequence: int, *, pack: bool) -> WholeDocuments:
        """Return the layout of documents of `sequence` tokens at most; `pack`: several per sequence where they fit."""
        if not pack:
            return WholeDocuments(starts, ends, np.arange(starts.size + 1), sequence, joins=False)
        order, before = best_fit(ends - starts, sequence)
        return WholeDocuments(starts[order], ends[order], before, sequence, joins=True)

    @property
    def count(self) -> int:  # type: ignore[override]
        return self.before.size - 1

    def positions(self, indices: Int64) -> tuple[Int64, NDArray[np.bool_]]:
        at = np.zeros((indices.size, self.sequence), np.int64)
        real = np.zeros((indices.size, self.sequence), np.bool_)
        for row, index in enumerate(indices):
            inside = range(self.before[index], self.before[index + 1])
            tokens = np.concatenate([np.arange(self.starts[d], self.ends[d]) for d in inside])
            at[row, : tokens.size] = tokens
            at[row, tokens.size :] = self.starts[inside[0]]  # the start of a document: no border is seen in padding
            real[row, : tokens.size] = True
        return at, real


def best_fit(sizes: Int64, room: int) -> tuple[Int64, Int64]:
    """Pack sizes into bins of `room`: the largest first, each into the fullest bin that has room (best-fit decreasing).

    Returns the order of the items (n,), and the items before each bin (bins + 1,). Every size is at most `room`. As in
    H. Ding et al., Fewer Truncations Improve Language Modeling, 2024, https://arxiv.org/abs/2404.10830.
    """
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]  # room left -> bins
    rooms = 0  # bit r is set where a bin has r left
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        fitting = rooms >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            number = with_room[left].pop()
            if not with_room[left]:
                rooms &= ~(1 << left)
            bins[number].append(item)
        else:
            left, number = room, len(bins)
            bins.append([item])
        with_room[left - size].append(number)
        rooms |= 1 << (left - size)
    order = np.array([item for one in bins for item in one], np.int64)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(one) for one in bins], dtype=np.int64)])
    return order, before


def learnt_within(stream: Stream, sequence: int) -> tuple[Int64, Int64]:
    """Return the documents with a label in their first `sequence` tokens, and where each document of all is cut.

    The first token of a document is no label. Documents that are not cut have one.
    """
    assert stream.learnt is not None, "of conversations alone"
    ends = np.minimum(stream.ends(), stream.starts + sequence)
    kept = np.ones(ends.size, np.bool_)
    for document in np.flatnonzero(ends < stream.ends()):
        kept[document] = stream.learnt[stream.starts[document] + 1 : ends[document]].any()
    return np.flatnonzero(kept), ends
