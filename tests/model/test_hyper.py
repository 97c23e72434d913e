"""HyperInterval and magnitude-invariant hypernetworks: the properties that their papers rest on."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.model.networks.hyper_interval import HyperInterval
from gossamer.model.networks.mip import MagnitudeInvariantHyper, encoded
from gossamer.model.origin import origin_of
from gossamer.ops.intervals import Interval, worst_logits
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput


def hyper(kappa: float = 1.0, tasks: int = 3, shared: bool = True) -> HyperInterval:
    sizes = {"width": 8, "hidden": 16, "chunk": 10}
    return HyperInterval((6, 8, 4), tasks=tasks, **sizes, kappa=kappa, shared=shared).double()


def drawn(box: Interval, count: int) -> Tensor:
    torch.manual_seed(0)
    return box.center + box.radius * (2 * torch.rand(count, len(box.center), dtype=torch.float64) - 1)


@torch.no_grad()
def test_5000_embeddings_of_a_box_give_weights_inside() -> None:
    module = hyper()
    box = module.box(0)
    interval = module.weights(box)
    zero = torch.zeros_like(box.center)
    made = torch.stack([module.weights(Interval(one, zero)).center for one in drawn(box, 5000)])
    assert bool(interval.holds(made, 1e-12).all())
    assert 0.02 < float(((made.amax(0) - made.amin(0)) / (2 * interval.radius)).mean()) < 0.9  # bounds are loose


@torch.no_grad()
def test_logits_of_a_box_are_inside_and_the_worst_is_the_worst() -> None:
    module, inputs = hyper(), torch.randn(5, 6, dtype=torch.float64)
    box = module.box(1)
    found = module.logits(inputs, module.weights(box))
    labels = torch.tensor([0, 1, 2, 3, 0])
    worst = F.cross_entropy(worst_logits(found, labels), labels, reduction="none")
    for one in drawn(box, 200):
        made = module.at(one, inputs)
        assert bool(found.holds(made, 1e-12).all())
        assert bool((F.cross_entropy(made, labels, reduction="none") <= worst + 1e-12).all())
    own = F.one_hot(labels, 4).double()
    by_hand = found.center + found.radius * (1 - 2 * own)  # the lowest of its own class, the highest of the others
    assert torch.allclose(worst_logits(found, labels), by_hand, atol=1e-12)
    total = module.loss(inputs, labels, 1, worst=0.3)
    assert torch.allclose(total, 0.7 * F.cross_entropy(found.center, labels) + 0.3 * worst.mean())


def test_radius_0_is_a_plain_hypernetwork() -> None:
    module, inputs = hyper(kappa=0.0, shared=False), torch.randn(5, 6, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 0])
    found = module.logits(inputs, module.weights(module.box(0)))
    assert bool((found.radius == 0).all()) and torch.equal(found.center, module(inputs, 0))
    parts = module._parts(module.weights(module.box(0)).center)
    by_hand = torch.relu(inputs @ parts[0].t() + parts[1]) @ parts[2].t() + parts[3]
    assert torch.allclose(found.center, by_hand)
    plain = F.cross_entropy(by_hand, labels)
    assert torch.allclose(module.loss(inputs, labels, 0, worst=0.5), plain)


def test_radii_sum_to_kappa_and_chunks_make_all_weights() -> None:
    module = hyper(kappa=0.7)
    with torch.no_grad():
        module.rho[2].copy_(torch.randn(8))
    assert module.box(2).radius.sum().item() == pytest.approx(0.7)
    assert bool((module.box(2).radius > 0).all())
    assert len(module.weights(module.box(0)).center) == 6 * 8 + 8 + 8 * 4 + 4


def test_the_regulariser_is_0_until_a_task_moves_and_spares_old_boxes() -> None:
    module, inputs = hyper(), torch.randn(5, 6, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 0])
    stored = [module.stored(0)]
    assert torch.equal(module.loss(inputs, labels, 1, stored, beta=1.0), module.loss(inputs, labels, 1))
    module.loss(inputs, labels, 1, stored, beta=1.0).backward()
    assert module.centers[0].grad is None and module.centers[1].grad is not None
    with torch.no_grad():
        module.second.weight.add_(0.1)
    assert module.loss(inputs, labels, 1, stored, beta=1.0) > module.loss(inputs, labels, 1)


def test_one_embedding_serves_all_tasks_within_its_bound() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(40, 6, dtype=torch.float64)
    labels = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
    module = hyper(tasks=2)
    rule = torch.optim.Adam(module.parameters(), lr=5e-3)
    stored: list[Interval] = []
    tasks = [labels < 2, labels >= 2]
    for task, rows in enumerate(tasks):
        for _ in range(60):
            rule.zero_grad()
            module.loss(inputs[rows], labels[rows], task, stored, worst=0.3, beta=1.0).backward()
            rule.step()
        stored.append(module.stored(task))
    shared = module.universal(2)
    for task, rows in enumerate(tasks):
        assert bool(module.box(task).holds(shared, 1e-12).all())
        found = module.logits(inputs[rows], module.weights(module.box(task)))
        assert bool(found.holds(module.at(shared, inputs[rows]), 1e-9).all())
    apart = hyper(tasks=2, shared=False)
    with torch.no_grad():
        apart.centers[1].add_(10)
    with pytest.raises(BadInput, match="do not intersect"):
        apart.universal(2)
    with pytest.raises(BadInput, match="layers' ends"):
        HyperInterval((6,), tasks=1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def test_the_encoding_has_one_norm_and_both_ends() -> None:
    g = torch.linspace(0, 1, 11)[:, None]
    assert encoded(g).norm(dim=-1).tolist() == pytest.approx([1.0] * 11)
    assert encoded(torch.tensor([0.0])).tolist() == pytest.approx([1, 0])
    assert encoded(torch.tensor([1.0])).tolist() == pytest.approx([0, 1], abs=1e-6)


def test_predicted_weights_are_as_large_for_every_condition() -> None:
    """Within 2x over g, while a hypernetwork of g itself without biases is proportional to it."""
    torch.manual_seed(0)
    module = MagnitudeInvariantHyper(net(), hidden=(128, 128))
    conditions = [0.01, 0.1, 0.5, 1.0]

    def variance(made: dict[str, Tensor]) -> float:
        return float(torch.cat([one.flatten() for one in made.values()]).var())

    with torch.no_grad():
        sizes = [variance(module.offsets(torch.tensor([g]))) for g in conditions]
        plain = nn.Sequential(nn.Linear(1, 128, bias=False), nn.LeakyReLU(), nn.Linear(128, 50, bias=False))
        proportional = [float(plain(torch.tensor([g])).norm()) for g in conditions]
    assert max(sizes) / min(sizes) < 2
    assert proportional[-1] / proportional[0] == pytest.approx(100, rel=1e-3)


def test_it_starts_near_the_base_and_trains_both() -> None:
    torch.manual_seed(0)
    base = net()
    module = MagnitudeInvariantHyper(base)
    own = dict(base.named_parameters())
    with torch.no_grad():
        for name, made in module.weights(torch.tensor([0.3])).items():
            if name.endswith("weight"):
                assert (made - own[name]).norm() < 0.3 * own[name].norm()
    module(torch.randn(5, 6), torch.tensor([[0.3]] * 5)).square().mean().backward()
    assert all(p.grad is not None and math.isfinite(float(p.grad.norm())) for p in module.parameters())
    with pytest.raises(BadInput, match="one condition for all rows"):
        module(torch.randn(2, 6), torch.tensor([[0.3], [0.4]]))


def test_it_is_a_factory() -> None:
    config = {"base": f"{__name__}:net"}
    module = origin_of(ModelSection(factory="gossamer.model.networks.mip:mip", config=config)).build(0)
    assert module(torch.randn(5, 6), torch.tensor([0.5])).shape == (5, 4)
