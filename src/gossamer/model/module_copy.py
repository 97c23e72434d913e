"""Copy of a module that other code keeps using."""

from __future__ import annotations

import copy

import torch
from torch import nn

from gossamer.model.snapshot import Snapshot
from gossamer.model.split.dataflow import hollow


def copied(module: nn.Module, holds: frozenset[str] | None = None) -> nn.Module:
    """Return a copy of the module and all that it holds; tensors of a graph are copied without the graph.

    With `holds`, parameters that are not named there are zeros without memory. Raises what `copy.deepcopy` raises.
    """
    instead: dict[int, object] = {}
    for name, p in module.named_parameters():
        if holds is not None and name not in holds:
            blank = hollow(tuple(p.shape), p.dtype, torch.device("cpu"), fill=0.0)
            instead[id(p)] = nn.Parameter(blank, requires_grad=p.requires_grad)
    for tensor in Snapshot.of(module).tensors:
        if not tensor.is_leaf and id(tensor) not in instead:  # deepcopy refuses these
            instead[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copy.deepcopy(module, instead)  # type: ignore[arg-type]
