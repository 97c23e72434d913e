"""What ranks tell each other of a loss: one of them may not answer for another."""

from __future__ import annotations

import pytest
import torch

from gossamer.loss_reader.count import Kind, LossCount
from gossamer.own_loop.status_rows import BACKWARD, RowMark, StatusRow, StatusRows
from gossamer.spec.errors import BadInput


def told(*counted: tuple[Kind, float]) -> StatusRows:
    rows = [
        StatusRow.of(BACKWARD, 1, LossCount(kind, (count,), said=f"a sum / {count:g}"), RowMark(1, 7), beside=(1.0,))
        for kind, count in counted
    ]
    return StatusRows.of(torch.stack([row.tensor() for row in rows]), 0, rows[0])


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
    with pytest.raises(BadInput, match="a count of each rank's labels or a constant"):
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


def of(counts: list[float], rows: list[int], least: list[bool], strangers: list[int]) -> StatusRows:
    found = [
        LossCount(Kind.MEAN, (count,), said=f"a sum / {count:g}", is_least=one, rows=many, strangers=met)
        for count, many, one, met in zip(counts, rows, least, strangers, strict=True)
    ]
    told = [StatusRow.of(BACKWARD, 1, one, RowMark(1, 7), beside=(1.0,)) for one in found]
    return StatusRows.of(torch.stack([row.tensor() for row in told]), 0, told[0])


def test_a_divisor_of_one_is_a_count_where_all_ranks_count_rows() -> None:
    of([2, 1], [2, 1], [False, True], [0, 0]).check()
    of([1, 1], [1, 1], [True, True], [0, 0]).check()
    of([3, 0], [2, 2], [False, False], [0, 0]).check()
    for counts, rows in (([3, 1], [2, 1]), ([3, 1], [2, 2]), ([1, 1], [2, 2])):
        with pytest.raises(BadInput, match=r"divided by 1.*max\(1, n\)"):
            of(counts, rows, [False, True], [0, 0]).check()


@pytest.mark.parametrize(
    ("met", "is_alike"), [((0, 0), True), ((5, 5), True), ((5, -1), True), ((5, 6), False), ((5, 0), False)]
)
def test_what_meets_every_row_is_the_same_on_all_ranks(met: tuple[int, int], is_alike: bool) -> None:
    rows = of([4, 4], [4, 4], [False, False], list(met))
    if is_alike:
        rows.check()
        return
    with pytest.raises(BadInput, match="not the same on all ranks"):
        rows.check()
