"""Folding records into figures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gossamer.spec.records import Length, Saved
from gossamer.view.curve import POINTS, Curve, Frame, draw
from gossamer.view.fraction import part_of
from gossamer.view.progress import Doubtful, RunProgress
from view.streams import STEP_S, run, start, step


def fold(*records: object) -> RunProgress:
    progress = RunProgress()
    for record in records:
        progress.add(record)  # type: ignore[arg-type]
    return progress


def test_figures_of_a_run_under_way() -> None:
    progress = fold(*run(200, until=150, ends=False))
    assert (progress.steps_done, progress.steps, progress.fraction) == (150, 200, 0.75)
    assert progress.pace.tokens_per_s == pytest.approx(4096 / STEP_S)
    assert progress.of_peak == pytest.approx(4096 / STEP_S * 1.9e6 / 5e10)
    assert progress.pace.exposed_share == pytest.approx(0.04 / STEP_S)
    assert progress.pace.link_bytes["0>1"] == (pytest.approx(12_600_000), pytest.approx(12_600_000 / STEP_S))
    assert progress.remaining_s == pytest.approx(50 * STEP_S)
    assert progress.evaluations[-1].step == 150


@pytest.mark.parametrize(("limit_s", "left_s"), [(0.0, 150 * STEP_S), (40.0, 15.0), (25.0, 0.0), (1e6, 150 * STEP_S)])
def test_a_time_limit_is_the_most_that_is_left(limit_s: float, left_s: float) -> None:
    progress = fold(replace(start(), limit_s=limit_s), *(step(number) for number in range(1, 51)))
    assert progress.remaining_s == pytest.approx(left_s)


def test_nothing_is_known_of_a_run_that_has_not_begun() -> None:
    progress = RunProgress()
    assert progress.steps_done == progress.steps == progress.fraction == 0
    unknown = (
        progress.pace.loss,
        progress.pace.tokens_per_s,
        progress.of_peak,
        progress.pace.exposed_share,
        progress.remaining_s,
    )
    assert unknown == (None,) * 5
    assert progress.pace.link_bytes == {}


def test_share_of_peak_is_hidden_where_the_peak_was_not_measured() -> None:
    assert fold(start(peak=0.0), step(1)).of_peak is None


def test_a_rejected_step_counts_and_moves_nothing() -> None:
    progress = fold(start(), step(1, loss=3.0), step(2, loss=math.nan, committed=False))
    assert (progress.rejected, progress.steps_done, progress.pace.loss) == (1, 1, 3.0)


def test_a_resume_replaces_what_it_repeats() -> None:
    before = run(200, until=180, ends=False)
    progress = fold(*before, start(100, time_s=1000.0))
    assert progress.steps_done == 100
    assert progress.losses.xs[-1] == 100
    assert [e.step for e in progress.evaluations] == [50, 100]
    progress.add(step(101, time_s=1001.0))
    progress.add(step(102, time_s=1003.0))
    assert progress.remaining_s == pytest.approx(98 * 2.0)  # the pause between the starts is no pace


def test_a_failed_save_is_remembered_until_one_succeeds() -> None:
    bad = Saved(step=10, path="x", bytes=0, copy_s=0.0, write_s=0.0, error="disk full")
    good = Saved(step=20, path="y", bytes=5, copy_s=0.0, write_s=0.0)
    assert fold(bad).saves.failed == bad
    progress = fold(bad, good)
    assert (progress.saves.saved, progress.saves.failed) == (good, None)


def test_a_length_that_is_found_later_is_that_of_this_start() -> None:
    progress = fold(start(), step(1), Length(step=1, steps=40))
    assert (progress.steps, progress.fraction) == (40, 1 / 40)
    progress.add(start(1))
    assert progress.steps == 200, "a resume wants its own number again"


def test_a_resume_has_no_pace_yet() -> None:
    progress = fold(*run(200, until=180, ends=False), start(100, time_s=1000.0))
    assert (progress.pace.step_s, progress.pace.link_bytes, progress.remaining_s) == (None, {}, None)


def test_a_long_curve_stays_small_and_true() -> None:
    curve = Curve()
    for x in range(100_000):
        curve.add(x, 2.0 * x)
    assert len(curve.xs) < POINTS
    assert curve.xs == sorted(curve.xs)
    every = curve.xs[1] - curve.xs[0]
    assert all(abs(y - 2.0 * x) <= 2 * every for x, y in zip(curve.xs, curve.ys, strict=True))


def test_a_falling_line_is_drawn_from_corner_to_corner_without_gaps() -> None:
    lines = draw(Curve([0.0, 10.0], [1.0, 0.0]), Frame(4, 2, 0.0, 10.0, 0.0, 1.0))
    dots = [[ord(c) - 0x2800 for c in line] for line in lines]
    assert [len(line) for line in lines] == [4, 4]
    assert dots[0][0] & 0x01 and dots[1][3] & 0x80  # top left, bottom right
    assert all(dots[0][column] or dots[1][column] for column in range(4))
    assert not dots[0][3] and not dots[1][0]


def test_a_flat_curve_and_a_single_point_can_be_drawn() -> None:
    frame = Frame(3, 1, 5.0, 5.0, 2.0, 2.0)
    assert len(draw(Curve([5.0], [2.0]), frame)[0]) == 3
    assert draw(Curve(), frame) == [chr(0x2800) * 3]


def test_a_share_that_cannot_be_is_not_shown_but_said_once() -> None:
    wrong = [start(peak=1e6), *(step(n) for n in range(1, 4))]
    assert fold(*wrong).of_peak is None
    doubtful = Doubtful()
    said = [one for record in wrong for one in doubtful.add(record)]
    assert len(said) == 1 and said[0].startswith("step 1 computed ") and "more than the 1e+06 FLOP/s of" in said[0]
    late = replace(step(1), exposed_s=2 * STEP_S)
    assert fold(start(), late).pace.exposed_share is None
    again = Doubtful()
    again.add(start())
    assert "s for communication, longer than the" in again.add(late)[0]


@pytest.mark.parametrize(
    ("part", "whole", "share"), [(1, 2, 0.5), (2, 2, 1.0), (2.1, 2, None), (0, 0, None), (-1, 2, None)]
)
def test_part_of(part: float, whole: float, share: float | None) -> None:
    assert part_of(part, whole) == share
