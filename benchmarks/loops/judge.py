"""One habit: its trials on one, two and three ranks, each compared with one process of plain torch."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loops.crew import alone, as_launched, crew
from loops.habit import Habit
from loops.rank import Outcome, run

ORDER = ("equal", "alike", "refused", "wrong", "crash", "hang")  # worst last
NEAR = 0.5  # of the way that one process went: "alike"
STEPS = {torch.float64: 12, torch.float32: 3}
TOLERANCE_FP32 = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    result: str
    detail: str


def judge(habit: Habit, ranks: Sequence[int], types: Sequence[torch.dtype], limit_s: float) -> dict[str, Any]:
    """One row of the record: float64 on each number of ranks, float32 on two, where float64 is equal there."""
    began = time.monotonic()
    as_launched(habit.launcher)
    import gossamer

    assert gossamer.wrap  # with all that it imports: it is there in the processes of all trials
    found: list[tuple[str, Verdict]] = []
    known = _reference(habit, torch.float64, limit_s)
    for count in ranks:
        found.append(
            (f"{count} {'rank' if count == 1 else 'ranks'}", _trial(habit, count, torch.float64, known, limit_s))
        )
    is_wanted = torch.float32 in types and habit.fp32 and habit.must != "alike"
    if is_wanted and 2 in ranks and dict(found)["2 ranks"].result == "equal":
        known = _reference(habit, torch.float32, limit_s)
        found.append(("2 ranks, fp32", _trial(habit, 2, torch.float32, known, limit_s)))
    result = max((verdict.result for _, verdict in found), key=ORDER.index)
    return {
        "habit": habit.name,
        "page": habit.page,
        "wanted": habit.wanted,
        "result": result,
        "good": habit.is_good(result),
        "detail": "; ".join(f"{where}: {verdict.result}, {verdict.detail}" for where, verdict in found),
        "seconds": round(time.monotonic() - began, 1),
    }


def _reference(habit: Habit, dtype: torch.dtype, limit_s: float) -> Outcome:
    known = alone(partial(run, habit, dtype, STEPS[dtype], is_plain=True), limit_s)
    if known.ending != "returned":
        raise ValueError(f"{habit.name} does not run in one process of plain torch: {known.said}")
    if dtype == torch.float64 and len(known.history) - 1 < habit.steps:
        raise ValueError(f"{habit.name}: wanted {habit.steps} optimizer steps, got {len(known.history) - 1}")
    return known


def _trial(habit: Habit, ranks: int, dtype: torch.dtype, known: Outcome, limit_s: float) -> Verdict:
    job = partial(run, habit, dtype, STEPS[dtype], is_plain=False)
    outcomes = crew(job, ranks, habit.launcher, limit_s)
    tolerance = TOLERANCE_FP32 if dtype == torch.float32 else habit.tolerance
    for ending in ("hang", "crash"):
        said = {rank: _last(one.said) for rank, one in enumerate(outcomes) if one.ending == ending}
        if said:
            return Verdict(result=ending, detail=_by_rank(said, ranks))
    if any(one.ending == "refused" for one in outcomes):
        return _refused(habit, outcomes, known, tolerance)
    if parted := _difference(outcomes[0].state, outcomes[1:], exactly=True):
        return Verdict(result="wrong", detail=f"ranks part: {parted}")
    if habit.must == "alike":
        return _alike(habit.says if ranks > 1 else "", outcomes[0], known)
    if found := _difference(known.state, outcomes[:1], tolerance=tolerance):
        return Verdict(result="wrong", detail=found)
    return Verdict(result="equal", detail=f"{_distance(known.state, outcomes[0].state):.0e}")


def _refused(habit: Habit, outcomes: Sequence[Outcome], known: Outcome, tolerance: float) -> Verdict:
    """Right where no rank has taken a step that one process would not have taken."""
    said = {rank: one.said for rank, one in enumerate(outcomes) if one.ending == "refused"}
    detail = _by_rank(said, len(outcomes))
    if habit.says and not any(re.search(habit.says, one) for one in said.values()):
        return Verdict(result="wrong", detail=f"a refusal that does not name {habit.says}: {detail}")
    refusing = [outcomes[rank] for rank in said]
    if any(one.moved for one in refusing):
        if _difference(refusing[0].state, refusing[1:], exactly=True):
            return Verdict(result="wrong", detail=f"refused when the ranks had parted: {detail}")
        if all(_difference(was, refusing[:1], tolerance=tolerance) for was in known.history):
            return Verdict(result="wrong", detail=f"refused after a step that one process does not take: {detail}")
    return Verdict(result="refused", detail=detail)


def _alike(says: str, found: Outcome, known: Outcome) -> Verdict:
    """Near the end that one process came to, and said where `says` wants that."""
    names = [name for name, value in known.state.items() if value.is_floating_point()]
    way = math.sqrt(sum(_squared(known.history[-1][n] - known.history[0][n]) for n in known.history[0]))
    apart = math.sqrt(sum(_squared(found.state[n] - known.state[n]) for n in names))
    assert way > 0
    if not apart < NEAR * way:
        return Verdict(result="wrong", detail=f"{apart / way:.2f} of the way that one process went away from it")
    if says and not re.search(says, found.notes):
        return Verdict(result="wrong", detail=f"no warning that names {says}: {found.notes[-200:]!r}")
    return Verdict(result="alike", detail=f"{apart / way:.1e} of the way that one process went")


def _squared(value: Tensor) -> float:
    return float(value.double().square().sum())


def _difference(
    known: Mapping[str, Tensor], others: Sequence[Outcome], *, tolerance: float = 0.0, exactly: bool = False
) -> str:
    """What differs most, in words; "" where nothing does."""
    for other in others:
        if other.state.keys() != known.keys():
            return f"it has {sorted(other.state.keys() ^ known.keys())[:4]} or not"
        worst = max(known, key=lambda name: _relative(known[name], other.state[name]), default="")
        if not worst:
            return "nothing was returned"
        apart = _relative(known[worst], other.state[worst])
        if apart > tolerance or math.isnan(apart) or (exactly and apart > 0):
            return f"{worst.rstrip('.')} by {apart:.1e}"
    return ""


def _distance(known: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max((_relative(known[name], other[name]) for name in known), default=0.0)


def _relative(a: Tensor, b: Tensor) -> float:
    """max|a - b| / max|a|; whatever is no number of a fraction is the same or not."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if torch.equal(a, b) or not a.numel():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return math.inf
    a, b = (x.to_dense() if x.is_sparse else x for x in (a, b))
    apart, size = float((a - b).abs().max()), float(a.abs().max())
    return math.inf if math.isnan(apart) else apart / (size or 1.0)


def _by_rank(said: Mapping[int, str], ranks: int) -> str:
    """What the ranks said, the same words once."""
    words: dict[str, list[int]] = {}
    for rank, text in said.items():
        words.setdefault(" ".join(text.split())[:500], []).append(rank)
    return " / ".join(f"{text} [rank {', '.join(map(str, where))} of {ranks}]" for text, where in words.items())


def _last(said: str) -> str:
    """The last line of a traceback, with the innermost place in it."""
    lines = said.strip().splitlines()
    places = re.findall(r'File "(.*)", line (\d+), in (\S+)', said)
    at = f" at {places[-1][0].rpartition('/')[2]}:{places[-1][1]} {places[-1][2]}" if places else ""
    return (lines[-1] if lines else "") + at
