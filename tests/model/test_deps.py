"""Networks that shrink while they train: which subnets a step has, what they compute, and what trains them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import loss as losses
from gossamer.loss.deps import SUBNETS, WEIGHTS
from gossamer.model.deps_supernet import DepsSupernet
from gossamer.model.elastic import Elastic, recalibrate
from gossamer.model.unit_seeds import unit_seeds
from gossamer.model.units import unit_names
from gossamer.recipe import Recipe
from gossamer.recipe.conflicts.supernet import supernet_alone
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import MeshSizes, Plan


class Residual(nn.Module):
    def __init__(self, width: int, hidden: int, *, is_conv: bool) -> None:
        super().__init__()
        if is_conv:
            self.stack = nn.Sequential(
                nn.Conv2d(width, hidden, 3, padding=1),
                nn.BatchNorm2d(hidden),
                nn.ReLU(),
                nn.Conv2d(hidden, width, 3, padding=1),
            )
        else:
            self.stack = nn.Sequential(
                nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.stack(x)
        return out


class Digits(nn.Module):
    """A stem, residual blocks, a head: forward(x) of (B, 64) gives logits (B, 10)."""

    def __init__(self, *, is_conv: bool, width: int = 8, hidden: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.is_conv = is_conv
        self.stem = nn.Conv2d(1, width, 3, padding=1) if is_conv else nn.Linear(64, width)
        self.blocks = nn.ModuleList(Residual(width, hidden, is_conv=is_conv) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.view(-1, 1, 8, 8) if self.is_conv else x)
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(h.mean((2, 3)) if self.is_conv else h)
        return out


def rows(count: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(count, 64, generator=generator),
        "labels": torch.randint(0, 10, (count,), generator=generator),
    }


def network(*, is_conv: bool = False) -> Digits:
    """One whose batch norms have seen data."""
    torch.manual_seed(0)
    made = Digits(is_conv=is_conv)
    for _ in range(3):
        made(rows()["x"])
    return made


def supernet(**more: float) -> DepsSupernet:
    return DepsSupernet(network(), steps=100, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_conv", [False, True])
def test_an_extracted_subnet_computes_what_the_sliced_supernet_does(is_conv: bool) -> None:
    module = network(is_conv=is_conv).eval()
    elastic, x = Elastic(module), rows()["x"]
    before = copy.deepcopy(module.state_dict())
    for widths, depth in (((1, 1, 1), 1.0), ((0.25, 0.5, 0.75), 1.0), ((0.25, 0.25, 0.25), 0.34)):
        subnet = elastic.at(widths, [depth])
        sliced, alone = elastic.forward(subnet, (x,), {}), elastic.extract(subnet)
        assert torch.equal(alone(x), sliced)
        assert sum(p.nbytes for p in alone.parameters()) == elastic.nbytes(subnet)
    assert torch.equal(elastic.forward(elastic.whole, (x,), {}), module(x))
    assert isinstance(alone, Digits) and len(alone.blocks) == 1
    assert next(alone.blocks[0].stack[0].parameters()).shape[0] == 4  # type: ignore[index, union-attr]
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())


class Nested(nn.Module):
    """Residual blocks, each with blocks inside."""

    def __init__(self) -> None:
        super().__init__()
        self.around = nn.ModuleList(Around() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.around:
            x = one(x)
        return x


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(4, 8, is_conv=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_lists_of_blocks_inside_of_blocks_are_shortened_too() -> None:
    torch.manual_seed(0)
    module, x = Nested().eval(), torch.randn(5, 4)
    elastic = Elastic(module)
    subnet = elastic.at([0.5] * 6, [2 / 3, 0.5, 1.0, 0.5])
    alone = elastic.extract(subnet)
    assert torch.equal(alone(x), elastic.forward(subnet, (x,), {}))
    assert [len(one.blocks) for one in alone.around] == [1, 2]  # type: ignore[union-attr, arg-type]
    assert sum(p.nbytes for p in alone.parameters()) == elastic.nbytes(subnet)


def test_the_range_opens_late_and_step_by_step_and_sampled_subnets_keep_to_it() -> None:
    module = supernet(start=0.5, opening=0.2, least_width=0.25, least_depth=0.34, sampled=3)
    assert all(not module.subnets(0, step) for step in range(50))
    smallest = []
    for step in range(50, 100):
        least, *sampled = module.subnets(0, step)
        assert len(sampled) == 3 and module.subnets(0, step) == (least, *sampled)
        smallest.append(least.widths[0][1])
        floor = 16 * (1 - module.opened(step) * 0.75)
        for one in sampled:
            assert all(round(floor) <= width <= 16 for _, width in one.widths)
            assert all(least.depths[0][1] <= depth <= 3 for _, depth in one.depths)
    assert smallest == sorted(smallest, reverse=True) and smallest[0] > 14 and smallest[19:] == [4] * 31
    assert module.subnets(0, 90) != module.subnets(1, 90)
    assert supernet(start=0.0, opening=0.0).opened(0) == 1 and supernet(start=1.0).opened(99) == 0


def test_gradients_are_those_of_the_sum_of_losses_written_out() -> None:
    module = supernet(start=0.0, opening=0.5, rate=0.5, sampled=2).train()
    objective, batch = losses.build("deps"), rows()
    seeds = unit_seeds(module, unit_names(module), seed=3)
    with seeds.at(40, 0):
        output = module(x=batch["x"])
        value = objective(output, batch)
        value.backward()
    assert output[SUBNETS].shape == (3, 12, 10)
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    elastic = Elastic(module.network)
    teacher = module.network(batch["x"])
    expected = nn.functional.cross_entropy(teacher, batch["labels"])
    weight = 0.5 + 0.5 * module.opened(40)
    for subnet in module.subnets(3, 40):
        student = elastic.forward(subnet, (batch["x"],), {}).log_softmax(-1)
        target = teacher.detach().softmax(-1)
        expected = expected + weight / 3 * (target * (target.log() - student)).sum(-1).mean()
    expected.backward()
    assert torch.allclose(value, expected, atol=1e-6)
    for name, p in module.named_parameters():
        assert p.grad is not None and torch.allclose(found[name], p.grad, atol=1e-6), name


def test_a_subnet_changes_no_statistics_and_gets_its_own() -> None:
    module = supernet(start=0.0, opening=0.0)
    one, other = module.train(), copy.deepcopy(module).train()
    one.begin_step(0, 5)
    one(rows()["x"])
    other.network(rows()["x"])  # the whole network alone
    assert torch.equal(one.network.blocks[0].stack[1].running_mean, other.network.blocks[0].stack[1].running_mean)  # type: ignore[index, union-attr]
    small = one.elastic.extract(one.subnets(0, 5)[0]).eval()
    x = rows(64)["x"]
    recalibrate(small, [{"x": x}])
    norm = small.blocks[0].stack[1]  # type: ignore[index, union-attr]
    hidden = small.blocks[0].stack[0](small.stem(x))  # type: ignore[index, union-attr, operator]
    assert torch.allclose(norm.running_mean, hidden.mean(0), atol=1e-6)
    assert torch.allclose(norm.running_var, hidden.var(0), atol=1e-5) and not small.training


def test_in_evaluation_it_is_the_chosen_subnet_and_its_loss_is_classification() -> None:
    module, batch = supernet().eval(), rows()
    whole = module(x=batch["x"])
    least = module.elastic.at([0.25] * 3, [0.34])
    module.select(least)
    assert torch.equal(module(batch["x"]), module.elastic.forward(least, (batch["x"],), {}))
    plain = nn.functional.cross_entropy(whole, batch["labels"])
    assert torch.allclose(losses.build("deps")(whole, batch), plain)
    assert losses.build("deps").weight(batch) == 12
    alone = {"logits": whole, SUBNETS: whole.new_empty(0, 12, 10), WEIGHTS: whole.new_empty(0)}
    assert torch.allclose(losses.build("deps")(alone, batch), plain)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: one[index] for key, one in rows(16).items()}


def trained(module: nn.Module, folder: Path, **sections: Any) -> list[float]:
    """The losses of a run on rows that have labels, which the network does not take."""
    train = {"steps": 4, "batch": 8, "loss": "deps", "optimizer": {"adamw": {"lr": 0.01}}, **sections.pop("train", {})}
    config = {"train": train, "run": {"directory": str(folder), "display": "quiet"}, **sections}
    found: list[float] = gossamer.train(module, Rows(), config).losses.tolist()
    return found


def test_a_run_trains_a_supernet_whose_network_takes_no_labels(tmp_path: Path) -> None:
    module = DepsSupernet(network(), steps=4, start=0.5, opening=0.0)
    found, alone = trained(module, tmp_path), trained(DepsSupernet(network(), steps=4, start=1.0), tmp_path)
    assert found[:2] == alone[:2] and found[2] != alone[2]  # two steps of the whole network, then subnets beside it
    other = DepsSupernet(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.LSTM(2, 3)), steps=4)
    with pytest.raises(BadInput, match="returns logits, a tensor"):
        other(torch.ones(2, 4))


def test_a_supernet_with_another_loss_and_another_model_with_its_loss_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="trains the subnets of a DepsSupernet"):
        trained(supernet(), tmp_path, train={"loss": "classification"})
    with pytest.raises(BadInput, match=r"a supernet.*got a Digits"):
        trained(network(), tmp_path)
    assert not list(tmp_path.iterdir())


SWAP = {"host": "4MB", "file": "4MB", "directory": "there"}


@pytest.mark.parametrize(
    ("plan", "train", "said"),
    [
        ({"sharding": "zero3"}, {}, "plan.sharding zero3"),
        ({"savers": [{"recompute": {"every": 2}}]}, {}, "plan.savers recompute"),
        ({"savers": [{"activation_swap": SWAP}]}, {}, "plan.savers activation_swap"),
        ({"savers": ["tiling"]}, {}, "plan.savers tiling"),
        ({"mesh": MeshSizes(pipe=2)}, {}, "2 stages"),
        ({}, {"optimizer": "eva"}, "train.optimizer eva"),
    ],
)
def test_training_that_needs_whole_layers_is_refused(plan: dict[str, Any], train: dict[str, Any], said: str) -> None:
    config = RunConfig.model_validate({"model": {"factory": "a.b:c"}, "train": {"loss": "deps", **train}})
    assert supernet_alone(Recipe.of(RunConfig(), Plan(rows=(16,), microbatches=(4,), **plan))) is None
    error = supernet_alone(Recipe.of(config, Plan(rows=(16,), microbatches=(4,), **plan)))
    assert error is not None and said in error.message


def test_networks_and_settings_that_are_refused() -> None:
    with pytest.raises(BadInput, match="elastic widths"):
        Elastic(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)))
    block = Residual(4, 8, is_conv=False)
    with pytest.raises(BadInput, match="one in several places of 0"):
        Elastic(nn.Sequential(nn.ModuleList([block, block])))
    for given, said in (({"start": 1.5}, "start 1.5"), ({"least_width": 0.0}, "least_width 0")):
        with pytest.raises(BadInput, match=said):
            supernet(**given)
    with pytest.raises(BadInput, match="steps of the run"):
        DepsSupernet(network(), steps=0)
