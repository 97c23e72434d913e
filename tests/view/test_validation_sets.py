"""Runs with several validation sets, as lists, comparisons and reports of runs show them: the first one leads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gossamer.spec.records import Evaluation, Record
from gossamer.view.comparison import Comparison
from gossamer.view.report.chart import Chart
from gossamer.view.report.curves import loss
from gossamer.view.run_glance import glance
from view.streams import run, start, step
from view.test_comparison import history


def evaluations(number: int, *names: str) -> list[Record]:
    return [
        Evaluation(step=number, loss=n + number / 100, bits_per_byte=n + 1.0, sequences=8, seconds=1.0, name=name)
        for n, name in enumerate(names)
    ]


def two_sets(*names: str) -> Iterator[Record]:
    yield start()
    for number in (1, 2, 3):
        yield step(number)
        yield from evaluations(number, *names)
    yield start(2)
    yield step(3)
    yield from evaluations(3, *names)


def test_the_first_set_is_that_of_lists_and_comparisons(tmp_path: Path) -> None:
    one = history(tmp_path / "a", two_sets("part", "books"))
    assert [(each.name, each.step) for each in one.evaluations] == [("part", 1), ("part", 2), ("part", 3)]
    assert {name: [each.step for each in rows] for name, rows in one.other_sets.items()} == {"books": [1, 2, 3]}
    assert glance(one.run).validation_loss == one.summary["validation_loss"] == one.evaluations[-1].loss == 0.03
    other = history(tmp_path / "b", two_sets("books", "part"))
    said = Comparison.of([one, other]).warnings
    assert "The evaluations are of different validation sets: books, part." in said


def test_a_report_draws_every_set_by_its_name(tmp_path: Path) -> None:
    charts = [one for one in loss(history(tmp_path / "a", two_sets("part", "books"))) if isinstance(one, Chart)]
    assert [[curve.name for curve in one.curves] for one in charts] == [
        ["training", "part", "books"],
        ["part", "books"],
    ]
    (first, *_) = (one for one in loss(history(tmp_path / "b", run(100))) if isinstance(one, Chart))
    assert [curve.name for curve in first.curves] == ["training", "validation"]
