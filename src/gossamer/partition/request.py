"""The request for a rank's part of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gossamer.loss import Loss
from gossamer.run.batches import Batches
from gossamer.spec.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRequest:
    """The rank, device, batches and loss for which a part of the model is built."""

    config: RunConfig
    ranks: int
    rank: int
    batches: Batches
    objective: Loss
    device: torch.device
    local_ranks: int = 1  # number of ranks on this host
