"""The law of verification: ranks that can do the work of another, and outvote it."""

from __future__ import annotations

from gossamer.recipe.recipe import Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told


def verification_with_replicas(recipe: Recipe) -> BadInput | None:
    """Return an error for verification without at least three whole replicas that hold the same states."""
    key = "train.verify.every"
    if not recipe.config.train.verify.every:
        return None
    if recipe.in_stages or not recipe.sync.is_plain:
        got = recipe.apart_by
        wanted = (
            "replicas that hold the full model and are equal after every step, so that each can redo another's work"
        )
        other = "plan.mesh.pipe to 1" if recipe.in_stages else "plan.sync to every_step"
        return bad_input(wanted=wanted, got=got, do=f"set train.verify.every to 0, or {other}", key=key)
    if recipe.sharding.is_sharded:
        wanted = "plan.sharding none: a rank that updates its rows wrongly would give the same wrong rows to all others"
        got = f"plan.sharding {told(recipe.plan.sharding)}"
        return bad_input(wanted=wanted, got=got, do="set train.verify.every to 0, or plan.sharding to none", key=key)
    replicas = recipe.plan.mesh.replica
    if replicas < 3:
        do = "set train.verify.every to 0, or machines.processes to 3 or more"
        return bad_input(wanted="3 or more replicas, so that two can outvote one", got=str(replicas), do=do, key=key)
    return None
