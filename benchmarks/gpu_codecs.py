"""Codecs on a GPU, by Triton's kernels beside torch's passes: the same bits, and what each takes; see `gpu.py`."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from encode_against import CODECS
from gossamer.comm.random_key import Key
from gossamer.exchange import codec
from gossamer.exchange.codec import Codec
from gossamer.ops import fused

KEY = Key(shared=1, own=2)
KERNELS, PASSES = "1", "0"
_WITHOUT_RANDOM = {"int8", "int4", "float16", "bfloat16"}  # ... and without sums, whose order differs: as on a CPU


def rows(device: torch.device, numel: int, repeats: int) -> dict[str, Any]:
    """Compare every codec that has kernels, on Gaussian numbers.

    A row has whether both gave the same bytes and numbers, whether the bytes are those of this machine's CPU (None:
    they need not be), the milliseconds of each (medians, both by turns; the first use is not counted) and the seconds
    of the first use of the kernels, with compiling and comparing.
    """
    return {name: row(name, device, numel, repeats) for name in CODECS if name.split(" ")[0] not in ("fp8", "natural")}


def row(name: str, device: torch.device, numel: int, repeats: int) -> dict[str, Any]:
    one = codec.build(CODECS[name])
    on_cpu = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    x = on_cpu.to(device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first_s = seconds(device, lambda: outcome(one, x, KERNELS))
    bits = [outcome(one, x, side) for side in (KERNELS, PASSES)]
    found: dict[str, Any] = {
        "same_bits": all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*bits, strict=True)),
        "bytes_as_on_cpu": torch.equal(bits[0][0].cpu(), one.encode(on_cpu, KEY)) if name in _WITHOUT_RANDOM else None,
        "refused": [str(one.message) for one in said if fused.SWITCH in str(one.message)],
        "first_use_s": round(first_s, 3),
    }
    message, lost, total = bits[0][0], torch.empty_like(x), torch.zeros_like(x)
    parts: dict[str, Callable[[], Any]] = {
        "encode": lambda: one.encode(x, KEY),
        "encode_losing": lambda: one.encode_losing(x, KEY, lost),
        "decode": lambda: one.decode(message, numel, KEY),
        "add": lambda: one.add(total, message, 0.5, KEY),
    }
    for part, work in parts.items():
        times: dict[str, list[float]] = {KERNELS: [], PASSES: []}
        for turn in range(repeats + 1):
            for side in sorted(times, reverse=turn % 2 == 1):
                os.environ[fused.SWITCH] = side
                took = seconds(device, work)
                times[side] += [1e3 * took] if turn else []
        ours, theirs = median(times[KERNELS]), median(times[PASSES])
        found[part] = {"triton_ms": round(ours, 4), "torch_ms": round(theirs, 4), "ratio": round(ours / theirs, 3)}
    return found


def outcome(one: Codec, x: Tensor, side: str) -> list[Tensor]:
    """Return the message of x, what it decodes to, what was lost and a sum, by kernels or by passes."""
    os.environ[fused.SWITCH] = side
    lost, total = torch.empty_like(x), x.clone()
    message = one.encode(x, KEY)
    again = one.encode_losing(x, KEY, lost)
    one.add(total, message, 0.3, KEY)
    return [message, again, one.decode(message, x.numel(), KEY), lost, total]


def seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Return how long the work takes, until the device has done it."""
    settle(device)
    began = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - began


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
