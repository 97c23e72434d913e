"""Every exchange against its equations in float64, written out by hand: unequal weights that change from step to step,
weights of zero among them, and what is carried from one step to the next. One table; a new member comes with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from exchange import crew
from exchange.test_structure import levels_of
from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Bucket
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import ExchangeState, Outcome

SHAPES = {"w": (12, 10), "bias": (9,), "scalar": (), "wide": (4, 17)}
WHERE = crew.layout(SHAPES)
NUMEL = WHERE.numel
WEIGHTS = ((3.0, 1.0, 2.0), (0.0, 5.0, 2.0), (1.0, 0.0, 0.0), (2.0, 2.0, 0.0), (1.0, 4.0, 3.0))
RATES = (0.1, 0.3, 0.2, 0.2, 0.1)
ZERO = torch.zeros(NUMEL, dtype=torch.float64)


@dataclass(frozen=True)
class Step:
    """What the ranks bring, and what counts. `outcomes`: what the exchange said, where places are drawn at random."""

    xs: list[Tensor]  # float64
    weights: list[float]
    rate: float
    outcomes: list[Outcome]
    first: ExchangeState  # before the first step


Reference: TypeAlias = Callable[[], Iterator[Any]]  # is sent a Step, gives its mean


def summed(xs: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return sum((w * x for w, x in zip(weights, xs, strict=True)), ZERO)


def largest(x: Tensor, fraction: float) -> Tensor:
    k = max(1, round(fraction * x.numel()))
    return torch.where(x.abs() >= x.abs().sort(descending=True).values[k - 1], x, 0.0)


def int8(x: Tensor) -> Tensor:
    """Per block of 256: integers of 127 steps to the largest magnitude, to nearest."""
    blocks = torch.split(x, 256)
    return torch.cat([(b / (top := b.abs().max()) * 127).round() * top / 127 if bool(b.any()) else b for b in blocks])


def exact() -> Iterator[Any]:
    step = yield
    while True:
        step = yield summed(step.xs, step.weights)


def sparse(fraction: float) -> Reference:
    def run() -> Iterator[Any]:
        step = yield
        while True:
            step = yield summed([largest(x, fraction) for x in step.xs], step.weights)

    return run


def agreed_places() -> Iterator[Any]:
    """All ranks send the same places, which are those where none of them has lost anything."""
    step = yield
    while True:
        there = [o.lost == 0 for o in step.outcomes]
        assert all(torch.equal(one, there[0]) for one in there) and 0 < int(there[0].sum()) < NUMEL
        step = yield torch.where(there[0], summed(step.xs, step.weights), 0.0)


def masked() -> Iterator[Any]:
    """Half of either matrix, in the same places at every step; all of a vector and a number."""
    step = yield
    first = step.outcomes[0].lost == 0
    while True:
        assert all(torch.equal(o.lost == 0, first) for o in step.outcomes)
        assert [int(view.sum()) for _, view in Bucket(WHERE, first).slices()] == [60, 9, 1, 34]
        step = yield torch.where(first, summed(step.xs, step.weights), 0.0)


def coded() -> Iterator[Any]:
    step = yield
    while True:
        step = yield summed([int8(x) for x in step.xs], step.weights)


def two_shot() -> Iterator[Any]:
    """Chunk c is summed by rank c, its own numbers as they are, and coded once more."""
    step = yield
    while True:
        chunk, found = -(-NUMEL // 3), []
        rows = [torch.cat((x, torch.zeros(3 * chunk - NUMEL).double())).view(3, chunk) for x in step.xs]
        for owner in range(3):
            known = [row[owner] if r == owner else int8(row[owner]) for r, row in enumerate(rows)]
            found.append(int8(sum(w * k for w, k in zip(step.weights, known, strict=True))))
        step = yield torch.cat(found)[:NUMEL]


def error_feedback() -> Iterator[Any]:
    owed = [ZERO] * 3
    step = yield
    while True:
        units, means = [w * step.rate for w in step.weights], []
        for r, (x, unit) in enumerate(zip(step.xs, units, strict=True)):
            sent = x + owed[r] / unit if unit else x
            kept = largest(sent, 0.25)
            owed[r] = unit * (sent - kept) if unit else owed[r]
            means.append(kept)
        step = yield summed(means, step.weights)


def tracked(*, news: float = 1.0, eta: float = 0.0) -> Reference:
    """EF21; with `news` below 1 of momentum, with `eta` also of what is owed."""

    def run() -> Iterator[Any]:
        known, owed, momentum = [ZERO] * 3, [ZERO] * 3, [ZERO] * 3
        step = yield
        while True:
            for r, (x, w) in enumerate(zip(step.xs, step.weights, strict=True)):
                momentum[r] = (1 - news) * momentum[r] + news * w * x
                sent = (momentum[r] - known[r]) / w + eta * owed[r] / (w * step.rate) if w else ZERO
                known[r] = known[r] + w * largest(sent, 0.25)
                owed[r] = owed[r] + step.rate * (w * x - known[r])
            step = yield torch.stack(known).sum(0)

    return run


def momentum() -> Iterator[Any]:
    before = ZERO
    step = yield
    while True:
        mine = [largest(0.9 * before + 0.1 * x, 0.25) for x in step.xs]
        now = summed(mine, step.weights)
        mean, before = (now - 0.9 * before) / 0.1, now
        step = yield mean


def delta_reference() -> Iterator[Any]:
    reference = ZERO
    step = yield
    while True:
        reference = reference + summed([largest(x - reference, 0.25) for x in step.xs], step.weights)
        step = yield reference


def warm_up() -> Iterator[Any]:
    step = yield
    for mean in (summed(step.xs, step.weights),):
        step = yield mean
    while True:
        step = yield summed([largest(x, 0.25) for x in step.xs], step.weights)


def low_rank(rank: int, *, alternating: bool) -> Reference:
    """Of matrices with more numbers than their factors: projections of the mean. Of a factor its span alone counts."""

    def orthonormal(columns: Tensor) -> Tensor:
        return torch.linalg.qr(columns).Q

    def run() -> Iterator[Any]:
        step = yield
        factors = {n.partition("@")[2]: step.first.tensors[n].double().T for n in step.first.tensors if n[0] == "q"}
        sides = {n: [torch.empty(0), orthonormal(q)] for n, q in factors.items()}
        for turn in range(len(WEIGHTS)):
            mean, start = summed(step.xs, step.weights), 0
            for name, shape in SHAPES.items():
                if name in sides:
                    matrix = mean[start : start + prod(shape)].view(shape)
                    left, right = sides[name]
                    if alternating and turn % 2:  # the right factor is sent, for the left one that all hold
                        product = matrix.T @ left
                        matrix.copy_(left @ product.T)
                        sides[name][1] = orthonormal(product)
                    elif alternating:
                        product = matrix @ right
                        matrix.copy_(product @ right.T)
                        sides[name][0] = orthonormal(product)
                    else:
                        left = orthonormal(matrix @ right)
                        sides[name] = [left, orthonormal(matrix.T @ left)]
                        matrix.copy_(left @ left.T @ matrix)
                start += prod(shape)
            step = yield mean

    return run


TOP = {"topk": {"fraction": 0.25}}
# By method: how it is written, and its equations. Rates and weights are those above.
REFERENCES: dict[str, tuple[Any, Reference]] = {
    "acp_sgd": ({"acp_sgd": {"rank": 2}}, low_rank(2, alternating=True)),
    "delta_reference": ({"delta_reference": {"inner": TOP}}, delta_reference),
    "dense": ("dense", exact),
    "econtrol": ({"econtrol": {"inner": TOP, "eta": 0.1}}, tracked(eta=0.1)),
    "ef21": ({"ef21": {"inner": TOP}}, tracked()),
    "ef21_sgdm": ({"ef21_sgdm": {"inner": TOP, "a": 0.3}}, tracked(news=0.3)),
    "error_feedback": ({"error_feedback": {"inner": TOP}}, error_feedback),
    "all_gather": ({"all_gather": {"codec": "int8"}}, coded),
    "hierarchical": ({"hierarchical": {"inter": "dense"}}, exact),
    "momentum": ({"momentum": {"inner": TOP, "beta": 0.9}}, momentum),
    "powersgd": ({"powersgd": {"rank": 2}}, low_rank(2, alternating=False)),
    "random_blocks": ({"random_blocks": {"fraction": 0.25, "block_size": 8}}, agreed_places),
    "random_k": ({"random_k": {"fraction": 0.25}}, agreed_places),
    "s2_reducer": ("s2_reducer", exact),  # what is not sparse goes as it is
    "sampled_topk": ({"sampled_topk": {"fraction": 0.25}}, sparse(0.25)),  # of so few numbers all are the sample
    "star": ("star", exact),
    "topk": (TOP, sparse(0.25)),
    "recursive_doubling": ("recursive_doubling", exact),
    "two_shot": ({"two_shot": {"codec": "int8"}}, two_shot),
    "uneven_topk": ({"uneven_topk": {"fractions": [0.25]}}, sparse(0.25)),
    "block_sparse": ("block_sparse", exact),
    "static_mask": ({"static_mask": {"sparsity": 0.5}}, masked),
    "warmup": ({"warmup": {"inner": TOP, "steps": 1}}, warm_up),
}
PRESETS = {"byteps_compress", "mem_sgd", "qsgd", "sign_sgd"}  # other members, with their fields set


def test_every_member_has_its_reference() -> None:
    assert set(REFERENCES) == set(exchange_methods.names()) - PRESETS


@pytest.mark.parametrize("name", REFERENCES)
def test_the_mean_is_that_of_the_equations(name: str) -> None:
    written, equations = REFERENCES[name]
    one, reference = exchange_methods.build(written), equations()
    levels = levels_of((2, 1) if name == "hierarchical" else (1, 1, 1))
    first = one.init(WHERE)
    states = [first] * 3
    next(reference)
    for number, (parts, rate) in enumerate(zip(WEIGHTS, RATES, strict=True)):
        weights = torch.tensor(parts, dtype=torch.float64) / sum(parts)
        xs = [crew.bucket(WHERE, r, number).flat for r in range(3)]
        rounds = [replace(crew.at(r, 3, number, rate, levels), weights=weights) for r in range(3)]
        methods = [one.run(Bucket(WHERE, x.clone()), s, at) for x, s, at in zip(xs, states, rounds, strict=True)]
        outcomes = run_lockstep(LocalChannel.world(3, levels), methods)
        states = [o.state for o in outcomes]
        given = Step([x.double() for x in xs], weights.tolist(), rate, outcomes, first)
        wanted = reference.send(given)  # type: ignore[attr-defined]
        torch.testing.assert_close(outcomes[0].mean.double(), wanted, rtol=1e-4, atol=2e-5)
