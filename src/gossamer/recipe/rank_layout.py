"""The ranks of every pipeline stage, from `plan.stage_ranks` of the configuration."""

from __future__ import annotations

from collections import Counter

from gossamer.spec.config import PlanSection
from gossamer.spec.errors import BadInput, bad_input

_KEY = "plan.stage_ranks"
Groups = tuple[tuple[int, ...], ...]


def stages_of(asked: PlanSection, ranks: int) -> Groups:
    """Return the ranks of every stage; empty if the configuration lists none. Raises BadInput."""
    if asked.stage_ranks == "auto":
        return ()
    groups = tuple(tuple(sorted(group)) for group in asked.stage_ranks)
    _check_mesh(asked, len(groups))
    _check_ranks(groups, ranks)
    return groups


def _check_mesh(asked: PlanSection, stages: int) -> None:
    if stages < 2:
        raise BadInput("one stage is the whole model: leave plan.stage_ranks at auto, or list two or more", key=_KEY)
    if asked.mesh.pipe not in ("auto", stages):
        raise bad_input(
            wanted=f"the ranks of each of {asked.mesh.pipe} stages (plan.mesh.pipe)",
            got=f"{stages} lists",
            do=f"set plan.mesh.pipe to {stages}, or list the ranks of as many stages as it says",
            key=_KEY,
        )
    if asked.mesh.replica not in ("auto", 1):
        raise bad_input(
            wanted="plan.mesh.replica: auto where plan.stage_ranks says how many ranks each stage has",
            got=str(asked.mesh.replica),
            do="leave one of the two at auto",
            key="plan.mesh.replica",
        )


def _check_ranks(groups: Groups, ranks: int) -> None:
    counts = Counter(rank for group in groups for rank in group)
    missing = [rank for rank in range(ranks) if rank not in counts]
    faults = [
        *(f"stage {stage} has no rank" for stage, group in enumerate(groups) if not group),
        *(f"rank {rank} is listed {n} times" for rank, n in sorted(counts.items()) if n > 1),
        *(f"there is no rank {rank}" for rank in sorted(counts) if not 0 <= rank < ranks),
        *([f"{_ranks(missing)} in no stage"] if missing else []),
    ]
    if faults:
        raise bad_input(
            wanted=f"each rank from 0 to {ranks - 1} in exactly one stage, and a rank in each stage",
            got=f"{[list(group) for group in groups]}: {faults[0]}",
            do="list every process once, or set machines.processes to as many as are listed",
            key=_KEY,
        )


def shares_of(asked: PlanSection, groups: Groups) -> tuple[float, ...]:
    """Return every rank's fraction of the micro-batches of its stage. Raises BadInput."""
    ranks = sum(map(len, groups))
    given = [1.0] * ranks if asked.batch_fractions == "auto" else asked.batch_fractions
    if len(given) != ranks:
        raise bad_input(
            wanted=f"a share for each of {ranks} ranks, of the work of its stage",
            got=f"{len(given)} ({given})",
            do="list as many shares as there are processes",
            key="plan.batch_fractions",
        )
    totals = {rank: sum(given[r] for r in group) for group in groups for rank in group}
    return tuple(part / totals[rank] for rank, part in enumerate(given))


def check_microbatches(groups: Groups, microbatches: int, key: str) -> None:
    """Check that there is at least one micro-batch for every rank of each stage.

    `key`: the configuration key to name in the error. Raises BadInput.
    """
    for stage, group in enumerate(groups):
        if microbatches < len(group):
            raise bad_input(
                wanted=f"at least {len(group)} micro-batches, one for each rank of stage {stage} ({list(group)})",
                got=str(microbatches),
                do=f"raise {key}, or give the stage fewer ranks",
                key=key,
            )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
