"""A model in parts: which of a tensor's places belongs to which, by the blocks of its structure."""

from __future__ import annotations

from collections.abc import Iterator

from gossamer.grow import KEY, GrowthTask
from gossamer.model.structure.model import ModelStructure
from gossamer.spec.errors import bad_input

STEM, HEAD, BOTH = "stem", "head", "both"


def placed(structure: ModelStructure) -> Iterator[tuple[str, int | str, str]]:
    """Yield (name, block, rest of the name) of each parameter and persistent buffer.

    What is in no block is in the STEM, which the forward uses before the blocks alone, in the HEAD behind them, or in
    BOTH: tied, used between blocks, or never. A buffer is where the first parameter of its module is.
    """
    spans = {
        name: structure.span[name] for name in structure.dims if _block(structure, name) >= 0 and name in structure.span
    }
    first = min((span[0] for span in spans.values()), default=0)
    last = max((span[1] for span in spans.values()), default=0)

    def outside(name: str) -> str:
        begin, end = structure.span.get(name, (first, last))
        return STEM if end < first else HEAD if begin > last else BOTH

    modules: dict[str, str] = {}
    for name in structure.dims:
        modules.setdefault(name.rpartition(".")[0], name)
    for name in (*structure.dims, *structure.buffers):
        block = _block(structure, name)
        if block >= 0:
            yield name, block, name.removeprefix(f"{structure.blocks[block]}.")
        else:
            of = name if name in structure.dims else modules.get(name.rpartition(".")[0], "")
            yield name, outside(of), name


def _block(structure: ModelStructure, name: str) -> int:
    return next((i for i, one in enumerate(structure.blocks) if name.startswith(f"{one}.")), -1)


def by_place(structure: ModelStructure) -> dict[tuple[int | str, str], str]:
    """Return the names of tensors by (block, rest of the name)."""
    return {(block, rest): name for name, block, rest in placed(structure)}


def check_widths(task: GrowthTask, method: str) -> None:
    """Raise BadInput unless all blocks and what is around them have the same tensors and sizes in both models."""
    sides = []
    for structure in (task.source, task.target):
        shapes = {
            (rest if isinstance(block, int) else name): (
                tuple(dim.size for dim in structure.dims[name]) if name in structure.dims else structure.buffers[name]
            )
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
