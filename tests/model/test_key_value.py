"""The discrete key-value bottleneck: what a step leaves alone, and what that is worth when classes come in turn."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.model.networks.key_value import KeyValueBottleneck, key_value_bottleneck
from gossamer.model.origin import origin_of
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput

CLASSES, WIDTH = 6, 16


def clusters() -> Tensor:
    """Inputs of 6 classes, 60 each, without labels."""
    return labelled()[0]


def labelled() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    centers = 4 + 2 * torch.randn(CLASSES, WIDTH, generator=drawn)  # features are positive: they share a direction
    inputs = centers[:, None] + torch.randn(CLASSES, 60, WIDTH, generator=drawn)
    return inputs.flatten(0, 1), torch.arange(CLASSES).repeat_interleave(60)


def bottleneck(**more: int) -> KeyValueBottleneck:
    sizes = {"codebooks": 8, "pairs": 24, "key_width": 4} | more
    return key_value_bottleneck(classes=CLASSES, features=WIDTH, unlabelled=f"{__name__}:clusters", **sizes)


def step(module: nn.Module, inputs: Tensor, labels: Tensor, lr: float = 30.0) -> None:
    loss = F.cross_entropy(module(inputs), labels)
    params = [p for p in module.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            p -= lr * grad


def test_the_gradient_of_what_is_not_fetched_is_0() -> None:
    module, (inputs, labels) = bottleneck(), labelled()
    F.cross_entropy(module(inputs[:5]), labels[:5]).backward()
    assert module.values.grad is not None
    at = module.fetched(inputs[:5])
    is_fetched = torch.zeros(module.values.shape[:2], dtype=torch.bool)
    for row in at:
        is_fetched[torch.arange(len(row)), row] = True
    assert bool((module.values.grad[~is_fetched] == 0).all())
    assert bool((module.values.grad[is_fetched] != 0).any(-1).all())
    assert {name for name, p in module.named_parameters() if p.requires_grad} == {"values"}


def test_inputs_that_share_no_key_keep_their_logits_bit_for_bit() -> None:
    module, (inputs, labels) = bottleneck(pairs=64), labelled()
    for _ in range(3):
        step(module, inputs, labels)
    old, new = inputs[:60], inputs[60:120]
    shares = (module.fetched(old)[:, None] == module.fetched(new)[None]).any(-1).any(-1)
    assert int((~shares).sum()) > 5 and bool(shares.any())
    before = module(old).detach()
    for _ in range(5):
        step(module, new, labels[60:120])
    after = module(old).detach()
    assert torch.equal(before[~shares], after[~shares])
    assert not torch.equal(before[shares], after[shares])


def test_classes_in_turn_end_near_training_on_all() -> None:
    inputs, labels = labelled()
    joint, inturn = bottleneck(), bottleneck()
    head = nn.Linear(WIDTH, CLASSES)
    for _ in range(30):
        step(joint, inputs, labels)
    for label in range(CLASSES):
        for _ in range(30):
            step(inturn, inputs[labels == label], labels[labels == label])
            step(head, inputs[labels == label], labels[labels == label], lr=0.1)

    def right(module: nn.Module) -> float:
        return float((module(inputs).argmax(1) == labels).float().mean())

    assert right(joint) > 0.95
    assert right(inturn) > right(joint) - 0.05
    assert right(head) < 0.5


def test_keys_lie_where_inputs_are() -> None:
    """A mean distance well below that of keys at random, and every key is of some input."""
    module, inputs = bottleneck(pairs=12), clusters()
    z = inputs @ module.projections.transpose(1, 2)
    near = torch.cdist(z, module.keys).amin(-1).mean()
    random = torch.cdist(z, z[:, torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1))[:12]])
    assert near < random.amin(-1).mean()
    used = module.fetched(inputs)
    assert all(len(used[:, c].unique()) >= 11 for c in range(used.shape[1]))


def test_it_is_a_factory_that_builds_the_same_again() -> None:
    config = {"classes": CLASSES, "features": WIDTH, "unlabelled": f"{__name__}:clusters", "codebooks": 4, "pairs": 8}
    origin = origin_of(ModelSection(factory="gossamer.model.networks.key_value:key_value_bottleneck", config=config))
    one, other = origin.build(0), origin.build(0)
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


def test_the_encoder_gives_what_the_keys_were_placed_by() -> None:
    """In training too: a frozen encoder has no dropout, and its norms do not move."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    module = KeyValueBottleneck(encoder, features=WIDTH, classes=CLASSES, codebooks=4, pairs=12, key_width=4)
    inputs, before = clusters(), {name: one.clone() for name, one in encoder.named_buffers()}
    module.fit_keys(iter([inputs]))
    wanted = module.eval().fetched(inputs)
    assert torch.equal(module.train().fetched(inputs), wanted) and module.training
    assert all(torch.equal(one, before[name]) for name, one in encoder.named_buffers())


def test_what_is_refused() -> None:
    with pytest.raises(BadInput, match="sizes of at least 1"):
        bottleneck(pairs=0)
    with pytest.raises(BadInput, match=r"an encoder that returns \(rows, 16\)"):
        bottleneck()(torch.zeros(2, 5))
    with pytest.raises(BadInput, match="unlabelled inputs"):
        KeyValueBottleneck(nn.Identity(), features=4, classes=2).fit_keys(iter(()))


def test_a_frozen_encoder_stays_in_evaluation() -> None:
    encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    module = KeyValueBottleneck(encoder, features=WIDTH, classes=CLASSES, codebooks=8, pairs=24, key_width=4)
    inputs, before = labelled()[0], copy.deepcopy(encoder.state_dict())
    assert torch.equal(module.train().fetched(inputs), module.eval().fetched(inputs))
    assert all(torch.equal(one, before[name]) for name, one in encoder.state_dict().items())
