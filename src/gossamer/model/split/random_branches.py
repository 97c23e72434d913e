"""Random numbers that decide which units a forward calls: layers that are dropped, and the like.

A stage must know the calls before it runs. If the code between units reads a random number, the forward is traced at
both extremes of what may be drawn: with the smallest numbers that generators give, and with the largest.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from gossamer.model.split.dataflow import DataFlow
from gossamer.model.split.split_error import split_error

_WORDS, _ENDS = 624, 500  # of the state of a Mersenne twister; so many at an end, then others: loops that reject do end
_HIGHEST = 0x12DD9BB3  # as a word of the state, gives 32 ones
_BELOW_ONE = 1 - 2**-11  # in half precision, too
_UNIT, _RANGED = ("aten::rand", "aten::rand_like"), ("aten::uniform_", "aten::uniform")  # operators that draw evenly


class RandomExtreme(Enum):
    """The random numbers in the tensors of a trace: any (equal on every rank), the lowest, or the highest."""

    ANY = 0  # the same on every rank
    LOWEST = 1
    HIGHEST = 2

    def begin(self) -> None:
        """Seed the generators of torch, Python and numpy."""
        torch.manual_seed(self.value)
        random.seed(self.value)
        np.random.seed(self.value)
        if self is not RandomExtreme.ANY:
            others = np.random.randint(1, 2**32, _WORDS - _ENDS, dtype=np.uint32)
            words = [_HIGHEST if self is RandomExtreme.HIGHEST else 0] * _ENDS + others.tolist()
            random.setstate((3, (*words, 0), None))
            np.random.set_state(("MT19937", np.array(words, np.uint32), 0, 0, 0.0))

    def bend(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Set `out`, the output of the operator `func` of these arguments, to this extreme if it is drawn uniformly.

        The range is that of the call: `from` to `to` of `uniform_`, 0 to 1 of the others and where it is not given.
        """
        name = func.name().partition(".")[0]
        if self is RandomExtreme.ANY or name not in (*_UNIT, *_RANGED) or isinstance(out, FakeTensor):
            return
        low, high = 0.0, 1.0
        if name in _RANGED:
            given = dict(zip(("self", "from", "to"), args, strict=False)) | dict(kwargs)
            low, high = float(given.get("from", low)), float(given.get("to", high))
        out.fill_(low + (high - low) * _BELOW_ONE if self is RandomExtreme.HIGHEST else low)


@dataclass
class RandomBranchTrace:
    """A trace of the random tensors outside of units. `decide`: Python may have read a random number."""

    decide: bool = False
    _of: set[int] = field(default_factory=set)  # memory that depends on one
    _state: Any = None

    def follow(self, func: Any, read: Collection[int], made: Collection[int]) -> None:
        """Mark the memory `made` by the operator `func` as random, if it draws or its inputs `read` are random."""
        if torch.Tag.nondeterministic_seeded in func.tags or not self._of.isdisjoint(read):
            self._of.update(made)

    def look(self, read: Collection[int]) -> None:
        """Record that Python reads values in the memory `read`."""
        self.decide |= not self._of.isdisjoint(read)

    def enter(self) -> None:
        """Note the state of Python's and numpy's generators: code between units runs from here on."""
        self._state = None if self.decide else _others()

    def leave(self) -> None:
        """Compare that state, before a unit call or at the end: a generator that was drawn from may decide a branch."""
        if self._state is not None and self._state != _others():
            self.decide = True


def _others() -> tuple[Any, bytes, int]:
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2]


def check_way(module: nn.Module, flow: DataFlow, other: DataFlow) -> None:
    """Raise BadInput unless both data flows call the same units in the same order."""
    ways = [[call.name for call in one.calls] for one in (flow, other)]
    if ways[0] == ways[1]:
        return
    first = next((i for i, pair in enumerate(zip(*ways, strict=False)) if pair[0] != pair[1]), min(map(len, ways)))
    longer = max(ways, key=len)
    switches = ", ".join(sorted(set(_switches(module))))
    raise split_error(
        wanted="a forward that calls the same units every time, to be split into stages",
        got=f"one in which a random number decides whether {longer[first]} runs",
        do=f"set {switches} to 0 (in model.config, or in your module)"
        if switches
        else f"call {longer[first]} every time, and let it decide inside its forward what it does",
    )


def _switches(module: nn.Module) -> Iterator[str]:
    """Yield the names of probabilities by which layers may be dropped, of the module and its config."""
    for inner in module.modules():
        for holder in (inner, getattr(inner, "config", None)):
            for name, held in vars(holder).items() if hasattr(holder, "__dict__") else ():
                plain = name.replace("_", "").lower()
                if isinstance(held, float) and 0 < held <= 1 and ("layerdrop" in plain or "droppath" in plain):
                    yield name
