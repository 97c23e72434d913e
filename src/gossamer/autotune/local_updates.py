"""Set up local-update training on one rank: islands, steps per round, the exchange of a round, the estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossamer import sync
from gossamer.autotune.link_use import uplinks_downlinks_of
from gossamer.comm.channel import Channel, gathered
from gossamer.comm.message import ProcessGroups
from gossamer.plan import price_apart
from gossamer.policy import Policy
from gossamer.recipe import PlanMethods, not_used_inside, shared_states_apart
from gossamer.run.batches import Feed
from gossamer.run.checkpoint import trainable
from gossamer.run.profile_step import profile_step
from gossamer.run.step_runner import ModelRuntime
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import MethodConfig
from gossamer.spec.network import Network
from gossamer.spec.plan import Plan
from gossamer.spec.statistics import Statistics
from gossamer.sync import OuterLoopConfig


@dataclass(slots=True, kw_only=True)
class LocalUpdates:
    """The plan of a run with local updates while it is being completed; all ranks must call the same methods."""

    plan: Plan
    engine: ModelRuntime
    feed: Feed
    channel: Channel
    tell: Callable[[str, int], None]  # an event: message, step

    def part(
        self,
        loop: OuterLoopConfig,
        islands: tuple[tuple[int, ...], ...],
        policy: Policy | None,
        links: Callable[[], Network],
    ) -> Plan:
        """Return the plan in which `islands` train apart under `loop`, with its estimate, and tell the user of it.

        `policy`: chooses the exchange of a round from `links()`, which measures each rank's uplink and downlink; None:
        the plan's exchange stays. Raises BadInput if a policy meets islands of several ranks, or if the exchange cannot
        serve these.
        """
        if error := shared_states_apart(loop, islands, self.methods.exchange.exchanges):
            raise error
        self.part_into(islands)
        later = f", from step {loop.steady} on" if loop.warmup.local_step_scaler else ""
        said = f"{len(islands)} islands {[list(i) for i in islands]} synchronize every {loop.sync_every} steps{later}"
        round_s = 0.0
        if loop.local_steps:
            loop, round_s, each = self._paced(loop)
            said += f": {each}, {round_s:.3g} s of computing a round"
        if self.methods.sharding.is_sharded:
            said += f"; in each, states are shared out among {min(map(len, islands))} of its ranks"
        if policy is not None:
            loop = self._by_ways(loop, policy, links)
        self.price(loop, compute_s=round_s / loop.sync_every, state_bytes=self.plan.forecast.state_bytes)
        self._update(reasons={**self.plan.reasons, "sync": said})
        self.tell(f"sync: {said}", 0)
        if unused := not_used_inside(loop, islands, self.plan.exchange):
            self._update(reasons={**self.plan.reasons, "exchange": unused})
            self.tell(f"exchange: {unused}", 0)
        return self.plan

    def part_into(self, islands: tuple[tuple[int, ...], ...]) -> None:
        """Open the groups that `islands` need, and write the islands to the plan."""
        levels = ProcessGroups.islands(islands).twice()
        if self.channel.levels != levels:
            self.channel.widen(levels)
        self._update(islands=islands)

    def price(self, loop: OuterLoopConfig, **known: object) -> None:
        """Write the estimate of training under `loop` to the plan; `known`: fields of it that were measured."""
        shapes = tuple((name, tuple(p.shape)) for name, p in trainable(self.engine.module).items())
        forecast = price_apart(loop, self.methods, shapes, self.channel.levels)
        self._update(forecast=forecast.model_copy(update=known))

    @property
    def methods(self) -> PlanMethods:
        """Return the methods of the plan as it is now."""
        return PlanMethods.of(self.plan)

    def _update(self, **fields: object) -> None:
        self.plan = self.plan.model_copy(update=fields)

    def _paced(self, loop: OuterLoopConfig) -> tuple[OuterLoopConfig, float, str]:
        """Return the loop with each island's steps per round, the seconds of a round, and a description.

        An island is as fast as its slowest rank.
        """
        mine = profile_step(self.engine, self.feed, trainable(self.engine.module)).compute_s
        by_rank = gathered(self.channel, [mine])[:, 0].tolist()
        islands = self.plan.islands
        seconds = [max(by_rank[rank] for rank in island) for island in islands]
        if loop.local_steps == "auto":
            loop = self._with(local_steps=list(sync.by_speed(seconds, loop.sync_every)))
        pairs = list(zip(loop.steps_of(islands), seconds, strict=True))
        said = ", ".join(
            f"{list(island)} makes {n} of {s:.3g} s" for island, (n, s) in zip(islands, pairs, strict=True)
        )
        return loop, max(n * s for n, s in pairs), said

    def _by_ways(self, loop: OuterLoopConfig, policy: Policy, links: Callable[[], Network]) -> OuterLoopConfig:
        """Return the loop with the exchange that the policy chooses from the current uplinks and downlinks."""
        islands = self.plan.islands
        if any(len(island) > 1 for island in islands):
            raise bad_input(
                wanted="islands of one rank each, for a policy with local updates",
                got=str([list(island) for island in islands]),
                do="set plan.adapt to none, and write the exchange in plan.sync",
                key="plan.adapt",
            )
        numel = {name: p.numel() for name, p in trainable(self.engine.module).items()}
        statistics = Statistics(names=tuple(numel), numel=tuple(numel.values()))
        choices = policy.choose(statistics, uplinks_downlinks_of(links()))
        self._update(reasons={**self.plan.reasons, "adapt": choices.reason})
        self.tell(f"adapted: {choices.reason}", 0)
        return self._with(exchange=choices.rules[0][2])

    def _with(self, **parameters: Any) -> OuterLoopConfig:
        """Return the outer loop with other settings, and write them to the plan."""
        choice = MethodConfig.parse(self.plan.sync)
        self._update(sync=MethodConfig(choice.name, {**choice.parameters, **parameters}).written())
        loop = self.methods.sync.loop
        assert loop is not None
        return loop
