"""DataParallel: every rank holds the whole model and computes its share of the batch.

The trivial planner, and the control every later plan is judged against. It resolves:
    share         equal parts, unless given
    rows          the batch cut by share, largest remainders first
    microbatches  the fewest whose tokens stay below `microbatch_tokens`, unless `train.accumulate` says
    exchange      auto stays: it is chosen from measured links when all ranks are there (gossamer.exchanging)
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.data import share_rows
from gossamer.plan import Planner, Request, price_of
from gossamer.spec.config import MeshSection, RunConfig
from gossamer.spec.cost import Cost
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.plan import Mesh, Plan
from gossamer.wire.message import Levels


@dataclass(frozen=True, slots=True)
class DataParallel(Planner):
    """`microbatch_tokens`: the largest micro-batch that `accumulate: auto` chooses, in tokens."""

    microbatch_tokens: int = 16384

    def plan(self, request: Request) -> Plan:
        config, reasons = request.config, {}
        mesh = _mesh(config.plan.mesh, request.ranks)
        share = _share(config, mesh.replica)
        reasons["share"] = "given" if config.plan.share != "auto" else f"equal parts for {mesh.replica} replicas"
        rows = share_rows(config.train.batch, share)
        pieces = self._microbatches(config, rows)
        reasons["microbatches"] = (
            "given" if config.train.accumulate != "auto" else f"at most {self.microbatch_tokens} tokens each"
        )
        reasons["exchange"] = "given" if config.plan.exchange != "auto" else "chosen before step 1, as the links are"
        plan = Plan(
            mesh=mesh,
            share=share,
            rows=rows,
            microbatches=pieces,
            schedule="one_stage" if config.plan.schedule == "auto" else config.plan.schedule,
            exchange=config.plan.exchange,
            islands=_islands(config, mesh.replica),
            sync="every_step" if config.plan.sync == "auto" else config.plan.sync,
            backend="nccl" if request.device == "cuda" else "gloo",
            reasons=reasons,
        )
        return plan.model_copy(update={"forecast": _forecast(plan, request)}) if request.shapes else plan

    def _microbatches(self, config: RunConfig, rows: tuple[int, ...]) -> tuple[int, ...]:
        wanted = config.train.accumulate
        if wanted == "auto":
            fitting = max(1, self.microbatch_tokens // config.data.sequence)  # rows of one micro-batch
            return tuple(-(-r // fitting) for r in rows)
        if wanted > min(rows):
            raise bad_input(
                wanted=f"{wanted} micro-batches on every replica",
                got=f"{min(rows)} sequences on the smallest (rows {list(rows)})",
                do="lower train.accumulate or raise train.batch",
                key="train.accumulate",
            )
        return (wanted,) * len(rows)


def _mesh(asked: MeshSection, ranks: int) -> Mesh:
    for axis in ("shard", "pipe", "tensor", "sequence", "expert"):
        if getattr(asked, axis) not in (1, "auto"):
            raise BadInput("only replicas can be planned in this version: leave it at 1", key=f"plan.mesh.{axis}")
    if asked.replica not in ("auto", ranks):
        raise bad_input(
            wanted=f"{asked.replica} replicas",
            got=f"{ranks} processes",
            do=f"set machines.processes to {asked.replica}, or plan.mesh.replica to auto",
            key="plan.mesh.replica",
        )
    return Mesh(replica=ranks)


def _islands(config: RunConfig, replicas: int) -> tuple[tuple[int, ...], ...]:
    asked = config.machines.islands
    if asked == "auto":
        return ()
    if sorted(r for island in asked for r in island) != list(range(replicas)) or not all(asked):
        raise bad_input(
            wanted=f"every rank from 0 to {replicas - 1} on exactly one island",
            got=str(asked),
            do="list the ranks of every island, or write auto",
            key="machines.islands",
        )
    return tuple(tuple(sorted(island)) for island in asked)


def _share(config: RunConfig, replicas: int) -> tuple[float, ...]:
    asked = config.plan.share
    if asked == "auto":
        return (1.0 / replicas,) * replicas
    if len(asked) != replicas:
        raise bad_input(
            wanted=f"one share for each of {replicas} replicas",
            got=f"{len(asked)} ({asked})",
            do="list as many shares as there are processes",
            key="plan.share",
        )
    return tuple(part / sum(asked) for part in asked)


def _forecast(plan: Plan, request: Request) -> Cost:
    written = "dense" if plan.exchange == "auto" else plan.exchange  # a choice to come sends no more
    return price_of(written, request.shapes, Levels.flat(plan.mesh.replica), bucket_bytes=plan.bucket_bytes)
