"""The settings of zeroth-order (forward-only) training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gossamer.comm.message import ProcessGroups, Traffic
from gossamer.comm.row_gather import row_traffic
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True, kw_only=True)
class ZerothOrderConfig:
    """The settings of zeroth-order steps: a rank evaluates the loss at +-`epsilon` along `directions` directions per
    step.

    Raise BadInput for settings out of range.
    """

    directions: int
    epsilon: float

    def __post_init__(self) -> None:
        if self.directions < 1:
            raise bad_input(
                wanted="at least 1 direction",
                got=str(self.directions),
                do="give 1 or more: each direction takes two forward passes",
                key="directions",
            )
        if not 0 < self.epsilon < 1:
            raise bad_input(
                wanted="a step length above 0 and below 1",
                got=f"{self.epsilon:g}",
                do="give 1e-3, as the papers do: a much smaller epsilon is lost in rounding",
                key="epsilon",
            )

    def traffic(self, levels: ProcessGroups, rank: int) -> Iterator[Traffic]:
        """Yield the messages a rank sends in a step, without its weight and its vote."""
        yield from row_traffic(self.directions, 1, levels, levels.whole, rank)
