"""Ranks that hold other facts are named by the majority of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gossamer.run import start_checks
from gossamer.spec.errors import BadInput

PUMP = SimpleNamespace(channel=None)


def said(monkeypatch: pytest.MonkeyPatch, *facts: dict[str, str]) -> str:
    """What every one of the ranks that hold these is told."""
    rows: list[list[int]] = []
    monkeypatch.setattr(start_checks, "gathered", lambda channel, row: (rows.append(row), torch.zeros(1, len(row)))[1])
    for one in facts:
        start_checks.check_agreement(PUMP, one)  # type: ignore[arg-type]
    monkeypatch.setattr(start_checks, "gathered", lambda channel, row: torch.tensor(rows, dtype=torch.float64))
    told = set()
    for one in facts:
        with pytest.raises(BadInput) as caught:
            start_checks.check_agreement(PUMP, one)  # type: ignore[arg-type]
        told.add(str(caught.value))
    assert len(told) == 1
    return told.pop()


@pytest.mark.parametrize("odd", [0, 2])
def test_the_odd_one_of_four(monkeypatch: pytest.MonkeyPatch, odd: int) -> None:
    facts = [{"plan": "p", "model": "other" if rank == odd else "m"} for rank in range(4)]
    text = said(monkeypatch, *facts)
    assert text == (
        f"the ranks do not agree about the model: rank {odd} differs from the other 3. Give every host the same model"
    )


def test_two_against_two(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(monkeypatch, *({"plan": str(rank % 2)} for rank in range(4)))
    assert "the plan: ranks 0, 2 and ranks 1, 3 differ, and none of them is a majority." in text
