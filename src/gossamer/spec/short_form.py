"""Short forms of methods: `{two_shot: int8}` for `{two_shot: {codec: {int8: {}}}}`, by one rule."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from gossamer.spec import earlier_names
from gossamer.spec.suggest import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortForm:
    """The parameters of a method, by which the short form of its configuration is read.

    `known`: its parameters; `inner`: those that are methods themselves, each with the method names of its category;
    `needed`: those of `inner` without a default.
    """

    known: Collection[str]
    inner: Mapping[str, Collection[str]]
    needed: Collection[str]

    def spelled_out(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return `given` with the parameter name put in front where it is a nested method alone.

        That parameter is the only needed one, or else the only nested one. A name is a method's where that category has
        it, or where it is nearer to one of its names than to any parameter.
        """
        meant = self._meant
        if meant and len(given) == 1 and not set(given) & set(self.known):
            methods, name = self.inner[meant], next(iter(given))
            best = get_close_matches(name, [*self.known, *methods], n=1, cutoff=0.5)
            if name in methods or (best and best[0] in methods):
                return {meant: dict(given)}
        return dict(given)

    def unknown(self, given: Mapping[str, Any], *, method: str) -> tuple[str, str] | None:
        """Return the first name that is no parameter of `method`, and what to write; None where all are known."""
        name = next((name for name in given if name not in self.known), None)
        if name is None:
            return None
        now = earlier_names.parameter_now(method, name)
        return name, f"it is {now!r} now" if now in self.known else nearest(name, self.known)

    @property
    def _meant(self) -> str:
        """The parameter that takes a nested method written alone; "" where it could be several."""
        meant = self.needed if len(self.needed) == 1 else self.inner
        return next(iter(meant)) if len(meant) == 1 else ""
