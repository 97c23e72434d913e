"""Both sides, one after the other: first one process, twice, while all others wait; then the layout, all together."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import dataclass, replace

import torch

from gossamer.loss import Objective
from gossamer.proof.company import Company, Word
from gossamer.proof.entries import Picked, fetched, told_of_entries
from gossamer.proof.judge import Entries, Sides, Verdict, first_of, judge
from gossamer.proof.layout import Divided
from gossamer.proof.patience import NotProved
from gossamer.proof.question import Question, uneven
from gossamer.proof.reference import Alone
from gossamer.proof.rows import Table
from gossamer.proof.tracks import Tracks, parting
from gossamer.spec.errors import Interrupted, PeerLost

_SHAKE = 3.0  # no power of two: other digits are rounded away


class Failed(NotProved):
    """What one process was asked, it cannot do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a proof took."""

    microbatches: int  # that the whole model computed
    builds: int  # of it
    alone_s: float  # these
    divided_s: float


def compared(
    company: Company,
    alone: Alone,
    layout: Divided,
    question: Question,
    objective: Objective,
) -> tuple[Verdict, Cost]:
    """All ranks call it, and come to the same verdict. Raises NotProved, PeerLost, Interrupted."""
    began = time.perf_counter()
    blank = Table.blank(alone.names, len(question.rounds), question.microbatches)
    harder = uneven(question, objective)
    try:
        answer, question = _answered(company, alone, harder, blank), harder
    except Failed:  # labels that count for nothing may be too strange for a model that looks at them
        answer = _answered(company, alone, question, blank)
    fewer = max(1, torch.get_num_threads() - 1)  # not more: others may compute on the same cores
    again = _answered(company, replace(alone, shake=_SHAKE, threads=fewer, joins=True), question, blank)
    turned = time.perf_counter()
    divided = [blank.like(row) for row in company.rows(layout.answer(question).flat())]
    company.pulse()
    sides = Sides(
        names=alone.names,
        alone=answer,
        again=again,
        divided=divided,
        exact=tuple(not one.is_coarse for one in question.rounds),
        own=len(question.rounds[0].pieces[question.replicas[0]]),
        kinds=len(set(company.texts(_kind()))),
    )
    done = company.rows(torch.tensor([alone.tally.microbatches, alone.tally.builds]))[company.speaker]
    cost = Cost(
        microbatches=int(done[0]),
        builds=int(done[1]),
        alone_s=turned - began,
        divided_s=time.perf_counter() - turned,
    )
    verdict = judge(sides)
    if not verdict.faults or verdict.unsteady:
        return verdict, cost
    return _looked_at(verdict, company, alone, layout, question), cost


def _looked_at(verdict: Verdict, company: Company, alone: Alone, layout: Divided, question: Question) -> Verdict:
    """Both sides once more, as far as the first faults: where their forwards part, and the first gradient that is
    another one, entry by entry.
    """
    fault = next((f for f in sorted(verdict.faults, key=lambda f: f.round) if f.what == "gradient"), None)
    last = max(first_of(verdict.faults).round, fault.round if fault is not None else 0)
    question = replace(question, rounds=question.rounds[: last + 1])
    blank = Table.blank(alone.names, len(question.rounds), question.microbatches)
    tracks, mine = Tracks(), Tracks()
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


def _entries(company: Company, alone: Picked | None, divided: Picked | None) -> Entries | None:
    if alone is None or divided is None:
        return None
    fault, said = alone.fault, ""
    shapes = company.texts(json.dumps([] if divided.tensor is None else divided.tensor.shape))
    shape = torch.Size(json.loads(shapes[fault.rank]))
    got = fetched(company.channel, divided.tensor, of=fault.rank, to=company.speaker, shape=shape)
    if got is not None and alone.tensor is not None:
        said = told_of_entries(got, alone.tensor.expand(shape), fault.limit)
    return Entries(fault=fault, said=company.text(said))


def _answered(company: Company, alone: Alone, question: Question, blank: Table) -> Table:
    """What one process says, on all ranks. Raises NotProved on all of them where it fails."""
    mine, why, is_final = blank, "", False
    if company.speaks:
        try:
            mine = alone.answer(question)
            is_done = company.pulse(Word.DONE) is Word.DONE
        except (Interrupted, PeerLost):
            raise
        except Exception as error:
            why, is_final = _why(error), isinstance(error, NotProved)
            is_done = company.pulse(Word.FAILED) is Word.DONE
    else:
        is_done = company.wait()
    if is_done:
        return blank.like(company.rows(mine.flat())[company.speaker])
    said, final = company.text(why), company.text("final" if is_final else "")
    raise NotProved(said) if final else Failed(said)


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
