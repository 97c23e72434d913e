"""A preview of the training sequences as text, before training starts."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.data.ordering import SampleOrder
from gossamer.data.packing import Split
from gossamer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Preview:
    """One training sequence as text.

    `tokens` counts without padding; `labels` of them are valid labels, standing for `bytes` of text.
    """

    index: int
    text: str
    tokens: int
    labels: int
    bytes: int


def decode_preview(split: Split, tokenizer: Tokenizer, *, seed: int, count: int = 3) -> tuple[Preview, ...]:
    """Return the first `count` sequences of a run with this seed as text (fewer where the split has fewer)."""
    if not len(split):
        return ()
    order = SampleOrder(seed, len(split))
    return tuple(_preview(split, tokenizer, int(order(n))) for n in range(min(count, len(split))))


def _preview(split: Split, tokenizer: Tokenizer, index: int) -> Preview:
    batch = split.batch([index])
    ids = batch["input_ids"][0]
    tokens = int(batch["attention_mask"].sum()) if "attention_mask" in batch else len(ids)
    return Preview(
        index=index,
        text=tokenizer.decode(ids[:tokens].numpy()),
        tokens=tokens,
        labels=int(split.labels_of([index])[0]),
        bytes=split.bytes_of([index]),
    )
