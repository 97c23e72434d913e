"""Short forms: `{two_shot: int8}` for `{two_shot: {codec: {int8: {}}}}`, read by one rule, of source or of classes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from gossamer.spec.suggest import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortForm:
    """The form a method is written in.

    `known`: its parameters; `inner`: those that are methods themselves, each with the names of the methods of its room;
    `needed`: those of `inner` without a default.
    """

    known: Collection[str]
    inner: Mapping[str, Collection[str]]
    needed: Collection[str]

    def spelled_out(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given` with the parameter in front where it is a nested method alone: of the one that is needed, or else of
        the one there is. A name is a method's where one of that room has it, or is nearer to it than any parameter.
        """
        meant = self._meant
        if meant and len(given) == 1 and not set(given) & set(self.known):
            methods, name = self.inner[meant], next(iter(given))
            best = get_close_matches(name, [*self.known, *methods], n=1, cutoff=0.5)
            if name in methods or (best and best[0] in methods):
                return {meant: dict(given)}
        return dict(given)

    def unknown(self, given: Mapping[str, Any]) -> tuple[str, str] | None:
        """The first name that is no parameter, and a clause that says what it may be meant for; None where all are."""
        name = next((name for name in given if name not in self.known), None)
        return None if name is None else (name, nearest(name, self.known))

    @property
    def _meant(self) -> str:
        """The parameter that a nested method without one is for; "" where it could be several."""
        meant = self.needed if len(self.needed) == 1 else self.inner
        return next(iter(meant)) if len(meant) == 1 else ""
