"""Ranks that begin with other numbers are refused by the name of the parameter; rounding of other machines is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.run import initial_values
from gossamer.run.initial_values import check_initial
from gossamer.spec.errors import BadInput


class Meeting:
    """Every rank's rows, gathered without threads: each call is made once per rank, then all are told."""

    def __init__(self, modules: Sequence[nn.Module], machines: Sequence[float]) -> None:
        self.modules, self.machines = modules, machines

    def outcome(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What each rank is told; "": nothing."""
        known: list[list[list[float]]] = []  # call -> rank -> row
        for _ in range(3):
            said = [self._one(monkeypatch, rank, known) for rank in range(len(self.modules))]
            if all(isinstance(one, str) for one in said):
                return [str(one) for one in said]
            known.append([one for one in said if isinstance(one, list)])
        raise AssertionError("more calls than there should be")

    def _one(self, monkeypatch: pytest.MonkeyPatch, rank: int, known: list[list[list[float]]]) -> Any:
        calls = iter(known)

        class Asked(Exception):
            pass

        def gathered(_: object, row: list[float]) -> Tensor:
            rows = next(calls, None)
            if rows is None:
                raise Asked(row)
            return torch.tensor(rows, dtype=torch.float64)

        monkeypatch.setattr(initial_values, "gathered", gathered)
        monkeypatch.setattr(initial_values, "_machine", lambda: self.machines[rank])
        try:
            check_initial(None, self.modules[rank], None)  # type: ignore[arg-type]
        except Asked as asked:
            return asked.args[0]
        except BadInput as refused:
            return str(refused)
        return ""


def module(change: Callable[[Tensor], Tensor] = lambda x: x) -> nn.Module:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    made[2].weight.data = change(made[2].weight.data)
    return made


def one_entry(x: Tensor) -> Tensor:
    x = x.clone()
    x[5, 7] += 1e-6
    return x


def test_equal_ones_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Meeting([module(), module()], [1.0, 2.0]).outcome(monkeypatch) == ["", ""]


def test_one_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Meeting([module(), module(one_entry), module()], [1.0] * 3).outcome(monkeypatch)
    assert len(set(told)) == 1 and "different values for 2.weight: rank 1 differs from the other 2" in told[0]


def test_a_buffer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    other = module()
    other[1].running_mean += 1  # type: ignore[index]
    told = Meeting([module(), other], [1.0] * 2).outcome(monkeypatch)
    assert "different values for 1.running_mean: rank 0 and rank 1 differ" in told[0]


def test_rounding_of_another_machine_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        told = Meeting([module(), module(one_entry)], [1.0, 2.0]).outcome(monkeypatch)
    assert told == ["", ""] and "2.weight" in caplog.text


def test_more_than_rounding_is_refused_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Meeting([module(), module(lambda x: x * 1.001)], [1.0, 2.0]).outcome(monkeypatch)
    assert "2.weight" in told[0]
    turned = Meeting([module(), module(lambda x: x.flip(0))], [1.0, 2.0]).outcome(monkeypatch)
    assert "2.weight" in turned[0]
