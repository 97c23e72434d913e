"""The laws of the layout: islands, stages, stage boundaries."""

from __future__ import annotations

from gossamer.recipe.rank_layout import RankLayout
from gossamer.recipe.recipe import Recipe
from gossamer.spec.config import PlanSection
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told
from gossamer.spec.unread_keys import without_stages

_PLAN = PlanSection()


def layout_with_ranks(recipe: Recipe) -> BadInput | None:
    """Return the error of a configuration whose mesh, stages, fractions or micro-batches do not fit the ranks."""
    try:
        RankLayout.of(recipe.config, recipe.plan.ranks)
    except BadInput as error:
        return error
    return None


def islands_with_ranks(recipe: Recipe) -> BadInput | None:
    """Return an error for an island list that misses a rank or names one twice."""
    islands, ranks = recipe.plan.islands, recipe.plan.ranks
    if not islands or (all(islands) and sorted(r for island in islands for r in island) == list(range(ranks))):
        return None
    return bad_input(
        wanted=f"every rank from 0 to {ranks - 1} on exactly one island",
        got=str([list(island) for island in islands]),
        do="list the ranks of every island, or write auto",
        key="machines.islands",
    )


def microbatches_with_loss(recipe: Recipe) -> BadInput | None:
    """Return an error for micro-batches that would part rows which the loss takes as one (a preference pair)."""
    together, plan = Recipe.loss_of(recipe.config).together, recipe.plan
    if all(rows % (pieces * together) == 0 for rows, pieces in zip(plan.rows, plan.microbatches, strict=True)):
        return None
    if together == 1:  # micro-batches may differ by a row
        return None
    return bad_input(
        wanted=f"micro-batches of a multiple of {together} sequences, which the loss "
        f"{told(recipe.config.train.loss)} takes as one",
        got=f"{list(plan.rows)} sequences by replica in {list(plan.microbatches)} micro-batches",
        do=f"set train.batch to a multiple of {together * len(plan.rows)}, and train.accumulate to auto or a divisor "
        "of half the sequences of a replica",
        key="train.batch",
    )


def boundaries_with_stages(recipe: Recipe) -> BadInput | None:
    """Return an error for split points or activation compression that do not fit the number of stages."""
    plan = recipe.plan
    if not recipe.in_stages and plan.cuts:
        return without_stages("plan.cuts")
    if not recipe.in_stages and plan.activation_compression != _PLAN.activation_compression:
        return without_stages("plan.activation_compression")
    if isinstance(plan.activation_compression, tuple) and len(plan.activation_compression) != recipe.stages - 1:
        return bad_input(
            wanted=f"one method for each of the {recipe.stages - 1} boundaries between {recipe.stages} stages",
            got=f"{len(plan.activation_compression)}",
            do="list as many methods, or name one for all",
            key="plan.activation_compression",
        )
    if plan.cuts and len(plan.cuts) != recipe.stages:
        return bad_input(
            wanted=f"the first unit of each of {recipe.stages} stages",
            got=f"{len(plan.cuts)} ({', '.join(plan.cuts)})",
            do="list as many as there are stages (plan.mesh.pipe), the first of them 0",
            key="plan.cuts",
        )
    return None


def sync_with_stages(recipe: Recipe) -> BadInput | None:
    """Return an error for a sync method other than every_step with pipeline parallelism."""
    if recipe.sync.is_plain or not recipe.in_stages:
        return None
    what = "local updates" if recipe.sync.loop is not None else "zeroth-order training"
    return bad_input(
        wanted=f"no pipeline stages with {what}",
        got=f"a model in {recipe.stages} stages",
        do="leave plan.mesh.pipe at 1, or plan.sync at every_step",
        key="plan.sync",
    )


def islands_with_stages(recipe: Recipe) -> BadInput | None:
    """Return an error for an exchange with islands among the ranks of a pipeline stage."""
    if not recipe.in_stages or recipe.methods.chooses_exchange or not recipe.methods.exchange.asks_for_islands:
        return None
    return bad_input(
        wanted="an exchange without intra-island and inter-island parts, as a pipeline stage has no islands",
        got=f"an exchange with such parts, for a model in {recipe.stages} stages",
        do="write one exchange for all ranks in plan.exchange, or set plan.mesh.pipe to 1",
        key="plan.exchange",
    )
