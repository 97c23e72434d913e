"""Codecs of this tree beside those of another commit, in processes that take turns; see `encode.py --against`.

As a script, one turn: measures the codecs of the gossamer on PYTHONPATH and prints one JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

CODECS: dict[str, Any] = {
    **{name: name for name in ("int8", "sign", "float16", "bfloat16", "int4", "fp8", "natural", "ternary")},
    "fp8 e5m2": {"fp8": {"format": "e5m2"}},
    "hadamard int4": {"hadamard": "int4"},
    "int8 stochastic": {"int8": {"stochastic": True}},
    "int4 stochastic": {"int4": {"stochastic": True}},
}
OLDER = {"format": "form"}  # keys of codecs as commits before the package `gossamer.exchange` write them
ROOT = Path(__file__).parent.parent
Turn = dict[str, dict[str, Any]]


def compare(commit: str, numel: int, repeats: int, seconds: float, only: set[str]) -> dict[str, Any]:
    """Measure in turns, this tree and `commit`, for as long as the next two turns fit `seconds`, but at least twice."""
    names = [name for name in CODECS if not only or name.split(" ")[0] in only]
    ours: list[Turn] = []
    theirs: list[Turn] = []
    began = time.monotonic()
    with checked_out(commit) as other:
        while len(ours) < 2 or (time.monotonic() - began) * (1 + 1 / len(ours)) < seconds:
            ours.append(turn(ROOT, names, numel, repeats))
            theirs.append(turn(other, names, numel, repeats))
    rows = {name: row([t[name] for t in ours], [t[name] for t in theirs]) for name in names}
    setting = {"with": commit, "numel": numel, "repeats": repeats, "turns": len(ours)}
    return {**setting, "load_average": round(os.getloadavg()[0], 2), "codecs": rows}


def row(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over turns; a ratio is the median of those of neighboring turns, below 1 where this tree is faster."""
    found: dict[str, Any] = {"same_bytes": ours[0]["digest"] == theirs[0]["digest"]}
    for part in ("encode", "decode"):
        mine, other = [t[f"{part}_ms"] for t in ours], [t[f"{part}_ms"] for t in theirs]
        found[f"{part}_ms"], found[f"{part}_with_ms"] = round(median(mine), 3), round(median(other), 3)
        found[f"{part}_ratio"] = round(median(a / b for a, b in zip(mine, other, strict=True)), 3)
    found["floor_ms"] = round(median(t["floor_ms"] for t in [*ours, *theirs]), 3)
    return found


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Check `commit` out into a temporary worktree, removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", where, commit], cwd=ROOT, check=True, capture_output=True)
        try:
            yield where
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", where], cwd=ROOT, check=True, capture_output=True)


def turn(tree: Path, names: list[str], numel: int, repeats: int) -> Turn:
    command = [sys.executable, __file__, json.dumps({"names": names, "numel": numel, "repeats": repeats})]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tree)
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if Path(last["package"]).parent.parent != tree / "src":
        raise RuntimeError(f"measured {last['package']}, not the tree {tree}")
    codecs: Turn = last["codecs"]
    return codecs


def table(figures: dict[str, Any]) -> None:
    print(f"{'':18s}{'encode':>9s}{'with':>9s}{'ratio':>7s}{'decode':>9s}{'with':>9s}{'ratio':>7s}{'floor ms':>10s}")
    for name, r in figures["codecs"].items():
        encode = f"{r['encode_ms']:9.2f}{r['encode_with_ms']:9.2f}{r['encode_ratio']:7.2f}"
        decode = f"{r['decode_ms']:9.2f}{r['decode_with_ms']:9.2f}{r['decode_ratio']:7.2f}"
        print(f"{name:18s}{encode}{decode}{r['floor_ms']:10.2f}{'' if r['same_bytes'] else '  other bytes'}")


def main() -> None:
    import torch

    import gossamer
    from gossamer.run.allocator import keep_freed_memory

    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    x = torch.randn(asked["numel"], generator=torch.Generator().manual_seed(0))
    measured = [Measured(name, x) for name in asked["names"]]
    for one in measured:
        one.repeat()
        one.found = {part: [] for part in one.found}  # the first time costs more
    for _ in range(asked["repeats"]):
        for one in measured:
            one.repeat()
    print(json.dumps({"package": gossamer.__file__, "codecs": {one.name: one.figures() for one in measured}}))


class Measured:
    """One codec, and what its calls took: milliseconds of the thread's CPU time."""

    def __init__(self, name: str, x: Any) -> None:
        self.name, self.x = name, x
        self.one, self.key = built(CODECS[name])
        self.message = self.one.encode(x, self.key)
        self.moved = x.view(self.message.dtype)[: (4 * x.numel() + self.message.numel()) // 2]
        self.found: dict[str, list[float]] = {"encode_ms": [], "decode_ms": [], "floor_ms": []}

    def repeat(self) -> None:
        self.time("encode_ms", lambda: self.one.encode(self.x, self.key))
        self.time("decode_ms", lambda: self.one.decode(self.message, self.x.numel(), self.key))
        self.time("floor_ms", lambda: self.moved.clone())  # reads and writes as many bytes, without any arithmetic

    def time(self, part: str, work: Callable[[], Any]) -> None:
        began = time.thread_time()
        work()
        self.found[part].append(1e3 * (time.thread_time() - began))

    def figures(self) -> dict[str, Any]:
        decoded = self.one.decode(self.message, self.x.numel(), self.key)
        digest = sha256(self.message.numpy().tobytes() + decoded.numpy().tobytes()).hexdigest()
        return {"digest": digest, **{part: median(times) for part, times in self.found.items()}}


def built(written: Any) -> tuple[Any, Any]:
    """Build a codec and a key in the words of the gossamer that is imported."""
    try:
        from gossamer.comm.random_key import Key
        from gossamer.exchange import codec
    except ModuleNotFoundError:
        from gossamer.compress import codec

        return codec.build(renamed(written)), codec.Key(shared=1, own=2)
    return codec.build(written), Key(shared=1, own=2)


def renamed(written: Any) -> Any:
    if not isinstance(written, dict):
        return written
    return {OLDER.get(name, name): renamed(value) for name, value in written.items()}


if __name__ == "__main__":
    main()
