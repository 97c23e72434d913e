"""Actions: the instructions of a pipeline schedule. A schedule is one list of them per rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """What is done. Values are the short forms schedules print as."""

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
    """`op` on `stage` for micro-batch `batch` (-1 where an action is about the whole stage)."""

    op: Op
    stage: int
    batch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.batch if self.batch >= 0 else ''}"
