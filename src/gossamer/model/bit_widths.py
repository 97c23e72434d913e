"""Mixed bit widths of a model's layers: the widths of a training step, and the search for some under a budget.

Schedule of LLM-QFA (Yi et al. 2024, arXiv:2405.20202): were the width of every layer drawn alone, the average over
layers would nearly always be the middle one. So each step has a target average t, which sweeps from the smallest width
to the largest and back in `cycle` steps, and layers draw from the widths of largest entropy whose mean is t; layers in
random order then move by one width while that brings the average over weights closer to t.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gossamer.model.unit_seeds import mix
from gossamer.spec.errors import bad_input

Widths = tuple[int, ...]  # bits of every layer


@dataclass(frozen=True, slots=True)
class BitWidths:
    """The layers whose widths are chosen. `sizes`: weights of each; `widths`: what each may have, rising."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    cycle: int

    def average(self, chosen: Widths) -> float:
        """Return the bits of an integer, averaged over all weights."""
        return sum(n * b for n, b in zip(self.sizes, chosen, strict=True)) / sum(self.sizes)

    def target(self, step: int) -> float:
        """Return the average that a step aims at."""
        phase = (step % self.cycle) / self.cycle
        return self.widths[0] + (self.widths[-1] - self.widths[0]) * (1 - abs(2 * phase - 1))

    def at(self, seed: int, step: int) -> Widths:
        """Return the widths of a step: a function of its arguments alone."""
        return _at(self, seed, step)

    def near(self, target: float, draws: random.Random, *, at_most: bool = False) -> Widths:
        """Draw widths whose average is as near to `target` as single layers can bring it; or no higher than it."""
        shares = _shares(self.widths, target)
        chosen = draws.choices(range(len(self.widths)), shares, k=len(self.sizes))
        order = draws.sample(range(len(self.sizes)), len(self.sizes))
        while True:
            moved = False
            for place in order:
                now = self.average(self._of(chosen))
                other = chosen[place] + (1 if now < target else -1)
                if not 0 <= other < len(self.widths):
                    continue
                after = self.average(self._of([*chosen[:place], other, *chosen[place + 1 :]]))
                if abs(after - target) < abs(now - target):
                    chosen[place], moved = other, True
            if not moved:
                break
        if at_most:
            self._lower(chosen, order, target)
        return self._of(chosen)

    def _lower(self, chosen: list[int], order: Sequence[int], target: float) -> None:
        """Narrow layers until the average is at most `target`."""
        for place in order:
            while chosen[place] and self.average(self._of(chosen)) > target + 1e-9:
                chosen[place] -= 1

    def _of(self, places: Sequence[int]) -> Widths:
        return tuple(self.widths[one] for one in places)


def best_widths(
    layers: BitWidths, budget: float, score: Callable[[Widths], float], *, count: int = 24, seed: int = 0
) -> tuple[Widths, float]:
    """Return the widths of the lowest score whose average is at most `budget`, and that score.

    The first of the `count` candidates is the largest width for all that the budget allows, a third is drawn at random,
    the others narrow up to three layers of the best so far and widen others. Raises BadInput for a budget below the
    smallest width, and for one that is no number.
    """
    if not budget >= layers.widths[0]:
        raise bad_input(
            wanted=f"at least {layers.widths[0]} bits on average, the smallest width that was trained",
            got=f"{budget:g}",
            do=f"give a budget from {layers.widths[0]} to {layers.widths[-1]}",
            key="--budget",
        )
    draws = random.Random(seed)
    tried: dict[Widths, float] = {}

    def best() -> tuple[Widths, float]:
        return min(tried.items(), key=lambda one: (one[1], one[0]))

    for number in range(count):
        if not number:
            widths = (max(one for one in layers.widths if one <= budget),) * len(layers.names)
        elif number <= count // 3:
            widths = layers.near(budget, draws, at_most=True)
        else:
            widths = _changed(layers, best()[0], budget, draws)
        if widths not in tried and layers.average(widths) <= budget + 1e-9:
            tried[widths] = score(widths)
    return best()


def _changed(layers: BitWidths, widths: Widths, budget: float, draws: random.Random) -> Widths:
    """Return widths with one to three layers narrowed, and others in random order widened as the budget allows."""
    changed = list(widths)
    order = draws.sample(range(len(widths)), len(widths))
    narrowed = [one for one in order if changed[one] > layers.widths[0]][: draws.randint(1, 3)]
    for place in narrowed:
        changed[place] = layers.widths[layers.widths.index(changed[place]) - 1]
    for place in order:
        wider = layers.widths.index(changed[place]) + 1
        if place in narrowed or wider == len(layers.widths):
            continue
        before, changed[place] = changed[place], layers.widths[wider]
        if layers.average(tuple(changed)) > budget + 1e-9:
            changed[place] = before
    return tuple(changed)


@lru_cache(maxsize=64)
def _at(layers: BitWidths, seed: int, step: int) -> Widths:
    return layers.near(layers.target(step), random.Random(mix(seed, step, len(layers.names))))


@lru_cache(maxsize=256)
def _shares(widths: tuple[int, ...], mean: float) -> tuple[float, ...]:
    """Return the probabilities of largest entropy with this mean: proportional to r^width."""
    low, high = 1e-6, 1e6
    for _ in range(60):
        middle = (low * high) ** 0.5
        shares = [middle ** (width - widths[0]) for width in widths]
        found = sum(w * s for w, s in zip(widths, shares, strict=True)) / sum(shares)
        low, high = (middle, high) if found < mean else (low, middle)
    whole = sum(shares)
    return tuple(one / whole for one in shares)
