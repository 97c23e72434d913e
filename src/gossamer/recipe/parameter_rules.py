"""Rules that assign an exchange to each parameter: the lines of `plan.exchange`, built."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gossamer import exchange as exchange_methods
from gossamer.exchange import Exchange, codec, nested
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Exchanges, MethodConfig, Written
from gossamer.spec.parameter_rules import LAST_RESORT, PARTNER, ParameterRule, lines
from gossamer.spec.row_range import whole_of
from gossamer.spec.suggest import nearest

_ROWS = re.compile(r"\\?\[\d+:\d+\\?\]")  # the rows of a part, in a pattern
_EXACT = "dense"  # inside an island: as the numbers are; and what serves a parameter that no line speaks of


@dataclass(frozen=True, slots=True)
class ParameterRules:
    """A list of rules that assign a method to each parameter by name; the first line that matches holds.

    A line of level `intra` or `inter` pairs with the first matching line of the other level: together they are one
    Hierarchical exchange. A parameter that no line matches gets dense. `parts`: names of parts of parameters that have
    buckets of their own.
    """

    lines: tuple[ParameterRule, ...]
    parts: tuple[str, ...] = ()

    @staticmethod
    def read(written: Exchanges, *, key: str = "plan.exchange", parts: tuple[str, ...] = ()) -> ParameterRules:
        """Build every line once, so that errors in a line that matches nothing are found too; raise BadInput.

        `written`: one exchange for all parameters, or lines [pattern, level, exchange].
        """
        found = ParameterRules(lines(written, key=key), parts)
        for line in found.lines:
            if line.level == "intra":
                found._join(_EXACT, line)
            else:
                exchange_methods.build(line.written, key=line.method_key)
        return found

    @staticmethod
    def single(written: Written) -> Exchange:
        """Build the one exchange that is written for all parameters; raise BadInput."""
        (found,) = ParameterRules.read(written).exchanges
        return found

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Return the exchange of every line, without lines of level `intra`, whose method is a codec."""
        found = (line for line in self.lines if line.level != "intra")
        return tuple(exchange_methods.build(line.written, key=line.method_key) for line in found)

    @property
    def asks_for_islands(self) -> bool:
        """Return whether any exchange requires islands, by the level of a line or by a method in it."""
        inside = (one for outer in self.exchanges for one in nested(outer))
        return any(line.level != "all" for line in self.lines) or any(one.needs_islands for one in inside)

    def of(self, name: str) -> Exchange:
        """Return the exchange of the parameter `name`. Parameters with equal exchanges may share a bucket."""
        return self._build(self._serving(name))

    def by_name(self, names: Iterable[str]) -> dict[str, Exchange]:
        """Return the exchange of every parameter, and of the parts of them that have buckets of their own.

        Raise BadInput for a line that serves none of them.
        """
        wanted = dict.fromkeys(names)
        wanted |= dict.fromkeys(part for part in self.parts if whole_of(part) in wanted)
        serving = {name: self._serving(name) for name in wanted}
        self._check_used(list(serving), {line for those in serving.values() for line in those})
        built = {those: self._build(those) for those in dict.fromkeys(serving.values())}
        return {name: built[those] for name, those in serving.items()}

    def _serving(self, name: str) -> tuple[ParameterRule, ...]:
        """Return the lines of a parameter: none, one line of level `all`, or (inter, intra)."""
        matching = [line for line in self.lines if line.matches(name)]
        if not matching or matching[0].level == "all":
            return tuple(matching[:1])
        first, other = matching[0], PARTNER[matching[0].level]
        second = next((line for line in matching if line.level == other), None)
        if second is None:
            raise bad_input(
                wanted=f"a line of level {other} for parameter {name}, as it has one of level {first.level}",
                got="none whose pattern matches it",
                do=f"add one with the pattern '{first.pattern}', or '{LAST_RESORT}' at the end",
                key=f"{first.key}.1",
            )
        return (first, second) if first.level == "inter" else (second, first)

    def _build(self, serving: Sequence[ParameterRule]) -> Exchange:
        if not serving:
            return exchange_methods.build(_EXACT)
        if len(serving) == 1:
            return exchange_methods.build(serving[0].written, key=serving[0].method_key)
        between, island = serving
        return self._join(between.written, island)

    def _join(self, between: Written, island: ParameterRule) -> Exchange:
        key = island.method_key
        choice = MethodConfig.parse(island.written, key=key)
        if choice.name == _EXACT:
            return exchange_methods.build({"hierarchical": {"inter": between}}, key=key)
        if choice.name not in codec.names():
            known = (_EXACT, *codec.names())
            said = f"a line of level intra takes dense or a codec, not {choice.name!r}"
            raise BadInput(f"{said}: {nearest(choice.name, known)}", key=key)
        codec.build(choice, key=key)
        return exchange_methods.build({"hierarchical": {"inter": between, "intra_codec": choice.written()}}, key=key)

    def _check_used(self, names: list[str], used: set[ParameterRule]) -> None:
        for line in self.lines:
            if line in used or line.pattern in ("", LAST_RESORT):
                continue
            if any(line.matches(name) for name in names):
                said = f"every parameter that {line.pattern!r} matches is served by an earlier line: move this line up"
                raise BadInput(said, key=line.key)
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            if _ROWS.search(line.pattern):
                some += "; this line names rows, as another plan.buckets divides a parameter"
            raise bad_input(
                wanted="a pattern that is found in the name of some trainable parameter",
                got=repr(line.pattern),
                do=f"match one of their names: {some}",
                key=f"{line.key}.0",
            )
