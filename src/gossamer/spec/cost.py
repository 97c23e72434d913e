"""The cost of a step: one type for forecast and measurement, so that they compare field by field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Cost(BaseModel):
    """The cost of one training step. Lists are indexed by rank; `wire_bytes` by link, counted at the sender."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compute_s: float = 0.0
    wire_s: float = 0.0
    exposed_s: float = 0.0  # what messages and their encoding add to a step
    unhidden_s: float = 0.0  # the part of it that no order of messages hides
    bubble_s: float = 0.0  # of a rank, waiting for the work of others
    update_s: float = 0.0  # after the gradients: the ranks' agreement on the step, and the optimizer's update
    step_s: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    state_bytes: tuple[int, ...] = ()  # parameters, gradients, states of optimizer and outer loop, between steps
    sent_bytes: tuple[int, ...] = ()
    wire_bytes: dict[str, int] = {}
