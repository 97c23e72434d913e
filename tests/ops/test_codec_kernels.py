"""Kernels of codecs give the bits of the passes of torch. Triton runs on a GPU if there is one, or is interpreted."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.exchange import codec
from gossamer.ops import blocks, fused
from gossamer.ops.blocks import CHUNK

GPU = "cuda" if torch.cuda.is_available() else "cpu"
KEY = Key(shared=3, own=7)
ADDS_EIGHT = torch.backends.cpu.get_cpu_capability() == "AVX2"  # numbers at a time: then kernels take means
MISSING = {
    "triton": "triton is not installed: torch's CUDA builds bring it, on a CPU `pip` does",
    "llvm": "llvmlite is not installed: the extra `kernels` brings it",
}
CODECS: dict[str, str | dict[str, Any]] = {
    **{name: name for name in ("int8", "int4", "ternary", "sign", "float16", "bfloat16")},
    "int8, blocks of 4": {"int8": {"block_size": 4}},
    "int8, blocks of 8192": {"int8": {"block_size": 8192}},
    "int4, blocks of 24": {"int4": {"block_size": 24}},
    "int8 stochastic": {"int8": {"stochastic": True}},
    "int4 stochastic": {"int4": {"stochastic": True}},
    "sign, blocks of 40": {"sign": {"block_size": 40}},
}
SHAPES = [(0,), (1,), (2,), (33,), (257,), (4096,), (5000,), (3, 1), (5, 130), (2, 2, 1024), (0, 8), (2, 0), (6, 9)]
LARGE = [(CHUNK + 300,), (700, 520), (3, CHUNK // 2 + 77)]  # the interpreter takes half a minute
MOST = torch.finfo(torch.float32).max


def skip_without_fma(kernels: fused.Kernels) -> None:
    """Skip where the interpreter rounds a product before it adds, as no GPU does."""
    if kernels is fused.LLVM or GPU == "cuda":
        return
    total, code = torch.tensor([-127.0]), torch.tensor([127], dtype=torch.int8)
    kernels.module().add_dequantized(total, code, torch.tensor([1 + 2.0**-23]), 256)
    if float(total) != 127 * 2.0**-23:
        pytest.skip("the interpreter of this triton rounds twice in fma: that of 3.9.0 rounds once")


@dataclass(frozen=True)
class Under:
    """The kernels under test, and the device that they run on."""

    kernels: fused.Kernels
    device: str


@pytest.fixture(params=MISSING)
def under(request: pytest.FixtureRequest) -> Iterator[Under]:
    kernels = {"triton": fused.TRITON, "llvm": fused.LLVM}[request.param]
    if find_spec(kernels.package) is None:
        pytest.skip(MISSING[request.param])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of numpy in the interpreter: 1 / 0
        skip_without_fma(kernels)
        yield Under(kernels, "cpu" if kernels is fused.LLVM else GPU)


@pytest.fixture
def kernels(under: Under, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on their device; nothing falls back to passes."""

    def kernel(kind: fused._Kind, device: torch.device) -> Any:
        return getattr(under.kernels.module(), kind.operation)

    monkeypatch.setattr(fused, "DEVICES", {under.device: under.kernels})
    monkeypatch.setattr(fused, "_compared", kernel)
    if under.kernels is fused.LLVM:
        monkeypatch.setattr(
            under.kernels.module(), "_LARGE", 1000
        )  # so that short rows are written past the cache, too
    monkeypatch.setattr(blocks, "CHUNK", 2048)  # so that short rows are several spans, too


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing has been compared yet, and nothing of what is compared here stays."""
    monkeypatch.setattr(fused, "_compared", cache(fused._compared.__wrapped__))
    yield


def outcomes(written: str | dict[str, Any], x: Tensor) -> list[Tensor]:
    """Return all that a codec gives for x; the bytes where all that they decode to is finite."""
    one, numel = codec.build(written), x.shape[-1]
    lost, in_place = torch.full_like(x, 7.0), x.clone()
    message = one.encode(x, KEY)
    other, again = one.encode_losing(x, KEY, lost), one.encode_losing(in_place, KEY, in_place)
    same_bits(lost, in_place)
    found = [one.decode(message, numel, KEY), one.decode(other, numel, KEY), lost]
    if bool(found[0].isfinite().all()):
        assert torch.equal(message, other) and torch.equal(message, again)
        found.append(message)
    if x.dim() == 1:
        one.add(total := x.nan_to_num(0.5, 0.5, 0.5) * 3, message, 0.3, KEY)
        found.append(total)
    return found


def same_bits(one: Tensor, other: Tensor) -> None:
    """Every bit, but that NaN is NaN."""
    assert one.shape == other.shape and one.dtype == other.dtype
    if one.dtype.is_floating_point:
        assert torch.equal(one.isnan(), other.isnan())
        one, other = (torch.where(t.isnan(), torch.zeros_like(t), t).view(torch.int32) for t in (one, other))
    assert torch.equal(one, other)


def check(name: str, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    for x in inputs:
        monkeypatch.setenv(fused.SWITCH, "1")
        by_kernels = outcomes(CODECS[name], x)
        monkeypatch.setenv(fused.SWITCH, "0")
        for one, other in zip(by_kernels, outcomes(CODECS[name], x), strict=True):
            same_bits(one, other)


def numbers(shape: tuple[int, ...], seed: int, device: str) -> Tensor:
    """Return numbers of all sizes, with ties, zeros of both signs and, for odd seeds, some that are not finite."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=rng) * (3 * torch.randn(*shape, generator=rng)).exp()
    kind = torch.randint(40, shape, generator=rng)
    x = torch.where(kind < 4, torch.randint(-254, 255, shape, generator=rng).float() / 2, x)
    for place, value in ((5, 0.0), (6, -0.0), (7, -1e-45), (8, 1e-39)):
        x = torch.where(kind == place, value, x)
    if seed % 2 and x.numel():
        values = torch.tensor([torch.inf, -torch.inf, torch.nan, MOST])
        x.view(-1)[torch.randint(x.numel(), (2,), generator=rng)] = values[torch.randint(4, (2,), generator=rng)]
    return (x.bfloat16().float() if seed % 3 == 0 else x).to(device)


@pytest.mark.parametrize("name", CODECS)
def test_kernels_give_the_bits_of_passes_in_any_shape(
    name: str, under: Under, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(len(name))
    drawn = [tuple(torch.randint(1, 3000, (1,), generator=rng).tolist()) for _ in range(3)]
    check(name, [numbers(shape, seed, under.device) for seed, shape in enumerate([*SHAPES, *drawn])], monkeypatch)
    if under.device == "cuda" or under.kernels is fused.LLVM:
        monkeypatch.setattr(blocks, "CHUNK", CHUNK)
        check(name, [numbers(shape, 2, under.device) for shape in LARGE], monkeypatch)


@pytest.mark.parametrize("name", CODECS)
def test_kernels_give_the_bits_of_passes_for_any_numbers(
    name: str, under: Under, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = [[0.0, -0.0, -1e-45, 9.9e-37, 1e-36, 5e-35, 2.0**-126, 1.5e38, MOST], [torch.inf, -torch.inf, torch.nan]]
    constant = [torch.tensor(values).unsqueeze(1).repeat(1, 1030) for values in edges]
    nans = torch.tensor([[0x7FFFFFFF], [-1], [0x7F800001]], dtype=torch.int32)  # of other bits each
    constant.append(nans.view(torch.float32).repeat(1, 70))
    wild = numbers((2100,), 2, "cpu") * 1e36
    inputs = [x.to(under.device) for x in (*constant, wild.clamp(-MOST, MOST))]
    rows, long = numbers((304, 3), 4, under.device), numbers((40, 3000), 6, under.device)
    check(name, [*inputs, rows.t(), long[3:9:2, 11:2900]], monkeypatch)  # not side by side, and in longer rows


def test_every_kernel_is_compared_with_the_passes_and_taken(
    under: Under, any_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "DEVICES", {under.device: under.kernels})
    kinds = [
        *(
            fused._Kind("quantize", 24, bits, levels, random, True)
            for bits, levels, random in ((8, 127, False), (4, 7, True))
        ),
        *(fused._Kind(name, 40, bits) for name in ("dequantize", "add_dequantized") for bits in (8, 4, 2, 1)),
        *(fused._Kind("encode_signs", block, loses=True) for block in (8, 40, 1024, 8192)),
        fused._Kind("narrow", 1024, 16, 14, loses=True),
        fused._Kind("widen", 1024, 16),
        fused._Kind("bfloat16_losing", 16, loses=True),
    ]
    assert {kind.operation for kind in kinds} == set(fused._PASSES)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        taken = {kind.operation for kind in kinds if fused._compared(kind, torch.device(under.device)) is not None}
    assert taken == set(fused._PASSES)
    assert not [one for one in said if "passes of torch" in str(one.message)]


def test_kernels_write_nothing_beside_their_rows(under: Under, kernels: None) -> None:
    work, beside = under.kernels.module(), list[Tensor]()

    def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        longer = torch.full((2, count + 64), 85, dtype=dtype, device=under.device)
        beside.append(longer[:, count:])
        return longer[:, :count]

    for numel, block in ((1, 8), (37, 16), (300, 256)):
        x, lost, scales = numbers((2, numel), 2, under.device), rows(numel), rows(-(-numel // block))
        work.quantize(x, block, 127, scales, codes := rows(numel, torch.int8), None, 8, lost)
        work.quantize(x, block, 7, scales, rows(-(-numel // 2), torch.uint8), None, 4, lost)
        work.narrow(x, block, 14, scales, rows(numel, torch.float16), lost)
        work.encode_signs(x, scales, rows(-(-numel // 8), torch.uint8), block, lost)
        work.bfloat16_losing(x, rows(numel, torch.bfloat16), lost)
        work.add_dequantized(lost, codes, scales, block)
    assert all(bool((one == 85).all()) for one in beside)


@pytest.mark.skipif(find_spec("llvmlite") is None, reason=MISSING["llvm"])
def test_a_copy_of_a_process_runs_what_was_compiled_before() -> None:
    one, x = codec.build("int8"), numbers((5000,), 2, "cpu")
    message = one.encode(x, KEY)
    if (child := os.fork()) == 0:
        os._exit(0 if torch.equal(one.encode(x, KEY), message) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(find_spec("llvmlite") is None, reason=MISSING["llvm"])
def test_a_processor_without_float16_takes_the_passes_in_silence(
    any_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gossamer.ops import llvm_kernels

    monkeypatch.setattr(llvm_kernels, "has_half", lambda: False)
    monkeypatch.setattr(llvm_kernels, "narrow", None)
    monkeypatch.setattr(llvm_kernels, "widen", None)
    one, x = codec.build("float16"), numbers((5000,), 2, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = one.decode(one.encode(x, KEY), len(x), KEY)
    monkeypatch.setenv(fused.SWITCH, "0")
    same_bits(found, one.decode(one.encode(x, KEY), len(x), KEY))


@pytest.mark.skipif(find_spec("llvmlite") is None, reason=MISSING["llvm"])
@pytest.mark.skipif(not ADDS_EIGHT, reason="torch adds in vectors of another width")
def test_means_of_blocks_of_any_width_are_those_of_torch() -> None:
    from gossamer.ops import llvm_codecs

    for width in (*range(1, 140), 500, 512, 520, 1000, 1024, 1056, 2040, 4096, 5000, 8192):
        x, found = numbers((6, width), 2, "cpu"), torch.empty(6, 1)
        llvm_codecs.encode_signs(x, found, torch.empty(6, -(-width // 8), dtype=torch.uint8), width)
        same_bits(found, x.abs().mean(-1, keepdim=True))


@pytest.mark.skipif(find_spec("llvmlite") is None, reason=MISSING["llvm"])
def test_means_are_left_to_torch_where_it_adds_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.ops import llvm_codecs, llvm_kernels

    asked: list[bool] = []
    compiled = llvm_kernels.encode_signs
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(
        llvm_kernels, "encode_signs", lambda takes, loses: asked.append(takes) or compiled(takes, loses)
    )
    x, found = numbers((3, 2500), 2, "cpu"), [(torch.empty(3, 3), torch.empty(3, 313, dtype=torch.uint8)) for _ in "ab"]
    llvm_codecs.encode_signs(x, *found[0], 1024)
    fused._PASSES["encode_signs"](x, *found[1], 1024)
    assert asked == [False]
    for one, other in zip(*found, strict=True):
        same_bits(one, other)


def stand_in(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """Let a module with these functions be the kernels of the CPU."""
    module = ModuleType("kernels")
    vars(module).update(functions)
    monkeypatch.setattr(fused, "DEVICES", {"cpu": fused.Kernels("torch", lambda: module)})


def test_a_kernel_of_other_bits_is_refused_and_named(any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_a_bit(*args: object) -> Tensor:
        return torch.nextafter(fused._PASSES["dequantize"](*args), torch.tensor(torch.inf))

    stand_in(monkeypatch, dequantize=off_by_a_bit)
    codes, scales = torch.ones(300, dtype=torch.int8), torch.ones(2)
    with pytest.warns(RuntimeWarning, match="the kernel of dequantize gives other bits on"):
        found = fused.dequantize(codes, scales, 256)
    assert torch.equal(found, torch.ones(300))


def test_a_kernel_that_cannot_be_compiled_is_refused_and_named(
    any_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    stand_in(monkeypatch, dequantize=failing)
    codes, scales = torch.ones(300, dtype=torch.int8), torch.ones(2)
    with pytest.warns(RuntimeWarning, match=r"cannot be used \(RuntimeError: Failed to find C compiler\)"):
        fused.dequantize(codes, scales, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert torch.equal(fused.dequantize(codes, scales, 256), torch.ones(300))


def test_threads_that_come_together_compare_once(any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    together, said = threading.Barrier(4), list[str]()

    def failing(*args: object) -> None:
        together.wait(0.2)  # broken: nobody else is here

    stand_in(monkeypatch, dequantize=failing)
    monkeypatch.setattr(fused, "_say", lambda kind, device, what: said.append(what))
    codes, scales = torch.ones(300, dtype=torch.int8), torch.ones(2)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: fused.dequantize(codes, scales, 256), range(4)))
    assert said == ["cannot be used (BrokenBarrierError: )"]
    assert all(torch.equal(one, torch.ones(300)) for one in found)


@pytest.mark.parametrize(
    ("written", "is_kernel"),
    [
        (torch.zeros(4, 3, 8), True),
        (torch.zeros(4, 8)[::2, :6], True),
        (torch.zeros(8, 4).t(), False),
        (torch.zeros(4, 3, 8)[:, :2], False),  # rows of it are a copy
    ],
)
def test_kernels_write_where_rows_lie(written: Tensor, is_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", {"cpu": fused.LLVM})
    monkeypatch.setattr(fused, "_compared", lambda kind, device: stand_in)
    monkeypatch.setenv(fused.SWITCH, "1")
    chosen = fused._chosen(fused._Kind("encode_signs", 8), torch.zeros(8), written)
    assert (chosen is stand_in) is is_kernel


@pytest.mark.parametrize("why", ["not installed", "switched off", "a large block", "another device", None])
def test_passes_run_where_kernels_cannot(why: str | None, any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def counted(*args: object) -> object:
        ran.append(1)
        return fused._PASSES["dequantize"](*args)

    stand_in(monkeypatch, dequantize=counted)
    monkeypatch.setenv(fused.SWITCH, "0" if why == "switched off" else "1")
    if why == "not installed":
        monkeypatch.setattr(fused, "find_spec", lambda name: None)
    elif why == "another device":
        monkeypatch.setattr(fused, "DEVICES", {"mps": fused.DEVICES["cpu"]})
    block = 8200 if why == "a large block" else 256
    codes = torch.ones(300, dtype=torch.int8)
    found = fused.dequantize(codes, torch.ones(2), block)
    assert torch.equal(found, torch.ones(300)) and bool(ran) is (why is None)


@pytest.mark.skipif(find_spec("llvmlite") is None, reason=MISSING["llvm"])
@pytest.mark.parametrize(("codes", "scales"), [((1, 99), (1, 4)), ((1, 100), (1, 3)), ((2, 100), (1, 4))])
def test_a_tensor_that_is_too_short_is_refused(codes: tuple[int, int], scales: tuple[int, int]) -> None:
    """Machine code would read on, whatever lies there."""
    given = torch.zeros(codes, dtype=torch.int8), torch.ones(scales)
    with pytest.raises(ValueError, match=r"tensor \d has .* wanted"):
        fused.LLVM.module().dequantize(*given, 32, numel=100)
