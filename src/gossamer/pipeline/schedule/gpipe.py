"""GPipe: all forwards, then all backwards in reverse order (Huang et al. 2019, arXiv:1811.06965, section 2.3).

Order on every rank: F0 .. F(m-1), B(m-1) .. B0.   Live: m micro-batches on every rank.
Bubble: (p - 1) / (m + p - 1) for p stages of equal cost and m micro-batches.
Deviation: recomputing, which the paper always does, is a method around this one (see recompute).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.pipeline.schedule import PipelineSchedule, Schedule, StageCosts
from gossamer.pipeline.schedule._validate import at_least_one, one_stage_per_rank, within
from gossamer.spec.action import Action, Op


@dataclass(frozen=True, slots=True)
class GPipe(PipelineSchedule):
    """The GPipe schedule; it has no parameters."""

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
        one_stage_per_rank("gpipe", stages=stages, ranks=ranks)
        within([microbatches] * stages, costs, memory_cap, do="use one_f_one_b, or smaller micro-batches")
        batches = range(microbatches)
        return Schedule(
            name="gpipe",
            ranks=tuple(
                (
                    *(Action(Op.F, stage, batch) for batch in batches),
                    *(Action(Op.B, stage, batch) for batch in reversed(batches)),
                    Action(Op.REDUCE_GRADS, stage),
                )
                for stage in range(stages)
            ),
            placement=tuple(range(stages)),
            microbatches=microbatches,
        )
