"""Exchanges in a loop: error feedback follows the learning rates, and a warm-up counts the optimizer's steps."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from gossamer.own_loop.learning_rates import LearningRates
from pool import Pool


@pytest.mark.parametrize("rates", [[0.0, 0.1], [0.1, 0.0]])
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_a_bucket_owes_what_it_has_lost_if_it_moves(
    pool: Pool, rates: list[float], optimizers: int, apart: bool
) -> None:
    """Be a group at rate 0 the first one, or that of the last optimizer: it is that of its own parameters alone."""
    settings = {"rates": rates, "optimizers": optimizers, "apart": apart}
    for found in pool.run("own_loop.exchange_jobs:residuals", 2, **settings):
        for names, residual in found.items():
            assert (residual > 0) == any(rates[int(name[0])] > 0 for name in names.split()), names
        assert len(found) == 2 or not apart


def test_a_rate_is_the_largest_of_its_parameters_groups() -> None:
    one, other, third = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    slow = torch.optim.SGD([{"params": [one], "lr": 0.0}, {"params": [other], "lr": torch.tensor(0.25)}])
    fast = torch.optim.SGD([one], lr=0.5)
    fast.param_groups[0]["lr"] = None  # as of an optimizer that finds its own
    rates = LearningRates((weakref.ref(slow), weakref.ref(fast)))
    assert rates.by_parameter() == {id(one): 1.0, id(other): 0.25}
    slow.param_groups[0]["lr"] = 2.0
    slow.add_param_group({"params": [third], "lr": 0.125})
    assert rates.by_parameter() == {id(one): 2.0, id(other): 0.25, id(third): 0.125}
    del fast
    assert rates.by_parameter()[id(one)] == 2.0


@pytest.mark.parametrize(
    ("loop", "steps"),
    [
        ("plain", [0, 1, 2, 3]),
        ("accumulate", [0, 1, 2, 3]),
        ("two passes", [0, 0, 1, 1, 2, 2, 3, 3]),
        ("rejected", [0, 1, 1, 2, 3]),
        ("dropped", [0, 1, 1, 2, 3]),
    ],
)
def test_a_warm_up_counts_committed_steps(pool: Pool, loop: str, steps: list[int]) -> None:
    """Two optimizers step after the same passes: that is one step."""
    found, other = pool.run("own_loop.exchange_jobs:keys", 2, loop=loop)
    assert found == other
    assert [key[1] for key, _ in found] == steps
    assert [is_first for _, is_first in found] == [step < 3 for step in steps]
    assert len({tuple(key) for key, _ in found}) == len(found)  # no pass draws what another one has drawn
    firsts = {step: key[0] for key, _ in reversed(found) for step in [key[1]]}
    assert set(firsts.values()) == {7}  # as in `gossamer train`
