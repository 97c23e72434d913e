"""What is known of a phase before the first step of the first one: its dry run, its model's shapes, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer import grow
from gossamer.job.dry_run import dry_run_with
from gossamer.job.growth import GrowthSource, grown_between
from gossamer.job.training_data import training_data
from gossamer.job.worker import origin_for
from gossamer.model.source import ModelSource
from gossamer.partition.model_provider import OriginSource
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Written
from gossamer.store.start_folder import state_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLook:
    """A phase that has not begun. told: its dry run; origin, shapes: its model without an adapter; tokenizer: its
    fingerprint, "" where its data are no text.
    """

    config: RunConfig
    told: Mapping[str, Any]
    origin: ModelSource
    shapes: Mapping[str, tuple[int, ...]]
    tokenizer: str


def look_at(config: RunConfig) -> PhaseLook:
    """Check and forecast a phase, whose start folder need not be there yet. Raises BadInput."""
    data = training_data(config)
    told = dry_run_with(_without_start(config), data)
    plain: dict[str, Any] = {"adapter": "none", "base": "full", "freeze": [], "unfreeze": [], "start": None}
    bare = config.model_copy(update={"model": config.model.model_copy(update=plain)})
    origin = origin_for(bare, data.corpus)
    return PhaseLook(
        config=config,
        told=told,
        origin=origin,
        shapes=state_shapes(OriginSource(origin, config.train.seed).outline()),
        tokenizer="" if data.tokenizer is None else data.tokenizer.fingerprint,
    )


def check_fits(look: PhaseLook) -> None:
    """Raise BadInput for a phase that needs more memory than its machines have."""
    memory = look.told["memory"]
    if not memory["fits"]:
        raise bad_input(
            wanted="a phase that fits into memory",
            got=str(memory["verdict"]),
            do="change it as said, or take it out",
        )


def check_tokenizers(before: PhaseLook, after: PhaseLook) -> None:
    """Raise BadInput for a phase whose ids mean other text than in the phase before."""
    if before.tokenizer != after.tokenizer and before.tokenizer and after.tokenizer:
        raise bad_input(
            wanted="the tokenizer of the phase before, whose ids its embeddings stand for",
            got="another one",
            do="set data.tokenizer of both phases to one that is trained on no data of a phase: byte or hf:DIR, say",
            key="data.tokenizer",
        )


def check_shapes(before: PhaseLook, after: PhaseLook) -> None:
    """Raise BadInput for a phase whose parameters are others than those of the phase before."""
    do = "give both phases one model, or say by which method one is made of the other (by)"
    for name in sorted(before.shapes.keys() ^ after.shapes.keys()):
        where = "the phase before" if name in before.shapes else "this phase"
        raise bad_input(wanted="the parameters of the phase before", got=f"{name} in {where} alone", do=do, key="model")
    for name, shape in before.shapes.items():
        if after.shapes[name] != shape:
            wanted = f"{name} of shape {shape}, as in the phase before"
            raise bad_input(wanted=wanted, got=f"{after.shapes[name]}", do=do, key="model")


def check_growth(before: PhaseLook, after: PhaseLook, by: Written) -> None:
    """Raise BadInput where the model of a phase cannot be grown of the one before: tried with random weights."""
    method = grow.build(by, key=grow.KEY)
    if method.before or method.others:  # other models, which need not be there yet
        return
    small = GrowthSource(module=before.origin.bare(before.config.train.seed).eval(), place="the phase before")
    grown_between(small, after.origin.bare(after.config.train.seed).eval(), method, after.config)


def _without_start(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"start": None})})
