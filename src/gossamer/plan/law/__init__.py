"""What goes together: the laws that every plan is asked, wherever it came from.

A plan is a value of words. A planner writes one, a file has one, a run that is resumed had one; each of them is built
into objects here (`Terms`), and the laws are asked of what these declare of themselves, never of their names.
"""

from __future__ import annotations

from gossamer.plan.law._laws import LAWS, Law, not_used_inside
from gossamer.plan.law._loop import check_loop
from gossamer.plan.law._terms import EVERY_STEP, Terms, rule_of
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import Plan
from gossamer.spec.unread_keys import check_given

__all__ = ["EVERY_STEP", "LAWS", "Law", "Terms", "check", "check_loop", "not_used_inside", "rule_of"]


def check(config: RunConfig, plan: Plan) -> Terms:
    """What the words of a plan and of its configuration stand for.

    Raises BadInput with the key that is to blame: where a word names no method, two methods do not go together, or a
    key that was written would be read by nobody.
    """
    check_given(config)
    terms = Terms.of(config, plan)
    for law in LAWS:
        if (error := law(terms)) is not None:
            raise error
    return terms
