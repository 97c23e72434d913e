"""`plan.savers: auto`: the savers with which a run fits its machines, where it does not without any.

All ranks decide alike, and so does `--dry-run`: from the forecast of the memory, the machines' totals, and what a
process usually takes. Where even a generous figure fits, the model is not run on shapes for it. First comes recompute
within the largest budget that the machines leave to activations, which changes no bit. Where that is not enough:
cut_cross_entropy, alone or beside it. It compares itself with the plain loss before step 1, and refuses the run where
the two differ. Savers that lose something are never chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.job.fit import Fit, Machine, ProcessBase
from gossamer.job.memory_forecast import MemoryForecast, RankMemory
from gossamer.job.rank_inputs import RankJob
from gossamer.partition.rank_model import Planned
from gossamer.run import resources
from gossamer.run.start_checks import check_agreement
from gossamer.run.trainer_services import Sink
from gossamer.spec import records
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.spec.units import show_gib

_MIB = 1 << 20
_ROUND = 64 * _MIB  # a budget from here on is written in whole MiB
_CUT = "cut_cross_entropy"


def is_open(planned: Planned) -> bool:
    """Return whether the savers of a run are still to be chosen."""
    plan = planned.plan
    return planned.asked.config.plan.savers == "auto" and not plan.savers and "savers" not in plan.reasons


def with_savers(job: RankJob, pump: CommThread, sink: Sink) -> RankJob:
    """Return the job with savers in place of `auto`; all ranks call it, and choose the same."""
    planned = job.planned
    if planned is None or not is_open(planned):
        return job
    job.at(0, "measure")
    rows = gathered(pump.channel, [job.where.host, resources.memory()[0]]).long().tolist()
    spans = [[rank for rank, (host, _) in enumerate(rows) if host == one] for one in sorted({host for host, _ in rows})]
    chosen = choose(planned, [(range(span[0], span[-1] + 1), min(rows[rank][1] for rank in span)) for span in spans])
    check_agreement(pump, {"savers": chosen.planned.plan.model_dump_json()})
    if chosen.message:
        sink(records.Event(level="info" if chosen.fits else "warning", message=chosen.message))
    plan = chosen.planned.plan
    return replace(job, planned=chosen.planned, parts=replace(job.parts, plan=plan))


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan whose savers are chosen. `message`: for the log, "" where nothing has to be said."""

    planned: Planned
    fits: bool = True
    message: str = ""


def choose(planned: Planned, machines: Sequence[tuple[range, int]]) -> Choice:
    """Return the run with the first savers with which it fits, if any, and the reason.

    `machines`: their ranks, and their bytes of memory; 0: not known.
    """
    if planned.asked.device.type != "cpu":
        return _without(planned, "the forecast counts the memory of machines, and this run trains on GPUs")
    try:
        rough = _beside(MemoryForecast.at_most(planned, local_ranks=planned.asked.local_ranks), machines)
        if rough.fits and not rough.forecast.unknown:
            return _without(planned, f"the run fits without: less than {_fullest(rough)}")
        plain = _fit(planned, machines)
    except Exception as error:  # of the user's data or module: the run meets it again, and says more about it then
        return _without(
            planned, f"the memory of the run is not known ({type(error).__name__}: {error})".splitlines()[0]
        )
    if plain.forecast.unknown:
        return _without(planned, f"the memory of the run is not known ({plain.forecast.unknown})")
    if plain.fits:
        return _without(planned, f"the run fits without: {_fullest(plain)}")
    tried = list[str]()
    for candidate in _candidates(planned, plain):
        try:
            made = candidate()
            found = _fit(made, machines)
        except BadInput as error:
            tried.append(error.message)
            continue
        if found.fits and not found.forecast.unknown:
            return _with(made, plain, found)
        tried.append(f"{_told(made)}: {_fullest(found)}")
    return _nothing(planned, plain, tried)


def _candidates(planned: Planned, plain: Fit) -> Iterator[Callable[[], Planned]]:
    budget = _budget(plain)
    recompute: Written = {"recompute": {"budget": f"{budget // _MIB}MiB" if budget >= _ROUND else f"{budget}B"}}
    wanted: list[tuple[Written, ...]] = [(_CUT,)]
    if budget > 0:
        wanted = [(recompute,), (_CUT,), (recompute, _CUT)]
    for savers in wanted:
        yield lambda savers=savers: planned.with_savers(savers)  # type: ignore[misc]


def _budget(plain: Fit) -> int:
    """Return the most bytes of activations that every rank may have so that all machines fit; below 1: none fits."""
    return min(_budget_on(plain, machine) for machine in plain.machines if machine.total)


def _budget_on(plain: Fit, machine: Machine) -> int:
    """Return the same for one machine: by bisection, as a rank takes no more than it does without savers."""
    ranks = [plain.forecast.ranks[rank] for rank in machine.ranks]
    fixed = plain.needed(machine) - sum(one.activations + one.allocator for one in ranks)
    low, high = 0, max(one.activations for one in ranks) + 1
    while high - low > 1:
        middle = (low + high) // 2
        within = fixed + sum(_at_most(one, middle) for one in ranks) <= machine.total
        low, high = (middle, high) if within else (low, middle)
    return low


def _at_most(one: RankMemory, budget: int) -> int:
    """Return the bytes of activations of `budget` at most, with what the heap loses beside them."""
    lost = one.allocator / one.activations if one.activations else 0.0
    return round(min(one.activations, budget) * (1.0 + lost))


def _fit(planned: Planned, machines: Sequence[tuple[range, int]]) -> Fit:
    return _beside(MemoryForecast.of(planned, local_ranks=planned.asked.local_ranks), machines)


def _beside(forecast: MemoryForecast, machines: Sequence[tuple[range, int]]) -> Fit:
    return Fit(
        forecast=forecast,
        base=ProcessBase.usual(),
        machines=tuple(Machine(name="a machine", ranks=span, total=total, free=total) for span, total in machines),
    )


def _without(planned: Planned, why: str) -> Choice:
    return Choice(_because(planned, f"none: {why}"))


def _with(made: Planned, plain: Fit, found: Fit) -> Choice:
    parts = [f"{_told(made)}: the run needs {_fullest(plain)} without, and {_fullest(found)} with it"]
    if "savers" in made.plan.reasons:
        parts.append(made.plan.reasons["savers"])
    if any(MethodConfig.parse(one).name == _CUT for one in made.plan.savers):
        parts.append(f"{_CUT} computes the loss without the logits, in about the time of the plain one")
    why = "; ".join(parts)
    return Choice(_because(made, why), message=f"savers: {why}")


def _nothing(planned: Planned, plain: Fit, tried: Sequence[str]) -> Choice:
    least = f" ({'; '.join(tried)})" if tried else ""
    why = f"none: no exact saver makes the run fit: {_fullest(plain)}{least}"
    return Choice(_because(planned, why), fits=False, message=f"savers: {why}; `--dry-run` says what to change")


def _because(planned: Planned, why: str) -> Planned:
    return planned.with_plan(planned.plan.model_copy(update={"reasons": {**planned.plan.reasons, "savers": why}}))


def _told(made: Planned) -> str:
    return " and ".join(MethodConfig.parse(one).name for one in made.plan.savers)


def _fullest(fit: Fit) -> str:
    """Return what the machine needs that lacks most, beside what it has."""
    known = [one for one in fit.machines if one.total]
    if not known:
        return "how much memory there is is not known"
    worst = max(known, key=lambda one: fit.needed(one) - one.total)
    return f"{show_gib(fit.needed(worst))} of {show_gib(worst.total)}"
