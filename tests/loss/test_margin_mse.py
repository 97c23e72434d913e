"""Margin-MSE: its equation, what changes nothing, and which passages are negatives of a query."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import loss
from gossamer.loss.margin_mse import QUERY, TEACHER, in_batch_margins, margins, other_queries
from gossamer.spec.errors import BadInput

ROWS, D = 12, 5


def rows(seed: int) -> Tensor:
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(seed))


def batch(teacher: Tensor, query: list[int] | None = None) -> dict[str, Tensor]:
    named = torch.tensor([0, 1, 2, 3] if query is None else query).repeat_interleave(3)
    return {TEACHER: teacher, QUERY: named}


def value(written: Any, student: Tensor, teacher: Tensor, query: list[int] | None = None) -> Tensor:
    return loss.build(written)(student, batch(teacher, query))


def test_it_is_the_equation() -> None:
    s, t = rows(0), rows(1)
    gaps = []
    for i in range(0, ROWS, 3):
        ours, theirs = (float(x[i] @ x[i + 1] - x[i] @ x[i + 2]) for x in (s, t))
        gaps.append((ours - 0.5 * theirs) ** 2)
    assert float(value({"margin_mse": {"teacher_scale": 0.5}}, s, t)) == pytest.approx(sum(gaps) / 4, rel=1e-5)
    assert int(loss.build("margin_mse").weight(batch(t))) == 4


@pytest.mark.parametrize("weight", [0.0, 0.75])
def test_a_constant_per_query_changes_nothing(weight: float) -> None:
    """Scores that are all larger by c(q): an element that all passages have."""
    s, t = rows(0), rows(1)
    shifted = torch.cat([s, torch.ones(ROWS, 1)], 1)
    plain = torch.cat([s, torch.zeros(ROWS, 1)], 1)
    shifted[0::3, -1] = torch.tensor([3.0, -1.0, 0.5, 2.0])
    written = {"margin_mse": {"in_batch": weight}}
    assert float(value(written, shifted, t)) == pytest.approx(float(value(written, plain, t)), rel=1e-5)
    assert float(value(written, shifted, plain)) == pytest.approx(0, abs=1e-9)  # student = teacher + c(q)


def test_gradients_of_both_passages_are_opposite() -> None:
    s = rows(0).requires_grad_()
    (found,) = torch.autograd.grad(value("margin_mse", s, rows(1)), s)
    assert torch.allclose(found[1::3], -found[2::3], atol=1e-6) and float(found.abs().max()) > 0


def test_in_batch_negatives_are_passages_of_other_queries() -> None:
    """Rows 0 and 2 are one query: neither has the other's passages for negatives, nor its own."""
    counts = other_queries(batch(rows(0), [7, 1, 7, 3])[QUERY])
    wanted = [[0, 1, 0, 1], [1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0]]
    assert counts.tolist() == [[float(x) for x in row + row] for row in wanted]
    s, t = rows(0), rows(1)
    gaps = []
    for i, row in enumerate(wanted):
        for j, is_other in enumerate(row):
            for passage in (3 * j + 1, 3 * j + 2):
                if is_other:
                    ours, theirs = (float(x[3 * i] @ (x[3 * i + 1] - x[passage])) for x in (s, t))
                    gaps.append((ours - theirs) ** 2)
    alone = float(value("margin_mse", s, t))
    found = float(value({"margin_mse": {"in_batch": 0.5}}, s, t, [7, 1, 7, 3]))
    assert found - alone == pytest.approx(0.5 * sum(gaps) / len(gaps), rel=1e-4)
    assert in_batch_margins(s).shape == (4, 8)


def test_unit_embeddings_are_compared_with_margins_they_can_reach() -> None:
    s, t = rows(0), 10 * rows(1)
    cosine = value({"margin_mse": {"similarity": "cosine", "teacher_scale": 0.01}}, s, t)
    unit = torch.nn.functional.normalize(s, dim=1)
    assert float(cosine) == pytest.approx(float((margins(unit) - 0.01 * margins(t)).square().mean()), rel=1e-5)
    scaled = value({"margin_mse": {"similarity": "cosine", "teacher_scale": 0.01}}, 3 * s, t)
    assert float(scaled) == pytest.approx(float(cosine), rel=1e-5)


def test_one_query_alone_has_no_in_batch_negatives() -> None:
    s, t = rows(0)[:3], rows(1)[:3]
    given = {TEACHER: t, QUERY: torch.zeros(3, dtype=torch.int64)}
    assert float(loss.build({"margin_mse": {"in_batch": 1.0}})(s, given)) == float(loss.build("margin_mse")(s, given))


def test_wrong_rows_and_settings_are_named() -> None:
    with pytest.raises(BadInput, match="3 rows per triple"):
        loss.build("margin_mse")(rows(0)[:4], {TEACHER: rows(0)[:4], QUERY: torch.zeros(4)})
    with pytest.raises(BadInput, match=r"loss\.teacher_embedding"):
        loss.build("margin_mse")(rows(0), {})
    with pytest.raises(BadInput):
        loss.build({"margin_mse": {"teacher_scale": 0}})
