"""DataParallel: replicas of the model, each in as many stages as asked for, compute their shares of the batch.

The trivial planner, and the control every later plan is judged against. It resolves:
    share         equal parts, unless given
    rows          the batch cut by share, largest remainders first
    microbatches  the fewest whose tokens stay below `microbatch_tokens`, and of a model in stages four per stage (the
                  rank's idle share is then below a fifth), unless `train.accumulate` says
    schedule      one_f_one_b for stages, which keeps the fewest micro-batches alive
    stages        the ranks of every stage, where they are given: else each replica has one rank for every stage
    cuts          auto stays: the work of every unit is known when the model was traced (gossamer.partition.rank_model)
    exchange      auto stays: it is chosen from measured links when all ranks are there (gossamer.autotune)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from gossamer import recipe
from gossamer.comm.message import ProcessGroups
from gossamer.data import share_rows
from gossamer.plan import Planner, Request, price_apart, price_of, price_probed, state_bytes
from gossamer.plan._stage_ranks import Groups, check_microbatches, shares_of, stages_of
from gossamer.recipe import EVERY_STEP, PlanMethods, Recipe
from gossamer.recipe.plan_methods import ALL_REDUCE, AUTO
from gossamer.sharding import Sharding
from gossamer.spec.config import MeshSection, RunConfig
from gossamer.spec.cost import Cost
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Exchanges, Written
from gossamer.spec.plan import BUCKET_BYTES, MeshSizes, Plan
from gossamer.sync import OuterLoopConfig

_PER_STAGE = 4  # micro-batches
# Of sharded states. With buckets of 1 MiB, a step at 100 Mbit/s takes 1.23 times as long as with these (zero1).
_BUCKETS, _LEAST_BUCKET_BYTES = 64, 4 << 20


@dataclass(frozen=True, slots=True)
class DataParallel(Planner):
    """A planner for data-parallel replicas, each of one or more pipeline stages.

    `microbatch_tokens`: the largest micro-batch that `accumulate: auto` chooses, in tokens.
    """

    microbatch_tokens: int = 16384

    def plan(self, request: Request) -> Plan:
        config, reasons = request.config, {}
        stages = stages_of(config.plan, request.ranks)
        mesh = MeshSizes(pipe=len(stages)) if stages else _mesh(config.plan.mesh, request.ranks)
        share = shares_of(config.plan, stages) if stages else _share(config, mesh.replica)
        whose = "the ranks of each stage" if stages else f"{mesh.replica} replicas"
        reasons["batch_fractions"] = "given" if config.plan.batch_fractions != "auto" else f"equal parts for {whose}"
        rows = (config.train.batch,) if stages else share_rows(config.train.batch, share)
        pieces, reasons["microbatches"] = self._microbatches(config, rows, mesh.pipe, stages)
        asked = PlanMethods.asked(config.plan)
        pieces = _in_step(asked.sharding, rows, pieces)
        exchange, reasons["exchange"] = _exchange(asked, mesh)
        sync, why = _sync(asked, config, mesh)
        reasons.update({"sync": why} if why else {})
        if request.units:
            reasons["units"] = (
                "given" if config.plan.units != "auto" else "the repeated blocks, and what else owns parameters"
            )
        plan = Plan(
            mesh=mesh,
            batch_fractions=share,
            rows=rows,
            microbatches=pieces,
            pipeline_schedule=_schedule(config, mesh),
            stage_ranks=stages,
            units=request.units,
            activation_compression=_boundary(config),
            exchange=exchange,
            islands=_islands(config),
            sharding=config.plan.sharding,
            sync=sync,
            bucket_bytes=_bucket_bytes(asked.sharding, request),
            backend="nccl" if request.device == "cuda" else "gloo",
        )
        found = recipe.check(config, plan)
        plan = plan.model_copy(update={"reasons": {**reasons, **_reasons(found)}})
        return plan.model_copy(update={"forecast": _forecast(found, request)}) if request.shapes else plan

    def _microbatches(
        self, config: RunConfig, rows: tuple[int, ...], stages: int, groups: Groups
    ) -> tuple[tuple[int, ...], str]:
        """Return the micro-batches per replica, and the reason. `groups`: the ranks of every stage, if given."""
        wanted, key = config.train.accumulate, "train.accumulate"
        if wanted == "auto":
            fitting = max(1, self.microbatch_tokens // config.data.sequence)  # rows of one micro-batch
            each = f"{sum(map(len, groups))} ranks" if groups else f"{stages} stages"
            least = 1 if stages == 1 else _PER_STAGE * (sum(map(len, groups)) or stages)
            why = f"at most {self.microbatch_tokens} tokens each"
            why += f", {_PER_STAGE} for each of {each} where there are rows" if stages > 1 else ""
            found = tuple(max(-(-r // fitting), min(r, least)) for r in rows)
            check_microbatches(groups, found[0], "train.batch")
            return found, why
        if wanted > min(rows):
            raise bad_input(
                wanted=f"{wanted} micro-batches on every replica",
                got=f"{min(rows)} sequences on the smallest (rows {list(rows)})",
                do=f"lower {key} or raise train.batch",
                key=key,
            )
        check_microbatches(groups, wanted, key)
        return (wanted,) * len(rows), "given"


def _mesh(asked: MeshSection, ranks: int) -> MeshSizes:
    stages = 1 if asked.pipe == "auto" else asked.pipe
    if ranks % stages:
        raise bad_input(
            wanted=f"a multiple of {stages} processes, one for every stage",
            got=f"{ranks}",
            do=f"set machines.processes to a multiple of {stages}, or plan.mesh.pipe to a divisor of {ranks}",
            key="plan.mesh.pipe",
        )
    if asked.replica not in ("auto", ranks // stages):
        raise bad_input(
            wanted=f"{asked.replica} replicas of {stages} stages" if stages > 1 else f"{asked.replica} replicas",
            got=f"{ranks} processes",
            do=f"set machines.processes to {asked.replica * stages}, or plan.mesh.replica to auto",
            key="plan.mesh.replica",
        )
    return MeshSizes(replica=ranks // stages, pipe=stages)


def _sync(asked: PlanMethods, config: RunConfig, mesh: MeshSizes) -> tuple[Written, str]:
    """Return the sync method and the reason. `auto` stays if local updates are possible: measured links decide
    (gossamer.autotune).
    """
    if not asked.chooses_sync:
        return config.plan.sync, ""
    against = {
        "a model in stages": mesh.pipe > 1,
        "sharded states": asked.sharding.is_sharded,
        "plan.adapt": config.plan.adapt != "none",
        "verification": config.train.verify.every > 0,
    }
    why = " and ".join(name for name, holds in against.items() if holds)
    if not asked.chooses_exchange or not why:
        return AUTO, ""
    return EVERY_STEP, f"every step: islands do not part with {why}"


def _exchange(asked: PlanMethods, mesh: MeshSizes) -> tuple[Exchanges, str]:
    if not asked.chooses_exchange:
        return asked.plan.exchange, "given"
    if asked.sync.probe is not None:
        return ALL_REDUCE, "no gradient is exchanged"
    if asked.sync.loop is not None:
        return ALL_REDUCE, "all-reduce of the gradients of an island; what goes between islands is plan.sync's"
    if mesh.pipe > 1:
        return ALL_REDUCE, "all-reduce: of a model in stages only what is given is compressed"
    return AUTO, "chosen before step 1, as the links are"


def _reasons(found: Recipe) -> dict[str, str]:
    """Return notes on the plan: the cost of verification, and settings without effect."""
    notes, plan, every = {}, found.plan, found.config.train.verify.every
    if every:
        notes["verify"] = f"1 step in {every} is done again by two others: {200 / every:.3g} % more compute"
    loop = found.sync.loop
    if loop is not None and (unused := recipe.not_used_inside(loop, plan.islands, plan.exchange)):
        notes["exchange"] = unused
    if found.config.machines.islands != "auto" and found.stages > 1:
        notes["islands"] = "not used: the links of a model in stages are its own"
    return notes


def _schedule(config: RunConfig, mesh: MeshSizes) -> Written:
    if config.plan.pipeline_schedule != "auto":
        return config.plan.pipeline_schedule
    return "single_stage" if mesh.pipe == 1 else "one_f_one_b"


def _boundary(config: RunConfig) -> Written | tuple[Written, ...]:
    asked = config.plan.activation_compression
    return tuple(asked) if isinstance(asked, list) else asked


def _in_step(sharding: Sharding, rows: tuple[int, ...], pieces: tuple[int, ...]) -> tuple[int, ...]:
    """Return the micro-batches per replica, equal if all ranks gather sharded parameters together. Raises BadInput."""
    if not sharding.takes_parameters:
        return pieces
    if max(pieces) > min(rows):
        raise bad_input(
            wanted=f"as many micro-batches on every replica, {max(pieces)}, as all gather parameters together",
            got=f"{min(rows)} sequences on the smallest (rows {list(rows)})",
            do="raise train.batch, set train.accumulate, or make plan.batch_fractions more equal",
            key="plan.batch_fractions",
        )
    return (max(pieces),) * len(pieces)


def _bucket_bytes(sharding: Sharding, request: Request) -> int:
    """Return the size of gradient buckets.

    With sharded states buckets are small, because every bucket in flight is held several times.
    """
    if not sharding.is_sharded:
        return BUCKET_BYTES
    gradients = 4 * sum(prod(shape) for _, shape in request.shapes)
    return min(BUCKET_BYTES, max(_LEAST_BUCKET_BYTES, gradients // _BUCKETS))


def _islands(config: RunConfig) -> tuple[tuple[int, ...], ...]:
    asked = config.machines.islands
    return () if asked == "auto" else tuple(tuple(sorted(island)) for island in asked)


def _share(config: RunConfig, replicas: int) -> tuple[float, ...]:
    asked = config.plan.batch_fractions
    if asked == "auto":
        return (1.0 / replicas,) * replicas
    if len(asked) != replicas:
        raise bad_input(
            wanted=f"one share for each of {replicas} replicas",
            got=f"{len(asked)} ({asked})",
            do="list as many shares as there are processes",
            key="plan.batch_fractions",
        )
    return tuple(part / sum(asked) for part in asked)


def _forecast(found: Recipe, request: Request) -> Cost:
    plan = found.plan
    if found.stages > 1:
        return Cost()  # which parameters lie on which rank is known when the cuts are
    methods = found.methods
    if methods.exchange.asks_for_islands and not plan.islands:
        methods = methods.under(exchange=ALL_REDUCE)  # what is chosen when the islands are known sends no more
    levels = ProcessGroups.islands(plan.islands) if plan.islands else ProcessGroups.flat(plan.mesh.replica)
    if found.sync.probe is not None:
        return price_probed(found.sync.probe, levels)
    if (loop := found.sync.loop) is None:
        cost = price_of(methods, request.shapes, levels, walk=request.walk)
        return cost.model_copy(update={"state_bytes": _held(found, request, levels)})
    islands = ProcessGroups.islands(plan.islands or [[rank] for rank in range(plan.ranks)])
    known = len(islands.groups["island"])
    if loop.local_steps == "auto" or len(loop.local_steps) != known:  # not known yet: no island makes more than all
        loop = replace(loop, local_steps=())
    cost = price_apart(loop, found.methods, request.shapes, islands)
    return cost.model_copy(update={"state_bytes": _held_apart(loop, found, request, islands)})


def _held(found: Recipe, request: Request, levels: ProcessGroups) -> tuple[int, ...]:
    """Return the bytes of model state by rank; empty if they are not known yet."""
    if request.walk is None or (found.sharding.needs_islands and not found.plan.islands):
        return ()
    trained = frozenset(n for n, _ in request.shapes)
    return state_bytes(found.sharding, request.walk, trained, levels, slots=len(found.optimizer_with(1.0).slots))


def _held_apart(loop: OuterLoopConfig, found: Recipe, request: Request, islands: ProcessGroups) -> tuple[int, ...]:
    """Return the same in local-update training, plus the outer loop's state for all trained parameters."""
    slots = (
        1 + len(loop.outer_optimizer.slots) + (loop.step_exchange is not None)
    )  # global parameters; the island's parameters one step ago
    outside = 4 * slots * sum(prod(shape) for _, shape in request.shapes)
    return tuple(held + outside for held in _held(found, request, islands))
