"""A model in parts: which of a parameter's places belongs to which, by the blocks of its structure."""

from __future__ import annotations

from collections.abc import Iterator

from gossamer.grow import KEY, GrowthTask
from gossamer.model.structure.model import ModelStructure
from gossamer.spec.errors import bad_input

STEM, HEAD, TIED = "stem", "head", "tied"


def placed(structure: ModelStructure) -> Iterator[tuple[str, int | str, str]]:
    """Yield (name, block, rest of the name) of each parameter; what is in no block is in the STEM before them, in the
    HEAD behind them, or TIED in both.
    """
    tied = {name for names in structure.tied for name in names}
    where: int | str = STEM
    for name in structure.dims:
        block = next((i for i, one in enumerate(structure.blocks) if name.startswith(f"{one}.")), None)
        if block is not None:
            where = HEAD
            yield name, block, name.removeprefix(f"{structure.blocks[block]}.")
        else:
            yield name, TIED if name in tied else where, name


def by_place(structure: ModelStructure) -> dict[tuple[int | str, str], str]:
    """Return the names of parameters by (block, rest of the name)."""
    return {(block, rest): name for name, block, rest in placed(structure)}


def check_widths(task: GrowthTask, method: str) -> None:
    """Raise BadInput unless all blocks and what is around them have the same parameters and sizes in both models."""
    sides = []
    for structure in (task.source, task.target):
        shapes = {
            (rest if isinstance(block, int) else name): tuple(dim.size for dim in structure.dims[name])
            for name, block, rest in placed(structure)
        }
        sides.append(shapes)
    for name in sorted(sides[0].keys() | sides[1].keys()):
        small, large = (side.get(name) for side in sides)
        if small != large:
            raise bad_input(
                wanted=f"the same {name} in both models, as {method} changes the number of blocks alone",
                got=f"{small or 'none'} in the meta model and {large or 'none'} in the target",
                do="give the target the meta model's config, with more blocks",
                key=KEY,
            )
