"""Correct the measurements of a step by what steps took: how much longer computing, encoding and messages took.

What a step waits longer than expected has two causes. Every message may be late: the other rank starts it later, or the
connection grows its window again after a pause. Or bytes take longer. A wait that late messages explain says nothing of
bytes: a step with few bytes would else make every exchange with many bytes look slow. Nor does what a rank computes
longer, however much it is: messages explain what a step waits beside computing and encoding as they were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gossamer.plan.exchange.measurements import Option, PricedMessage, StepMeasurements
from gossamer.plan.exchange.send_order import schedule
from gossamer.spec.units import show_seconds

_MOST = 8.0  # a factor beyond it, or below its inverse, says that something else has changed
_ENOUGH = 0.02  # of a step: how near the fitted step comes to the measured one
_LATE_S, _TRIPS = 0.02, 4  # how late a message may be: turns of busy processors, and so many latencies of a link
_HALVINGS = 10


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of a step: computing (with what it loses to encoding), waiting for messages, and encoding.

    Those of encoding are the ones in which its thread ran.
    """

    compute_s: float
    exposed_s: float
    encode_s: float

    @property
    def step_s(self) -> float:
        """Return the seconds of computing and of waiting."""
        return self.compute_s + self.exposed_s

    @staticmethod
    def of_ranks(rows: Sequence[Sequence[float]]) -> StepTimes:
        """Return the times of a step from those of each rank, (compute_s, exposed_s, encode_s).

        Computing and encoding are those of the rank that computes longest, for which others wait. The wait is that of
        the rank that waits least: others also wait for ranks that began the step late, as they read their rows longer.
        """
        compute_s, _, encode_s = max(tuple(row) for row in rows)
        return StepTimes(compute_s, min(exposed_s for _, exposed_s, _ in rows), encode_s)

    def show(self) -> str:
        """Return the times for the user."""
        return f"compute {show_seconds(self.compute_s)} and wait {show_seconds(self.exposed_s)}"

    @staticmethod
    def forecast(facts: StepMeasurements, picked: Sequence[int]) -> StepTimes:
        """Return what a step is expected to take with candidate `picked[b]` for bucket b."""
        chosen = _options(facts, picked)
        found = schedule(facts, chosen)
        compute_s = facts.compute_s + sum(found.slowed_s)
        return StepTimes(compute_s, max(0.0, found.step_s - compute_s), facts.ran * sum(one.cpu_s for one in chosen))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Factors by which computing, encoding and messages take longer than was measured before.

    `late_s`: seconds by which every message arrives later besides; below 0 earlier, as far as it has latency.
    """

    compute: float = 1.0
    encode: float = 1.0
    messages: float = 1.0
    late_s: float = 0.0

    @staticmethod
    def fit(facts: StepMeasurements, picked: Sequence[int], measured: StepTimes) -> Calibration:
        """Return the factors with which a step with candidate `picked[b]` for bucket b takes what was measured.

        Computing and encoding are measured by themselves. What is then left of the step's difference is put down to
        the messages: they are late by as little as the measured step allows, and what that cannot explain is a factor
        as near to 1 as the step allows. Hidden messages say nothing. No factor is beyond `_MOST`, but what the limit
        leaves out of computing and of encoding is nothing that messages take.
        """
        expected = StepTimes.forecast(facts, picked)
        encode = _ratio(measured.encode_s, expected.encode_s)
        encoded = Calibration(encode=encode).applied(facts)
        lost_s = sum(schedule(encoded, _options(encoded, picked)).slowed_s)
        compute = _ratio(measured.compute_s - lost_s, facts.compute_s)

        def step_s(messages: float, late_s: float) -> float:
            there = Calibration(compute, encode, messages, late_s).applied(facts)
            return schedule(there, _options(there, picked)).step_s

        sent = [one for option in _options(facts, picked) for one in option.messages]
        latest_s = _LATE_S + _TRIPS * max((one.latency_s for one in sent), default=0.0)
        earliest_s = max((one.latency_s * one.hops for one in sent), default=0.0)

        def late(part: float) -> float:
            return part * (latest_s if part > 0 else earliest_s)

        late_s = late(_nearest(lambda part: step_s(1.0, late(part)), measured.step_s))
        messages = _MOST ** _nearest(lambda power: step_s(_MOST**power, late_s), measured.step_s)
        return Calibration(_within(compute), _within(encode), messages, late_s)

    def then(self, other: Calibration) -> Calibration:
        """Return both after each other. The correction of messages is left out: links are measured anew."""
        return Calibration(self.compute * other.compute, self.encode * other.encode)

    def show(self) -> str:
        """Return the factors for the user."""
        late = f" and {show_seconds(abs(self.late_s))} {'later' if self.late_s > 0 else 'earlier'}"
        messages = f"messages x{self.messages:.2f}{late if self.late_s else ''}"
        return f"computing x{self.compute:.2f}, encoding x{self.encode:.2f}, {messages}"

    def applied(self, facts: StepMeasurements) -> StepMeasurements:
        """Return the measurements with every time longer by its factor."""
        buckets = tuple(
            replace(
                bucket,
                ready_s=bucket.ready_s * self.compute,
                options=tuple(one and self._applied(one) for one in bucket.options),
            )
            for bucket in facts.buckets
        )
        compute_s, backward_s = facts.compute_s * self.compute, facts.backward_s * self.compute
        return replace(facts, buckets=buckets, compute_s=compute_s, backward_s=backward_s)

    def _applied(self, one: Option) -> Option:
        turns_s = tuple(s * self.encode for s in one.turns_s)
        return replace(one, turns_s=turns_s, messages=tuple(self._sent(m) for m in one.messages))

    def _sent(self, one: PricedMessage) -> PricedMessage:
        """Return a message that takes longer by the factor, and is late; one that carries nothing is neither."""
        late_s = self.late_s / one.hops if one.busy_s else 0.0
        return replace(
            one, busy_s=one.busy_s * self.messages, latency_s=max(0.0, one.latency_s * self.messages + late_s)
        )


def _options(facts: StepMeasurements, picked: Sequence[int]) -> list[Option]:
    return [bucket.option(c) for bucket, c in zip(facts.buckets, picked, strict=True)]


def _ratio(measured: float, expected: float) -> float:
    """Return measured / expected; 1 where either is nothing."""
    return measured / expected if measured > 0 and expected > 0 else 1.0


def _within(factor: float) -> float:
    """Return the factor, at most `_MOST` and at least its inverse."""
    return min(_MOST, max(1 / _MOST, factor))


def _nearest(step_s: Callable[[float], float], wanted_s: float) -> float:
    """Return the argument of -1 to 1 nearest to 0 with which `step_s`, which grows with it, comes to `wanted_s`.

    Where none does, that with which it comes as near as the limit on that side: 0 where the argument changes nothing.
    """
    here = step_s(0.0)
    sign = 1 if here < wanted_s else -1
    limit_s = step_s(float(sign))
    wanted_s = min(wanted_s, limit_s) if sign > 0 else max(wanted_s, limit_s)
    if abs(here - wanted_s) <= _ENOUGH * wanted_s:
        return 0.0
    near, far = 0.0, 1.0  # not enough, and enough
    for _ in range(_HALVINGS):
        middle = (near + far) / 2
        found_s = step_s(sign * middle)
        enough = found_s >= wanted_s * (1 - _ENOUGH) if sign > 0 else found_s <= wanted_s * (1 + _ENOUGH)
        near, far = (near, middle) if enough else (middle, far)
    return sign * far
