"""What feedback owes: which exchanges keep it, and how a change of exchange goes on with it."""

from __future__ import annotations

import pytest
import torch

from gossamer import exchange as exchange_methods
from gossamer.comm.message import ExchangeState, Outcome
from gossamer.recipe import ParameterRules

TOPK = {"topk": {"fraction": 0.1}}


@pytest.mark.parametrize(
    ("written", "owing"),
    [
        ("dense", False),
        (TOPK, False),
        ({"ef21": TOPK}, False),  # it sends differences: nothing is owed
        ({"error_feedback": "dense"}, True),
        ({"econtrol": TOPK}, True),
        ({"hierarchical": {"inter": {"error_feedback": TOPK}}}, True),
    ],
)
def test_who_owes(written, owing: bool) -> None:
    assert exchange_methods.has_residual(exchange_methods.build(written)) is owing


def test_feedback_is_put_around_the_lines_that_serve_these_parameters() -> None:
    assert exchange_methods.with_error_feedback("dense", []) == "dense"
    assert exchange_methods.with_error_feedback(TOPK, ["a"]) == {"error_feedback": {"inner": TOPK}}
    lines = [("^a", "inter", "dense"), (".*", "intra", "dense"), ("^b", "all", TOPK), (".*", "inter", TOPK)]
    (first, intra, middle, last) = exchange_methods.with_error_feedback(lines, ["a", "c"])
    assert first == ("^a", "inter", {"error_feedback": {"inner": "dense"}}) and intra == lines[1]
    assert middle == lines[2] and last == (".*", "inter", {"error_feedback": {"inner": TOPK}})
    assert all(
        exchange_methods.has_residual(one) for one in ParameterRules.read([first, intra]).by_name(["a"]).values()
    )


def test_what_was_lost_and_owed_is_taken_off_in_place() -> None:
    one, x = (
        Outcome(torch.zeros(2), torch.tensor([1.0, 2.0]), ExchangeState(), torch.tensor([0.5, 0.25])),
        torch.ones(2),
    )
    assert one.less_lost(x) is x and x.tolist() == [0.0, -1.0]
    assert one.less_owed(x).tolist() == [-0.5, -1.25]
    nothing = Outcome(torch.zeros(2), None, ExchangeState())
    assert nothing.less_lost(x) is x and nothing.less_owed(x) is x and x.tolist() == [-0.5, -1.25]
