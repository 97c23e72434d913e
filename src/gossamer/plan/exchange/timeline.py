"""The timeline of one step's exchange: buckets fill, are encoded, wait for the wire, and are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gossamer.plan.exchange.measurements import Option, StepMeasurements


@dataclass(frozen=True, slots=True)
class Timeline:
    """The estimate of one step: seconds in total, exposed, on the wire and of encoding, and bytes sent."""

    step_s: float
    exposed_s: float  # waited for after the backward pass
    wire_s: float
    cpu_s: float
    sent_bytes: int


def waited_for(facts: StepMeasurements, chosen: Sequence[Option]) -> tuple[float, ...]:
    """Return by bucket the exposed fraction of its time on the wire: what halving that time would save."""
    now, found = timeline(facts, chosen).step_s, []
    for b, option in enumerate(chosen):
        half = replace(option, wire_s=option.wire_s / 2)
        saved = now - timeline(facts, [*chosen[:b], half, *chosen[b + 1 :]]).step_s
        found.append(min(1.0, max(0.0, saved / half.wire_s)) if half.wire_s else 0.0)
    return tuple(found)


def timeline(facts: StepMeasurements, chosen: Sequence[Option]) -> Timeline:
    """Estimate a step with the chosen exchange of each bucket.

    One wire and one encoding thread serve buckets first come, first served, in the order in which backward fills them.
    Encoding slows the backward pass by `facts.stolen` of its time, which delays everything after it.
    """
    thread = wire = late = 0.0
    sent = []
    for bucket, option in zip(facts.buckets, chosen, strict=True):
        ready = bucket.ready_s + late
        encoded = max(ready, thread) + option.cpu_s / 2
        if ready < facts.backward_s + late:
            late += facts.stolen * option.cpu_s / 2
        thread = encoded
        wire = max(encoded, wire) + option.wire_s
        sent.append(wire)
    for arrived, option in zip(sent, chosen, strict=True):
        thread = max(arrived, thread) + option.cpu_s / 2
        if thread < facts.backward_s + late:
            late += facts.stolen * option.cpu_s / 2
    ends = facts.backward_s + late
    exposed = max(0.0, thread - ends)
    return Timeline(
        step_s=facts.compute_s + late + exposed,
        exposed_s=exposed,
        wire_s=sum(o.wire_s for o in chosen),
        cpu_s=sum(o.cpu_s for o in chosen),
        sent_bytes=sum(o.sent_bytes for o in chosen),
    )
