import lzma
import math
import zlib
from collections import Counter

import numpy as np
import pytest

from gossamer.data import statistics
from gossamer.data.entropy import context_bits
from gossamer.spec.errors import BadInput


def slow_order2(train: bytes, told: bytes) -> float:
    """The equations of the docstring, one byte at a time."""
    counts = [Counter(train[i : i + w] for i in range(len(train) - w + 1)) for w in (1, 2, 3)]
    total = 0.0
    for at, byte in enumerate(told):
        p = (counts[0][bytes([byte])] + 1) / (len(train) + 256)
        for width in range(1, min(at, 2) + 1):
            context = told[at - width : at]
            followers = {code: n for code, n in counts[width].items() if code[:-1] == context}
            if followers:
                n, kinds = sum(followers.values()), len(followers)
                p = (followers.get(context + bytes([byte]), 0) + kinds * p) / (n + kinds)
        total -= math.log2(p)
    return total / len(told)


@pytest.mark.parametrize("told", [b"abracadabra cad", b"x", b"xy", b"zzz\xff\x00"])
def test_order2_is_the_written_model(told: bytes) -> None:
    train = b"abracadabra abracadabra, a cadabra"
    assert statistics(train, told).order2 == pytest.approx(slow_order2(train, told), rel=1e-12)


@pytest.mark.parametrize("train", [b"", b"a", b"ab", b"aab"])
def test_the_models_are_fair_codes(train: bytes) -> None:
    """Probabilities of all bytes after any context add up to one."""
    for context in (b"", b"a", b"aa", b"qa", b"aq"):
        bits = [context_bits(train, context + bytes([b]))[1] * (len(context) + 1) for b in range(256)]
        before = context_bits(train, context)[1] * len(context) if context else 0.0
        assert sum(2 ** (before - b) for b in bits) == pytest.approx(1, rel=1e-9)


def test_known_texts() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8).tobytes()
    found = statistics(noise, noise[: 1 << 14])
    assert 7.9 < found.order0 < 8.01
    cycle = b"abcd" * 4096
    found = statistics(cycle, cycle[:4000])
    assert found.order0 == pytest.approx(2, abs=0.05) and found.order2 < 0.02
    assert found.zlib == 8 * len(zlib.compress(cycle[:4000], 9)) / 4000
    assert found.xz == 8 * len(lzma.compress(cycle[:4000], preset=6)) / 4000


def test_nothing_to_measure() -> None:
    with pytest.raises(BadInput, match=r"data\.validation"):
        statistics(b"abc", b"")
