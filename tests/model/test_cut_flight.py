"""Several micro-batches between forward and backward, units that raise, gradients within a forward, scripted units."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import loss
from gossamer.model.split.dataflow import CallOutput
from gossamer.model.split.in_flight import InFlight
from gossamer.model.split.reference import gradients_of, stages_of
from gossamer.model.split.split_points import SplitPoints
from gossamer.model.split.stage import StageModule
from gossamer.model.split.trace import trace
from gossamer.model.units import unit_names
from gossamer.partition.model_provider import ModuleSource
from gossamer.partition.rank_model import build_rank_model
from gossamer.partition.request import PartitionRequest
from gossamer.run.batches import DatasetBatches
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from model.kept import WIDTH, Block, Net
from model.test_cut_absent import BATCHES, THIRDS, compare, loss_of


class Averages(Block):
    """A moving average of its weight, that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", self.mix.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(self.mix.weight.detach() + x.detach().mean(), 0.3)  # type: ignore[operator]
        return x + torch.tanh(F.linear(self.mix(x), self.mean))  # type: ignore[arg-type]


class KeepsAside(Averages):
    """The same as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        mean = self._buffers.pop("mean")
        self.mean = mean


class InAList(Block):
    def __init__(self) -> None:
        super().__init__()
        self.all = [torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        self.all[0].add_(x.detach().mean())
        return x + self.mix(x * self.all[0])


def in_flight(stages: list[StageModule], batches: list[Mapping[str, Any]], *, is_recomputed: bool = False) -> None:
    """All forwards, and then all backwards."""
    flying = []
    for batch in batches:
        lives, tensors = [], {}
        for stage in stages:
            run = partial(loss_of, stage.module, batch)
            lives.append(stage.forward(run, tensors, keep_graph=not is_recomputed))
            tensors = lives[-1].sent
        flying.append(lives)
    for lives in flying:
        gradients: dict[Any, Tensor] = {}
        for live in reversed(lives):
            if is_recomputed:
                live.recompute()
            gradients = live.backward(gradients, loss=live.result)


def compare_in_flight(module: nn.Module, cuts: SplitPoints, *, is_recomputed: bool) -> None:
    """Its gradients in stages, of which several forwards wait for their backward, with those of one process."""
    whole = copy.deepcopy(module)
    for batch in BATCHES:
        loss_of(whole, batch).backward()
    flow = trace(module, lambda: loss_of(module, BATCHES[0]), units=unit_names(module))
    stages = stages_of(module, flow, cuts)
    in_flight(stages, BATCHES, is_recomputed=is_recomputed)
    found = gradients_of(stages)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("block", [Averages, KeepsAside])
def test_a_backward_reads_what_its_own_forward_has_left(block: type[nn.Module], is_recomputed: bool) -> None:
    torch.manual_seed(0)
    compare_in_flight(type("Other", (Net,), {"block": block})(), THIRDS, is_recomputed=is_recomputed)


def test_or_is_refused_where_nobody_knows_its_place() -> None:
    module = type("Other", (Net,), {"block": InAList})()
    flow = trace(module, lambda: loss_of(module, BATCHES[0]), units=unit_names(module))
    with pytest.raises(BadInput, match="no in-place write to a tensor that a backward still needs"):
        in_flight(stages_of(module, flow, THIRDS), BATCHES)


class Exit(Exception):
    pass


class Throws(Block):
    def forward(self, x: Tensor) -> Tensor:
        raise Exit(super().forward(x))


class Catches(Net):
    block = Throws

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            try:
                x = block(x)
            except Exit as found:
                x = found.args[0]
        y: Tensor = self.outlet(x)
        return y


class Tries(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            try:
                x = block(x, scale=2.0)
            except TypeError:
                x = block(x)
        y: Tensor = self.outlet(x)
        return y


class Penalty(Net):
    """A gradient of what comes behind the third block, by what comes out of it."""

    last = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            before, x = x, block(x)
        by = before if self.last else x
        slope = torch.autograd.grad((x * x).sum(), by, create_graph=True)[0]
        y: Tensor = self.outlet(x) + 0.1 * slope.square().mean()
        return y


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "raised": (Catches, r"wanted blocks\.0 to return.*got Exit, which the model's code catches"),
    "gradient": (Penalty, r"taken within a unit, got one through blocks\.3"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_units_cannot_do_apart_is_refused_by_name(kind: str) -> None:
    make, said = REFUSED[kind]
    with pytest.raises(BadInput, match=said):
        compare(make())


@pytest.mark.parametrize("cuts", [THIRDS, SplitPoints(("inlet", "outlet"))], ids=str)
@pytest.mark.parametrize("make", [Tries, type("Behind", (Penalty,), {"last": False})])
def test_a_call_that_does_not_fit_and_a_gradient_between_units_are_as_in_one_process(
    make: Callable[[], nn.Module], cuts: SplitPoints
) -> None:
    torch.manual_seed(0)
    compare(make(), cuts)


class Tails(nn.Module):
    """An adaptive softmax: which of its parts are called depends on the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.out = nn.Linear(WIDTH, WIDTH), nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 12, [3, 6, 9])

    def forward(self, x: Tensor) -> Tensor:
        labels = (x[:, 0].abs() * 1e4).long() % 12
        loss: Tensor = self.out(self.inlet(x), labels).loss
        return loss


def test_parts_that_are_called_by_the_labels_are_refused_by_name() -> None:
    module = Tails()
    batches = [{"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i))} for i in range(12)]
    units = ("inlet", "out.head", "out.tail.0", "out.tail.1", "out.tail.2")
    flow = trace(module, lambda: loss_of(module, batches[0]), units=units)
    called = [call.name for call in flow.calls]
    stages = stages_of(module, flow, SplitPoints((called[0], called[-1])))
    with pytest.raises(BadInput, match=r"out\.(head|tail\.\d)|inlet"):
        in_flight(stages, batches)


def many() -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i))} for i in range(12)]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_parts_that_only_the_last_stage_has_may_be_called_by_the_labels(number: int) -> None:
    torch.manual_seed(0)
    module = Tails()
    whole = copy.deepcopy(module)
    for batch in many():
        loss_of(whole, batch).backward()
    units = ("inlet", "out.head", "out.tail.0", "out.tail.1", "out.tail.2")
    flow = trace(module, lambda: loss_of(module, many()[number]), units=units)
    stages = stages_of(module, flow, SplitPoints(("inlet", flow.calls[1].name)))
    in_flight(stages, many())
    found = gradients_of(stages)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-7, msg=name)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x))


def test_scripted_blocks_are_units() -> None:
    torch.manual_seed(0)
    module = Net()
    module.blocks = nn.ModuleList(torch.jit.script(Plain()) for _ in range(4))  # type: ignore[no-untyped-call]
    compare(module)


@pytest.mark.parametrize("wrap", [torch.jit.script, torch.compile])
def test_a_module_that_is_closed_as_a_whole_is_refused_in_stages(wrap: Callable[[nn.Module], nn.Module]) -> None:
    module = wrap(nn.Sequential(Plain(), Plain()))
    config = RunConfig.model_validate({"train": {"batch": 8}, "plan": {"mesh": {"pipe": 2}}})
    rows = [{"x": row} for row in torch.randn(8, WIDTH)]
    asked = PartitionRequest(
        config=config,
        ranks=2,
        rank=0,
        batches=DatasetBatches(rows),  # type: ignore[arg-type]
        objective=loss.build("next_token"),
        device=torch.device("cpu"),
    )
    with pytest.raises(BadInput, match="wanted a module whose submodules can be reached, got one that torch"):
        build_rank_model(ModuleSource(module), asked)


class Odd:
    """State that is no value of an attribute: another dict of attributes, a slot that is filled later."""

    __slots__ = ("__dict__", "late")
    calls = 0


class Shares(Net):
    """Blocks that count in one object."""

    def __init__(self, way: str) -> None:
        super().__init__()
        odd = Odd()
        for block in self.blocks:
            block.way, block.odd = way, odd  # type: ignore[assignment]

    class block(Block):
        way, odd = "", Odd()

        def forward(self, x: Tensor) -> Tensor:
            if self.way == "dict":
                vars(self)["odd"].__dict__ = {"calls": self.odd.calls + 1}
            is_later = hasattr(self.odd, "late")
            if self.way == "slot":
                self.odd.late = True
            return x + torch.tanh(self.mix(x)) * (1 + self.odd.calls + is_later)


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("way", ["dict", "slot"])
def test_odd_state_that_blocks_share_is_followed(way: str, is_recomputed: bool) -> None:
    torch.manual_seed(0)
    compare_in_flight(Shares(way), THIRDS, is_recomputed=is_recomputed)


def test_an_in_place_error_of_a_whole_model_is_not_put_on_its_stages() -> None:
    """Only where other micro-batches are under way may a later forward have written to what a backward needs."""
    received = {CallOutput(0, 0): torch.ones(2, requires_grad=True)}
    for live, kind, said in (
        (InFlight({}, {}), RuntimeError, "modified by an inplace operation"),
        (InFlight(received, {}), BadInput, "while other micro-batches run forward"),
    ):
        y = torch.ones(2, requires_grad=True).exp()
        y.add_(1)
        with pytest.raises(kind, match=said):
            live.backward({}, loss=y.sum())
