"""Rounding to nearest in packed groups: error bound, groups of any width, bytes, and the same numbers again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer.model.quantized.packed import Packed
from gossamer.quantize import build
from gossamer.spec.errors import BadInput

BITS = range(2, 9)


def weight(rows: int = 5, columns: int = 72, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def steps_of(format: Packed, scales: Tensor, columns: int) -> Tensor:
    return scales[..., 0].float().repeat_interleave(format.width(columns), 1)[:, :columns]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_the_error_is_at_most_half_a_step_also_in_groups_that_do_not_divide_the_row(bits: int, symmetric: bool) -> None:
    for group in (0, 8, 32, 64):
        quantizer = build({"round_to_nearest": {"bits": bits, "group": group, "symmetric": symmetric}})
        exact = weight() * torch.logspace(-4, 2, 72)  # small and large ones side by side
        format, blocks = quantizer.format, quantizer.encode(exact, None).blocks
        assert blocks.scales is not None
        made = format.decode(blocks, 72)
        bound = steps_of(format, blocks.scales, 72) / 2
        assert bool(((exact - made).abs() <= bound * (1 + 1e-6) + 1e-9).all())


def test_a_group_of_equal_weights_keeps_them_within_a_step_of_float16() -> None:
    exact = torch.full((2, 64), 0.1)
    format = Packed(bits=3)
    made = format.decode(format.encode(exact), 64)
    assert (made - exact).abs().max() < 1e-4
    assert not format.decode(format.encode(torch.zeros(2, 64)), 64).any()


@pytest.mark.parametrize("bits", BITS)
def test_codes_come_back_bit_for_bit_and_take_their_bits(bits: int) -> None:
    format = Packed(bits=bits, group=32)
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 2**bits, (3, 64), np.uint8))
    scales = torch.ones(3, 2, 2, dtype=torch.float16)
    blocks = format.pack(codes, scales)
    assert torch.equal(format.codes(blocks), codes)
    assert blocks.codes.shape == (3, 64 * bits // 8)
    stream = np.unpackbits(blocks.codes.numpy()[0], bitorder="little").reshape(64, bits)
    assert np.array_equal(stream @ (1 << np.arange(bits)), codes[0].numpy())  # the bit stream that the format says


@pytest.mark.parametrize("group", [0, 32])
def test_empty_blocks_have_the_shapes_of_encoded_ones(group: int) -> None:
    for columns in (32, 40, 100):
        format = Packed(bits=5, group=group, symmetric=True)
        made, empty = format.encode(weight(columns=columns)), format.empty(5, columns)
        assert made.scales is not None and empty.scales is not None
        assert (made.codes.shape, made.scales.shape) == (empty.codes.shape, empty.scales.shape)


@pytest.mark.parametrize(
    ("given", "said"), [({"bits": 1}, "2 to 8 bits"), ({"bits": 9}, "2 to 8 bits"), ({"group": 12}, "multiple of 8")]
)
def test_bits_and_groups_that_there_are_not(given: dict[str, int], said: str) -> None:
    for name in ("round_to_nearest", "gptq"):
        with pytest.raises(BadInput, match=said):
            build({name: given})
