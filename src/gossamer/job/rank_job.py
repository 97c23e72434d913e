"""The job of one rank, from its parts to the end of the run, for the command line's workers and `gossamer.train`."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gossamer import recipe
from gossamer.autotune.activation_compression import with_activation_compression
from gossamer.autotune.adaptive_compression import AdaptiveCompression, inter_island_policy, replan_callback
from gossamer.autotune.exchange_selection import ExchangeSelector, levels_of
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommThread, Observer
from gossamer.model.forward_adapter import caller_of
from gossamer.model.input_checks import within_vocabulary
from gossamer.model.model_profile import (
    facts_of,
    forward_flop_per_token,
    measure_peak_flop_per_s,
    training_flop_per_token,
)
from gossamer.optimizer.common_adamw import CommonAdamW
from gossamer.partition.rank_model import Planned
from gossamer.process.stack_position import place_of
from gossamer.proof.startup import Proving
from gossamer.recipe import PlanMethods
from gossamer.run.auto_precision import choose_precision
from gossamer.run.batches import Feed, moved
from gossamer.run.build import build
from gossamer.run.checkpoint_manager import CheckpointManager
from gossamer.run.engine import engine_of
from gossamer.run.parts import Parts
from gossamer.run.resources import peak_bytes
from gossamer.run.start_checks import check_agreement, check_before_start, fingerprint
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.surroundings import Surroundings
from gossamer.run.trainer import Trainer
from gossamer.run.unshard_trace import walk_of
from gossamer.sharding import UnshardOrder
from gossamer.spec import records
from gossamer.spec.errors import BadInput, Interrupted, PeerLost, RunFailed
from gossamer.spec.method_config import told
from gossamer.spec.plan import Plan
from gossamer.view.progress import Doubtful
from gossamer.view.run_directory import RunDirectory

_AGAIN_S = 1.0  # before the end record of a run is written again
_UNWRITTEN = 20_000  # records kept for a disk that has no room: the newest
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The rank, the world size, and the store for the rendezvous.

    `writer`/`writers`: this rank's index among the ranks that see the same run directory, and their number.
    """

    rank: int = 0
    ranks: int = 1
    writer: int = 0
    writers: int = 1
    hosts: int = 1
    store: dist.Store
    interface: str = ""
    generation: int = 0
    timeout_s: float = 120.0  # how long a message may take


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """The inputs of one rank's job: model, data, rendezvous, directory, callbacks. All ranks hold the same
    `parts.plan`.
    """

    parts: Parts
    where: RankContext
    directory: RunDirectory
    described: str  # the model, for people
    data: str  # fingerprint of the training data
    text: str  # description of the data, for the user
    remark: str = ""  # a warning about the data, for the user
    resume: bool
    resume_step: int = -1  # the one all hosts hold; -1: the newest good one here
    at: Callable[[int, str], None]
    asked_to_stop: Callable[[], bool]
    moves: Callable[[], None] = _nothing  # called for every message that starts or completes
    observe: Observer | None = None  # called for every message that starts
    sealed: Callable[[str], None] | None = None  # called with "done" or "interrupted", once all is written
    show: Callable[[records.Record], None] | None = None  # displays a record
    keep: Callable[[], None] | None = None  # writes the files beside the checkpoints, once all ranks agree
    vocabulary: int = 0  # ids of the tokenizer, where the data is text
    planned: Planned | None = None  # builds this rank's part, if that is not built yet or is to be proved
    is_kept: bool = False  # whether to restore the caller's full module from sharded parameters at the end

    @property
    def automatic(self) -> bool:
        """Return whether Gossamer chooses the gradient exchange, before the run and during it."""
        return PlanMethods.asked(self.parts.config.plan).chooses_exchange and self.parts.cut is None


def run_job(job: RankJob) -> dict[str, Any]:
    """Train until the configuration's last step, and return the outcome, step, seconds and peak memory.

    Raises Interrupted, RunFailed and its subclasses, BadInput.
    """
    config, where = job.parts.config, job.where
    check_before_start(job.parts)
    plan = job.parts.plan
    meeting = Rendezvous(
        store=where.store,
        rank=where.rank,
        levels=levels_of(plan, where.ranks),
        backend=plan.backend,
        interface=where.interface,
        timeout_s=where.timeout_s,
        moves=job.moves,
        generation=where.generation,
    )
    pump = CommThread(ProcessGroupChannel(meeting), look_ahead=plan.look_ahead, observe=job.observe)
    beside = CommThread(pump.channel, look_ahead=plan.look_ahead)
    ending = ExitStack()  # before the pumps
    try:
        sink = _RecordWriter(job.directory, job.show) if where.rank == 0 else _forget
        saver = _saver(job, sink)
        saver.open()
        check_agreement(pump, _facts(job))
        job = _settled(job, pump, sink)
        config, plan = job.parts.config, job.parts.plan
        flop_per_token = _flop_per_token(job)  # before hooks of Gossamer change its forward
        job = _built(job, pump, sink)
        engine = engine_of(job.parts)
        ending.callback(engine.randomness.remove)
        job.at(0, "probe")
        walk = _walk(job.parts, engine, pump)
        exchanger = _exchanger(job, engine, pump, sink, walk)
        parts = replace(job.parts, plan=exchanger.settle(automatic=job.automatic, hosts=where.hosts), walk=walk)
        parts = with_activation_compression(parts, pump.channel, exchanger.tell)
        recipe.check(config, parts.plan)  # a chosen plan obeys the laws too
        check_agreement(pump, {"exchange": parts.plan.model_dump_json()})
        exchanger.keep(parts.plan)
        adapting = AdaptiveCompression.of(parts.recipe, exchanger)
        around = Surroundings(
            sink=sink,
            at=job.at,
            asked_to_stop=job.asked_to_stop,
            saver=saver,
            beside=beside,
            replan=replan_callback(exchanger, adapting),
        )
        trainer = build(parts, engine, pump, around)
        ending.callback(trainer.replica.close)
        ending.callback(trainer.outer.apart.close)
        if adapting is not None:
            adapting.begin(trainer.replica)
        if job.resume:
            saver.resume(pump.channel, job.resume_step)
        if told := trainer.begin(again=job.resume):
            exchanger.tell(told, trainer.progress.step)
        _keep(job, sink)
        sink(_start(job, trainer, flop_per_token))
        if job.remark:
            sink(records.Event(level="warning", message=job.remark, step=trainer.progress.step))
        return _train(job, trainer, saver, sink)
    finally:
        ending.close()
        pump.close()
        beside.close()
        pump.channel.close()


def _built(job: RankJob, pump: CommThread, sink: Callable[[records.Record], None]) -> RankJob:
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
        asked_to_stop=job.asked_to_stop,
        described=job.described,
        data=job.data,
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


def _keep(job: RankJob, sink: Callable[[records.Record], None]) -> None:
    """Write the files beside the checkpoints, on one rank per directory. A failed write does not stop the run."""
    if job.keep is None or job.where.writer:
        return
    try:
        job.keep()
    except (OSError, BadInput) as error:  # BadInput: a tokenizer beside the weights that cannot be read
        why = getattr(error, "strerror", None) or str(error)
        said = f"what sampling and exporting need was not kept in {job.directory.path}: {why}"
        sink(records.Event(level="warning", message=said))


def _settled(job: RankJob, pump: CommThread, sink: Callable[[records.Record], None]) -> RankJob:
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


def _walk(parts: Parts, engine: ModelRuntime, pump: CommThread) -> UnshardOrder | None:
    """Return the order in which all ranks unshard the model's units; None if parameters are not sharded."""
    if not parts.recipe.sharding.takes_parameters:
        return None
    walk = walk_of(engine, parts.train, parts.units)
    check_agreement(pump, {"order of the units, and what they read": repr(walk)})
    return walk


def _exchanger(
    job: RankJob,
    engine: ModelRuntime,
    pump: CommThread,
    sink: Callable[[records.Record], None],
    walk: UnshardOrder | None,
) -> ExchangeSelector:
    config, where, plan, methods = job.parts.config, job.where, job.parts.plan, job.parts.recipe
    return ExchangeSelector(
        engine=engine,
        feed=Feed(job.parts.train, plan, plan.place_of(where.rank)[0], config.train.seed),
        pump=pump,
        lossy=config.plan.lossy,
        steps=config.train.steps,
        plan=plan,
        tell=lambda message, step: sink(records.Event(level="info", message=message, step=step)),
        keep=job.directory.keep_plan if where.writer == 0 else lambda plan: None,  # every host reads its own again
        policy=inter_island_policy(methods),
        walk=walk,
        tells=CommonAdamW.serves(methods.optimizer),
    )


def _train(
    job: RankJob, trainer: Trainer, saver: CheckpointManager, sink: Callable[[records.Record], None]
) -> dict[str, Any]:
    began = time.perf_counter()  # at the start record, so that all reports agree on the run's length

    def end(outcome: str, message: str = "") -> dict[str, Any]:
        saver.finish()
        step, seconds = trainer.progress.step, time.perf_counter() - began
        sink(records.End(step=step, outcome=outcome, message=message, seconds=seconds))
        if outcome != "failed" and job.sealed is not None:
            job.sealed(outcome)
        return {"outcome": outcome, "step": step, "seconds": seconds, "peak_bytes": peak_bytes()}

    try:
        _run(job, trainer, saver)
    except Interrupted as error:
        end("interrupted", str(error))
        raise
    except BaseException as error:
        end("failed", _why(error))
        raise
    return end("done")


def _why(error: BaseException) -> str:
    """Return the message of the run's last record. Supervisors know better than the victim why a peer was lost."""
    if isinstance(error, PeerLost):
        return "another rank was lost"
    place = "" if isinstance(error, (BadInput, RunFailed)) else place_of(error)
    return f"{type(error).__name__}: {error}" + (f", at {place}" if place else "")


def _run(job: RankJob, trainer: Trainer, saver: CheckpointManager) -> None:
    """Train; on both exits confirm the last checkpoint, and restore the caller's full module."""
    interrupted: Interrupted | None = None
    try:
        trainer.run()
    except Interrupted as error:
        interrupted = error
    unsaved = saver.confirm(trainer.replica.gather, job.at)
    if job.is_kept:
        trainer.states.leave()
    if unsaved is not None:
        how = "stopped as asked after" if interrupted is not None else "trained to"
        raise type(unsaved)(f"{how} step {trainer.progress.step}, but {unsaved}")
    if interrupted is not None:
        raise interrupted


def _saver(job: RankJob, sink: Callable[[records.Record], None]) -> CheckpointManager:
    config, where = job.parts.config, job.where
    return CheckpointManager(
        directory=job.directory.checkpoints,
        rank=where.rank,
        ranks=where.ranks,
        writer=where.writer,
        writers=where.writers,
        keep=config.train.keep_checkpoints,
        generation=where.generation,
        residuals=config.plan.residuals_on_resume,
        sink=sink,
        identity={
            "seed": config.train.seed,
            "batch": job.parts.plan.batch,
            "data": job.data,
            "sequence": config.data.sequence,
            "pack": config.data.pack,
            "model": job.described,
            "gossamer": version("gossamer"),
        },
    )


def _facts(job: RankJob) -> dict[str, str]:
    config = job.parts.config.model_dump(mode="json", exclude={"run", "machines"})
    return {
        "version of Gossamer": version("gossamer"),
        "configuration": json.dumps(config, sort_keys=True),
        "plan": job.parts.plan.model_dump_json(),
        "training data": job.data,
        "model": hashlib.sha256(fingerprint(job.parts.outline).encode()).hexdigest(),
    }


def _flop_per_token(job: RankJob) -> float:
    """Return the FLOP per token of a forward; 0 for data without tokens.

    Raises BadInput if the tokenizer has ids that the model's vocabulary lacks.
    """
    parts = job.parts
    one = moved(parts.train.batch(np.zeros(1, np.int64)), parts.device)
    if "input_ids" not in one:
        return 0.0
    with within_vocabulary(parts.outline, one["input_ids"], job.vocabulary):
        return forward_flop_per_token(parts.outline, caller_of(parts.outline, one), one)


def _start(job: RankJob, trainer: Trainer, flop_per_token: float) -> records.Start:
    """Return the record of the start. All ranks must call it: they measure their peak FLOP/s at the same time."""
    config, plan = job.parts.config, trainer.feed.plan
    job.at(trainer.progress.step, "measure")
    one = job.parts.train.batch(np.zeros(1, np.int64))
    peak = measure_peak_flop_per_s(trainer.attempts.stages.engine.precision.compute, job.parts.device)
    tokens = next(iter(one.values())).numel()
    return records.Start(
        ranks=job.where.ranks,
        step=trainer.progress.step,
        steps=config.train.steps,
        model=job.described,
        parameters=facts_of(job.parts.outline).parameters,
        data=job.text,
        tokens_per_step=plan.batch * tokens,
        flop_per_token=training_flop_per_token(flop_per_token),
        peak_flop_per_s=float(trainer.replica.gather((peak,)).sum()),
        exchange=_in_words(plan),
        precision=trainer.attempts.stages.engine.precision.name,
        versions={"gossamer": version("gossamer"), "torch": torch.__version__, "python": sys.version.split()[0]},
    )


def _in_words(plan: Plan) -> str:
    """Return the exchanges of a plan as text, without their parameters' names."""
    written = plan.exchange if isinstance(plan.exchange, list) else [("", "", plan.exchange)]
    said = " and ".join(dict.fromkeys(told(one) for _, _, one in written))
    sync = PlanMethods.of(plan).sync
    if sync.is_plain:
        return said
    return told(plan.sync) if sync.loop is None else f"{told(plan.sync)} between islands, in them {said}"


def _forget(record: records.Record) -> None:
    """Drop a record: only rank 0 writes the run's records."""


class _RecordWriter:
    """A writer that appends records to the run directory.

    A failed write does not stop the run: it is reported once, and the records follow, in order, with the next write
    that succeeds. Raises RunFailed if the end of a successful run cannot be written, since readers would miss it.
    """

    def __init__(self, directory: RunDirectory, show: Callable[[records.Record], None] | None) -> None:
        self._directory, self._show = directory, show
        self._unwritten: deque[records.Record] = deque(maxlen=_UNWRITTEN)
        self._told = False
        self._doubtful = Doubtful()

    def __call__(self, record: records.Record) -> None:
        for said in self._doubtful.add(record):
            _log.warning("%s", said)
        self._unwritten.append(record)
        problem = self._write()
        if problem is not None and not self._told:
            self._told = True
            _log.warning("%s cannot be written (%s): the run goes on", self._directory.records_file, problem.strerror)
        if problem is not None and isinstance(record, records.End) and record.outcome != "failed":
            self._insist(record)
        if self._show is not None:
            self._show(record)

    def _insist(self, record: records.End) -> None:
        time.sleep(_AGAIN_S)
        if (problem := self._write()) is not None:
            raise RunFailed(
                f"{record.outcome} at step {record.step}, which is saved, but {len(self._unwritten)} records are not "
                f"in {self._directory.records_file}: {problem.strerror}. Free space and resume: nothing else is lost"
            )

    def _write(self) -> OSError | None:
        try:
            while self._unwritten:
                self._directory.append(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            return error
        return None
