"""Every exchange, with its declared feedback, comes to the optimum of ranks that pull in different directions."""

from __future__ import annotations

import pytest
import torch

from exchange import crew
from exchange.quadratics import Descent, Quadratics
from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Layout
from gossamer.exchange import Exchange
from gossamer.exchange.error_feedback import ErrorFeedback

RANKS, STEPS = 4, 700
PROBLEM = Quadratics.make(RANKS, 36)
WHERE = Layout.of({"w": torch.empty(6, 6)})
START = float(PROBLEM.optimum.square().sum())
NEAR = 0.01  # of the squared distance at the start


def rate(step: int) -> float:
    """Constant for half the steps, then a hundredth of it: feedback's distance goes with the square of the rate."""
    late = max(0.0, step / STEPS - 0.5)
    return 0.02 * 100 ** (-2 * late)


DESCENT = Descent(STEPS, rate, levels=crew.levels_of(RANKS))


def declared(name: str) -> Exchange:
    """As its traits want it to be used: a lossy exchange that does not remember gets error feedback."""
    one = crew.example(name)
    return one if one.traits.lossless or one.traits.remembers else ErrorFeedback(one)


SLOW = ("qsgd", "all_gather", "two_shot", "hierarchical")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.nightly] if one in SLOW else []) for one in exchange_methods.names()]
)
def test_it_comes_to_the_optimum_with_its_feedback(name: str) -> None:
    if crew.example(name).traits.masked:
        pytest.skip("what it leaves out no feedback recovers, by its declaration")
    assert DESCENT.distance(declared(name), PROBLEM, WHERE) < NEAR * START


def test_without_feedback_the_same_problem_is_missed() -> None:
    """So the tolerance above is one that an exchange without memory does not meet."""
    stuck = DESCENT.distance(exchange_methods.build({"topk": {"fraction": 1 / 36}}), PROBLEM, WHERE)
    assert stuck > 50 * NEAR * START
