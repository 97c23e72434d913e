"""Outer rules on numbers that can be worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gossamer.spec.errors import BadInput
from gossamer.sync import outer
from gossamer.sync.outer import OuterOptimizer, OuterState, OuterStep

SETTINGS = {"hypergradient": {"hypergradient": {"inner": {"nesterov": {}}}}}


def at(number: int = 0, steps: int = 4, rates: float = 0.4) -> OuterStep:
    return OuterStep(number, steps, rates, (0, number, 0))


def drawn(seed: int, count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(50 * (i + 1), generator=generator) for i in range(count)]


def run(rule: OuterOptimizer, displacements: list[list[Tensor]], rates: float = 0.4) -> tuple[list[Tensor], OuterState]:
    anchor = drawn(99)
    state = rule.init(anchor)
    for number, mean in enumerate(displacements):
        rule.step(anchor, [d.clone() for d in mean], state, at(number, rates=rates))
    return anchor, state


@pytest.mark.parametrize("name", outer.names())
def test_state_is_all_there_is(name: str) -> None:
    """The same numbers from the same state, and slots and numbers are what was announced."""
    rule = outer.build(SETTINGS.get(name, name))
    rounds = [drawn(seed) for seed in range(4)]
    anchor, state = run(rule, rounds)
    assert set(state) == {*rule.slots, *rule.numbers}
    assert all(t.shape == a.shape for slot in rule.slots for t, a in zip(state[slot], anchor, strict=True))
    half, kept = run(rule, rounds[:2])
    kept = {slot: [t.clone() for t in tensors] for slot, tensors in kept.items()}
    for number in (2, 3):
        rule.step(half, rounds[number], kept, at(number))
    assert all(torch.equal(a, b) for a, b in zip(anchor, half, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(anchor, drawn(99), strict=True))


@pytest.mark.parametrize("name", outer.names())
def test_nothing_moves_what_nobody_moved(name: str) -> None:
    rule = outer.build(SETTINGS.get(name, name))
    anchor, _ = run(rule, [[torch.zeros(50), torch.zeros(100)]] * 3)
    assert all(torch.equal(a, b) for a, b in zip(anchor, drawn(99), strict=True))


def test_one_step_of_sign_momentum_is_lion() -> None:
    """With one step of SGD per round the displacement is rate x gradient."""
    rule = outer.build({"sign_momentum": {"b1": 0.9, "b2": 0.99, "lr": 0.5}})
    rate, x, m = 0.1, drawn(99)[0], torch.zeros(50)
    anchor = [x.clone()]
    state = rule.init(anchor)
    for number in range(5):
        gradient = drawn(number)[0]
        rule.step(anchor, [rate * gradient], state, at(number, 1, rate))
        x = x - 0.5 * rate * (0.9 * m + 0.1 * gradient).sign()
        m = 0.99 * m + 0.01 * gradient
        assert torch.allclose(anchor[0], x, atol=1e-6)


def test_rates_inside_a_round_do_not_stretch_a_sign() -> None:
    """Twice the rates, twice the displacement: the same momentum, twice the step."""
    rounds = [drawn(seed) for seed in range(3)]
    rule = outer.build("sign_momentum")
    slow, state = run(rule, rounds, rates=0.4)
    fast, other = run(rule, [[2 * d for d in mean] for mean in rounds], rates=0.8)
    assert all(torch.allclose(a, b) for a, b in zip(state["momentum"], other["momentum"], strict=True))
    for a, b, start in zip(slow, fast, drawn(99), strict=True):
        assert torch.allclose(2 * (a - start), b - start, atol=1e-5)


def test_a_drawn_sign_is_right_on_average() -> None:
    rule = outer.build({"sign_momentum": {"randomized": True, "b1": 0.0}})
    gradient = torch.tensor([1.0, -0.5, 0.25, 0.0])
    total = torch.zeros(4)
    for number in range(4000):
        anchor = [torch.zeros(4)]
        rule.step(anchor, [gradient], rule.init(anchor), OuterStep(number, 1, 1.0, (0, number, 0)))
        total -= anchor[0]
    assert torch.allclose(total / 4000, gradient, atol=0.08)  # five standard errors
    assert total[3] == 0


def test_stale_momentum_trusts_what_is_near() -> None:
    plain, _ = run(outer.build({"stale_momentum": {"gap": 0.0, "momentum": 0.0}}), [drawn(1), drawn(2)])
    wary, state = run(outer.build({"stale_momentum": {"momentum": 0.0}}), [drawn(1), drawn(2)])
    before, second = [a - b for a, b in zip(drawn(99), drawn(1), strict=True)], drawn(2)
    went = math.sqrt(sum(float(d.square().sum()) for d in drawn(1)))
    moved = math.sqrt(sum(float(d.square().sum()) for d in second))
    for x, start, d in zip(wary, before, second, strict=True):
        assert torch.allclose(x, start - d / (1 + went / moved), atol=1e-5)
    for x, start, d in zip(plain, before, second, strict=True):
        assert torch.allclose(x, start - d, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(state["before"], before, strict=True))


def test_stale_momentum_is_clipped() -> None:
    _, state = run(outer.build({"stale_momentum": {"clip": 0.3}}), [drawn(1), drawn(2)])
    assert all(float(m.abs().max()) == pytest.approx(0.3) for m in state["momentum"])


@pytest.mark.parametrize(("turns", "wanted"), [((1, 1, 1, 1), "up"), ((1, -1, 1, -1), "down")])
def test_a_hypergradient_follows_agreement(turns: tuple[int, ...], wanted: str) -> None:
    rule = outer.build({"hypergradient": {"inner": "average", "of": "inner", "kappa": 1.0}})
    anchor = drawn(99)
    state, factors = rule.init(anchor), [1.0]
    for number in range(8):
        rule.step(anchor, [turns[number % 4] * d for d in drawn(1)], state, at(number))
        factors.append(rule.inner_factor(state))
    assert factors[1] == 1.0  # there was no round before
    if wanted == "up":
        assert all(later > earlier or later > 4.99 for earlier, later in pairwise(factors[1:]))
    assert factors[-1] == pytest.approx(5.0 if wanted == "up" else 0.2)


def test_rounds_at_right_angles_leave_a_hypergradient_where_it_is() -> None:
    rule = outer.build({"hypergradient": {"inner": "average", "of": "inner"}})
    anchor = [torch.zeros(2)]
    state = rule.init(anchor)
    for number in range(6):
        rule.step(anchor, [torch.tensor([1.0, 0.0]) if number % 2 else torch.tensor([0.0, 1.0])], state, at(number))
    assert rule.inner_factor(state) == 1.0


def test_a_hypergradient_multiplies_what_the_inner_rule_does() -> None:
    rule = outer.build({"hypergradient": {"inner": {"nesterov": {"lr": 0.5, "momentum": 0.0}}, "kappa": 0.3}})
    anchor, _ = run(rule, [drawn(1), drawn(1)])
    for x, start, d in zip(anchor, drawn(99), drawn(1), strict=True):
        assert torch.allclose(x, start - 0.5 * d - math.exp(0.3) * 0.5 * d, atol=1e-5)


def test_one_hypergradient_inside_another_is_refused() -> None:
    inner = {"hypergradient": {"of": "inner", "inner": "average"}}
    with pytest.raises(BadInput, match="an inner outer optimizer other than hypergradient"):
        outer.build({"hypergradient": {"inner": inner}})
