"""One type through real processes: a reference, then for each number of stages a crew of fresh processes over gloo.

What was imported, the model and its cuts are there before the processes are forked.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from gossamer.model.units import block_names
from zoo.case import Different, found, short, source_of
from zoo.trial import Trial, compare, cuts_of, refer

ENDING_S = 3.0  # that the others of a crew have to say why, when one has failed
LATER = ("PeerLost", "WireMismatch")  # what a rank says whose peer has failed


def check_through_gloo(
    kind: str, stages: Sequence[int], schedules: Sequence[str], proofs: Sequence[str], limit_s: float
) -> dict[str, Any]:
    """What was compared; raises what went wrong. `limit_s`: of the reference, and of every number of stages."""
    warnings.simplefilter("ignore")
    case = found(kind)
    source = source_of(case)
    cuts = cuts_of(case, source.outline(), stages)  # here: what a trace loads and learns of operators, all forks have
    blocks = block_names(source.outline())
    with tempfile.TemporaryDirectory() as folder:
        whole = Trial(case, (), tuple(schedules), Path(folder))
        (known,) = forked(partial(refer, whole, source), 1, limit_s, "the reference")
        exact, sent, least, proved = True, {}, {}, {}
        for count in stages:
            trial = Trial(case, cuts[count], tuple(schedules), Path(folder), tuple(proofs))
            answers = forked(partial(compare, trial, source), count, limit_s, f"{count} stages")
            _agree(answers, known["trained"], f"{count} stages")
            exact &= all(answer["exact"] for answer in answers)
            sent[count] = [answer["sent"] for answer in answers]
            proved |= {f"{count} stages, {one}": said for one, said in answers[0]["proved"].items()}
            least[count] = blocks_of(blocks, cuts[count])
    return {
        "recipe": case.recipe,
        "exact": exact,
        "reached": known["reached"],
        "shape": list(case.form.shape),
        "sent_bytes": sent,
        "blocks": least,
        "proved": proved,
        "built": source.construction().reason,
    }


def _agree(answers: Sequence[Mapping[str, Any]], trained: Sequence[str], where: str) -> None:
    """All that is trained was held by somebody, and who holds the same had the same gradient."""
    lost = set(trained) - {name for answer in answers for name in answer["held"]}
    if lost:
        raise Different(f"{where}: nobody held {sorted(lost)[0]}")
    first: dict[str, str] = {}
    for answer in answers:
        for name, digest in answer["digests"].items():
            if first.setdefault(name, digest) != digest:
                raise Different(f"{name} has another gradient on each stage that holds it")


def blocks_of(blocks: Sequence[str], cuts: Sequence[str]) -> list[int]:
    """Blocks of every stage, as far as stages begin with one; the order of blocks is that of their registration."""
    places = {name: place for place, name in enumerate(blocks)}
    starts = [0, *(places.get(cut.partition("@")[0], -1) for cut in cuts[1:]), len(blocks)]
    return [after - before for before, after in pairwise(starts)] if -1 not in starts else []


def forked(job: Callable[[int], dict[str, Any]], ranks: int, limit_s: float, what: str) -> list[dict[str, Any]]:
    """The answers of `job(rank)`, each in a process of its own. Raises what one of them did; none outlives the call."""
    fork, until = multiprocessing.get_context("fork"), time.monotonic() + limit_s
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = fork.Pipe(duplex=False)
        processes.append(fork.Process(target=_answer, args=(job, rank, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        answers = _gathered(pipes, until, what)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
    failed = [answer["failed"] for answer in answers if "failed" in answer]
    for said in sorted(failed, key=lambda said: said.startswith(LATER)):
        raise Failed(said)
    return answers


class Failed(Exception):
    """A process said so."""


def _gathered(pipes: Sequence[Connection], until: float, what: str) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(pipes):
        left = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
        ready = wait(list(left), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            hung = f"{what}: no end of rank {' and '.join(map(str, left.values()))} within the limit"
            return [*found.values(), {"failed": f"PeerLost: {hung}" if any(map(_is_bad, found.values())) else hung}]
        for pipe in ready:
            try:
                found[left[pipe]] = pipe.recv()
            except EOFError:
                found[left[pipe]] = {"failed": f"{what}: a process ended without a word"}
            if _is_bad(found[left[pipe]]):
                until = min(until, time.monotonic() + ENDING_S)
    return [found[rank] for rank in range(len(pipes))]


def _is_bad(answer: Mapping[str, Any]) -> bool:
    return "failed" in answer


def _answer(job: Callable[[int], dict[str, Any]], rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(job(rank))
    except BaseException as error:
        pipe.send({"failed": f"{short(error, 600)} [{_place(error)}]"})


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"
