"""Matches of hidden states: against equations written out in float64, and which blocks are paired."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import loss
from gossamer.loss import hidden_match
from gossamer.loss.hidden import Hidden
from gossamer.spec.errors import BadInput

N, D, E = 7, 5, 6
Maps = dict[str, Tensor]


def mse(x: Tensor, y: Tensor, maps: Maps) -> Tensor:
    each = [((maps["map"] @ a - b) ** 2).sum() / E for a, b in zip(x, y, strict=True)]
    return torch.stack(each).mean()


def cosine(x: Tensor, y: Tensor, maps: Maps) -> Tensor:
    found = []
    for a, b in zip(x, y, strict=True):
        mapped = maps["map"] @ a
        found.append(2 - 2 * (mapped @ b) / (mapped.norm() * b.norm()))
    return torch.stack(found).mean()


def mi(alpha: float, width: int) -> Callable[[Tensor, Tensor, Maps], Tensor]:
    """Poole et al., equation 8, pair by pair; f is a dot product of the mapped, standardized rows."""

    def value(x: Tensor, y: Tensor, maps: Maps) -> Tensor:
        def standard(row: Tensor) -> Tensor:
            return (row - row.mean()) / (row.var(unbiased=False) + 1e-5).sqrt()

        def f(i: int, j: int) -> Tensor:
            return (maps["student"] @ standard(x[i])) @ (maps["teacher"] @ standard(y[j])) / math.sqrt(width)

        q = maps["log_q"].exp().squeeze() if "log_q" in maps else torch.zeros(())
        joint, apart = torch.zeros(()), torch.zeros(())
        for j in range(N):
            all_, others = ([f(i, j).exp() for i in range(N) if i != skipped] for skipped in (-1, j))
            r = alpha * sum(all_) / N + (1 - alpha) * q
            r_apart = alpha * sum(others) / (N - 1) + (1 - alpha) * q
            joint = joint + (f(j, j) - r.log()) / N
            apart = apart + sum(others) / (N - 1) / r_apart / N
        return -(1 + joint - apart)

    return value


@pytest.mark.parametrize(
    ("written", "by_hand"),
    [
        ("mse", mse),
        ("cosine", cosine),
        ({"mi_alpha": {"alpha": 0.7, "width": 3}}, mi(0.7, 3)),
        ({"mi_alpha": {"alpha": 1.0, "width": 3}}, mi(1.0, 3)),
        ({"mi_alpha": {"alpha": 0.0, "width": 3}}, mi(0.0, 3)),
    ],
    ids=["mse", "cosine", "mi 0.7", "mi 1", "mi 0"],
)
def test_values_and_gradients_are_those_of_the_equations(
    written: Any, by_hand: Callable[[Tensor, Tensor, Maps], Tensor]
) -> None:
    draw = torch.Generator().manual_seed(3)
    match = hidden_match.build(written)
    x, y = (torch.randn(N, width, generator=draw, dtype=torch.float64) for width in (D, E))
    maps = {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
        for name, shape in match.shapes(D, E).items()
    }
    x.requires_grad_()
    ours, theirs = match.loss(x, y, maps), by_hand(x, y, maps)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-9)
    wrt = [x, *maps.values()]
    for a, b in zip(torch.autograd.grad(ours, wrt), torch.autograd.grad(theirs, wrt), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", hidden_match.names())
@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_tokens_are_finite_and_have_gradients(name: str, rows: int) -> None:
    match = hidden_match.build(name)
    x = torch.randn(rows, D, requires_grad=True)
    maps = {one: torch.ones(shape, requires_grad=True) for one, shape in match.shapes(D, E).items()}
    value = match.loss(x, torch.randn(rows, E), maps)
    value.backward()
    assert value.isfinite() and all(one.grad is not None and one.grad.isfinite().all() for one in maps.values())
    if not rows:
        assert float(value.detach()) == 0


def test_large_scores_have_finite_gradients() -> None:
    match = hidden_match.build({"mi_alpha": {"width": 4}})
    maps = {n: (1e4 * torch.ones(shape)).requires_grad_() for n, shape in match.shapes(D, E).items()}
    x = torch.randn(N, D, requires_grad=True)
    with torch.no_grad():
        maps["student"].mul_(torch.randn(4, D))
        maps["teacher"].mul_(torch.randn(4, E))
        maps["log_q"].zero_()
    match.loss(x, torch.randn(N, E), maps).backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in maps.values())


def built(**settings: object) -> Hidden:
    found = loss.build({"hidden": {"output": {"kl": {"teacher": "x"}}, **settings}})
    assert isinstance(found, Hidden)
    return found


def test_blocks_are_paired_evenly_or_from_the_end() -> None:
    assert built().paired(range(4), range(12)) == [(0, 2), (1, 5), (2, 8), (3, 11)]
    assert built(layers="last").paired(range(4), range(12)) == [(0, 8), (1, 9), (2, 10), (3, 11)]
    assert built(pairs=2).paired(range(4), range(6)) == [(1, 2), (3, 5)]
    assert built(pairs=1, layers="last").paired(range(4), range(6)) == [(3, 5)]
    assert built(layers="emd").paired(range(2), range(3)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for student, teacher in ((4, 3), (0, 3)):
        with pytest.raises(BadInput, match=f"got {student} in the student and {teacher} in the teacher"):
            built().paired(range(student), range(teacher))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"output": {"taid": {"teacher": "x"}}}, "got taid"),
        ({"output": {"kl": {"teacher": "x", "top_k": 4}}}, "got kl with top_k 4"),
        ({"output": "next_token"}, "got next_token"),
        ({"match_weight": 0}, "match_weight"),
        ({"pairs": -1}, "0 or more pairs"),
        ({"layers": "first"}, "one of skip, last, emd"),
        ({"layers": "emd", "pairs": 2}, "pairs 0 with emd"),
        ({"by": {"mi_alpha": {"alpha": 1.5}}}, "from 0 to 1"),
        ({"by": {"mi_alpha": {"tokens": 1}}}, "2 or more tokens"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        built(**settings)
