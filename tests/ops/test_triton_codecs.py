"""Kernels of codecs give the bits of torch's passes: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.exchange import codec
from gossamer.exchange.codec import sign
from gossamer.ops import blocks, fused
from gossamer.ops.blocks import CHUNK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEY = Key(shared=3, own=7)
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: torch's CUDA builds bring it, on a CPU `pip` does"
)
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
LARGE = [(CHUNK + 300,), (700, 520), (3, CHUNK // 2 + 77)]  # on a GPU: the interpreter takes half a minute
MOST = torch.finfo(torch.float32).max


def skip_without_fma(triton_codecs: ModuleType) -> None:
    """Skip where the interpreter rounds a product before it adds, as no GPU does."""
    total, code = torch.tensor([-127.0]), torch.tensor([127], dtype=torch.int8)
    triton_codecs.add_dequantized(total, code, torch.tensor([1 + 2.0**-23]), 256)
    if float(total) != 127 * 2.0**-23:
        pytest.skip("the interpreter of this triton rounds twice in fma: that of 3.9.0 rounds once")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels everywhere, on any device; nothing falls back to passes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of numpy in the interpreter: 1 / 0
        from gossamer.ops import triton_codecs

        if DEVICE == "cpu":
            skip_without_fma(triton_codecs)
        monkeypatch.setattr(fused, "DEVICES", (DEVICE,))
        monkeypatch.setattr(fused, "_compared", lambda kind, device: getattr(triton_codecs, kind.operation))
        monkeypatch.setattr(sign, "_NUMPY", ())
        monkeypatch.setattr(blocks, "CHUNK", 2048)  # so that short rows are several spans, too
        yield


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every device has kernels, and nothing has been compared yet."""
    monkeypatch.setattr(fused, "DEVICES", (DEVICE,))
    fused._compared.cache_clear()
    yield
    fused._compared.cache_clear()


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


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
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
    return (x.bfloat16().float() if seed % 3 == 0 else x).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("name", CODECS)
def test_kernels_give_the_bits_of_passes_in_any_shape(
    name: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(len(name))
    drawn = [tuple(torch.randint(1, 3000, (1,), generator=rng).tolist()) for _ in range(3)]
    check(name, [numbers(shape, seed) for seed, shape in enumerate([*SHAPES, *drawn])], monkeypatch)
    if DEVICE == "cuda":
        monkeypatch.setattr(blocks, "CHUNK", CHUNK)
        check(name, [numbers(shape, 2) for shape in LARGE], monkeypatch)


@needs_triton
@pytest.mark.parametrize("name", CODECS)
def test_kernels_give_the_bits_of_passes_for_any_numbers(
    name: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = [[0.0, -0.0, -1e-45, 9.9e-37, 1e-36, 5e-35, 2.0**-126, 1.5e38, MOST], [torch.inf, -torch.inf, torch.nan]]
    constant = [torch.tensor(values, device=DEVICE).unsqueeze(1).repeat(1, 1030) for values in edges]
    nans = torch.tensor([[0x7FFFFFFF], [-1], [0x7F800001]], dtype=torch.int32, device=DEVICE)  # of other bits each
    constant.append(nans.view(torch.float32).repeat(1, 70))
    wild = numbers((2100,), 2) * 1e36
    apart = [numbers((304, 3), 4).t(), numbers((40, 3000), 6)[3:9:2, 11:2900]]  # not side by side, and in longer rows
    check(name, [*constant, wild.clamp(-MOST, MOST), *apart], monkeypatch)


@needs_triton
def test_every_kernel_is_compared_with_the_passes_and_taken(any_device: None) -> None:
    from gossamer.ops import triton_codecs

    if DEVICE == "cpu":
        skip_without_fma(triton_codecs)
    kinds = [
        *(
            fused._Kind("quantize", 24, bits, levels, random, True)
            for bits, levels, random in ((8, 127, False), (4, 7, True))
        ),
        *(fused._Kind(name, 40, bits) for name in ("dequantize", "add_dequantized") for bits in (8, 4, 2, 1)),
        fused._Kind("pack_signs", 40, loses=True),
        fused._Kind("narrow", 1024, 16, 14, loses=True),
        fused._Kind("widen", 1024, 16),
        fused._Kind("bfloat16_losing", 16, loses=True),
    ]
    assert {kind.operation for kind in kinds} == set(fused._PASSES)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        taken = [fused._compared(kind, torch.device(DEVICE)) for kind in kinds]
    assert all(taken) and not [one for one in said if "passes of torch" in str(one.message)]


def stand_in(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """Put a module with these functions where the kernels are."""
    module = ModuleType("gossamer.ops.triton_codecs")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("gossamer.ops.triton_codecs", module, raising=False)
    monkeypatch.setattr(fused, "find_spec", lambda name: object())


def test_a_kernel_of_other_bits_is_refused_and_named(any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_a_bit(*args: object) -> Tensor:
        return torch.nextafter(fused._PASSES["dequantize"](*args), torch.tensor(torch.inf, device=DEVICE))

    stand_in(monkeypatch, dequantize=off_by_a_bit)
    codes, scales = torch.ones(300, dtype=torch.int8, device=DEVICE), torch.ones(2, device=DEVICE)
    with pytest.warns(RuntimeWarning, match="the kernel of dequantize gives other bits on"):
        found = fused.dequantize(codes, scales, 256)
    assert torch.equal(found, torch.ones(300, device=DEVICE))


def test_a_kernel_that_cannot_be_compiled_is_refused_and_named(
    any_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    stand_in(monkeypatch, dequantize=failing)
    codes, scales = torch.ones(300, dtype=torch.int8, device=DEVICE), torch.ones(2, device=DEVICE)
    with pytest.warns(RuntimeWarning, match=r"cannot be used \(RuntimeError: Failed to find C compiler\)"):
        fused.dequantize(codes, scales, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert torch.equal(fused.dequantize(codes, scales, 256), torch.ones(300, device=DEVICE))


def test_threads_that_come_together_compare_once(any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    together, said = threading.Barrier(4), list[str]()

    def failing(*args: object) -> None:
        together.wait(0.2)  # broken: nobody else is here

    stand_in(monkeypatch, dequantize=failing)
    monkeypatch.setattr(fused, "_say", lambda kind, device, what: said.append(what))
    codes, scales = torch.ones(300, dtype=torch.int8, device=DEVICE), torch.ones(2, device=DEVICE)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: fused.dequantize(codes, scales, 256), range(4)))
    assert said == ["cannot be used (BrokenBarrierError: )"]
    assert all(torch.equal(one, torch.ones(300, device=DEVICE)) for one in found)


@pytest.mark.parametrize(
    ("written", "is_kernel"),
    [
        (torch.zeros(4, 3, 8, device=DEVICE), True),
        (torch.zeros(4, 8, device=DEVICE)[::2, :6], True),
        (torch.zeros(8, 4, device=DEVICE).t(), False),
        (torch.zeros(4, 3, 8, device=DEVICE)[:, :2], False),  # rows of it are a copy
    ],
)
def test_kernels_write_where_rows_lie(written: Tensor, is_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", (DEVICE,))
    monkeypatch.setattr(fused, "_compared", lambda kind, device: stand_in)
    monkeypatch.setenv(fused.SWITCH, "1")
    chosen = fused._chosen(fused._Kind("pack_signs", 8), torch.zeros(8, device=DEVICE), written)
    assert (chosen is stand_in) is is_kernel


@pytest.mark.parametrize("why", ["no triton", "switched off", "a large block", "another device", None])
def test_passes_run_where_kernels_cannot(why: str | None, any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def counted(*args: object) -> object:
        ran.append(1)
        return fused._PASSES["dequantize"](*args)

    stand_in(monkeypatch, dequantize=counted)
    monkeypatch.setenv(fused.SWITCH, "0" if why == "switched off" else "1")
    if why == "no triton":
        monkeypatch.setattr(fused, "find_spec", lambda name: None)
    elif why == "another device":
        monkeypatch.setattr(fused, "DEVICES", ("mps",))
    block = 8200 if why == "a large block" else 256
    codes = torch.ones(300, dtype=torch.int8, device=DEVICE)
    found = fused.dequantize(codes, torch.ones(2, device=DEVICE), block)
    assert torch.equal(found, torch.ones(300, device=DEVICE)) and bool(ran) is (why is None)
