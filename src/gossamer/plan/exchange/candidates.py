"""What `auto` may choose from, from exact to harsh: tests/claims/test_candidates.py trains with every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.spec.method_config import Written


@dataclass(frozen=True, slots=True)
class Candidate:
    """`said`: what people call it. `lossy`: whether the user must have allowed it. `least_numel`: buckets below it are
    not worth its calls. `within`: what is between islands in it, which loses what it loses.
    """

    written: Written
    said: str
    lossy: bool = True
    least_numel: int = 0
    within: Written = ""

    @property
    def loses_as(self) -> Written:
        """The exchange whose loss is its own, and is measured once for both."""
        return self.within or self.written


def _fed_back(inner: Written) -> Written:
    return {"error_feedback": {"inner": inner}}


def across_islands(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """For ranks on islands: the plain all-reduce over all of them, then every candidate between islands alone."""
    return (candidates[0], *map(_between, candidates))


def _between(one: Candidate) -> Candidate:
    written: Written = {"hierarchical": {"between": one.written}}
    return Candidate(written, f"{one.said} between islands", one.lossy, one.least_numel, one.written)


CANDIDATES: tuple[Candidate, ...] = (
    Candidate("dense", "all-reduce", lossy=False),
    Candidate({"two_shot": {"codec": {"cast": {"dtype": "bfloat16"}}}}, "bf16 two-shot", lossy=False),
    Candidate(_fed_back({"two_shot": {"codec": "int8"}}), "int8 two-shot"),
    Candidate(_fed_back({"two_shot": {"codec": "int4"}}), "int4 two-shot"),
    Candidate(
        _fed_back({"powersgd": {"rank": 16, "left": {"two_shot": {"codec": "int8"}}}}),
        "int8 PowerSGD rank 16",
        least_numel=1 << 14,
    ),
)
