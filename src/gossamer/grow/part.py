"""Part: a meta model with one of its blocks replaced by real ones, which are trained while all else rests.

Paper: Ni, Z. et al., "Deep Incubation: training large models by divide-and-conquering", ICCV 2023, arXiv:2212.04129,
sections 3.2 and 3.3.
Equations, for a meta model of K blocks, and K parts of m blocks each: the model of part i has K - 1 + m blocks,
    block j <- meta block j        for j < i
    block j <- meta block i        for i <= j < i + m         (these are trained)
    block j <- meta block j - m + 1  otherwise
The first part trains what the forward uses before the blocks, too, and the last one what it uses behind them; what is
used in both places (a tied head) rests in all.
Symbols: i part from 0, m real blocks of a part.
Good when: machines have no network between them: parts need nothing of each other until `assemble`.
Unlike the paper: real blocks begin as copies of the meta block that they replace; there they are random.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gossamer.grow import KEY, Grown, Growth, GrowthTask
from gossamer.grow._grown import check_blocks, check_sizes, inherited
from gossamer.grow._parts import HEAD, STEM, by_place, check_widths, placed
from gossamer.spec.errors import BadInput, bad_input


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Growth):
    """One part to be trained apart. index: from 0, of as many as the meta model has blocks."""

    index: int = 0

    def __post_init__(self) -> None:
        if self.index < 0:
            raise BadInput(f"index: wanted 0 or more, got {self.index}: the first part is 0", key="index")

    def grow(self, task: GrowthTask) -> Grown:
        said = check_sizes(task, shrinks=False)
        parts, blocks = check_blocks(task, "part")
        if self.index >= parts:
            raise bad_input(
                wanted=f"a part from 0 to {parts - 1}: the meta model has {parts} blocks",
                got=str(self.index),
                do="write --by '{part: {index: 0}}', say",
                key=KEY,
            )
        check_widths(task, "part")
        count = blocks - parts + 1
        names = by_place(task.source)
        origins = {}
        for name, block, rest in placed(task.target):
            of = min(max(block - count + 1, self.index), block) if isinstance(block, int) else block
            origins[name] = names[of, rest]
        more = inherited(task, lambda name: [(origins[name], 1.0)])
        tensors = {name: task.tensors[origins[name]].clone() for name in task.target.dims}
        return Grown(
            tensors={**tensors, **more.tensors},
            eps=more.eps,
            said=said | {"blocks": [parts, blocks], "freeze": ["."], "unfreeze": self.trained(task, count)},
        )

    def trained(self, task: GrowthTask, count: int) -> list[str]:
        """Return the patterns of the parameters that this part trains, for `model.unfreeze`."""
        found = [f"^{re.escape(one)}\\." for one in task.target.blocks[self.index : self.index + count]]
        ends = [STEM] * (self.index == 0) + [HEAD] * (self.index == len(task.source.blocks) - 1)
        outside = [name for name, where, _ in placed(task.target) if where in ends and name in task.target.dims]
        return found + [f"^{re.escape(name)}$" for name in outside]
