"""Residuals of error feedback: which exchanges keep one, and exchanges that carry it over when the plan changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from gossamer.comm.bucket import Layout
from gossamer.comm.message import ExchangeState
from gossamer.spec.method_config import Exchanges, Written
from gossamer.spec.parameter_rules import ParameterRule, lines

_OWED, _SUM = "e", "agg"


class StatefulExchange(Protocol):
    """The part of the exchange interface that shows its state."""

    def init(self, layout: Layout) -> ExchangeState:
        """Return the state before the first exchange."""


def is_residual(path: str) -> bool:
    """Return whether the state at a path ("0/e", "e@name") is an error-feedback residual."""
    return path.partition("@")[0].rpartition("/")[2] == _OWED


def has_residual(exchange: StatefulExchange) -> bool:
    """Return whether an exchange keeps an error-feedback residual."""
    return any(is_residual(path) for path in _kept(exchange))


def has_state(exchange: StatefulExchange) -> bool:
    """Return whether an exchange keeps anything from step to step, of any tensor."""
    return bool(_kept(exchange))


def is_cumulative(exchange: StatefulExchange) -> bool:
    """Return whether an exchange averages all that ranks have sent so far, also ranks that send nothing now (EF21)."""
    return any(path.rpartition("/")[2] == _SUM for path in _kept(exchange))


def _kept(exchange: StatefulExchange) -> list[str]:
    """Return the paths of an exchange's state."""
    return [path for path, _ in exchange.init(Layout.of({"x": torch.empty(1)})).flatten()]


def with_error_feedback(written: Exchanges, names: Iterable[str]) -> Exchanges:
    """Return `written` with error feedback around the methods of the parameters `names`.

    Around dense it sends the whole residual at once.
    """
    wanted, found = set(names), lines(written, key="plan.exchange")
    serving = {matching_rule(found, name) for name in wanted}
    if not isinstance(written, list):
        return _around(written) if wanted else written
    return [(line.pattern, line.level, _around(line.written) if line in serving else line.written) for line in found]


def matching_rule(found: Sequence[ParameterRule], name: str) -> ParameterRule | None:
    """Return the line whose method sends a parameter's gradient: the first that matches, or its partner `inter`."""
    matching = [line for line in found if line.matches(name)]
    if matching and matching[0].level == "intra":
        return next((line for line in matching if line.level == "inter"), None)
    return matching[0] if matching else None


def _around(written: Written) -> Written:
    return {"error_feedback": {"inner": written}}
