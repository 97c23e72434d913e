"""Synchronization methods: average gradients at every step, or pseudo-gradients after several local steps.

Local SGD, DiLoCo and gossip are of the second kind; zeroth-order training exchanges losses instead of gradients.

A method names the level at which the gradients of a step are averaged. It also gives the settings of the outer loop, or
those of zeroth-order steps. `GradientReducer` buckets gradients, overlaps their exchange with the backward pass and
holds the vote before the update. `OuterLoop` keeps the global parameters and averages pseudo-gradients by fragment.
`StatusExchange` carries status messages between islands; `QuorumThread` replaces it where a round continues without
stragglers. `ZerothOrderRank` measures directional derivatives and applies the agreed update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields

from gossamer.spec.registry import Registry
from gossamer.sync._gradient_buckets import buckets_of
from gossamer.sync._gradient_reducer import GradientReducer
from gossamer.sync._local_steps import LocalStepSchedule, by_speed
from gossamer.sync._local_update_loop import outer_loop_of
from gossamer.sync._outer_config import OuterLoopConfig
from gossamer.sync._outer_loop import NoOuterLoop, OuterLoop
from gossamer.sync._quorum import QuorumThread
from gossamer.sync._round_traffic import exchange_of_second_moments, exchanges_of_round, traffic_of_round
from gossamer.sync._status import ReplicaStatus, StatusChannel, StatusExchange
from gossamer.sync._step_messages import ParameterChecksum, StepMessage, parsed
from gossamer.sync._step_vote import StepAgreement, StepContext, StepVote
from gossamer.sync._sync_round import LocalStep, SyncResult
from gossamer.sync._zeroth_order import ZerothOrderRank
from gossamer.sync._zeroth_order_config import ZerothOrderConfig

__all__ = [
    "REGISTRY",
    "StepAgreement",
    "OuterLoop",
    "NoOuterLoop",
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
    "outer_loop_of",
    "parsed",
    "traffic_of_round",
]


class Sync(ABC):
    """A synchronization method: a frozen dataclass of settings.

    All mutable state is in GradientReducer, OuterLoop and ZerothOrderRank.
    """

    def __post_init__(self) -> None:
        """Raise BadInput for settings that do not go together."""
        _ = self.loop, self.probe

    @property
    @abstractmethod
    def loop(self) -> OuterLoopConfig | None:
        """Return the settings of the outer loop; None for synchronous training, without local steps."""

    @property
    def probe(self) -> ZerothOrderConfig | None:
        """Return the settings of zeroth-order steps; None for training with gradients."""
        return None

    @property
    def is_plain(self) -> bool:
        """Return whether all ranks average their gradients at every step."""
        return self.loop is None and self.probe is None

    @property
    def names_exchange(self) -> bool:
        """Return whether the exchange between islands is a setting of this method, `exchange`."""
        return self.loop is not None and any(one.name == "exchange" for one in fields(self))  # type: ignore[arg-type]

    def level(self, done: int) -> str:
        """Return the level at which gradients are averaged in the step after `done` others: `all` or `island`."""
        return "island" if self.loop is not None and self.loop.apart(done) else "all"


REGISTRY: Registry[Sync] = Registry(__name__, Sync)
names = REGISTRY.names
build = REGISTRY.build
