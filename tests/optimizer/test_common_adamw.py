"""AdamW on islands that divide by what they all know, against AdamW of the mean gradient."""

from __future__ import annotations

import pytest
import torch

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer.adamw import AdamW
from gossamer.optimizer.common_adamw import CommonAdamW
from gossamer.optimizer.sgd import SGD
from gossamer.spec.errors import BadInput

Tensors = dict[str, torch.Tensor]
INNER = AdamW(lr=0.01, betas=(0.9, 0.99))


def some(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in {"w": (7, 5), "b": (5,)}.items()}


def copy(tensors: Tensors) -> Tensors:
    return {name: t.clone() for name, t in tensors.items()}


def mean(of: list[Tensors], parts: list[float]) -> Tensors:
    return {name: sum(p * one[name] for p, one in zip(parts, of, strict=True)) for name in of[0]}  # type: ignore[misc]


def close(a: Tensors, b: Tensors, tolerance: float = 1e-6) -> bool:
    return all(torch.allclose(a[n], b[n], rtol=tolerance, atol=tolerance) for n in a)


def test_where_all_meet_it_is_adamw_and_what_is_common_is_what_it_knows() -> None:
    rule, params = CommonAdamW(inner=INNER, part=0.5), some(0)
    plain, state, other = copy(params), rule.init(params), INNER.init(params)
    for step in range(4):
        rule.update(params, some(step + 1), state, lr_scale=1.0, step=step)
        INNER.update(plain, some(step + 1), other, lr_scale=1.0, step=step)
    assert all(torch.equal(params[n], plain[n]) for n in params)
    for name, square in rule.second_moments(state, step=4).items():
        assert torch.equal(state[name]["common"], square)
        assert torch.allclose(square, other[name]["square"] / (1 - 0.99**4))


def test_alone_it_is_adamw() -> None:
    """One island has nobody to learn from: what it was told once, or knew when all met, must not rest for ever."""
    rule, params = CommonAdamW(inner=INNER), some(0)
    plain, state, other = copy(params), rule.init(params), INNER.init(params)
    rule.learn({name: torch.full_like(p, 7.0) for name, p in params.items()}, state)
    for step in range(6):
        move = rule.update if step == 2 else rule.update_apart
        move(params, some(step + 1), state, lr_scale=0.5, step=step)
        INNER.update(plain, some(step + 1), other, lr_scale=0.5, step=step)
    assert all(torch.equal(params[n], plain[n]) for n in params)


@pytest.mark.parametrize("parts", [[0.5, 0.5], [0.75, 0.25], [0.25] * 4])
def test_the_mean_of_the_islands_steps_is_the_step_of_their_mean(parts: list[float]) -> None:
    """From one point, with one `common`: AdamW's step of the mean gradient over the root of `common`."""
    rules = [CommonAdamW(inner=INNER, part=part) for part in parts]
    start, common = some(0), {n: t.square() + 20.0 for n, t in some(50).items()}
    ends, grads = [], [some(10 + i) for i in range(len(parts))]
    for rule, grad in zip(rules, grads, strict=True):
        params, state = copy(start), rule.init(start)
        rule.learn(common, state)
        rule.update_apart(params, grad, state, lr_scale=1.0, step=0)
        ends.append(params)
    mine = mean(grads, parts)
    for name, end in mean(ends, parts).items():
        kept = start[name] * (1 - 0.01 * 0.1 * (start[name].dim() > 1))
        wanted = kept - 0.01 * mine[name] / (common[name].sqrt() + 1e-8)
        assert torch.allclose(end, wanted, rtol=1e-5, atol=1e-6)


def test_noise_that_meets_is_what_the_mean_gradient_has() -> None:
    """Islands of 3/4 and 1/4 of the samples: the mean of what they say is the second moment of the mean gradient, and
    so is what each of them goes by until then.
    """
    parts, steps, numel = [0.75, 0.25], 400, 2000
    rules = [CommonAdamW(inner=AdamW(lr=1e-9, betas=(0.9, 0.999)), part=part) for part in parts]
    params = {"w": torch.zeros(numel)}
    states, generator, seen = [rule.init(params) for rule in rules], torch.Generator().manual_seed(0), 0.0
    for step in range(steps):
        grads = [torch.randn(numel, generator=generator) / part**0.5 for part in parts]  # of fewer samples: noisier
        seen += float(sum(p * g for p, g in zip(parts, grads, strict=True)).square().mean()) / steps  # type: ignore[union-attr]
        for rule, state, grad in zip(rules, states, grads, strict=True):
            rule.update_apart(params, {"w": grad}, state, lr_scale=1.0, step=step)
    each = [dict(rule.second_moments(state, step=steps)) for rule, state in zip(rules, states, strict=True)]
    assert float(mean(each, parts)["w"].mean()) == pytest.approx(seen, rel=0.02)
    assert [float(one["w"].mean()) for one in each] == pytest.approx([seen, seen], rel=0.02)


def test_what_nobody_had_seen_does_not_explode() -> None:
    """A gradient of 1 where what is common says 1e-12: as far as AdamW of all islands would go, and no further."""
    rule = CommonAdamW(inner=INNER, part=0.25)
    params = {"w": torch.zeros(3)}
    state = rule.init(params)
    rule.learn({"w": torch.tensor([1e-12, 1.0, 0.0])}, state)
    rule.update_apart(params, {"w": torch.ones(3)}, state, lr_scale=1.0, step=0)
    assert params["w"].tolist() == pytest.approx([-0.01 / 0.25, -0.01, -0.01 / 0.5], rel=1e-4)


def test_an_island_that_has_made_no_step_says_that_it_has_seen_nothing() -> None:
    """And says it: the others wait for its message."""
    rule, params = CommonAdamW(inner=INNER, part=0.5), some(0)
    found = rule.second_moments(rule.init(params), step=0)
    assert found.keys() == params.keys() and not any(float(t.abs().sum()) for t in found.values())


def test_bad_input() -> None:
    with pytest.raises(BadInput, match="adamw, whose second moments"):
        CommonAdamW.around(SGD(), 0.5)
    with pytest.raises(BadInput, match="above 0"):
        CommonAdamW(part=0.0)


def test_other_rules_say_nothing() -> None:
    rule: Optimizer = SGD()
    state: OptimizerState = rule.init(some(0))
    assert not rule.second_moments(state, step=3)
    rule.learn({}, state)
