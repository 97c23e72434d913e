"""Build the trainer of one rank from a module, a plan and the rank's position in the process groups."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from gossamer import sync
from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.loss import Loss
from gossamer.model.compiled import compile_units
from gossamer.model.forward_adapter import caller_of
from gossamer.model.generate import TextCoder
from gossamer.model.precision import precision_of
from gossamer.model.side_effects import gradless, untouched
from gossamer.model.unit_seeds import unit_seeds
from gossamer.optimizer import Optimizer
from gossamer.optimizer.master import HALF, Master
from gossamer.pipeline.from_plan import forward_only_of, schedule_of
from gossamer.pipeline.schedule import Schedule
from gossamer.pipeline.stage_links import StageLinks, links_of
from gossamer.pipeline.tied_weights import TiedWeights, holders_of
from gossamer.recipe import Recipe
from gossamer.run.allocator import give_freed_memory_back, keep_freed_memory
from gossamer.run.batches import Batches, Feed
from gossamer.run.checkpoint import CheckpointContents, trainable
from gossamer.run.checkpoint_manager import CheckpointManager
from gossamer.run.forward import Pipeline
from gossamer.run.initial_values import check_initial
from gossamer.run.loss_scale import LossScale
from gossamer.run.nonfinite_policy import NonFinitePolicy
from gossamer.run.reexecution import Reexecution
from gossamer.run.staged_model import Forward, StagedModel, StagePart
from gossamer.run.step_algorithm import Gradients, GradientStep, StepAlgorithm
from gossamer.run.step_log import StepLog
from gossamer.run.step_runner import ModelPart, ModelRuntime, UnsplitModel
from gossamer.run.text_sampling import Logits, Sampler
from gossamer.run.trainer import Goal, Replan, Sink, Trainer
from gossamer.run.verify import Verifier
from gossamer.run.zeroth_order_step import ZerothOrderStep
from gossamer.sharding import LEVEL, RowPartition, ShardedOptimizer, ShardedParameters, Sharding, UnshardOrder
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.odd_one_out import outvoted, parted
from gossamer.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The inputs of a trainer that come from the user: module, loss, data, configuration, plan and device."""

    module: nn.Module  # of this rank
    objective: Loss
    train: Batches
    validation: Batches | None
    config: RunConfig
    plan: Plan
    device: torch.device
    cut: StagedModel | None = None  # with pipeline parallelism: the stages that the module holds
    words: TextCoder | None = None  # the tokenizer, where the data is text
    walk: UnshardOrder | None = None  # with sharded parameters: the order in which units are unsharded

    @property
    def recipe(self) -> Recipe:
        """Return the methods that the plan and the configuration name."""
        return Recipe.of(self.config, self.plan)

    @property
    def outline(self) -> nn.Module:
        """Return the full model by names and shapes; without parameter values if the module holds only some stages."""
        return self.module if self.cut is None else self.cut.ways.module

    @property
    def units(self) -> tuple[str, ...]:
        """Return the names of the model's units."""
        return self.plan.units if self.cut is None else self.cut.ways.units


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The callbacks and services of a trainer: record sink, position reports, stop requests, checkpoint manager."""

    sink: Sink
    at: Callable[[int, str], None]
    asked_to_stop: Callable[[], bool]
    saver: CheckpointManager
    beside: CommThread | None = None  # for rounds of the outer loop and all-gathers of shards, beside the steps
    replan: Callable[[int], Replan | None] = lambda step: None


def check_before_start(parts: Parts) -> None:
    """Check the data, the model and the configuration before any process group exists.

    Raises BadInput, e.g. for too little training data, nothing trainable, a warm-up longer than the run, an unsuitable
    precision, or a parameter on the meta device.
    """
    plan, config = parts.plan, parts.config
    if len(parts.train) == 0:
        raise BadInput("the training data holds no sequence: give more text or a shorter data.sequence", key="data")
    if plan.batch > len(parts.train):
        raise bad_input(
            wanted=f"at least {plan.batch} training sequences (one step's batch)",
            got=f"{len(parts.train)} of {config.data.sequence} tokens",
            do="lower train.batch or data.sequence, or give more text",
            key="train.batch",
        )
    if config.train.sample_prompt and parts.words is None:
        raise bad_input(
            wanted="data that is text",
            got="sequences without a tokenizer",
            do="leave it out",
            key="train.sample_prompt",
        )
    parts.recipe.lr_schedule.factor(0, config.train.steps)  # a warm-up that fits
    if not trainable(parts.outline):
        raise BadInput("no parameter of the model requires a gradient: nothing would be trained", key="model")
    precision = precision_of(config.train.precision)
    for name, param in parts.outline.named_parameters():
        if param.is_floating_point():
            precision.check(param.dtype)
        if param.device.type == "meta":
            raise BadInput(f"parameter {name} is on the meta device: materialise the model first", key="model")
    _check_copies(parts)


def _check_copies(parts: Parts) -> None:
    """Raise BadInput for local-update training of half-precision parameters with sharded optimizer states."""
    methods = parts.recipe.methods
    if methods.sync.loop is None:
        return
    halves = [name for name, param in trainable(parts.outline).items() if param.dtype in HALF]
    if halves and methods.sharding.is_sharded:
        raise bad_input(
            wanted="parameters in float32, to shard the states of islands that train apart",
            got=f"{len(halves)} in half types, such as {halves[0]}",
            do="set model.dtype to float32 (train.precision: bf16 still computes in bf16), or plan.sharding to none",
            key="plan.sharding",
        )


def engine_of(parts: Parts) -> ModelRuntime:
    """Return the model with its loss, precision and random state. Compiles units, so call it once per run."""
    config, module = parts.config, parts.module
    module.train()
    if config.model.compile and parts.cut is None:  # stages are already compiled
        compile_units(module, parts.plan.units)
    return ModelRuntime(
        module=module,
        caller=caller_of(module, parts.train.batch(np.zeros(1, np.int64))),
        objective=parts.objective,
        precision=precision_of(config.train.precision),
        randomness=unit_seeds(module, parts.units, seed=config.train.seed),
        device=parts.device,
    )


def build(parts: Parts, engine: ModelRuntime, pump: CommThread, around: Surroundings) -> Trainer:
    """Build the trainer of one rank.

    Raises BadInput if an exchange cannot serve its parameters or process groups, or if ranks have different initial
    parameters.
    """
    config, plan, module = parts.config, parts.plan, parts.module
    check_initial(pump.channel, module, parts.cut)
    rank, levels = pump.channel.rank, pump.channel.levels
    params = trainable(module)
    pipeline = pipeline_of(parts, rank, levels)
    tied = tied_of(parts, rank, levels)
    recipe = parts.recipe
    together, sharding = recipe.sync, recipe.sharding
    rule = Master(inner=_rule(recipe, levels, rank))  # copies half types alone
    sharding.check(levels)
    deal = sharding.deal(levels)
    exchange = recipe.methods.exchanges(params, deal)
    shards = None if parts.walk is None else _shards(parts, parts.walk, around, rank, deal.of_parameters)
    states = ShardedOptimizer.of(rule, params, deal, rank=rank, differences=sharding.differences, shards=shards)
    replica = sync.GradientReducer(
        params if together.probe is None else {},  # without gradients there is nothing to exchange
        exchange,
        pump,
        bucket_bytes=plan.bucket_bytes,
        counted_elsewhere=frozenset(params) if states.is_spare else tied.elsewhere,
        meets="all" if together.loop is None else "island",
        owned=states.own if states.is_sharded else None,
        gives_back=sharding.gives_back,
        keeps_sent=config.train.verify.every > 0,
    )
    scaling, progress = LossScale.of(engine.precision), around.saver.progress
    truth = {n: states.held.get(n, {}).get("master", p.detach()) for n, p in params.items()}
    apart = sync.OuterLoop.of(
        together.loop,
        params,
        truth,
        replica,
        around.beside,
        units=parts.units,
        bucket_bytes=plan.bucket_bytes,
        second_moments=lambda names: states.second_moments(progress.updates, names),
        asked=around.asked_to_stop,
    )
    loop = together.loop
    pace = loop.pace(levels.groups["island"]) if loop is not None else sync.LocalStepSchedule()
    feed = Feed(parts.train, plan, plan.place_of(rank)[0], config.train.seed, pipeline.batches, pace)
    around.saver.contents = CheckpointContents(module, states, replica, scaling, apart, progress, parts.cut)
    pieces = pieces_of(parts, engine)
    descent: StepAlgorithm = GradientStep(
        gradients=Gradients(pieces=pieces, pipeline=pipeline, tied=tied, pump=pump, replica=replica, at=around.at),
        states=states,
        clip=config.train.max_grad_norm,
    )
    if together.probe is not None:
        descent = ZerothOrderStep(
            probing=sync.ZerothOrderRank(together.probe, params, truth, replica, config.train.seed),
            module=module,
            pieces=pieces,
            pipeline=pipeline,
            pump=pump,
            rate=rule.lr,
            clip=config.train.max_grad_norm,
            log=StepLog(around.saver.directory, is_writer=around.saver.writer == 0),
            at=around.at,
        )
    return Trainer(
        engine=engine,
        pieces=pieces,
        pipeline=pipeline,
        pump=pump,
        sync=together,
        replica=replica,
        descent=descent,
        apart=apart,
        word=apart.roll or (sync.StatusExchange.of(pump.channel, loop.warmup_steps) if loop is not None else None),
        rule=rule,
        states=states,
        sharding=sharding,
        rate=recipe.lr_schedule,
        feed=feed,
        validation=parts.validation,
        sampler=_sampler(parts, engine, pipeline, pump),
        params=params,
        goal=Goal(
            steps=config.train.steps,
            evaluate_every=config.train.evaluate_every,
            evaluate_sequences=config.train.evaluate_sequences,
            checkpoint_every=config.train.checkpoint_every,
            seed=config.train.seed,
            seconds=config.train.seconds,
        ),
        policy=NonFinitePolicy(config.train.on_nonfinite),
        scaling=scaling,
        verifier=Verifier(
            wanted=config.train.verify,
            witness=Reexecution(engine, feed, params),
            replica=replica,
            states=states,
            sink=around.sink,
        ),
        sink=around.sink,
        at=around.at,
        save=lambda progress, last: around.saver.save(progress, last=last),
        settle=around.saver.report,
        asked_to_stop=around.asked_to_stop,
        replan=around.replan,
        progress=progress,
    )


def _rule(recipe: Recipe, levels: ProcessGroups, rank: int) -> Optimizer:
    """Return the optimizer; with averaging of second moments, one that knows this island's fraction of all samples."""
    loop, plan = recipe.sync.loop, recipe.plan
    if loop is None or not loop.average_second_moments_every:
        return recipe.optimizer
    rows = [plan.rows[plan.place_of(one)[0]] for one in levels.everyone]
    return recipe.optimizer_with(sum(rows[one] for one in levels.group("island", rank)) / sum(rows))


def _shards(parts: Parts, walk: UnshardOrder, around: Surroundings, rank: int, deal: RowPartition) -> ShardedParameters:
    pump, counts = around.beside, parts.plan.microbatches
    assert pump is not None, "what is gathered has a pump of its own"
    if len(set(counts)) > 1:
        raise bad_input(
            wanted="as many micro-batches on every replica, as all gather parameters together",
            got=str(list(counts)),
            do="plan again, or leave plan.sharding at zero2",
            key="plan.sharding",
        )
    pump.channel.widen(ProcessGroups({LEVEL: deal.levels.groups[deal.path[0]]}))
    return ShardedParameters.of(parts.module, walk, pump, deal=deal, rank=rank)


def pieces_of(parts: Parts, engine: ModelRuntime) -> dict[int, ModelPart]:
    """Return the stages of this rank by stage number; stage 0 is the full model without pipeline parallelism."""
    if parts.cut is None:
        return {0: UnsplitModel(engine)}
    return {number: StagePart(engine, parts.cut.ways, stage) for number, stage in parts.cut.stages.items()}


def _sampler(parts: Parts, engine: ModelRuntime, pipeline: Pipeline, pump: CommThread) -> Sampler | None:
    train, cut = parts.config.train, parts.cut
    if not train.sample_prompt:
        return None
    assert parts.words is not None  # see check_before_start
    logits = replace(engine, objective=Logits(), caller=caller_of(engine.module))
    if cut is not None:
        cut = replace(cut, ways=cut.ways.running(Forward(Logits(), engine.precision, engine.device)))
    found = Sampler(
        prompt=train.sample_prompt,
        tokens=train.sample_max_new_tokens,
        window=parts.config.data.sequence,
        seed=train.seed,
        words=parts.words,
        pieces=pieces_of(replace(parts, cut=cut), logits),
        pipeline=pipeline,
        pump=pump,
    )
    with (
        untouched(engine.module),
        found.evaluating(),
    ):  # a forward that gives no logits is to be known now, and not hours later
        rows = found.rows([0])
        if cut is None:
            gradless(lambda: logits.loss(rows, step=0, key=0))
        else:
            cut.ways.of(rows, training=False)
    return found


def pipeline_of(parts: Parts, rank: int, levels: ProcessGroups) -> Pipeline:
    """Return this rank's pipeline: its schedule of a step and its stage links. Raises BadInput."""
    plan, methods = parts.plan, parts.recipe.methods
    replica, place = plan.place_of(rank)
    made = schedule_of(plan, replica, methods.schedule)

    def evaluating(microbatches: int) -> tuple[Schedule, StageLinks]:
        forward_only = forward_only_of(plan, made, microbatches)
        return forward_only, links_of(plan, levels, forward_only, replica, methods.activation)

    links = links_of(plan, levels, made, replica, methods.activation)
    return Pipeline(rank=place, schedule=made, links=links, evaluating=evaluating)


def tied_of(parts: Parts, rank: int, levels: ProcessGroups) -> TiedWeights:
    """Return the tied parameters: those that several stages of this rank's replica hold."""
    shared = {} if parts.cut is None else parts.cut.shared()
    return TiedWeights(rank, levels, holders_of(parts.plan, parts.plan.place_of(rank)[0], shared))


def check_agreement(pump: CommThread, facts: dict[str, str]) -> None:
    """Check that all ranks hold the same `facts`, such as configuration, plan, data and model, by name.

    Raises BadInput that names the ranks which differ.
    """
    digests = [int.from_bytes(hashlib.sha256(v.encode()).digest()[:6], "big") for v in facts.values()]
    rows = gathered(pump.channel, digests)  # 48 bits are exact in float64
    for column, name in enumerate(facts):
        values = rows[:, column].tolist()
        if outvoted(values) != []:
            raise BadInput(
                f"the ranks do not agree about the {name}: {parted(values)}. Give every host the same {name}"
            )


def fingerprint(module: nn.Module) -> str:
    """Return names, shapes and dtypes of all parameters, equal on all ranks (for values see `initial_values.py`)."""
    return "|".join(f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in module.named_parameters())


def set_memory(sharding: Sharding) -> None:
    """Set the allocator of this process, before its first tensor.

    With sharded model states freed memory returns to the system; otherwise the process keeps it.
    """
    if sharding.is_sharded:
        give_freed_memory_back()
    else:
        keep_freed_memory()


def set_threads(wanted: int | str, local_ranks: int) -> None:
    """Set the number of compute threads of this process.

    `wanted`: that number, or `auto`: OMP_NUM_THREADS if the environment sets it, else the host's cores divided evenly
    by `local_ranks`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    given = os.environ.get("OMP_NUM_THREADS", "")
    shared = int(given) if given.isdigit() and int(given) else max(1, cores // local_ranks)
    torch.set_num_threads(shared if wanted == "auto" else int(wanted))
