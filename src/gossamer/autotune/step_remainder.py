"""Forecast what a step takes whatever its gradients' exchange is: to update, and to wait for rows of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.autotune.update_time import update_seconds
from gossamer.comm.channel import Channel, gathered
from gossamer.optimizer import Optimizer
from gossamer.plan import gather_wait_seconds
from gossamer.plan.exchange import MessagePrice
from gossamer.recipe import PlanMethods
from gossamer.sharding import Sharding, UnshardOrder, holdings, shapes_of
from gossamer.spec.cost import Cost
from gossamer.spec.network import Network


@dataclass(frozen=True, slots=True)
class StepRemainder:
    """The remainder of a step, of the parameters with these `shapes`.

    `update_s`: of the optimizer, on the rank that takes longest; `walk`: the order of units with sharded parameters.
    """

    shapes: Mapping[str, tuple[int, ...]]
    update_s: float
    walk: UnshardOrder | None

    @staticmethod
    def measured(
        params: Mapping[str, Tensor],
        optimizer: Optimizer | None,
        sharding: Sharding,
        walk: UnshardOrder | None,
        *,
        channel: Channel,
        device: torch.device,
    ) -> StepRemainder:
        """Time an update of each rank's rows; all ranks must call it together.

        The update is not known of states in a file, nor where `optimizer` is None.
        """
        shapes, mine = shapes_of(params), 0.0
        if optimizer is not None and not sharding.is_tiered:
            held = holdings(sharding.deal(channel.levels), shapes, channel.rank)
            mine = update_seconds(optimizer, params, held, device)
        return StepRemainder(shapes, float(gathered(channel, [mine]).max()), walk)

    def cost(
        self, methods: PlanMethods, channel: Channel, links: Network, *, price: MessagePrice, compute_s: float
    ) -> Cost:
        """Return the seconds of the update, with the hop in which ranks agree on it, and those waited for rows."""
        shapes, levels = tuple(self.shapes.items()), channel.levels
        waited_s = gather_wait_seconds(methods, shapes, levels, links, price=price, compute_s=compute_s, walk=self.walk)
        agreed_s = 0.0 if levels.is_alone else links.levels["all"].hop_s
        return Cost(exposed_s=waited_s, update_s=self.update_s + agreed_s)
