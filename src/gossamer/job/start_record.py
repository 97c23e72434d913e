"""The record of a run's start: model, data, FLOP per token, peak FLOP/s, exchange."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from gossamer.job.rank_inputs import RankJob
from gossamer.model.forward_adapter import caller_of
from gossamer.model.input_checks import checking_token_ids
from gossamer.model.model_profile import (
    facts_of,
    forward_flop_per_token,
    measure_peak_flop_per_s,
    training_flop_per_token,
)
from gossamer.recipe import PlanMethods
from gossamer.run.batches import moved
from gossamer.run.resources import cores
from gossamer.run.trainer import Trainer
from gossamer.spec import records
from gossamer.spec.method_config import told
from gossamer.spec.plan import Plan


def flop_per_token_of(job: RankJob) -> float:
    """Return the FLOP per token of a forward, on rank 0; 0 on other ranks, and for data without tokens.

    Rank 0 alone tells of it, and a forward of a large model on shapes takes a core seconds. Raises BadInput if the
    tokenizer has ids that the model's vocabulary lacks.
    """
    if job.where.rank:
        return 0.0
    parts = job.parts
    one = moved(parts.train.batch(np.zeros(1, np.int64)), parts.device)
    if "input_ids" not in one:
        return 0.0
    with checking_token_ids(parts.outline, one["input_ids"], job.data.vocabulary):
        return forward_flop_per_token(parts.outline, caller_of(parts.outline, one), one)


def start_record(job: RankJob, trainer: Trainer, flop_per_token: float) -> records.Start:
    """Return the record of the start. All ranks must call it: they measure their peak FLOP/s at the same time."""
    config, plan = job.parts.config, trainer.feed.plan
    job.at(trainer.progress.step, "measure")
    one = job.parts.train.batch(np.zeros(1, np.int64))
    peak = measure_peak_flop_per_s(trainer.attempts.stages.engine.precision.compute, job.parts.device)
    facts = facts_of(job.parts.outline)
    tokens = next(iter(one.values())).numel()
    ranks = trainer.replica.gather((peak, float(job.where.host)))
    return records.Start(
        ranks=job.where.ranks,
        step=trainer.progress.step,
        steps=config.train.steps,
        model=job.described,
        parameters=facts.parameters,
        trained=facts.trainable,
        data=job.data.text,
        tokens_per_step=plan.batch * tokens,
        flop_per_token=training_flop_per_token(flop_per_token, facts.trainable / facts.parameters),
        peak_flop_per_s=float(ranks[:, 0].sum()),
        exchange=_in_words(plan),
        precision=trainer.attempts.stages.engine.precision.name,
        limit_s=config.train.seconds,
        hosts=tuple(int(host) for host in ranks[:, 1]),
        loss_unit=_loss_unit(job),
        versions={"gossamer": version("gossamer"), "torch": torch.__version__, "python": sys.version.split()[0]},
        machine=machine_facts(job.parts.device),
        data_fingerprint=job.data.fingerprint,
    )


def machine_facts(device: torch.device) -> dict[str, str]:
    """Return what `gossamer compare` tells apart: this machine's host name, system, processor, cores and device."""
    usable, limit = cores()
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": f"{usable:g}{limit}",
        "device": accelerator or device.type,
    }


def _processor() -> str:
    """Return the processor's model name; its architecture where the system does not say the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()


def _loss_unit(job: RankJob) -> str:
    """Return the unit of the losses: nats per token of text, or per pair of answers; "" for the model's own."""
    if job.parts.objective.together == 2:
        return "nats/pair"
    return "nats/token" if job.parts.train.text_bytes(np.zeros(1, np.int64)) is not None else ""


def _in_words(plan: Plan) -> str:
    """Return the exchanges of a plan as text, without their parameters' names."""
    written = plan.exchange if isinstance(plan.exchange, list) else [("", "", plan.exchange)]
    said = " and ".join(dict.fromkeys(told(one) for _, _, one in written))
    sync = PlanMethods.of(plan).sync
    if sync.is_plain:
        return said
    return told(plan.sync) if sync.loop is None else f"{told(plan.sync)} between islands, in them {said}"
