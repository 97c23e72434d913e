"""What is said of a gradient that is another one, entry by entry."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gossamer.proof.entries import told_of_entries

WANTED = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))


def poked(row: int, column: int, value: float) -> Tensor:
    changed = WANTED.clone()
    changed[row, column] = value
    return changed


def rows(low: int, high: int, factor: float) -> Tensor:
    changed = WANTED.clone()
    changed[low : high + 1] *= factor
    return changed


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (0.5 * WANTED, "36 of 36 entries differ: they are 0.5 times what they should be (a mean over 2 is taken"),
        (2 * WANTED, "they are 2 times what they should be (a part is added 2 times"),
        (-WANTED, "they are -1 times what they should be (the sign is flipped)"),
        (0 * WANTED, "36 of 36 entries differ: all entries are zero, no gradient arrives"),
        (rows(2, 3, 0.0), "12 of 36 entries differ, all in rows 2 to 3: these are zero, a part is missing"),
        (rows(4, 4, 0.75), "6 of 36 entries differ, all in row 4: they are 0.75 times what they should be"),
        (rows(1, 2, 3.0).T.contiguous().T, "all in rows 1 to 2: they are 3 times"),
        (WANTED.T, "the gradient is transposed"),
        (
            WANTED[[1, 0, 2, 3, 4, 5]],
            "12 of 36 entries differ, all in rows 0 to 1: they are the same numbers in another",
        ),
        (WANTED.bfloat16().float(), "they are rounded to bfloat16"),
        (poked(3, 5, math.nan), f"entry [3, 5] is nan, {float(WANTED[3, 5]):.6g} in one process"),
        (poked(3, 5, math.nan), "1 of 36 entries differ, all in row 3: 1 are not finite"),
    ],
)
def test_what_it_looks_like(got: Tensor, said: str) -> None:
    assert said in told_of_entries(got, WANTED, 1e-6)


def test_the_entry_that_is_furthest_off_comes_with_both_values() -> None:
    told = told_of_entries(poked(1, 4, 7.5), WANTED, 1e-6)
    assert told.startswith(f"entry [1, 4] is 7.5, {float(WANTED[1, 4]):.6g} in one process; 1 of 36 entries differ")


def test_a_single_number_has_an_entry() -> None:
    assert told_of_entries(torch.tensor(2.0), torch.tensor(1.0), 1e-6).startswith("entry [0] is 2, 1 in one")
