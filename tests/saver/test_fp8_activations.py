"""FP8 activations: what layers keep, what it weighs, and gradients that are nearly those of plain training."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from gossamer import loss
from gossamer.saver import Site, build
from gossamer.saver.fp8_activations import _Coded
from gossamer.spec.errors import BadInput

SITE = Site(units=(), objective=loss.build("next_token"))
WEIGHTS = ("norm.weight", "one.weight", "two.weight", "three.weight", "out.weight")


class Block(nn.Module):
    """Three layers called with one tensor, and one with their product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(64)
        self.one, self.two, self.three = (nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.out(torch.tanh(self.one(x)) * torch.tanh(self.two(x)) + self.three(x))


def drawn(seed: int) -> Tensor:
    return torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(seed))


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    (module(x) * drawn(9)).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def test_forward_is_exact_and_gradients_are_near() -> None:
    plain, module = Block(), Block()
    installed = build("fp8_activations").install(module, SITE)
    assert torch.equal(plain(drawn(1)), module(drawn(1)))
    wanted, found = gradients(plain, drawn(1)), gradients(module, drawn(1))
    for name, one in wanted.items():
        off = float((one - found[name]).norm() / one.norm())
        assert off < 0.03
        assert (off > 1e-3) == (name in WEIGHTS), name
    installed.remove()
    assert all(torch.equal(wanted[n], g) for n, g in gradients(module, drawn(1)).items())


@pytest.mark.parametrize("is_bf16", [False, True])
def test_an_input_of_several_layers_is_coded_once(monkeypatch: pytest.MonkeyPatch, is_bf16: bool) -> None:
    """Also where products are in bfloat16 and a layer keeps a copy of its input in that type."""
    module, made, of = Block(), [], _Coded.of
    build("fp8_activations").install(module, SITE)
    monkeypatch.setattr(_Coded, "of", staticmethod(lambda x: (made.append(x), of(x))[1]))
    with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
        out = module(drawn(1))
    assert len(made) == 3, "of the norm, of the three layers, of the last one"
    out.float().sum().backward()
    plain = Block()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
        plain(drawn(1)).float().sum().backward()
    for name, p in plain.named_parameters():
        found = module.get_parameter(name).grad
        assert found is not None and p.grad is not None and found.dtype == p.grad.dtype
        assert float((found - p.grad).norm() / p.grad.norm()) < 0.03


def test_a_number_keeps_a_byte_and_a_quarter() -> None:
    coded = _Coded.of(drawn(1))
    assert coded.codes.nbytes + coded.scales.nbytes == 1.25 * drawn(1).numel()
    back = coded.numbers(drawn(1).shape, torch.float32)
    top = drawn(1).view(-1, 16).abs().amax(1, keepdim=True).expand(-1, 16).reshape(back.shape)
    assert bool(((back - drawn(1)).abs() <= torch.maximum(drawn(1).abs() / 16, top / 448 / 2**9)).all())
    assert torch.equal(_Coded.of(torch.zeros(4, 16)).numbers(torch.Size((4, 16)), torch.float32), torch.zeros(4, 16))


def test_small_inputs_odd_widths_and_evaluations_stay_as_they_are() -> None:
    for written, width, is_training in (({"least": 10**6}, 64, True), ({}, 60, True), ({}, 64, False)):
        torch.manual_seed(0)
        plain = nn.Linear(width, 64).train(is_training)
        module = nn.Linear(width, 64).train(is_training)
        module.load_state_dict(plain.state_dict())
        build({"fp8_activations": written}).install(module, SITE)
        x = drawn(1)[..., :width].contiguous()
        assert all(torch.equal(one, gradients(plain, x)[n]) for n, one in gradients(module, x).items())


def test_what_is_written_to_later_was_coded_before() -> None:
    module, plain = nn.Linear(64, 64), nn.Linear(64, 64)
    plain.load_state_dict(module.state_dict())
    build("fp8_activations").install(module, SITE)
    wanted, x = gradients(plain, drawn(1))["weight"], drawn(1)
    first = module(x)
    x.mul_(2)
    second = module(x)
    ((first + second) * drawn(9)).sum().backward()
    assert module.weight.grad is not None
    assert float((module.weight.grad - 3 * wanted).norm() / (3 * wanted).norm()) < 0.03


def test_an_input_that_nobody_else_keeps_is_freed() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    build("fp8_activations").install(module, SITE)
    seen: list[weakref.ref[Tensor]] = []
    module[1].register_forward_pre_hook(lambda _, given: seen.append(weakref.ref(given[0])))
    out = module(drawn(1))
    assert seen[0]() is None
    out.sum().backward()


def test_shapes_alone_are_counted_as_tensors_are() -> None:
    """As the memory forecast runs it."""
    with FakeTensorMode():
        module = Block()
        build("fp8_activations").install(module, SITE)
        out = module(torch.empty(8, 32, 64))
        out.sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())


def test_bad_input() -> None:
    with pytest.raises(BadInput, match="least"):
        build({"fp8_activations": {"least": 0}})
    with pytest.raises(BadInput, match="layers as modules"):
        build("fp8_activations").install(nn.Identity(), SITE)
    module = Block()
    module.compile()
    with pytest.raises(BadInput, match=r"model\.compile"):
        build("fp8_activations").install(module, SITE)
