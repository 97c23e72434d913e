"""The methods of a run as objects, built from the names in its plan and configuration, and the rules of combination.

`PlanMethods` holds those that a plan names, `Recipe` also those of the configuration. `conflicts.check` builds a recipe
and refuses methods that cannot be combined, whether the plan is new, read from a file, or of a resumed run.
"""

from __future__ import annotations

from gossamer.recipe.conflicts import LAWS, Law, check, not_used_inside, shared_states_apart
from gossamer.recipe.nearby_settings import RegisteredSettings
from gossamer.recipe.own_loop_check import check_loop
from gossamer.recipe.parameter_rules import ParameterRules
from gossamer.recipe.plan_methods import EVERY_STEP, PlanMethods
from gossamer.recipe.recipe import Recipe

__all__ = [
    "EVERY_STEP",
    "LAWS",
    "Law",
    "ParameterRules",
    "PlanMethods",
    "Recipe",
    "RegisteredSettings",
    "check",
    "check_loop",
    "not_used_inside",
    "shared_states_apart",
]
