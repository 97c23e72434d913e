"""Dependencies between pipeline actions: the meaning of the ops, shared by `check` and all schedule backends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gossamer.pipeline.schedule import Schedule
from gossamer.spec.action import Action, Op


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The dependencies between the actions of a schedule, `present`.

    The order of a rank's own list is no dependency here.
    """

    present: frozenset[Action]
    stages: int
    microbatches: int
    known: dict[Action, tuple[Action, ...]] = field(default_factory=dict, compare=False, repr=False)  # asked before

    @staticmethod
    def of(schedule: Schedule) -> Dependencies:
        """Return the dependencies of a schedule."""
        return Dependencies(frozenset(a for _, _, a in schedule.actions()), schedule.stages, schedule.microbatches)

    def __call__(self, action: Action) -> tuple[Action, ...]:
        """Return the actions that must be done before `action`, on any rank."""
        found = self.known.get(action)
        if found is None:
            found = self.known[action] = tuple(self._before(action))
        return found

    def _before(self, action: Action) -> Iterator[Action]:
        stage, batch = action.stage, action.batch
        match action.op:
            case Op.F:
                if stage > 0:
                    yield self._either(Action(Op.RECV_F, stage, batch), Action(Op.F, stage - 1, batch))
            case Op.B | Op.B_INPUT:
                yield Action(Op.F, stage, batch)
                yield from (a for op in (Op.RECOMPUTE, Op.RELOAD) if (a := Action(op, stage, batch)) in self.present)
                if stage + 1 < self.stages:
                    yield self._either(Action(Op.RECV_B, stage, batch), self.gradient(stage + 1, batch))
            case Op.B_WEIGHT:
                yield Action(Op.B_INPUT, stage, batch)
            case Op.RECOMPUTE | Op.OFFLOAD | Op.SEND_F:
                yield Action(Op.F, stage, batch)
            case Op.RELOAD:
                yield Action(Op.OFFLOAD, stage, batch)
            case Op.RECV_F:
                yield Action(Op.SEND_F, stage - 1, batch)
            case Op.SEND_B:
                yield self.gradient(stage, batch)
            case Op.RECV_B:
                yield Action(Op.SEND_B, stage + 1, batch)
            case Op.REDUCE_GRADS:
                yield from (self.finished(stage, b) for b in range(self.microbatches))
            case Op.GATHER_PARAMS | Op.FREE_PARAMS:
                pass

    def gradient(self, stage: int, batch: int) -> Action:
        """Return the action that computes the gradient of the stage's input."""
        return self._either(Action(Op.B_INPUT, stage, batch), Action(Op.B, stage, batch))

    def finished(self, stage: int, batch: int) -> Action:
        """Return the action that ends the stage's backward: no activation of the micro-batch is kept after it."""
        return self._either(Action(Op.B_WEIGHT, stage, batch), Action(Op.B, stage, batch))

    def _either(self, first: Action, second: Action) -> Action:
        return first if first in self.present else second
