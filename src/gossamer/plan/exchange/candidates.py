"""The candidate exchanges of `auto`, from exact to strongest; tests/claims/test_candidates.py trains with each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gossamer.spec.method_config import Written


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate exchange for a gradient bucket.

    `said`: its name for the user. `lossy`: needs the user's permission. `least_numel`: buckets with fewer elements are
    not worth its calls. `within`: the exchange between islands inside it, whose compression error is its own.
    `hub`: one rank receives the buckets of all others at once, so its memory bounds them. `most_occupied`: buckets of
    which a larger part is not zero on some rank are not served. `computes_mean`: every rank computes the mean from the
    same bytes by matrix products, which give other bits on machines of other kinds.
    """

    written: Written
    said: str
    lossy: bool = True
    least_numel: int = 0
    within: Written = ""
    hub: bool = False
    most_occupied: float = 1.0
    computes_mean: bool = False

    @property
    def loses_as(self) -> Written:
        """Return the exchange with the same compression error, which is measured once for both."""
        return self.within or self.written


_INT8: Written = {"two_shot": {"codec": "int8"}}


def _fed_back(inner: Written) -> Written:
    return {"error_feedback": {"inner": inner}}


def _powersgd(rank: int) -> Written:
    return _fed_back({"powersgd": {"rank": rank, "p_exchange": _INT8, "q_exchange": _INT8}})


def across_islands(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates for islands: the all-reduce over all ranks, then each candidate between islands only."""
    return (candidates[0], *map(_between, candidates))


def alike_anywhere(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates whose mean has the same bits on machines of all kinds."""
    return tuple(one for one in candidates if not one.computes_mean)


def _between(one: Candidate) -> Candidate:
    written: Written = {"hierarchical": {"inter": one.written}}
    return replace(one, written=written, said=f"{one.said} between islands", within=one.written)


CANDIDATES: tuple[Candidate, ...] = (
    Candidate("dense", "all-reduce", lossy=False),
    Candidate("recursive_doubling", "recursive doubling", lossy=False),
    Candidate("star", "star", lossy=False, hub=True),
    Candidate("block_sparse", "sparse all-reduce", lossy=False, most_occupied=0.5),
    Candidate({"two_shot": {"codec": {"cast": {"dtype": "bfloat16"}}}}, "bf16 two-shot", lossy=False),
    Candidate(
        {"recursive_doubling": {"codec": {"cast": {"dtype": "bfloat16"}}}}, "bf16 recursive doubling", lossy=False
    ),
    Candidate(_fed_back(_INT8), "int8 two-shot"),
    Candidate(_fed_back({"two_shot": {"codec": "int4"}}), "int4 two-shot"),
    Candidate(
        _fed_back({"acp_sgd": {"rank": 48, "factor_exchange": _INT8}}),
        "int8 ACP-SGD rank 48",
        least_numel=1 << 14,
        computes_mean=True,
    ),
    Candidate(_powersgd(32), "int8 PowerSGD rank 32", least_numel=1 << 14, computes_mean=True),
    Candidate(_powersgd(16), "int8 PowerSGD rank 16", least_numel=1 << 14, computes_mean=True),
)
