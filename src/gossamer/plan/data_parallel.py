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
    sync          auto stays where the laws allow what may be chosen, local updates; else it is every_step
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from gossamer import recipe
from gossamer.comm.message import ProcessGroups
from gossamer.optimizer.common_adamw import CommonAdamW
from gossamer.plan import Planner, Request, price_apart, price_of, price_probed, state_bytes
from gossamer.plan._update_work import UpdateWork
from gossamer.plan.exchange import PERIODS, written_of
from gossamer.recipe import EVERY_STEP, PlanMethods, Recipe
from gossamer.recipe.plan_methods import ALL_REDUCE, AUTO
from gossamer.recipe.rank_layout import MICROBATCH_TOKENS, RankLayout
from gossamer.sharding import Sharding
from gossamer.sharding.tiers import Tiers
from gossamer.spec.config import RunConfig
from gossamer.spec.cost import Cost
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import Exchanges, Written
from gossamer.spec.plan import BUCKET_BYTES, MeshSizes, Plan
from gossamer.spec.units import show_bytes
from gossamer.sync import OuterLoopConfig

# Of sharded states. With buckets of 1 MiB, a step at 100 Mbit/s takes 1.23 times as long as with these (zero1).
_BUCKETS, _LEAST_BUCKET_BYTES = 64, 4 << 20
_STEPS = 10  # of a run with a warm-up: laws ask whether there is one, not how long it is


@dataclass(frozen=True, slots=True)
class DataParallel(Planner):
    """A planner for data-parallel replicas, each of one or more pipeline stages.

    `microbatch_tokens`: the largest micro-batch that `accumulate: auto` chooses, in tokens.
    """

    microbatch_tokens: int = MICROBATCH_TOKENS

    def plan(self, request: Request) -> Plan:
        config = request.config
        layout = RankLayout.of(config, request.ranks, microbatch_tokens=self.microbatch_tokens)
        mesh, reasons = layout.mesh, dict(layout.reasons)
        asked = PlanMethods.asked(config.plan)
        pieces = layout.microbatches_with(asked.sharding)
        exchange, reasons["exchange"] = _exchange(asked, mesh)
        if request.units:
            reasons["units"] = (
                "given" if config.plan.units != "auto" else "the repeated blocks, and what else owns parameters"
            )
        plan = Plan(
            mesh=mesh,
            batch_fractions=layout.batch_fractions,
            rows=layout.rows,
            microbatches=pieces,
            pipeline_schedule=_schedule(config, mesh),
            stage_ranks=layout.stage_ranks,
            units=request.units,
            activation_compression=_boundary(config),
            exchange=exchange,
            islands=_islands(config),
            sharding=config.plan.sharding,
            sync=config.plan.sync,
            savers=config.plan.named_savers,
            bucket_bytes=_bucket_bytes(asked.sharding, request),
            backend="nccl" if request.device == "cuda" else "gloo",
        )
        if against := _against_local_updates(asked, config, plan):
            plan = plan.model_copy(update={"sync": EVERY_STEP})
            reasons["sync"] = f"every step: {against}"
        found = recipe.check(config, plan)
        plan = plan.model_copy(update={"reasons": {**reasons, **_reasons(found, request)}})
        return plan.model_copy(update={"forecast": _forecast(found, request)}) if request.shapes else plan


def _against_local_updates(asked: PlanMethods, config: RunConfig, plan: Plan) -> str:
    """Return why `plan.sync: auto` may not choose local updates for this plan; "" where it may, or chooses nothing.

    Either the choice does not know how to, or a law refuses what it would write and not the plan as it is. A law that
    refuses `auto` too is left to the check of the plan, as it names what to change.
    """
    if not (asked.chooses_sync and asked.chooses_exchange):
        return ""
    unknown = {"sharded states": asked.sharding.is_sharded, "plan.adapt": config.plan.adapts}
    if why := " and ".join(name for name, holds in unknown.items() if holds):
        return f"local updates cannot be chosen with {why}"
    at_once = recipe.check(config, plan.model_copy(update={"sync": EVERY_STEP}))
    as_asked = Recipe.of(config, plan)
    for period in PERIODS:
        if bool(period.second_moments) != CommonAdamW.serves(at_once.optimizer):
            continue
        written = {"sync": written_of(period, 1, _STEPS), "exchange": ALL_REDUCE}
        apart = Recipe.of(config, plan.model_copy(update=written))
        for law in recipe.LAWS:
            if law(as_asked) is None and (error := law(apart)) is not None:
                return f"local updates are refused ({_wanted(error)})"
    return ""


def _wanted(error: BadInput) -> str:
    """Return what an error of a law wants, without what it got and what to do about it."""
    return str(error).partition(", got ")[0]


def _exchange(asked: PlanMethods, mesh: MeshSizes) -> tuple[Exchanges, str]:
    if not asked.chooses_exchange:
        return asked.plan.exchange, "given"
    if asked.sync.probe is not None:
        return ALL_REDUCE, "no gradient is exchanged"
    if asked.sync.loop is not None:
        return ALL_REDUCE, "all-reduce of the gradients inside an island; plan.sync says what islands exchange"
    if asked.sharding.is_tiered:
        return ALL_REDUCE, "all-reduce: a mean goes to the tiers as it is, and auto chooses no other exchange for them"
    if mesh.in_stages:
        return ALL_REDUCE, "all-reduce: auto does not choose a compressed exchange for a model in stages"
    return AUTO, "chosen before step 1, as the links are"


def _reasons(found: Recipe, request: Request) -> dict[str, str]:
    """Return notes on the plan: the cost of verification and of the update, and settings without effect."""
    notes, plan, every = {}, found.plan, found.config.train.verify.every
    if every:
        notes["verify"] = f"1 step in {every} is recomputed by two other ranks: {200 / every:.3g} % more compute"
    sharers = plan.mesh.replica if found.sharding.is_sharded else 1
    work = UpdateWork.of(found.optimizer, request.shapes, ranks=sharers)
    told = "" if work is None else work.told(max(plan.rows) * found.config.data.sequence)
    if remarks := "; ".join(filter(None, (found.optimizer.remark, told))):
        notes["optimizer"] = remarks
    if isinstance(found.sharding, Tiers) and plan.ranks > 1:
        limit, what = found.sharding.new_limits().file.limit, "a stage's" if found.in_stages else "all"
        what = "some" if found.sharding.is_sharded else what
        notes["sharding"] = (
            f"tiers: {plan.ranks} files, each with the states of {what} parameters, of at most {show_bytes(limit)}: "
            f"{show_bytes(plan.ranks * limit)} where one disk has all"
        )
        if found.sharding.is_sharded:
            notes["sharding"] += "; bytes between ranks are those of a step that keeps no weight until backward"
    if found.config.train.adversarial.epsilon:
        ahead = found.config.train.adversarial.ahead
        passes = "two passes a step, beside one in a companion process," if ahead else "three passes a step,"
        notes["adversarial"] = f"{passes} which the estimates of time leave out"
    loop = found.sync.loop
    if loop is not None and (unused := recipe.not_used_inside(loop, plan.islands, plan.exchange)):
        notes["exchange"] = unused
    if found.config.machines.islands != "auto" and found.in_stages:
        notes["islands"] = "not used: a model in stages has no islands"
    return notes


def _schedule(config: RunConfig, mesh: MeshSizes) -> Written:
    if not config.plan.chooses_schedule:
        return config.plan.pipeline_schedule
    return "one_f_one_b" if mesh.in_stages else "single_stage"


def _boundary(config: RunConfig) -> Written | tuple[Written, ...]:
    asked = config.plan.activation_compression
    return tuple(asked) if isinstance(asked, list) else asked


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


def _forecast(found: Recipe, request: Request) -> Cost:
    plan = found.plan
    if found.in_stages:
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
    return state_bytes(found.sharding, request.walk, trained, levels, optimizer=found.optimizer_with(1.0))


def _held_apart(loop: OuterLoopConfig, found: Recipe, request: Request, islands: ProcessGroups) -> tuple[int, ...]:
    """Return the same in local-update training, plus the outer loop's state for all trained parameters."""
    slots = (
        1 + len(loop.outer_optimizer.slots) + (loop.step_exchange is not None)
    )  # global parameters; the island's parameters one step ago
    outside = 4 * slots * sum(prod(shape) for _, shape in request.shapes)
    return tuple(held + outside for held in _held(found, request, islands))
