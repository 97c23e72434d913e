"""Which exchange for which parameters, on which link: what `plan.exchange: auto` means.

A pure function of measured numbers (`Facts`). Every bucket starts with the plain all-reduce; the bucket whose change
to another candidate saves the most exposed time per information lost is changed, again and again, until what is left
to save is not worth it. So what hides under the backward pass stays exact, and only what is waited for is compressed.
"""

from gossamer.plan.exchange.candidates import CANDIDATES, Candidate, across_islands
from gossamer.plan.exchange.choose import Decision, choose
from gossamer.plan.exchange.facts import BucketFacts, Facts, Option, wire_seconds
from gossamer.plan.exchange.timeline import Timeline, timeline

__all__ = [
    "CANDIDATES",
    "BucketFacts",
    "Candidate",
    "Decision",
    "Facts",
    "Option",
    "Timeline",
    "across_islands",
    "choose",
    "timeline",
    "wire_seconds",
]
