"""Losses with a teacher: their equations, gradients, and the course of TAID."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import loss
from gossamer.loss.distillation import Course, Distillation
from gossamer.loss.taid import Taid
from gossamer.spec.errors import BadInput

N, V = 9, 31


def logits(seed: int) -> Tensor:
    return 2 * torch.randn(N, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(written: Any) -> Distillation:
    found = loss.build(written)
    assert isinstance(found, Distillation)
    return found


def gradient(method: Distillation, t: float = 1.0) -> Tensor:
    student = logits(0).requires_grad_()
    (found,) = torch.autograd.grad(method.divergence(student, logits(1), t).sum(), student)
    return found


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


def test_the_divergences_are_their_equations() -> None:
    s, z = logits(0), logits(1)
    q, p = s.softmax(1), z.softmax(1)
    m = 0.3 * p + 0.7 * q
    wanted = {
        "kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": 0.3 * kl(p, m) + 0.7 * kl(q, m),
        "taid": kl((0.4 * s + 0.6 * z).softmax(1), q),
    }
    for name, value in wanted.items():
        found = built({"jsd": {"beta": 0.3}} if name == "jsd" else name).divergence(s, z, 0.6)
        assert torch.allclose(found, value, rtol=1e-12), name
        assert torch.allclose(built(name).divergence(z, z, 0.6), torch.zeros(N, dtype=z.dtype), atol=1e-12), name


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "taid"])
@pytest.mark.parametrize("t", [0.0, 0.6, 1.0])
def test_words_that_both_models_mask_do_not_count(name: str, t: float) -> None:
    """Padded words with a logit of -inf, as some models give, are as words that are not there."""
    method, masked = built(name), torch.full((N, 3), -math.inf, dtype=torch.float64)
    found = []
    for more in (torch.zeros(N, 0, dtype=torch.float64), masked):
        student = torch.cat([logits(0), more], 1).requires_grad_()
        value = method.divergence(student, torch.cat([logits(1), more], 1), t)
        (slope,) = torch.autograd.grad(value.sum(), student)
        found.append((value.detach(), slope[:, :V]))
        assert not slope[:, V:].any()
    for plain, ours in zip(*found, strict=True):
        assert torch.allclose(plain, ours, rtol=1e-12, atol=1e-14)


def test_a_word_that_one_model_masks_is_free_or_infinitely_dear() -> None:
    masked = logits(1)
    masked[:, 0] = -math.inf
    for name, student, teacher, is_finite in (
        ("kl", logits(0), masked, True),
        ("kl", masked, logits(0), False),
        ("reverse_kl", masked, logits(0), True),
        ("reverse_kl", logits(0), masked, False),
        ("jsd", masked, logits(0), True),
        ("jsd", logits(0), masked, True),
        ("taid", masked, logits(0), False),
    ):
        values = built(name).divergence(student, teacher, 1.0)
        assert bool((values.isfinite() if is_finite else values.isposinf()).all()), name


def test_the_limits_of_jsd_are_both_divergences() -> None:
    s, z = logits(0), logits(1)
    for beta, by, name in ((1e-6, 1e-6, "kl"), (1 - 1e-6, 1e-6, "reverse_kl")):
        near = built({"jsd": {"beta": beta}}).divergence(s, z, 1.0) / by
        assert torch.allclose(near, built(name).divergence(s, z, 1.0), rtol=1e-3), name


def test_gradients_of_taid() -> None:
    """q - p_t; 0 at t = 0; that of the forward divergence at t = 1."""
    s, z = logits(0), logits(1)
    taid = built("taid")
    for t in (0.25, 0.6):
        assert torch.allclose(gradient(taid, t), s.softmax(1) - ((1 - t) * s + t * z).softmax(1), atol=1e-12)
    assert float(gradient(taid, 0.0).abs().max()) < 1e-15
    assert torch.allclose(gradient(taid, 1.0), gradient(built("kl")), atol=1e-14)


def courses(method: Taid, losses: list[float]) -> list[Course]:
    found = [method.first()]
    for done, value in enumerate(losses, 1):
        found.append(method.after(found[-1], loss=value, done=done, total=len(losses)))
    return found


def test_t_starts_and_ends_as_asked_and_never_falls() -> None:
    draws = torch.Generator().manual_seed(2)
    losses = (1 + torch.rand(200, generator=draws)).tolist()
    t = [one.t for one in courses(Taid(t_start=0.2, t_end=0.9, alpha=0.05), losses)]
    assert t[0] == 0.2 and t[-1] == 0.9 and all(a <= b for a, b in itertools.pairwise(t))


def test_without_adaptation_t_is_the_straight_line() -> None:
    t = [one.t for one in courses(Taid(alpha=0.0), [1.0 / (n + 1) for n in range(60)])]
    assert t == pytest.approx([0.4 + 0.6 * n / 60 for n in range(61)])


def test_a_start_at_the_student_itself_leaves_t_free() -> None:
    """There the loss is 0, or rounding around it: the steps after it are not judged by how much more they lose."""
    for first in (0.0, 1e-12, -1e-9):
        found = courses(Taid(t_start=0.0, alpha=0.5, beta=0.9), [first, 0.01, *(1 / n for n in range(1, 99))])
        assert all(-1 <= one.momentum <= 1 for one in found)
        assert found[50].t > 0.99  # by the line 0.5


def test_t_follows_the_equations() -> None:
    """By hand, with a rate at which the line is far below."""
    method, losses = Taid(alpha=0.5, beta=0.6, t_start=0.1), [3.0, 2.0, 2.5]
    t, m = 0.1, 0.0
    found = courses(method, [*losses, *[2.0] * 97])
    for n in (1, 2):
        d = (losses[n - 1] - losses[n]) / (losses[n - 1] + 1e-15)
        m = 0.6 * m + 0.4 * d
        t = max(
            0.1 + 0.9 * (1 + n) / 100,
            (t if n > 1 else 0.1 + 0.9 / 100) + 0.5 / (1 + math.exp(-m)) * (1 - (t if n > 1 else 0.109)),
        )
        assert found[n + 1].momentum == pytest.approx(m) and found[n + 1].t == pytest.approx(t)


def test_it_is_the_labels_loss_without_its_teacher() -> None:
    draws = torch.Generator().manual_seed(1)
    output = {"logits": torch.randn(2, 5, V, generator=draws)}
    tokens = torch.randint(0, V, (2, 5), generator=draws)
    tokens[0, :3] = -100
    for labels, kind, given in (
        (tokens, "next_token", output),
        (tokens[:, 4], "classification", {"logits": output["logits"][:, 0]}),
    ):
        for name in ("kl", "taid"):
            batch = {"labels": labels}
            assert float(loss.build(name)(given, batch)) == float(loss.build(kind)(given, batch))
            assert int(loss.build(name).weight(batch)) == int(loss.build(kind).weight(batch))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"kl": {"temperature": 0}}, "above 0"),
        ({"kl": {"label_weight": 1.5}}, "a number from 0 to 1"),
        ({"reverse_kl": {"tile_tokens": 0}}, "above 0"),
        ({"jsd": {"beta": 1.0}}, "between 0 and 1"),
        ({"taid": {"t_start": 0.9, "t_end": 0.5}}, "t_start of at most t_end"),
        ({"taid": {"alpha": -1}}, "a number from 0 to 1"),
        ({"kl": {"top_k": -1}}, "0 or more words"),
    ],
)
def test_wrong_settings_are_named(written: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        loss.build(written)


def test_every_method_has_the_settings_of_kl() -> None:
    shared = {f.name: f.default for f in dataclasses.fields(loss.build("kl"))}
    for name in ("reverse_kl", "jsd", "taid"):
        own = {f.name: f.default for f in dataclasses.fields(loss.build(name))}
        assert shared.items() <= own.items(), name
