"""What a step that is not finite leads to: whole histories, verdict by verdict."""

from __future__ import annotations

import pytest
import torch

from gossamer.model.precision import precision_of
from gossamer.run.loss_scale import LossScale
from gossamer.run.nonfinite_policy import NonFiniteAction, NonFinitePolicy
from gossamer.sync import StepAgreement

LETTERS = {
    "C": NonFiniteAction.COMMIT,
    "R": NonFiniteAction.RETRY,
    "S": NonFiniteAction.SKIP,
    "X": NonFiniteAction.STOP,
}


def agreement(finite: bool) -> StepAgreement:
    return StepAgreement(finite, loss=1.0, weight=1.0, norm=1.0, ask=0, bad_ranks=() if finite else (0,))


def history(policy: NonFinitePolicy, attempts: str, scaling: LossScale) -> str:
    """The verdicts on attempts that are finite (.) or not (!)."""
    found = [policy.judge(agreement(one == "."), scaling) for one in attempts]
    return "".join(letter for verdict in found for letter, one in LETTERS.items() if one is verdict)


@pytest.mark.parametrize(
    ("policy", "attempts", "wanted"),
    [
        ("retry_skip_stop", ".!.", "CRC"),  # a flipped bit does not come back
        ("retry_skip_stop", "!.!.", "RCRC"),  # every step may be tried again
        ("retry_skip_stop", "!!!!!!", "RSRSRX"),
        ("retry_skip_stop", "!!!!.!!!!!!", "RSRSCRSRSRX"),  # only rejected steps in a row count
        ("skip", "!!!!!!.", "SSSSSSC"),
        ("stop", ".!", "CX"),
    ],
)
def test_verdicts(policy: str, attempts: str, wanted: str) -> None:
    assert history(NonFinitePolicy(policy, patience=3), attempts, LossScale.of(precision_of("fp32"))) == wanted


@pytest.mark.parametrize("policy", ["retry_skip_stop", "skip", "stop"])
def test_an_overflow_lowers_the_scale_until_it_cannot_be_the_scale(policy: str) -> None:
    scaling = LossScale.of(precision_of("fp16"))
    assert scaling.factor == 2.0**16
    assert history(NonFinitePolicy(policy, patience=3), "!" * 16, scaling) == "R" * 16
    assert scaling.factor == 1.0
    after = history(NonFinitePolicy(policy, patience=3), "!", scaling)
    assert after == {"retry_skip_stop": "R", "skip": "S", "stop": "X"}[policy] and scaling.factor == 1.0


def test_the_scale_grows_with_committed_steps_and_comes_back_from_a_checkpoint() -> None:
    scaling, other = LossScale.of(precision_of("fp16")), LossScale.of(precision_of("fp16"))
    for _ in range(1999):
        scaling.committed()
    other.load({name: t.clone() for name, t in scaling.state().items()})
    assert other.factor == 2.0**16 and int(other.state()["good_steps"]) == 1999
    for one in (scaling, other):
        one.committed()
        assert one.factor == 2.0**17
    scaling.overflowed()
    assert scaling.factor == 2.0**16 and not bool(torch.any(scaling.state()["good_steps"]))
