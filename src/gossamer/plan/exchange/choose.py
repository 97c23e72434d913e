"""Choose the buckets of a step and the exchange of each: the shortest step, then the smallest compression error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gossamer.plan.exchange.calibration import Calibration
from gossamer.plan.exchange.candidates import CANDIDATES, Candidate
from gossamer.plan.exchange.measurements import Option, StepMeasurements
from gossamer.plan.exchange.send_order import job_of, unhidden_seconds
from gossamer.plan.exchange.step_search import SLACK, Mixture, SingleCandidates, each_alone, search
from gossamer.plan.exchange.step_tasks import cost_of_step, tasks_of_step, waited_for
from gossamer.spec.clock import play
from gossamer.spec.cost import Cost
from gossamer.spec.method_config import Exchanges
from gossamer.spec.row_range import whole_of
from gossamer.spec.units import show_bytes, show_seconds

WORTH = 0.05  # of a step: the least saving that is worth a word, or a change of how often ranks synchronize
_PRICE = 0.1  # of a step: the saving that compensates for deferring all of its gradient
_MILDER = 0.5  # of what is lost: the most that a change without a shorter step may still lose
_PERMISSION = "plan.lossy: true"
_WATCHED_BUCKETS = 64  # beyond, what the step waits for is found for so many runs of buckets


@dataclass(frozen=True)
class Decision:
    """The chosen buckets of a step and their exchanges, with the estimates behind the choice.

    `best`: the mixture that was chosen from `candidates`; `dense`: the best one with all-reduce alone. `also`: what the
    reason ends with. `permission`: what the user writes to permit lossy exchanges.
    """

    best: Mixture
    dense: Mixture
    candidates: Sequence[Candidate] = CANDIDATES
    also: str = ""
    permission: str = _PERMISSION

    @cached_property
    def forecast(self) -> Cost:
        """Return the estimate of a step."""
        return _cost(self.best)

    @cached_property
    def plain(self) -> Cost:
        """Return the estimate of a step with all-reduce."""
        return _cost(self.dense)

    @property
    def written(self) -> Exchanges:
        """Return the value for plan.exchange."""
        return _written(self.best, self.candidates)

    @property
    def reason(self) -> str:
        """Return one line for the user."""
        return _said(self.best, self.forecast, self.plain, self.candidates) + self.also

    @property
    def summary(self) -> str:
        """Return the exchanges by name, with their parts of the gradients."""
        return _summary(self.best, self.candidates)

    @property
    def cut(self) -> str:
        """Return the number of buckets, to follow the exchanges."""
        return _cut(self.best)

    def corrected(self, by: Calibration) -> Decision:
        """Return the same choice, with its estimates from corrected measurements."""
        best, dense = (one.on(by.applied(one.facts)) for one in (self.best, self.dense))
        return replace(self, best=best, dense=dense)

    def advised(self, *cuts: StepMeasurements, singles: SingleCandidates | None = None) -> Decision:
        """Return the same choice, whose reason says what lossy exchanges would save, where that is much.

        `singles`: what a search on the same cuts has made already.
        """
        enough_s = self.best.step_s * (1 - WORTH)
        if all(one.compute_s >= enough_s for one in cuts):  # no step is shorter than what it computes
            return replace(self, also="")
        other, also = search(cuts, range(len(self.candidates)), singles or SingleCandidates()), ""
        if other.step_s < enough_s:
            also = (
                f"; {self.permission} would take {_summary(other, self.candidates)} "
                f"({show_bytes(_cost(other).sent_bytes[0])}) and save "
                f"{show_seconds(self.best.step_s - other.step_s)} more a step"
            )
        return replace(self, also=also)

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the parameters in each bucket."""
        return tuple(bucket.names for bucket in self.best.facts.buckets)

    @property
    def turns(self) -> tuple[int, ...]:
        """Return the bucket of each turn of the communication thread, in order."""
        return self.best.schedule.turns

    @property
    def dearer(self) -> float:
        """Return the fraction of a step that the compression error is taken to cost."""
        return _PRICE * self.best.lost

    def replaces(self, now: Mixture) -> bool:
        """Return whether this choice is worth a change from the mixture `now`, timed with the same measurements.

        It is if steps become shorter by more than 5%, or stay about as long and lose less than half as much.
        """
        if self.best.step_s < (1 - WORTH) * now.step_s:
            return True
        return self.best.step_s <= (1 + SLACK) * now.step_s and self.best.lost < _MILDER * now.lost

    def waited(self) -> dict[str, float]:
        """Return by parameter the part of its exchange's time on the wire that the step waits for.

        Of a divided parameter it is the mean of its parts, by their rows.
        """
        buckets, options = self.best.facts.buckets, _options(self.best)
        each = -(-len(buckets) // _WATCHED_BUCKETS) or 1
        runs = [range(at, min(at + each, len(buckets))) for at in range(0, len(buckets), each)]
        parts = waited_for(self.best.facts, options, runs)
        found, numels = dict[str, float](), dict[str, int]()
        for run, part in zip(runs, parts, strict=True):
            for bucket in (buckets[place] for place in run):
                for name in map(whole_of, bucket.names):  # a part has its bucket to itself
                    found[name] = found.get(name, 0.0) + part * bucket.numel
                    numels[name] = numels.get(name, 0) + bucket.numel
        return {name: total / max(1, numels[name]) for name, total in found.items()}


def choose(
    facts: StepMeasurements,
    *others: StepMeasurements,
    lossy: bool,
    candidates: Sequence[Candidate] = CANDIDATES,
    permission: str = _PERMISSION,
) -> Decision:
    """Choose the buckets and the exchange of each.

    `others`: the same gradients in buckets of other sizes. `lossy` false allows only exact exchanges or bf16; the
    reason then says what lossy exchanges would save, and that the user permits them by writing `permission`.
    """
    cuts, singles = (facts, *others), SingleCandidates()
    plain = _plain(cuts, singles)
    best = search(cuts, [c for c, one in enumerate(candidates) if c == 0 or one.lossy <= lossy], singles)
    decision = Decision(best, plain, candidates, permission=permission)
    return decision if lossy else decision.advised(*cuts, singles=singles)


def choose_uniform(
    facts: StepMeasurements,
    *others: StepMeasurements,
    lossy: bool,
    within: float,
    candidates: Sequence[Candidate] = CANDIDATES,
) -> list[Decision]:
    """Choose the buckets for one exchange for all of them, as far as it can serve them; return the shortest step first,
    and then the others that take up to the fraction `within` longer.
    """
    cuts, singles = (facts, *others), SingleCandidates()
    usable = [c for c, one in enumerate(candidates) if c == 0 or one.lossy <= lossy]
    found, plain = each_alone(cuts, usable, singles, within=within), _plain(cuts, singles)
    return [Decision(one, plain, candidates) for one in found]


def _plain(cuts: Sequence[StepMeasurements], singles: SingleCandidates) -> Mixture:
    """Return the shortest step with the first candidate alone."""
    return min((singles.of(one, (0,)) for one in cuts), key=lambda one: one.step_s)


def _cost(mixture: Mixture) -> Cost:
    facts, tasks = mixture.facts, tasks_of_step(mixture.facts, _options(mixture), mixture.schedule)
    jobs = [job_of(b.ready_s, one) for b, one in zip(facts.buckets, _options(mixture), strict=True)]
    return cost_of_step(facts, play(tasks)).model_copy(update={"unhidden_s": unhidden_seconds(facts, jobs)})


def _options(mixture: Mixture) -> list[Option]:
    return [bucket.option(c) for bucket, c in zip(mixture.facts.buckets, mixture.picked, strict=True)]


def _written(mixture: Mixture, candidates: Sequence[Candidate]) -> Exchanges:
    """Return one exchange, or rules: patterns of names for all candidates but the most common, which gets the rest."""
    picked = mixture.picked
    kinds = sorted(set(picked), key=lambda c: sum(p == c for p in picked)) or [0]  # of no bucket: as they are
    if len(kinds) == 1:
        return candidates[kinds[0]].written
    rules = []
    for c in kinds[:-1]:
        names = [re.escape(n) for n in _names_of(mixture, c)]
        rules.append((f"^({'|'.join(names)})$", "all", candidates[c].written))
    return [*rules, (".*", "all", candidates[kinds[-1]].written)]


def _names_of(mixture: Mixture, c: int) -> list[str]:
    """Return the names in the buckets of candidate `c`: of parts that all are among them, that of their parameter."""
    served = dict[str, set[int]]()  # by parameter: the candidates of its parts
    each = [(name, p) for b, p in zip(mixture.facts.buckets, mixture.picked, strict=True) for name in b.names]
    for name, p in each:
        served.setdefault(whole_of(name), set()).add(p)
    return list(dict.fromkeys(whole_of(n) if served[whole_of(n)] == {c} else n for n, p in each if p == c))


def _said(best: Mixture, forecast: Cost, plain: Cost, candidates: Sequence[Candidate]) -> str:
    before, after = (show_bytes(line.sent_bytes[0]) for line in (plain, forecast))
    cut = _cut(best)
    if not any(best.picked):
        return (
            f"all-reduce{cut}, {after} a step: {show_seconds(forecast.exposed_s)} of "
            f"{show_seconds(forecast.step_s)} wait for the wire, nothing allowed saves more than it costs"
        )
    saved_s, exposed = plain.step_s - forecast.step_s, f"{show_seconds(plain.exposed_s)} exposed"
    if saved_s < 0:  # one that stays though links have drifted
        said = f"takes {show_seconds(-saved_s)} more than all-reduce with {exposed}"
    else:
        said = f"saves {show_seconds(saved_s)} of {exposed}"
    return f"{_summary(best, candidates)}{cut}: {before} -> {after}, {said}"


def _cut(mixture: Mixture) -> str:
    count = len(mixture.facts.buckets)
    return f" in {count} buckets" if count > 1 else " in one bucket"


def _share(part: float) -> str:
    """Return a part as a percentage that is neither none nor all of it, as neither is true of a mixture."""
    percent = round(100 * part)
    return "<1%" if percent < 1 else ">99%" if percent > 99 else f"{percent}%"


def _summary(mixture: Mixture, candidates: Sequence[Candidate]) -> str:
    picked, buckets = mixture.picked, mixture.facts.buckets
    share = {c: sum(b.numel for b, p in zip(buckets, picked, strict=True) if p == c) for c in set(picked)}
    if len(share) == 1:
        return candidates[next(iter(share))].said
    total = max(1, sum(share.values()))
    parts = sorted(share.items(), key=lambda item: -item[1])
    return " and ".join(f"{candidates[c].said} for {_share(n / total)}" for c, n in parts)
