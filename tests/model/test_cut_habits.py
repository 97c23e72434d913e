"""What real models do between and within their blocks, each in a module of a few lines, cut in 2 and 3 stages."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.split.reference import run_lockstep, stages_of
from gossamer.model.split.split_points import balanced_split, shared_names, stage_specs
from gossamer.model.split.trace import trace
from gossamer.model.units import unit_names
from model.cuttable import WIDTH, Layer, rows


class OneBlock(nn.Module):
    """A list of one block, which is called six times: the depth is in the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.groups = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Layer()])
        self.outlet = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for _ in range(6):
            x = self.groups[0](x)
        return self.outlet(x)


class ForwardCalled(nn.Module):
    """Calls the `forward` of its blocks instead of them, so that no hook runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.outlet = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return self.outlet(x)


class Giving(Layer):
    def forward(self, x: Tensor, *, kept: UserDict[str, Any]) -> Tensor:  # type: ignore[override]
        mixed = self.mix(x)
        first, second = kept.setdefault("first", (mixed, 2 * mixed))
        return torch.tanh(x + first * second + mixed)


class LikeADict(nn.Module):
    """Blocks read what the first one put into something that is a mapping, but no dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Giving() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept: UserDict[str, Any] = UserDict()
        for block in self.blocks:
            x = block(x, kept=kept)
        return x


HABITS = {"one_block": OneBlock, "forward_called": ForwardCalled, "like_a_dict": LikeADict}


def loss_of(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    output: Tensor = module(batch["x"])
    return (output - 0.3).square().mean()


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("make", HABITS.values(), ids=HABITS)
def test_every_gradient_equals_the_uncut_module_s(make: Callable[[], nn.Module], stages: int) -> None:
    torch.manual_seed(0)
    module, batch = make(), {"x": rows()}
    flow = trace(module, lambda: loss_of(module, batch), units=unit_names(module))
    cuts = balanced_split(flow, stages)
    summed = shared_names(stage_specs(module, flow, cuts), module)
    ours = run_lockstep(stages_of(module, flow, cuts), loss_of, [batch])
    uncut = copy.deepcopy(module)
    loss_of(uncut, batch).backward()
    wanted = {name: p.grad for name, p in uncut.named_parameters() if p.grad is not None}
    assert ours.gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if name in summed:
            torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(ours.gradients[name], gradient), name


def test_a_block_that_is_called_again_is_a_unit_for_every_call() -> None:
    module, batch = OneBlock(), {"x": rows()}
    flow = trace(module, lambda: loss_of(module, batch), units=unit_names(module))
    assert [call.name for call in flow.calls][1:4] == ["groups.0", "groups.0@1", "groups.0@2"]
    assert len(flow.calls) == 8
