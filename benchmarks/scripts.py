"""Training scripts that others wrote, under `gossamer.wrap` and under DistributedDataParallel.

    python benchmarks/scripts.py FOLDER [--scripts mnist,vae] [--rounds 7] [--ranks 2]
                                 [--no-times] [--no-differences] [--rows FILE] [--join FILE ...]

FOLDER holds snapshots of the repositories, as OWNER/NAME or NAME each; what lacks is said and left out. Nothing of them
is kept here: `scripts/others.py` has our own lines alone, and where they go. Data are made (nothing is downloaded), of
the same form. Of each script:

lines   that are new or changed, for wrap and for DDP
rel     max|a-b| / max|b|, the largest over parameters, after `steps` steps in float64 without dropout, against one
        process that runs the script as it is, with the whole batch; DDP beside it, on batches in order (its sampler
        draws another order); and whether the ranks hold the same bits
speed   seconds per step of DDP over those of wrap, above 1 where wrap is faster: the median of rounds in which four
        live processes take turns, two of DDP and two of wrap, one thread each, fp32. BatchNorm's statistics are each
        rank's own there, as DDP has them. `processor`: the same of the seconds that processors worked for all ranks,
        which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

import gossamer
from result import commit, publish
from scripts.edit import Edit, Lacking, instead, lines_changed
from scripts.one import Run, process
from scripts.others import SCRIPTS, Script

LIMIT_S = 300.0  # for one answer of one process
fork = multiprocessing.get_context("fork")
assert gossamer.wrap


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("folder", type=Path)
    read.add_argument("--scripts", default="", help="these alone")
    read.add_argument("--rounds", type=int, default=7)
    read.add_argument("--ranks", type=int, default=2)
    read.add_argument("--no-times", action="store_true")
    read.add_argument("--no-differences", action="store_true")
    read.add_argument("--rows", type=Path, help="write the rows there, and not to docs/results")
    read.add_argument("--join", type=Path, nargs="*", default=[], help="rows that were measured before")
    asked = read.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it all that was started
    names = [name for name in asked.scripts.split(",") if name]
    chosen = [one for one in SCRIPTS if not names or one.name in names]
    rows, left_out = [], {}
    for script in chosen:
        try:
            row = judged(script, asked)
        except Lacking as error:
            left_out[script.name] = str(error)
            print(f"{script.name}: {error}", file=sys.stderr)
            continue
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    if asked.rows is not None:
        asked.rows.write_text(json.dumps(rows, indent=1))
        return
    for file in asked.join:
        rows += json.loads(file.read_text())
    whole = [joined([row for row in rows if row["script"] == script.name]) for script in SCRIPTS]
    whole = [row for row in whole if row]
    speeds = [row["speed"]["median"] for row in whole if row.get("speed", {}).get("median")]
    figures = {
        "rows": whole,
        "left_out": left_out,
        "speed": {"geometric_mean": round(geometric_mean(speeds), 3), "least": min(speeds)} if speeds else None,
        "ranks": asked.ranks,
    }
    publish("scripts", figures)


def joined(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was measured of one script at several times; the first that says something."""
    whole: dict[str, Any] = {}
    for row in rows:
        whole = row | whole
    return whole


def judged(script: Script, asked: argparse.Namespace) -> dict[str, Any]:
    """Its row. Raises Lacking."""
    source = found(asked.folder, script)
    row: dict[str, Any] = {
        "script": script.name,
        "repository": script.repository,
        "file": script.file,
        "lines_wrap": changed(source, script, script.wrap),
        "lines_ddp": changed(source, script, script.ddp),
        "note": script.note,
        "commit": commit(),
    }
    with tempfile.TemporaryDirectory(prefix="scripts.") as name:
        scratch = Path(name)
        if not asked.no_differences:
            row |= differences(source, script, scratch, asked.ranks)
        if not asked.no_times and "error" not in row:
            row["speed"] = times(source, script, scratch, asked.ranks, asked.rounds)
    return row


def found(folder: Path, script: Script) -> Path:
    """The snapshot. Raises Lacking."""
    owner, name = script.repository.split("/")
    for place in (folder / owner / name, folder / f"{owner}+{name}", folder / name):
        if (place / script.file).exists():
            return place
    raise Lacking(f"{folder} has no {script.repository} with {script.file}")


def edited(source: Path, script: Script, edits: Sequence[Edit]) -> dict[str, str]:
    """The files that `edits` change, changed. Raises Lacking."""
    texts: dict[str, str] = {}
    for edit in edits:
        file = edit.file or script.file
        texts[file] = edit.of(texts[file] if file in texts else (source / file).read_text())
    return texts


def changed(source: Path, script: Script, edits: Sequence[Edit]) -> int:
    """Lines."""
    texts = edited(source, script, edits)
    return sum(lines_changed((source / file).read_text(), text) for file, text in texts.items())


def copied(source: Path, script: Script, edits: Sequence[Edit], place: Path) -> Path:
    """The script with changes, beside what it imports."""
    needs = source / (script.needs or Path(script.file).parent)
    for file in (*needs.rglob("*.py"), *needs.glob("*.txt")):
        to = place / file.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to)
    for name, text in edited(source, script, (*script.alike, *edits)).items():
        (place / name).write_text(text)
    return place


def differences(source: Path, script: Script, scratch: Path, ranks: int) -> dict[str, Any]:
    """Of parameters, in float64."""
    order, row = script.in_order, {"steps": script.steps}
    plain = ended(source, script, (), scratch, 0, in_order=order)
    wrap = ended(source, script, script.wrap, scratch, ranks, in_order=order)
    ordered = plain if order else ended(source, script, (), scratch, 0, in_order=True)
    ddp = ended(source, script, script.ddp, scratch, ranks, in_order=True)
    for name, told in (("plain", plain), ("wrap", wrap), ("plain in order", ordered), ("ddp", ddp)):
        if errors := [said for kind, said in told if kind == "error"]:
            row |= {"error": f"{name}: {errors[0]}"}
            return row
    row["rel_wrap"] = largest(wrap[0][1], plain[0][1])
    row["rel_ddp"] = largest(ddp[0][1], ordered[0][1]) if script.like_one else None
    row["ranks_equal"] = all(_same(wrap[0][1], other[1]) for other in wrap)
    row["moved"] = len(plain[0][1])
    return row


def largest(ours: Sequence[np.ndarray[Any, Any]], theirs: Sequence[np.ndarray[Any, Any]]) -> float:
    assert len(ours) == len(theirs)
    return float(
        f"{max(float(abs(a - b).max() / max(abs(b).max(), 1e-300)) for a, b in zip(ours, theirs, strict=True)):.2g}"
    )


def _same(a: Sequence[np.ndarray[Any, Any]], b: Sequence[np.ndarray[Any, Any]]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def ended(
    source: Path, script: Script, edits: Sequence[Edit], scratch: Path, ranks: int, *, in_order: bool
) -> list[tuple[str, Any]]:
    """What each process said, having made its steps."""
    run = Run(
        folder=Path(),
        file=script.file,
        arguments=script.arguments,
        steps=script.steps,
        chunk=0,
        is_double=True,
        in_order=in_order,
        variables={},
    )
    with crew(source, script, edits, scratch, ranks, run) as pipes:
        return [said(pipe) for pipe in pipes]


@contextmanager
def crew(
    source: Path, script: Script, edits: Sequence[Edit], scratch: Path, ranks: int, run: Run
) -> Iterator[list[Connection]]:
    """The processes of one run, each in a copy of its own; `ranks` 0: one that no launcher started."""
    port, pipes, processes = free(), [], []
    try:
        for rank in range(max(ranks, 1)):
            place = Path(tempfile.mkdtemp(dir=scratch))
            copied(source, script, edits, place)
            told = variables(rank, ranks, port) if ranks else {}
            ours, theirs = fork.Pipe()
            one = fork.Process(target=process, args=(replace(run, folder=place, variables=told), theirs))
            one.start()
            theirs.close()
            pipes.append(ours)
            processes.append(one)
        yield pipes
    finally:
        for one in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL) if os.getpgid(one.pid) == one.pid else one.kill()
            one.join()


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """As torchrun sets them."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def said(pipe: Connection) -> tuple[str, Any]:
    if not pipe.poll(LIMIT_S):
        return "error", f"no word within {LIMIT_S:g} s"
    try:
        kind, what = pipe.recv()
        return str(kind), what
    except EOFError:
        return "error", "it ended without a word"


def times(source: Path, script: Script, scratch: Path, ranks: int, rounds: int) -> dict[str, Any]:
    """DDP and wrap, whose processes live side by side and take turns."""
    ways = {"ddp": script.ddp, "wrap": alone(script)}
    run = Run(
        folder=Path(),
        file=script.file,
        arguments=script.arguments,
        steps=0,
        chunk=script.chunk,
        is_double=False,
        in_order=False,
        variables={},
    )
    took: dict[str, list[float]] = {name: [] for name in ways}
    worked: dict[str, list[float]] = {name: [] for name in ways}
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        crews = {
            name: stack.enter_context(crew(source, script, edits, scratch, ranks, run)) for name, edits in ways.items()
        }
        for name, pipes in crews.items():  # the first chunk is for warming up
            if errors := [what for kind, what in map(said, pipes) if kind == "error"]:
                return {"error": f"{name}: {errors[0]}", "median": None}
        for turn in range(rounds):
            for name in list(crews)[:: 1 if turn % 2 else -1]:
                for pipe in crews[name]:
                    pipe.send("go")
                told = [said(pipe) for pipe in crews[name]]
                if errors := [what for kind, what in told if kind == "error"]:
                    return {"error": f"{name}: {errors[0]}", "median": None}
                took[name].append(max(wall_s for _, (wall_s, _) in told))
                worked[name].append(sum(cpu_s for _, (_, cpu_s) in told))
    ratios = [a / b for a, b in zip(took["ddp"], took["wrap"], strict=True)]
    return {
        "median": round(median(ratios), 3),
        "rounds": [round(one, 3) for one in sorted(ratios)],
        "processor": round(median(a / b for a, b in zip(worked["ddp"], worked["wrap"], strict=True)), 3),
        "step_ms": {name: round(1e3 * median(many) / script.chunk, 2) for name, many in took.items()},
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
    }


def alone(script: Script) -> tuple[Edit, ...]:
    """Of wrap, with BatchNorm's statistics by rank: the same work as DDP's."""
    return (*script.wrap, instead(', batch_norm="all"', "")) if script.has_batch_norm else script.wrap


if __name__ == "__main__":
    main()
