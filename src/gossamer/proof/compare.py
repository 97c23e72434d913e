"""Both sides, one after the other: first one process, twice, while all others wait; then the layout, all together."""

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

_SHAKE = 3.0  # no power of two: other digits are rounded away


class ProofError(NotProved):
    """What one process was asked, it cannot do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofCost:
    """What a proof took."""

    microbatches: int  # that the whole model computed
    builds: int  # of it
    alone_s: float  # these
    divided_s: float


def compared(
    company: Keepalive,
    alone: OneProcess,
    layout: DividedSide,
    question: TrialSet,
    objective: Loss,
) -> tuple[ProofVerdict, ProofCost]:
    """All ranks call it, and come to the same verdict. Raises NotProved, PeerLost, Interrupted."""
    began = time.perf_counter()
    blank = FingerprintTable.blank(alone.names, len(question.rounds), question.microbatches)
    harder = uneven(question, objective)
    try:
        answer, question = _answered(company, alone, harder, blank), harder
    except ProofError:  # labels that count for nothing may be too strange for a model that looks at them
        answer = _answered(company, alone, question, blank)
    fewer = max(1, torch.get_num_threads() - 1)  # not more: others may compute on the same cores
    again = _answered(company, replace(alone, shake=_SHAKE, threads=fewer, joins=True), question, blank)
    turned = time.perf_counter()
    divided = [blank.like(row) for row in company.rows(layout.answer(question).flat())]
    company.pulse()
    sides = BothTables(
        names=alone.names,
        alone=answer,
        again=again,
        divided=divided,
        exact=tuple(not one.is_coarse for one in question.rounds),
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
    """Both sides once more, as far as the first faults: where their forwards part, and the first gradient that is
    another one, entry by entry.
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
    exact = [not one.is_coarse for one in question.rounds]
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
    """What one process says, on all ranks. Raises NotProved on all of them where it fails."""
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
    """Of this rank's processor and versions, as far as rounding depends on them."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


def _why(error: Exception) -> str:
    if isinstance(error, NotProved):
        return str(error)
    said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "not enough memory" in said:
        return f"there is not enough memory for the whole model ({said})"
    return f"one process fails by itself ({said})"
