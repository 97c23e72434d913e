"""`gossamer train --dry-run`: everything before the first step: the plan, its estimated communication, some samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gossamer.data import Corpus, decode_preview
from gossamer.job.trainer_parts import parts_of
from gossamer.job.training_data import TrainingData, training_data
from gossamer.job.worker import origin_for
from gossamer.model.model_profile import facts_of
from gossamer.partition.model_provider import OriginSource
from gossamer.partition.plan_file import read_plan
from gossamer.partition.rank_model import build_rank_model
from gossamer.partition.request import PartitionRequest
from gossamer.partition.stage_memory import state_bytes_of
from gossamer.recipe import Recipe
from gossamer.run.start_checks import check_before_start
from gossamer.spec.config import RunConfig
from gossamer.spec.units import show_bytes, show_gib


def dry_run(config: RunConfig, plan_file: Path | None = None) -> dict[str, Any]:
    """Return the plan, its cost estimate, the model, and three samples as the model will see them. Raises BadInput."""
    data = training_data(config)
    origin = origin_for(config, data.corpus)
    hosts = max(1, len(config.machines.hosts))
    ranks, cpu = config.machines.processes * hosts, torch.device("cpu")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = PartitionRequest(
        config=config,
        ranks=ranks,
        rank=0,
        batches=data.train,
        objective=Recipe.loss_of(config),
        device=device,
        local_ranks=ranks // hosts,
    )
    held = build_rank_model(
        OriginSource(origin, config.train.seed), asked, read_plan(plan_file, ranks=ranks) if plan_file else None
    )
    plan = held.plan
    parts = replace(parts_of(asked, held, validation=data.validation, words=data.tokenizer), device=cpu)
    check_before_start(parts)
    facts = facts_of(parts.outline)
    state_bytes = max(plan.forecast.state_bytes, default=4 * facts.parameter_bytes)
    stages = {} if held.cut is None else {f"stage {p.stage}": state_bytes_of(held.cut, p) for p in held.cut.parts}
    return {
        "model": f"{origin.describe()}, {facts.parameters:,} parameters",
        "data": {
            "training": f"{len(data.train):,} sequences{_of_tokens(config, data)}",
            "validation": _told_of(config, data),
            **({"remark": data.description.remark} if data.description.remark else {}),
        },
        "plan": plan.model_dump(mode="json", exclude={"forecast"}),
        "forecast": {
            "sent_per_step": {f"rank {r}": show_bytes(n) for r, n in enumerate(plan.forecast.sent_bytes)},
            "model_state_per_process": {s: show_gib(n) for s, n in stages.items()} or show_gib(state_bytes),
            "wire_bytes": plan.forecast.wire_bytes,
            **({} if held.cut is None else {"pipeline": plan.reasons["pipeline_schedule"]}),
        },
        "samples": _samples(data.corpus, seed=config.train.seed),
    }


def _of_tokens(config: RunConfig, data: TrainingData) -> str:
    return "" if data.corpus is None else f" of {config.data.sequence} tokens"


def _told_of(config: RunConfig, data: TrainingData) -> str | dict[str, str]:
    """Return how much validation data there is, by name where the configuration names sets."""
    counts = {name: f"{len(one.batches):,} sequences" for name, one in data.validation.items()}
    return counts if config.data.validation_sources else next(iter(counts.values()), "0 sequences")


def _samples(corpus: Corpus | None, *, seed: int) -> list[dict[str, Any]]:
    """Return the first sequences of text; of conversations with the passages that are learnt. None for other data."""
    shown = () if corpus is None else decode_preview(corpus.train, corpus.tokenizer, seed=seed)
    return [
        {"text": one.text[:400], "tokens": one.tokens, "labels": one.labels}
        | ({"learnt": [part[:400] for part in one.learnt]} if one.learnt else {})
        for one in shown
    ]
