"""The law of verification: ranks that can do the work of another, and outvote it."""

from __future__ import annotations

from gossamer.recipe.recipe import Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told


def verified(recipe: Recipe) -> BadInput | None:
    """Return an error for verification without at least three whole replicas that hold the same states."""
    key = "train.verify.every"
    if not recipe.config.train.verify.every:
        return None
    if recipe.in_stages or not recipe.sync.is_plain:
        got = recipe.apart_by
        wanted = "whole replicas that hold the same at every step, by gradients, so that each can do another's work"
        return bad_input(wanted=wanted, got=got, do="set it to 0, or plan.sync to every_step", key=key)
    if recipe.sharding.is_sharded:
        wanted = "plan.sharding none, as a rank that updates its rows wrongly gives all the others the same wrong ones"
        got = f"plan.sharding {told(recipe.plan.sharding)}"
        return bad_input(wanted=wanted, got=got, do="set it to 0, or plan.sharding to none", key=key)
    replicas = recipe.plan.mesh.replica
    if replicas < 3:
        do = "set it to 0, or machines.processes to 3 or more"
        return bad_input(wanted="3 replicas, of which two can outvote one", got=str(replicas), do=do, key=key)
    return None
