"""Build the trainer of one rank from a module, a plan and the rank's position in the process groups."""

from __future__ import annotations

from dataclasses import replace

from gossamer import sync
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.model.forward_adapter import caller_of
from gossamer.model.side_effects import gradless, untouched
from gossamer.optimizer import Optimizer
from gossamer.optimizer.master import Master
from gossamer.recipe import Recipe
from gossamer.run.batches import Feed
from gossamer.run.checkpoint import CheckpointContents, trainable
from gossamer.run.checkpoint.exchange_state import ExchangeState
from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.optimizer_state import OptimizerSlots
from gossamer.run.checkpoint.outer_state import OuterState
from gossamer.run.checkpoint.weights import Weights
from gossamer.run.engine import pieces_of, pipeline_of, tied_of
from gossamer.run.forward import Pipeline
from gossamer.run.goal import Goal
from gossamer.run.initial_values import check_initial
from gossamer.run.loss_scale import LossScale
from gossamer.run.nonfinite_policy import NonFinitePolicy
from gossamer.run.parts import Parts
from gossamer.run.reexecution import Reexecution
from gossamer.run.staged_model import Forward
from gossamer.run.step_algorithm import Gradients, GradientStep, StepAlgorithm
from gossamer.run.step_log import StepLog
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.surroundings import Surroundings
from gossamer.run.text_sampling import Logits, Sampler
from gossamer.run.trainer import Trainer
from gossamer.run.verify import Verifier
from gossamer.run.zeroth_order_step import ZerothOrderStep
from gossamer.sharding import LEVEL, RowPartition, ShardedOptimizer, ShardedParameters, UnshardOrder
from gossamer.spec.errors import bad_input


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
    members = Membership(replica, apart)
    around.saver.contents = CheckpointContents(
        weights=Weights(module, states, parts.cut),
        slots=OptimizerSlots(states, members),
        exchange=ExchangeState(replica),
        outer=OuterState(apart, members, progress),
        scaling=scaling,
        members=members,
    )
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
