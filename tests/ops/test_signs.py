"""Directions by counting: what the docstring says, number by number, wherever a block ends; sums term by term."""

from __future__ import annotations

import math

import pytest
import torch

from gossamer.ops.random_signs import BLOCK, signed_sums

CPU = torch.device("cpu")
KEY = 0xDEADBEEFCAFEBABE
MASK = 2**64 - 1


def whole(numel: int, *terms: tuple[int, float]) -> torch.Tensor:
    pieces = list(signed_sums(numel, terms, CPU))
    found = torch.full((numel,), math.nan)
    for where, piece in pieces:
        found[where] = piece
    return found


def splitmix(key: int, number: int) -> int:
    """Output `number`, in Python's own integers."""
    x = (key + (number + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def entry(key: int, index: int, numel: int) -> float:
    block, place = divmod(index, BLOCK)
    words = -(-min(BLOCK, numel - block * BLOCK) // 32)
    word = splitmix(key, block * BLOCK // 32 + place % words) >> 32
    return -1.0 if (word >> (31 - place // words)) & 1 else 1.0


def test_splitmix64_is_the_published_one() -> None:
    """The first outputs from 1234567, as its authors' test vectors have them."""
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix(1234567, i) for i in range(4)] == wanted


@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 1000, BLOCK, BLOCK + 77, 2 * BLOCK + 1])
def test_every_entry_is_its_equation(numel: int) -> None:
    found = whole(numel, (KEY, 1.0))
    places = range(numel) if numel < 2000 else [*range(0, numel, 997), BLOCK - 1, numel - 1]
    assert all(found[i] == entry(KEY, i, numel) for i in places)


def test_terms_are_added_in_their_order() -> None:
    terms = [(3, 1e8), (-5, 0.3), (KEY, 1e-8), (7, -1.7)]
    wanted = torch.zeros(5000)
    for key, value in terms:
        wanted += whole(5000, (key, value))
    assert torch.equal(whole(5000, *terms), wanted)
    assert not whole(5000).any()


def test_directions_are_balanced_and_unlike_each_other_and_themselves() -> None:
    numel = 1 << 20
    one, other = whole(numel, (1, 1.0)), whole(numel, (2, 1.0))
    lags = (1, 2, 32, 64, BLOCK // 32, BLOCK)
    means = [one.mean(), (one * other).mean(), *((one[:-lag] * one[lag:]).mean() for lag in lags)]
    assert all(abs(float(mean)) < 5 / math.sqrt(numel) for mean in means)
