"""Models without modules to cut between: their graph is divided, and every gradient is that of the whole."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.split.reference import gradients_of
from gossamer.model.split.segments import with_segments
from gossamer.model.split.split_points import balanced_split, stage_specs
from gossamer.model.split.stage import StageModule
from gossamer.model.split.trace import trace
from gossamer.model.units import unit_names
from gossamer.spec.errors import BadInput


class Bare(nn.Module):
    """All in one forward: matrices of its own, a residual, a norm, a loss where it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(6):
            self.register_parameter(
                f"w{i}", nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(i)))
            )
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        for i in range(6):
            x = nn.functional.layer_norm(x + torch.tanh(x @ getattr(self, f"w{i}")) * self.scale, (8,))
        return x if labels is None else (x - labels).square().mean()


class Only(nn.Module):
    """One child, which is everything."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Bare()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.inner(x, labels=labels)


def batch(seed: int, rows: int = 5) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 8, generator=rng), "labels": torch.randn(rows, 8, generator=rng)}


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("build", [Bare, Only])
def test_gradients_are_those_of_the_whole(build: type[nn.Module], stages: int) -> None:
    whole = build()
    pieces = []
    for _ in range(stages):
        module = copy.deepcopy(whole)
        units = with_segments(module, lambda m=module: m(**batch(0)))
        pieces.append((module, units))
    module, units = pieces[0]
    flow = trace(module, lambda: module(**batch(0)), units=units)
    parts = stage_specs(module, flow, balanced_split(flow, stages))
    held = [sorted(n for n in part.holds if ".w" in f".{n}") for part in parts]
    assert sum(len(h) for h in held) == 6, "no parameter is in two stages"
    ours = [StageModule(module, flow, part) for (module, _), part in zip(pieces, parts, strict=True)]
    for seed in range(2):
        loss = whole(**batch(seed))
        loss.backward()
        lives, tensors = [], {}
        for stage in ours:
            lives.append(stage.forward(partial(stage.module, **batch(seed)), tensors))
            tensors = lives[-1].sent
        assert torch.equal(lives[-1].result, loss)
        gradients = {}
        for live in reversed(lives):
            gradients = live.backward(gradients, loss=live.result)
    found = gradients_of(ours)
    for name, parameter in whole.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


def test_names_of_parameters_stay() -> None:
    module = Bare()
    before = [name for name, _ in module.named_parameters()]
    with_segments(module, lambda: module(**batch(0)))
    assert [name for name, _ in module.named_parameters()] == before
    assert list(module.state_dict()) == [*before, "scale"]


def test_batches_of_another_size_take_the_same_way() -> None:
    whole, module = Bare(), Bare()
    with_segments(module, lambda: module(**batch(0)))
    for rows in (5, 3, 7):
        assert torch.equal(module(**batch(1, rows)), whole(**batch(1, rows)))


def test_a_forward_that_cannot_be_followed_is_refused() -> None:
    class Looking(Bare):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            return super().forward(x, labels) if float(x.sum()) > 0 else super().forward(-x, labels)

    module = Looking()
    assert unit_names(module) == ("",)
    with pytest.raises(BadInput, match=r"torch.export cannot follow.*plan.units"):
        with_segments(module, lambda: module(**batch(0)))
