"""Plain modules, each cut in every even way into 2 to 4 stages and at every single place, against one process.

Those at every place are cut by night; by day test_cut.py has a stage for each call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.model.split.dataflow import DataFlow
from gossamer.model.split.reference import LockstepResult, run_lockstep, stages_of
from gossamer.model.split.split_points import SplitPoints, balanced_split, shared_names, stage_specs
from gossamer.model.split.stage import StageModule
from gossamer.model.split.trace import trace
from gossamer.model.unit_config import given_units
from gossamer.model.unit_seeds import UnitSeeds, unit_seeds
from gossamer.model.units import unit_names
from gossamer.spec.errors import BadInput
from model import plain, plain_ways

Batch = Mapping[str, Any]


def frozen() -> nn.Module:
    """A language model of which the embedding and two blocks are not trained."""
    module = plain.Language(layers=4)
    for name in ("body.places", "body.blocks.0", "body.blocks.2"):
        module.get_submodule(name).requires_grad_(False)
    return module


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "mlp": (plain.mlp, plain.rows),
    "residual_cnn": (plain.ResNet, plain.images),
    "u_net": (plain.UNet, plain.images),
    "encoder_decoder": (plain.Translator, plain.pairs),
    "gnn": (plain.GraphNet, plain.graphs),
    "language": (plain.Language, plain.tokens),
    "functional_head": (lambda: plain.Language(functional=True), plain.tokens),
    "frozen": (frozen, plain.tokens),
    "wrapper": (plain.Wrapper, plain.rows),
    "universal": (plain_ways.Universal, plain.rows),
    "shared_list": (plain_ways.SharedList, plain.rows),
    "glued": (plain_ways.Glued, plain.rows),
    "two_tasks": (plain_ways.TwoTasks, plain.rows),
    "attribute_losses": (plain_ways.AttributeLosses, plain.rows),
    "records": (plain_ways.Records, plain.rows),
    "masked": (plain_ways.Masked, plain.tokens),
    "running": (plain_ways.Running, plain.rows),
    "recurrent": (plain_ways.Recurrent, plain.tokens),
    "patches": (plain_ways.Patches, plain.images),
    "in_place": (lambda: plain_ways.InPlace(plain_ways.PreActivation), plain.rows),
}
# Here three and more read what a block gave, some of them in other stages: each stage first adds up the gradients of
# its own readers, so the sum has another order. Everything else is equal bit for bit.
OTHER_ORDER = {"gnn", "glued", "masked", "records"}


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    output = module(batch["x"]) if isinstance(module, nn.Sequential) else module(**batch)
    loss: Tensor = sum((x - 0.3).square().mean() for x in tree_leaves(output))
    return loss


def built(kind: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    make, batch = MODULES[kind]
    torch.manual_seed(0)
    return make(), [batch(seed) for seed in range(2)]


def flow_of(module: nn.Module, batch: Batch, units: Sequence[str] = ()) -> DataFlow:
    return trace(module, lambda: loss_of(module, batch), units=units or unit_names(module))


def uncut(module: nn.Module, batches: Sequence[Batch]) -> tuple[LockstepResult, nn.Module]:
    module = copy.deepcopy(module)
    losses = []
    for batch in batches:
        loss = loss_of(module, batch)
        loss.backward()
        losses.append(loss.detach())
    return LockstepResult(losses, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}), module


def assert_close(ours: Tensor, theirs: Tensor, name: str) -> None:
    """Within some roundings of the largest element."""
    assert float((ours - theirs).abs().max()) <= 1e-6 * float(theirs.abs().max()), name


def assert_equal(ours: LockstepResult, theirs: LockstepResult, close: Callable[[str], bool]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, gradient in theirs.gradients.items():
        if close(name):
            assert_close(ours.gradients[name], gradient, name)
        else:
            assert torch.equal(ours.gradients[name], gradient), name


def assert_buffers_equal(stages: Sequence[StageModule], whole: nn.Module) -> None:
    """Those in units, which one stage each has run."""
    expected = dict(whole.named_buffers())
    for stage in stages:
        for name, buffer in stage.module.named_buffers():
            if stage.names.get(name) in stage.part.holds:
                assert torch.equal(buffer, expected[name]), name


def ways_to_cut(flow: DataFlow, ways: str = "even") -> Iterator[SplitPoints]:
    """Even ones of 2 to 4 stages; or every one of 2 stages, and a stage for each call."""
    names = [call.name for call in flow.calls]
    if ways == "even":
        yield from (balanced_split(flow, stages) for stages in range(2, min(4, len(names)) + 1))
    else:
        yield from (SplitPoints((names[0], name)) for name in names[1:])
        yield SplitPoints(tuple(names))


WAYS = ["even", pytest.param("every", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("kind", MODULES)
def test_every_gradient_and_buffer_equals_the_uncut_module_s(kind: str, ways: str) -> None:
    module, batches = built(kind)
    flow = flow_of(module, batches[0])
    assert len(flow.calls) >= 4 or kind == "wrapper"
    expected, whole = uncut(module, batches)
    for cuts in ways_to_cut(flow, ways):
        stages = stages_of(module, flow, cuts)
        summed = shared_names([stage.part for stage in stages], module)
        ours = run_lockstep(stages, loss_of, batches)
        assert_equal(ours, expected, lambda name, summed=summed: kind in OTHER_ORDER or name in summed)
        assert_buffers_equal(stages, whole)


@pytest.mark.parametrize("kind", MODULES)
def test_a_trace_leaves_everything_as_it_was(kind: str) -> None:
    module, batches = built(kind)
    state, attributes = copy.deepcopy(module.state_dict()), [set(vars(m)) for m in module.modules()]
    generator = torch.get_rng_state()
    flow_of(module, batches[0])
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(x, state[name]) for name, x in module.state_dict().items())
    assert [set(vars(m)) for m in module.modules()] == attributes


DROPPING: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "language": (lambda: plain.Language(dropout=0.3), plain.tokens),
    "encoder_decoder": (lambda: plain.Translator(dropout=0.3), plain.pairs),
    "glued": (lambda: plain_ways.Glued(noise=0.3), plain.rows),  # between its units
}


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[pytest.mark.nightly] if one == "encoder_decoder" else []) for one in DROPPING]
)
def test_dropout_does_not_depend_on_the_cut(kind: str, ways: str) -> None:
    make, inputs = DROPPING[kind]
    torch.manual_seed(0)
    module, batch = make(), inputs(0)
    flow = flow_of(module, batch)
    seeds: dict[nn.Module, UnitSeeds] = {}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        if module not in seeds:
            seeds[module] = unit_seeds(module, seed=3)
        with seeds[module].at(5, 6):
            return loss_of(module, batch)

    whole = copy.deepcopy(module)
    expected = loss(whole, batch)
    expected.backward()
    assert not torch.equal(expected, loss_of(module.eval(), batch))  # something is dropped
    for cuts in ways_to_cut(flow, ways):
        ours = run_lockstep(stages_of(module.train(), flow, cuts), loss, [batch])
        assert torch.equal(ours.losses[0], expected.detach())
        for name, p in whole.named_parameters():
            assert p.grad is not None
            assert_close(ours.gradients[name], p.grad, name)


def test_a_container_stands_for_its_first_unit() -> None:
    module, batches = built("residual_cnn")
    flow = flow_of(module, batches[0])
    named, meant = (stage_specs(module, flow, SplitPoints(("conv1", "layer2" + rest, "fc"))) for rest in ("", ".0"))
    assert named == meant


def test_names_given_make_units_of_modules_inside_of_one() -> None:
    torch.manual_seed(0)
    module, batches = plain.Wrapper(), [plain.rows(0), plain.rows(1)]
    assert unit_names(module) == ("net.first", "net.middle", "net.last")
    cuts = SplitPoints(("net.first", "net.middle.out"))
    with pytest.raises(BadInput, match=r"net\.middle\.out, inside net\.middle: cut before net\.middle"):
        stage_specs(module, flow_of(module, batches[0]), cuts)
    flow = flow_of(module, batches[0], units=given_units(module, cuts.first))
    assert [c.name for c in flow.calls][1:4] == ["net.middle.gate", "net.middle.value", "net.middle.out"]
    stages = stages_of(module, flow, cuts)
    expected, _ = uncut(module, batches)
    # Three paths lead back to the first unit: two within the first stage, and one through the second.
    assert_equal(run_lockstep(stages, loss_of, batches), expected, lambda name: name.startswith("net.first"))
    held = {"middle.scale", "middle.out.weight", "middle.out.bias", "last.weight", "last.bias"}
    assert set(stages[1].parameters()) == {f"net.{name}" for name in held}


def test_more_stages_than_units_is_refused_with_how_many_there_can_be() -> None:
    module, batches = built("shared_list")
    with pytest.raises(
        BadInput, match=r"at least 5 units for 5 stages, got 4: layers\.0, .*plan\.units.*, or use 4 stages at most"
    ):
        balanced_split(flow_of(module, batches[0]), 5)


def test_a_module_without_parts_is_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(plain.WIDTH, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    module = Flat()
    with pytest.raises(
        BadInput, match=r"can be split into 2 stages, got one without repeated blocks.*name the modules"
    ):
        balanced_split(flow_of(module, plain.rows(0)), 2)


def test_a_cut_inside_a_shared_block_is_refused() -> None:
    module, batches = built("universal")
    flow = flow_of(module, batches[0])
    with pytest.raises(BadInput, match=r"blocks\.1\.mix, inside blocks\.1, .*called 3 times: cut before blocks\.1"):
        stage_specs(module, flow, SplitPoints(("inlet", "blocks.1.mix")))


class Peeking(plain_ways.TwoTasks):
    """Looks at what the second block gave: a branch, or a number for a log."""

    def forward(self, x: Tensor) -> Any:
        for i, block in enumerate(self.trunk):
            x, _ = block(x)
            if i == 1:
                self.seen = float(x.detach().norm())
        return self.early(x)


def test_a_number_read_from_what_other_stages_compute_is_refused() -> None:
    module = Peeking()
    flow = flow_of(module, plain.rows(0))
    with pytest.raises(
        BadInput, match=r"branch on the output of trunk\.1.*before trunk\.2.*move the branch into a unit"
    ):
        stage_specs(module, flow, SplitPoints(("trunk.0", "trunk.3")))
    assert len(stage_specs(module, flow, SplitPoints(("trunk.0", "trunk.2")))) == 2  # it is received there


class Hoarding(plain_ways.Kept):
    """Keeps its share in a dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.kept["share"] = x.square().mean()
        return x


class Hoard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Hoarding() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, sum(b.kept["share"] for b in self.blocks)


def test_a_tensor_in_a_dict_of_a_block_is_sent_to_who_reads_it() -> None:
    torch.manual_seed(0)
    module, batches = Hoard(), [plain.rows(i) for i in range(3)]
    expected, _ = uncut(module, batches)
    flow = flow_of(module, batches[0])
    for cuts in (*ways_to_cut(flow), *ways_to_cut(flow, "every")):
        assert_equal(run_lockstep(stages_of(module, flow, cuts), loss_of, batches), expected, lambda _: True)


def test_what_a_block_writes_into_its_argument_and_others_read_under_another_name_is_refused() -> None:
    module = plain_ways.InPlace(plain_ways.Rectifying)
    flow = flow_of(module, plain.rows(0))
    with pytest.raises(BadInput, match=r"blocks\.3 to return.*which head reads.*this one is before head"):
        stage_specs(module, flow, SplitPoints(("blocks.0", "head")))
    expected, _ = uncut(module, [plain.rows(0)])
    stages = stages_of(module, flow, SplitPoints(("blocks.0", "blocks.2")))  # both readers in one stage
    assert_equal(run_lockstep(stages, loss_of, [plain.rows(0)]), expected, lambda _: False)


def test_a_shape_that_depends_on_values_is_noticed_where_it_changes() -> None:
    torch.manual_seed(0)
    module, batches = plain_ways.Packed(), [plain.tokens(seed) for seed in range(2)]
    flow = flow_of(module, batches[0])
    stages = stages_of(module, flow, SplitPoints(("embed", "blocks.2")))
    expected, _ = uncut(module, batches[:1])
    assert_equal(run_lockstep(stages, loss_of, batches[:1]), expected, lambda _: False)
    with pytest.raises(
        BadInput, match=r"blocks\.1 to produce a tensor of shape \(24, 16\) on stage 0.*got \(25, 16\).*pad it"
    ):
        run_lockstep(stages, loss_of, batches[1:])


class Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Boxing(plain_ways.Dense):
    def forward(self, box: Any) -> Any:
        return Box(super().forward(box.x))


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Boxing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        box = Box(x)
        for layer in self.layers:
            box = layer(box)
        return box.x


def test_an_object_that_nobody_can_rebuild_is_refused() -> None:
    module = Boxes()
    flow = flow_of(module, plain.rows(0))
    with pytest.raises(
        BadInput, match=r"layers\.0 to return tensors.*dataclasses, got a Box.*no split point before layers\.1"
    ):
        stage_specs(module, flow, SplitPoints(("layers.0", "layers.1")))
