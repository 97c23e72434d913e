"""What codecs and exchanges cost: GB of float32 a second on one core, and the link up to which the bytes saved pay.

    python benchmarks/encode.py [--repeats 15] [--numel 4194304] [--only int8,two_shot] [--device cpu]
    python benchmarks/encode.py --against COMMIT [--seconds 300] [--repeats 15] [--numel 4194304] [--only int8]

A codec encodes and decodes one message of Gaussian numbers. An exchange runs as one rank of 2 and of 4 with a channel
that answers at once (islands of two), on a bucket of the matrices of a small GPT, states carried along. One thread; CPU
time of that thread, so that neighbors on the machine count little; medians of repeats that take turns.

break_even_gbit: bytes saved over CPU seconds. On slower links the method is faster than what it replaces, even when
none of its work is hidden behind the backward pass: for a codec, sending the float32 message once; for an exchange, the
dense all-reduce of 2 (n - 1) / n buckets. Methods that save no bytes have none. card_ms: a reference figure for the
encoding alone, numpy or torch on another core, same number of numbers.

With --against the codecs alone, beside those of another commit, in processes that take turns; under `against` in the
record, the rest of which stays. floor_ms: a plain copy in the same processes that reads and writes as many bytes as the
codec does. kernels: what compiles kernels for codecs (extra `kernels`), empty where passes of torch encode.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import MISSING, fields
from importlib.metadata import version
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import encode_against
from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.loopback import LoopbackChannel
from gossamer.comm.message import ExchangeContext, ProcessGroups
from gossamer.comm.random_key import Key
from gossamer.exchange import codec
from gossamer.ops import fused
from gossamer.run.allocator import keep_freed_memory
from gossamer.spec.errors import BadInput
from result import publish, publish_part, recorded

INNER = {"Codec": "int8", "Exchange": {"two_shot": "int8"}}  # what is put into a method that wraps another
CODECS: dict[str, Any] = {
    "int8 stochastic": {"int8": {"stochastic": True}},
    "int4 stochastic": {"int4": {"stochastic": True}},
    "fp8 e5m2": {"fp8": {"format": "e5m2"}},
    "hadamard int4": {"hadamard": "int4"},
}
EXCHANGES: dict[str, Any] = {
    **{f"two_shot {name}": {"two_shot": name} for name in ("bfloat16", "int8", "int4", "sign", "lossless")},
    "error_feedback sign": {"error_feedback": {"two_shot": "sign"}},
    "error_feedback sampled_topk": {"error_feedback": "sampled_topk"},
}
CARD_MS = {
    "float16": (0.8, None),
    "bfloat16": (1.5, None),
    "cast": (1.5, None),
    "int8": (1.9, None),
    "int4": (5.4, None),
    "int4 stochastic": (22.8, None),
    "sign": (0.4, 1.1),  # the bits alone, without the scale
    "hadamard int4": (10.3, None),
    "topk": (45.0, None),
    "sampled_topk": (5.6, None),
    "random_k": (0.2, None),
    "powersgd": (22.7, None),
}
Row = dict[str, Any]
Part = Callable[[], float]


def main() -> None:
    read = argparse.ArgumentParser()
    read.add_argument("--repeats", type=int, default=15)
    read.add_argument("--numel", type=int, default=1 << 22)
    read.add_argument("--only", default="", help="names, separated by commas")
    read.add_argument("--device", default="cpu")
    read.add_argument("--against", default="", metavar="COMMIT", help="measure codecs beside those of that commit")
    read.add_argument("--seconds", type=float, default=300.0, help="for how long, with --against")
    asked = read.parse_args()
    if asked.against:
        only = set(asked.only.split(",")) - {""}
        beside = encode_against.compare(asked.against, asked.numel, asked.repeats, asked.seconds, only)
        encode_against.table(beside)
        publish_part("encode", "against", {"kernels": kernels_on(torch.device("cpu")), **beside})
        return
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    device, only = torch.device(asked.device), set(asked.only.split(",")) - {""}
    rows: list[tuple[Row, dict[str, Part]]] = []
    for name, written in wanted(codec, CODECS, only).items():
        rows.append(codec_row(name, written, asked.numel, device))
    for name, written in wanted(exchange_methods, EXCHANGES, only).items():
        rows += [exchange_row(name, written, asked.numel, ranks, device) for ranks in (2, 4)]
    measure(rows, asked.repeats)
    figures = [finished(row) for row, _ in rows]
    table(figures)
    setting = {"numel": asked.numel, "device": asked.device, "repeats": asked.repeats, "kernels": kernels_on(device)}
    kept = {key: value for key, value in recorded("encode").items() if key == "against"}
    publish("encode", {**setting, "load_average": os.getloadavg()[0], "rows": figures, **kept})


def kernels_on(device: torch.device) -> str:
    """The package that compiles kernels of codecs on a device, with its version; "" where passes of torch encode."""
    if not fused.has_kernels(device):
        return ""
    package = fused.DEVICES[device.type].package
    return f"{package} {version(package)}"


def wanted(room: Any, more: dict[str, Any], only: set[str]) -> dict[str, Any]:
    """Every method there is, with its defaults, and some settings more."""
    found = {}
    for name in room.names():
        try:
            room.build(name)
            found[name] = name
        except BadInput:  # it wraps another
            needs = [
                f for f in fields(room.REGISTRY.type(name)) if f.default is MISSING and f.default_factory is MISSING
            ]
            found[name] = {name: {f.name: INNER[str(f.type)] for f in needs}}
    return {name: w for name, w in {**found, **more}.items() if not only or name.split(" ")[0] in only}


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call: CPU time on a processor, time between idle moments on an accelerator."""
    if device.type == "cpu":
        began = time.thread_time()
        work()
        return time.thread_time() - began
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def codec_row(name: str, written: Any, numel: int, device: torch.device) -> tuple[Row, dict[str, Part]]:
    one, key = codec.build(written), Key(shared=1, own=2)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    message = one.encode(x, key)
    card = CARD_MS.get(name, (None, None))
    row: Row = {
        "kind": "codec",
        "method": name,
        "float32_bytes": 4 * numel,
        "wire_bytes": message.numel(),
        "relative_error": round(float((one.decode(message, numel, key) - x).norm() / x.norm()), 5),
        "card_encode_ms": card[0],
        "card_decode_ms": card[1],
    }
    parts: dict[str, Part] = {
        "encode_ms": lambda: timed(lambda: one.encode(x, key), device),
        "decode_ms": lambda: timed(lambda: one.decode(message, numel, key), device),
    }
    return row, parts


def exchange_row(name: str, written: Any, numel: int, ranks: int, device: torch.device) -> tuple[Row, dict[str, Part]]:
    row: Row = {"kind": "exchange", "method": name, "ranks": ranks, "card_encode_ms": CARD_MS.get(name, (None,))[0]}
    levels = ProcessGroups.islands([list(range(i, i + 2)) for i in range(0, ranks, 2)] if ranks > 2 else [[0], [1]])
    where = gpt(numel, device)
    try:
        one = exchange_methods.build(written)
        one.check(where, levels)
        runner = Runner(one, where, levels)
        runner()
    except (BadInput, RuntimeError, AssertionError) as error:
        row["refused"] = str(error).splitlines()[0]
        return row, {}
    row |= {"float32_bytes": 2 * (ranks - 1) * where.nbytes // ranks, "wire_bytes": runner.sent}
    return row, {"cpu_ms": runner}


class Runner:
    """One exchange after the other, as rank 0, each on the same input and the state that the last one left."""

    def __init__(self, one: exchange_methods.Exchange, where: Layout, levels: ProcessGroups) -> None:
        self.one, self.where, self.levels = one, where, levels
        self.state, self.step, self.sent = one.init(where), 0, 0
        rng = torch.Generator().manual_seed(0)
        self.x = torch.randn(where.numel, generator=rng).to(where.device)

    def __call__(self) -> float:
        ranks = len(self.levels.group("all", 0))
        channel = LoopbackChannel(0, self.levels)
        share = torch.full((ranks,), 1 / ranks, dtype=torch.float64)
        at = ExchangeContext(0, self.levels, share, (7, self.step), 0.1, accounts=False)
        bucket = Bucket(self.where, self.x.clone())
        seconds = timed(lambda: self._drive(bucket, at, channel), self.where.device)
        self.step, self.sent = self.step + 1, sum(channel.meter.snapshot().values())
        return seconds

    def _drive(self, bucket: Bucket, at: ExchangeContext, channel: LoopbackChannel) -> None:
        method = self.one.run(bucket, self.state, at)
        try:
            message = next(method)
            while True:
                message = method.send(channel.start(message).wait())
        except StopIteration as end:
            self.state = end.value.state


def gpt(numel: int, device: torch.device) -> Layout:
    """Two blocks of a GPT, as wide as comes closest to `numel` numbers."""
    width = max(8, round((numel / 24) ** 0.5 / 8) * 8)
    shapes = {
        "attention.qkv": (3 * width, width),
        "attention.out": (width, width),
        "mlp.up": (4 * width, width),
        "mlp.down": (width, 4 * width),
        "norm": (width,),
        "bias": (4 * width,),
    }
    named = {f"{block}.{name}": torch.empty(shape, device=device) for block in (0, 1) for name, shape in shapes.items()}
    return Layout.of(named)


def measure(rows: list[tuple[Row, dict[str, Part]]], repeats: int) -> None:
    """Median milliseconds of every part of every row; all rows once, then all again."""
    seconds: dict[tuple[int, str], list[float]] = {}
    for _ in range(repeats):
        for index, (_, parts) in enumerate(rows):
            for name, part in parts.items():
                seconds.setdefault((index, name), []).append(part())
    for (index, name), found in seconds.items():
        rows[index][0][name] = round(1e3 * median(found), 3)
        rows[index][0][f"least_{name}"] = round(1e3 * min(found), 3)  # what it takes with the caches to itself


def finished(row: Row) -> Row:
    spent = sum(row.get(name, 0.0) for name in ("encode_ms", "decode_ms", "cpu_ms")) / 1e3
    if spent:
        saved = row["float32_bytes"] - row["wire_bytes"]
        row["break_even_gbit"] = round(8e-9 * saved / spent, 2) if saved > 0 else None
    for name in ("encode", "decode"):
        if row.get(f"{name}_ms"):
            row[f"{name}_gb_s"] = round(1e-6 * row["float32_bytes"] / row[f"{name}_ms"], 3)
    if row.get("cpu_ms"):
        whole = row["float32_bytes"] * row["ranks"] / (2 * (row["ranks"] - 1))
        row["gb_s"] = round(1e-6 * whole / row["cpu_ms"], 3)
    return row


def table(rows: list[Row]) -> None:
    head = f"{'':28s}{'bytes':>7s}{'encode':>9s}{'card':>7s}{'decode':>9s}{'card':>7s}{'GB/s':>12s}{'breaks even':>13s}"
    print(f"{head}\n{'':28s}{'of f32':>7s}{'ms':>9s}{'ms':>7s}{'ms':>9s}{'ms':>7s}{'':12s}{'Gbit/s':>13s}")
    for row in rows:
        name = row["method"] + (f" x{row['ranks']}" if "ranks" in row else "")
        if "refused" in row:
            print(f"{name:28s}  {row['refused']}")
            continue
        share = row["wire_bytes"] / row["float32_bytes"]
        first, second = row.get("encode_ms", row.get("cpu_ms")), row.get("decode_ms")
        card, back = row["card_encode_ms"], row.get("card_decode_ms")
        speed = f"{row['gb_s']:.2f}" if "gb_s" in row else f"{row['encode_gb_s']:.2f} {row['decode_gb_s']:.2f}"
        cells = [f"{share:7.4f}", f"{first:9.2f}", f"{card or '':>7}", f"{second or '':>9}", f"{back or '':>7}"]
        print(f"{name:28s}{''.join(cells)}{speed:>12s}{row['break_even_gbit'] or '':>13}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
