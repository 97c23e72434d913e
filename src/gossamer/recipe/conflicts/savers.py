"""The laws of what saves memory: which savers go together, and with what they do not."""

from __future__ import annotations

from collections import Counter

from gossamer.recipe.recipe import Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, told

_KEY = "plan.savers"


def savers_with_each_other(recipe: Recipe) -> BadInput | None:
    """Return an error for a saver that is named twice, or beside or behind one where it cannot be."""
    names = [MethodConfig.parse(one).name for one in recipe.plan.savers]
    twice = next((name for name, count in Counter(names).items() if count > 1), "")
    if twice:
        wanted, got = "every saver once", f"{twice} {names.count(twice)} times"
        return bad_input(wanted=wanted, got=got, do=f"name {twice} once, with all of its settings", key=_KEY)
    for name, saver in zip(names, recipe.methods.savers, strict=True):
        if beside := sorted(set(saver.excludes).intersection(names)):
            return bad_input(
                wanted=f"{name} without {beside[0]}, as they cannot be combined",
                got=", ".join(names),
                do="leave one of the two out",
                key=_KEY,
            )
        if earlier := [other for other in names[: names.index(name)] if other in saver.before]:
            return bad_input(
                wanted=f"{name} before {earlier[0]}, as each is on top of those before it",
                got=", ".join(names),
                do=f"write {name} first",
                key=_KEY,
            )
    return None


def savers_with_layout(recipe: Recipe) -> BadInput | None:
    """Return an error for a saver beside sharded parameters or without a backward, where it cannot be."""
    if not recipe.plan.savers:
        return None
    if recipe.sync.probe is not None:
        return bad_input(
            wanted="a backward pass, whose memory a saver saves",
            got=f"plan.sync {told(recipe.plan.sync)}, which has none",
            do="leave plan.savers out",
            key=_KEY,
        )
    for written, saver in zip(recipe.plan.savers, recipe.methods.savers, strict=True):
        if recipe.sharding.takes_parameters and not saver.with_sharded_parameters:
            return bad_input(
                wanted=f"parameters that are there all the time with {told(written)}",
                got=f"plan.sharding {told(recipe.plan.sharding)}",
                do=f"leave that saver out, or set {_whole(recipe)}",
                key=_KEY,
            )
    return None


def _whole(recipe: Recipe) -> str:
    """Return the setting with which parameters are whole where they are used."""
    return "plan.sharding.tiers.shard_group to none" if recipe.sharding.is_tiered else "plan.sharding to zero2"
