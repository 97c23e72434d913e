"""Rules that assign methods to parameters: one method for all, or a list of lines, of which the first match holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gossamer.spec import earlier_names
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Exchanges, Written
from gossamer.spec.row_range import whole_of
from gossamer.spec.suggest import nearest

LEVELS = ("all", "intra", "inter")
PARTNER = {"intra": "inter", "inter": "intra"}
LAST_RESORT = ".*"


@dataclass(frozen=True, slots=True, eq=False)
class ParameterRule:
    """The rule [parameter pattern, link level, method]; `key` is its dotted key in the configuration."""

    pattern: str
    level: str
    written: Written
    key: str

    def matches(self, name: str) -> bool:
        """Return whether the pattern, a regular expression, is found anywhere in the name of a parameter or of a part.

        What matches a parameter matches its parts. Of those alone speaks what is found at the bracket of their rows:
        "[0-9]", which is not found in "head.weight", does not match "head.weight[0:2048]".
        """
        whole = whole_of(name)
        if whole == name or re.search(self.pattern, whole):
            return re.search(self.pattern, whole) is not None
        return any(found.start() <= len(whole) < found.end() for found in re.finditer(self.pattern, name))

    @property
    def method_key(self) -> str:
        """The dotted configuration key of the method alone."""
        return f"{self.key}.2" if self.pattern else self.key


def lines(written: Exchanges, *, key: str) -> tuple[ParameterRule, ...]:
    """Parse the rules written at `key`, one per line.

    Raises BadInput for an empty list, a line of another form, and a pattern that is empty or no regular expression;
    also for an unknown level, and a level without its partner (`intra` needs `inter`, and the reverse).
    """
    if isinstance(written, (list, tuple)):
        if not written:
            wanted = "a method, or lines [parameter pattern, link level, method]"
            raise bad_input(wanted=wanted, got="[]", do="write dense, say", key=key)
        found = tuple(_line(item, key=f"{key}.{i}") for i, item in enumerate(written))
        _check_partners(found)
        return found
    return (ParameterRule("", "all", written, key),)


def _line(item: Any, *, key: str) -> ParameterRule:
    form = "[parameter pattern, link level, method]"
    if not isinstance(item, (list, tuple)) or len(item) != 3 or not all(isinstance(word, str) for word in item[:2]):
        raise bad_input(wanted=form, got=repr(item), do="write ['.*', all, dense], say", key=key)
    pattern, level, written = item
    try:
        re.compile(pattern)
    except re.error as error:
        do = "put a backslash before each special character that is meant literally"
        raise bad_input(wanted="a regular expression", got=f"{pattern!r} ({error})", do=do, key=f"{key}.0") from None
    if level not in LEVELS:
        now = earlier_names.LEVELS.get(level, "")
        do = f"it is {now} now" if now else nearest(level, LEVELS)
        raise BadInput(f"there is no link level {level!r}: {do}", key=f"{key}.1")
    if not pattern:
        raise bad_input(wanted="a pattern", got="''", do=f"write '{LAST_RESORT}' for all parameters", key=f"{key}.0")
    return ParameterRule(pattern, level, written, key)


def _check_partners(found: tuple[ParameterRule, ...]) -> None:
    levels = {line.level for line in found}
    for line in found:
        other = PARTNER.get(line.level)
        if other is not None and other not in levels:
            example = "dense" if other == "intra" else "{two_shot: {codec: int8}}"
            raise bad_input(
                wanted="an exchange for each of the levels intra and inter",
                got=f"{line.level} alone",
                do=f"add ['{line.pattern}', {other}, {example}], say",
                key=f"{line.key}.1",
            )
