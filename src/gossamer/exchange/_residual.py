"""What feedback still owes the parameters, and exchanges that go on with it when others take their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from gossamer.comm.bucket import Layout
from gossamer.comm.message import ExchangeState
from gossamer.spec.method_config import Exchanges, Written
from gossamer.spec.parameter_rules import ParameterRule, lines

_OWED, _SUM = "e", "agg"


class ResidualExchange(Protocol):
    """The part of an exchange that is needed here."""

    def init(self, layout: Layout) -> ExchangeState: ...


def is_residual(path: str) -> bool:
    """Whether a state of this path ("0/e", "e@name") is owed to the parameters."""
    return path.partition("@")[0].rpartition("/")[2] == _OWED


def has_residual(exchange: ResidualExchange) -> bool:
    """Whether it keeps what it did not send, to send it later."""
    return any(is_residual(path) for path in _kept(exchange))


def is_cumulative(exchange: ResidualExchange) -> bool:
    """Whether its mean is of what all ranks have sent so far, also of those that send nothing now, as in EF21."""
    return any(path.rpartition("/")[2] == _SUM for path in _kept(exchange))


def _kept(exchange: ResidualExchange) -> list[str]:
    """The paths of its state."""
    return [path for path, _ in exchange.init(Layout.of({"x": torch.empty(1)})).flatten()]


def with_error_feedback(written: Exchanges, names: Iterable[str]) -> Exchanges:
    """`written` with error feedback around the methods that serve these parameters: around dense, it pays what is owed
    at once.
    """
    wanted, found = set(names), lines(written, key="plan.exchange")
    serving = {matching_rule(found, name) for name in wanted}
    if not isinstance(written, list):
        return _around(written) if wanted else written
    return [(line.pattern, line.level, _around(line.written) if line in serving else line.written) for line in found]


def matching_rule(found: Sequence[ParameterRule], name: str) -> ParameterRule | None:
    """The line whose method a parameter's gradient is sent by: the first that matches, or its partner `between`."""
    matching = [line for line in found if line.matches(name)]
    if matching and matching[0].level == "island":
        return next((line for line in matching if line.level == "between"), None)
    return matching[0] if matching else None


def _around(written: Written) -> Written:
    return {"error_feedback": {"inner": written}}
