"""The job of one rank, from its parts to the end of the run, for the command line's workers and `gossamer.train`."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from gossamer import recipe
from gossamer.autotune.activation_compression import with_activation_compression
from gossamer.autotune.adaptive_compression import AdaptiveCompression, inter_island_policy, replan_callback
from gossamer.autotune.exchange_chooser import ExchangeChooser, SelectionSettings
from gossamer.autotune.exchange_selection import ExchangeSelector
from gossamer.autotune.owed_residuals import owing_anywhere
from gossamer.autotune.plan_groups import levels_of
from gossamer.autotune.trial_steps import TrialSteps
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommThread
from gossamer.job.auto_savers import with_savers
from gossamer.job.expert_teaching import taught_by_experts
from gossamer.job.plan_writer import PlanWriter
from gossamer.job.rank_inputs import RankJob
from gossamer.job.record_writer import RecordWriter, forget
from gossamer.job.start_record import flop_per_token_of, start_record
from gossamer.job.teaching import taught
from gossamer.job.training_end import train_to_end
from gossamer.model import adapter as adapters
from gossamer.model.precision import precision_of
from gossamer.model.started_source import start_of
from gossamer.optimizer.common_adamw import CommonAdamW
from gossamer.proof.startup import Proving
from gossamer.recipe import PlanMethods
from gossamer.run.auto_precision import choose_precision
from gossamer.run.batches import Feed
from gossamer.run.build import build
from gossamer.run.checkpoint import owing_in, trainable
from gossamer.run.checkpoint_directory import CheckpointDirectory
from gossamer.run.checkpoint_manager import CheckpointManager
from gossamer.run.engine import engine_of
from gossamer.run.label_count import LabelCount
from gossamer.run.parts import Parts
from gossamer.run.reference import ReferencePass
from gossamer.run.start_checks import check_agreement, check_before_start, fingerprint
from gossamer.run.start_state import StartState
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.trainer import Trainer
from gossamer.run.trainer_services import Sink, TrainerServices
from gossamer.run.unshard_trace import walk_of
from gossamer.sharding import UnshardOrder, shapes_of
from gossamer.spec import records
from gossamer.spec.errors import BadInput, Interrupted, bad_input
from gossamer.store.start_folder import MASKS, StartFolder


def run_job(job: RankJob) -> dict[str, Any]:
    """Train until the configuration's last step, and return the outcome, step, seconds and peak memory.

    Raises Interrupted, RunFailed and its subclasses, BadInput.
    """
    check_before_start(job.parts)
    pump = CommThread(_channel(job), look_ahead=job.parts.plan.look_ahead, observe=job.callbacks.observe)
    beside = CommThread(pump.channel, look_ahead=job.parts.plan.look_ahead)
    ending = ExitStack()  # before the pumps
    try:
        sink: Sink = RecordWriter(job.directory, job.callbacks.show) if job.where.rank == 0 else forget
        plans = PlanWriter(directory=job.directory, rank=job.where.rank, is_writer=job.where.writer == 0, sink=sink)
        saver = _saver(job, sink, plans)
        check_agreement(pump, _facts(job))  # after this, every directory is swept: ranks may save
        caution = _caution(job)
        job = _settled(with_savers(job, pump, sink), pump, sink)
        flop_per_token = flop_per_token_of(job)  # before hooks of Gossamer change its forward
        job = _built(job, pump, sink)
        engine = engine_of(job.parts)
        ending.callback(engine.randomness.remove)
        ending.callback(engine.without_savers)
        if engine.told:
            sink(records.Event(level="info", message=engine.told))
        job = _referenced(job, engine, pump, sink)
        job, engine = taught(job, engine, pump, sink, ending)
        engine = taught_by_experts(job, engine, pump, sink, ending)
        engine = _counted(job, engine, pump, sink)
        parts, exchanger = _planned(job, engine, pump, sink, plans)
        adapting = AdaptiveCompression.of(parts.recipe, exchanger)
        around = TrainerServices(
            sink=sink,
            at=job.at,
            asked_to_stop=job.asked_to_stop,
            saver=saver,
            beside=beside,
            replan=replan_callback(exchanger, adapting),
        )
        trainer = build(parts, engine, pump, around)
        ending.callback(trainer.replica.close)
        ending.callback(trainer.descent.close)
        ending.callback(trainer.states.close)
        ending.callback(trainer.outer.apart.close)
        if adapting is not None:
            adapting.begin(trainer.replica)
        _begin(job, trainer, saver, exchanger)
        _keep(job, sink)
        if told := parts.recipe.optimizer.said(shapes_of(trainable(parts.outline)), flop_per_token=flop_per_token):
            sink(records.Event(level="info", message=told))
        sink(start_record(job, trainer, flop_per_token))
        for warning in filter(None, (job.data.remark, caution)):
            sink(records.Event(level="warning", message=warning, step=trainer.progress.step))
        return train_to_end(job, trainer, saver, sink)
    finally:
        ending.close()
        pump.close()
        beside.close()
        pump.channel.close()


def _channel(job: RankJob) -> ProcessGroupChannel:
    """Return the process groups of the run, once all ranks are there."""
    where, plan = job.where, job.parts.plan
    return ProcessGroupChannel(
        Rendezvous(
            store=where.store,
            rank=where.rank,
            levels=levels_of(plan),
            backend=plan.backend,
            interface=where.interface,
            timeout_s=where.timeout_s,
            moves=job.callbacks.moves,
            generation=where.generation,
            asks=not where.is_supervised and where.ranks > 1,
        )
    )


def _planned(
    job: RankJob, engine: ModelRuntime, pump: CommThread, sink: Sink, plans: PlanWriter
) -> tuple[Parts, ExchangeSelector]:
    """Return the parts with a plan that leaves nothing open, and what chose its exchanges."""
    job.at(0, "probe")
    walk = _walk(job.parts, engine, pump)
    exchanger = _exchanger(job, engine, pump, sink, plans, walk)
    owed = _owed(job, engine, pump)
    plan = exchanger.settle(automatic=job.automatic, hosts=job.where.hosts, host=job.where.host, owed=owed)
    parts = replace(job.parts, plan=plan, walk=walk)
    parts = with_activation_compression(parts, pump.channel, exchanger.tell)
    recipe.check(job.parts.config, parts.plan)  # a chosen plan obeys the laws too
    check_agreement(pump, {"exchange": parts.plan.model_dump_json()})
    exchanger.keep(parts.plan)
    return parts, exchanger


def _owed(job: RankJob, engine: ModelRuntime, pump: CommThread) -> frozenset[str]:
    """Return the parameters of which the checkpoint to go on from holds a residual, where exchanges are chosen anew."""
    config = job.parts.config.plan
    is_asked = job.resume and config.residuals_on_resume == "redistribute"
    if not (is_asked and PlanMethods.of(job.parts.plan).chooses_exchange):
        return frozenset()
    until = job.checkpoint if job.checkpoint >= 0 else job.resume_step
    return owing_anywhere(pump.channel, trainable(engine.module), owing_in(job.directory.checkpoints, until))


def _begin(job: RankJob, trainer: Trainer, saver: CheckpointManager, exchanger: ExchangeSelector) -> None:
    """Restore what is to be resumed, and prepare the first step."""
    is_resumed = job.resume and saver.resume(trainer.attempts.stages.pump.channel, job.resume_step, only=job.checkpoint)
    started = None if is_resumed else start_of(job.parts.config.model)
    if not is_resumed and job.parts.recipe.optimizer.keeps_masks and not (started and started.kinds(MASKS)):
        raise bad_input(
            wanted="a start folder with masks in model.start, as train.optimizer holds its zeros",
            got=f"{started.path}, which has none" if started else "none",
            do="write what `gossamer prune` made, or leave train.optimizer.static_mask.masks at random",
            key="model.start",
        )
    if started is not None:
        for level, message in _start_state(job, started).take_over(trainer.states, trainer.progress):
            saver.sink(records.Event(level=level, message=message))
    if told := trainer.begin(again=job.resume):
        exchanger.tell(told, trainer.progress.step)


def _start_state(job: RankJob, folder: StartFolder) -> StartState:
    config, outline = job.parts.config, job.parts.outline
    keeps = config.model.adapter == "none" or adapters.build(config.model.adapter).keeps_masks
    under = {one.name.removesuffix(f"{one.slot}.weight") + "weight" for one in adapters.adapter_tensors(outline)}
    return StartState(
        folder=folder,
        optimizer=config.train.optimizer,
        adapter=config.model.adapter,
        holds_masks=job.parts.recipe.optimizer.keeps_masks,
        trained=trainable(outline).keys(),
        added_to=() if keeps else under,
        trains_beside=config.model.adapter != "none" or config.model.side != "none",
    )


def _built(job: RankJob, pump: CommThread, sink: Sink) -> RankJob:
    """Return the job with the module that this rank trains; prove it before, if the configuration asks for that."""
    planned, parts = job.planned, job.parts
    if planned is None:
        return job
    proving = Proving(
        planned=planned,
        parts=parts,
        pump=pump,
        sink=sink,
        at=job.at,
        asked_to_stop=lambda: bool(job.asked_to_stop()),
        described=job.described,
        data=job.data.fingerprint,
        file=job.directory.proved_file if job.where.rank == 0 else None,
    )
    try:
        proving.prove()
    except Interrupted as error:
        sink(records.End(step=0, outcome="interrupted", message=str(error)))
        raise
    job.at(0, "build")
    held = planned.hold()
    return replace(job, parts=replace(parts, module=held.module, cut=held.cut))


def _referenced(job: RankJob, engine: ModelRuntime, pump: CommThread, sink: Sink) -> RankJob:
    """Return the job with what its loss compares with: log-probabilities under the initial model, which it has now."""
    if not job.parts.objective.needs_reference:
        return job
    asked = ReferencePass(
        parts=job.parts,
        engine=engine,
        pump=pump,
        folder=job.directory.path,
        data=job.data.fingerprint,
        writes=job.where.writer == 0,
        at=job.at,
        tell=lambda message: sink(records.Event(level="info", message=message)),
    )
    return replace(job, parts=asked.made())


def _counted(job: RankJob, engine: ModelRuntime, pump: CommThread, sink: Sink) -> ModelRuntime:
    """Return the engine with a loss that counts the labels as the model's own loss does."""
    told = LabelCount(
        parts=job.parts,
        engine=engine,
        pump=pump,
        at=job.at,
        tell=lambda message: sink(records.Event(level="warning", message=message)),
    )
    return told.measured()


def _keep(job: RankJob, sink: Sink) -> None:
    """Write the files beside the checkpoints, on one rank per directory. A failed write does not stop the run."""
    if job.callbacks.keep is None or job.where.writer:
        return
    try:
        job.callbacks.keep()
    except (OSError, BadInput) as error:  # BadInput: a tokenizer beside the weights that cannot be read
        why = getattr(error, "strerror", None) or str(error)
        said = (
            "the files that `gossamer sample` and `gossamer export` need could not be written to "
            f"{job.directory.path}: {why}; the training continues"
        )
        sink(records.Event(level="warning", message=said))


def _settled(job: RankJob, pump: CommThread, sink: Sink) -> RankJob:
    """Return the job with a precision in place of `auto`: measured on this machine, or the one the run began with."""
    parts, kept = job.parts, ""
    if parts.config.train.precision != "auto":
        return job
    if job.resume and job.where.rank == 0:
        starts = (one for one in job.directory.records() if isinstance(one, records.Start))
        kept = next((one.precision for one in starts if one.precision in ("fp32", "bf16")), "")
    job.at(0, "measure")
    chosen, why = choose_precision(parts, pump, kept=kept)
    why = f"{chosen}: {why}"
    sink(records.Event(level="info", message=f"precision: {why}"))
    train = parts.config.train.model_copy(update={"precision": chosen})
    plan = parts.plan.model_copy(update={"reasons": {**parts.plan.reasons, "precision": why}})
    return replace(job, parts=replace(parts, config=parts.config.model_copy(update={"train": train}), plan=plan))


def _caution(job: RankJob) -> str:
    """Return a warning about the asked precision on this device; "" for none, and where it is left to be measured."""
    asked = job.parts.config.train.precision
    return "" if asked == "auto" else precision_of(asked).caution(job.parts.device)


def _walk(parts: Parts, engine: ModelRuntime, pump: CommThread) -> UnshardOrder | None:
    """Return the order in which all ranks unshard the model's units; None if parameters are not sharded."""
    sharding = parts.recipe.sharding
    if not (sharding.takes_parameters or sharding.is_tiered):
        return None
    walk = walk_of(parts, engine, pump)
    check_agreement(pump, {"order of the units, and what they read": repr(walk)}, level="all")
    return walk


def _exchanger(
    job: RankJob,
    engine: ModelRuntime,
    pump: CommThread,
    sink: Sink,
    plans: PlanWriter,
    walk: UnshardOrder | None,
) -> ExchangeSelector:
    config, where, plan, methods = job.parts.config, job.where, job.parts.plan, job.parts.recipe
    feed = Feed(job.parts.train, plan, plan.axes.place(where.rank)[0], config.train.seed)
    chooser = ExchangeChooser(
        engine=engine,
        feed=feed,
        pump=pump,
        run=SelectionSettings(
            lossy=config.plan.lossy,
            steps=config.train.steps,
            second_moments=CommonAdamW.serves(methods.optimizer),
            policy=inter_island_policy(methods),
            optimizer=methods.optimizer,
            walk=walk if job.parts.cut is None else None,  # bytes between stages are known since the cuts are
            trials=TrialSteps(parts=job.parts, engine=engine, feed=feed, pump=pump, at=job.at),
        ),
        tell=lambda message, step: sink(records.Event(level="info", message=message, step=step)),
    )
    return ExchangeSelector(chooser=chooser, plan=plan, keep=plans.keep)


def _saver(job: RankJob, sink: Sink, plans: PlanWriter) -> CheckpointManager:
    config, where = job.parts.config, job.where
    return CheckpointManager(
        directory=CheckpointDirectory(
            path=job.directory.checkpoints,
            writer=where.writer,
            writers=where.writers,
            keep=config.train.keep_checkpoints,
            generation=where.generation,
        ),
        rank=where.rank,
        sink=sink,
        identity={
            "seed": config.train.seed,
            "batch": job.parts.plan.batch,
            "data": job.data.fingerprint,
            "sequence": config.data.sequence,
            "pack": config.data.pack,
            "model": job.described,
            "gossamer": version("gossamer"),
        },
        before_save=plans.keep_unwritten,
    )


def _facts(job: RankJob) -> dict[str, str]:
    config = job.parts.config.model_dump(mode="json", exclude={"run", "machines"})
    return {
        "version of Gossamer": version("gossamer"),
        "configuration": json.dumps(config, sort_keys=True),
        "run to go on with": f"{job.resume}",
        "plan": job.parts.plan.model_dump_json(),
        "training data": job.data.fingerprint,
        "validation data": job.data.validation,
        "model": hashlib.sha256(fingerprint(job.parts.outline).encode()).hexdigest(),
    }
