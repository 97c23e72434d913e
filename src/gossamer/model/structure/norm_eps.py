"""Where a model keeps the epsilon of its norms: attributes of the modules, and a key of its config."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from gossamer.model.structure.model import ModelStructure
from gossamer.spec.errors import bad_input

_DO = "give the target the source's epsilon, and a width that is a multiple of the source's: then none changes"


def eps_attributes(structure: ModelStructure, wanted: Mapping[str, float]) -> dict[str, float]:
    """Return the attributes to set so that norms have the epsilon of `wanted` (by weight); none where they have it.

    Raises BadInput for a norm that keeps its epsilon elsewhere.
    """
    known, found = {one.weight: one.eps for one in structure.norms}, dict[str, float]()
    for weight, value in wanted.items():
        if value == known[weight]:
            continue
        path = weight.rpartition(".")[0]
        module = structure.module.get_submodule(path)
        names = [name for name, held in vars(module).items() if isinstance(held, float) and held == known[weight]]
        if len(names) != 1:
            raise bad_input(
                wanted=f"epsilon {known[weight]:g} as an attribute of {path}, to set it to {value:g}",
                got=f"{len(names)} such attributes of {type(module).__name__}",
                do=_DO,
                key="--to",
            )
        found[f"{path}.{names[0]}"] = value
    return found


def eps_keys(module: nn.Module, structure: ModelStructure, wanted: Mapping[str, float]) -> dict[str, float]:
    """Return the keys of a config of transformers that are to say a changed epsilon; none for other models.

    Raises BadInput where no key says it, or where one says that of other norms too, which keep theirs.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return {}
    known = {one.weight: one.eps for one in structure.norms}
    found = dict[str, float]()
    for weight, value in wanted.items():
        if value == known[weight]:
            continue
        keys = [name for name, held in config.to_dict().items() if "eps" in name and held == known[weight]]
        others = [name for name, eps in known.items() if eps == known[weight] and wanted.get(name, eps) != value]
        if not keys or others:
            why = f"it is that of {others[0]} too, which keeps it" if others else "no key of the config says it"
            raise bad_input(
                wanted=f"a config that can say epsilon {value:g} of {weight}",
                got=why,
                do=_DO,
                key="--to",
            )
        found |= dict.fromkeys(keys, value)
    return found
