"""The laws of combination in the order of their checks: each asks a plan's methods what they declare of themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from gossamer.recipe.conflicts import adaptation, exchange, layout, sharding, sync, verification
from gossamer.recipe.conflicts.exchange import clipped
from gossamer.recipe.conflicts.sync import not_used_inside
from gossamer.recipe.recipe import Recipe
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.spec.unread_keys import check_given

Law: TypeAlias = Callable[[Recipe], BadInput | None]

LAWS: tuple[Law, ...] = (
    layout.layout_as_asked,
    layout.everybody_on_an_island,
    layout.stage_boundaries,
    layout.sync_in_stages,
    sync.rule_begins_apart,
    sync.sync_open,
    sync.probe_exchanges_nothing,
    exchange.clip,
    exchange.clip_adapted,
    layout.islands_in_stages,
    adaptation.adapts_what_meets,
    adaptation.adapts_links,
    sharding.states_of_whole_replicas,
    sharding.states_apart,
    sharding.states_adapted,
    adaptation.adapts_ways,
    sharding.states_by_element,
    sharding.gathers_in_step,
    sync.probe_moves_plainly,
    sync.probe_scales_nothing,
    sync.rule_of_islands,
    verification.verified,
    sync.proved,
    sync.seconds_of_steps,
    adaptation.adapts_something,
    adaptation.adapts_as_it_goes,
    exchange.lossy_is_asked,
    exchange.residuals_are_kept,
)


def check(config: RunConfig, plan: Plan) -> Recipe:
    """Build the methods of a plan and its configuration, check that they can be combined, and return them.

    Raises BadInput that names the key at fault: for an unknown method, for two methods that exclude each other, or for
    a key that has no effect.
    """
    check_given(config)
    recipe = Recipe.of(config, plan)
    for law in LAWS:
        if (error := law(recipe)) is not None:
            raise error
    return recipe


__all__ = ["LAWS", "Law", "check", "clipped", "not_used_inside"]
