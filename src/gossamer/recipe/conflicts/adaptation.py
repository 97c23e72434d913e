"""The laws of adaptive compression: what a policy may adapt, and when."""

from __future__ import annotations

from gossamer.recipe.recipe import Recipe
from gossamer.spec.config import PlanSection
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told

_PLAN = PlanSection()


def adapts_what_meets(recipe: Recipe) -> BadInput | None:
    """Return an error for a policy for a sync method whose exchange it cannot adapt."""
    if recipe.policy is None or recipe.sync.is_plain:
        return None
    by_paths = recipe.sync.loop is not None and recipe.policy.needs_paths
    if not by_paths:
        gradients = "gradients that all ranks exchange at every step, which is what"
        return bad_input(
            wanted=f"bcrs, or {gradients} other policies adapt" if recipe.sync.loop else f"{gradients} a policy adapts",
            got=f"plan.sync {told(recipe.plan.sync)}",
            do="leave plan.adapt at none",
            key="plan.adapt",
        )
    if not recipe.sync.names_exchange:
        return bad_input(
            wanted="a plan.sync whose exchange between islands can be set, as diloco's can",
            got=f"plan.sync {told(recipe.plan.sync)}",
            do="leave plan.adapt at none, or name another plan.sync",
            key="plan.adapt",
        )
    return None


def adapts_ways(recipe: Recipe) -> BadInput | None:
    """Return an error for a policy for links between islands that have several ranks."""
    islands = recipe.plan.islands
    if recipe.policy is None or recipe.sync.is_plain or all(len(island) == 1 for island in islands):
        return None
    return bad_input(
        wanted="islands of one rank each, whose ways out are known",
        got=str([list(island) for island in islands]),
        do="leave plan.adapt at none, and name plan.sync's exchange",
        key="plan.adapt",
    )


def adapts_links(recipe: Recipe) -> BadInput | None:
    """Return an error for a policy for stage boundaries without stages, or one for gradients with stages."""
    if recipe.policy is None or recipe.policy.for_links == (recipe.stages > 1):
        return None
    if recipe.stages > 1:
        return bad_input(
            wanted="a policy for the links between stages, ada_topk",
            got=f"{told(recipe.config.plan.adapt)} for a model in {recipe.stages} stages",
            do="name another, leave plan.adapt at none, or plan.mesh.pipe at 1",
            key="plan.adapt",
        )
    return bad_input(
        wanted="a policy for gradients",
        got=f"{told(recipe.config.plan.adapt)}, which is for the links between stages of a model (plan.mesh.pipe)",
        do="name another: gossamer methods policy",
        key="plan.adapt",
    )


def adapts_as_it_goes(recipe: Recipe) -> BadInput | None:
    """Check `adapt_every` and `adapt_window`: stage boundaries and exchanges between islands are chosen once, before
    step 1.
    """
    asked, before = recipe.config.plan, recipe.stages > 1 or recipe.sync.loop is not None
    for key in ("adapt_every", "adapt_window"):
        if before and getattr(asked, key) != getattr(_PLAN, key):
            where = f"a model in {recipe.stages} stages" if recipe.stages > 1 else f"plan.sync {told(recipe.plan.sync)}"
            return bad_input(
                wanted="a policy that chooses as the run goes on",
                got=f"one that chooses before the first step, for {where}",
                do=f"leave plan.{key} out",
                key=f"plan.{key}",
            )
    return None
