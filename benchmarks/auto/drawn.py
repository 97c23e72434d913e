"""Draw models, ranks and links at random, to compare `auto` with uniform settings on points that nobody has chosen.

It shares no code with gossamer. Ranks, rates, latencies and speedups are drawn evenly in their logarithms; a rank count
is as often a power of two as not. A third of the draws have islands of several ranks, whose own links are faster; half
of these have islands of several sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

LINKS = 3  # drawn for each model and number of ranks, as timing the encoding takes longest
_MOST_NUMEL = 2e7
_FORWARD_COSTS = 3.0  # factor by which the compute of two tensors of one size differs at most, in both directions


@dataclass(frozen=True, slots=True)
class Model:
    """A model: the shapes of its parameters, what each costs to compute, and the seconds of a step."""

    kind: str
    shapes: Mapping[str, tuple[int, ...]]
    costs: Mapping[str, float]
    compute_s: float


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a point, and what its device is faster by. `near`: rate and latency inside islands."""

    rate: float  # bits per second
    latency_s: float
    speedup: float
    near: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Draw:
    """A model on some ranks, and several kinds of links between them.

    `islands`: the ranks of each; one of all of them where all links are alike.
    """

    model: Model
    islands: tuple[int, ...]
    links: tuple[Links, ...]


def draw(rng: Random) -> Draw:
    """Return one draw."""
    islands: tuple[int, ...] = (_ranks(rng, 1024),)
    if rng.random() < 1 / 3:
        sizes = (2, 3, 4, 8) if rng.random() < 0.5 else (rng.choice((2, 3, 4, 8)),)
        islands = tuple(rng.choice(sizes) for _ in range(_ranks(rng, 32)))
    return Draw(model(rng), islands, tuple(_links(rng) for _ in range(LINKS)))


def model(rng: Random) -> Model:
    """Return a model of a kind drawn from `KINDS`, of 10,000 to 20 million parameters."""
    kind = rng.choice([*KINDS])
    shapes = KINDS[kind](rng, _even(rng, 1e4, _MOST_NUMEL))
    costs = {name: _numel(shape) * _even(rng, 1 / _FORWARD_COSTS, _FORWARD_COSTS) for name, shape in shapes.items()}
    return Model(kind, shapes, costs, compute_s=_even(rng, 0.05, 5.0))


def _many(rng: Random, numel: float) -> dict[str, tuple[int, ...]]:
    """Many small tensors: matrices, each with a bias and a norm."""
    count = rng.randint(40, 300)
    width = max(4, int((numel / count) ** 0.5))
    found = dict[str, tuple[int, ...]]()
    for layer in range(count):
        rows = max(1, int(width * _even(rng, 0.5, 2.0)))
        found |= {f"{layer}.weight": (rows, width), f"{layer}.bias": (rows,), f"{layer}.norm": (width,)}
    return found


def _one(rng: Random, numel: float) -> dict[str, tuple[int, ...]]:
    """A tensor of nine tenths of all, anywhere among small ones."""
    small = _many(rng, numel / 10)
    width = max(4, int((numel / 10) ** 0.5))
    place, names = rng.randint(0, len(small)), list(small)
    most = {"most.weight": (max(1, int(0.9 * numel / width)), width)}
    return {n: small[n] for n in names[:place]} | most | {n: small[n] for n in names[place:]}


def _untied(rng: Random, numel: float) -> dict[str, tuple[int, ...]]:
    """Lookup rows, blocks and a head as large as the rows."""
    width = max(8, int((numel / 40) ** 0.5))
    rows = max(8, int(numel * rng.uniform(0.1, 0.4) / width))
    return {"rows.weight": (rows, width), **_blocks(rng, numel - 2 * rows * width, width), "head.weight": (rows, width)}


def _tied(rng: Random, numel: float) -> dict[str, tuple[int, ...]]:
    """Rows that are the head as well, whose gradient is ready last, and blocks."""
    width = max(8, int((numel / 40) ** 0.5))
    rows = max(8, int(numel * rng.uniform(0.1, 0.5) / width))
    return {"rows.weight": (rows, width), **_blocks(rng, numel - rows * width, width)}


def _blocks(rng: Random, numel: float, width: int) -> dict[str, tuple[int, ...]]:
    found = dict[str, tuple[int, ...]]()
    for block in range(max(1, int(numel / (12 * width * width)))):
        for name, (out, into) in {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}.items():
            found[f"{block}.{name}.weight"] = (out * width, into * width)
            found[f"{block}.{name}.bias"] = (out * width,)
    return found


def _few(rng: Random, numel: float) -> dict[str, tuple[int, ...]]:
    """A handful of tensors of any size."""
    found, parts = dict[str, tuple[int, ...]](), [_even(rng, 0.01, 1.0) for _ in range(rng.randint(1, 6))]
    for number, part in enumerate(parts):
        width = max(2, int((numel * part / sum(parts)) ** 0.5 * _even(rng, 0.3, 3.0)))
        found[f"{number}.weight"] = (max(1, int(numel * part / sum(parts) / width)), width)
    return found


KINDS = {"many": _many, "one": _one, "untied": _untied, "tied": _tied, "few": _few}


def _ranks(rng: Random, most: int) -> int:
    found = max(2, round(_even(rng, 2, most)))
    return 1 << (found.bit_length() - 1) if rng.random() < 0.5 else found


def _links(rng: Random) -> Links:
    rate, latency_s = _even(rng, 1e7, 4e11), _even(rng, 5e-5, 0.1)
    near = rate * _even(rng, 3.0, 100.0), latency_s / _even(rng, 3.0, 100.0)
    return Links(rate, latency_s, _even(rng, 1.0, 33.0), near)


def _even(rng: Random, low: float, high: float) -> float:
    """Return a number whose logarithm is drawn evenly."""
    return float(low * (high / low) ** rng.random())


def _numel(shape: tuple[int, ...]) -> int:
    found = 1
    for one in shape:
        found *= one
    return found
