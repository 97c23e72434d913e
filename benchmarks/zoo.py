"""Every model type of transformers, tiny and with random weights, cut into stages: does each gradient equal that of one
process?

    python benchmarks/zoo.py [--classes causal,masked] [--types llama,vision/vit] [--stages 2,3] [--jobs 2] [--json]
                             [--through gloo|lockstep] [--schedules gpipe,one_f_one_b]
                             [--proofs fp32,bf16] [--found rows.jsonl]

Classes: causal (language models), masked (encoders), seq2seq, vision (image classification), ctc, audio
(classification), speech (to text). A type of a class other than causal is called class/type.

Through gloo each stage is a process, which trains 3 steps of 4 micro-batches, padded and unpadded, with each schedule,
on the command line's own way from a factory to a trainer: each builds its part; the reference is the same trainer with
one stage, in one process.
Stages are proved first (train.prove), in each precision of --proofs: a proof that fails is a type that fails.
Compared after every step: the loss, each gradient of each rank, the same where several hold a parameter, and the
bytes sent with those forecast; after the last step each parameter. Through lockstep all stages are in one process and
there is one backward: the quick look.

`passed` lists the types where all of that is so in fp32: bit for bit (`exact`), or, where several stages add up a
gradient in another order, to 1e-5 of its largest entry. `failed` says why the others are not. `partly`: of those that
passed, which used only a part of their parameters, and how much (a model of text and images is given text alone where
it runs so). `thin`: which have fewer than two blocks in some stage, and how many in each. `whole`: of which each rank
builds the whole model before it gives back what it does not hold, and why. `proofs`: in how many trials, by what the
proof said (equal | not proved); `not_proved`: why, of each. --limit: seconds for each number of stages, and for the
reference. --found: a file of results, a line each, of types that are not run again; what is found is added to it, with
its commit. `commits`: how many of the results are of which.
The record: zoo.json where causal is among the classes, zoo_others.json of all others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from result import commit, publish
from zoo.case import short
from zoo.check import check
from zoo.crew import Failed, check_through_gloo
from zoo.kinds import CLASSES, class_of, kinds_of

ALL = 0.95  # of the parameters; experts and positions beyond the batch have no gradient


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--classes", default=",".join(CLASSES))
    read.add_argument("--types", default="", help="these alone")
    read.add_argument("--stages", default="2,3")
    read.add_argument("--through", default="gloo", choices=("gloo", "lockstep"))
    read.add_argument("--schedules", default="gpipe,one_f_one_b", help="of the stages, through gloo")
    read.add_argument("--proofs", default="fp32,bf16", help="precisions, through gloo; '' for none")
    read.add_argument("--jobs", type=int, default=1)
    read.add_argument("--limit", type=float, default=120.0, help="seconds")
    read.add_argument("--found", type=Path, help="results of types that are not run again; those that are, are added")
    read.add_argument("--json", action="store_true", help="nothing but the last line")
    asked = read.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it all that was started
    kinds = asked.types.split(",") if asked.types else [k for c in asked.classes.split(",") for k in kinds_of(c)]
    stages = [int(n) for n in asked.stages.split(",")]
    found = {} if asked.found is None else known(asked.found, kinds)
    began, now = time.monotonic(), commit()
    checked = partial(check, stages=stages)
    if asked.through == "gloo":
        checked = partial(
            check_through_gloo,
            stages=stages,
            schedules=asked.schedules.split(","),
            proofs=[one for one in asked.proofs.split(",") if one],
            limit_s=asked.limit,
        )
    patience_s = asked.limit * (len(stages) + 2 if asked.through == "gloo" else 1)
    for kind, result in run([kind for kind in kinds if kind not in found], checked, asked.jobs, patience_s):
        found[kind] = {**result, "commit": now}
        if asked.found is not None:
            with asked.found.open("a") as lines:
                lines.write(json.dumps([kind, found[kind]]) + "\n")
        if not asked.json:
            print(f"{len(found)}/{len(kinds)} {kind}: {result}", file=sys.stderr, flush=True)
    figures = {
        "passed": sorted(k for k, r in found.items() if "failed" not in r),
        "failed": {k: r["failed"] for k, r in sorted(found.items()) if "failed" in r},
        "exact": sorted(k for k, r in found.items() if r.get("exact")),
        "partly": {k: r["reached"] for k, r in sorted(found.items()) if r.get("reached", 1) < ALL},
        "recipes": {k: r["recipe"] for k, r in sorted(found.items()) if "recipe" in r},
        "whole": {k: r["built"] for k, r in sorted(found.items()) if r.get("built")},
        "thin": {k: r["blocks"] for k, r in sorted(found.items()) if is_thin(r)},
        **proofs(found),
        "stages": stages,
        "through": asked.through,
        **({"schedules": asked.schedules.split(",")} if asked.through == "gloo" else {}),
        "counts": counts(found),
        "commits": dict(Counter(r["commit"] for r in found.values())),
        "seconds": round(time.monotonic() - began),
    }
    classes = set(asked.classes.split(","))
    if asked.types or asked.through != "gloo" or not ({"causal"} <= classes or classes == set(CLASSES) - {"causal"}):
        print(json.dumps(figures))
    else:
        publish("zoo" if "causal" in classes else "zoo_others", figures, script="zoo")


def known(file: Path, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """What the lines of the file say of these types; of one that is there twice, the last."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {kind: result for kind, result in map(json.loads, lines) if kind in kinds}


def is_thin(result: Mapping[str, Any]) -> bool:
    return any(min(blocks, default=0) < 2 for blocks in result.get("blocks", {}).values())


def proofs(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How often a proof said what, and of which it could not say more."""
    said = {
        f"{kind}, {where}": text for kind, r in sorted(found.items()) for where, text in r.get("proved", {}).items()
    }
    outcomes = Counter(text.partition(":")[0] for text in said.values())
    return {"proofs": dict(outcomes), "not_proved": {k: t for k, t in said.items() if not t.startswith("equal")}}


def counts(found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Class -> how many passed of how many."""
    said = {}
    for name in CLASSES:
        mine = [result for kind, result in found.items() if class_of(kind) == name]
        if mine:
            said[name] = f"{sum('failed' not in r for r in mine)} of {len(mine)}"
    return said


def run(kinds: list[str], checked: Callable[[str], dict[str, Any]], jobs: int, limit_s: float) -> Any:
    """(type, result) as they come, from forked processes: what is imported here is imported once."""
    import transformers
    import transformers.modeling_utils  # noqa: F401

    fork, waiting = multiprocessing.get_context("fork"), list(reversed(kinds))
    live: dict[Connection, tuple[str, Any, float]] = {}
    try:
        while waiting or live:
            while waiting and len(live) < jobs:
                kind = waiting.pop()
                ours, theirs = fork.Pipe(duplex=False)
                process = fork.Process(target=work, args=(kind, checked, theirs))
                process.start()
                theirs.close()
                live[ours] = (kind, process, time.monotonic() + limit_s)
            ready = wait(list(live), timeout=1.0)
            for pipe in list(live):
                kind, process, until = live[pipe]
                if pipe in ready or time.monotonic() > until:
                    yield kind, received(pipe) if pipe in ready else {"failed": f"took more than {limit_s:g} s"}
                    end(process)
                    pipe.close()
                    del live[pipe]
    finally:
        for _, process, _ in live.values():
            end(process)


def end(process: Any) -> None:
    """It, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def received(pipe: Connection) -> dict[str, Any]:
    try:
        return dict(pipe.recv())
    except EOFError:
        return {"failed": "its process ended without a word"}


def work(kind: str, checked: Callable[[str], dict[str, Any]], pipe: Connection) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        pipe.send(checked(kind))
    except Failed as error:
        pipe.send({"failed": str(error)})
    except BaseException as error:
        pipe.send({"failed": short(error, 700)})


if __name__ == "__main__":
    main()
