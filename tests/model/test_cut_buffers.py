"""Buffers that a forward changes: kept by the stages in which they are right, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.split.dataflow import DataFlow
from gossamer.model.split.input_variants import InputVariants
from gossamer.model.split.reference import run_lockstep, stages_of
from gossamer.model.split.split_points import SplitPoints, stage_specs
from gossamer.model.split.trace import trace
from gossamer.model.units import unit_names
from gossamer.spec.errors import BadInput
from model import plain

HALVES = SplitPoints(("blocks.0", "blocks.2"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(plain.WIDTH, plain.WIDTH)
        self.norm = nn.BatchNorm1d(plain.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Blocks(nn.Module):
    """Four blocks with running means, called in `order`."""

    def __init__(self, order: Sequence[int] = (0, 1, 2, 3)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


class Late(Blocks):
    """Its own code changes a mean of what the first block gives, a number by assignment, and a count, all at the end;
    `reads` says where it also reads the mean.
    """

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.reads = reads
        self.register_buffer("mean", torch.zeros(plain.WIDTH))
        self.register_buffer("size", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.reads == "early" or (self.reads == "evaluation" and not self.training):
            x = x - self.mean
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        if self.training:
            self.mean.lerp_(first.detach().mean(0), 0.1)
            self.size = 0.9 * self.size + 0.1 * x.detach().norm()
            self.count += 1
        return x - self.mean if self.reads == "late" else x


class Counted(Blocks):
    """A count from the start, which a branch looks at, and a mean of what the first block gives, at once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(plain.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count > 100:
            x = x * 2
        x = self.blocks[0](x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        for block in self.blocks[1:]:
            x = block(x)
        return x


def loss_of(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return module(**batch).square().mean()


def flow_of(module: nn.Module, *, training: bool = True) -> DataFlow:
    module.train(training)
    return trace(module, lambda: loss_of(module, plain.rows(0)), units=unit_names(module))


def assert_kept(module: nn.Module, keepers: dict[str, tuple[int, ...]]) -> None:
    """After two batches in stages every buffer is, where it is held, that of one process; and who holds which."""
    whole, flow, batches = copy.deepcopy(module), flow_of(module), [plain.rows(0), plain.rows(1)]
    parts = stage_specs(module, flow, HALVES)
    for batch in batches:
        loss_of(whole, batch)
    stages = stages_of(module, flow, HALVES)
    run_lockstep(stages, loss_of, batches)
    for name, expected in whole.named_buffers():
        holders = tuple(part.stage for part in parts if name in part.holds)
        assert holders == keepers.get(name, holders) and holders
        for stage in holders:
            assert torch.equal(dict(stages[stage].module.named_buffers())[name], expected), (name, stage)


@pytest.mark.parametrize("reads", ["", "late", "evaluation"])
def test_what_the_end_of_the_forward_changes_is_kept_by_the_last_stage(reads: str) -> None:
    torch.manual_seed(0)
    block = {f"blocks.{i}.norm.running_mean": (i // 2,) for i in range(4)}
    assert_kept(Late(reads), {"mean": (1,), "size": (1,), "count": (1,), **block})


def test_what_the_beginning_changes_is_kept_by_all_and_the_rest_by_who_has_what_it_is_made_of() -> None:
    torch.manual_seed(0)
    assert_kept(Counted(), {"count": (0, 1), "mean": (0,)})


def test_running_means_of_a_block_that_several_stages_call_are_refused() -> None:
    module = Blocks((0, 1, 2, 1, 3))
    flow = flow_of(module)
    said = (
        r"buffer blocks\.1\.norm\.\w+ to be changed in one.*blocks\.1 \(stage 0\), by blocks\.1@1 \(stage 1\): set plan"
    )
    with pytest.raises(BadInput, match=said):
        stage_specs(module, flow, HALVES)
    single_stage = SplitPoints(("blocks.0", "blocks.3"))
    held = [part.holds for part in stage_specs(module, flow, single_stage)]
    assert ["blocks.1.norm.running_mean" in names for names in held] == [True, False]


def test_frozen_means_may_lie_in_several_stages() -> None:
    module = Blocks((0, 1, 2, 1, 3))
    flow = flow_of(module, training=False)
    held = [part.holds for part in stage_specs(module, flow, HALVES)]
    assert ["blocks.1.norm.running_mean" in names for names in held] == [True, True]


def test_a_buffer_read_early_and_changed_late_is_refused() -> None:
    module = Late("early")
    flow = flow_of(module)
    with pytest.raises(BadInput, match=r"buffer mean to be read in .* \(stage 1\), got a read by blocks\.0, in stage"):
        stage_specs(module, flow, HALVES)
    assert len(stage_specs(module, flow, SplitPoints(("blocks.0",)))) == 1


def test_so_is_one_that_evaluation_reads_early_before_training_begins() -> None:
    module = Late("evaluation")
    ways = InputVariants(module, loss_of, HALVES)
    flow = ways.flow(plain.rows(0))
    with pytest.raises(BadInput, match=r"buffer mean to be read in .* \(stage 1\), got a read by blocks\.0, in stage"):
        ways.know(plain.rows(0), flow, stage_specs(module, flow, HALVES))


def test_an_evaluation_has_the_keepers_of_training() -> None:
    module = Late()
    ways = InputVariants(module, loss_of, HALVES)
    flow = ways.flow(plain.rows(0))
    ways.know(plain.rows(0), flow, stage_specs(module, flow, HALVES))
    held = [part.holds for part in ways.of(plain.rows(0), training=False)[1]]
    assert [{"mean", "size", "count"} <= names for names in held] == [False, True]
    assert "mean" not in held[0]


class Learning(Blocks):
    """Goes another way when its count is high, and counts at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2 if self.count > 100 else x
        x = super().forward(x)
        self.count += 1
        return x


def test_a_branch_on_a_buffer_that_is_right_elsewhere_is_refused() -> None:
    module = Learning()
    with pytest.raises(BadInput, match=r"buffer count to be read in the stage that changes it \(stage 1\)"):
        stage_specs(module, flow_of(module), HALVES)
