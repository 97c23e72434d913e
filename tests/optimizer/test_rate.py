"""Rates over time: golden points, and what all of them keep to."""

from __future__ import annotations

import pytest

from gossamer.optimizer import lr_schedule
from gossamer.spec.errors import BadInput


@pytest.mark.parametrize("name", lr_schedule.names())
@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_between_zero_and_one_and_never_zero(name: str, steps: int) -> None:
    factors = [lr_schedule.build(name).factor(s, steps) for s in range(steps)]
    assert all(0 < f <= 1 for f in factors) and max(factors) == 1.0


@pytest.mark.parametrize("name", lr_schedule.names())
def test_rises_in_equal_steps(name: str) -> None:
    curve = lr_schedule.build({name: {"warmup": 4}})
    assert [curve.factor(s, 100) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert curve.factor(2, 100) == lr_schedule.build({name: {"warmup": 0.04}}).factor(2, 100)


def test_constant_without_warmup() -> None:
    assert {lr_schedule.build("constant").factor(s, 9) for s in range(9)} == {1.0}


def test_cosine_points() -> None:
    curve = lr_schedule.build({"cosine": {"warmup": 0.2, "min_lr_factor": 0.1}})
    assert curve.factor(2, 10) == 1.0
    assert curve.factor(6, 10) == pytest.approx(0.55)
    assert curve.factor(10, 10) == pytest.approx(0.1)  # one past the end


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_warmup_stable_decay_points(shape: str, middle: float) -> None:
    curve = lr_schedule.build({"warmup_stable_decay": {"warmup": 2, "decay": 3, "decay_type": shape}})
    assert [curve.factor(s, 10) for s in range(2, 7)] == [1.0] * 5
    assert curve.factor(8, 10) == pytest.approx(middle)
    assert curve.factor(7, 10) > curve.factor(8, 10) > curve.factor(9, 10) > 0


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"cosine": {"warmup": -0.1}}, "cosine.warmup"),
        ({"cosine": {"warmup": 1.5}}, "cosine.warmup"),
        ({"cosine": {"min_lr_factor": 1.0}}, "cosine.min_lr_factor"),
        ({"constant": {"warmup": float("nan")}}, "constant.warmup"),
        ({"warmup_stable_decay": {"warmup": 0.6, "decay": 0.6}}, "warmup_stable_decay.decay"),
        ({"warmup_stable_decay": {"decay_type": "round"}}, "warmup_stable_decay.decay_type"),
    ],
)
def test_impossible_values_are_named(written: dict, key: str) -> None:
    with pytest.raises(BadInput) as caught:
        lr_schedule.build(written, key="train.lr_schedule")
    assert caught.value.key == f"train.lr_schedule.{key}"


@pytest.mark.parametrize(
    "written",
    [{"cosine": {"warmup": 50}}, {"constant": {"warmup": 50}}, {"warmup_stable_decay": {"decay": 45, "warmup": 6}}],
)
def test_what_does_not_fit_the_run_is_said(written: dict) -> None:
    with pytest.raises(BadInput, match="50 steps"):
        lr_schedule.build(written).factor(0, 50)
