from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.model.split.dataflow import DataFlow
from gossamer.model.split.input_variants import InputVariants
from gossamer.model.split.reference import LockstepResult, gradients_of, run_lockstep, stages_of
from gossamer.model.split.split_points import SplitPoints, balanced_split, shared_names, stage_specs
from gossamer.model.split.trace import trace
from gossamer.model.unit_seeds import unit_seeds
from gossamer.model.units import unit_names
from gossamer.spec.errors import BadInput
from model.cuttable import MODULES, WIDTH, Chain, Layer, Shared, rows

Batch = Mapping[str, Any]


def mean_square(module: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = module(batch["x"])
    return (output - 0.3).square().mean()


def uncut(module: nn.Module, batches: Sequence[Batch]) -> LockstepResult:
    module = copy.deepcopy(module)
    losses = []
    for batch in batches:
        loss = mean_square(module, batch)
        loss.backward()
        losses.append(loss.detach())
    return LockstepResult(losses, {n: p.grad for n, p in module.named_parameters() if p.grad is not None})


def flow_of(module: nn.Module, batch: Batch) -> DataFlow:
    return trace(module, lambda: mean_square(module, batch), units=unit_names(module))


def assert_equal(ours: LockstepResult, theirs: LockstepResult, summed: Mapping[str, Any]) -> None:
    """Bit for bit, but for what several stages add up: there the order of the sum differs."""
    assert all(torch.equal(a, b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, gradient in theirs.gradients.items():
        if name in summed:
            torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
        else:
            assert torch.equal(ours.gradients[name], gradient), name


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", MODULES)
def test_every_gradient_equals_the_uncut_module_s(kind: str, stages: int) -> None:
    make, inputs = MODULES[kind]
    torch.manual_seed(0)
    module: nn.Module = make()
    batches = [{"x": inputs(seed)} for seed in range(2)]
    flow = flow_of(module, batches[0])
    cuts = balanced_split(flow, stages)
    summed = shared_names(stage_specs(module, flow, cuts), module)
    assert_equal(run_lockstep(stages_of(module, flow, cuts), mean_square, batches), uncut(module, batches), summed)


@pytest.mark.parametrize("kind", MODULES)
def test_a_stage_for_every_call(kind: str) -> None:
    make, inputs = MODULES[kind]
    module: nn.Module = make()
    batches = [{"x": inputs()}]
    flow = flow_of(module, batches[0])
    cuts = balanced_split(flow, len(flow.calls))
    summed = shared_names(stage_specs(module, flow, cuts), module)
    assert_equal(run_lockstep(stages_of(module, flow, cuts), mean_square, batches), uncut(module, batches), summed)


def test_a_trace_leaves_the_module_and_the_generators_alone() -> None:
    module = MODULES["residual_cnn"][0]()
    before, generator = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    flow_of(module, {"x": MODULES["residual_cnn"][1]()})
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_dropout_is_the_same_however_the_module_is_cut() -> None:
    torch.manual_seed(0)
    module = Chain(dropout=0.4)
    batch = {"x": rows()}
    flow = flow_of(module, batch)

    def keyed(one: nn.Module) -> Callable[[nn.Module, Batch], Tensor]:
        seeds = unit_seeds(one, seed=3)

        def loss(module: nn.Module, batch: Batch) -> Tensor:
            with seeds.at(5, 6):
                return mean_square(module, batch)

        return loss

    whole = copy.deepcopy(module)
    expected = keyed(whole)(whole, batch)
    expected.backward()
    for cuts in (balanced_split(flow, 2), balanced_split(flow, 3), SplitPoints(("blocks.0", "blocks.3"))):
        stages = stages_of(module, flow, cuts)
        losses = {id(s.module): keyed(s.module) for s in stages}
        ours = run_lockstep(stages, lambda m, b, by=losses: by[id(m)](m, b), [batch])
        assert torch.equal(ours.losses[0], expected.detach())
        for name, p in whole.named_parameters():
            torch.testing.assert_close(ours.gradients[name], p.grad, rtol=1e-5, atol=1e-7)


def test_ghosts_hold_no_storage_and_every_parameter_has_a_home() -> None:
    module = Shared()
    flow = flow_of(module, {"x": rows()})
    stages = stages_of(module, flow, SplitPoints(("inlet", "common@1", "outlet")))
    held = [set(stage.parameters()) for stage in stages]
    assert {stage.names[n] for stage in stages for n in stage.parameters()} == dict(module.named_parameters()).keys()
    for stage, names in zip(stages, held, strict=True):
        others = {name for name, p in stage.module.named_parameters() if isinstance(p, AbsentTensor)}
        assert others == dict(stage.module.named_parameters()).keys() - names
    shared = shared_names([s.part for s in stages], module)
    assert shared["inlet.weight"] == (0, 2) and shared["common.mix.weight"] == (0, 1)


def test_a_relayed_value_crosses_stages_that_do_not_read_it() -> None:
    module = MODULES["u_net"][0]()
    flow = flow_of(module, {"x": MODULES["u_net"][1]()})
    parts = stage_specs(module, flow, SplitPoints(("inlet", "middle", "up.0", "outlet")))
    assert [len(p.receives) for p in parts] == [0, 3, 3, 1]
    assert [p.sends for p in parts[:-1]] == [p.receives for p in parts[1:]]


def test_what_never_reaches_a_later_stage_is_not_sent() -> None:
    module = MODULES["encoder_decoder"][0]()
    flow = flow_of(module, {"x": rows()})
    parts = stage_specs(module, flow, SplitPoints(("encoder.0", "decoder.1", "head")))
    assert [len(p.receives) for p in parts] == [0, 2, 1]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if x.sum() > 1000:
            x = x * 2
        for block in self.blocks[1:]:
            x = block(x)
        return x


def test_a_branch_on_a_ghost_s_value_is_refused() -> None:
    module, batch = Branching(), {"x": rows()}
    flow = flow_of(module, batch)
    with pytest.raises(BadInput, match=r"branch on the output of blocks\.0.*before blocks\.1"):
        stage_specs(module, flow, SplitPoints(("blocks.0", "blocks.2")))
    cuts = SplitPoints(("blocks.0", "blocks.1"))  # received there, and real
    assert_equal(run_lockstep(stages_of(module, flow, cuts), mean_square, [batch]), uncut(module, [batch]), {})


LEAKED: list[Tensor] = []


class Leaking(nn.Module):
    """Blocks keep tensors in a global list, which nothing in their calls shows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pushing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        LEAKED.clear()
        for block in self.blocks:
            x = block(x)
        return x + sum(LEAKED)


class Pushing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        LEAKED.append(self.mix(x))
        return torch.tanh(x + self.mix(x))


def test_a_tensor_that_leaves_a_unit_by_no_known_way_is_refused_by_name() -> None:
    module = Leaking()
    flow = flow_of(module, {"x": rows()})
    with pytest.raises(BadInput, match=r"blocks\.0 to return.*which the end of the forward reads"):
        stage_specs(module, flow, balanced_split(flow, 2))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        return x


def test_reentrant_checkpointing_is_refused() -> None:
    with pytest.raises(BadInput, match="reentrant"):
        flow_of(Frozen(), {"x": rows().requires_grad_()})


class Warming(Chain):
    """Runs its blocks once without a graph, and then with one."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks:
                x = block(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_units_may_run_without_a_graph() -> None:
    module, batch = Warming(), {"x": rows()}
    flow = flow_of(module, batch)
    assert [c.name for c in flow.calls[3:5]] == ["blocks.3", "blocks.0@1"]
    for stages in (2, 4):
        cuts = balanced_split(flow, stages)
        summed = shared_names(stage_specs(module, flow, cuts), module)
        ours = run_lockstep(stages_of(module, flow, cuts), mean_square, [batch])
        assert_equal(ours, uncut(module, [batch]), summed)


class Recomputing(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_other_checkpointing_is_cut_like_anything_else() -> None:
    module, batches = Recomputing(), [{"x": rows(1)}, {"x": rows(2)}]
    flow = flow_of(module, batches[0])
    stages = stages_of(module, flow, balanced_split(flow, 3))
    assert_equal(run_lockstep(stages, mean_square, batches), uncut(module, batches), {})


class Fickle(Chain):
    """Drops a block on some inputs."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if x.mean() < 5 else self.blocks[:-1]:
            x = block(x)
        return self.head(x)


def test_a_forward_that_takes_another_way_later_is_noticed() -> None:
    module = Fickle()
    flow = flow_of(module, {"x": rows()})
    stages = stages_of(module, flow, SplitPoints(("blocks.0", "head")))
    with pytest.raises(BadInput, match=r"wanted blocks\.3 to come next .*stage 0.*got head"):
        run_lockstep(stages, mean_square, [{"x": rows() + 9}])


def test_a_stage_may_leave_out_a_block_of_its_own_that_nobody_else_hears_of() -> None:
    module, batches = Fickle(), [{"x": rows()}, {"x": rows() + 9}]
    flow = flow_of(module, {"x": rows()})
    stages = stages_of(module, flow, SplitPoints(("blocks.0", "blocks.2")))
    assert_equal(run_lockstep(stages, mean_square, batches), uncut(module, batches), {})


def test_batches_of_another_shape_are_traced_again() -> None:
    module = MODULES["gnn"][0]()
    batches = [{"x": rows(count=5)}, {"x": rows(count=7)}]
    cuts = balanced_split(flow_of(module, batches[0]), 3)
    ways = InputVariants(copy.deepcopy(module), mean_square, cuts, unit_names(module))
    stages = stages_of(module, ways.of(batches[0])[0], cuts)
    for batch in batches:
        flow, parts = ways.of(batch)
        for stage, part in zip(stages, parts, strict=True):
            stage.follow(flow, part)
            stage.module.zero_grad()
        assert_equal(run_lockstep(stages, mean_square, [batch]), uncut(module, [batch]), {})
    assert len(ways.known) == 2 and ways.of({"x": rows(seed=9)}) is ways.of(batches[0])


def test_cuts_that_cannot_be_are_refused_when_made() -> None:
    module = Chain()
    flow = flow_of(module, {"x": rows()})
    with pytest.raises(BadInput, match="at least 6 units for 6 stages, got 5"):
        balanced_split(flow, 6)
    with pytest.raises(BadInput, match=r"between units, got blocks\.1\.mix, inside blocks\.1: cut before blocks\.1"):
        stage_specs(module, flow, SplitPoints(("blocks.0", "blocks.1.mix")))
    with pytest.raises(BadInput, match=r"no unit 'block\.1'"):
        stage_specs(module, flow, SplitPoints(("blocks.0", "block.1")))
    with pytest.raises(BadInput, match="order of the forward"):
        stage_specs(module, flow, SplitPoints(("blocks.0", "head", "blocks.2")))
    with pytest.raises(BadInput, match=r"begin with blocks\.0"):
        stage_specs(module, flow, SplitPoints(("blocks.1", "blocks.2")))
    shared = Shared()
    flow = flow_of(shared, {"x": rows()})
    with pytest.raises(BadInput, match=r"common\.mix, inside common, which is one module called 3 times"):
        stage_specs(shared, flow, SplitPoints(("inlet", "common.mix")))


def test_no_blocks_and_no_names_is_refused() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    flow = flow_of(module, {"x": rows()})
    with pytest.raises(BadInput, match=r"without repeated blocks.*name the modules"):
        balanced_split(flow, 2)


def test_the_dearest_stage_is_as_cheap_as_possible() -> None:
    flow = flow_of(Chain(layers=6), {"x": rows()})
    costs = {"blocks.0": 5.0, "head": 6.0} | {f"blocks.{i}": 1.0 for i in range(1, 6)}
    assert balanced_split(flow, 3, costs=costs) == SplitPoints(("blocks.0", "blocks.1", "head"))
    assert balanced_split(flow, 1) == SplitPoints(("blocks.0",))


def test_gradients_add_up_over_stages() -> None:
    module, batch = Chain(), {"x": rows()}
    flow = flow_of(module, batch)
    stages = stages_of(module, flow, balanced_split(flow, 2))
    outcome = run_lockstep(stages, mean_square, [batch])
    parts = [s.parameters()["scale"].grad for s in stages]
    torch.testing.assert_close(outcome.gradients["scale"], sum(p for p in parts if p is not None))
    assert all(p is not None and p.abs().max() > 0 for p in parts)
    assert gradients_of(stages[1:]).keys() < outcome.gradients.keys()
