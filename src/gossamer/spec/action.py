"""Actions: the instructions of a pipeline schedule. A schedule is one list of them per rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """The operation of a pipeline-schedule action. The values are the abbreviations that printed schedules use."""

    F = "F"
    B = "B"
    B_INPUT = "I"
    B_WEIGHT = "W"
    RECOMPUTE = "R"
    SEND_F = "SF"
    RECV_F = "RF"
    SEND_B = "SB"
    RECV_B = "RB"
    GATHER_PARAMS = "GP"
    FREE_PARAMS = "FP"
    REDUCE_GRADS = "RG"
    OFFLOAD = "OF"
    RELOAD = "RL"


@dataclass(frozen=True, slots=True)
class Action:
    """The pipeline-schedule action `op` on `stage` for micro-batch `batch` (-1: it concerns the whole stage)."""

    op: Op
    stage: int
    batch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.batch if self.batch >= 0 else ''}"
