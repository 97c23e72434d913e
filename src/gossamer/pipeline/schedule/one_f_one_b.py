"""OneFOneB: one forward, one backward, after a warm-up of one forward per stage that follows (PipeDream-Flush:
Narayanan et al. 2021, arXiv:2006.09503, section 3.2; called 1F1B).

Order on stage s of p: F x min(m, p - 1 - s), then F B F B .., then the backwards that are left.
Live: min(m, p - s) micro-batches on stage s.   Bubble: (p - 1) / (m + p - 1), as GPipe's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gossamer.pipeline.schedule import PipelineSchedule, Schedule, StageCosts
from gossamer.pipeline.schedule._validate import at_least_one, one_stage_per_rank, within
from gossamer.spec.action import Action, Op


@dataclass(frozen=True, slots=True)
class OneFOneB(PipelineSchedule):
    """The 1F1B pipeline schedule; it has no parameters."""

    def make(
        self,
        *,
        stages: int,
        ranks: int,
        microbatches: int,
        costs: Sequence[StageCosts] | None = None,
        memory_cap: Sequence[int] | None = None,
    ) -> Schedule:
        at_least_one(stages=stages, ranks=ranks, microbatches=microbatches)
        one_stage_per_rank("one_f_one_b", stages=stages, ranks=ranks)
        live = [min(microbatches, stages - stage) for stage in range(stages)]
        within(live, costs, memory_cap, do="use smaller micro-batches, or split the model into more stages")
        return Schedule(
            name="one_f_one_b",
            ranks=tuple(tuple(_row(stage, stages - 1 - stage, microbatches)) for stage in range(stages)),
            placement=tuple(range(stages)),
            microbatches=microbatches,
        )


def _row(stage: int, following: int, microbatches: int) -> Iterator[Action]:
    ahead = min(following, microbatches)
    yield from (Action(Op.F, stage, batch) for batch in range(ahead))
    for batch in range(microbatches):
        if batch + ahead < microbatches:
            yield Action(Op.F, stage, batch + ahead)
        yield Action(Op.B, stage, batch)
    yield Action(Op.REDUCE_GRADS, stage)
