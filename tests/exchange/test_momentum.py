"""Momentum around an exchange: the same mean where nothing is lost, and the code's momentum where something is."""

from __future__ import annotations

import torch

from exchange.crew import bucket, layout, steps_in_lockstep, weights, world
from gossamer import exchange as exchange_methods
from gossamer.optimizer.adamw import AdamW
from gossamer.optimizer.lamb import Lamb
from gossamer.optimizer.one_bit_adam import OneBitAdam
from gossamer.optimizer.one_bit_lamb import OneBitLamb

SIGNS = {"error_feedback": {"inner": {"two_shot": {"codec": "sign"}}, "track_lr": False}}


def test_around_dense_it_is_the_mean() -> None:
    where = layout()
    for step, outcomes in enumerate(steps_in_lockstep(exchange_methods.build({"momentum": "dense"}), 3, 6, where)):
        wanted = sum(w * bucket(where, r, step).flat for r, w in enumerate(weights(3).tolist()))
        for one in outcomes:
            assert torch.allclose(one.mean, wanted, atol=1e-5)


def test_what_a_rule_makes_of_it_is_the_momentum_that_crossed() -> None:
    """m <- beta m + (1 - beta) mean, whatever the code lost, on all ranks alike."""
    where = layout()
    one = exchange_methods.build({"momentum": {"inner": SIGNS, "beta": 0.8}})
    states, m = [one.init(where) for _ in range(3)], torch.zeros(where.numel)
    for step in range(6):
        outcomes, _ = world(one, 3, [bucket(where, r, step) for r in range(3)], states, step)
        states = [o.state for o in outcomes]
        m = 0.8 * m + 0.2 * outcomes[0].mean
        assert all(torch.equal(o.state.tensors["momentum"], states[0].tensors["momentum"]) for o in outcomes)
        assert torch.allclose(m, states[0].tensors["momentum"], atol=1e-5)


def test_before_the_freeze_it_is_adam_and_after_it_the_second_moment_stays() -> None:
    generator = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(30, 4, generator=generator), "b": torch.randn(4, generator=generator)}
    ours, theirs = ({n: t.clone() for n, t in start.items()} for _ in range(2))
    one, other = OneBitAdam(lr=1e-2, freeze_step=4, floor=0.0), AdamW(lr=1e-2)
    state, kept = one.init(ours), other.init(theirs)
    for step in range(8):
        grads = {n: torch.randn(t.shape, generator=generator) for n, t in start.items()}
        before = {n: t.clone() for n, t in ours.items()}
        one.update(ours, grads, state, lr_scale=1.0, step=step)
        if step < 4:
            other.update(theirs, grads, kept, lr_scale=1.0, step=step)
            assert all(torch.equal(ours[n], theirs[n]) for n in ours)
            continue
        for name, decay in (("w", 0.1), ("b", 0.0)):
            slots, frozen = state[name], kept[name]["square"]
            assert torch.equal(slots["square"], frozen)
            below = (frozen / (1 - 0.95**4)).sqrt() + 1e-8
            wanted = before[name] * (1 - 1e-2 * decay) - 1e-2 * slots["mean"] / (1 - 0.9 ** (step + 1)) / below
            assert torch.allclose(ours[name], wanted, atol=1e-6)


def test_before_the_freeze_it_is_lamb_and_after_it_its_paper_s() -> None:
    """In float64, element by element, as the paper and its authors' code have it; the vector as in Adam."""
    generator = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(30, 4, generator=generator), "b": torch.randn(4, generator=generator)}
    ours, theirs = ({n: t.clone() for n, t in start.items()} for _ in range(2))
    one, other = OneBitLamb(lr=1e-2, freeze_step=4, floor=0.0), Lamb(lr=1e-2)
    state, kept = one.init(ours), other.init(theirs)
    average, factor = 0.0, 1.0
    for step in range(40):
        grads = {n: torch.randn(t.shape, generator=generator) * (1 + step / 10) for n, t in start.items()}
        before = {n: t.double() for n, t in ours.items()}
        m = {n: 0.9 * state[n]["mean"].double() + 0.1 * g for n, g in grads.items()}
        one.update(ours, grads, state, lr_scale=1.0, step=step)
        if step < 4:
            other.update(theirs, grads, kept, lr_scale=1.0, step=step)
            assert all(torch.equal(ours[n], theirs[n]) for n in ours)
            u = m["w"] / (1 - 0.9 ** (step + 1))
            u = u / ((kept["w"]["square"].double() / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6) + 0.01 * before["w"]
            average = 0.9 * average + 0.1 * float(min(before["w"].norm(), 10.0) / u.norm())
            fresh = {n: kept[n]["square"].double() for n in ours}
            continue
        for name, decay in (("w", 0.01), ("b", 0.0)):
            frozen = kept[name]["square"].double()
            assert torch.equal(state[name]["square"], kept[name]["square"])
            fresh[name] = 0.999 * fresh[name] + 0.001 * grads[name].double() ** 2
            below = (frozen / (1 - 0.999**4)).sqrt() + 1e-6
            now = (fresh[name] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6
            adam = m[name] / (1 - 0.9 ** (step + 1)) / below
            u, c = adam + decay * before[name], 1.0
            if name == "w":
                part = min(1.0, float(adam.norm() / u.norm()))
                wanted = min(max(part * float((below / now).max()) + 1 - part, 0.5), 4.0)
                factor = min(max(wanted, 0.9 * factor), 1.1 * factor)
                assert abs(float(state["w"]["factor"]) - factor) < 1e-5
                c = factor * average / (1 - 0.9**4)
            assert torch.allclose(ours[name].double(), before[name] - 1e-2 * c * u, atol=1e-6)
    assert factor != 1.0


def test_what_never_had_a_gradient_does_not_explode() -> None:
    """A row nobody used before the freeze stays; one that was hardly used moves no further than the floor lets it."""
    rule = OneBitAdam(lr=1e-2, freeze_step=5, weight_decay=0.0)
    params = {"w": torch.zeros(3, 100)}
    state = rule.init(params)
    for step in range(5):
        rule.update(params, {"w": torch.tensor([[1.0], [1e-6], [0.0]]).expand(3, 100)}, state, lr_scale=1.0, step=step)
    before = params["w"].clone()
    rule.update(params, {"w": torch.ones(3, 100)}, state, lr_scale=1.0, step=5)
    moved = (params["w"] - before).abs().amax(1)
    assert 0 < moved[0] < 0.02
    assert 0 < moved[1] < 0.1
    assert moved[2] == 0
