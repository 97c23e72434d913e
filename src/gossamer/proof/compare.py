"""The comparison run by all ranks: one rank computes the single-process tables twice while the others wait; then all
ranks run the parallel layout.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import dataclass, replace

import torch

from gossamer.loss import Loss
from gossamer.proof.divided import DividedSide
from gossamer.proof.entries import Picked, fetched, told_of_entries
from gossamer.proof.fingerprints import FingerprintTable
from gossamer.proof.keepalive import Keepalive, KeepaliveMessage
from gossamer.proof.one_process import OneProcess
from gossamer.proof.tensor_log import TensorLog, parting
from gossamer.proof.time_limit import NotProved
from gossamer.proof.trials import TrialSet, uneven
from gossamer.proof.verdict import BothTables, EntryDifference, ProofVerdict, first_of, judge
from gossamer.spec.errors import Interrupted, PeerLost

_SHAKE = 3.0  # not a power of two, so that rounding differs


class ProofError(NotProved):
    """The model raised an error in the single-process forward or backward of a proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofCost:
    """The cost of a proof: micro-batches and builds of the unsharded model, and the seconds of each side."""

    microbatches: int  # computed by the unsharded model
    builds: int  # of the unsharded model
    alone_s: float  # of one process: builds and micro-batches
    divided_s: float


def compared(
    company: Keepalive,
    alone: OneProcess,
    layout: DividedSide,
    question: TrialSet,
    objective: Loss,
) -> tuple[ProofVerdict, ProofCost]:
    """Compare both sides and return the same verdict, and its cost, on every rank. All ranks must call it.

    The trials have uneven label counts (`uneven`); if those fail in one process, `question` is asked as it is. After a
    fault both sides run once more, so that the verdict names the first forward value and gradient that differ. Raises
    NotProved, PeerLost, Interrupted.
    """
    began = time.perf_counter()
    blank = FingerprintTable.blank(alone.names, len(question.rounds), question.microbatches)
    harder = uneven(question, objective)
    try:
        answer, question = _answered(company, alone, harder, blank), harder
    except ProofError:  # a model that reads labels may not accept ignored ones
        answer = _answered(company, alone, question, blank)
    fewer = max(1, torch.get_num_threads() - 1)  # fewer, not more: other processes may share the cores
    again = _answered(company, replace(alone, shake=_SHAKE, threads=fewer, joins=True), question, blank)
    turned = time.perf_counter()
    divided = [blank.like(row) for row in company.rows(layout.answer(question).flat())]
    company.pulse()
    sides = BothTables(
        names=alone.names,
        alone=answer,
        again=again,
        divided=divided,
        exact=tuple(not one.is_half_precision for one in question.rounds),
        own=len(question.rounds[0].pieces[question.replicas[0]]),
        kinds=len(set(company.texts(_kind()))),
    )
    done = company.rows(torch.tensor([alone.tally.microbatches, alone.tally.builds]))[company.speaker]
    cost = ProofCost(
        microbatches=int(done[0]),
        builds=int(done[1]),
        alone_s=turned - began,
        divided_s=time.perf_counter() - turned,
    )
    verdict = judge(sides)
    if not verdict.faults or verdict.unsteady:
        return verdict, cost
    return _looked_at(verdict, company, alone, layout, question), cost


def _looked_at(
    verdict: ProofVerdict, company: Keepalive, alone: OneProcess, layout: DividedSide, question: TrialSet
) -> ProofVerdict:
    """Run both sides again, up to the round of the first faults, to locate the difference.

    Returns the verdict with the first forward value that differs, and the entries of the first gradient that differs.
    """
    fault = next((f for f in sorted(verdict.faults, key=lambda f: f.round) if f.what == "gradient"), None)
    last = max(first_of(verdict.faults).round, fault.round if fault is not None else 0)
    question = replace(question, rounds=question.rounds[: last + 1])
    blank = FingerprintTable.blank(alone.names, len(question.rounds), question.microbatches)
    tracks, mine = TensorLog(), TensorLog()
    one, other = (Picked(fault), Picked(fault)) if fault is not None else (None, None)
    try:
        _answered(company, replace(alone, tracks=tracks, picked=one), question, blank)
    except NotProved:
        return verdict
    told = json.loads(company.texts(json.dumps(tracks.found))[company.speaker])
    replace(layout, tracks=mine, picked=other).answer(question)
    all_of_it = [json.loads(text) for text in company.texts(json.dumps(mine.found))]
    exact = [not one.is_half_precision for one in question.rounds]
    return replace(verdict, parting=parting(told, all_of_it, exact), entries=_entries(company, one, other))


def _entries(company: Keepalive, alone: Picked | None, divided: Picked | None) -> EntryDifference | None:
    if alone is None or divided is None:
        return None
    fault, said = alone.fault, ""
    shapes = company.texts(json.dumps([] if divided.tensor is None else divided.tensor.shape))
    shape = torch.Size(json.loads(shapes[fault.rank]))
    got = fetched(company.channel, divided.tensor, of=fault.rank, to=company.speaker, shape=shape)
    if got is not None and alone.tensor is not None:
        said = told_of_entries(got, alone.tensor.expand(shape), fault.limit)
    return EntryDifference(fault=fault, said=company.text(said))


def _answered(company: Keepalive, alone: OneProcess, question: TrialSet, blank: FingerprintTable) -> FingerprintTable:
    """Return one process's table of fingerprints on all ranks; `company.speaker` computes it.

    Raises NotProved on all ranks if the run fails on that rank.
    """
    mine, why, is_final = blank, "", False
    if company.speaks:
        try:
            mine = alone.answer(question)
            is_done = company.pulse(KeepaliveMessage.DONE) is KeepaliveMessage.DONE
        except (Interrupted, PeerLost):
            raise
        except Exception as error:
            why, is_final = _why(error), isinstance(error, NotProved)
            is_done = company.pulse(KeepaliveMessage.FAILED) is KeepaliveMessage.DONE
    else:
        is_done = company.wait()
    if is_done:
        return blank.like(company.rows(mine.flat())[company.speaker])
    said, final = company.text(why), company.text("final" if is_final else "")
    raise NotProved(said) if final else ProofError(said)


def _kind() -> str:
    """Return this rank's processor and torch version, as far as floating-point rounding depends on them."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


def _why(error: Exception) -> str:
    if isinstance(error, NotProved):
        return str(error)
    said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "not enough memory" in said:
        return f"there is not enough memory for the whole model ({said})"
    return f"the model fails in one process ({said})"
