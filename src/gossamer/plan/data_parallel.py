"""DataParallel: replicas of the model, each in as many stages as asked for, compute their shares of the batch.

The trivial planner, and the control every later plan is judged against. It resolves:
    share         equal parts, unless given
    rows          the batch cut by share, largest remainders first
    microbatches  the fewest whose tokens stay below `microbatch_tokens`, and of a model in stages four per stage (the
                  rank's idle share is then below a fifth), unless `train.accumulate` or `plan.microbatches` says
    schedule      one_f_one_b for stages, which keeps the fewest micro-batches alive
    stages        the ranks of every stage, where they are given: else each replica has one rank for every stage
    cuts          auto stays: the work of every unit is known when the model was traced (gossamer.cutting)
    exchange      auto stays: it is chosen from measured links when all ranks are there (gossamer.exchanging)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import prod

from gossamer import memory, optim, sync
from gossamer.data import share_rows
from gossamer.memory import Sharding
from gossamer.optim import Rule
from gossamer.optim.common_adamw import CommonAdamW
from gossamer.plan import Planner, Request, adapt, price_apart, price_of, price_probed, state_bytes
from gossamer.plan._places import Groups, check_microbatches, shares_of, stages_of
from gossamer.spec.choice import Choice, Exchanges, Written, asks_for_islands, told
from gossamer.spec.config import MeshSection, RunConfig
from gossamer.spec.cost import Cost
from gossamer.spec.errors import bad_input
from gossamer.spec.plan import BUCKET_BYTES, Mesh, Plan
from gossamer.sync import Loop, Sync
from gossamer.wire.message import Levels

_PER_STAGE = 4  # micro-batches
_RULE = "train.optimizer"
_EVERY_STEP = "every_step"  # what auto stands for until it is chosen
# Where buckets are to be small. Of a MiB, a step at 100 Mbit/s takes 1.23 times as long as with these (zero1).
_BUCKETS, _LEAST_BUCKET_BYTES = 64, 4 << 20


@dataclass(frozen=True, slots=True)
class DataParallel(Planner):
    """`microbatch_tokens`: the largest micro-batch that `accumulate: auto` chooses, in tokens."""

    microbatch_tokens: int = 16384

    def plan(self, request: Request) -> Plan:
        config, reasons = request.config, {}
        stages = stages_of(config.plan, request.ranks)
        mesh = Mesh(pipe=len(stages)) if stages else _mesh(config.plan.mesh, request.ranks)
        share = shares_of(config.plan, stages) if stages else _share(config, mesh.replica)
        whose = "the ranks of each stage" if stages else f"{mesh.replica} replicas"
        reasons["share"] = "given" if config.plan.share != "auto" else f"equal parts for {whose}"
        rows = (config.train.batch,) if stages else share_rows(config.train.batch, share)
        pieces, reasons["microbatches"] = self._microbatches(config, rows, mesh.pipe, stages)
        pieces = _in_step(config, rows, pieces)
        method = _method(config, mesh)
        exchange, reasons["exchange"] = _exchange(config, mesh, method)
        _check_adapt(config, mesh, method)
        _check_states(config, mesh, method)
        _check_probe(config, method)
        _rule(config, method.loop)
        if config.train.verify.every:
            reasons["verify"] = _verified(config, mesh, method)
        if request.units:
            reasons["units"] = (
                "given" if config.plan.units != "auto" else "the repeated blocks, and what else owns parameters"
            )
        plan = Plan(
            mesh=mesh,
            share=share,
            rows=rows,
            microbatches=pieces,
            schedule=_schedule(config, mesh),
            stages=stages,
            units=request.units,
            boundary=_boundary(config, mesh),
            exchange=exchange,
            islands=_islands(config, request.ranks),
            states=config.plan.states,
            sync=_sync(config, mesh),
            bucket_bytes=_bucket_bytes(config, request),
            backend="nccl" if request.device == "cuda" else "gloo",
            reasons=reasons,
        )
        return plan.model_copy(update={"forecast": _forecast(plan, request)}) if request.shapes else plan

    def _microbatches(
        self, config: RunConfig, rows: tuple[int, ...], stages: int, groups: Groups
    ) -> tuple[tuple[int, ...], str]:
        """Per replica, and why. `groups`: the ranks of every stage, where they are given."""
        wanted, key = config.plan.microbatches, "plan.microbatches"
        if wanted == "auto":
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


def _mesh(asked: MeshSection, ranks: int) -> Mesh:
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
    return Mesh(replica=ranks // stages, pipe=stages)


def _method(config: RunConfig, mesh: Mesh) -> Sync:
    """When replicas exchange what. Raises BadInput where that cannot be."""
    method = sync.build(_EVERY_STEP if config.plan.sync == "auto" else config.plan.sync, key="plan.sync")
    if not method.is_plain and mesh.pipe > 1:
        where = "islands train apart" if method.loop is not None else "losses alone decide"
        raise bad_input(
            wanted=f"every process to hold the whole model, where {where}",
            got=f"a model in {mesh.pipe} stages",
            do="leave plan.mesh.pipe at 1, or plan.sync at every_step",
            key="plan.sync",
        )
    if method.level(0) != "all" and not optim.build(config.train.optimizer, key=_RULE).begins_apart:
        raise bad_input(
            wanted="first steps in which all gradients meet, as in others this rule's second moment stays as it is",
            got=f"plan.sync {told(config.plan.sync)}",
            do="give plan.sync a start, of a tenth of the run, say",
            key=_RULE,
        )
    return method


def _sync(config: RunConfig, mesh: Mesh) -> Written:
    """`auto` stays, where islands could train apart: it is chosen from measured links (gossamer.exchanging)."""
    asked, whole = config.plan, mesh.pipe == 1 and not memory.build(config.plan.states).is_sharded
    if asked.sync != "auto":
        return asked.sync
    if asked.exchange != "auto":
        raise bad_input(
            wanted="an exchange that is chosen with it",
            got=f"plan.exchange {told(asked.exchange)}",
            do="leave plan.exchange at auto, or name a method of `gossamer methods sync`",
            key="plan.sync",
        )
    return "auto" if whole and asked.adapt == "none" else "every_step"


def _exchange(config: RunConfig, mesh: Mesh, method: Sync) -> tuple[Exchanges, str]:
    if method.probe is not None:
        if config.plan.exchange not in ("auto", "dense"):
            raise bad_input(
                wanted="no exchange of gradients, where losses alone decide",
                got=told(config.plan.exchange) if not isinstance(config.plan.exchange, list) else "a list of them",
                do="leave plan.exchange at auto",
                key="plan.exchange",
            )
        return "dense", "no gradient is exchanged"
    if config.plan.exchange != "auto":
        if config.train.clip and '"momentum"' in json.dumps(config.plan.exchange):
            raise bad_input(
                wanted="no clipping around the exchange `momentum`, whose norm is mostly its code's error",
                got=f"train.clip {config.train.clip:g}",
                do="set train.clip to 0",
                key="plan.exchange",
            )
        return config.plan.exchange, "given"
    if method.loop is not None:
        return "dense", "all-reduce of the gradients of an island; what goes between islands is plan.sync's"
    if mesh.pipe > 1:
        return "dense", "all-reduce: of a model in stages only what is given is compressed"
    return "auto", "chosen before step 1, as the links are"


def _schedule(config: RunConfig, mesh: Mesh) -> Written:
    if config.plan.schedule != "auto":
        return config.plan.schedule
    return "one_stage" if mesh.pipe == 1 else "one_f_one_b"


def _boundary(config: RunConfig, mesh: Mesh) -> Written | tuple[Written, ...]:
    asked = config.plan.boundary
    if not isinstance(asked, list):
        return asked
    if len(asked) != mesh.pipe - 1:
        raise bad_input(
            wanted=f"one way for each of the {mesh.pipe - 1} borders between {mesh.pipe} stages",
            got=f"{len(asked)}",
            do="list as many, or give one for all",
            key="plan.boundary",
        )
    return tuple(asked)


def _check_adapt(config: RunConfig, mesh: Mesh, method: Sync) -> None:
    if config.plan.adapt == "none":
        return
    by_paths = method.loop is not None and adapt.build(config.plan.adapt, key="plan.adapt").needs_paths
    if not method.is_plain and not by_paths:
        gradients = "gradients that all ranks exchange at every step, which is what"
        raise bad_input(
            wanted=f"bcrs, or {gradients} other policies adapt" if method.loop else f"{gradients} a policy adapts",
            got=f"plan.sync {told(config.plan.sync)}",
            do="leave plan.adapt at none",
            key="plan.adapt",
        )
    if mesh.pipe > 1 and not adapt.build(config.plan.adapt, key="plan.adapt").for_links:
        raise bad_input(
            wanted="a policy for the links between stages, ada_topk",
            got=f"{told(config.plan.adapt)} for a model in {mesh.pipe} stages",
            do="name another, leave plan.adapt at none, or plan.mesh.pipe at 1",
            key="plan.adapt",
        )


def _check_states(config: RunConfig, mesh: Mesh, method: Sync) -> None:
    sharding = memory.build(config.plan.states, key="plan.states")
    if not sharding.is_sharded:
        return
    key, do = "plan.states", "leave plan.states at whole"
    if sharding.takes_parameters and config.plan.schedule not in ("auto", "one_stage"):
        got = f"plan.schedule {told(config.plan.schedule)}"
        raise bad_input(wanted="plan.schedule one_stage, for sharded parameters", got=got, do=do, key=key)
    if mesh.pipe > 1 or method.probe is not None:
        got = f"a model in {mesh.pipe} stages" if mesh.pipe > 1 else f"plan.sync {told(config.plan.sync)}"
        raise bad_input(wanted="whole replicas whose gradients meet, for sharded states", got=got, do=do, key=key)
    if method.loop is not None:
        _check_apart(config, sharding, method.loop)
    if config.plan.adapt != "none":
        got = f"plan.adapt {told(config.plan.adapt)}, which measures whole mean gradients"
        raise bad_input(wanted="no policy, where a rank knows the mean of its own rows alone", got=got, do=do, key=key)
    if not optim.build(config.train.optimizer, key=_RULE).by_element:
        raise bad_input(
            wanted="a rule that moves each number by itself, such as adamw, as no rank sees a whole parameter",
            got=f"train.optimizer {told(config.train.optimizer)}",
            do=do,
            key=key,
        )


def _check_apart(config: RunConfig, sharding: Sharding, loop: Loop) -> None:
    """Raises BadInput where states cannot be sharded so while islands train apart: each has its own."""
    key, got = "plan.states", told(config.plan.states)
    if sharding.takes_parameters or sharding.differences is not None:
        raise bad_input(
            wanted="zero1 or zero2, where islands train apart: what meets between them is whole parameters, as each "
            "rank holds them",
            got=got,
            do="write plan.states: {zero1: {level: island}} or {zero2: {level: island}}, or plan.sync: every_step",
            key=key,
        )
    if loop.second_moments:
        raise bad_input(
            wanted="whole states, where islands bring their second moments together",
            got=got,
            do="leave second_moments out of plan.sync, or write plan.states: whole",
            key=key,
        )
    if not sharding.needs_islands:
        name = Choice.parse(config.plan.states).name
        raise bad_input(
            wanted="states that are shared out inside every island, where islands train apart: each has its own",
            got=f"{got}, over all ranks",
            do=f"write plan.states: {{{name}: {{level: island}}}}",
            key=key,
        )


def _verified(config: RunConfig, mesh: Mesh, method: Sync) -> str:
    """What verification costs. Raises BadInput where it cannot serve."""
    every, key = config.train.verify.every, "train.verify.every"
    if mesh.pipe > 1 or not method.is_plain:
        got = f"a model in {mesh.pipe} stages" if mesh.pipe > 1 else f"plan.sync {told(config.plan.sync)}"
        wanted = "whole replicas that hold the same at every step, by gradients, so that each can do another's work"
        raise bad_input(wanted=wanted, got=got, do="set it to 0, or plan.sync to every_step", key=key)
    if memory.build(config.plan.states, key="plan.states").gives_back:
        wanted, got = "whole, or zero1, so that each can do another's work", f"plan.states {told(config.plan.states)}"
        raise bad_input(wanted=f"plan.states {wanted}", got=got, do="set it to 0, or plan.states to zero1", key=key)
    if mesh.replica < 3:
        do = "set it to 0, or machines.processes to 3 or more"
        raise bad_input(wanted="3 replicas, of which two can outvote one", got=str(mesh.replica), do=do, key=key)
    return f"1 step in {every} is done again by two others: {200 / every:.3g} % more compute"


def _check_probe(config: RunConfig, method: Sync) -> None:
    if method.probe is None:
        return
    if not optim.build(config.train.optimizer, key=_RULE).is_plain:
        raise bad_input(
            wanted="sgd without momentum or weight decay, where losses alone decide: all that moves the parameters is "
            "then what the ranks have told each other",
            got=told(config.train.optimizer),
            do="set train.optimizer to {sgd: {lr: 1e-4}}; rates are much smaller than for gradients",
            key=_RULE,
        )
    if config.train.precision == "fp16":
        raise bad_input(
            wanted="fp32 or bf16, where there is no backward pass whose loss could be scaled",
            got="fp16",
            do="set train.precision to fp32: the differences of losses are small",
            key="train.precision",
        )


def _in_step(config: RunConfig, rows: tuple[int, ...], pieces: tuple[int, ...]) -> tuple[int, ...]:
    """Micro-batches per replica, where all must gather parameters equally often. Raises BadInput."""
    if not memory.build(config.plan.states, key="plan.states").takes_parameters:
        return pieces
    if max(pieces) > min(rows):
        raise bad_input(
            wanted=f"as many micro-batches on every replica, {max(pieces)}, as all gather parameters together",
            got=f"{min(rows)} sequences on the smallest (rows {list(rows)})",
            do="raise train.batch, set train.accumulate, or make plan.share more equal",
            key="plan.share",
        )
    return (max(pieces),) * len(pieces)


def _bucket_bytes(config: RunConfig, request: Request) -> int:
    """Of gradients. Where states are sharded to save memory, few of all must be under way: what is, by rows and coming
    together again, is there some times over.
    """
    if not memory.build(config.plan.states, key="plan.states").is_sharded:
        return BUCKET_BYTES
    gradients = 4 * sum(prod(shape) for _, shape in request.shapes)
    return min(BUCKET_BYTES, max(_LEAST_BUCKET_BYTES, gradients // _BUCKETS))


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
    if plan.mesh.pipe > 1:
        return Cost()  # which parameters lie on which rank is known when the cuts are
    to_come = plan.exchange == "auto" or (asks_for_islands(plan.exchange) and not plan.islands)
    written = "dense" if to_come else plan.exchange  # what is chosen or learned of the links sends no more
    levels = Levels.islands(plan.islands) if plan.islands else Levels.flat(plan.mesh.replica)
    method = sync.build(_EVERY_STEP if plan.sync == "auto" else plan.sync, key="plan.sync")
    if method.probe is not None:
        return price_probed(method.probe, levels)
    if (loop := method.loop) is None:
        cost = price_of(
            written,
            request.shapes,
            levels,
            bucket_bytes=plan.bucket_bytes,
            states=plan.states,
            walk=request.walk,
            microbatches=plan.microbatches[0],
        )
        return cost.model_copy(update={"state_bytes": _held(plan, request, levels, None)})
    islands = Levels.islands(plan.islands or [[rank] for rank in range(plan.ranks)])
    known = len(islands.groups["island"])
    if loop.steps == "auto" or len(loop.steps) != known:  # not known yet: no island makes more than all
        loop = replace(loop, steps=())
    cost = price_apart(loop, plan, request.shapes, islands)
    return cost.model_copy(update={"state_bytes": _held_apart(loop, plan, request, islands)})


def _held(plan: Plan, request: Request, levels: Levels, loop: Loop | None) -> tuple[int, ...]:
    """Bytes of model state, by rank, where they are known."""
    sharding = memory.build(plan.states, key="plan.states")
    if request.walk is None or (sharding.needs_islands and not plan.islands):
        return ()
    rule = _rule(request.config, loop)
    trained = frozenset(n for n, _ in request.shapes)
    return state_bytes(sharding, request.walk, trained, levels, slots=len(rule.slots))


def _rule(config: RunConfig, loop: Loop | None) -> Rule:
    """The update rule. Raises BadInput where islands cannot bring together what it knows, as they should."""
    rule = optim.build(config.train.optimizer, key=_RULE)
    return CommonAdamW.around(rule, 1.0) if loop is not None and loop.second_moments else rule


def _held_apart(loop: Loop, plan: Plan, request: Request, islands: Levels) -> tuple[int, ...]:
    """The same of islands that train apart, and on every rank what the outer loop keeps of all that is trained."""
    slots = 1 + len(loop.rule.slots) + (loop.each is not None)  # the anchor; where the island was a step ago
    outside = 4 * slots * sum(prod(shape) for _, shape in request.shapes)
    return tuple(held + outside for held in _held(plan, request, islands, loop))
