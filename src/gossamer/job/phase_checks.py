"""What is known of a phase before the first step of the first one: its dry run, its model's shapes, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer import grow
from gossamer import optimizer as optimizers
from gossamer.job.dry_run import dry_run_with
from gossamer.job.growth import GrowthSource, grown_between
from gossamer.job.training_data import training_data
from gossamer.job.worker import origin_for
from gossamer.model import adapter as adapters
from gossamer.model.source import ModelSource
from gossamer.model.started_source import start_of
from gossamer.partition.model_provider import OriginSource
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import MethodConfig, Written, told
from gossamer.store.start_folder import MASKS, state_shapes


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
    named = [one for one in (method.before, *method.others) if one]
    for one in named:
        if not Path(one).expanduser().exists():
            raise bad_input(
                wanted=f"the models that {told(by)} takes, before the run begins",
                got=f"{one}, which does not exist",
                do="train it first, or name the folder of one that is there",
                key=grow.KEY,
            )
    if named:  # what they hold is seen when the phase is made
        return
    small = GrowthSource(module=before.origin.bare(before.config.train.seed).eval(), place="the phase before")
    grown_between(small, after.origin.bare(after.config.train.seed).eval(), method, after.config)


def starts_with_masks(look: PhaseLook) -> bool:
    """Return whether the first phase begins from a folder with masks."""
    start = start_of(look.config.model)
    return start is not None and bool(start.kinds(MASKS))


def check_masks(look: PhaseLook, *, has_masks: bool) -> None:
    """Raise BadInput for a phase that holds the zeros of masks, where the phase before leaves none."""
    model, wanted = look.config.model, optimizers.build(look.config.train.optimizer, key="train.optimizer").keeps_masks
    key = "train.optimizer"
    if not wanted and model.adapter != "none":
        adapter = adapters.build(model.adapter)
        wanted, key = adapter.keeps_masks and getattr(adapter, "mask", "") == "start", "model.adapter"
    if wanted and not has_masks:
        raise bad_input(
            wanted="masks, which a phase with `by` of a pruning leaves, for what holds their zeros",
            got="none from the phase before",
            do="prune in this phase (by: magnitude, say), or hold no zeros",
            key=key,
        )


def _without_start(config: RunConfig) -> RunConfig:
    """Return a configuration that can be looked at before its start folder, and the masks in it, are there."""
    changed: dict[str, Any] = {"start": None}
    if config.model.adapter != "none":
        named = MethodConfig.parse(config.model.adapter)
        if getattr(adapters.build(config.model.adapter), "mask", "") == "start":
            changed["adapter"] = {named.name: {**named.parameters, "mask": "nonzero"}}
    return config.model_copy(update={"model": config.model.model_copy(update=changed)})
