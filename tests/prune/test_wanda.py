"""Wanda's scores and statistics, beside an independent computation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.prune import build, prune


def by_hand(weight: Tensor, inputs: Tensor, gone: int) -> Tensor:
    """Which weights stay, one row after the other."""
    kept = torch.ones_like(weight, dtype=torch.bool)
    for row in range(len(weight)):
        scores = [abs(float(weight[row, j])) * float(inputs[:, j].double().norm()) for j in range(weight.shape[1])]
        for j in sorted(range(len(scores)), key=scores.__getitem__)[:gone]:
            kept[row, j] = False
    return kept


def test_masks_are_those_of_the_equation() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 6)), torch.randn(40, 12) * torch.rand(12)
    found = prune(module, build({"wanda": {"sparsity": 0.5}}), [lambda: module(x)])
    hidden = torch.tanh(module[0](x)).detach()
    assert torch.equal(found.masks["0.weight"], by_hand(module[0].weight, x, 6))
    assert torch.equal(found.masks["2.weight"], by_hand(module[2].weight, hidden, 3))
    assert [one.tokens for one in found.matrices] == [40, 40]


def test_batches_and_their_order_do_not_matter() -> None:
    torch.manual_seed(1)
    module, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(64, 32)
    ways = [[x], list(x.split(7)), list(x.split(7))[::-1], [x.view(4, 16, 32)]]
    masks = [prune(module, build("wanda"), [lambda part=part: module(part) for part in way]).masks for way in ways]
    assert all(torch.equal(masks[0][name], other[name]) for other in masks for name in masks[0])


def test_equal_norms_give_magnitudes() -> None:
    torch.manual_seed(2)
    module = nn.Linear(8, 8)
    one = prune(module, build("wanda"), [lambda: module(torch.eye(8))]).masks["weight"]
    assert torch.equal(one, prune(module, build("magnitude")).masks["weight"])


def test_a_layer_that_nothing_reaches_is_pruned_by_magnitude_and_reported() -> None:
    module = nn.ModuleDict({"used": nn.Linear(8, 8), "idle": nn.Linear(8, 8)})
    found = prune(module, build("wanda"), [lambda: module["used"](torch.randn(3, 8))])
    assert {one.name: one.fell_back for one in found.matrices} == {"used": False, "idle": True}
    assert torch.equal(found.masks["idle.weight"], prune(module, build("magnitude")).masks["idle.weight"])
