"""When replicas exchange, and what: gradients at every step, or, of islands that train apart, what has become of the
parameters in many steps: rarely, late and small. Or losses alone.

A method says at which level the gradients of a step meet, and gives the settings of the one outer loop, or those of
steps without gradients. The mechanics are a `GradientReducer`'s (buckets that fill while backward runs, the pump, the
agreement before the update), those of `OuterLoop` (anchor, displacement, fragments, delay, what is taken over of the
result) with the `StatusExchange` that passes between islands, or the `QuorumThread` that waits for none of them for
long, and those of `ZerothOrderRank` (directions, slopes in a byte, the move).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields

from gossamer.spec.registry import Registry
from gossamer.sync._gradient_reducer import GradientReducer, StepAgreement, StepContext, StepVote, buckets_of
from gossamer.sync._local_steps import LocalStepSchedule, by_speed
from gossamer.sync._outer_config import OuterLoopConfig
from gossamer.sync._outer_loop import (
    LocalStep,
    OuterLoop,
    SyncResult,
    exchange_of_second_moments,
    exchanges_of_round,
    traffic_of_round,
)
from gossamer.sync._quorum import QuorumThread
from gossamer.sync._status import ReplicaStatus, StatusChannel, StatusExchange
from gossamer.sync._step_messages import ParameterChecksum, StepMessage, parsed
from gossamer.sync._zeroth_order import ZerothOrderRank
from gossamer.sync._zeroth_order_config import ZerothOrderConfig

__all__ = [
    "REGISTRY",
    "StepAgreement",
    "OuterLoop",
    "StepMessage",
    "SyncResult",
    "OuterLoopConfig",
    "ParameterChecksum",
    "LocalStep",
    "ReplicaStatus",
    "LocalStepSchedule",
    "ZerothOrderConfig",
    "ZerothOrderRank",
    "GradientReducer",
    "QuorumThread",
    "Sync",
    "StatusChannel",
    "StepVote",
    "StepContext",
    "StatusExchange",
    "build",
    "buckets_of",
    "by_speed",
    "exchange_of_second_moments",
    "exchanges_of_round",
    "names",
    "parsed",
    "traffic_of_round",
]


class Sync(ABC):
    """A frozen dataclass; everything that changes is in the Replica, in Apart and in Probing."""

    def __post_init__(self) -> None:
        """Raises BadInput for settings that do not go together."""
        _ = self.loop, self.probe

    @property
    @abstractmethod
    def loop(self) -> OuterLoopConfig | None:
        """The outer loop of islands that train apart; None where all meet at every step."""

    @property
    def probe(self) -> ZerothOrderConfig | None:
        """How losses alone say where to go; None: gradients do."""
        return None

    @property
    def is_plain(self) -> bool:
        """Whether it is gradients that meet, of all ranks and at every step."""
        return self.loop is None and self.probe is None

    @property
    def names_exchange(self) -> bool:
        """Whether what goes between islands is one of its settings, `exchange`."""
        return self.loop is not None and any(one.name == "exchange" for one in fields(self))  # type: ignore[arg-type]

    def level(self, done: int) -> str:
        """Whose gradients meet in the step after `done` others: `all`, or those of an `island`."""
        return "island" if self.loop is not None and self.loop.apart(done) else "all"


REGISTRY: Registry[Sync] = Registry(__name__, Sync)
names = REGISTRY.names
build = REGISTRY.build
