"""Choose the activation compression of every stage boundary, before step 1, from the measured links between stages.

This is `plan.adapt` for a model in pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gossamer.comm.channel import Channel
from gossamer.comm.link_probe import neighbors
from gossamer.partition.forecast import forecast_of
from gossamer.run.batches import Feed
from gossamer.run.parts import Parts
from gossamer.run.staged_model import boundary_of
from gossamer.spec.network import Link
from gossamer.spec.statistics import Paths, Statistics

Tell = Callable[[str, int], None]


def with_activation_compression(parts: Parts, channel: Channel, tell: Tell) -> Parts:
    """Return the parts with a plan whose activation compression the policy has chosen.

    All ranks must call it and get the same plan. A boundary of several links is treated as its slowest link requires.
    """
    policy = parts.recipe.policy
    if parts.cut is None or policy is None:
        return parts
    mesh = parts.plan.axes
    pairs = {stage: list(mesh.pairs(stage)) for stage in range(parts.plan.mesh.pipe - 1)}
    shifts = {(there - here) % parts.plan.ranks for ways in pairs.values() for here, there in ways}
    found = neighbors(channel, sorted(shifts))
    slowest = {stage: min((found[f"{a}>{b}"] for a, b in ways), key=_rate) for stage, ways in pairs.items()}
    names = {stage: f"{stage}>{stage + 1}" for stage in slowest}
    choices = policy.choose(
        Statistics(names=(), crossing={names[s]: n for s, n in _crossing(parts).items()}),
        Paths(between={names[stage]: link for stage, link in slowest.items()}),
    )
    by_link = {level: way for _, level, way in choices.rules}
    boundary = tuple(by_link.get(name, by_link["all"]) for name in names.values())
    reasons = {**parts.plan.reasons, "activation_compression": choices.reason}
    plan = parts.plan.model_copy(update={"activation_compression": boundary, "reasons": reasons})
    plan = plan.model_copy(update={"forecast": forecast_of(plan, parts.cut, parts.train, parts.config)})
    tell(f"boundaries: {choices.reason}", 0)
    return replace(parts, plan=plan)


def _rate(link: Link) -> float:
    return link.bytes_per_s


def _crossing(parts: Parts) -> dict[int, int]:
    """Return the bytes of compressible activations that each stage but the last sends with the first micro-batch."""
    assert parts.cut is not None
    rows = Feed(parts.train, parts.plan, 0, parts.config.train.seed).fetch(0)[0].rows
    flow, stages = parts.cut.ways.of(rows)
    forms = {p.stage: [edge.form for edge in boundary_of(flow, p).sends] for p in stages[:-1]}
    return {stage: sum(f.nbytes for f in sent if f.dtype.is_floating_point) for stage, sent in forms.items()}
