"""Read some of a model's weights, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from gossamer.model.model_profile import tied_names
from gossamer.spec.errors import BadInput, bad_input


def load_safetensors(directory: Path, module: nn.Module, names: frozenset[str]) -> frozenset[str]:
    """Fill the tensors of `module` named in `names` from the files of `directory`; return the names that no file has.

    A tied parameter may be stored under any of its names.
    """
    missing = names & module.state_dict().keys()
    first = {name: group[0] for group in tied_names(module) for name in group}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (not a dict)
                target = first.get(name, name)
                if target in missing:
                    give(module, target, stored.get_tensor(name).clone())
                    missing -= {target}
    return missing


def give(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Let a parameter or buffer of `module` use the memory of `tensor`; its own may have none.

    Raises BadInput if the shapes differ.
    """
    path, _, leaf = name.rpartition(".")
    held: Tensor = getattr(module.get_submodule(path), leaf)
    if held.shape != tensor.shape:
        raise _misfit(name, held, tensor)
    held.data = tensor.to(held.dtype)


def _misfit(name: str, held: Tensor, tensor: Tensor) -> BadInput:
    return bad_input(
        wanted=f"{name} of shape {tuple(held.shape)}",
        got=f"{tuple(tensor.shape)} in the file",
        do="give the config that the weights were saved with",
        key="model",
    )
