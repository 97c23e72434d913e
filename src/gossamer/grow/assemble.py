"""Assemble: one model of parts that were trained apart around a shared meta model (see `part`).

Paper: Ni, Z. et al., "Deep Incubation: training large models by divide-and-conquering", ICCV 2023,
arXiv:2212.04129, section 3.3.
Equations, for K parts of m blocks each: block i m + r of the target <- real block r of part i ;
    what is before the blocks <- part 0 ; what is behind them <- part K - 1 ; what is used in both places (a tied
    head) <- the meta model ;
    total time = max over parts, as they need no network while they train
Good when: the target is fine-tuned end to end afterwards, with a warm-up; moments start anew.
What rested in a part must be the meta model's still, bit for bit: else it was trained around another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gossamer.grow import KEY, Grown, Growth, GrowthTask
from gossamer.grow._grown import check_blocks, check_sizes, inherited
from gossamer.grow._parts import BOTH, HEAD, STEM, by_place, check_widths, placed
from gossamer.spec.errors import BadInput, bad_input


@dataclass(frozen=True, slots=True, kw_only=True)
class Assemble(Growth):
    """The parts as one model. parts: the run of each, in order."""

    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.parts)) < 2 or len(set(self.parts)) != len(self.parts):
            got = ", ".join(self.parts) or "none"
            raise BadInput(f"parts: wanted two or more different runs, got {got}: write their folders", key="parts")

    @property
    def others(self) -> tuple[str, ...]:
        return self.parts

    def grow(self, task: GrowthTask) -> Grown:
        said = check_sizes(task, shrinks=False)
        parts, blocks = check_blocks(task, "assemble")
        if len(self.parts) != parts or blocks % parts:
            raise bad_input(
                wanted=f"{parts} parts, one for each block of the meta model, and a multiple of {parts} blocks",
                got=f"{len(self.parts)} parts and {blocks} blocks",
                do="name the run of every part in order, and correct the target",
                key=KEY,
            )
        check_widths(task, "assemble")
        count = blocks // parts
        for index in range(parts):
            self._check_rests(task, index, count)
        tensors, origins = {}, {}
        names, meta = by_place(task.target), by_place(task.source)
        for name, block, rest in placed(task.target):
            if isinstance(block, int):
                index, inside = divmod(block, count)
                tensors[name] = task.others[index][names[index + inside, rest]].clone()
                origins[name] = meta[index, rest]
            else:
                of = {STEM: task.others[0], HEAD: task.others[-1], BOTH: task.tensors}[block]
                tensors[name] = of[name].clone()
                origins[name] = name
        eps = inherited(task, lambda name: [(origins[name], 1.0)]).eps
        return Grown(tensors=tensors, eps=eps, said=said | {"parts": list(self.parts), "blocks": [parts, blocks]})

    def _check_rests(self, task: GrowthTask, index: int, count: int) -> None:
        """Raise BadInput where a part is of another meta model or size, or trained what should have rested."""
        meta, names, part = by_place(task.source), by_place(task.target), task.others[index]
        last = len(task.source.blocks) - 1
        for (block, rest), name in meta.items():
            if name not in task.source.dims:  # a buffer changes where parameters rest, too (running statistics)
                continue
            if block == index or (block == STEM and index == 0) or (block == HEAD and index == last):
                continue
            at = block if not isinstance(block, int) or block < index else block + count - 1
            there = part.get(names[at, rest])
            if there is None or not torch.equal(there, task.tensors[name].to(there.dtype)):
                raise bad_input(
                    wanted=f"{names[at, rest]} of part {index} as {name} of the meta model, which rests in that part",
                    got=f"no such parameter in {self.parts[index]}" if there is None else "other values",
                    do="train every part from `--by part` of this meta model, with the model.freeze and model.unfreeze "
                    "that it says",
                    key=KEY,
                )
        want = last + count
        if (
            got := len({block for (block, _), name in names.items() if isinstance(block, int) and name in part})
        ) != want:
            raise bad_input(
                wanted=f"{want} blocks in part {index}, of which {count} are its own",
                got=f"{got} in {self.parts[index]}",
                do=f"train it with a model of {want} blocks, or correct the target",
                key=KEY,
            )
