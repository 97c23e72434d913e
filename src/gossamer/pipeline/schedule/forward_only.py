"""ForwardOnly: every micro-batch through every stage, without a backward: validation and sampling.

Order: on each rank by stage + batch, the wave in which micro-batches reach its stages; so no rank waits for one that
waits for it, wherever the stages lie.   Live: 1 micro-batch per rank.   Bubble: (p - 1) / (m + p - 1) for p ranks
of one stage and m micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.pipeline.schedule import PipelineSchedule, Schedule, StageCosts
from gossamer.pipeline.schedule._validate import at_least_one
from gossamer.spec.action import Action, Op
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class ForwardOnly(PipelineSchedule):
    """The forward-only pipeline schedule. `placement[stage]` = rank, as in the schedule that trains the same stages.

    Empty: stages are assigned to ranks in turn (stage modulo ranks).
    """

    placement: tuple[int, ...] = ()

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
        placement = self.placement or tuple(stage % ranks for stage in range(stages))
        if len(placement) != stages or set(placement) != set(range(ranks)):
            raise bad_input(
                wanted=f"a placement of {stages} stages on ranks 0 to {ranks - 1}, with a stage on every rank",
                got=f"{list(placement)}",
                do="give one rank per stage, and every rank at least once",
                key="placement",
            )
        wave = sorted((stage + batch, stage, batch) for stage in range(stages) for batch in range(microbatches))
        return Schedule(
            name="forward_only",
            ranks=tuple(tuple(Action(Op.F, s, b) for _, s, b in wave if placement[s] == r) for r in range(ranks)),
            placement=placement,
            microbatches=microbatches,
            trains=False,
        )
