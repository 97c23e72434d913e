"""The tokens of a rendered conversation that are learnt, from the spans of its text that are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gossamer.data.answer_spans import Rendered
from gossamer.data.tokenizer import Spans


@dataclass(frozen=True)
class LearntTokens:
    """The marks of the n tokens of a conversation.

    `learnt` (n,) uint8: 1 where a token stands for any letter of a learnt span. `lengths` (n,) int64: the UTF-8 bytes
    of the answers' own text that each token stands for. `shared`: answers whose first token stands for letters in
    front of them too.
    """

    learnt: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    shared: int


def learnt_tokens(text: Rendered, spans: Spans) -> LearntTokens:
    """Return the marks of the tokens `spans` of a rendered text, which know their letters."""
    assert spans.letters is not None, "rendered_spans gives them"
    first, last = spans.letters[:, 0], spans.letters[:, 1]
    ends = np.cumsum(spans.lengths, dtype=np.int64)  # (n,) in bytes
    starts = ends - spans.lengths
    learnt, lengths, shared = np.zeros(ends.size, np.uint8), np.zeros(ends.size, np.int64), 0
    at, letters = 0, 0  # bytes and letters of the text so far
    for span in text.spans:
        borders = []
        for border in (span.start, span.text_end, span.end):
            at, letters = at + len(text.text[letters:border].encode("utf-8")), border
            borders.append(at)
        start, text_end, _ = borders
        inside = (last > span.start) & (first < span.end)
        learnt[inside] = 1
        shared += bool((inside & (first < span.start)).any())
        lengths += np.clip(np.minimum(ends, text_end) - np.maximum(starts, start), 0, None)
    return LearntTokens(learnt, lengths, shared)
