"""What every codec must do: the bytes it says, the traits it declares, and never hide what is not finite."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest
import torch

from gossamer.comm.random_key import Key
from gossamer.exchange import codec
from gossamer.exchange.codec import Codec

SIZES = [0, 1, 2, 7, 63, 64, 65, 255, 256, 257, 1000, 4096 + 3]


def build(name: str) -> Codec:
    """A codec with its defaults; one that wraps another gets int8."""
    needs = [f.name for f in fields(codec.REGISTRY.type(name)) if f.default is MISSING and f.default_factory is MISSING]
    return codec.build({name: dict.fromkeys(needs, "int8")})


CODECS = {name: build(name) for name in codec.names()}
each = pytest.mark.parametrize("name", CODECS)


def key(own: int = 7) -> Key:
    return Key(shared=3, own=own)


def gaussian(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def inputs() -> dict[str, torch.Tensor]:
    one_hot = torch.zeros(1000)
    one_hot[371] = -3.5
    return {
        "gaussian": gaussian(5000),
        "heavy": gaussian(5000) / gaussian(5000, 1).abs().clamp_min(1e-3),
        "one-hot": one_hot,
        "constant": torch.full((777,), 0.3),
        "zeros": torch.zeros(300),
        "large": gaussian(500) * 1e30,
        "small": gaussian(500) * 1e-30,
    }


@each
@pytest.mark.parametrize("numel", SIZES)
def test_messages_have_the_declared_size_and_decode_to_the_shape(name: str, numel: int) -> None:
    one, x = CODECS[name], gaussian(numel)
    before = x.clone()
    message = one.encode(x, key())
    assert message.dtype == torch.uint8 and message.dim() == 1
    assert one.nbytes(numel) % 4 == 0
    if one.traits.fixed_size:
        assert message.numel() == one.nbytes(numel)
    else:
        assert message.numel() <= one.nbytes(numel)
    decoded = one.decode(message, numel, key())
    assert decoded.shape == (numel,) and decoded.dtype == torch.float32
    assert torch.equal(x, before), "encode changed its input"


TINY = [10.0**-power for power in range(30, 46)] + [2.0**-power for power in range(105, 121)]


@each
def test_where_all_numbers_are_tiny_zeros_stay_zeros_and_no_more_is_lost_than_declared(name: str) -> None:
    """Near the least of float32 the inverse of a scale may be infinite."""
    one, pattern = CODECS[name], torch.where(torch.arange(1000) % 3 > 0, gaussian(1000), torch.zeros(()))
    pattern = pattern / pattern.abs().max()
    keeps = not one.decode(one.encode(pattern, key()), 1000, key())[pattern == 0].any()  # of a sign code none is zero
    for largest in TINY:
        x = pattern * largest
        decoded = one.decode(one.encode(x, key()), 1000, key())
        assert bool(decoded.isfinite().all()), largest
        assert not keeps or not decoded[pattern == 0].any(), largest
        if one.traits.contraction is not None and largest > 1e-36:  # numbers below that may be lost
            lost = (x.double() - decoded.double()).square().sum() / x.double().square().sum()
            assert lost <= (1 - one.traits.contraction) * 1.0001 + 1e-12, largest


@each
@pytest.mark.parametrize("numel", [1, 65, 1000])
def test_rows_are_encoded_one_by_one(name: str, numel: int) -> None:
    """Without random numbers, a row's message does not depend on the others."""
    one = CODECS[name]
    if not one.traits.fixed_size:
        pytest.skip("messages of different lengths are not rows")
    rows = torch.stack([gaussian(numel, s) for s in range(3)])
    messages = one.encode(rows, key())
    assert messages.shape == (3, one.nbytes(numel))
    decoded = one.decode(messages, numel, key())
    assert decoded.shape == rows.shape
    for row, message in zip(decoded, messages, strict=True):
        assert torch.equal(row, one.decode(message, numel, key()))
    shares = [0.2, 0.3, 0.5]
    wanted = sum(s * d for s, d in zip(shares, decoded.double(), strict=True))
    torch.testing.assert_close(one.mean(messages, numel, shares, key()).double(), wanted, rtol=1e-5, atol=1e-6)


@each
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("in_place", [False, True])
def test_what_an_encoding_loses_is_what_decoding_lacks(name: str, numel: int, in_place: bool) -> None:
    """The message is that of `encode`, and adding is decoding and adding, up to the last bits."""
    one, x = CODECS[name], gaussian(numel)
    given = x.clone()
    lost = x if in_place else torch.full_like(x, float("nan"))
    message = one.encode_losing(x, key(), lost)
    assert torch.equal(message, one.encode(given, key()))
    assert in_place or torch.equal(x, given), "encoding changed its input"
    decoded = one.decode(message, numel, key())
    torch.testing.assert_close(lost, given - decoded, rtol=1e-5, atol=1e-6)
    total = given.clone()
    one.add(total, message, 0.3, key())
    torch.testing.assert_close(total, given + 0.3 * decoded, rtol=1e-5, atol=1e-6)


@each
def test_the_same_key_gives_the_same_bytes(name: str) -> None:
    one, x = CODECS[name], gaussian(1000)
    assert torch.equal(one.encode(x, key()), one.encode(x, key()))


@each
@pytest.mark.parametrize("kind", inputs())
def test_contraction_holds(name: str, kind: str) -> None:
    one, x = CODECS[name], inputs()[kind]
    if one.traits.contraction is None:
        pytest.skip("declares none")
    assert 0 < one.traits.contraction <= 1
    errors = []
    for own in range(1 if not one.traits.unbiased else 64):
        decoded = one.decode(one.encode(x, key(own)), x.numel(), key(own))
        errors.append(float((decoded.double() - x.double()).square().sum()))
    bound = (1 - one.traits.contraction) * float(x.double().square().sum())
    assert sum(errors) / len(errors) <= bound * 1.0001 + 1e-60 * x.numel()


@each
def test_unbiased_means_unbiased(name: str) -> None:
    """The mean of 4096 encodings lies within 5.5 of its standard errors, in every element."""
    one = CODECS[name]
    if not one.traits.unbiased:
        pytest.skip("declares a bias")
    x, draws = gaussian(40), 4096
    total, squares = torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)
    for own in range(draws):
        decoded = one.decode(one.encode(x, key(own)), 40, key(own)).double()
        total, squares = total + decoded, squares + decoded.square()
    mean = total / draws
    error = ((squares / draws - mean.square()).clamp_min(0) / draws).sqrt()
    assert bool(((mean - x.double()).abs() <= 5.5 * error + 1e-6).all())


@each
def test_lossless_means_every_bit(name: str) -> None:
    one = CODECS[name]
    if not one.traits.lossless:
        pytest.skip("declares a loss")
    for x in (*inputs().values(), torch.tensor([-0.0, 1e-42, float("inf"), float("nan")])):
        decoded = one.decode(one.encode(x, key()), x.numel(), key())
        assert torch.equal(decoded.view(torch.int32), x.view(torch.int32))


@each
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(name: str, bad: float) -> None:
    one, x = CODECS[name], gaussian(1000)
    x[123] = bad
    decoded = one.decode(one.encode(x, key()), 1000, key())
    assert not bool(torch.isfinite(decoded).all())


@each
def test_denormals_do_no_harm(name: str) -> None:
    one, x = CODECS[name], torch.full((300,), 1e-42)
    decoded = one.decode(one.encode(x, key()), 300, key())
    assert bool(torch.isfinite(decoded).all()) and float(decoded.abs().max()) < 1e-35
