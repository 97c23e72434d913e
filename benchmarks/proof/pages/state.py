"""Python values that leave blocks, and Python state that modules keep."""

from __future__ import annotations

from proof.habit import EQUAL, habit
from proof.scene import Block, Net


@habit(EQUAL)
def plain_net():
    """Nothing special."""
    return Net()


class Counted(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        return super().forward(x), self.n


class Scaled(Net):
    def between(self, number, x):
        return x[0] * (1 + 0.1 * x[1])


@habit(EQUAL, hard=True)
def counter_returned():
    """A block returns how often it was called, and the model scales with it."""
    return Scaled(Counted)
