"""The inputs of one rank's trainer that come from the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.loss import Loss
from gossamer.model.text_stream import TextCoder
from gossamer.recipe import Recipe
from gossamer.run.batches import Batches
from gossamer.run.staged_model import StagedModel
from gossamer.run.validation_set import ValidationSet
from gossamer.sharding import UnshardOrder
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The inputs of a trainer that come from the user: module, loss, data, configuration, plan and device."""

    module: nn.Module  # of this rank
    objective: Loss
    train: Batches
    validation: Mapping[str, ValidationSet]  # by name, in the order of evaluation
    config: RunConfig
    plan: Plan
    device: torch.device
    cut: StagedModel | None = None  # with pipeline parallelism: the stages that the module holds
    words: TextCoder | None = None  # the tokenizer, where the data is text
    base: str = ""  # digest of the base model under an adapter, whose weights checkpoints leave out
    walk: UnshardOrder | None = None  # with sharded parameters: the order in which units are unsharded

    @property
    def recipe(self) -> Recipe:
        """Return the methods that the plan and the configuration name."""
        return Recipe.of(self.config, self.plan)

    @property
    def outline(self) -> nn.Module:
        """Return the full model by names and shapes; without parameter values if the module holds only some stages."""
        return self.module if self.cut is None else self.cut.ways.module

    @property
    def held(self) -> dict[str, Tensor]:
        """Return the parameters of the module by name, in stages those of this rank's stages."""
        named = self.module.named_parameters()
        return {name: param for name, param in named if self.cut is None or name in self.cut.holds}

    @property
    def units(self) -> tuple[str, ...]:
        """Return the names of the model's units."""
        return self.plan.units if self.cut is None else self.cut.ways.units
