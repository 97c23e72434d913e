"""Random numbers of Python and numpy are keyed as torch's are, and none may decide which way a staged forward takes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer.model.rng_usage import NUMPY, PYTHON, draws
from gossamer.model.split.input_variants import InputVariants
from gossamer.model.split.reference import run_lockstep, stages_of
from gossamer.model.split.split_points import SplitPoints, balanced_split
from gossamer.model.unit_seeds import Keyed, unit_seeds
from gossamer.model.units import unit_names
from gossamer.spec.errors import BadInput
from model.tiny import Plain, batch

WIDTH = 4


def by_python() -> float:
    return random.random()


def by_python_imported() -> float:
    return uniform(0, 1)


def by_numpy() -> float:
    return float(np.random.rand())


def by_numpy_imported_late() -> float:
    from numpy.random import uniform as draw

    return float(draw())


def by_torch() -> float:
    return torch.rand([]).item()


def by_torch_in_place() -> float:
    return float(torch.empty(1).uniform_(0, 1))


DRAWS: list[Callable[[], float]] = [by_python, by_python_imported, by_numpy, by_numpy_imported_late]
ALL_DRAWS = [*DRAWS, by_torch, by_torch_in_place]


class Noise(nn.Module):
    """A block that draws."""

    def __init__(self, draw: Callable[[], float] | None) -> None:
        super().__init__()
        self.mix, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) * (1 + self.draw() if self.draw else 1)


class Noises(nn.Module):
    """Blocks that draw different amounts, called by their forward, and draws between them."""

    def __init__(self, draw: Callable[[], float], *, between: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noise(draw if i % 2 else None) for i in range(4))
        self.between = draw if between else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
            if self.between is not None:
                x = x + self.between()
        return x


class Dropping(nn.Module):
    """Blocks each of which is left out with probability `layerdrop`."""

    def __init__(self, draw: Callable[[], float], layerdrop: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.draw, self.layerdrop = draw, layerdrop

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not (self.training and self.draw() < self.layerdrop):
                x = x + block(x)
        return x


def loss_of(module: nn.Module, rows: Any) -> Tensor:
    return module(rows["x"]).square().mean()


def rows(seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))}


def ways_of(module: nn.Module) -> InputVariants:
    return InputVariants(module, loss_of, SplitPoints(()), unit_names(module))


@pytest.mark.parametrize("draw", ALL_DRAWS)
def test_every_generator_is_keyed_however_the_model_is_cut(draw: Callable[[], float]) -> None:
    torch.manual_seed(0)
    module, given = Noises(draw), [rows(0), rows(1)]
    whole = copy.deepcopy(module)
    seeds = {id(whole): unit_seeds(whole, seed=1)}

    def loss(one: nn.Module, batch: Any) -> Tensor:
        with seeds[id(one)].at(2, int(batch is given[0])):
            return loss_of(one, batch)

    expected = [loss(whole, batch) for batch in given]
    flow = ways_of(module).flow(given[0])
    for stages in (2, 4):
        cut = stages_of(module, flow, balanced_split(flow, stages))
        seeds |= {id(stage.module): unit_seeds(stage.module, seed=1) for stage in cut}
        ours = run_lockstep(cut, loss, given)
        assert all(map(torch.equal, ours.losses, expected))
    random.seed(9)
    np.random.seed(9)
    assert torch.equal(loss(whole, given[0]), expected[0]), "whatever was drawn before"
    assert not torch.equal(loss(whole, given[1]) / loss_of(whole.eval(), given[1]), torch.ones(())), "it does draw"


@pytest.mark.parametrize("draw", DRAWS)
def test_generators_outside_are_left_alone(draw: Callable[[], float]) -> None:
    module = Noises(draw)
    seeds = unit_seeds(module, seed=0)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    with seeds.at(0, 0):
        first = module(rows()["x"])
        with seeds.at(0, 1):
            second = module(rows()["x"])
        following = draw()
    with seeds.at(0, 0):
        assert torch.equal(module(rows()["x"]), first)
        assert draw() == following, "a forward within another one moves nothing"
    assert not torch.equal(first, second)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]


def test_code_that_may_draw_is_found_by_reading_it() -> None:
    kinds = [PYTHON, PYTHON, NUMPY, NUMPY, "", ""]
    for draw, kind in zip(ALL_DRAWS, kinds, strict=True):
        whole, quiet, loud = draws(Noises(draw, between=False), "", "blocks.0", "blocks.1")
        assert whole == loud and ({kind} <= whole if kind else not whole), draw
        assert not quiet
    assert draws(Plain(), "", "blocks.0") == (frozenset(), frozenset())
    assert draws(nn.Sequential(torch.jit.script(nn.Linear(2, 2))), "", "0") == (frozenset(), frozenset())


def test_removing_gives_every_forward_back() -> None:
    module = Plain()
    own = module.blocks[1].forward
    module.blocks[1].forward = own  # type: ignore[method-assign]
    before = [dict(vars(inner)) for inner in module.modules()]
    seeds = unit_seeds(module, seed=0)
    assert isinstance(module.blocks[0].forward, Keyed) and isinstance(module.blocks[1].forward, Keyed)
    seeds.remove()
    assert [dict(vars(inner)) for inner in module.modules()] == before
    seeds.remove()


def test_a_copy_calls_its_own_parameters() -> None:
    module = Plain()
    seeds = unit_seeds(module, seed=0)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    with seeds.at(0, 0):
        assert not other(batch()["input_ids"]).any() and module(batch()["input_ids"]).any()


@pytest.mark.parametrize("draw", ALL_DRAWS)
@pytest.mark.parametrize("probability", [0.001, 0.999])
def test_a_way_that_chance_decides_is_refused_before_the_run(draw: Callable[[], float], probability: float) -> None:
    ways = ways_of(Dropping(draw, probability))
    flow = ways.flow(rows())
    assert flow.by_chance
    with pytest.raises(BadInput, match=r"whether blocks\.\d runs.* set layerdrop to 0"):
        ways.check_chance(rows(), flow)


def by_torch_in_a_range() -> float:
    return float(torch.empty(1).uniform_(-3, -1))


def by_torch_in_a_named_range() -> float:
    return float(torch.empty(1).uniform_(to=9, **{"from": 5}))


@pytest.mark.parametrize(("draw", "least", "most"), [(by_torch_in_a_range, -3, -1), (by_torch_in_a_named_range, 5, 9)])
def test_a_range_of_random_numbers_is_traced_at_its_own_ends(
    draw: Callable[[], float], least: float, most: float
) -> None:
    for border in (least + 0.01, most - 0.01):
        ways = ways_of(Dropping(draw, border))
        with pytest.raises(BadInput, match=r"whether blocks\.\d runs"):
            ways.check_chance(rows(), ways.flow(rows()))
    for border in (least, most):  # never below the one, always below the other
        ways = ways_of(Dropping(draw, border))
        ways.check_chance(rows(), ways.flow(rows()))


@pytest.mark.parametrize("draw", ALL_DRAWS)
def test_chance_that_decides_nothing_is_let_through(draw: Callable[[], float]) -> None:
    for module in (Dropping(draw, 0.0), Dropping(draw, 0.5).eval(), Noises(draw, between=False)):
        ways, training = ways_of(module), module.training
        ways.check_chance(rows(), ways.flow(rows(), training=training))
    assert not ways.flow(rows()).by_chance, "what blocks do within is their own affair"


def test_every_trace_draws_the_same_and_leaves_generators_as_they_were() -> None:
    for draw in ALL_DRAWS:
        ways = ways_of(Dropping(draw, 0.5))
        names = []
        for seed in range(4):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
            names.append([call.name for call in ways.flow(rows()).calls])
            assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
            assert before[2] == np.random.get_state()[1].tolist()  # type: ignore[index]
        assert all(found == names[0] for found in names)
