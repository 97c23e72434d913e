"""The time and memory costs of one stage's actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gossamer.spec.action import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """The costs of one stage: `seconds` per action (0 where an op is not named) and bytes per micro-batch.

    live_bytes: kept from F to the end of backward; kept_bytes: the same where the schedule recomputes the stage, until
    RECOMPUTE restores live_bytes; boundary_bytes: output sent to the next stage, and the size of its gradient.
    """

    seconds: Mapping[Op, float] = field(default_factory=dict)
    live_bytes: int = 0
    kept_bytes: int = 0
    boundary_bytes: int = 0
