"""Keep what a choice of exchanges is based on: a step's profile on the links, corrected by what steps have shown."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gossamer.autotune.exchange_profile import ExchangeProfile
from gossamer.autotune.rehearsal import Rehearsal
from gossamer.autotune.same_arithmetic import UNLIKE
from gossamer.plan.exchange import (
    Calibration,
    Candidate,
    Decision,
    MessagePrice,
    Mixture,
    StepMeasurements,
    choose,
    choose_uniform,
)
from gossamer.spec.cost import Cost
from gossamer.spec.method_config import told
from gossamer.spec.network import Network
from gossamer.spec.plan import Plan

_AS_MEASURED = Calibration()
_UNKNOWN = -1  # the number of what is no candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceBasis:
    """The measurements that a choice is based on.

    `facts`: those of a step with any of the `candidates` on the `links`, by size of buckets. `slowed`: by how much
    steps have shown that more is to be expected of computing and encoding; `messages`: the factor of the messages, on
    these links; the facts contain both. `lossy`: whether lossy exchanges are allowed. `price`: of messages; the facts
    contain it too. `is_alike`: whether ranks compute the same bits; else `candidates` are those that need not.
    """

    profile: ExchangeProfile
    rehearsal: Rehearsal
    links: Network
    candidates: tuple[Candidate, ...]
    facts: tuple[StepMeasurements, ...]
    slowed: Calibration
    lossy: bool
    price: MessagePrice
    is_alike: bool = True
    messages: float = 1.0

    @staticmethod
    def of(
        profile: ExchangeProfile,
        rehearsal: Rehearsal,
        links: Network,
        candidates: tuple[Candidate, ...],
        *,
        largest_bytes: int,
        price: MessagePrice,
        divides: bool,
        lossy: bool,
        is_alike: bool,
        before: ChoiceBasis | None,
    ) -> ChoiceBasis:
        """Return the measurements for these links, with the corrections of the basis `before`.

        `largest_bytes`: of a bucket; `price`: of messages; `divides`: whether large gradients may be divided. All ranks
        must call it together.
        """
        slowed = before.slowed if before else _AS_MEASURED
        facts = tuple(
            slowed.applied(one) for one in profile.facts(links, candidates, largest_bytes, price=price, divides=divides)
        )
        return ChoiceBasis(
            profile=profile,
            rehearsal=rehearsal,
            links=links,
            candidates=candidates,
            facts=facts,
            slowed=slowed,
            lossy=lossy and profile.knows,
            price=price,
            is_alike=is_alike,
        )

    def corrected(self, by: Calibration) -> ChoiceBasis:
        """Return the measurements with one more correction."""
        facts = tuple(by.applied(one) for one in self.facts)
        return replace(self, slowed=self.slowed.then(by), messages=self.messages * by.messages, facts=facts)

    def again(self, decision: Decision, before: Decision) -> Decision | None:
        """Return what `before` has chosen with the estimates of these measurements; None where they have none of it.

        `decision`: one that was made from these measurements, for what it says of all-reduce. The candidates may have
        other numbers here than there: among islands there are more of them.
        """
        cut = [one for one in self.facts if tuple(bucket.names for bucket in one.buckets) == before.buckets]
        numbers = {told(one.written): number for number, one in enumerate(self.candidates)}
        picked = tuple(numbers.get(told(before.candidates[c].written), _UNKNOWN) for c in before.best.picked)
        if not cut or _UNKNOWN in picked:
            return None
        if any(bucket.options[c] is None for bucket, c in zip(cut[0].buckets, picked, strict=True)):
            return None
        return replace(decision, best=Mixture.picked_on(cut[0], picked))

    def fastest(self) -> Decision:
        """Return the buckets of the shortest step with the exchange of each."""
        return choose(*self.facts, lossy=self.lossy, candidates=self.candidates)

    def uniform(self, within: float) -> list[Decision]:
        """Return the buckets of the shortest step with one exchange for all of them, and its rivals.

        `within`: of that step, how much longer theirs may be. The shortest comes first.
        """
        return choose_uniform(*self.facts, lossy=self.lossy, within=within, candidates=self.candidates)

    def told(self, decision: Decision) -> Decision:
        """Return the same choice, whose reason says what lossy exchanges would save where they are not allowed."""
        return decision if self.lossy else decision.advised(*self.facts)

    def planned(self, plan: Plan, decision: Decision, cost: Cost) -> Plan:
        """Return `plan` with the exchange of a decision, its reason and its forecast. `cost`: the bytes of a step."""
        link = self.links.levels.get("between", self.links.levels["all"])
        said = f"{decision.reason}{self._remark} (links: {link.show()}; {self.price.show()})"
        line = decision.forecast
        times = {name: getattr(line, name) for name in ("step_s", "compute_s", "wire_s", "exposed_s", "unhidden_s")}
        return plan.model_copy(
            update={
                "exchange": decision.written,
                "links": self.links.levels,
                "reasons": {**plan.reasons, "exchange": said},
                "forecast": cost.model_copy(update={"state_bytes": plan.forecast.state_bytes, **times}),
            }
        )

    @property
    def _remark(self) -> str:
        """Return a note on what is not known of the gradients, and on what is left out, to follow a reason."""
        said = self.rehearsal.remark + ("" if self.is_alike else UNLIKE)
        if idle := len(self.profile.idle):
            all_of_them = len(self.profile.params)
            said += f"; gradients of {idle} of {all_of_them} parameters are zero at first and count as the others"
        return said
