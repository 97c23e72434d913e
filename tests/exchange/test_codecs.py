"""What each codec says of itself beyond the contract: its bytes, what it represents exactly, bounds of its errors."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from torch import Tensor

from exchange import crew
from gossamer import exchange as exchange_methods
from gossamer.comm.random_key import Key
from gossamer.exchange import codec
from gossamer.ops import bits
from gossamer.ops.byte_planes import join, split
from gossamer.ops.hadamard import GROUP, hadamard
from gossamer.ops.low_precision import widen
from gossamer.ops.quantize import _signs, dequantize, quantize
from gossamer.ops.rounding_noise import Noise
from gossamer.spec.errors import BadInput

KEY = Key(shared=3, own=7)
SIZES = [0, 1, 2, 3, 7, 8, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025, 5000]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(written, x: torch.Tensor, key: Key = KEY) -> torch.Tensor:
    one = codec.build(written)
    return one.decode(one.encode(x, key), x.shape[-1], key)


def four(numel: float) -> int:
    return ceil(ceil(numel) / 4) * 4


BYTES = {
    "bfloat16": lambda n: four(2 * n),
    "float16": lambda n: 4 * ceil(n / 1024) + four(2 * n),
    "fp8": lambda n: 4 * ceil(n / 256) + four(n),
    "int8": lambda n: 4 * ceil(n / 256) + four(n),
    "int4": lambda n: 4 * ceil(n / 128) + four(n / 2),
    "ternary": lambda n: 4 * ceil(n / 128) + four(n / 4),
    "sign": lambda n: 4 * ceil(n / 1024) + four(n / 8),
    "natural": lambda n: 4 * ceil(n / 1024) + four(n),
}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("numel", SIZES)
def test_bytes_are_those_of_the_formula(name: str, numel: int) -> None:
    one = codec.build(name)
    assert one.nbytes(numel) == one.encode(gaussian(numel), KEY).numel() == BYTES[name](numel)


@pytest.mark.parametrize("numel", SIZES)
def test_hadamard_pads_to_its_group(numel: int) -> None:
    one = codec.build({"hadamard": "int4"})
    assert one.nbytes(numel) == BYTES["int4"](32 * ceil(numel / 32))


@pytest.mark.parametrize("name", [*BYTES, "lossless"])
@pytest.mark.parametrize("shape", [(3, 1), (5, 130), (2, 3, 1024), (700, 520), (0, 8), (2, 0)])
def test_rows_of_any_number_and_length(name: str, shape: tuple[int, ...]) -> None:
    x = gaussian(*shape)
    decoded = there_and_back(name, x)
    assert decoded.shape == x.shape
    if x.numel() and name not in ("ternary", "natural"):
        rows = torch.stack([there_and_back(name, row) for row in x.flatten(0, -2)[:7]])
        assert torch.equal(decoded.flatten(0, -2)[:7], rows)


@pytest.mark.parametrize("name", [*BYTES, "lossless", "hadamard"])
def test_numbers_in_any_order_of_memory(name: str) -> None:
    x = gaussian(700, 3).t()
    written = {"hadamard": "int8"} if name == "hadamard" else name
    assert torch.equal(there_and_back(written, x), there_and_back(written, x.contiguous()))


EXACT = {
    "bfloat16": torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-120, 3e38, 0.0078125]).bfloat16().float(),
    "float16": torch.tensor([0.0, -0.0, 65504.0, -1.5, 2.0**-10, 0.333251953125]),
    "fp8": torch.tensor([0.0, -0.0, 240.0, -1.5, 0.0625, 13.0, -208.0]) * 2.0**-30,
    "int8": torch.tensor([0.0, 127.0, -127.0, 1.0, -64.0]) * 2.0**-30,
    "int4": torch.tensor([0.0, 7.0, -7.0, 1.0, -4.0, 3.0]) * 2.0**-30,
    "ternary": torch.tensor([0.0, -0.5, 0.5, 0.5]),
    "sign": torch.tensor([0.25, -0.25, -0.25, 0.25, 0.25]),
    "natural": torch.tensor([0.0, -0.0, 1.0, -0.5, 2.0**-100, -(2.0**20)]),
    "lossless": torch.tensor([0.0, -0.0, 1e-45, 3.4e38, float("inf"), -float("nan"), 0.1]),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_it_can_represent_comes_back_exactly(name: str) -> None:
    x = EXACT[name]
    decoded = there_and_back(name, x)
    if name in ("int8", "int4", "ternary"):
        assert torch.allclose(decoded, x, rtol=3e-7, atol=0)  # zero has no sign among integers
    else:
        assert torch.equal(decoded.view(torch.int32), x.view(torch.int32))


BOUNDS = {  # of an element's error: (of its own magnitude, of its block's largest, numbers in a block)
    "bfloat16": (2**-8, 0.0, 1),
    "float16": (2**-11, 2**-39, 1024),
    "fp8": (2**-4, 2**-17, 256),
    "int8": (0.0, 1 / 254, 256),
    "int4": (0.0, 1 / 14, 128),
    "ternary": (0.0, 1.0, 128),
    "natural": (1.0, 0.0, 1024),
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e30])
def test_the_error_of_an_element_is_bounded(name: str, scale: float) -> None:
    own, of_largest, block = BOUNDS[name]
    x = gaussian(8192) * gaussian(8192, seed=1).exp().pow(3) * scale
    error = (there_and_back(name, x) - x).abs().view(-1, block)
    magnitude = x.abs().view(-1, block)
    assert bool((error <= (own * magnitude + of_largest * magnitude.amax(-1, keepdim=True)) * 1.00001).all())


def test_e5m2_is_coarser_and_reaches_further() -> None:
    x = gaussian(4096)
    near, far = ((there_and_back({"fp8": {"format": f}}, x) - x).norm() / x.norm() for f in ("e4m3", "e5m2"))
    assert near < far < 2.5 * near
    x[::256] = 3e4
    small = torch.ones_like(x, dtype=torch.bool)
    small[::256] = False
    near, far = ((there_and_back({"fp8": {"format": f}}, x) - x)[small].norm() for f in ("e4m3", "e5m2"))
    assert far < near


def test_fp8_on_the_wire_is_that_of_torch() -> None:
    x = gaussian(256)
    x[0] = 3.9  # so that the block's power of two is 2^1
    message = codec.build("fp8").encode(x, KEY)
    assert torch.equal(message[4:].view(torch.float8_e4m3fn).float(), (x * 2.0**6).to(torch.float8_e4m3fn).float())


def test_e4m3_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # NaN is said by the scale
    values = codes.view(torch.float8_e4m3fn)
    assert torch.equal(widen(values, torch.ones(1), 256).view(torch.int32), values.float().view(torch.int32))


def test_too_large_for_the_type_is_infinite_not_wrong() -> None:
    x = torch.tensor([3.4e38, 1.0])
    assert there_and_back("bfloat16", x).tolist() == [float("inf"), 1.0]
    assert bool(torch.isfinite(there_and_back("float16", x)).all())
    assert there_and_back("float16", torch.tensor([float("inf"), 1.0]))[0] == float("inf")


@pytest.mark.parametrize("name", BYTES)
def test_a_bad_number_spoils_its_own_block_only(name: str) -> None:
    x = gaussian(4096)
    x[1500] = float("nan")
    decoded = there_and_back(name, x)
    block = codec.build(name).block
    spoilt = slice(1500 // block * block, (1500 // block + 1) * block)
    assert not bool(torch.isfinite(decoded[spoilt]).all())
    decoded[spoilt] = 0
    assert bool(torch.isfinite(decoded).all())


def test_the_hadamard_matrix_is_its_own_inverse_times_32_exactly() -> None:
    once, twice = torch.empty(GROUP * GROUP), torch.empty(GROUP * GROUP)
    hadamard(torch.eye(GROUP).view(-1), once)
    assert set(once.tolist()) == {1.0, -1.0}
    hadamard(once, twice)
    assert torch.equal(twice.view(GROUP, GROUP), 32 * torch.eye(GROUP))
    assert torch.equal(once.view(GROUP, GROUP), once.view(GROUP, GROUP).t())


@pytest.mark.parametrize("signs", [False, True])
def test_rotation_undoes_itself(signs: bool) -> None:
    x = gaussian(1003)
    decoded = there_and_back({"hadamard": {"inner": "float32", "signs": signs}}, x)
    torch.testing.assert_close(decoded, x, rtol=0, atol=2e-6)


def test_rotation_spreads_outliers_for_the_codec_inside() -> None:
    x = gaussian(4096)
    x[::100] *= 50
    plain, rotated = ((there_and_back(w, x) - x).norm() for w in ("int4", {"hadamard": "int4"}))
    assert rotated < 0.75 * plain


def test_signs_come_from_the_shared_key_alone() -> None:
    one, x = codec.build({"hadamard": {"inner": "int8", "signs": True}}), gaussian(96)
    message = one.encode(x, KEY)
    assert torch.equal(one.decode(message, 96, KEY), one.decode(message, 96, Key(shared=3, own=99)))
    assert not torch.allclose(one.decode(message, 96, Key(shared=4, own=7)), x, atol=0.1)


def test_sign_scale_and_measured_error() -> None:
    """The card's figure: |x - C(x)|^2 / |x|^2 = 1 - 2/pi for Gaussian blocks; zero counts as positive."""
    x = gaussian(1 << 16)
    error = float((there_and_back("sign", x) - x).square().sum() / x.square().sum())
    assert abs(error - 0.3634) < 0.01
    assert there_and_back("sign", torch.tensor([0.0, -0.0, 3.0, -3.0])).tolist() == [1.5, 1.5, 1.5, -1.5]


def test_sign_bits_are_the_same_with_and_without_numpy() -> None:
    x = gaussian(3, 77)
    below = torch.nn.functional.pad(x < 0, (0, 3)).view(torch.int8)
    assert torch.equal(_signs(x), bits.pack(below, 1))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_packing_of_every_byte(width: int) -> None:
    packed = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    codes = torch.empty(256 * 8 // width, dtype=torch.int8)
    bits.unpack(packed, width, codes)
    if width == 1:
        assert set(codes.tolist()) == {1, -1}
        codes = (codes < 0).view(torch.int8)
    else:
        assert codes.min() == -(2 ** (width - 1)) and codes.max() == 2 ** (width - 1) - 1
    first = int(codes[8 // width * 0b10110001]) % 2**width
    assert first == 0b10110001 % 2**width
    assert torch.equal(bits.pack(codes.clone(), width), packed)


def test_natural_gives_the_powers_around() -> None:
    x = torch.full((4096,), 3.0)
    decoded = there_and_back("natural", x)
    assert set(decoded.tolist()) == {2.0, 4.0}
    assert abs(float(decoded.mean()) - 3.0) < 0.1


@pytest.mark.parametrize(
    "written", ["ternary", "natural", {"int4": {"stochastic": True}}, {"int8": {"stochastic": True}}]
)
def test_errors_of_different_chunks_do_not_add_up(written) -> None:
    """The error of a sum grows like the root of its terms, also over more numbers than a chunk of noise."""
    numel = 3 << 18
    x = torch.full((numel,), 0.31)
    x[::1000] = 1.0
    ratios = []
    for own in range(6):
        error = (there_and_back(written, x, Key(3, own)) - x).double()
        ratios.append(float(error.sum().square() / error.square().sum()))
    assert sum(ratios) / 6 < 4


def test_noise_is_uniform_and_moves_on() -> None:
    noise = Noise(1 << 14, torch.Generator().manual_seed(1), torch.device("cpu"))
    a = noise.words(1 << 14).double().clone() / 2**32
    b = noise.words(1 << 14).double().clone() / 2**32
    for u in (a, b):
        assert abs(float(u.mean())) < 0.02 and abs(float(u.var()) - 1 / 12) < 0.004
    assert abs(float((a * b).mean())) < 0.004


def test_low_bits_of_noise_are_as_random_as_high_ones() -> None:
    """Of two numbers in one block as of any two, at every draw from the pool."""
    noise = Noise(1 << 14, torch.Generator().manual_seed(1), torch.device("cpu"))
    for _ in range(8):
        words = noise.words(1 << 14).long()
        for bit in (0, 1, 16, 31):
            ones = (words >> bit & 1).double()
            assert abs(float(ones.mean()) - 0.5) < 0.02
            assert abs(float(((ones[::2] - 0.5) * (ones[1::2] - 0.5)).mean())) < 0.015


def test_planes_come_together_again() -> None:
    x = torch.cat([gaussian(1000), torch.tensor([0.0, -0.0, 1e-45, float("inf"), -float("nan")])])
    assert torch.equal(join(*split(x)).view(torch.int32), x.view(torch.int32))


def test_lossless_saves_where_there_is_something_to_save() -> None:
    one, x = codec.build("lossless"), gaussian(1 << 16)
    sparse = x.view(-1, 256).clone()
    sparse[torch.arange(256) % 10 != 0] = 0
    for y, share in ((x, 0.85), (x.bfloat16().float(), 0.36), (sparse.view(-1), 0.15), (torch.zeros(1 << 16), 0.001)):
        message = one.encode(y, KEY)
        assert message.numel() <= share * 4 * y.numel()
        assert torch.equal(one.decode(message, y.numel(), KEY).view(torch.int32), y.view(torch.int32))
    noise = torch.randint(-(2**31), 2**31 - 1, (5000,), generator=torch.Generator().manual_seed(0)).int()
    assert one.encode(noise.view(torch.float32), KEY).numel() <= one.nbytes(5000)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_shot_carries_messages_of_any_length(ranks: int) -> None:
    one, where = exchange_methods.build({"two_shot": "lossless"}), crew.layout()
    inputs = [crew.bucket(where, r) for r in range(ranks)]
    inputs[-1].flat.zero_()  # a message much shorter than the others'
    wanted = sum(w * x.flat.double() for w, x in zip(crew.weights(ranks), inputs, strict=True))
    outcomes, channels = crew.world(one, ranks, inputs, [one.init(where)] * ranks)
    for rank, (outcome, channel) in enumerate(zip(outcomes, channels, strict=True)):
        assert outcome.lost is None and torch.equal(outcome.mean, outcomes[0].mean)
        torch.testing.assert_close(outcome.mean.double(), wanted, rtol=1e-5, atol=1e-6)
        caps = one.traffic(where, channel.levels, rank)
        assert channel.meter.messages == len(caps) == 4


TWO = {
    **{name: name for name in codec.names() if name != "hadamard"},
    "float16": {"cast": {"dtype": "float16"}},
    "rotated": {"hadamard": {"inner": "int4", "signs": True}},
    "rotated, of any length": {"hadamard": "lossless"},
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", TWO)
def test_two_shot_says_what_any_codec_lost(name: str, ranks: int) -> None:
    """mean = sum_i w_i kept_i; also where the second encoding is another one."""
    where = crew.layout({"w": (300, 11), "b": (7,)})
    for back in ({}, {"return_codec": "float32"}, {"return_codec": "int8"}):
        one = exchange_methods.build({"two_shot": {"codec": TWO[name], **back}})
        inputs = [crew.bucket(where, r) for r in range(ranks)]
        given = [x.flat.clone().double() for x in inputs]
        outcomes, _ = crew.world(one, ranks, inputs, [one.init(where)] * ranks)
        kept = [w * crew.kept(x, o) for w, x, o in zip(crew.weights(ranks), given, outcomes, strict=True)]
        torch.testing.assert_close(outcomes[0].mean.double(), sum(kept), rtol=1e-5, atol=1e-6)
        assert (outcomes[0].lost is None) == one.traits.lossless


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"cast": {"dtype": "float64"}}, "cast.dtype"),
        ({"fp8": {"format": "e3m4"}}, "fp8.format"),
        ({"fp8": {"block_size": 3}}, "fp8.block_size"),
        ({"int4": {"block_size": 100}}, "int4.block_size"),
        ({"ternary": {"block_size": 0}}, "ternary.block_size"),
        ({"sign": {"block_size": 12}}, "sign.block_size"),
        ({"hadamard": {"inner": {"int4": {"block_size": 5}}}}, "hadamard.inner.int4.block_size"),
    ],
)
def test_wrong_parameters_are_named(written, key: str) -> None:
    with pytest.raises(BadInput) as error:
        codec.build(written)
    assert error.value.key == key


@pytest.mark.parametrize("written", ["float16", {"fp8": {"format": "e4m3"}}, {"fp8": {"format": "e5m2"}}], ids=str)
@pytest.mark.parametrize("number", [1.5e38, 2.0**127, 3.3e38, torch.finfo(torch.float32).max])
def test_what_is_finite_stays_finite_to_the_last_number_there_is(written, number: float) -> None:
    x = gaussian(600)
    x[7], x[300] = number, -number
    decoded = there_and_back(written, x)
    assert decoded[[7, 300]].tolist() == pytest.approx([number, -number], rel=0.13)
    assert bool(torch.isfinite(decoded).all())
    x[8] = torch.inf
    assert not bool(torch.isfinite(there_and_back(written, x)[:256]).all())


@pytest.mark.parametrize(("levels", "bits"), [(127, 8), (7, 4), (1, 2)])
def test_no_noise_rounds_the_largest_beyond_the_last_level(levels: int, bits: int, monkeypatch) -> None:
    """The greatest noise there is, on the largest of 30,000 blocks: it comes back, and not as minus itself."""

    def most(self: Noise, count: int) -> Tensor:
        return torch.full((count,), 0x7FFF7FFF, dtype=torch.int32)

    monkeypatch.setattr(Noise, "words", most)
    top = gaussian(30_000).abs().clamp_(1e-3)
    x = torch.stack((top, torch.zeros_like(top)), 1).repeat(1, 4).flatten()  # blocks of 8
    kind = torch.int8 if bits == 8 else torch.uint8
    scales, out = torch.empty(len(top)), torch.empty(x.numel() * bits // 8, dtype=kind)
    quantize(x, 8, levels, scales, out, torch.Generator(), bits=bits)
    back = dequantize(out, scales, 8, bits=bits, numel=x.numel()).view(-1, 8)[:, 0]
    torch.testing.assert_close(back, top, rtol=6e-7, atol=0)
