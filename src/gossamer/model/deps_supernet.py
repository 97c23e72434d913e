"""DepS: once-for-all training whose shrinking begins late and opens step by step.

Paper: Annavajjala et al., DepS: Delayed epsilon-Shrinking for Faster Once-For-All Training, ECCV 2024,
    arXiv:2407.06167.
The whole network trains alone for the first `start` of the steps. Then the smallest share of widths and depths that a
subnet may have falls from 1 to its final value over `opening` of the steps. From there on a step trains the whole
network, the smallest subnet allowed, and `sampled` ones between them, by in-place distillation (`loss: deps`). The
subnets' learning rates, as weights of their losses, rise with the opening from `rate` to 1.
The subnets of a step follow from (seed, step): they are the same on all ranks. In evaluation it is the whole network,
or the subnet that `select` has chosen.
Unlike the paper: the rates scale the subnets' losses, as every optimizer takes one gradient.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gossamer.loss.deps import SUBNETS, WEIGHTS
from gossamer.model.elastic import Elastic, Subnet
from gossamer.model.step_dependent import StepDependent
from gossamer.model.unit_seeds import mix
from gossamer.spec.errors import bad_input


class DepsSupernet(nn.Module, StepDependent):
    """A network that shrinks while it trains; a factory returns one around a network of the user's.

    steps: of the run; least_width, least_depth: the smallest shares of hidden features and of blocks.
    """

    gives_subnets: ClassVar[bool] = True

    def __init__(
        self,
        network: nn.Module,
        *,
        steps: int,
        start: float = 0.5,
        opening: float = 0.25,
        least_width: float = 0.25,
        least_depth: float = 0.5,
        sampled: int = 2,
        rate: float = 0.25,
    ) -> None:
        super().__init__()
        shares = {"start": start, "opening": opening, "rate": rate}
        for name, value in shares.items():
            if not 0 <= value <= 1:
                raise bad_input(
                    wanted="a share of 0 to 1", got=f"{name} {value:g}", do="correct it", key="model.config"
                )
        for name, value in (("least_width", least_width), ("least_depth", least_depth)):
            if not 0 < value <= 1:
                raise bad_input(wanted="a share above 0", got=f"{name} {value:g}", do="correct it", key="model.config")
        if steps < 1 or sampled < 0:
            raise bad_input(
                wanted="the steps of the run, and 0 or more sampled subnets",
                got=f"{steps} and {sampled}",
                do="correct them",
                key="model.config",
            )
        self.network = network
        self.steps, self.start, self.opening = steps, start, opening
        self.least = (least_width, least_depth)
        self.sampled, self.rate = sampled, rate
        self._subnets: tuple[Subnet, ...] = ()
        self._weight = 0.0
        self._chosen: Subnet | None = None

    @property
    def elastic(self) -> Elastic:
        """The elastic parts of the network."""
        return Elastic(self.network)

    def opened(self, step: int) -> float:
        """Return how far the range of subnets is open in a step: 0, the whole network alone, to 1."""
        after = step / self.steps - self.start
        if after < 0:
            return 0.0
        return min(1.0, (after * self.steps + 1) / max(1.0, self.opening * self.steps))

    def subnets(self, seed: int, step: int) -> tuple[Subnet, ...]:
        """Return the subnets that a step trains beside the whole network: the smallest, and sampled ones."""
        opened = self.opened(step)
        if not opened:
            return ()
        elastic, draws = self.elastic, random.Random(mix(seed, step))
        width, depth = (1 - opened * (1 - least) for least in self.least)
        stacks, lists = (len(one) for one in (elastic.whole.widths, elastic.whole.depths))
        found = [elastic.at([width] * stacks, [depth] * lists)]
        for _ in range(self.sampled):
            widths = [draws.uniform(width, 1) for _ in range(stacks)]
            found.append(elastic.at(widths, [draws.uniform(depth, 1) for _ in range(lists)]))
        return tuple(found)

    def begin_step(self, seed: int, step: int) -> None:
        self._subnets = self.subnets(seed, step)
        self._weight = self.rate + (1 - self.rate) * self.opened(step)

    def select(self, subnet: Subnet | None) -> None:
        """Choose the subnet that evaluation computes; None: the whole network."""
        self._chosen = subnet

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return logits; in training those of the subnets too, with their weights.

        A key of a batch that the network does not take, such as labels, is not given to it. Raises BadInput in training
        for a network that returns no tensor.
        """
        taken = self._taken(kwargs)
        if not self.training:
            return (
                self.network(*args, **taken)
                if self._chosen is None
                else self.elastic.forward(self._chosen, args, taken)
            )
        logits = self.network(*args, **taken)
        if not isinstance(logits, Tensor):
            raise bad_input(
                wanted="a network whose forward returns logits, a tensor (B, C)",
                got=f"{type(logits).__name__} of a {type(self.network).__name__}",
                do="return the logits alone; the loss deps reads the labels of the batch",
                key="model.factory",
            )
        elastic = self.elastic
        others = [elastic.forward(one, args, taken) for one in self._subnets]
        stacked = torch.stack(others) if others else logits.new_empty(0, *logits.shape)
        return {"logits": logits, SUBNETS: stacked, WEIGHTS: logits.new_full((len(others),), self._weight)}

    def _taken(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of these arguments that the network's forward takes."""
        parameters = inspect.signature(self.network.forward).parameters
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        return {name: value for name, value in named.items() if takes_all or name in parameters}
