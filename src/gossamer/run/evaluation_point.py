"""The point at which a run is evaluated: global parameters of local updates, or the optimizer's averaged point."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gossamer.comm.comm_thread import CommThread
from gossamer.sharding import ShardedOptimizer
from gossamer.sync import GradientReducer, OuterLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPoint:
    """The parameters that evaluations, samples and the module of a run that is over are of, on one rank.

    Checkpoints hold the trained parameters beside the optimizer's states; `read_model` computes the same point.
    """

    apart: OuterLoop
    states: ShardedOptimizer
    replica: GradientReducer
    pump: CommThread

    @contextmanager
    def after(self, done: int) -> Iterator[None]:
        """Load the point after `done` steps inside the context; all ranks enter it together."""
        with self.apart.agreed(done), self.states.averaged(self.replica.layouts, self.pump):
            yield

    def stay(self) -> None:
        """Load the optimizer's averaged point for good, once nothing is trained or saved any more."""
        self.states.load_average(self.replica.layouts, self.pump)
