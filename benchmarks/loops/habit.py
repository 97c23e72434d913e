"""A habit of training loops that people write, what must come of it, and the list of all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Loop = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """`loop(wrap)` trains and returns what is compared: modules, tensors, or lists of them.

    must: "equal"; "alike": its arithmetic differs from one process's by intention (lossy, 16 bits, ranks' own noise):
    the ranks hold the same bits, near those of one process. may: "refused", where exactness cannot be had or shown.
    like: the loop that one process runs, where it is not the same text. tolerance: of float64, where some of the
    arithmetic is not. says: what a refusal names (a regular expression), or a warning, where result must be "alike".
    steps: the fewest optimizer steps that make it a test; 0 where no optimizer counts them. sets: whether the loop
    itself sets parameters beside the optimizer, so that a refusal is judged by where the last step left them.
    """

    name: str
    page: str
    loop: Loop
    must: str = ""
    may: str = ""
    like: Loop | None = None
    launcher: str = "torchrun"
    tolerance: float = 1e-9
    says: str = ""
    steps: int = 10
    fp32: bool = True
    sets: bool = False

    @property
    def wanted(self) -> str:
        return self.must or f"equal or {self.may}"

    def is_good(self, result: str) -> bool:
        return result == "equal" or (result == self.must) or (result == self.may)


HABITS: dict[str, Habit] = {}


def habit(**told: Any) -> Callable[[Loop], Loop]:
    """Enters a loop in the list, under its own name."""

    def enter(loop: Loop) -> Loop:
        name, page = loop.__name__, loop.__module__.rpartition(".")[2]
        assert name not in HABITS, f"two habits are called {name}"
        assert inspect.getdoc(loop), f"{name}: wanted a sentence that says what it is"
        assert ("must" in told) != ("may" in told), f"{name}: wanted must= or may="
        HABITS[name] = Habit(name=name, page=page, loop=loop, **told)
        return loop

    return enter
