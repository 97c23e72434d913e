"""The work of an update that does not shrink with the batch, beside that of a step: what Muon costs, said before a run.

Equations, for an optimizer whose update of matrices with W numbers takes F flop of matmuls, on U ranks that share it:
    share of a step with T tokens = F / U / (6 W T) ;   tokens of a share s = F / U / (6 W s)
6 W T: forward and backward of these matrices alone, at the rate of the update's own matmuls. The rest of a step
(attention, head, what is no matmul) makes the share smaller, so it is the most that it can be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod

from gossamer.optimizer import Optimizer

SHARE = 0.05


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """`flop`: of one rank's update; `flop_per_token`: forward and backward of the same matrices."""

    flop: float
    flop_per_token: float

    @staticmethod
    def of(optimizer: Optimizer, shapes: Iterable[tuple[str, tuple[int, ...]]], *, ranks: int = 1) -> UpdateWork | None:
        """Return the work of an update that `ranks` share; None where the optimizer has no matmuls."""
        each = {name: (optimizer.flop({name: shape}), prod(shape)) for name, shape in shapes}
        flop = sum(work for work, _ in each.values())
        if not flop:
            return None
        return UpdateWork(flop / ranks, 6.0 * sum(numel for work, numel in each.values() if work))

    def share(self, tokens: float) -> float:
        """Return the update's work per work of a step with so many tokens, at most."""
        return self.flop / (self.flop_per_token * tokens)

    def tokens(self, share: float = SHARE) -> int:
        """Return how many tokens of a step make the update this share of it, at most."""
        return ceil(self.flop / (self.flop_per_token * share))

    def told(self, tokens: int) -> str:
        """Return a note for the plan of a run with so many tokens per replica and step."""
        return (
            f"its matmuls take {self.flop:.3g} flop per update, whatever the batch: at most {100 * SHARE:.0f} % of a "
            f"step of {self.tokens():,} tokens per replica, {100 * self.share(tokens):.2g} % of this run's {tokens:,}"
        )
