"""Reading some of a model's weights, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from gossamer.model.profile import tied_names
from gossamer.spec.errors import bad_input


def load_safetensors(directory: Path, module: nn.Module, names: frozenset[str]) -> frozenset[str]:
    """Fill the tensors of `module` named in `names` from the files of `directory`; those that no file has.

    A tied parameter may be stored under any of its names. One tensor is held at a time.
    """
    missing = names & module.state_dict().keys()
    first = {name: group[0] for group in tied_names(module) for name in group}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (not a dict)
                target = first.get(name, name)
                if target in missing:
                    put(module, frozenset({target}), {target: stored.get_tensor(name)})
                    missing -= {target}
    return missing


def put(module: nn.Module, names: frozenset[str], tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into those of `module`; raises BadInput where a shape differs."""
    held = module.state_dict()
    for name in names:
        if held[name].shape != tensors[name].shape:
            raise bad_input(
                wanted=f"{name} of shape {tuple(held[name].shape)}",
                got=f"{tuple(tensors[name].shape)} in the file",
                do="give the config that the weights were saved with",
                key="model",
            )
        with torch.no_grad():
            held[name].copy_(tensors[name])
