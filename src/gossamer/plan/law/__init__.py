"""Check that the methods of a plan can be combined, whether the plan is new, read from a file, or of a resumed run.

A plan holds method names and settings. `Terms` builds each into its object; the laws then check what these objects
declare about themselves, never their names.
"""

from __future__ import annotations

from gossamer.plan.law._terms import EVERY_STEP, Terms, rule_of
from gossamer.recipe.conflicts import LAWS, Law, not_used_inside
from gossamer.recipe.own_loop_check import check_loop
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import Plan
from gossamer.spec.unread_keys import check_given

__all__ = ["EVERY_STEP", "LAWS", "Law", "Terms", "check", "check_loop", "not_used_inside", "rule_of"]


def check(config: RunConfig, plan: Plan) -> Terms:
    """Build the methods of a plan and its configuration, check that they can be combined, and return them.

    Raises BadInput that names the key at fault: for an unknown method, for two methods that exclude each other, or for
    a key that has no effect.
    """
    check_given(config)
    terms = Terms.of(config, plan)
    for law in LAWS:
        if (error := law(terms)) is not None:
            raise error
    return terms
