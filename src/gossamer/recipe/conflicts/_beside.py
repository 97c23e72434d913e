"""What a method may not stand beside: a table of what is asked for instead, when it is missing, and what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gossamer.recipe.recipe import Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told


@dataclass(frozen=True, slots=True)
class Beside:
    """A line of such a table. `wanted`: in words; `is_there`: whether the recipe has something else; `got`: what."""

    wanted: str
    is_there: Callable[[Recipe], bool]
    got: Callable[[Recipe], str]

    def because(self, why: str) -> Beside:
        """Return the line with a reason."""
        return replace(self, wanted=f"{self.wanted}, {why}")


STAGES = Beside("a model in one stage", lambda r: r.in_stages, lambda r: f"{r.stages} stages")
COMPILED = Beside("a model that is not compiled", lambda r: r.config.model.compile, lambda r: "model.compile true")
ADAPTER = Beside(
    "a model without an adapter",
    lambda r: r.config.model.adapter != "none",
    lambda r: f"model.adapter {told(r.config.model.adapter)}",
)
SIDE = Beside(
    "a model without a side network",
    lambda r: r.config.model.side != "none",
    lambda r: f"model.side {told(r.config.model.side)}",
)
SHARDED = Beside(
    "parameters that are there all the time",
    lambda r: r.sharding.takes_parameters,
    lambda r: f"plan.sharding {told(r.plan.sharding)}",
)
ADVERSARIAL = Beside(
    "no adversarial training",
    lambda r: r.config.train.adversarial.epsilon > 0,
    lambda r: f"train.adversarial.epsilon {r.config.train.adversarial.epsilon}",
)


def refused_beside(
    recipe: Recipe, table: Iterable[Beside], *, why: str = "", beside: str = "", do: str, key: str
) -> BadInput | None:
    """Return an error for the first line of which something is there, None where nothing is.

    `why`: follows what is wanted; `beside`: what is there; `do`: leaving that out. `key`: of the method.
    """
    found = next((one for one in table if one.is_there(recipe)), None)
    if found is None:
        return None
    return bad_input(
        wanted=f"{found.wanted}{why}", got=f"{found.got(recipe)}{beside}", do=f"leave that out, or {do}", key=key
    )
