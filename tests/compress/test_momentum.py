"""Momentum around an exchange: the same mean where nothing is lost, and the code's momentum where something is."""

from __future__ import annotations

import torch

from compress.crew import bucket, layout, steps_in_lockstep, weights, world
from gossamer import compress
from gossamer.optim.adamw import AdamW
from gossamer.optim.one_bit_adam import OneBitAdam

SIGNS = {"error_feedback": {"inner": {"two_shot": {"codec": "sign"}}, "track_lr": False}}


def test_around_dense_it_is_the_mean() -> None:
    where = layout()
    for step, outcomes in enumerate(steps_in_lockstep(compress.build({"momentum": "dense"}), 3, 6, where)):
        wanted = sum(w * bucket(where, r, step).flat for r, w in enumerate(weights(3).tolist()))
        for one in outcomes:
            assert torch.allclose(one.mean, wanted, atol=1e-5)


def test_what_a_rule_makes_of_it_is_the_momentum_that_crossed() -> None:
    """m <- beta m + (1 - beta) mean, whatever the code lost, on all ranks alike."""
    where = layout()
    one = compress.build({"momentum": {"inner": SIGNS, "beta": 0.8}})
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
    one, other = OneBitAdam(lr=1e-2, freeze=4, floor=0.0), AdamW(lr=1e-2)
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


def test_what_never_had_a_gradient_does_not_explode() -> None:
    """A row nobody used before the freeze stays; one that was hardly used moves no further than the floor lets it."""
    rule = OneBitAdam(lr=1e-2, freeze=5, weight_decay=0.0)
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
