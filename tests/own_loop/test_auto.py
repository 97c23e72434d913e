"""exchange="auto" profiles one whole step of a loop, whatever the loop does, and chooses alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer.own_loop.compute_clock import ComputeClock
from gossamer.own_loop.exchange_choice import Found, PassProfile
from own_loop.auto_jobs import BACKWARD_S, FORWARD_S, LATE_S
from pool import Pool


class Hands(ComputeClock):
    """A clock that a test moves."""

    at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


def chosen(pool: Pool, loop: str, profiles: int = 1) -> list[dict[str, Any]]:
    """Run a loop on two ranks that believe to be on two hosts; they choose alike and stay equal."""
    found: list[dict[str, Any]] = pool.run("own_loop.auto_jobs:trained", 2, loop=loop)
    one, other = found
    assert one["digest"] == other["digest"] and one["is_finite"]
    assert one["chosen"] == other["chosen"] and len(one["chosen"]) == profiles
    assert len(one["profiles"]) == len(other["profiles"]) == profiles
    return found


def check_times(profile: dict[str, Any], passes: int, *, exchanged: int = 1) -> None:
    """Check the times of a step of so many backward passes against what the model sleeps, and what the loop took.

    Where several of them were exchanged, each counts as a step.
    """
    compute_s, backward_s, ready_s = profile["compute_s"], profile["backward_s"], profile["ready_s"]
    assert backward_s >= BACKWARD_S
    least_s = backward_s + passes * FORWARD_S + (passes - 1) * BACKWARD_S
    assert least_s <= exchanged * compute_s and compute_s <= profile["span_s"] / (1 if exchanged == 1 else 1.1)
    assert 0 < ready_s["last.weight"] <= backward_s
    assert BACKWARD_S <= ready_s["first.weight"] <= ready_s["rows.weight"] <= backward_s


@pytest.mark.parametrize(
    ("loop", "passes", "after", "rows"),
    [
        ("plain", 1, 2, [2, 3]),
        ("sparse", 1, 2, [2, 3]),
        ("accumulate 2", 2, 2, [4, 5, 6, 7]),
        ("accumulate 4", 4, 2, [8, 9, 10, 11, 12, 13, 14, 15]),
        ("no_sync", 3, 2, [6, 7, 8, 9, 10, 11]),
        ("two backwards", 2, 2, [6, 7]),
        ("scaled", 1, 2, [4, 5]),
        ("skipped", 1, 3, [6, 7]),
        ("rejected", 1, 4, [6, 7]),
    ],
)
def test_the_profile_is_of_one_whole_step(pool: Pool, loop: str, passes: int, after: int, rows: list[int]) -> None:
    """The gradients are those that the last backward call has exchanged: of a group, those of all its passes."""
    for rank, one in enumerate(chosen(pool, loop)):
        (profile,) = one["profiles"]
        check_times(profile, passes, exchanged=2 if loop == "two backwards" else 1)
        assert profile["after"] == after
        assert profile["rows"] == [32 * rank + row for row in rows]


def test_a_closure_that_drops_gradients_in_every_step_is_profiled_as_it_is(pool: Pool) -> None:
    for one in chosen(pool, "lbfgs"):
        (profile,) = one["profiles"]
        check_times(profile, 2, exchanged=2)
        assert profile["after"] == 4


def test_each_of_two_models_has_a_step_of_its_own(pool: Pool) -> None:
    """The first one drops in every step what the backward pass of the second has left in it."""
    for one in chosen(pool, "two models", 2):
        first, second = sorted(one["profiles"], key=lambda profile: -profile["after"])
        assert (first["after"], second["after"]) == (7, 4)
        for profile in (first, second):
            check_times({**profile, "span_s": 10.0}, 1)


def test_waits_for_other_ranks_are_no_computing(pool: Pool) -> None:
    first, last = (one["profiles"][0] for one in chosen(pool, "late"))
    assert first["compute_s"] < LATE_S
    assert LATE_S <= last["compute_s"] < 2 * LATE_S, "of one of its two passes"


def test_a_loop_whose_passes_cannot_be_timed_keeps_all_reduce(pool: Pool) -> None:
    first, last = chosen(pool, "unseen", 0)
    (said,) = first["said"]
    assert said.startswith("exchange: all-reduce") and "after 4 optimizer steps" in said and "loss.backward()" in said
    assert not last["said"]


def test_a_loop_without_steps_keeps_all_reduce(pool: Pool) -> None:
    (said,) = chosen(pool, "by hand", 0)[0]["said"]
    assert said.startswith("exchange: all-reduce") and "41 backward passes in a row had no step" in said


@pytest.mark.parametrize("at", ["found", "choose"])
def test_a_rank_that_is_missing_in_the_choice_is_named(pool: Pool, at: str) -> None:
    first, _, last = pool.run("own_loop.auto_jobs:left", 3, at=at)
    wanted = "waits in the choice of an exchange after optimizer.step() 2: rank 1 did not reach it within 5 s."
    assert wanted in first and wanted in last


def test_a_rank_that_does_not_wrap_is_named(pool: Pool) -> None:
    said, _ = pool.run("own_loop.auto_jobs:alone", 2)
    assert "rank 0 waits in gossamer.wrap: rank 1 did not reach it within 1 s" in said


def test_a_scaler_beside_residuals_to_come_is_refused_at_the_first_step(pool: Pool) -> None:
    for found in pool.run("own_loop.auto_jobs:untold_scaler", 2, enabled=True):
        assert "Pass the GradScaler to gossamer.wrap" in found["said"] and found["steps"] == 0
    for found in pool.run("own_loop.auto_jobs:untold_scaler", 2, enabled=False):
        assert found["said"] == "", "one that scales nothing, as loops have that choose their precision later"


def test_passes_of_one_backward_call_are_one() -> None:
    clock = Hands()
    profile = PassProfile(clock, lossy=False)
    profile.begin()
    clock.at_s = 2.0
    profile.ask()
    for at_s in (3.0, 4.0):
        profile.turn(is_asked=True)
        profile.see({"w": torch.tensor([1.0, 2.0])})
        clock.at_s = at_s
        profile.end()
    found = profile.rehearsal({"w": torch.zeros(2)})
    assert (found.compute_s, found.backward_s) == (4.0, 2.0)
    assert found.gradients["w"].tolist() == [2.0, 4.0]


def test_a_call_that_was_not_seen_to_begin_is_not_timed_from_another_one() -> None:
    profile = PassProfile(Hands(), lossy=False)
    profile.begin()
    profile.ask()
    profile.turn(is_asked=True)
    assert profile.found is Found.WHOLE
    profile.turn(is_asked=False)
    assert profile.found is Found.UNSEEN


def test_times_without_sense_are_not_passed_on() -> None:
    profile = PassProfile(Hands(), lossy=False)
    profile.begin()
    profile.ask()
    profile.turn(is_asked=True)
    profile.end()
    with pytest.raises(AssertionError, match="a step of 0 s with a backward pass of 0 s"):
        profile.rehearsal({"w": torch.zeros(2)})


def test_a_wait_inside_another_one_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 11.0, 13.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = ComputeClock()
    with clock.stopped(), clock.stopped():
        pass
    assert clock.now_s() == 20.0 - (13.0 - 10.0)
