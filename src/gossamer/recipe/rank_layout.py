"""The layout of a run on its ranks, as a configuration asks for it: mesh, ranks of every stage, rows, micro-batches.

The planner writes it into a plan. `conflicts.check` asks for it again, so that a plan from a file and a resumed run are
refused by the same sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gossamer import loss as losses
from gossamer.data import share_rows
from gossamer.sharding import Sharding
from gossamer.spec.config import MeshSection, PlanSection, RunConfig
from gossamer.spec.errors import bad_input
from gossamer.spec.mesh import Groups
from gossamer.spec.odd_one_out import ranked
from gossamer.spec.plan import MeshSizes

MICROBATCH_TOKENS = 16384  # of the largest micro-batch that `accumulate: auto` chooses
_PER_STAGE = 4  # micro-batches
_KEY = "plan.stage_ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The mesh of a run, the ranks of its stages, and the rows and micro-batches of its replicas.

    `stage_ranks`: empty where each replica has one rank per stage. `reasons`: why these fractions and micro-batches.
    """

    mesh: MeshSizes
    stage_ranks: Groups
    batch_fractions: tuple[float, ...]
    rows: tuple[int, ...]
    microbatches: tuple[int, ...]
    reasons: Mapping[str, str]

    @staticmethod
    def of(config: RunConfig, ranks: int, *, microbatch_tokens: int = MICROBATCH_TOKENS) -> RankLayout:
        """Return the layout that a configuration asks for on `ranks` ranks. Raises BadInput if there is none.

        `microbatch_tokens`: the largest micro-batch that `accumulate: auto` chooses, in tokens.
        """
        stages = _stages_of(config.plan, ranks)
        mesh = MeshSizes(pipe=len(stages)) if stages else _mesh(config.plan.mesh, ranks)
        fractions = _fractions_of_stages(config.plan, stages) if stages else _fractions(config.plan, mesh.replica)
        whose = "the ranks of each stage" if stages else f"{mesh.replica} replicas"
        rows = (config.train.batch,) if stages else share_rows(config.train.batch, fractions)
        pieces, why = _microbatches(config, rows, mesh, stages, microbatch_tokens)
        given = "given" if config.plan.batch_fractions != "auto" else f"equal parts for {whose}"
        return RankLayout(
            mesh=mesh,
            stage_ranks=stages,
            batch_fractions=fractions,
            rows=rows,
            microbatches=pieces,
            reasons={"batch_fractions": given, "microbatches": why},
        )

    def microbatches_with(self, sharding: Sharding) -> tuple[int, ...]:
        """Return the micro-batches per replica, equal if all ranks gather sharded parameters together.

        Raises BadInput.
        """
        pieces, rows = self.microbatches, self.rows
        if not sharding.takes_parameters:
            return pieces
        if max(pieces) > min(rows):
            raise bad_input(
                wanted=f"{max(pieces)} micro-batches on every replica, as all gather sharded parameters together",
                got=f"{min(rows)} sequences on the smallest (sequences by replica: {list(rows)})",
                do="raise train.batch, set train.accumulate, or make plan.batch_fractions more equal",
                key="plan.batch_fractions",
            )
        return (max(pieces),) * len(pieces)


def _stages_of(asked: PlanSection, ranks: int) -> Groups:
    """Return the ranks of every stage; empty if the configuration lists none. Raises BadInput."""
    if asked.stage_ranks == "auto":
        return ()
    groups = tuple(tuple(sorted(group)) for group in asked.stage_ranks)
    _check_mesh(asked, len(groups))
    _check_ranks(groups, ranks)
    return groups


def _check_mesh(asked: PlanSection, stages: int) -> None:
    if stages < 2:
        raise bad_input(
            wanted="the ranks of 2 stages or more",
            got=f"{stages} stage{'' if stages == 1 else 's'} (one stage is the whole model)",
            do="set plan.stage_ranks to auto, or list the ranks of 2 stages or more",
            key=_KEY,
        )
    if asked.mesh.pipe not in ("auto", stages):
        raise bad_input(
            wanted=f"the ranks of each of {asked.mesh.pipe} stages (plan.mesh.pipe)",
            got=f"the ranks of {stages} stages",
            do=f"set plan.mesh.pipe to {stages}, or list the ranks of {asked.mesh.pipe} stages",
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
        *([f"{ranked(missing)} {'is' if len(missing) == 1 else 'are'} in no stage"] if missing else []),
    ]
    if faults:
        raise bad_input(
            wanted=f"each rank from 0 to {ranks - 1} in exactly one stage, and a rank in each stage",
            got=f"{[list(group) for group in groups]}: {faults[0]}",
            do="list every process once, or set machines.processes to as many as are listed",
            key=_KEY,
        )


def _fractions_of_stages(asked: PlanSection, groups: Groups) -> tuple[float, ...]:
    """Return every rank's fraction of the micro-batches of its stage. Raises BadInput."""
    ranks = sum(map(len, groups))
    given = [1.0] * ranks if asked.batch_fractions == "auto" else asked.batch_fractions
    if len(given) != ranks:
        raise bad_input(
            wanted=f"one fraction for each of {ranks} ranks, its part of the micro-batches of its stage",
            got=f"{len(given)} ({given})",
            do=f"list {ranks} fractions",
            key="plan.batch_fractions",
        )
    totals = {rank: sum(given[r] for r in group) for group in groups for rank in group}
    return tuple(part / totals[rank] for rank, part in enumerate(given))


def _fractions(asked: PlanSection, replicas: int) -> tuple[float, ...]:
    """Return every replica's fraction of the batch. Raises BadInput."""
    given = asked.batch_fractions
    if given == "auto":
        return (1.0 / replicas,) * replicas
    if len(given) != replicas:
        raise bad_input(
            wanted=f"one fraction for each of {replicas} replicas",
            got=f"{len(given)} ({given})",
            do=f"list {replicas} fractions: machines.processes divided by plan.mesh.pipe",
            key="plan.batch_fractions",
        )
    return tuple(part / sum(given) for part in given)


def _microbatches(
    config: RunConfig, rows: tuple[int, ...], mesh: MeshSizes, groups: Groups, tokens: int
) -> tuple[tuple[int, ...], str]:
    """Return the micro-batches per replica, and the reason. Raises BadInput.

    `groups`: the ranks of every stage, if given; `tokens`: of the largest micro-batch.
    """
    wanted, key = config.train.accumulate, "train.accumulate"
    if wanted == "auto":
        fitting = max(1, tokens // config.data.sequence)  # rows of one micro-batch
        each = f"{sum(map(len, groups))} ranks" if groups else f"{mesh.pipe} stages"
        least = _PER_STAGE * (sum(map(len, groups)) or mesh.pipe) if mesh.in_stages else 1
        why = f"at most {tokens} tokens each"
        why += f", {_PER_STAGE} for each of {each} where there are rows" if mesh.in_stages else ""
        together = losses.build(config.train.loss, key="train.loss").together
        found = tuple(_in_whole(r, max(-(-r // fitting), min(r, least)), together) for r in rows)
        _check_microbatches(groups, found[0], "train.batch")
        return found, why
    if wanted > min(rows):
        raise bad_input(
            wanted=f"{wanted} micro-batches on every replica",
            got=f"{min(rows)} sequences on the smallest (sequences by replica: {list(rows)})",
            do=f"lower {key} or raise train.batch",
            key=key,
        )
    _check_microbatches(groups, wanted, key)
    return (wanted,) * len(rows), "given"


def _in_whole(rows: int, pieces: int, together: int) -> int:
    """Return at least `pieces` micro-batches of equal size that keep `together` rows together, if there are any."""
    if together == 1 or rows % together:
        return pieces
    return next(n for n in range(min(pieces, rows // together), rows // together + 1) if rows % (n * together) == 0)


def _mesh(asked: MeshSection, ranks: int) -> MeshSizes:
    stages = 1 if asked.pipe == "auto" else asked.pipe
    if ranks % stages:
        raise bad_input(
            wanted=f"a multiple of {stages} processes, one for every stage",
            got=f"{ranks}",
            do=f"set machines.processes to a multiple of {stages}, or plan.mesh.pipe to a divisor of {ranks}",
            key="plan.mesh.pipe",
        )
    found = MeshSizes(replica=ranks // stages, pipe=stages)
    if asked.replica not in ("auto", found.replica):
        raise bad_input(
            wanted=f"{asked.replica} replicas" + (f" of {stages} stages" if found.in_stages else ""),
            got=f"{ranks} processes",
            do=f"set machines.processes to {asked.replica * stages}, or plan.mesh.replica to auto",
            key="plan.mesh.replica",
        )
    return found


def _check_microbatches(groups: Groups, microbatches: int, key: str) -> None:
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
