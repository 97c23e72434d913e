"""What is sent and what is owed is what came in, for every exchange that says what it lost and for all that goes around
one: with unequal weights, and where ranks have none (a rank whose rows hold no label), now or at every second step.

Sums are kept in float64, beside the exchanges, which know nothing of each other's methods here: members are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from exchange import crew
from exchange.test_structure import levels_of
from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Bucket
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import ExchangeState, Outcome
from gossamer.exchange import Exchange
from gossamer.spec.errors import BadInput
from gossamer.sync._group_error import GroupError, stays_of

WHERE = crew.layout({"w": (12, 8), "bias": (9,), "scalar": (), "wide": (3, 17)})
STEPS = 6
FLAT, ISLANDS = (1, 1, 1), ((2, 2), (3, 1), (1, 2))
# By step, in turn; the places are those of ranks, as many as there are.
WEIGHTS: dict[str, tuple[tuple[float, ...], ...]] = {
    "ragged": ((3, 5, 1, 2),),
    "one without": ((3, 0, 1, 2),),
    "in turn": ((0, 5, 1, 2), (0, 0, 7, 0), (2, 2, 0, 0), (1, 0, 0, 3)),
}


def _takes(name: str, kind: str) -> list[str]:
    """The fields of a method that hold another one of that kind."""
    return [f.name for f in fields(exchange_methods.REGISTRY.type(name)) if f.type == kind]


AROUND = [n for n in exchange_methods.names() if {"inner", "inter"} & set(_takes(n, "Exchange"))]
CODED = [n for n in exchange_methods.names() if "codec" in _takes(n, "Codec")]


def members() -> dict[str, Any]:
    """What loses something and says so: every method that stands alone, those with a codec in two codes, and low rank
    with coded factors.
    """
    found: dict[str, Any] = {n: n for n in exchange_methods.names() if n not in (*AROUND, *CODED)}
    found |= {f"{n} of {c}": {n: {"codec": c}} for n in CODED for c in ("sign", "int4")}
    sign = {"two_shot": {"codec": "sign"}}
    found["powersgd of sign"] = {"powersgd": {"rank": 2, "p_exchange": sign}}
    found["powersgd, then sign"] = {"powersgd": {"rank": 2, "q_exchange": sign}}
    found["acp_sgd of sign"] = {"acp_sgd": {"rank": 2, "factor_exchange": sign}}
    found["powersgd of sign twice"] = {"powersgd": {"rank": 2, "p_exchange": sign, "q_exchange": sign}}
    return {name: written for name, written in found.items() if not exchange_methods.build(written).traits.lossless}


MEMBERS = members()


def nested() -> dict[str, Any]:
    """Every member inside everything that goes around another; what refuses that is left out."""
    found: dict[str, Any] = {}
    for outer in AROUND:
        place = next(f for f in ("inner", "inter") if f in _takes(outer, "Exchange"))
        found |= {f"{outer} around {name}": {outer: {place: written}} for name, written in MEMBERS.items()}
    sign = {"two_shot": {"codec": "sign"}}
    inside = {"hierarchical": {"inter": sign, "intra_codec": "int4"}}
    found["error_feedback around islands"] = {"error_feedback": {"inner": inside}}
    found["econtrol around islands"] = {"econtrol": {"inner": inside}}
    found["ef21 around islands"] = {"ef21": {"inner": inside}}
    found["error_feedback around momentum"] = {"error_feedback": {"inner": {"momentum": {"inner": sign}}}}
    found["error_feedback around warmup"] = {"error_feedback": {"inner": {"warmup": {"inner": sign, "steps": 2}}}}
    found["error_feedback around delta_reference"] = {"error_feedback": {"inner": {"delta_reference": {"inner": sign}}}}
    return found


NESTED = nested()


def test_members_are_found() -> None:
    assert {"topk", "powersgd", "acp_sgd", "random_k", "two_shot of sign", "all_gather of int4"} <= set(MEMBERS)
    assert {"powersgd of sign", "powersgd, then sign", "powersgd of sign twice", "acp_sgd of sign"} <= set(MEMBERS)
    assert {"error_feedback", "econtrol", "ef21", "ef21_sgdm", "momentum", "delta_reference", "warmup"} <= set(AROUND)
    assert len(NESTED) > len(AROUND) * len(MEMBERS)


def weights_of(kind: str, step: int, ranks: int) -> Tensor:
    rows = WEIGHTS[kind]
    parts = torch.tensor(rows[step % len(rows)][:ranks], dtype=torch.float64)
    return parts / parts.sum()


class Book:
    """Steps of one exchange; what came in, what was sent and what both weigh, in float64."""

    def __init__(self, written: Any, islands: Sequence[int]) -> None:
        self.one, self.levels, self.ranks = exchange_methods.build(written), levels_of(islands), sum(islands)
        self.states: list[ExchangeState] = [self.one.init(WHERE) for _ in range(self.ranks)]
        self.given = torch.zeros(WHERE.numel, dtype=torch.float64)
        self.sent, self.size = self.given.clone(), 0.0

    def step(self, weights: Tensor, step: int, rate: float) -> tuple[list[Tensor], list[Outcome]]:
        xs = [crew.bucket(WHERE, r, step).flat for r in range(self.ranks)]
        rounds = [replace(crew.at(r, self.ranks, step, rate, self.levels), weights=weights) for r in range(self.ranks)]
        methods = [
            self.one.run(Bucket(WHERE, x.clone()), s, at) for x, s, at in zip(xs, self.states, rounds, strict=True)
        ]
        outcomes = run_lockstep(LocalChannel.world(self.ranks, self.levels), methods)
        mean = sum((w * x.double() for w, x in zip(weights, xs, strict=True)), torch.zeros_like(self.given))
        self.states = [o.state for o in outcomes]
        self.given += rate * mean
        self.sent += rate * outcomes[0].mean.double()
        self.size += rate * float(mean.norm())
        return xs, outcomes

    def total(self, name: str) -> Tensor:
        """The sum over ranks of what their states hold under that name, at whatever depth."""
        found = torch.zeros_like(self.given)
        for state in self.states:
            for path, tensor in state.flatten():
                if path.rpartition("/")[2] == name:
                    found += tensor.double()
        return found


def accounts_for(weights: Tensor, xs: Sequence[Tensor], outcomes: Sequence[Outcome]) -> Tensor:
    """sum_i (w_i kept_i - owed_i)."""
    total = torch.zeros(WHERE.numel, dtype=torch.float64)
    for weight, x, outcome in zip(weights, xs, outcomes, strict=True):
        total += weight * crew.kept(x.double(), outcome)
        if outcome.owed is not None:
            assert float(weight) == 0, "who has weight says what is missing of its own input"
            total -= outcome.owed.double()
    return total


CASES = [(name, islands) for name in (*MEMBERS, *NESTED) for islands in (ISLANDS if "islands" in name else (FLAT,))]
CASES += [(name, islands) for name in NESTED if name.startswith("hierarchical") for islands in ISLANDS[:1]]


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("name", "islands"), CASES, ids=str)
def test_what_was_sent_and_what_is_owed_is_what_came_in(name: str, kind: str, islands: tuple[int, ...]) -> None:
    written = {**MEMBERS, **NESTED}[name]
    book = Book(written, islands)
    try:
        book.one.check(WHERE, book.levels)
    except BadInput:
        pytest.skip("says that it cannot serve this")
    paths = {path.rpartition("/")[2] for path, _ in book.one.init(WHERE).flatten()}
    for step in range(STEPS):
        weights, rate = weights_of(kind, step, book.ranks), 0.1 * (1 + step % 3)
        xs, outcomes = book.step(weights, step, rate)
        assert all(torch.equal(o.mean, outcomes[0].mean) for o in outcomes)
        if not book.one.traits.remembers:
            wanted = accounts_for(weights, xs, outcomes)
            size = float(wanted.norm()) + sum(float(w * x.norm()) for w, x in zip(weights, xs, strict=True))
            assert float((outcomes[0].mean.double() - wanted).norm()) < 1e-5 * size
        if name.startswith(("ef21", "econtrol")):  # what all know of all is the sum of what they know of each
            known = [s.tensors["h"].double() for s in book.states]
            error = float((book.states[0].tensors["agg"].double() - torch.stack(known).sum(0)).norm())
            assert error <= 1e-5 * sum(float(h.norm()) for h in known)
    if "e" in paths and not name.startswith("momentum"):
        assert float((book.sent + book.total("e") - book.given).norm()) < 1e-5 * book.size


def _owing(one: Exchange) -> bool:
    """Whether some rank says that it owes, where the first has no weight.

    Two have: the sum of two decoded messages is no message, while one alone may be encoded again as it was.
    """
    book_levels = levels_of((1, 1, 1))
    weights = torch.tensor([0.0, 0.6, 0.4], dtype=torch.float64)
    rounds = [replace(crew.at(r, 3, levels=book_levels), weights=weights) for r in range(3)]
    methods = [one.run(crew.bucket(WHERE, r), one.init(WHERE), at) for r, at in enumerate(rounds)]
    outcomes = run_lockstep(LocalChannel.world(3, book_levels), methods)
    return any(o.owed is not None and bool(o.owed.any()) for o in outcomes)


def test_only_what_encodes_twice_owes_more_than_its_own() -> None:
    """Else the sums above would prove nothing of it."""
    owing = {n for n in MEMBERS if _owing(exchange_methods.build(MEMBERS[n]))}
    assert owing >= {"two_shot of sign", "two_shot of int4", "powersgd of sign", "powersgd, then sign"}
    assert "acp_sgd of sign" in owing
    assert not owing & {"gather of sign", "topk", "random_k", "acp_sgd", "s2_reducer"}


def test_what_is_owed_of_the_mean_is_no_loss_of_my_own() -> None:
    """Of its own chunk a rank loses nothing, as it travels nowhere: the island it speaks for goes on from what is."""
    one, levels = exchange_methods.build({"two_shot": {"codec": "sign"}}), levels_of(FLAT)
    weights = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    rounds = [replace(crew.at(r, 3, levels=levels), weights=weights) for r in range(3)]
    methods = [one.run(crew.bucket(WHERE, r), ExchangeState(), at) for r, at in enumerate(rounds)]
    first, second, _ = run_lockstep(LocalChannel.world(3, levels), methods)
    chunk = -(-WHERE.numel // 3)
    assert first.lost is not None and first.owed is not None and second.owed is None
    assert not first.lost[:chunk].any() and bool(first.lost[chunk:].any())
    assert bool(first.owed[:chunk].any()) and not first.owed[chunk:].any()


@pytest.mark.parametrize("weights", [(3, 0, 1, 2), (0, 5, 0, 2), (0, 0, 2, 1)], ids=str)
def test_what_stays_with_an_island_is_what_the_mean_lacks(weights: tuple[int, ...]) -> None:
    """The same on all its ranks, whoever of them encoded, had weight or not."""
    one, levels = (
        GroupError(exchange_methods.build({"hierarchical": {"inter": {"two_shot": "sign"}}})),
        levels_of((2, 2)),
    )
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    gone = [crew.bucket(WHERE, island).flat for island in (0, 1)]
    rounds = [replace(crew.at(r, 4, levels=levels), weights=shares) for r in range(4)]
    methods = [one.run(Bucket(WHERE, gone[r // 2].clone()), one.init(WHERE), at) for r, at in enumerate(rounds)]
    outcomes = run_lockstep(LocalChannel.world(4, levels), methods)
    stays = [stays_of(o, 2) for o in outcomes]
    assert all(s is not None and torch.equal(s, stays[r // 2 * 2]) for r, s in enumerate(stays))
    by_island = [float(shares[:2].sum()), float(shares[2:].sum())]
    wanted = torch.zeros(WHERE.numel, dtype=torch.float64)
    for weight, x, stay in zip(by_island, gone, stays[::2], strict=True):
        assert stay is not None
        wanted += weight * x.double() - (weight if weight else 1 / 2) * stay.double()
    torch.testing.assert_close(outcomes[0].mean.double(), wanted, rtol=1e-5, atol=1e-5)
