"""Eva and its variants against dense inverses and against autograd's own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gossamer import optimizer as optimizer_methods
from gossamer.model.layer_vectors import LayerHooks
from gossamer.optimizer import LayerVectors
from gossamer.optimizer.by_pattern import ByPattern
from gossamer.optimizer.eva import Eva
from gossamer.optimizer.eva_f import EvaF
from gossamer.optimizer.eva_s import EvaS
from gossamer.optimizer.muon import Muon
from gossamer.spec.errors import BadInput

SHAPES = {"one.weight": (5, 4), "one.bias": (5,), "two.weight": (3, 2, 2, 2), "embed.weight": (6, 3)}
Tensors = dict[str, torch.Tensor]


def drawn(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def vectors(seed: int) -> dict[str, LayerVectors]:
    generator = torch.Generator().manual_seed(seed)
    four, five, eight, three = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (4, 5, 8, 3))
    return {"one.weight": LayerVectors(four, five), "two.weight": LayerVectors(eight, three)}


def dense(name: str, weight: str, grads: Tensors, given: LayerVectors, damping: float) -> torch.Tensor:
    """Solve with the curvature written out; the bias is a last column of Eva's and Eva-f's."""
    bias = weight.replace("weight", "bias")
    gradient = grads[weight].flatten(1)
    a, b = given.input, given.output
    if name == "eva_s":
        a, b = gradient.mean(0), gradient.mean(1)
    elif bias in grads:
        gradient, a = torch.cat([gradient, grads[bias][:, None]], 1), torch.cat([a, a.new_ones(1)])
    outer = torch.eye(len(gradient), dtype=a.dtype) if name == "eva_f" else torch.outer(b, b)
    curvature = torch.kron(outer, torch.outer(a, a)) + damping * torch.eye(gradient.numel(), dtype=a.dtype)
    return torch.linalg.solve(curvature, gradient.flatten()).view_as(gradient)


def moved(rule: Any, grads: Tensors, given: dict[str, LayerVectors]) -> Tensors:
    """Return the first step of each parameter, divided by the rate."""
    params = drawn(1)
    before = {name: one.clone() for name, one in params.items()}
    state = rule.init(params)
    rule.see(given, state)
    rule.update(params, grads, state, lr_scale=1.0, step=0)
    return {name: (before[name] - one) / rule.lr for name, one in params.items()}


@pytest.mark.parametrize("name", ["eva", "eva_f", "eva_s"])
@pytest.mark.parametrize("damping", [0.03, 2.0])
def test_a_step_is_that_of_the_dense_inverse(name: str, damping: float) -> None:
    grads, given = drawn(2), vectors(3)
    steps = moved(optimizer_methods.build({name: {"damping": damping, "kl_clip": 1e12, "lr": 1e-3}}), grads, given)
    for weight, one in given.items():
        wanted, bias = dense(name, weight, grads, one, damping), weight.replace("weight", "bias")
        if wanted.shape[1] > grads[weight].flatten(1).shape[1]:
            assert torch.allclose(steps[bias], wanted[:, -1], rtol=1e-9, atol=1e-9)
            wanted = wanted[:, :-1]
        assert torch.allclose(steps[weight].flatten(1), wanted, rtol=1e-9, atol=1e-9)
    assert torch.allclose(steps["embed.weight"], grads["embed.weight"], rtol=1e-9, atol=1e-9)  # it is `plain`
    if name == "eva_s":
        assert torch.allclose(steps["one.bias"], grads["one.bias"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["eva", "eva_f", "eva_s"])
def test_with_much_damping_it_is_the_gradient(name: str) -> None:
    grads = drawn(2)
    steps = moved(optimizer_methods.build({name: {"lr": 1e7, "damping": 1e7, "kl_clip": 1e30}}), grads, vectors(3))
    assert torch.allclose(1e7 * steps["one.weight"], grads["one.weight"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["eva", "eva_f", "eva_s"])
def test_one_clip_is_for_all_layers(name: str) -> None:
    grads, given = drawn(2), vectors(3)
    free = moved(optimizer_methods.build({name: {"lr": 0.5, "kl_clip": 1e12}}), grads, given)
    layers = ["one.weight", "two.weight"] + (["one.bias"] if name != "eva_s" else [])
    change = sum(0.25 * float((free[n] * grads[n]).sum()) for n in layers)
    assert change > 1e-3
    clipped = moved(optimizer_methods.build({name: {"lr": 0.5, "kl_clip": 1e-3}}), grads, given)
    for n in layers:
        assert torch.allclose(clipped[n], free[n] * (1e-3 / change) ** 0.5, rtol=1e-9)
    level = moved(optimizer_methods.build({name: {"lr": 0.5, "kl_clip": 0.0}}), grads, given)
    long = [sum(float(one[n].square().sum()) for n in layers) for one in (level, grads)]
    assert long[0] == pytest.approx(long[1], rel=1e-9)


def test_vectors_are_averaged_and_momentum_follows() -> None:
    """Two steps, written out; a layer that was never seen moves by its gradient."""
    rule = Eva(lr=0.1, momentum=0.5, damping=0.2, kl_clip=1e12, decay=0.75, weight_decay=0.1)
    params, state, first, second = drawn(1), rule.init(drawn(1)), vectors(3), vectors(4)
    start = params["one.weight"].clone()
    for number, given in enumerate((first, second)):
        rule.see({"one.weight": given["one.weight"]}, state)
        rule.update(params, drawn(2 + number), state, lr_scale=1.0, step=number)
    mixed = 0.25 * first["one.weight"].input + 0.75 * second["one.weight"].input
    output = 0.25 * first["one.weight"].output + 0.75 * second["one.weight"].output
    updates = [
        dense("eva", "one.weight", drawn(2), first["one.weight"], 0.2)[:, :-1],
        dense("eva", "one.weight", drawn(3), LayerVectors(mixed, output), 0.2)[:, :-1],
    ]
    one = updates[0] + 0.1 * start
    middle = start - 0.1 * one
    wanted = middle - 0.1 * (0.5 * one + updates[1] + 0.1 * middle)
    assert torch.allclose(params["one.weight"], wanted, rtol=1e-9, atol=1e-9)
    assert not state["two.weight"]["seen"] and state["one.weight"]["seen"]


def test_a_layer_keeps_as_many_numbers_as_it_has_inputs_and_outputs() -> None:
    for rule, count in ((Eva(momentum=0.0), 9), (EvaF(momentum=0.0), 4), (EvaS(momentum=0.0), 9)):
        state = rule.init({"one.weight": torch.zeros(5, 4), "one.bias": torch.zeros(5)})
        assert sum(one.numel() for one in state["one.weight"].values()) == count + 1  # and whether it was seen
        assert not state["one.bias"]


class Net(nn.Module):
    """Linear layers with and without bias, one of them twice, a convolution, and one under recompute."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.one, self.twice = nn.Linear(12, 6), nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 4)
        self.reentrant = recompute

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.one(x))
        return torch.tanh(self.twice(torch.tanh(self.twice(x))))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.conv(images)).flatten(2).transpose(1, 2)  # (images, positions, 3)
        x = x.reshape(len(images), -1, 12)
        x = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.head(x)


def loss_of(net: Net, seed: int) -> torch.Tensor:
    images = torch.randn(5, 2, 8, 8, generator=torch.Generator().manual_seed(seed))
    return net(images).square().mean()


def hooked(recompute: bool | None) -> tuple[Net, dict[str, Tensors]]:
    torch.manual_seed(0)
    net = Net(recompute)
    hooks = LayerHooks.of(net, [name for name, _ in net.named_parameters() if not name.startswith("head")])
    loss_of(net, 7).backward()  # outside: not counted
    net.zero_grad()
    with hooks.open():
        with torch.no_grad():
            loss_of(net, 8)
        loss_of(net, 1).backward()
        loss_of(net, 2).backward()
    hooks.remove()
    loss_of(net, 9).backward()
    return net, {n: {"in": one.input, "out": one.output, "of": one.positions} for n, one in hooks.sums.items()}


@pytest.mark.parametrize("recompute", [None, False, True])
def test_hooks_take_a_layers_vectors_once(recompute: bool | None) -> None:
    net, found = hooked(recompute)
    assert sorted(found) == ["conv.weight", "one.weight", "twice.weight"]
    net.zero_grad()
    seen: dict[str, list[torch.Tensor]] = {}
    plain = Net()
    plain.load_state_dict(net.state_dict())
    for name, layer in plain.named_children():
        layer.register_forward_hook(lambda m, x, y, name=name: seen.setdefault(name, []).append(x[0].detach()))
    for seed in (1, 2):
        loss_of(plain, seed).backward()
    for name, layer in (("one", plain.one), ("conv", plain.conv)):  # the gradient of a bias is the sum of the outputs'
        assert layer.bias is not None and layer.bias.grad is not None
        assert torch.allclose(found[f"{name}.weight"]["out"], layer.bias.grad, atol=1e-6)
    for name in ("one", "twice"):
        rows = torch.cat([x.flatten(0, -2) for x in seen[name]])
        assert torch.allclose(found[f"{name}.weight"]["in"], rows.sum(0), atol=1e-4)
        assert float(found[f"{name}.weight"]["of"]) == len(rows)
    patches = nn.functional.unfold(torch.cat(seen["conv"]), 3, padding=1, stride=2)
    assert torch.allclose(found["conv.weight"]["in"], patches.sum((0, 2)), atol=1e-4)
    assert float(found["conv.weight"]["of"]) == patches.shape[0] * patches.shape[2]


def test_settings_out_of_their_limits() -> None:
    with pytest.raises(BadInput, match="wanted a finite number above 0"):
        Eva(damping=0.0)
    with pytest.raises(BadInput, match="wanted a weight of new vectors above 0"):
        EvaF(decay=0.0)
    with pytest.raises(BadInput, match="is no regular expression"):
        EvaS(plain=("(",))
    with pytest.raises(BadInput, match="nothing would be preconditioned"):
        Eva(plain=("weight", "bias")).check(["up.weight", "up.bias"])
    with pytest.raises(BadInput, match="wanted an optimizer of single parameters"):
        ByPattern(inner=Eva())
    with pytest.raises(BadInput, match="wanted an optimizer of single parameters"):
        Muon(rest=EvaS())
