"""Update rules against torch.optim and against ten lines of numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from gossamer import optimizer as optimizer_methods
from gossamer.optimizer.adamw import AdamW
from gossamer.optimizer.lamb import Lamb
from gossamer.optimizer.lans import Lans
from gossamer.optimizer.lars import Lars
from gossamer.optimizer.sgd import SGD
from gossamer.optimizer.zero_one_adam import ZeroOneAdam
from gossamer.spec.errors import BadInput

SHAPES = {"embed": (50, 16), "block.w": (33, 7), "block.b": (33,), "norm": (16,), "scale": (), "odd": (3, 5, 2)}
Tensors = dict[str, torch.Tensor]


def start() -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}


def gradients(steps: int) -> Iterator[Tensors]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        yield {n: torch.randn(s, generator=generator) * 0.1 for n, s in SHAPES.items()}


def ours(rule: optimizer_methods.Optimizer, steps: int = 20) -> Tensors:
    params = start()
    state = rule.init(params)
    for step, grads in enumerate(gradients(steps)):
        rule.update(params, grads, state, lr_scale=1.0 / (1 + step), step=step)
    return params


def theirs(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], lr: float, steps: int = 20) -> Tensors:
    params = {n: torch.nn.Parameter(p) for n, p in start().items()}
    optimizer = make(list(params.values()))
    for step, grads in enumerate(gradients(steps)):
        for group in optimizer.param_groups:
            group["lr"] = lr / (1 + step)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
    return {n: p.detach() for n, p in params.items()}


def split(params: list[torch.nn.Parameter]) -> list[dict]:
    return [{"params": [p for p in params if p.ndim >= 2]}, {"params": [p for p in params if p.ndim < 2]}]


def adamw(params: list[torch.nn.Parameter], **more: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **more)


def equal(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(a[n], b[n]) for n in SHAPES)


def test_adamw_is_torchs_fused_bit_for_bit() -> None:
    assert equal(ours(AdamW(lr=1e-2, decay_1d=True)), theirs(lambda p: adamw(p, fused=True), 1e-2))


def test_adamw_leaves_vectors_undecayed() -> None:
    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = adamw(split(params), fused=True)
        optimizer.param_groups[1]["weight_decay"] = 0.0
        return optimizer

    assert equal(ours(AdamW(lr=1e-2)), theirs(make, 1e-2))
    assert not equal(ours(AdamW(lr=1e-2)), ours(AdamW(lr=1e-2, decay_1d=True)))


def test_adamw_is_torchs_plain_one_but_for_rounding() -> None:
    """The fused kernel rounds in another order: a few units in the last place of float32 per step."""
    a, b = ours(AdamW(lr=1e-2, decay_1d=True)), theirs(lambda p: adamw(p, fused=False, foreach=False), 1e-2)
    for name in SHAPES:
        torch.testing.assert_close(a[name], b[name], rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("fields", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_sgd_is_torchs(fields: dict) -> None:
    """Bit for bit the fused one; the plain one rounds the products that the fused one adds unrounded."""

    def theirs_by(fused: bool) -> Tensors:
        more = {"weight_decay": 0.01, "fused": fused, "foreach": False, **fields}
        return theirs(lambda p: torch.optim.SGD(p, lr=0.1, **more), 0.1)

    got = ours(SGD(lr=0.1, weight_decay=0.01, **fields))
    assert equal(got, theirs_by(fused=True))
    for name, plain in theirs_by(fused=False).items():
        torch.testing.assert_close(got[name], plain, rtol=1e-6, atol=2e-7)


def test_adamw_against_numpy() -> None:
    w = {n: p.double().numpy() for n, p in start().items()}
    m = {n: np.zeros(s) for n, s in SHAPES.items()}
    v = {n: np.zeros(s) for n, s in SHAPES.items()}
    for t, grads in enumerate(gradients(2), start=1):
        for n, g in ((n, g.double().numpy()) for n, g in grads.items()):
            a = 1e-2 / t
            w[n] = w[n] * (1 - a * (0.1 if w[n].ndim >= 2 else 0))
            m[n], v[n] = 0.9 * m[n] + 0.1 * g, 0.95 * v[n] + 0.05 * g * g
            w[n] = w[n] - a * (m[n] / (1 - 0.9**t)) / (np.sqrt(v[n] / (1 - 0.95**t)) + 1e-8)
    for n, p in ours(AdamW(lr=1e-2), 2).items():
        np.testing.assert_allclose(p.numpy(), w[n], rtol=1e-5, atol=1e-6)


def test_nesterov_against_numpy() -> None:
    w = {n: p.double().numpy() for n, p in start().items()}
    m = {n: np.zeros(s) for n, s in SHAPES.items()}
    for t, grads in enumerate(gradients(2), start=1):
        for n, g in ((n, g.double().numpy()) for n, g in grads.items()):
            g = g + 0.01 * w[n]
            m[n] = 0.9 * m[n] + g
            w[n] = w[n] - 0.1 / t * (g + 0.9 * m[n])
    rule = optimizer_methods.build({"nesterov": {"weight_decay": 0.01}})
    assert rule == SGD(momentum=0.9, nesterov=True, weight_decay=0.01)
    for n, p in ours(rule, 2).items():
        np.testing.assert_allclose(p.numpy(), w[n], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"adamw": {"lr": 0}}, "adamw.lr"),
        ({"adamw": {"lr": -1e-3}}, "adamw.lr"),
        ({"adamw": {"lr": float("nan")}}, "adamw.lr"),
        ({"adamw": {"betas": [0.9, 1.0]}}, "adamw.betas"),
        ({"adamw": {"betas": [-0.1, 0.9]}}, "adamw.betas"),
        ({"adamw": {"eps": 0}}, "adamw.eps"),
        ({"adamw": {"weight_decay": -1}}, "adamw.weight_decay"),
        ({"one_bit_lamb": {"freeze_step": 0}}, "one_bit_lamb.freeze_step"),
        ({"one_bit_lamb": {"coeff_beta": 1}}, "one_bit_lamb.coeff_beta"),
        ({"one_bit_lamb": {"factor_min": 5}}, "one_bit_lamb.factor_min"),
        ({"zero_one_adam": {"floor": -1}}, "zero_one_adam.floor"),
        ({"sgd": {"lr": 0}}, "sgd.lr"),
        ({"sgd": {"momentum": 1}}, "sgd.momentum"),
        ({"sgd": {"nesterov": True}}, "sgd.momentum"),
        ({"sgd": {"weight_decay": float("inf")}}, "sgd.weight_decay"),
    ],
)
def test_impossible_values_are_named(written: dict, key: str) -> None:
    with pytest.raises(BadInput) as caught:
        optimizer_methods.build(written, key="train.optimizer")
    assert caught.value.key == f"train.optimizer.{key}"


def by_layer(move: Callable[[int, dict[str, np.ndarray], np.ndarray, np.ndarray, bool], np.ndarray]) -> Tensors:
    """Twenty steps of a rule that is written for one tensor, in float64."""
    params = {n: t.double().numpy() for n, t in start().items()}
    kept: dict[str, dict[str, np.ndarray]] = {n: {} for n in params}
    for step, grads in enumerate(gradients(20)):
        for name, w in params.items():
            moved = move(step, kept[name], w, grads[name].double().numpy(), w.ndim >= 2)
            params[name] = w - moved / (1 + step)
    return {n: torch.as_tensor(w) for n, w in params.items()}


def close(a: Tensors, b: Tensors) -> bool:
    return all(torch.allclose(a[n].double(), b[n], rtol=1e-5, atol=1e-6) for n in SHAPES)


def adam_parts(step: int, kept: dict[str, np.ndarray], g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(m, sqrt(v) + eps), both without bias."""
    kept["m"] = 0.9 * kept.get("m", 0 * g) + 0.1 * g
    kept["v"] = 0.999 * kept.get("v", 0 * g) + 0.001 * g * g
    return kept["m"] / (1 - 0.9 ** (step + 1)), np.sqrt(kept["v"] / (1 - 0.999 ** (step + 1))) + 1e-6


def scaled(w: np.ndarray, u: np.ndarray) -> np.ndarray:
    return min(np.linalg.norm(w), 10.0) / np.linalg.norm(u) * u


def test_lamb_is_its_paper_s() -> None:
    def move(step: int, kept: dict, w: np.ndarray, g: np.ndarray, adapts: bool) -> np.ndarray:
        m, below = adam_parts(step, kept, g)
        u = m / below
        return 1e-2 * (scaled(w, u + 0.01 * w) if adapts else u)

    assert close(ours(Lamb(lr=1e-2)), by_layer(move))


def test_lans_is_its_paper_s() -> None:
    def move(step: int, kept: dict, w: np.ndarray, g: np.ndarray, adapts: bool) -> np.ndarray:
        g = g / np.linalg.norm(g)
        m, below = adam_parts(step, kept, g)
        if not adapts:
            return 1e-2 * (0.9 * m / below + 0.1 * g / below)
        return 1e-2 * (0.9 * scaled(w, m / below + 0.01 * w) + 0.1 * scaled(w, g / below + 0.01 * w))

    assert close(ours(Lans(lr=1e-2)), by_layer(move))


def test_lars_is_its_paper_s() -> None:
    params = {n: t.double().numpy() for n, t in start().items()}
    momenta = {n: 0 * w for n, w in params.items()}
    for step, grads in enumerate(gradients(20)):
        for name, w in params.items():
            g = grads[name].double().numpy()
            if w.ndim >= 2:
                g = g + 5e-4 * w
                g = 0.02 * np.linalg.norm(w) / np.linalg.norm(g) * g
            momenta[name] = 0.9 * momenta[name] + g / (1 + step)
            params[name] = w - momenta[name]
    assert close(ours(Lars(lr=1.0, trust_coefficient=0.02)), {n: torch.as_tensor(w) for n, w in params.items()})


@pytest.mark.parametrize("rule", [Lamb(), Lans(), Lars()])
def test_a_layer_without_gradient_or_size_is_no_division_by_zero(rule: optimizer_methods.Optimizer) -> None:
    params = {"still": torch.ones(3, 3), "zero": torch.zeros(3, 3)}
    rule.update(params, {"still": torch.zeros(3, 3), "zero": torch.ones(3, 3)}, rule.init(params), lr_scale=1.0, step=0)
    assert all(bool(p.isfinite().all()) for p in params.values())
    assert bool((params["zero"].abs() > 0.0009).all())  # at its own rate, and not at a part of nothing


@pytest.mark.parametrize("rule", [Lamb(weight_decay=0.0), Lans(weight_decay=0.0)])
def test_the_size_of_a_gradient_does_not_matter(rule: optimizer_methods.Optimizer) -> None:
    found = []
    for size in (1.0, 1000.0):
        params = start()
        state = rule.init(params)
        for step, grads in enumerate(gradients(5)):
            rule.update(params, {n: size * g for n, g in grads.items()}, state, lr_scale=1.0, step=step)
        found.append(params)
    assert all(torch.allclose(found[0][n], found[1][n], atol=1e-4) for n in SHAPES)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_after_a_round_of_one_step_zero_one_adam_s_momentum_is_that_of_the_mean_gradient(decay: float) -> None:
    """Three ranks with gradients of their own, met exactly: Adam on the mean gradient with the second moment it had."""
    rule = ZeroOneAdam(lr=1e-2, weight_decay=decay, floor=0.0)
    alone = start()
    kept = rule.init(alone)
    drawn = list(gradients(30))
    for step in range(4):
        rule.update(alone, drawn[step], kept, lr_scale=1.0, step=step)
    ranks = [({n: p.clone() for n, p in alone.items()}, clone(kept)) for _ in range(3)]
    for step in range(4, 8):
        grads = [drawn[3 * step + rank - 8] for rank in range(3)]
        there = {n: p.clone() for n, p in ranks[0][0].items()}
        for (params, state), own in zip(ranks, grads, strict=True):
            rule.update_apart(params, own, state, lr_scale=1.0, step=step)
        moved = {n: sum(there[n] - params[n] for params, _ in ranks) / 3 for n in there}
        for params, state in ranks:
            for name, p in params.items():
                p.copy_(there[name] - moved[name])
            rule.meet(params, moved, state, rates=1e-2)
        mean = {n: sum(own[n] for own in grads) / 3 for n in there}
        rule.update_apart(alone, mean, kept, lr_scale=1.0, step=step)
        for slots in kept.values():
            slots["mean"] /= slots["mean_weight"]
            slots["mean_weight"].fill_(1.0)
        for params, state in ranks:
            assert all(torch.equal(params[n], ranks[0][0][n]) for n in params)
            assert all(torch.allclose(params[n], alone[n], atol=1e-6) for n in params)
            assert all(torch.allclose(state[n]["mean"], kept[n]["mean"], rtol=2e-3, atol=1e-5) for n in params)


def test_in_steps_apart_zero_one_adam_s_second_moment_stays() -> None:
    """Where all gradients meet again it goes on, on all ranks alike, however many steps each has made."""
    rule, params = ZeroOneAdam(floor=0.0), start()
    state = rule.init(params)
    drawn = list(gradients(12))
    for step in range(3):
        rule.update(params, drawn[step], state, lr_scale=1.0, step=step)
    frozen, found = clone(state), []
    for steps in (6, 8):
        one, kept = {n: p.clone() for n, p in params.items()}, clone(state)
        for step in range(3, 3 + steps):
            rule.update_apart(one, drawn[step], kept, lr_scale=1.0, step=step)
        assert all(torch.equal(kept[n]["square"], frozen[n]["square"]) for n in one)
        there = {n: p.clone() for n, p in params.items()}
        rule.meet(there, {n: 0.01 * p for n, p in drawn[0].items()}, kept, rates=0.1)
        rule.update(there, drawn[11], kept, lr_scale=1.0, step=3 + steps)
        for name, slots in kept.items():
            torch.testing.assert_close(slots["square"], 0.95 * frozen[name]["square"] + 0.05 * drawn[11][name] ** 2)
            assert abs(float(slots["square_weight"]) - (1 - 0.95**4)) < 1e-6
        found.append(there)
    assert equal(found[0], found[1])


def clone(state: optimizer_methods.OptimizerState) -> optimizer_methods.OptimizerState:
    return {n: {s: t.clone() for s, t in slots.items()} for n, slots in state.items()}
