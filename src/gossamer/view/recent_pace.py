"""The pace of a run over its recent steps: rates, bytes by link, exposed communication."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from gossamer.spec.cost import Cost
from gossamer.spec.records import Step
from gossamer.view.fraction import part_of

RECENT = 20  # steps that a rate is taken over
SMOOTH = 5  # steps that the loss is averaged over


@dataclass(frozen=True, slots=True)
class RecentPace:
    """The recent committed steps since the last start, and the figures over them; None where a figure is unknown."""

    _steps: deque[Step] = field(default_factory=lambda: deque(maxlen=RECENT))
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=5 * RECENT))

    def add(self, step: Step) -> None:
        """Take a committed step in."""
        self._steps.append(step)
        self._ends.append(step.time_s)

    @property
    def loss(self) -> float | None:
        """The mean loss of the last few steps in nats per token; single steps are noisy."""
        losses = [step.loss for step in list(self._steps)[-SMOOTH:] if math.isfinite(step.loss)]
        return sum(losses) / len(losses) if losses else None

    @property
    def step_s(self) -> float | None:
        """The median duration of a step in seconds."""
        return median(step.step_s for step in self._steps) if self._steps else None

    @property
    def tokens_per_s(self) -> float | None:
        """The throughput of all ranks together in tokens/s, the median of the steps."""
        rates = [step.tokens / step.step_s for step in self._steps if step.step_s > 0]
        return median(rates) if rates else None

    @property
    def exposed_share(self) -> float | None:
        """The fraction of the step time that is exposed communication."""
        stepping_s = sum(step.step_s for step in self._steps)
        return part_of(sum(step.exposed_s for step in self._steps), stepping_s)

    @property
    def link_bytes(self) -> dict[str, tuple[float, float]]:
        """By link: bytes per step that the recording rank sends, and bytes per second."""
        steps, stepping_s = len(self._steps), sum(step.step_s for step in self._steps)
        if not steps or stepping_s <= 0:
            return {}
        links = sorted({link for step in self._steps for link in step.wire_bytes})
        sums = {link: sum(step.wire_bytes.get(link, 0) for step in self._steps) for link in links}
        return {link: (count / steps, count / stepping_s) for link, count in sums.items()}

    def cost(self, peak_bytes: int) -> Cost:
        """Return the medians of the recent steps as the cost of one, with the recording rank's memory."""
        if not self._steps:
            return Cost()
        sent = {link: round(per_step) for link, (per_step, _) in self.link_bytes.items()}
        return Cost(
            compute_s=median(step.compute_s for step in self._steps),
            exposed_s=median(step.exposed_s for step in self._steps),
            step_s=median(step.step_s for step in self._steps),
            peak_bytes=(peak_bytes,),
            sent_bytes=(sum(sent.values()),),
            wire_bytes=sent,
        )

    @property
    def last_end_s(self) -> float:
        """The time at which the last committed step ended; 0 before the first."""
        return self._ends[-1] if self._ends else 0.0

    def seconds_of(self, steps: int) -> float | None:
        """Return the seconds that so many steps take, with evaluations and checkpoints between them."""
        if len(self._ends) < 2:
            return None
        pace_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return steps * pace_s
