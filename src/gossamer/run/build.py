"""Build the trainer of one rank from a module, a plan and the rank's position in the process groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from gossamer import sync
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.model.forward_adapter import caller_of
from gossamer.model.layer_vectors import LayerHooks
from gossamer.model.side_effects import evaluating, gradless, untouched
from gossamer.optimizer import Optimizer
from gossamer.optimizer.master import Master
from gossamer.pipeline.tied_weights import TiedWeights
from gossamer.recipe import Recipe
from gossamer.run.adversarial_step import (
    AdversarialPart,
    AdversarialState,
    AdversarialStep,
    Attack,
    OfPresentWeights,
    OfPreviousWeights,
    PerturbedInputs,
    forms_of,
    perturbed_inputs,
)
from gossamer.run.batches import Feed, moved
from gossamer.run.buffer_rollback import BufferRollback
from gossamer.run.checkpoint import contents_of, trainable
from gossamer.run.companion import Companion
from gossamer.run.engine import holdings_of, pieces_of, pipeline_of
from gossamer.run.evaluation import Evaluator
from gossamer.run.evaluation_point import EvaluationPoint
from gossamer.run.forward import Pipeline
from gossamer.run.goal import Goal
from gossamer.run.initial_values import check_initial
from gossamer.run.loss_scale import LossScale
from gossamer.run.metrics import MeasuredLoss, Metric, load_metrics
from gossamer.run.nonfinite_policy import NonFinitePolicy
from gossamer.run.nonfinite_steps import NonFiniteSteps
from gossamer.run.outer_steps import OuterSteps
from gossamer.run.parts import Parts
from gossamer.run.rank_stages import RankStages
from gossamer.run.reexecution import Reexecution
from gossamer.run.shared_tensors import SharedTensors
from gossamer.run.staged_model import Forward
from gossamer.run.step_algorithm import Gradients, GradientStep, StepAlgorithm
from gossamer.run.step_attempts import StepAttempts
from gossamer.run.step_log import StepLog
from gossamer.run.step_reports import StepReports
from gossamer.run.step_runner import ModelPart, ModelRuntime
from gossamer.run.step_vectors import StepVectors
from gossamer.run.teacher import CoursedStep, Taught, TaughtLoss
from gossamer.run.text_sampling import Logits, Sampler
from gossamer.run.tiers import TieredStep, remarks_of, tiers_of
from gossamer.run.time_limit import TimeLimit
from gossamer.run.trainer import Trainer
from gossamer.run.trainer_services import TrainerServices
from gossamer.run.verify import Verifier
from gossamer.run.watch import Watch
from gossamer.run.zeroth_order_step import ZerothOrderStep
from gossamer.sharding import LEVEL, RowPartition, ShardedOptimizer, ShardedParameters, UnshardOrder
from gossamer.spec import records
from gossamer.spec.config import TrainSection
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """The inputs of one rank's trainer, with its trained parameters by name."""

    parts: Parts
    recipe: Recipe
    engine: ModelRuntime
    pump: CommThread
    around: TrainerServices
    params: Mapping[str, Tensor]
    pipeline: Pipeline

    @property
    def rank(self) -> int:
        return self.pump.channel.rank

    @property
    def levels(self) -> ProcessGroups:
        return self.pump.channel.levels


def build(parts: Parts, engine: ModelRuntime, pump: CommThread, around: TrainerServices) -> Trainer:
    """Build the trainer of one rank.

    Raises BadInput if an exchange cannot serve its parameters or process groups, or if ranks have different initial
    parameters.
    """
    config = parts.config
    check_initial(pump.channel, parts.module, parts.cut)
    rank, levels = pump.channel.rank, pump.channel.levels
    params = trainable(parts.module)
    pipeline = pipeline_of(parts, rank, levels)
    recipe = parts.recipe
    recipe.optimizer.prepare(params)
    given = _Inputs(
        parts=parts, recipe=recipe, engine=engine, pump=pump, around=around, params=params, pipeline=pipeline
    )
    rule = Master(inner=_rule(recipe, levels, rank))  # copies half types alone
    states, replica = _states_and_reducer(given, rule)
    scaling = LossScale.of(engine.precision)
    truth = {n: states.held.get(n, {}).get("master", p.detach()) for n, p in params.items()}
    apart = _outer_loop(given, states, replica, truth)
    feed = _feed(given, pipeline)
    watch = around.saver.watch = Watch.of(parts)
    adversarial = _adversarial(given, feed)
    attacked = None if adversarial is None else adversarial.state
    taught = engine.objective if isinstance(engine.objective, TaughtLoss) else None
    course = engine.objective.course if isinstance(engine.objective, Taught) else None
    around.saver.contents = contents_of(
        parts, around.saver.progress, states, replica, apart, scaling, watch, attacked, course
    )
    stages = RankStages(engine=engine, pieces=pieces_of(parts, engine), pipeline=pipeline, pump=pump)
    tied = TiedWeights.of(rank, levels, states.holdings)
    pieces = stages.pieces if adversarial is None else {0: AdversarialPart(engine, adversarial)}
    gradients = Gradients(pieces=pieces, pipeline=pipeline, tied=tied, pump=pump, replica=replica, at=around.at)
    descent = _descent(given, gradients, states, _vectors(given, rule, replica))
    if adversarial is not None:
        descent = AdversarialStep(inner=descent, inputs=adversarial)
    if taught is not None and taught.inner.is_adaptive:
        descent = CoursedStep(inner=descent, loss=taught)
    if recipe.sync.probe is not None:
        probing = sync.ZerothOrderRank(recipe.sync.probe, params, truth, replica, config.train.seed)
        descent = _zeroth_order(given, stages, probing, rule.lr)
    outer = _outer_steps(given, rule, states, replica, apart)
    statistics = [] if attacked is None else [dict[str, Tensor | None](attacked.statistics)]
    buffers = BufferRollback.of(parts.module, statistics)
    return _trainer(given, stages, buffers, descent, outer, feed, scaling)


def _trainer(
    given: _Inputs,
    stages: RankStages,
    buffers: BufferRollback,
    descent: StepAlgorithm,
    outer: OuterSteps,
    feed: Feed,
    scaling: LossScale,
) -> Trainer:
    """Compose the trainer of its parts."""
    parts, recipe, around, train = given.parts, given.recipe, given.around, given.parts.config.train
    replica, states = outer.replica, outer.states
    metrics = load_metrics(train.metrics)
    evaluator = Evaluator(
        stages=stages,
        pieces=_judged_pieces(given, stages, metrics),
        metrics=tuple(metric.name for metric in metrics),
        feed=feed,
        validation={name: one for name, one in parts.validation.items() if len(one.batches)},
        sequences=train.evaluate_sequences,
        sampler=_sampler(parts, given.engine, stages.pipeline, given.pump),
        replica=replica,
        point=EvaluationPoint(apart=outer.apart, states=states, replica=replica, pump=given.pump),
        shards_parameters=recipe.sharding.takes_parameters or recipe.sharding.is_tiered,
        sink=around.sink,
        at=around.at,
    )
    rate = recipe.lr_schedule
    return Trainer(
        goal=_goal(train),
        feed=feed,
        attempts=StepAttempts(
            stages=stages,
            buffers=buffers,
            descent=descent,
            replica=replica,
            states=states,
            outer=outer,
            rate=rate,
            scaling=scaling,
            around=around,
        ),
        descent=descent,
        nonfinite=NonFiniteSteps(
            policy=NonFinitePolicy(train.on_nonfinite), scaling=scaling, stages=stages, replica=replica, states=states
        ),
        verifier=_verifier(given, feed, replica, states),
        outer=outer,
        sharding=recipe.sharding,
        evaluator=evaluator,
        limit=TimeLimit(most_steps=train.steps, rate=rate, replica=replica, evaluator=evaluator, sink=around.sink),
        watch=around.saver.watch,
        reports=StepReports(feed=feed, rule=outer.rule, replica=replica, sink=around.sink),
        around=around,
    )


def _states_and_reducer(given: _Inputs, rule: Optimizer) -> tuple[ShardedOptimizer, sync.GradientReducer]:
    """Return the optimizer states of this rank's rows, and what averages the gradients of these rows."""
    parts, params, together, sharding = given.parts, given.params, given.recipe.sync, given.recipe.sharding
    sharding.check(given.levels)
    deal = sharding.deal(given.levels)
    exchange = given.recipe.methods.exchanges(params, deal)
    tiers = None
    if sharding.is_tiered:
        assert given.around.beside is not None, "weights are gathered beside the messages of steps"
        tiers = tiers_of(parts, rule, exchange, given.around.beside, given.pipeline, given.engine.tiled)
    shards = None
    if parts.walk is not None and tiers is None:
        shards = _shards(parts, parts.walk, given.around, given.rank, deal.of_parameters)
    states = ShardedOptimizer.of(
        rule,
        params,
        deal,
        rank=given.rank,
        holdings=holdings_of(parts, given.rank, given.levels),
        differences=sharding.differences,
        shards=shards,
        tiers=tiers,
    )
    replica = sync.GradientReducer(
        params if together.probe is None else {},  # without gradients there is nothing to exchange
        exchange,
        given.pump,
        bucket_bytes=parts.plan.bucket_bytes,
        buckets=parts.plan.buckets,
        turns=parts.plan.turns,
        # Tiers divide the mean themselves, if anybody.
        holdings={} if tiers is not None and sharding.is_sharded else states.holdings,
        meets="all" if together.loop is None else "island",
        gives_back=sharding.gives_back,
        keeps_sent=parts.config.train.verify.every > 0,
        tiers=tiers,
    )
    return states, replica


def _vectors(given: _Inputs, rule: Optimizer, replica: sync.GradientReducer) -> StepVectors:
    """Return what takes the vectors of linear layers, where the optimizer wants any."""
    wanted = rule.wants_vectors(given.params)
    return StepVectors(hooks=LayerHooks.of(given.parts.module, wanted), pump=given.pump, replica=replica)


def _outer_loop(
    given: _Inputs, states: ShardedOptimizer, replica: sync.GradientReducer, truth: Mapping[str, Tensor]
) -> sync.OuterLoop:
    progress = given.around.saver.progress
    return sync.outer_loop_of(
        given.recipe.sync.loop,
        given.params,
        truth,
        replica,
        given.around.beside,
        units=given.parts.units,
        bucket_bytes=given.parts.plan.bucket_bytes,
        second_moments=lambda names: states.second_moments(progress.updates, names),
        asked=given.around.asked_to_stop,
    )


def _outer_steps(
    given: _Inputs,
    rule: Optimizer,
    states: ShardedOptimizer,
    replica: sync.GradientReducer,
    apart: sync.OuterLoop,
) -> OuterSteps:
    loop, around = given.recipe.sync.loop, given.around
    status = sync.StatusExchange
    return OuterSteps(
        sync=given.recipe.sync,
        apart=apart,
        word=apart.roll or (status.of(given.pump.channel, loop.warmup.steps) if loop is not None else None),
        replica=replica,
        states=states,
        rule=rule,
        sink=around.sink,
        at=around.at,
        asked_to_stop=around.asked_to_stop,
    )


def _feed(given: _Inputs, pipeline: Pipeline) -> Feed:
    parts, loop = given.parts, given.recipe.sync.loop
    pace = loop.pace(given.levels.groups["island"]) if loop is not None else sync.LocalStepSchedule()
    seed = parts.config.train.seed
    return Feed(parts.train, parts.plan, parts.plan.axes.place(given.rank)[0], seed, pipeline.batches, pace)


def _descent(given: _Inputs, gradients: Gradients, states: ShardedOptimizer, vectors: StepVectors) -> StepAlgorithm:
    """Return the step by backpropagation, with states in memory or in tiers; what is to be known of tiers is said."""
    clip, around = given.parts.config.train.max_grad_norm, given.around
    if states.tiers is None:
        return GradientStep(gradients=gradients, states=states, vectors=vectors, clip=clip)
    for level, message in remarks_of(given.parts, states.tiers):
        around.sink(records.Event(level=level, message=message))
    updates = partial(getattr, around.saver.progress, "updates")
    return TieredStep(gradients=gradients, states=states, tiers=states.tiers, clip=clip, updates=updates)


def _zeroth_order(given: _Inputs, stages: RankStages, probing: sync.ZerothOrderRank, rate: float) -> ZerothOrderStep:
    around = given.around
    return ZerothOrderStep(
        probing=probing,
        module=given.parts.module,
        pieces=stages.pieces,
        pipeline=stages.pipeline,
        pump=stages.pump,
        rate=rate,
        clip=given.parts.config.train.max_grad_norm,
        log=StepLog(around.saver.directory.path, is_writer=around.saver.directory.is_leader),
        at=around.at,
    )


def _adversarial(given: _Inputs, feed: Feed) -> PerturbedInputs | None:
    """Return where the perturbed inputs of steps come from; None without adversarial training. Raises BadInput."""
    parts, settings, module = given.parts, given.parts.config.train.adversarial, given.parts.module
    if not settings.epsilon:
        return None
    row = parts.train.batch(np.zeros(1, np.int64))
    attack = Attack(given.engine, settings, perturbed_inputs(settings, row, given.engine.caller))
    if not settings.ahead:
        state = AdversarialState.of(module, given.params, settings)
        return OfPreviousWeights(attack, state) if settings.delay else OfPresentWeights(attack, state)
    if parts.device.type != "cpu":
        raise bad_input(
            wanted="a run on CPUs with train.adversarial.ahead, as a companion process shares memory with its rank",
            got=f"one on {parts.device.type}",
            do="set train.adversarial.ahead to false",
            key="train.adversarial.ahead",
        )
    memory = SharedTensors.new(forms_of(module))
    return Companion(
        attack=attack,
        state=AdversarialState.of(module, given.params, settings, memory),
        memory=memory,
        feed=feed,
        config=parts.config,
        units=parts.units,
        rows=row,
        at=given.around.at,
    )


def _goal(train: TrainSection) -> Goal:
    return Goal(
        steps=train.steps,
        evaluate_every=train.evaluate_every,
        checkpoint_every=train.checkpoint_every,
        seed=train.seed,
        seconds=train.seconds,
    )


def _verifier(given: _Inputs, feed: Feed, replica: sync.GradientReducer, states: ShardedOptimizer) -> Verifier:
    return Verifier(
        wanted=given.parts.config.train.verify,
        witness=Reexecution(given.engine, feed, given.params),
        replica=replica,
        states=states,
        sink=given.around.sink,
    )


def _rule(recipe: Recipe, levels: ProcessGroups, rank: int) -> Optimizer:
    """Return the optimizer; with averaging of second moments, one that knows this island's fraction of all samples."""
    loop, plan = recipe.sync.loop, recipe.plan
    if loop is None or not loop.average_second_moments_every:
        return recipe.optimizer
    mesh = plan.axes
    rows = [plan.rows[mesh.place(one)[0]] for one in levels.everyone]
    return recipe.optimizer_with(sum(rows[one] for one in levels.group("island", rank)) / sum(rows))


def _shards(
    parts: Parts, walk: UnshardOrder, around: TrainerServices, rank: int, deal: RowPartition
) -> ShardedParameters:
    pump, counts = around.beside, parts.plan.microbatches
    assert pump is not None, "what is gathered has a pump of its own"
    if len(set(counts)) > 1:
        raise bad_input(
            wanted="the same number of micro-batches on every replica, as all of them gather parameters together",
            got=f"{list(counts)} micro-batches by replica",
            do="make the plan again, or set plan.sharding to zero2",
            key="plan.sharding",
        )
    pump.channel.widen(ProcessGroups({LEVEL: deal.levels.groups[deal.path[0]]}))
    return ShardedParameters.of(parts.module, walk, pump, deal=deal, rank=rank)


def _judged_pieces(given: _Inputs, stages: RankStages, metrics: tuple[Metric, ...]) -> Mapping[int, ModelPart]:
    """Return the stages of this rank with what evaluations report: its loss is another one than that of training where
    there is a teacher, and comes with the metrics.
    """
    judged = replace(given.engine, objective=given.engine.objective.evaluated())
    if metrics:
        return _measured_pieces(replace(given, engine=judged), metrics)
    return stages.pieces if judged.objective is given.engine.objective else pieces_of(given.parts, judged)


def _measured_pieces(given: _Inputs, metrics: tuple[Metric, ...]) -> Mapping[int, ModelPart]:
    """Return the stages of this rank with a loss that returns the metrics too.

    They are computed once on training data: what is wrong with a metric is to be known now, and not hours later.
    """
    parts, engine, cut = given.parts, given.engine, given.parts.cut
    measured = replace(engine, objective=MeasuredLoss(engine.objective, metrics))
    if cut is not None:
        cut = replace(cut, ways=cut.ways.running(Forward(measured.objective, engine.precision, engine.device)))
    rows = moved(parts.train.batch(np.zeros(1, np.int64)), engine.device)
    with untouched(engine.module), evaluating(engine.module):
        if cut is None:
            gradless(lambda: measured.loss_of_copies(rows, step=0, key=0))
        else:
            cut.ways.of(rows, training=False)
    return pieces_of(replace(parts, cut=cut), measured)


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
