"""Which batch a backward pass is of, where a loop has asked for others in between."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.own_loop.batches import Divider
from gossamer.own_loop.loss_denominator import MeanDenominator, denominator_of
from gossamer.own_loop.pass_inputs import PassInputs
from gossamer.own_loop.status_rows import RowMark
from gossamer.spec.errors import BadInput


def given(hand: PassInputs, rows: int, rank: int = 1) -> Tensor:
    """A batch goes to a loop on one of two ranks."""
    share = Divider(rank=rank, parts=(0.5, 0.5)).share(torch.randn(rows, 3))
    hand.give(share, is_last=False)
    return share.batch


def loop() -> tuple[PassInputs, nn.Module]:
    hand, model = PassInputs(divides=True), nn.Linear(3, 2)
    hand.look(model)
    return hand, model


def test_a_batch_that_was_seen_before_an_evaluation_is_the_one() -> None:
    hand, model = loop()
    model(given(hand, 8))
    with torch.no_grad():
        for rows in (8, 8, 8, 8, 8, 1):
            model(given(hand, rows))
    assert hand.rows == 4
    hand.counted(None, MeanDenominator())
    model(given(hand, 6))
    assert hand.rows == 3


def test_batches_that_were_evaluated_alone_are_nobodys() -> None:
    hand, model = loop()
    with torch.no_grad():
        for rows in (8, 1):
            model(given(hand, rows))
    batch = given(hand, 6)
    assert hand.rows == 3  # before its forward
    model(batch)
    assert (hand.rows, hand.mark.number) == (3, 3)


def test_a_teacher_without_gradients_leaves_a_batch_at_hand() -> None:
    hand, model = loop()
    batch = given(hand, 6)
    with torch.no_grad():
        model(batch)
    model(batch)
    assert (hand.rows, hand.mark.number) == (3, 1)


def test_a_spare_row_that_cannot_be_told_from_others_is_refused() -> None:
    hand, model = loop()
    for rows in (8, 1):
        model(given(hand, rows) + 1.0)  # a copy
    with pytest.raises(BadInput, match="drop_last"):
        _ = hand.rows


def test_the_tensors_of_a_model_have_no_rows() -> None:
    hand, model = loop()
    model(given(hand, 4))
    origin = hand.origin()
    assert origin.layout(model.weight.detach(), is_input=False) is None  # 2 numbers, as a rank has rows
    assert origin.layout(torch.randn(2, 3), is_input=False) is not None


def test_rows_that_vmap_wraps_are_seen_as_those_of_their_batch() -> None:
    hand, model = loop()
    batch = given(hand, 6)
    given(hand, 8)
    own = dict(model.named_parameters())
    torch.func.vmap(lambda row: torch.func.functional_call(model, own, (row[None],)))(batch)
    assert hand.rows == 3


def test_what_an_optimizer_moves_has_no_rows() -> None:
    hand, _ = loop()
    given(hand, 4)
    scales = torch.ones(2, 1).mul_(torch.tensor([[1.0], [2.0]])).requires_grad_()
    assert hand.origin().layout(scales.detach(), is_input=True) is not None
    optimizer = torch.optim.SGD([scales], 0.1)
    hand.know(optimizer)
    assert hand.origin().layout(scales.detach(), is_input=True) is None


def test_without_a_batch_a_rank_counts_as_one_mean() -> None:
    hand, model = loop()
    assert (hand.rows, hand.whole, hand.first, hand.counts(), hand.is_spare) == (0, 0, 0, set(), False)
    assert hand.mark == RowMark()
    assert hand.counted(None, MeanDenominator()).counts == (1.0,)
    model(torch.randn(4, 3))  # rows of no batch
    assert hand.rows == 0


def test_a_spare_row_weighs_nothing_and_others_weigh_their_rows() -> None:
    hand, model = loop()
    model(given(hand, 1))
    assert hand.is_spare and hand.counted(None, MeanDenominator()).counts == (0.0,)
    model(given(hand, 8))
    assert not hand.is_spare and hand.counted(None, MeanDenominator()).counts == (4.0,)


def test_a_copy_of_a_wrapped_model_reports_to_nobody() -> None:
    hand, model = loop()
    first, second = given(hand, 8), given(hand, 6)
    model(first)
    copy.deepcopy(model)(second)
    assert hand.rows == 4


@pytest.mark.parametrize(
    ("loss", "weight", "said"),
    [
        ("maen", None, "loss: wanted one of read, mean, sum, got 'maen': did you mean 'mean'?"),
        (3, None, "loss: wanted one of read, mean, sum"),
        ("sum", len, "weight: wanted no weight with loss='sum'"),
        ("mean", 2, "weight: wanted a function of a batch"),
    ],
)
def test_words_that_are_no_denominator_are_refused(loss: Any, weight: Any, said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        denominator_of(loss, weight)


def test_a_weight_makes_what_is_read_a_mean() -> None:
    assert denominator_of("read", None).reads_graph and not denominator_of("mean", None).reads_graph
    weighted = denominator_of("read", lambda batch: 5.0)
    assert weighted == denominator_of("mean", weighted.weight) and not weighted.reads_graph
    hand, _ = loop()
    given(hand, 8)
    assert hand.counted(None, weighted).counts == (5.0,)
    assert hand.counted(None, denominator_of("sum", None)).counts == (1.0,)


def test_a_lone_process_is_refused_what_several_would_be() -> None:
    """A rule that serves no parameter, and a permission for a choice that is not made."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadInput, match=r"exchange\.0\.0: wanted a pattern .* got .wieght.: match .*weight, bias"):
        gossamer.wrap(model, optimizer, exchange=[("wieght", "all", "dense")])
    with pytest.raises(BadInput, match=r"lossy: wanted exchange auto.* got exchange two_shot=int8: set"):
        gossamer.wrap(model, optimizer, exchange={"two_shot": "int8"}, lossy=True)
    for fine in ({"exchange": "auto", "lossy": True}, {"exchange": [("weight", "all", "dense")]}):
        assert gossamer.wrap(model, optimizer, **fine)[0] is model
