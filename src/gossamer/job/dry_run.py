"""`gossamer train --dry-run`: everything before the first step: the plan, what it sends, whether it fits, samples."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gossamer.data import Corpus, decode_preview
from gossamer.job.auto_savers import choose, is_open
from gossamer.job.fit import Change, Fit, Machine, ProcessBase
from gossamer.job.link_forecast import Cure, HostLinks, told_of_common, told_of_hosts
from gossamer.job.memory_forecast import MemoryForecast
from gossamer.job.trainer_parts import parts_of
from gossamer.job.training_data import TrainingData, training_data
from gossamer.job.worker import origin_for
from gossamer.launch.preflight import HostRequirements, look
from gossamer.loss import Loss
from gossamer.loss.distillation.teacher_address import address_of
from gossamer.loss.expert_distillation import ExpertDistillation
from gossamer.loss.hidden import distillation_in
from gossamer.model.model_profile import facts_of
from gossamer.partition.model_provider import OriginSource
from gossamer.partition.outline_source import OutlineSource
from gossamer.partition.plan_file import read_plan
from gossamer.partition.rank_model import Planned, planned
from gossamer.partition.request import PartitionRequest
from gossamer.partition.stage_memory import state_bytes_of
from gossamer.recipe import Recipe
from gossamer.run.start_checks import check_before_start
from gossamer.settings.yaml_io import flow
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_bytes, show_gib

_FEWER_BYTES: tuple[dict[str, Any], ...] = (
    {"exchange": {"error_feedback": {"two_shot": "int8"}}},
    {"exchange": {"error_feedback": {"two_shot": "int4"}}},
    {"exchange": "auto", "sync": "diloco"},
)
_FEWER_BETWEEN_STAGES: tuple[dict[str, Any], ...] = ({"activation_compression": {"codec": "int8"}},)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """So many ranks, `local_ranks` of them on each host."""

    ranks: int
    local_ranks: int


def dry_run(config: RunConfig, plan_file: Path | None = None) -> dict[str, Any]:
    """Return the plan, what it sends, the memory that it needs, the model, and three samples as the model will see
    them.

    No parameter gets memory. Raises BadInput.
    """
    return dry_run_with(config, training_data(config), plan_file)


def dry_run_with(
    config: RunConfig, data: TrainingData, plan_file: Path | None = None, *, layout: Layout | None = None
) -> dict[str, Any]:
    """Return what `dry_run` does, with data that were read already.

    layout: of the ranks that are started already, where `machines` does not say it; then no other host is asked.
    """
    origin = origin_for(config, data.corpus)
    if layout is None:
        hosts = max(1, len(config.machines.hosts))
        layout = Layout(ranks=config.machines.processes * hosts, local_ranks=config.machines.processes)
    else:
        config = config.model_copy(update={"machines": config.machines.model_copy(update={"hosts": []})})
    ranks, cpu = layout.ranks, torch.device("cpu")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = PartitionRequest(
        config=config,
        ranks=ranks,
        rank=0,
        batches=data.train,
        objective=Recipe.loss_of(config),
        device=device,
        local_ranks=layout.local_ranks,
    )
    given = read_plan(plan_file, ranks=ranks) if plan_file else None
    source = OutlineSource(OriginSource(origin, config.train.seed))
    looked_at = planned(source, asked, given)
    parts = replace(parts_of(asked, looked_at.outline, validation=data.validation, words=data.tokenizer), device=cpu)
    check_before_start(parts)
    base = ProcessBase.measured()  # now that all is imported that a worker imports
    machines = _machines(asked, base)
    if is_open(looked_at):
        looked_at = choose(looked_at, [(one.ranks, one.total) for one in machines]).planned
    held, plan = looked_at.outline, looked_at.plan
    facts = facts_of(parts.outline)
    others = _Others(source, asked)
    fit = Fit(forecast=MemoryForecast.of(looked_at, local_ranks=asked.local_ranks), base=base, machines=machines)
    links, memory = _links(looked_at, others), fit.told(_changes(looked_at, others))
    state_bytes = max(plan.forecast.state_bytes, default=4 * facts.parameter_bytes)
    stages = {} if held.cut is None else {f"stage {p.stage}": state_bytes_of(held.cut, p) for p in held.cut.parts}
    return {
        "model": f"{origin.describe()}, {facts.parameters:,} parameters",
        "data": {
            "training": f"{len(data.train):,} sequences{_of_tokens(config, data)}",
            "validation": _told_of(config, data),
            **({"remark": data.description.remark} if data.description.remark else {}),
        },
        **_teacher(asked.objective),
        "plan": plan.model_dump(mode="json", exclude={"forecast"}),
        "forecast": {
            "sent_per_step": {f"rank {r}": show_bytes(n) for r, n in enumerate(plan.forecast.sent_bytes)},
            "model_state_per_process": {s: show_gib(n) for s, n in stages.items()} or show_gib(state_bytes),
            "wire_bytes": plan.forecast.wire_bytes,
            **({} if held.cut is None else {"pipeline": plan.reasons["pipeline_schedule"]}),
        },
        "samples": _samples(data.corpus, seed=config.train.seed),
        **({"links": links} if links else {}),
        "memory": memory,
    }


def _teacher(objective: Loss) -> dict[str, str]:
    """Return what is not checked now of a teacher on another host."""
    inner = objective if isinstance(objective, ExpertDistillation) else distillation_in(objective)
    if inner is None or address_of(inner.teacher) is None:
        return {}
    said = "is not asked now: its tokens, vocabulary and length are compared with the data's before step 1"
    return {"teacher": f"{inner.teacher} {said}"}


@dataclass(frozen=True, slots=True)
class _Others:
    """Plans of the same run with other settings."""

    source: OutlineSource
    asked: PartitionRequest

    def plan(self, section: str, keys: Mapping[str, Any]) -> Planned | None:
        """Return the run with other values of some keys; None where they cannot be combined with the rest."""
        config = self.asked.config
        changed = getattr(config, section).model_copy(update=dict(keys))
        asked = replace(self.asked, config=config.model_copy(update={section: changed}))
        try:
            return planned(self.source, asked)
        except BadInput:
            return None


def _machines(asked: PartitionRequest, base: ProcessBase) -> tuple[Machine, ...]:
    """Return the machines of a run. Raises BadInput for a host that is not ready."""
    names, local = asked.config.machines.hosts, asked.local_ranks
    spans = [range(first, first + local) for first in range(0, asked.ranks, local)]
    if not names:
        return tuple(Machine.here(span, base) for span in spans)
    found = look(names, HostRequirements(python=sys.executable, folder=str(Path.cwd())))
    return tuple(
        Machine(name=name, ranks=span, total=found[name].memory[0], free=found[name].memory[1])
        for name, span in zip(names, spans, strict=True)
    )


def _links(looked_at: Planned, others: _Others) -> dict[str, object]:
    """Return what the links of a run cost."""
    plan, names = looked_at.plan, looked_at.asked.config.machines.hosts
    if not names:
        return told_of_common(plan.forecast.wire_bytes, _cures(plan, others))
    host_of = [rank // looked_at.asked.local_ranks for rank in range(plan.ranks)]
    measured = HostLinks.measured(names, host_of, sys.executable)
    return told_of_hosts(measured, plan.forecast.wire_bytes, _cures(plan, others))


def _cures(plan: Plan, others: _Others) -> list[Cure]:
    def sent(keys: Mapping[str, Any]) -> dict[str, int] | None:
        found = others.plan("plan", keys)
        return None if found is None else found.plan.forecast.wire_bytes

    wanted = _FEWER_BETWEEN_STAGES if plan.mesh.in_stages else _FEWER_BYTES
    return [Cure(_written("plan", keys), lambda keys=keys: sent(keys)) for keys in wanted]  # type: ignore[misc]


def _changes(looked_at: Planned, others: _Others) -> list[Change]:
    """Return the settings that take less memory: smaller micro-batches first, as they change no result and take
    hardly longer.
    """
    plan, local = looked_at.plan, looked_at.asked.local_ranks

    def forecast(section: str, keys: Mapping[str, Any]) -> MemoryForecast | None:
        found = others.plan(section, keys)
        return None if found is None else MemoryForecast.of(found, local_ranks=local)

    pieces, rows = max(plan.microbatches), min(plan.rows)
    wanted: list[tuple[str, dict[str, Any]]] = [
        ("train", {"accumulate": more}) for more in (2 * pieces, 4 * pieces, 8 * pieces, rows) if pieces < more <= rows
    ]
    if not plan.savers:
        wanted.append(("plan", {"savers": ["recompute"]}))
    if plan.ranks > 1 and not plan.mesh.in_stages:
        wanted += [("plan", {"sharding": name}) for name in ("zero1", "zero2", "zero3")]
    return [Change(_written(section, keys), lambda s=section, k=keys: forecast(s, k)) for section, keys in wanted]  # type: ignore[misc]


def _written(section: str, keys: Mapping[str, Any]) -> str:
    return " ".join(f"{section}.{key}={flow(value)}" for key, value in keys.items())


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
