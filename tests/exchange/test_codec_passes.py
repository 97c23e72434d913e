"""The chunked passes of codecs give what their equations give in one piece: the same bytes and the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.exchange import codec
from gossamer.ops.blocks import CHUNK
from gossamer.ops.rounding_noise import Noise

KEY = Key(shared=3, own=7)
SMALLEST, MOST = 1e-36, torch.finfo(torch.float32).max
SHAPES = [(0,), (1,), (3,), (8,), (33,), (127,), (129,), (257,), (1000,), (1025,), (5000,), (CHUNK + 300,)]
SHAPES += [(3, 1), (5, 130), (2, 3, 1024), (700, 520), (0, 8), (2, 0), (3, CHUNK // 2 + 77)]
Reference = Callable[[Tensor], tuple[bytes, Tensor, Tensor]]  # a row's codes, its scales and what is decoded


def gaussian(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def alternating(value: float) -> Tensor:
    x = torch.full((2100,), value)
    x[::2] *= -1
    return x


def with_one(value: float) -> Tensor:
    x = gaussian(2100)
    x[700] = value
    return x


INPUTS = {
    "ties": torch.randint(-254, 255, (2100,), generator=torch.Generator().manual_seed(1)).float() / 2,
    "wide": gaussian(2100) * (8 * gaussian(2, 2100)[1]).exp(),
    "transposed": gaussian(700, 3).t(),
    "strided": gaussian(40, 3000)[3:9:2, 11:2900],
    **{f"all {v}": torch.full((2100,), v) for v in (0.0, -0.0, -1e-45, 9.9e-37, 1e-36, 5e-35, 1.5e38, MOST)},
    **{f"+-{v}": alternating(v) for v in (0.0, 1e-38, 1.0, MOST, torch.inf)},
    **{f"one {v}": with_one(v) for v in (MOST, -MOST, torch.inf, -torch.inf, torch.nan, 2.0**100)},
}


def blocks(row: Tensor, block: int) -> list[Tensor]:
    return list(row.split(block)) if row.numel() else []


def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0)


def packed(codes: Tensor, bits: int) -> bytes:
    """Pack integers of `bits` bits, the first in the lowest bits of the first byte."""
    each = (codes.numpy().astype(np.int64)[:, None] >> np.arange(bits)) & 1
    return np.packbits(each.astype(np.uint8).flatten(), bitorder="little").tobytes()


def noise_of(row: Tensor, block: int) -> Tensor:
    """Return what stochastic rounding adds before it rounds: odd multiples of 2^-16, for rows of at most a chunk."""
    assert row.numel() <= CHUNK
    whole = row.numel() // block * block
    noise, found = Noise(-(-row.numel() // 2), KEY.generator(row.device), row.device), []
    for count in (whole, row.numel() - whole):
        if count:
            found.append((noise.words(-(-count // 2)) | 0x00010001).view(torch.int16)[:count].float() * 2.0**-16)
    return joined(found)


def integers(levels: int, bits: int, block: int, *, stochastic: bool = False) -> Reference:
    """s = max|x| / levels; q = round(x levels / max|x|), with the noise of `stochastic` before it; decoded = s q."""

    def of(row: Tensor) -> tuple[bytes, Tensor, Tensor]:
        noise = blocks(noise_of(row, block) if stochastic else torch.zeros_like(row), block)
        codes, scales, decoded = [], [], []
        for x, shake in zip(blocks(row, block), noise, strict=True):
            top = x.abs().max() * (1 + 2.0**-22 if stochastic else 1.0)
            factor = torch.zeros(()) if bool(top < SMALLEST) else levels / top
            q = (x * factor + shake).round().to(torch.int8)
            scales.append((top / levels).view(1))
            codes.append(q)
            decoded.append(q.float() * scales[-1])
        return packed(joined(codes).to(torch.int8), bits), joined(scales), joined(decoded)

    return of


def sign(row: Tensor) -> tuple[bytes, Tensor, Tensor]:
    """s = |x|_1 / d; decoded = s where x >= 0, -s elsewhere."""
    scales = [x.abs().mean().view(1) for x in blocks(row, 1024)]
    decoded = [torch.where(x < 0, -s, s) for x, s in zip(blocks(row, 1024), scales, strict=True)]
    return packed((row < 0).to(torch.int8), 1), joined(scales), joined(decoded)


def scaled(kind: torch.dtype, top: int, block: int) -> Reference:
    """s = 2^(floor(log2 max|x|) - top); decoded = s kind(x / s), and at most the largest float32."""

    def of(row: Tensor) -> tuple[bytes, Tensor, Tensor]:
        codes, scales, decoded = [], [], []
        for x in blocks(row, block):
            most = x.abs().max()
            finite, small = bool(most.isfinite()), bool(most < SMALLEST)
            power = torch.ldexp(torch.ones(1), most.frexp().exponent - 1) if finite else torch.full((1,), torch.inf)
            power = power if small else power.clamp(min=2.0 ** (top - 127))  # of which the inverse is finite
            scale = torch.where(most < 2.0**-126, 0.0, power.double() * 2.0**-top)
            unit = 1.0 if not finite else torch.inf if small else scale
            q = (x.double() / unit).float().to(kind)
            codes.append(q)
            scales.append(scale.float())
            number = q.float().double()
            if kind == torch.float8_e4m3fn:  # it has no infinity, and its NaN is read as what the scale says
                number = torch.where(number.isnan(), torch.copysign(torch.full((), torch.inf).double(), x), number)
            here = number * scale
            decoded.append((here.clamp(-MOST, MOST) if finite else here).float())
        raw = torch.cat(codes).view(torch.uint8).numpy().tobytes() if codes else b""
        return raw, joined(scales), joined(decoded)

    return of


REFERENCES: dict[str, tuple[object, Reference]] = {
    "int8": ("int8", integers(127, 8, 256)),
    "int8, blocks of 4": ({"int8": {"block_size": 4}}, integers(127, 8, 4)),
    "int8 stochastic": ({"int8": {"stochastic": True}}, integers(127, 8, 256, stochastic=True)),
    "int4": ("int4", integers(7, 4, 128)),
    "int4 stochastic": ({"int4": {"stochastic": True}}, integers(7, 4, 128, stochastic=True)),
    "ternary": ("ternary", integers(1, 2, 128, stochastic=True)),
    "sign": ("sign", sign),
    "float16": ("float16", scaled(torch.float16, 14, 1024)),
    "fp8 e4m3": ("fp8", scaled(torch.float8_e4m3fn, 7, 256)),
    "fp8 e5m2": ({"fp8": {"format": "e5m2"}}, scaled(torch.float8_e5m2, 14, 256)),
}


def check(name: str, x: Tensor) -> None:
    written, reference = REFERENCES[name]
    one = codec.build(written)
    given = x.clone()
    message = one.encode(x, KEY)
    decoded = one.decode(message, x.shape[-1], KEY)
    same_bits(x.contiguous(), given.contiguous())
    assert decoded.shape == x.shape and message.shape == (*x.shape[:-1], one.nbytes(x.shape[-1]))
    each = (t.reshape(-1, t.shape[-1]) if t.numel() else t[:0] for t in (x, message, decoded))
    for row, sent, back in zip(*each, strict=True):
        codes, scales, wanted = reference(row)
        head, body = sent[: 4 * scales.numel()], sent[4 * scales.numel() :].numpy().tobytes()
        same_bits(head.view(torch.float32), scales)
        if bool(scales.isfinite().all()):  # what stands beside a scale that is not means nothing
            assert body[: len(codes)] == codes
        assert len(body) >= len(codes) and not any(body[len(codes) :])
        same_bits(back, wanted)


def same_bits(found: Tensor, wanted: Tensor) -> None:
    """Every bit, but that NaN is NaN."""
    one, other = (torch.nan_to_num(t, nan=0.0, posinf=torch.inf, neginf=-torch.inf) for t in (found, wanted))
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", REFERENCES)
def test_passes_give_the_equations_in_any_shape(name: str, shape: tuple[int, ...]) -> None:
    if REFERENCES[name][0] == "ternary" or "stochastic" in name:
        shape = (min(shape[-1], 5000),)
    elif name == "int8, blocks of 4":
        shape = (*(min(rows, 40) for rows in shape[:-1]), min(shape[-1], 5000))
    check(name, gaussian(*shape))


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("name", REFERENCES)
def test_passes_give_the_equations_for_any_numbers(name: str, given: str) -> None:
    x = INPUTS[given]
    stochastic = name == "ternary" or "stochastic" in name
    check(name, x[0] if stochastic and x.dim() > 1 else x)


@pytest.mark.parametrize("name", ["int8", "int4", "sign", "float16"])
def test_adding_and_losing_are_of_the_same_numbers(name: str) -> None:
    one, x = codec.build(name), gaussian(CHUNK + 300)
    lost, total = torch.empty_like(x), gaussian(CHUNK + 300) * 3
    message = one.encode_losing(x, KEY, lost)
    decoded = one.decode(message, x.numel(), KEY)
    assert torch.equal(message, one.encode(x, KEY))
    torch.testing.assert_close(lost, x - decoded, rtol=0, atol=1e-6)
    wanted = total + 0.3 * decoded
    one.add(total, message, 0.3, KEY)
    torch.testing.assert_close(total, wanted, rtol=0, atol=2e-6)
