"""Random seeds keyed by (seed, step, micro-batch, unit): dropout does not depend on ranks, stages, or what ran before.

Every unit seeds the generators before its forward, and again after it. So the draws of the model's own code between
units are keyed too, and a unit's draws never shift the ones that follow. Units called several times in one forward
(shared layers) draw the same numbers each time. `forward` is wrapped, not hooked: some models call it directly.

Python's `random` and numpy's generator are keyed likewise, if the code of the model, or of the unit, may draw from them
(`rng_usage.py`): those of the model once per micro-batch, and in units that use them, per unit.

Cost on one core of an EPYC:
    per unit         3.4 us;  if it may draw from Python's  7 us more, from numpy's 3 us more
    per micro-batch  5 us;    if the model may,            14 us more,              2 us more
Order: units are compiled (`compiled.py`) and made into stages (`split/stage.py`) first, and keyed last. So the seeding
stays outside of compiled code, and placeholders seed as the real units do.
Recompute: non-reentrant checkpointing runs a unit's forward again and gets the same numbers, provided that backward
runs under the same `at` as its forward; elsewhere it raises, as the numbers would be silently wrong.
A module that torch.compile wrapped as a whole keeps one seeding, at its top.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from gossamer.model.rng_state import Generator, NumpyGenerator, PythonGenerator, TorchGenerator
from gossamer.model.rng_usage import NUMPY, PYTHON, draws
from gossamer.model.step_dependent import StepDependent
from gossamer.model.units import unit_names

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(*keys: int) -> int:
    """Return 64 well-mixed bits of a sequence of integers (splitmix64 over each, order matters)."""
    state = 0
    for key in keys:
        state = _mixed(state, key)
    return state


def _mixed(state: int, key: int) -> int:
    state = (state + _GOLDEN + (key & _MASK)) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class UnitSeeds:
    """The random seeding of one module's units. Made by `unit_seeds`; `remove` takes it off again."""

    def __init__(self, module: nn.Module, units: tuple[str, ...], seed: int) -> None:
        self.units, self.seed = units, seed
        self._state: int | None = None  # of the micro-batch now running
        first = next(module.parameters(), None)
        torchs = TorchGenerator(first.device if first is not None else torch.device("cpu"))
        others: dict[str, Generator] = {PYTHON: PythonGenerator(), NUMPY: NumpyGenerator()}
        whole, *each = ((torchs, *(others[n] for n in sorted(drawn))) for drawn in draws(module, "", *units))
        self._all = whole
        self._keyed: list[tuple[nn.Module, Keyed]] = []
        self._stepped = [one for one in module.modules() if isinstance(one, StepDependent)]
        for index, (name, drawn) in enumerate(zip(units, each, strict=True)):
            unit = module.get_submodule(name)
            self._keyed.append((unit, Keyed(self, unit, 2 * index + 1, drawn)))

    @contextmanager
    def at(self, step: int, microbatch: int) -> Iterator[None]:
        """Run the forward of a micro-batch, or its backward, or both, in this context.

        `microbatch` must name the samples and not the rank: the global index of the first sample does. Outside, the
        generators are as if nothing had been drawn.
        """
        for module in self._stepped:
            module.begin_step(self.seed, step)
        outer = self._state
        before = [generator.save() for generator in self._all]
        self._state = mix(mix(self.seed, step, microbatch))
        try:
            self.draw_from(0, self._all)
            yield
        finally:
            self._state = outer
            for generator, state in zip(self._all, before, strict=True):
                generator.restore(state)

    @property
    def is_on(self) -> bool:
        """Return whether a micro-batch is running."""
        return self._state is not None

    def draw_from(self, place: int, generators: Sequence[Generator]) -> None:
        """Seed `generators` for a place in the current micro-batch."""
        assert self._state is not None
        key = _mixed(self._state, place)
        for generator in generators:
            generator.seed(key)

    def remove(self) -> None:
        """Give the units their own forwards back. A seeding that was wrapped again since stays, but does nothing."""
        while self._keyed:
            unit, keyed = self._keyed.pop()
            if vars(unit).get("forward") is keyed:
                keyed.put_back(unit)

    def __deepcopy__(self, _: Any) -> UnitSeeds:
        return self  # a copy of the module is keyed as the module is


class Keyed:
    """The forward of a unit, with a seed of the generators before and after it.

    It is no closure, so that a copy of a module calls the copy's own.
    """

    def __init__(self, seeds: UnitSeeds, unit: nn.Module, place: int, drawn: tuple[Generator, ...]) -> None:
        self.seeds, self.place, self.drawn = seeds, place, drawn
        self.real: Callable[..., Any] = unit.forward
        self._of_class = "forward" not in vars(unit)
        functools.update_wrapper(self, self.real)
        unit.forward = self  # type: ignore[method-assign]

    def put_back(self, unit: nn.Module) -> None:
        """Give `unit` its own forward back."""
        if self._of_class:
            del unit.forward
        else:
            unit.forward = self.real  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seeds = self.seeds
        if not seeds.is_on:
            if torch._C._current_graph_task_id() != -1:  # within backward: a unit is being recomputed
                raise RuntimeError(
                    "a unit is recomputed in a backward outside of UnitSeeds.at: run the backward inside "
                    "UnitSeeds.at, with the arguments of its forward"
                )
            return self.real(*args, **kwargs)
        seeds.draw_from(self.place, self.drawn)
        output = self.real(*args, **kwargs)
        seeds.draw_from(self.place + 1, self.drawn)
        return output


def unit_seeds(module: nn.Module, units: Sequence[str] = (), *, seed: int) -> UnitSeeds:
    """Install seeding on every unit of `module`, for the device that holds its parameters now.

    A unit's forward seeds the generators by (seed, step, micro-batch, unit) before and after it runs.
    Works from the next forward on, inside `at`; outside of it (evaluation, sampling) nothing is seeded. Default: the
    units of `unit_names`.
    """
    whole = isinstance(module, OptimizedModule)
    return UnitSeeds(module, ("",) if whole else tuple(units) or unit_names(module), seed)
