"""FP8 with range expansion: its published gain, the bound of its error, and the groups that break a careless one."""

from __future__ import annotations

import pytest
import torch

from gossamer.ops.range_expansion import decode, encode

TOP = 448.0


def moments(spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments of AdamW after 200 steps, of gradients whose size differs by element, log-normally."""
    draw = torch.Generator().manual_seed(0)
    size = torch.exp(spread * torch.randn(256, 128, generator=draw)) * 1e-4
    mean, square = torch.zeros_like(size), torch.zeros_like(size)
    for _ in range(200):
        grad = size * torch.randn(size.shape, generator=draw)
        mean.lerp_(grad, 0.1)
        square.mul_(0.95).addcmul_(grad, grad, value=0.05)
    return mean, square


def plain(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with a scale per group, without expansion."""
    scale = x.abs().amax(-1, keepdim=True) / TOP
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def round_trip(x: torch.Tensor, *, signed: bool) -> torch.Tensor:
    return decode(*encode(x, signed=signed))


def error(x: torch.Tensor, of: torch.Tensor) -> float:
    return float(((x - of).abs() / of.abs()).mean())


# Spread of sizes -> median k of the second moment, its relative error in E4M3 alone, and with expansion.
TABLE = [(0.1, 7.5, 0.0222, 0.0032), (0.3, 3.5, 0.0224, 0.0069), (0.6, 1.8, 0.0221, 0.0133)]


@pytest.mark.parametrize(("spread", "power", "without", "expanded"), TABLE)
def test_the_error_shrinks_by_the_power(spread: float, power: float, without: float, expanded: float) -> None:
    mean, square = moments(spread)
    coded = encode(square, signed=False)
    assert float(coded[2].median()) == pytest.approx(power, rel=0.06)
    assert error(plain(square), square) == pytest.approx(without, rel=0.1)
    assert error(decode(*coded), square) == pytest.approx(expanded, rel=0.1)
    update, noise = mean / square.sqrt(), {}
    for name, code in (("plain", plain), ("ours", lambda x: round_trip(x, signed=bool((x < 0).any())))):
        noise[name] = float((code(mean) / code(square).sqrt() - update).square().mean())
    assert noise["ours"] < noise["plain"]


def test_nothing_is_gained_where_sizes_differ_by_more_than_fp8_holds() -> None:
    _, square = moments(1.0)
    assert float(encode(square, signed=False)[2].median()) == pytest.approx(1.1, rel=0.1)
    assert error(round_trip(square, signed=False), square) == pytest.approx(error(plain(square), square), rel=0.15)


@pytest.mark.parametrize("spread", [0.1, 0.6, 1.0])
def test_no_error_is_above_its_bound(spread: float) -> None:
    """Of a number that E4M3 holds with all its bits; below 2^-6 what half a step changes."""
    for x, signed in zip(moments(spread), (True, False), strict=True):
        codes, _, power, _ = coded = encode(x, signed=signed)
        held = codes.view(torch.float8_e4m3fn).float().abs()
        off = (decode(*coded).double() / x.double() - 1).abs()
        bound = (1 + 2.0**-4) ** power[:, None].reciprocal().double() - 1
        assert bool((off <= bound * 1.001 + 1e-5)[held > 2.0**-6].all())
        tiny = (held <= 2.0**-6) & (held > 2.0**-9)
        step = 1 - (1 - 2.0**-10 / held.clamp(min=2.0**-8)).double() ** power[:, None].reciprocal().double()
        assert bool((off <= 2 * step + 1e-5)[tiny].all())


def test_a_zero_does_not_spoil_its_group() -> None:
    """A padded or dead number counts as none: the others of its group keep their error."""
    _, square = moments(0.1)
    before = error(round_trip(square, signed=False), square)
    for place in (0, 77):
        holed = square.clone()
        holed[:, place] = 0.0
        found, rest = round_trip(holed, signed=False), holed != 0
        assert not found[:, place].any()
        assert error(found[rest], holed[rest]) < 1.2 * before


def test_odd_groups() -> None:
    equal, zeros, one = torch.full((1, 128), 0.3), torch.zeros(1, 128), torch.zeros(1, 128)
    one[0, 9] = -2.5
    for x in (equal, zeros, one):
        found = round_trip(x, signed=True)
        assert torch.allclose(found, x, rtol=1e-6) and bool((encode(x, signed=True)[2] == 16).all())


def test_a_range_beyond_float32_does_no_harm() -> None:
    x = torch.tensor([[3e38, 1e-40, 1.0, 0.0]])
    found = round_trip(x, signed=False)
    assert bool(found.isfinite().all()) and bool((found[0, :3] > 0).all()) and float(found[0, 3]) == 0
    assert float(found[0, 0]) == pytest.approx(3e38, rel=0.01)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    mean, _ = moments(0.1)
    mean[3, 5] = bad
    finite = round_trip(mean, signed=True).isfinite().all(-1)
    assert not finite[3] and int(finite.sum()) == 255
