"""OneStage: the whole model on one rank, micro-batch after micro-batch: plain training with gradient accumulation.

Order: F0 B0 F1 B1 ... RG.   Live: 1 micro-batch.   Bubble: 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.pipeline.schedule import PipelineSchedule, Schedule, StageCosts
from gossamer.pipeline.schedule._validate import at_least_one
from gossamer.spec.action import Action, Op
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class SingleStage(PipelineSchedule):
    """The schedule of one pipeline stage; it has no parameters."""

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
        if (stages, ranks) != (1, 1):
            raise bad_input(
                wanted="1 stage on 1 rank for the schedule single_stage",
                got=f"{stages} stages on {ranks} ranks",
                do="set plan.mesh.pipe: 1, or choose another schedule",
                key="plan.pipeline_schedule",
            )
        steps = [Action(op, 0, batch) for batch in range(microbatches) for op in (Op.F, Op.B)]
        return Schedule(
            name="single_stage",
            ranks=((*steps, Action(Op.REDUCE_GRADS, 0)),),
            placement=(0,),
            microbatches=microbatches,
        )
