"""Entropy of a text under simple statistics: the bits per byte a model has to beat to have learned anything."""

from __future__ import annotations

import lzma
import math
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gossamer.spec.errors import BadInput


@dataclass(frozen=True)
class TextStatistics:
    """The entropy of a validation text under four simple codes, each in bits per byte of that text.

    `order0`, `order2`: models of bytes estimated on the training text; `zlib`, `xz`: compression of the validation text
    alone (level 9, preset 6).
    """

    order0: float
    order2: float
    zlib: float
    xz: float


def statistics(train: bytes, validation: bytes) -> TextStatistics:
    """Measure the entropy of the validation text. Raises BadInput when it is empty.

    With n counts in the training text and t(s) the number of different bytes seen after s (Witten-Bell):
        p(c)      = (n(c) + 1) / (bytes + 256)
        p(c | b)  = (n(bc) + t(b) p(c)) / (n(b) + t(b))
        p(c | ab) = (n(abc) + t(ab) p(c | b)) / (n(ab) + t(ab))
    Every byte of the validation text is predicted (the first two by the shorter contexts), so these are fair codes.
    """
    if not validation:
        raise BadInput("there is no validation text to measure: set data.validation above 0", key="data.validation")
    order0, order2 = context_bits(train, validation)
    return TextStatistics(
        order0=order0,
        order2=order2,
        zlib=8 * len(zlib.compress(validation, 9)) / len(validation),
        xz=8 * len(lzma.compress(validation, preset=6)) / len(validation),  # 9 takes 700 MB to say the same
    )


def context_bits(train: bytes, validation: bytes) -> tuple[float, float]:
    """Return (order 0, order 2) bits per byte of a validation text of at least one byte."""
    seen, told = np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8)
    zero = (np.bincount(seen, minlength=256) + 1) / (seen.size + 256)
    one = _refined(_codes(seen, 2), _codes(told, 2), zero[told[1:]])
    two = _refined(_codes(seen, 3), _codes(told, 3), one[1:])
    return _bits(zero[told]), _bits(np.concatenate([zero[told[:1]], one[:1], two]))


def _refined(seen: NDArray[np.uint32], told: NDArray[np.uint32], shorter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Witten-Bell: p of every code of `told` (context and byte in one number) given p under the shorter context."""
    codes, counts = np.unique(seen, return_counts=True)
    contexts = codes >> np.uint32(8)
    cells = 1 << 16  # contexts are one or two bytes
    context_counts = np.bincount(contexts, weights=counts, minlength=cells)
    context_kinds = np.bincount(contexts, minlength=cells)
    count = np.zeros(told.size)
    if codes.size:
        place = np.minimum(np.searchsorted(codes, told), codes.size - 1)
        count = np.where(codes[place] == told, counts[place], 0)
    context = told >> np.uint32(8)
    total, kinds = context_counts[context], context_kinds[context]
    unseen = total == 0
    kinds = np.where(unseen, 1, kinds)  # nothing is known of this context: the shorter one decides
    return np.asarray((count + kinds * shorter) / (total + kinds), np.float64)


def _codes(data: NDArray[np.uint8], width: int) -> NDArray[np.uint32]:
    """(bytes - width + 1,): each run of `width` bytes as one number."""
    count = max(0, data.size - width + 1)
    codes = np.zeros(count, np.uint32)
    for place in range(width):
        codes = (codes << np.uint32(8)) | data[place : place + count]
    return codes


def _bits(probabilities: NDArray[np.float64]) -> float:
    return float(-np.log(probabilities).sum() / math.log(2) / probabilities.size)
