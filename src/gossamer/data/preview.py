"""A preview of the training sequences as text, before training starts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from gossamer.data.packing import IGNORED, Sequences
from gossamer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Preview:
    """One training sequence as text.

    `tokens` counts without padding; `labels` of them are valid labels, standing for `bytes` of text. Of conversations,
    `learnt` are the passages that are labels, special tokens spelled out; empty where the data is text.
    """

    index: int
    text: str
    tokens: int
    labels: int
    bytes: int
    learnt: tuple[str, ...] = ()


def decode_preview(split: Sequences, tokenizer: Tokenizer, *, seed: int, count: int = 3) -> tuple[Preview, ...]:
    """Return the first `count` sequences of a run with this seed as text (fewer where the split has fewer)."""
    if not len(split):
        return ()
    order = split.order(seed)
    return tuple(_preview(split, tokenizer, int(order(n))) for n in range(min(count, len(split))))


def _preview(split: Sequences, tokenizer: Tokenizer, index: int) -> Preview:
    batch = split.batch([index])
    tokens = split.tokens_of(index)
    ids, labels = (batch[name][0, :tokens].numpy() for name in ("input_ids", split.labels))
    marked = split.is_marked(index)
    return Preview(
        index=index,
        text=tokenizer.spell(ids) if marked else tokenizer.decode(ids),
        tokens=tokens,
        labels=int(split.labels_of([index])[0]),
        bytes=split.bytes_of([index]),
        learnt=_passages(ids, labels != IGNORED, tokenizer) if marked else (),
    )


def _passages(ids: np.ndarray, valid: np.ndarray, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the text of every run of tokens that are labels."""
    runs = groupby(zip(ids.tolist(), valid.tolist(), strict=True), key=lambda one: one[1])
    return tuple(tokenizer.spell([token for token, _ in run]) for learnt, run in runs if learnt)
