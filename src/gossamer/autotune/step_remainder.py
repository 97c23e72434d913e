"""Forecast what a step takes whatever its gradients' exchange is: to update, and to wait for rows of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gossamer.autotune.choice_basis import ChoiceBasis
from gossamer.autotune.update_time import update_seconds
from gossamer.comm.channel import Channel, gathered
from gossamer.comm.message import ProcessGroups
from gossamer.comm.row_gather import gather_hops
from gossamer.optimizer import Optimizer
from gossamer.plan import gather_wait_seconds
from gossamer.recipe import PlanMethods
from gossamer.sharding import RowPartition, Sharding, UnshardOrder, holdings, shapes_of
from gossamer.spec.cost import Cost


@dataclass(frozen=True, slots=True)
class StepRemainder:
    """The remainder of a step, of the parameters with these `shapes`.

    `update_s`: of the optimizer, on the rank that takes longest; `deal`: the rows of each rank; `walk`: the order of
    units with sharded parameters.
    """

    shapes: Mapping[str, tuple[int, ...]]
    update_s: float
    deal: RowPartition
    walk: UnshardOrder | None

    @staticmethod
    def measured(
        params: Mapping[str, Tensor],
        optimizer: Optimizer | None,
        sharding: Sharding,
        deal: RowPartition,
        walk: UnshardOrder | None,
        channel: Channel,
    ) -> StepRemainder:
        """Time an update of each rank's rows of `params`, which are dealt so; all ranks must call it together.

        The update is not known of states in a file, nor where `optimizer` is None.
        """
        shapes, mine = shapes_of(params), 0.0
        if optimizer is not None and not sharding.is_tiered:
            held = holdings(deal, shapes, channel.rank)
            mine = update_seconds(optimizer, params, held)
        return StepRemainder(shapes, float(gathered(channel, [mine]).max()), deal, walk)

    def added(self, cost: Cost, methods: PlanMethods, basis: ChoiceBasis, levels: ProcessGroups) -> Cost:
        """Return a step's `cost` with the seconds of the update, and the waits for rows and for the ranks' agreement.

        `methods`: the plan's, for the step's buckets and sharding; `basis`: what its exchanges were chosen by.
        """
        shapes, links = tuple(self.shapes.items()), basis.links
        waited_s = gather_wait_seconds(
            methods,
            shapes,
            levels,
            links,
            price=basis.price,
            compute_s=cost.compute_s,
            walk=self.walk,
            deal=self.deal,
        )
        far, near = gather_hops(levels, levels.whole, levels.everyone[0])
        near_link = links.levels.get("island", links.levels["all"])
        waited_s += far * links.levels["all"].hop_s + near * near_link.hop_s
        times = {"exposed_s": cost.exposed_s + waited_s, "update_s": self.update_s}
        return cost.model_copy(update={**times, "step_s": cost.step_s + waited_s + self.update_s})
