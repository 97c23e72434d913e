"""What a first step tells beside its record: parameters that no gradient reaches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gossamer.job.start_record import _loss_unit
from gossamer.loss.dpo import Dpo
from gossamer.loss.next_token import NextToken
from gossamer.run.step_reports import JudgedStep, StepReports
from gossamer.spec import records


def judged(step: int, idle: frozenset[str], *, committed: bool = True) -> JudgedStep:
    rows = SimpleNamespace(rows={"input_ids": torch.zeros(2, 4)})
    done = SimpleNamespace(
        task=SimpleNamespace(window=SimpleNamespace(step=step, lr=1.0), pieces={0: rows}),
        attempt=SimpleNamespace(compute_s=0.0),
        agreement=SimpleNamespace(loss=1.0, weight=2.0, norm=1.0, idle=idle),
        committed=committed,
    )
    return cast(JudgedStep, done)


@pytest.mark.parametrize("idle", [frozenset(), frozenset({"b", "a", "d", "c"})])
def test_parameters_without_a_gradient_are_told_once(idle: frozenset[str]) -> None:
    told: list[Any] = []
    parts: Any = {
        "feed": SimpleNamespace(samples=lambda step: (2 * step, 2 * step + 2)),
        "rule": SimpleNamespace(lr=0.1),
        "replica": SimpleNamespace(timing=SimpleNamespace(exposed_s=0.0), sent_bytes=dict),
    }
    reports = StepReports(**parts, sink=told.append)
    reports.record(judged(0, idle, committed=False), 0.1, 0.0)
    for step in (0, 1):
        reports.record(judged(step, idle), 0.1, 0.0)
    events = [one for one in told if isinstance(one, records.Event)]
    assert len(told) == 3 + len(events) and len(events) == (1 if idle else 0)
    if idle:
        said = (
            "4 of the trained parameters had no gradient in step 1, and stay as they are while that is so: a, b, c, ..."
        )
        assert (events[0].level, events[0].message, events[0].step) == ("warning", said, 1)


@pytest.mark.parametrize(
    ("loss", "text_bytes", "unit"), [(NextToken(), 5, "nats/token"), (Dpo(), 0, "nats/pair"), (NextToken(), None, "")]
)
def test_the_unit_of_a_loss_is_that_of_what_it_counts(loss: Any, text_bytes: int | None, unit: str) -> None:
    parts = SimpleNamespace(objective=loss, train=SimpleNamespace(text_bytes=lambda indices: text_bytes))
    assert _loss_unit(cast(Any, SimpleNamespace(parts=parts))) == unit
