"""The dynamic code of 8 bits: its 256 values, the nearest of them, and what must never be lost."""

from __future__ import annotations

import pytest
import torch

from gossamer.ops.dynamic_code import decode, encode, values

SIGNS = [True, False]


def numbers(signed: bool, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    found = torch.randn(40, 256, generator=draw) * torch.rand(40, 256, generator=draw) ** 8
    return found if signed else found.square()


@pytest.mark.parametrize("signed", SIGNS)
def test_there_are_256_values(signed: bool) -> None:
    found = values(signed)
    assert len(found.unique()) == 256 and torch.equal(found, found.sort().values)
    assert float(found.max()) == 1.0 and 0.0 in found.tolist() and bool((found < 0).any()) == signed


@pytest.mark.parametrize("signed", SIGNS)
def test_a_number_becomes_the_nearest_value(signed: bool) -> None:
    x = numbers(signed)
    codes, scale = encode(x, signed=signed)
    assert torch.equal(scale, x.abs().amax(-1))
    parts = (x / scale[:, None]).double()
    known = values(signed).double()
    nearest = (parts[..., None] - known).abs().amin(-1)
    off = (parts - known[codes.int()]).abs()
    kept = signed | (known[codes.int()] > float(known[known > 0].min()))  # the least is for all that is below it too
    assert float(((off - nearest) * kept).max()) < 1e-9
    assert torch.equal(decode(codes, scale, signed=signed), values(signed)[codes.int()] * scale[:, None])


def test_without_a_sign_only_zero_becomes_zero() -> None:
    x = torch.tensor([[1.0, 0.0, 1e-30, 1e-9, 1e-44]])
    decoded = decode(*encode(x, signed=False), signed=False)
    assert float(decoded[0, 1]) == 0.0 and bool((decoded[0, [2, 3, 4]] > 0).all())


@pytest.mark.parametrize("signed", SIGNS)
def test_zeros_stay_zeros(signed: bool) -> None:
    assert not decode(*encode(torch.zeros(2, 7), signed=signed), signed=signed).any()


@pytest.mark.parametrize("signed", SIGNS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(signed: bool, bad: float) -> None:
    x = numbers(signed)
    x[3, 5] = bad
    finite = decode(*encode(x, signed=signed), signed=signed).isfinite().all(-1)
    assert not finite[3] and int(finite.sum()) == 39


@pytest.mark.parametrize("signed", SIGNS)
def test_what_is_decoded_has_the_same_code_again(signed: bool) -> None:
    """So that a state which no update changes stays what it is."""
    codes, scale = encode(numbers(signed), signed=signed)
    again, _ = encode(decode(codes, scale, signed=signed), signed=signed)
    assert torch.equal(again, codes)
