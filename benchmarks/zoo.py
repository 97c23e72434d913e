"""Every model type of transformers, tiny and with random weights, cut into stages: does each gradient equal that of one
process?

    python benchmarks/zoo.py [--classes causal,masked] [--types llama,vision/vit] [--stages 2,3] [--jobs 2] [--json]

Classes: causal (language models), masked (encoders), seq2seq, vision (image classification), ctc, audio
(classification), speech (to text). A type of a class other than causal is called class/type.

Each type runs in a process of its own, for at most --limit seconds. `passed` lists the types whose loss and gradients
are those of the uncut model in fp32 with padded and unpadded batches: bit for bit, or, where several stages add up a
gradient in another order, to 1e-5 of its largest entry. `failed` says why the others are not. `partly`: of those that
passed, which used only a part of their parameters, and how much (a model of text and images is given text alone where
it runs so).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from result import publish
from zoo.case import short
from zoo.check import check
from zoo.kinds import CLASSES, kinds_of

ALL = 0.95  # of the parameters; experts and positions beyond the batch have no gradient


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--classes", default=",".join(CLASSES))
    read.add_argument("--types", default="", help="these alone")
    read.add_argument("--stages", default="2,3")
    read.add_argument("--jobs", type=int, default=1)
    read.add_argument("--limit", type=float, default=120.0, help="seconds per type")
    read.add_argument("--json", action="store_true", help="nothing but the last line")
    asked = read.parse_args()
    torch.set_num_threads(1)
    kinds = asked.types.split(",") if asked.types else [k for c in asked.classes.split(",") for k in kinds_of(c)]
    stages = [int(n) for n in asked.stages.split(",")]
    found: dict[str, dict[str, Any]] = {}
    for kind, result in run(kinds, stages, asked.jobs, asked.limit):
        found[kind] = result
        if not asked.json:
            print(f"{len(found)}/{len(kinds)} {kind}: {result}", file=sys.stderr, flush=True)
    figures = {
        "passed": sorted(k for k, r in found.items() if "failed" not in r),
        "failed": {k: r["failed"] for k, r in sorted(found.items()) if "failed" in r},
        "exact": sorted(k for k, r in found.items() if r.get("exact")),
        "partly": {k: r["reached"] for k, r in sorted(found.items()) if r.get("reached", 1) < ALL},
        "recipes": {k: r["recipe"] for k, r in sorted(found.items()) if "recipe" in r},
        "stages": stages,
    }
    if asked.types or asked.classes != ",".join(CLASSES):
        print(json.dumps(figures))
    else:
        publish("zoo", figures)


def run(kinds: list[str], stages: list[int], jobs: int, limit_s: float) -> Any:
    """(type, result) as they come, from forked processes: what is imported here is imported once."""
    import transformers
    import transformers.modeling_utils  # noqa: F401

    fork, waiting = multiprocessing.get_context("fork"), list(reversed(kinds))
    live: dict[Connection, tuple[str, Any, float]] = {}
    while waiting or live:
        while waiting and len(live) < jobs:
            kind = waiting.pop()
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=work, args=(kind, stages, theirs), daemon=True)
            process.start()
            theirs.close()
            live[ours] = (kind, process, time.monotonic() + limit_s)
        ready = wait(list(live), timeout=1.0)
        for pipe in list(live):
            kind, process, until = live[pipe]
            if pipe in ready or time.monotonic() > until:
                yield kind, received(pipe) if pipe in ready else {"failed": f"took more than {limit_s:g} s"}
                process.kill()
                process.join()
                pipe.close()
                del live[pipe]


def received(pipe: Connection) -> dict[str, Any]:
    try:
        return dict(pipe.recv())
    except EOFError:
        return {"failed": "its process ended without a word"}


def work(kind: str, stages: list[int], pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(check(kind, stages))
    except BaseException as error:
        pipe.send({"failed": short(error) if len(str(error)) < 160 else f"{type(error).__name__}: {error}"[:700]})


if __name__ == "__main__":
    main()
