"""One habit: its trials in one process and in stages, each compared with a loop of plain torch."""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loops.crew import alone, crew
from loops.rank import Outcome
from proof.habit import Habit
from proof.rank import knows_proof, left_behind, lengthen, run_ours, run_plain, settings, warned
from proof.scene import write_texts

ORDER = ("equal", "refused", "wrong", "crash", "hang")  # worst last
NOT_THE_MODEL = ("loss", "evaluation", "sample")
APART = "each replica keeps buffers or other state for itself"
FLOOR = 1e-5  # of the largest entry of all: what is smaller is rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    result: str
    where: str


def judge(habit: Habit, limit_s: float) -> dict[str, Any]:
    """One row of the record."""
    with tempfile.TemporaryDirectory(prefix="proof-") as folder:
        return _judged(habit, write_texts(Path(folder)) if habit.text else {}, limit_s)


def _judged(habit: Habit, data: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    began = time.monotonic()
    known = alone(partial(run_plain, habit, data), limit_s)
    if known.ending != "returned":
        raise ValueError(f"{habit.name} does not run in a loop of plain torch: {known.said}")
    if not bool(torch.isfinite(known.state["loss"]).all()):
        raise ValueError(f"{habit.name} has no finite loss in a loop of plain torch: {known.state['loss'].tolist()}")
    ranks = habit.stages * habit.replicas
    here = trial(habit, known, data, limit_s, 1, "") if habit.alone else Verdict(result="equal", where="")
    if habit.apart:
        known = alone(partial(run_plain, habit, data, habit.replicas), limit_s)
    on = partial(trial, habit, known, data, limit_s)
    staged = without = on(ranks, "auto" if knows_proof() else "")
    if knows_proof():
        without = on(ranks, "never")
    both = (("1 rank", here), (f"{ranks} ranks", staged), (f"{ranks} ranks, not proved", without))
    result = _worst(here, staged)
    return {
        "habit": habit.name,
        "page": habit.page,
        "wanted": habit.wanted,
        "hard": habit.hard,
        "late": habit.late,
        "result": result,
        "without_proof": _worst(here, without),
        "good": habit.is_good(result) and habit.is_good(_worst(here, without)),
        "where": "; ".join(f"{told}: {v.result}, {v.where}" for told, v in both[: 2 + knows_proof()] if v.where),
        "seconds": round(time.monotonic() - began, 1),
    }


def _worst(*verdicts: Verdict) -> str:
    return max((verdict.result for verdict in verdicts), key=ORDER.index)


def trial(habit: Habit, known: Outcome, data: Mapping[str, Any], limit_s: float, ranks: int, prove: str) -> Verdict:
    """Train on so many ranks, and compare."""
    with tempfile.TemporaryDirectory(prefix="proof-") as folder:
        told = settings(habit, data, ranks, prove, folder)
        outcomes: list[Outcome] = []
        if habit.stopped:
            cut_off = {**told, "train": {**told["train"], "steps": habit.stopped}}
            outcomes = crew(partial(run_ours, habit, cut_off, resume=False), ranks, "by_hand", limit_s)
            lengthen(folder)
        if all(one.ending == "returned" for one in outcomes):
            outcomes = crew(partial(run_ours, habit, told, resume=habit.stopped > 0), ranks, "by_hand", limit_s)
        found = verdict(habit, known, outcomes, left_behind(folder))
        if habit.apart and prove == "auto" and found.result == "equal" and APART not in warned(folder):
            return Verdict(result="wrong", where="replicas that part are not one process, and nobody said so")
        return found


def verdict(habit: Habit, known: Outcome, outcomes: Sequence[Outcome], found: Mapping[str, Tensor]) -> Verdict:
    for ending, result in (("hang", "hang"), ("crash", "crash"), ("rejected", "wrong"), ("refused", "refused")):
        said = list(dict.fromkeys(_last(one.said) for one in outcomes if one.ending == ending))
        if ending == "refused" and said:
            return _refused(habit, known, " / ".join(said)[:600], found)
        if said:
            return Verdict(result=result, where=" / ".join(said)[:600])
    if any(one.ending == "lost" for one in outcomes):
        return Verdict(result="crash", where=f"ranks lost each other: {outcomes[0].said[:300]}")
    if missing := sorted(known.state.keys() ^ found.keys()):
        return Verdict(result="wrong", where=f"there is {', '.join(missing[:4])} or not")
    worst, apart = difference(known.state, found)
    if apart <= habit.tolerance:
        return Verdict(result="equal", where=f"{apart:.0e}")
    return Verdict(result="wrong", where=_told(worst, apart, known.state, found))


def _refused(habit: Habit, known: Outcome, said: str, found: Mapping[str, Tensor]) -> Verdict:
    """A refusal names what it is about, and no step before it was another one than that of the plain loop."""
    made = found.get("loss", torch.zeros(0))
    apart = _relative(known.state["loss"][: len(made)], made, 0.0)
    if apart > habit.tolerance or math.isnan(apart):
        return Verdict(result="wrong", where=f"refused after {len(made)} steps, losses {apart:.1e} off: {said}")
    names = "|".join(map(re.escape, json.loads(known.notes)))
    keys = r"plan\.pipeline_schedule|plan\.activation_compression|mesh\.replica|replicas"
    if not re.search(rf"(?<![\w.])({names}|{keys})(?!\w)", said):
        return Verdict(result="wrong", where=f"a refusal that names nothing: {said}")
    return Verdict(result="refused", where=f"after {len(made)} steps: {said}" if len(made) else said)


def difference(known: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[str, float]:
    """The tensor that differs most, and by how much of its largest entry."""
    least = FLOOR * max(_size(value) for name, value in known.items() if name not in NOT_THE_MODEL)
    each = {name: _relative(value, found[name], least) for name, value in known.items()}
    return max(each.items(), key=lambda one: (math.isnan(one[1]), one[1]))


def _relative(a: Tensor, b: Tensor, least: float) -> float:
    """max|a - b| / max|a|; whatever is no number of a fraction is the same or not."""
    if a.shape != b.shape:
        return math.inf
    if torch.equal(a, b) or not a.numel():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return math.inf
    a, b = a.double(), b.double()
    return float((a - b).abs().max()) / (max(_size(a), least) or 1.0)


def _size(value: Tensor) -> float:
    return float(value.double().abs().max()) if value.numel() else 0.0


def _told(worst: str, apart: float, known: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    ours, theirs = ([round(x, 5) for x in held["loss"].tolist()] for held in (found, known))
    return f"{worst} {apart:.1e} off; losses {ours}, plain torch {theirs}"


def _last(said: str) -> str:
    """The last line of a traceback, with the innermost place in it."""
    if not said.startswith("Traceback"):
        return " ".join(said.split())
    places = re.findall(r'File "(.*)", line (\d+), in (\S+)', said)
    at = f" at {places[-1][0].rpartition('/')[2]}:{places[-1][1]} {places[-1][2]}" if places else ""
    return said.strip().splitlines()[-1] + at
