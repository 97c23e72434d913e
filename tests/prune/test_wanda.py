"""Wanda's scores and statistics, beside an independent computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gossamer.prune import build, prune
from gossamer.spec.errors import BadInput


def by_hand(weight: Tensor, inputs: Tensor, gone: int) -> Tensor:
    """Which weights stay, one row after the other."""
    weight = weight.detach()
    kept = torch.ones_like(weight, dtype=torch.bool)
    for row in range(len(weight)):
        scores = [abs(float(weight[row, j])) * float(inputs[:, j].double().norm()) for j in range(weight.shape[1])]
        for j in sorted(range(len(scores)), key=scores.__getitem__)[:gone]:
            kept[row, j] = False
    return kept


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.inner(x))
        return found


class Between(nn.Module):
    """Layers before and after its blocks; what is between two blocks is in no module."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Mlp(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for number, block in enumerate(self.blocks):
            h = h + (number + 1) * block(h)
        found: Tensor = self.last(h)
        return found


def test_masks_are_those_of_the_equation() -> None:
    torch.manual_seed(0)
    block, x = Mlp(12), torch.randn(40, 12) * torch.rand(12)
    module = nn.ModuleList([block])
    found = prune(module, build({"wanda": {"sparsity": 0.5}}), [lambda: block(x)])
    assert torch.equal(found.masks["0.up.weight"], by_hand(block.up.weight, x, 6))
    assert torch.equal(found.masks["0.down.weight"], by_hand(block.down.weight, block.inner(x).detach(), 12))
    assert [one.tokens for one in found.matrices] == [40, 40]


def test_a_block_sees_what_the_pruned_ones_before_it_give() -> None:
    torch.manual_seed(0)
    module, parts = Between(12, 2), torch.randn(3, 50, 12).mul(torch.rand(12)).unbind()
    before = {name: one.detach().clone() for name, one in module.named_parameters()}
    settings = {"sparsity": 0.5, "include": ["."]}
    found = prune(module, build({"wanda": settings}), [lambda part=part: module(part) for part in parts])
    assert all(torch.equal(one, before[name]) for name, one in module.named_parameters())
    x = torch.cat(parts)

    def zeroed(name: str) -> Tensor:
        return torch.where(found.masks[f"{name}.weight"], before[f"{name}.weight"], 0.0)

    def apply(name: str, inputs: Tensor, weight: Tensor | None = None) -> Tensor:
        return inputs @ (zeroed(name) if weight is None else weight).t() + before[f"{name}.bias"]

    def check(name: str, inputs: Tensor) -> None:
        weight = before[f"{name}.weight"]
        assert torch.equal(found.masks[f"{name}.weight"], by_hand(weight, inputs, weight.shape[1] // 2)), name

    check("first", x)
    h = apply("first", x)
    for number in range(2):
        up, down = (f"blocks.{number}.{part}" for part in ("up", "down"))
        check(up, h)
        check(down, torch.tanh(apply(up, h, before[f"{up}.weight"])))  # of the same block: not pruned yet
        h = h + (number + 1) * apply(down, torch.tanh(apply(up, h)))
    check("last", h)
    with torch.no_grad():
        dense = module.first(x)
        dense = dense + module.blocks[0](dense)
    weight = before["blocks.1.up.weight"]
    assert not torch.equal(found.masks["blocks.1.up.weight"], by_hand(weight, dense, 6))


def test_weights_come_back_where_a_later_block_is_refused() -> None:
    module, x = Between(8, 2), torch.randn(9, 8)
    before = {name: one.detach().clone() for name, one in module.named_parameters()}
    hook = module.blocks[1].register_forward_pre_hook(lambda _, args: (args[0] * torch.inf,))
    with pytest.raises(BadInput, match=r"others in blocks\.1\.up"):
        prune(module, build("wanda"), [lambda: module(x)])
    hook.remove()
    assert all(torch.equal(one, before[name]) for name, one in module.named_parameters())


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
    module, x = nn.ModuleDict({"used": nn.Linear(8, 8), "idle": nn.Linear(8, 8)}), torch.randn(3, 8)
    found = prune(module, build("wanda"), [lambda: module["used"](x)])
    assert {one.name: one.fell_back for one in found.matrices} == {"used": False, "idle": True}
    assert torch.equal(found.masks["idle.weight"], prune(module, build("magnitude")).masks["idle.weight"])
