"""A job: one rank's run from its parts to its end. The command line's workers and `gossamer.train` both end here."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gossamer import __version__, memory, optim
from gossamer.adapting import Adapting, asking, between_islands
from gossamer.bordering import with_borders
from gossamer.exchanging import Exchanger, is_plain, levels_of, loop_of
from gossamer.memory import Walk
from gossamer.model.profile import facts_of, forward_flop_per_token, measure_peak_flop_per_s, training_flop_per_token
from gossamer.model.vocabulary import within_vocabulary
from gossamer.optim.common_adamw import CommonAdamW
from gossamer.run.batches import Batch, Feed, moved
from gossamer.run.build import Parts, Surroundings, build, check_agreement, check_before_start, engine_of, fingerprint
from gossamer.run.saver import Saver
from gossamer.run.stage import Engine
from gossamer.run.trainer import Trainer, peak_bytes
from gossamer.run.walking import walk_of
from gossamer.spec import records
from gossamer.spec.choice import told
from gossamer.spec.errors import BadInput, Interrupted, PeerLost, RunFailed
from gossamer.spec.plan import Plan
from gossamer.view.rundir import RunDirectory
from gossamer.wire.channel.group import Group, Meeting
from gossamer.wire.process.frames import place_of
from gossamer.wire.pump import Observer, Pump

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """This rank among all, and how they meet. `writer`/`writers`: among the ranks that see the same run directory."""

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
class Job:
    """Everything one rank needs to run. `parts.plan` is agreed."""

    parts: Parts
    where: Where
    directory: RunDirectory
    described: str  # the model, for people
    data: str  # fingerprint of the training data
    text: str  # what the data is, for people
    resume: bool
    resume_step: int = -1  # the one all hosts hold; -1: the newest good one here
    at: Callable[[int, str], None]
    asked_to_stop: Callable[[], bool]
    moves: Callable[[], None] = _nothing  # told of every message that goes out or has come
    observe: Observer | None = None  # told of every message that goes out
    show: Callable[[records.Record], None] | None = None  # besides writing them down
    keep: Callable[[], None] | None = None  # what is written beside the checkpoints once all ranks agree
    vocabulary: int = 0  # ids of the tokenizer, where the data is text
    is_kept: bool = False  # whether the caller's module is to be whole afterwards, where its parameters are sharded

    @property
    def automatic(self) -> bool:
        """Whether the exchange is ours to choose, before the run and as it goes on."""
        return self.parts.config.plan.exchange == "auto" and self.parts.cut is None


def run_job(job: Job) -> dict[str, Any]:
    """Train to the end of the configuration. Raises Interrupted, RunFailed and its children, BadInput."""
    config, where = job.parts.config, job.where
    check_before_start(job.parts)
    began = time.perf_counter()
    plan = job.parts.plan
    meeting = Meeting(
        store=where.store,
        rank=where.rank,
        levels=levels_of(plan, where.ranks),
        backend=plan.backend,
        interface=where.interface,
        timeout_s=where.timeout_s,
        moves=job.moves,
        generation=where.generation,
    )
    pump = Pump(Group(meeting), look_ahead=plan.look_ahead, observe=job.observe)
    beside = Pump(pump.channel, look_ahead=plan.look_ahead)
    ending = ExitStack()  # before the pumps
    try:
        sink = _Sink(job.directory, job.show) if where.rank == 0 else _forget
        saver = _saver(job, sink)
        saver.open()
        check_agreement(pump, _facts(job))
        engine = engine_of(job.parts)
        job.at(0, "probe")
        walk = _walk(job.parts, engine, pump)
        exchanger = _exchanger(job, engine, pump, sink, walk)
        parts = replace(job.parts, plan=exchanger.settle(automatic=job.automatic, hosts=where.hosts), walk=walk)
        parts = with_borders(parts, pump.channel, exchanger.tell)
        check_agreement(pump, {"exchange": parts.plan.model_dump_json()})
        exchanger.keep(parts.plan)
        adapting = Adapting.of(config.plan, exchanger)
        around = Surroundings(
            sink=sink,
            at=job.at,
            asked_to_stop=job.asked_to_stop,
            saver=saver,
            beside=beside,
            replan=asking(exchanger, adapting),
        )
        trainer = build(parts, engine, pump, around)
        ending.callback(trainer.apart.close)
        if adapting is not None:
            adapting.begin(trainer.replica)
        if job.resume:
            saver.resume(pump.channel, job.resume_step)
        if told := trainer.begin(again=job.resume):
            exchanger.tell(told, trainer.progress.step)
        _keep(job, sink)
        sink(_start(job, trainer))
        return _train(trainer, saver, sink, began, is_kept=job.is_kept)
    finally:
        ending.close()
        pump.close()
        beside.close()
        pump.channel.close()


def _keep(job: Job, sink: Callable[[records.Record], None]) -> None:
    """On one rank of those that see the same directory. A disk that does not take it is told of; the run goes on."""
    if job.keep is None or job.where.writer:
        return
    try:
        job.keep()
    except (OSError, BadInput) as error:  # BadInput: a tokenizer beside the weights that cannot be read
        why = getattr(error, "strerror", None) or str(error)
        said = f"what sampling and exporting need was not kept in {job.directory.path}: {why}"
        sink(records.Event(level="warning", message=said))


def _walk(parts: Parts, engine: Engine, pump: Pump) -> Walk | None:
    """Where parameters are sharded, how all ranks walk through the model."""
    if not memory.build(parts.plan.states, key="plan.states").takes_parameters:
        return None
    walk = walk_of(engine, parts.train, parts.units)
    check_agreement(pump, {"order of the units, and what they read": repr(walk)})
    return walk


def _exchanger(
    job: Job, engine: Engine, pump: Pump, sink: Callable[[records.Record], None], walk: Walk | None
) -> Exchanger:
    config, where, plan = job.parts.config, job.where, job.parts.plan
    return Exchanger(
        engine=engine,
        feed=Feed(job.parts.train, plan, plan.place_of(where.rank)[0], config.train.seed),
        pump=pump,
        lossy=config.plan.lossy,
        steps=config.train.steps,
        plan=plan,
        tell=lambda message, step: sink(records.Event(level="info", message=message, step=step)),
        keep=job.directory.keep_plan if where.writer == 0 else lambda plan: None,  # every host reads its own again
        policy=between_islands(config.plan, plan),
        walk=walk,
        tells=CommonAdamW.serves(optim.build(config.train.optimizer, key="train.optimizer")),
    )


def _train(
    trainer: Trainer, saver: Saver, sink: Callable[[records.Record], None], began: float, *, is_kept: bool
) -> dict[str, Any]:
    outcome, message = "failed", ""
    try:
        _run(trainer, saver, is_kept=is_kept)
        outcome = "done"
    except Interrupted as error:
        outcome, message = "interrupted", str(error)
        raise
    except BaseException as error:
        message = _why(error)
        raise
    finally:
        saver.finish()
        step, seconds = trainer.progress.step, time.perf_counter() - began
        sink(records.End(step=step, outcome=outcome, message=message, seconds=seconds))
    return {"outcome": outcome, "step": step, "seconds": seconds, "peak_bytes": peak_bytes()}


def _why(error: BaseException) -> str:
    """What the run's last record says of it. Whose fault a lost peer is, supervisors know better than its victim."""
    if isinstance(error, PeerLost):
        return "another rank was lost"
    place = "" if isinstance(error, (BadInput, RunFailed)) else place_of(error)
    return f"{type(error).__name__}: {error}" + (f", at {place}" if place else "")


def _run(trainer: Trainer, saver: Saver, *, is_kept: bool) -> None:
    try:
        trainer.run()
    except Interrupted:
        saver.confirm()
        if is_kept:
            trainer.states.leave()
        raise
    if is_kept:
        trainer.states.leave()


def _saver(job: Job, sink: Callable[[records.Record], None]) -> Saver:
    config, where = job.parts.config, job.where
    return Saver(
        directory=job.directory.checkpoints,
        rank=where.rank,
        ranks=where.ranks,
        writer=where.writer,
        writers=where.writers,
        keep=config.train.keep_checkpoints,
        generation=where.generation,
        residuals=config.plan.residuals,
        sink=sink,
        identity={
            "seed": config.train.seed,
            "batch": job.parts.plan.batch,
            "data": job.data,
            "sequence": config.data.sequence,
            "pack": config.data.pack,
            "model": job.described,
            "gossamer": __version__,
        },
    )


def _facts(job: Job) -> dict[str, str]:
    config = job.parts.config.model_dump(mode="json", exclude={"run", "machines"})
    return {
        "version of Gossamer": __version__,
        "configuration": json.dumps(config, sort_keys=True),
        "plan": job.parts.plan.model_dump_json(),
        "training data": job.data,
        "model": hashlib.sha256(fingerprint(job.parts.outline).encode()).hexdigest(),
    }


def _start(job: Job, trainer: Trainer) -> records.Start:
    """All ranks call it: they measure their peak rates at the same time, as they will share what they share."""
    config, plan = job.parts.config, trainer.feed.plan
    job.at(trainer.progress.step, "measure")
    one = moved(job.parts.train.batch(np.zeros(1, np.int64)), job.parts.device)
    counted = _counted(job, trainer.engine, one) if "input_ids" in one else 0.0
    peak = measure_peak_flop_per_s(trainer.engine.precision.compute, job.parts.device)
    tokens = next(iter(one.values())).numel()
    return records.Start(
        ranks=job.where.ranks,
        step=trainer.progress.step,
        steps=config.train.steps,
        model=job.described,
        parameters=facts_of(job.parts.outline).parameters,
        data=job.text,
        tokens_per_step=plan.batch * tokens,
        flop_per_token=training_flop_per_token(counted),
        peak_flop_per_s=float(trainer.replica.gather((peak,)).sum()),
        exchange=_in_words(plan),
        versions={"gossamer": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
    )


def _counted(job: Job, engine: Engine, one: Batch) -> float:
    """Flop per token of the first sequence; where the data is text, all of its tokenizer's ids must fit."""
    with within_vocabulary(job.parts.outline, one["input_ids"], job.vocabulary):
        return forward_flop_per_token(job.parts.outline, engine.caller, one)


def _in_words(plan: Plan) -> str:
    """The exchanges of a plan, without the parameters they are for."""
    written = plan.exchange if isinstance(plan.exchange, list) else [("", "", plan.exchange)]
    said = " and ".join(dict.fromkeys(told(one) for _, _, one in written))
    if is_plain(plan):
        return said
    return told(plan.sync) if loop_of(plan) is None else f"{told(plan.sync)} between islands, in them {said}"


def _forget(record: records.Record) -> None:
    """Only rank 0 writes the run's records."""


class _Sink:
    """Appends records to the run directory. A disk that does not take them is told once and does not stop the run."""

    def __init__(self, directory: RunDirectory, show: Callable[[records.Record], None] | None) -> None:
        self._directory, self._show = directory, show
        self._told = False

    def __call__(self, record: records.Record) -> None:
        try:
            self._directory.append(record)
        except OSError as error:
            if not self._told:
                _log.warning("%s cannot be written (%s): the run goes on", self._directory.records_file, error.strerror)
            self._told = True
        if self._show is not None:
            self._show(record)
