"""The laws of a supernet (model.adapter qfa), whose layers compute with other widths in every step."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.recipe.recipe import Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, told

_OTHERS: tuple[tuple[str, Callable[[Recipe], bool], Callable[[Recipe], str]], ...] = (
    ("a model in one stage", lambda r: r.in_stages, lambda r: f"{r.stages} stages"),
    (
        "parameters that are there all the time",
        lambda r: r.sharding.takes_parameters,
        lambda r: f"plan.sharding {told(r.plan.sharding)}",
    ),
    ("a model that is not compiled", lambda r: r.config.model.compile, lambda r: "model.compile true"),
)


def supernet_alone(recipe: Recipe) -> BadInput | None:
    """Return an error for a supernet beside what needs the same graph in every step."""
    if MethodConfig.parse(recipe.config.model.adapter).name != "qfa":
        return None
    for wanted, is_there, got in _OTHERS:
        if is_there(recipe):
            return bad_input(
                wanted=f"{wanted}, with the adapter qfa",
                got=got(recipe),
                do="leave that out, or train another adapter",
                key="model.adapter",
            )
    return None
