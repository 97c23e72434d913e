"""A plan file combined with a configuration: its decisions become settings, and contradictions are errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.settings.read import read
from gossamer.settings.resolve import Resolved, value_at
from gossamer.settings.validation_errors import DEFAULT
from gossamer.spec.config import RunConfig
from gossamer.spec.earlier_names import PLAN_FIELDS
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, Written, told
from gossamer.spec.plan import Plan
from gossamer.view.run_directory import plan_in

# What a planner reads of a configuration: another value is another plan.
PLANNED = (
    "plan",
    "machines.islands",
    "machines.processes",
    "machines.hosts",
    "train.batch",
    "train.accumulate",
    "train.optimizer",
    "train.verify",
    "train.adversarial",
    "data.sequence",
)
# Of a plan that was written by a run, methods that it found by measuring: `auto`, and what stands in for it.
_MEASURED = {"plan.sync": ("local_steps", "exchange")}


def asks_for_another_plan(before: RunConfig, now: RunConfig) -> bool:
    """Return whether the planner would get another request."""
    return any(value_at(before, key) != value_at(now, key) for key in PLANNED)


def with_plan(resolved: Resolved, file: Path, *, ranks: int | None = None) -> Resolved:
    """Return the configuration of a run that follows the plan in `file`: the plan's decisions become settings.

    Raises BadInput for a plan that cannot be read, for one of another number of `ranks` (where given), and for one that
    contradicts the configuration; the last with both places.
    """
    plan = plan_in(file)
    lines = {PLAN_FIELDS.get(field, field): where for field, where in read(file).lines.items()}
    if ranks is not None and plan.ranks != ranks:
        do = f"start {plan.ranks} ranks, or leave --plan out to make a new plan"
        raise BadInput(f"{file} is a plan for {plan.ranks} ranks, this run has {ranks} ranks: {do}")
    given = {key for key, where in resolved.origin.items() if where != DEFAULT}
    for error in contradictions(resolved.config, plan, given, name=str(file), lines=lines):
        raise error
    asked, plain = resolved.config.plan, not plan.mesh.in_stages and MethodConfig.parse(plan.sync).name == "every_step"
    chose = asked.exchange == "auto" != plan.exchange and (plain or asked.sync == "auto")
    for key, value, field in _decisions(plan):
        if key not in given or value_at(resolved.config, key) == "auto":
            resolved = resolved.replace(key, value, origin=lines.get(field, str(file)))
    if chose and resolved.config.plan.lossy:  # the permission was for a choice that the plan has made
        resolved = resolved.replace("plan.lossy", False, origin=lines.get("exchange", str(file)))
    return resolved


def contradictions(
    config: RunConfig, plan: Plan, given: set[str], *, name: str, lines: Mapping[str, str]
) -> Iterator[BadInput]:
    """Yield an error for every key of `given` whose value the plan called `name` contradicts; `auto` contradicts none.

    Units and cuts, which need the model, are compared where the model is split.
    """
    for key, field, asked, has in _compared(config, plan):
        is_given = key in given or key == "plan.savers"  # an earlier pipeline_schedule, recompute, gives it as well
        if is_given and asked != "auto" and not _alike(key, asked, has):
            where = lines.get(field.partition(".")[0], name)
            yield bad_input(
                wanted=f"the value of the plan, {_told(has)} ({field} in {where})",
                got=_told(asked),
                do="leave the key out, change the plan file, or train without that file",
                key=key,
            )


def _compared(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (key, field of the plan, value of the configuration, value of the plan) of all settings that both hold."""
    asked, replicas = config.plan, set(plan.microbatches)
    yield "plan.mesh.replica", "mesh.replica", asked.mesh.replica, plan.mesh.replica
    yield "plan.mesh.pipe", "mesh.pipe", asked.mesh.pipe, plan.mesh.pipe
    yield "plan.stage_ranks", "stage_ranks", _tuples(asked.stage_ranks), plan.stage_ranks
    share = (
        asked.batch_fractions
        if asked.batch_fractions == "auto"
        else [one / sum(asked.batch_fractions) for one in asked.batch_fractions]
    )
    if not plan.stage_ranks:
        yield "plan.batch_fractions", "batch_fractions", share, list(plan.batch_fractions)
    counts = next(iter(replicas)) if len(replicas) == 1 else list(plan.microbatches)
    yield "train.accumulate", "microbatches", config.train.accumulate, counts
    yield "plan.pipeline_schedule", "pipeline_schedule", asked.pipeline_schedule, plan.pipeline_schedule
    boundary = (
        tuple(asked.activation_compression)
        if isinstance(asked.activation_compression, list)
        else asked.activation_compression
    )
    if asked.adapt == "none":  # else a policy chooses them anew
        yield "plan.activation_compression", "activation_compression", boundary, plan.activation_compression
    exchange = plan.adapted_from or plan.exchange
    yield "plan.exchange", "exchange", asked.exchange, exchange
    yield "plan.sync", "sync", asked.sync, plan.sync
    yield "plan.sharding", "sharding", asked.sharding, plan.sharding
    savers = "auto" if asked.savers == "auto" else asked.named_savers
    yield "plan.savers", "savers", savers, _as_asked(plan.savers, asked.named_savers)
    yield "machines.islands", "islands", _tuples(config.machines.islands), plan.islands
    yield "train.batch", "rows", config.train.batch, plan.batch


def _as_asked(has: Sequence[Written], asked: Sequence[Written]) -> tuple[Written, ...]:
    """Return the savers of a plan, without the units that were found for a budget where none were asked for."""
    given = {one.name: one.parameters for one in map(MethodConfig.parse, asked)}
    found = list[Written]()
    for one in map(MethodConfig.parse, has):
        is_found = "budget" in one.parameters and "units" not in given.get(one.name, {})
        left = {name: value for name, value in one.parameters.items() if not (is_found and name == "units")}
        found.append(MethodConfig(one.name, left).written())
    return tuple(found)


def _tuples(groups: Any) -> Any:
    return groups if groups == "auto" else tuple(tuple(sorted(group)) for group in groups)


def _alike(key: str, asked: Any, has: Any) -> bool:
    if key == "plan.batch_fractions":
        return len(asked) == len(has) and all(abs(a - b) < 1e-9 for a, b in zip(asked, has, strict=True))
    if not isinstance(asked, (str, dict)) or not isinstance(has, (str, dict)):
        return bool(_plain(asked) == _plain(has))
    one, other = MethodConfig.parse(asked), MethodConfig.parse(has)
    found = [name for name in _MEASURED.get(key, ()) if one.parameters.get(name, "auto") == "auto"]
    names = {*one.parameters, *other.parameters} - {*found}
    return one.name == other.name and all(one.parameters.get(n) == other.parameters.get(n) for n in names)


def _plain(value: Any) -> Any:
    """Return lists and tuples as lists."""
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _told(value: Any) -> str:
    is_lines = isinstance(value, list) and value and isinstance(value[0], (list, tuple)) and len(value[0]) == 3
    return told(value) if isinstance(value, (str, dict)) or is_lines else str(_plain(value))


def _decisions(plan: Plan) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, field of the plan) of the decisions that a new plan keeps, on a resume with other settings."""
    yield "train.batch", plan.batch, "rows"
    if plan.stage_ranks:
        yield "plan.stage_ranks", [list(group) for group in plan.stage_ranks], "stage_ranks"
    else:
        yield "plan.mesh.pipe", plan.mesh.pipe, "mesh"
    if not plan.stage_ranks and len(set(plan.batch_fractions)) > 1:
        yield "plan.batch_fractions", list(plan.batch_fractions), "batch_fractions"
    yield "plan.sharding", plan.sharding, "sharding"
    yield "plan.sync", plan.sync, "sync"
    if plan.savers:
        yield "plan.savers", list(plan.savers), "savers"
    if plan.exchange != "auto":
        yield "plan.exchange", plan.adapted_from or plan.exchange, "exchange"
    if plan.mesh.in_stages:
        yield "plan.pipeline_schedule", plan.pipeline_schedule, "pipeline_schedule"
        boundary = plan.activation_compression
        yield (
            "plan.activation_compression",
            list(boundary) if isinstance(boundary, tuple) else boundary,
            "activation_compression",
        )
    elif plan.islands and plan.sync not in ("auto", "every_step"):
        yield "machines.islands", [list(island) for island in plan.islands], "islands"
