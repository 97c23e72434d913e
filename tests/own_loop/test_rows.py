"""What ranks tell each other of a loss: one of them may not answer for another."""

from __future__ import annotations

import pytest
import torch

from gossamer.own_loop.reading import Counted, Kind
from gossamer.own_loop.rows import BACKWARD, Mark, Row, Rows
from gossamer.spec.errors import BadInput


def told(*counted: tuple[Kind, float]) -> Rows:
    rows = [
        Row.of(BACKWARD, 1, Counted(kind, (count,), said=f"a sum / {count:g}"), Mark(1, 7), beside=(1.0,))
        for kind, count in counted
    ]
    return Rows.of(torch.stack([row.tensor() for row in rows]), 0, rows[0])


@pytest.mark.parametrize(
    "counted",
    [
        [(Kind.DIVIDED, 4), (Kind.DIVIDED, 4)],
        [(Kind.MEAN, 4), (Kind.DIVIDED, 4)],
        [(Kind.DIVIDED, 4), (Kind.MEAN, 4), (Kind.MEAN, 4)],
        [(Kind.DIVIDED, 4), (Kind.MEAN, 0)],
    ],
)
def test_a_divisor_that_is_the_same_everywhere_may_be_a_constant(counted: list[tuple[Kind, float]]) -> None:
    with pytest.raises(BadInput, match="by a constant"):
        told(*counted).check()


@pytest.mark.parametrize(
    "counted",
    [
        [(Kind.DIVIDED, 4), (Kind.DIVIDED, 3)],
        [(Kind.MEAN, 4), (Kind.DIVIDED, 3)],
        [(Kind.MEAN, 4), (Kind.MEAN, 4)],
        [(Kind.MEAN, 4), (Kind.DIVIDED, 0)],
    ],
)
def test_ranks_whose_divisors_differ_have_counted(counted: list[tuple[Kind, float]]) -> None:
    rows = told(*counted)
    rows.check()
    assert rows.kind is Kind.MEAN
    total = sum(count for _, count in counted)
    assert rows.shares.tolist() == [count / total for _, count in counted]
