"""Exchange settings near a given one: the candidates of an adaptive policy if the user has listed none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from gossamer import exchange as exchange_methods
from gossamer.exchange import Exchange
from gossamer.exchange.codec import Codec
from gossamer.policy import NearbySettings
from gossamer.spec.method_config import MethodConfig, Written

_RANKS = (0.5, 0.75, 1.5, 2.0)  # of the rank that is there
_CODECS = ("int4", "int8", "bfloat16")  # from fewest to most bits


@dataclass(frozen=True, slots=True)
class RegisteredSettings(NearbySettings):
    """The settings around those of the exchanges that are registered."""

    def near(self, written: Written) -> tuple[Written, ...]:
        return _near(written)

    def are_equal(self, one: Written, other: Written) -> bool:
        return exchange_methods.build(one) == exchange_methods.build(other)


def _near(written: Written) -> tuple[Written, ...]:
    """Return the variants of an exchange: low-rank factors of half to twice the rank, or codecs of other widths.

    Enclosing methods (error feedback, levels) stay as they are. Empty for an exchange with neither rank nor codec.
    """
    choice = exchange_methods.REGISTRY.read(written)
    cls, given = exchange_methods.REGISTRY.type(choice.name), choice.parameters
    hints = get_type_hints(cls)
    found = [{choice.name: {**given, field: value}} for field, value in _varied(cls, hints, given)]
    return tuple(found)


def _varied(cls: type[Exchange], hints: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if hints.get("rank") is int:
        (own,) = (given.get("rank", f.default) for f in fields(cls) if f.name == "rank")  # type: ignore[arg-type]
        yield from (("rank", r) for r in sorted({max(1, round(own * part)) for part in _RANKS} - {own}))
    for field, hint in hints.items():
        if hint is Codec and field in given:
            yield from ((field, codec) for codec in _codecs(given[field]))
        elif hint is Exchange and field in given:
            yield from ((field, inner) for inner in _near(given[field]))


def _codecs(written: Written) -> Iterator[Written]:
    own = MethodConfig.parse(written)
    seeded = {"stochastic": own.parameters["stochastic"]} if "stochastic" in own.parameters else {}
    for name in _CODECS:
        if name != own.name:
            yield {name: seeded} if seeded and name != "bfloat16" else name
