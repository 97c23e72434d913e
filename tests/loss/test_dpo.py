"""Direct preference optimization: the equation by hand, and what it takes for an answer's log-probability."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gossamer.loss import build
from gossamer.loss.inputs.answers import answer_log_probabilities
from gossamer.spec.errors import BadInput

B, T, V = 4, 6, 9


def logits() -> Tensor:
    return torch.randn(B, T, V, generator=torch.Generator().manual_seed(3))


def answers() -> Tensor:
    found = torch.full((B, T), -100)
    for row, (first, last) in enumerate([(2, 4), (3, 6), (1, 2), (4, 6)]):
        found[row, first:last] = torch.arange(first, last) % V
    return found


def by_hand(row: int) -> float:
    spread = logits()[row].double().log_softmax(-1)
    return sum(float(spread[t - 1, token]) for t, token in enumerate(answers()[row].tolist()) if token != -100)


def test_an_answer_is_the_sum_over_its_tokens() -> None:
    found = answer_log_probabilities({"logits": logits()}, answers())
    assert found.tolist() == pytest.approx([by_hand(row) for row in range(B)], rel=1e-5)


def test_the_loss_is_the_equation() -> None:
    reference = torch.tensor([-3.0, -2.5, -1.0, -7.0])
    batch = {"loss.answers": answers(), "loss.reference": reference}
    beta, wanted = 0.3, 0.0
    for chosen, rejected in ((0, 1), (2, 3)):
        margin = by_hand(chosen) - float(reference[chosen]) - by_hand(rejected) + float(reference[rejected])
        wanted -= math.log(1 / (1 + math.exp(-beta * margin))) / 2
    loss = build({"dpo": {"beta": beta}})
    assert float(loss({"logits": logits()}, batch)) == pytest.approx(wanted, rel=1e-5)
    assert int(loss.weight(batch)) == 2


def test_a_model_that_is_its_own_reference_has_log_2() -> None:
    own = answer_log_probabilities({"logits": logits()}, answers())
    found = build("dpo")({"logits": logits()}, {"loss.answers": answers(), "loss.reference": own})
    assert float(found) == pytest.approx(math.log(2))


def test_its_gradient_prefers_the_chosen_answer() -> None:
    moved = logits().requires_grad_()
    own = answer_log_probabilities({"logits": logits()}, answers())
    build("dpo")({"logits": moved}, {"loss.answers": answers(), "loss.reference": own}).backward()
    assert moved.grad is not None
    after = answer_log_probabilities({"logits": (moved - 0.5 * moved.grad).detach()}, answers()) - own
    assert (after[0::2] > 0).all() and (after[1::2] < 0).all()


def test_what_it_needs_is_named() -> None:
    with pytest.raises(BadInput, match=r"'loss.answers'"):
        build("dpo")({"logits": logits()}, {"input_ids": answers()})
    with pytest.raises(BadInput, match="a finite number above 0"):
        build({"dpo": {"beta": 0}})
