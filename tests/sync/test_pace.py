"""Which steps islands of unequal speed make."""

from __future__ import annotations

import pytest

from gossamer.sync import LocalStepSchedule, by_speed


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("steps", [(7, 1), (7, 3, 5), (7, 7), ()])
def test_every_round_has_its_steps_evenly_spread_and_the_last_is_everybodys(steps: tuple[int, ...], start: int) -> None:
    pace = LocalStepSchedule(7, start, steps)
    for rank, wanted in enumerate(steps or (7, 7)):
        made = [pace.makes(rank, step) for step in range(start + 28)]
        assert all(made[:start])
        for first in range(start, start + 28, 7):
            assert sum(made[first : first + 7]) == wanted
            assert made[first + 6]
        gaps = [
            b - a for a, b in zip(*[[i for i, m in enumerate(made[start:]) if m][k:] for k in (0, 1)], strict=False)
        ]
        assert max(gaps) - min(gaps) <= 1
        assert [pace.count(rank, done) for done in range(start + 29)] == [
            sum(made[:done]) for done in range(start + 29)
        ]


def test_as_many_steps_as_there_is_time_for() -> None:
    assert by_speed([0.3, 0.6, 0.31, 40.0], 50) == (50, 25, 48, 1)
    assert by_speed([1.0, 1.04], 3) == (3, 3), "a little noise makes no difference"
