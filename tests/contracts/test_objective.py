"""What every objective must do; the objectives are found by the room."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from gossamer import loss
from gossamer.spec.errors import BadInput


@pytest.fixture(params=[name for name in loss.names() if loss.build(name).together == 1])
def objective(request: pytest.FixtureRequest) -> loss.Loss:
    return loss.build(request.param)


def test_is_a_frozen_value(objective: loss.Loss) -> None:
    assert objective == dataclasses.replace(objective) and hash(objective) == hash(dataclasses.replace(objective))


def test_believes_the_models_own_loss(objective: loss.Loss) -> None:
    got = objective({"loss": torch.tensor(2.5, dtype=torch.float16)}, {"labels": torch.zeros(2, 4, dtype=torch.int64)})
    assert got.item() == 2.5 and got.dtype == torch.float32


def test_weight_counts_whole_labels_and_adds_up(objective: loss.Loss) -> None:
    for shape in [(4, 6), (4,)]:
        labels = torch.arange(24)[: 24 if len(shape) == 2 else 4].view(shape).clone()
        labels[1] = loss.IGNORE
        try:
            weights = [objective.weight({"labels": piece}) for piece in (labels, labels[:1], labels[1:2], labels[2:])]
        except IndexError:
            continue  # not the shape of this objective's labels
        assert all(w.dtype == torch.int64 and w.shape == () for w in weights)
        assert weights[0] == weights[1] + weights[2] + weights[3] and weights[2] == 0 and weights[0] > 0
        return
    pytest.fail("no shape of labels was accepted")


def test_what_is_no_output_is_the_users_error(objective: loss.Loss) -> None:
    empty: dict[str, Tensor] = {"labels": torch.zeros(2, 4, dtype=torch.int64)}
    with pytest.raises(BadInput):
        objective(object(), empty)
    with pytest.raises(BadInput):
        objective.weight({})
