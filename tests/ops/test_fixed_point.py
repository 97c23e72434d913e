"""Dynamic fixed point of 16 bits: products to 1e-4, exact sums in int32, and no overflow whatever comes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossamer.ops.fixed_point import FixedPoint, added, chain, fixed, narrowed, product

BITS = [16, 15, 14, 13, 12]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_the_exponent_is_that_of_the_largest_number() -> None:
    for most, exponent in ((1.0, 0), (1.1, 1), (0.5, -1), (3e-20, -64), (0.75, 0)):
        assert fixed(torch.tensor([most, 0.0])).exponent == exponent - 15
    assert fixed(torch.zeros(3)).numbers.tolist() == [0, 0, 0] and fixed(torch.zeros(0)).q.numel() == 0
    x = drawn(1000)
    assert float((fixed(x).numbers - x).abs().max()) <= 2.0 ** (fixed(x).exponent - 1) * 1.001


@pytest.mark.parametrize(("bits", "safe"), list(zip(BITS, [2, 8, 32, 128, 512], strict=True)))
def test_a_chain_of_the_largest_numbers_fits_an_int32(bits: int, safe: int) -> None:
    assert chain(bits) == safe
    for sign in (1.0, -1.0):
        a = fixed(torch.full((2, 4 * safe), sign), bits)
        b = fixed(torch.ones(4 * safe, 3), bits)
        assert int(a.q.abs().max()) == 2 ** (bits - 1) - 1
        exact = (a.q.long() @ b.q.long()).double() * 2.0 ** (a.exponent + b.exponent)
        assert torch.allclose(product(a, b, bits).double(), exact, rtol=1e-6)
        assert safe * int(a.q.abs().max()) ** 2 < 2**31 <= (safe + 1) * 2 ** (2 * (bits - 1))


@pytest.mark.parametrize("bits", BITS)
def test_products_are_those_of_64_bits(bits: int) -> None:
    a, b = fixed(drawn(7, 512), bits), fixed(drawn(512, 5, seed=1), bits)
    exact = (a.q.long() @ b.q.long()).double() * 2.0 ** (a.exponent + b.exponent)
    assert off(product(a, b, bits), exact) < 1e-6
    one = chain(bits)
    short = a.q[:, :one].long() @ b.q[:one].long()
    assert torch.equal(a.q[:, :one].int() @ b.q[:one].int(), short.int())


def test_products_of_normal_numbers_are_right_to_one_in_ten_thousand() -> None:
    a, b = drawn(64, 1024), drawn(1024, 64, seed=1)
    errors = {bits: off(product(fixed(a, bits), fixed(b, bits), bits), a.double() @ b.double()) for bits in (16, 14)}
    assert errors[16] == pytest.approx(1e-4, rel=0.3)
    assert errors[14] == pytest.approx(4 * errors[16], rel=0.1)  # two guard bits cost two bits


def test_all_bits_overflow_in_long_sums() -> None:
    """Why there are guard bits, or sums in float32."""
    a, b = fixed(drawn(256, 4096)), fixed(drawn(4096, 256, seed=1))
    assert int((a.q.long() @ b.q.long()).abs().max()) > 2**31


def test_sums_and_narrowing() -> None:
    x, y = drawn(500), drawn(500, seed=1) / 300
    total = added(fixed(x), fixed(y))
    assert total.q.dtype == torch.int32
    assert float((total.numbers - x - y).abs().max()) <= 2.0**total.exponent * 1.001
    assert torch.equal(added(fixed(y), fixed(x)).q, total.q)
    narrow = narrowed(total)
    assert narrow.q.dtype == torch.int16
    assert float((narrow.numbers - total.numbers).abs().max()) <= 2.0**narrow.exponent
    wide = FixedPoint(torch.tensor([2**31 - 1, -(2**31) + 1, 5], dtype=torch.int32), 0)
    assert narrowed(wide).q.abs().max() == 2**15 - 1 and narrowed(wide).exponent == 16
    assert (
        added(fixed(torch.ones(2)), fixed(torch.full((2,), 1e-30))).numbers.tolist()
        == fixed(torch.ones(2)).numbers.tolist()
    )


class _Linear(torch.autograd.Function):
    """x W^T in integers of 14 bits, forward and both ways back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.held = fixed(x, 14), fixed(weight, 14)
        a, w = ctx.held
        return product(a, FixedPoint(w.q.t(), w.exponent), 14)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, w = ctx.held
        g = fixed(grad, 14)
        return product(g, w, 14), product(FixedPoint(g.q.t(), g.exponent), a, 14)


class _Net(nn.Module):
    """Two convolutions as products of patches, and a layer."""

    def __init__(self, linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = linear
        shapes = ((8, 9), (8, 72), (4, 8 * 16))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(s) / s[1] ** 0.5) for s in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights[:2]:
            patches = F.unfold(x, 3)  # (images, patch, places)
            rows = patches.transpose(1, 2).reshape(-1, patches.shape[1])
            side = x.shape[-1] - 2
            x = self.linear(rows, weight).view(len(x), side, side, -1).permute(0, 3, 1, 2).relu()
        return self.linear(x.flatten(1), self.weights[2])


def test_gradients_of_a_small_convolutional_net() -> None:
    grads = {}
    for name, linear in (("ours", _Linear.apply), ("float32", lambda x, w: x @ w.t())):
        net = _Net(linear)
        F.cross_entropy(net(drawn(6, 1, 8, 8, seed=3)), torch.arange(6) % 4).backward()
        grads[name] = [w.grad for w in net.weights]
    assert all(off(a, b.double()) < 5e-3 for a, b in zip(grads["ours"], grads["float32"], strict=True))
