"""Where a model keeps the epsilon of its norms: attributes of the modules, and a key of its config."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from gossamer.model.structure.model import ModelStructure
from gossamer.spec.errors import BadInput, bad_input


def inherited_eps(source: ModelStructure, target: ModelStructure) -> dict[str, float]:
    """Return the epsilon of the target's norms (by weight) that the source has in their place.

    A norm of a block has that of all blocks of the source. Raises BadInput where these differ, and for a norm without a
    weight, which can be set by no name, with another epsilon than the source's.
    """
    known, found = {one.weight: one.eps for one in source.norms if one.weight}, dict[str, float]()
    for norm in target.norms:
        if not norm.weight:
            continue
        inside = next((one for one in target.blocks if norm.weight.startswith(f"{one}.")), None)
        of = [norm.weight] if inside is None else [f"{one}{norm.weight[len(inside) :]}" for one in source.blocks]
        eps = {known[one] for one in of if one in known}
        if len(eps) > 1:
            raise _apart(f"{norm.name} with one epsilon in all blocks", ", ".join(f"{one:g}" for one in sorted(eps)))
        if eps:
            found[norm.weight] = eps.pop()
    sides = [{one.eps for one in side.norms if not one.weight} for side in (source, target)]
    if sides[0] != sides[1] and all(sides):
        got = " and ".join(", ".join(f"{one:g}" for one in sorted(side)) for side in sides)
        raise _apart("norms without a weight with one epsilon in both models", got)
    return found


def _apart(wanted: str, got: str) -> BadInput:
    return bad_input(wanted=wanted, got=got, do="give the target the source's epsilon in its config", key="--to")


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
                wanted=f"epsilon {known[weight]:g} as an attribute of {path}, to scale it to {value:g}",
                got=f"{len(names)} such attributes of {type(module).__name__}",
                do="give the target the source's epsilon in its config, and a width that is a multiple of the source's",
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
                do="give the target the source's epsilon in its config, and a width that is a multiple of the source's",
                key="--to",
            )
        found |= dict.fromkeys(keys, value)
    return found
