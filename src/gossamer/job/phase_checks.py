"""What is known of a phase before the first step of the first one: its dry run, its model's shapes, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.job.dry_run import dry_run_with
from gossamer.job.training_data import training_data
from gossamer.job.worker import origin_for
from gossamer.partition.model_provider import OriginSource
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import bad_input
from gossamer.store.start_folder import state_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLook:
    """A phase that has not begun. told: its dry run; shapes: of its model without an adapter; tokenizer: fingerprint,
    "" where its data are no text.
    """

    told: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    tokenizer: str


def look_at(config: RunConfig) -> PhaseLook:
    """Check and forecast a phase, whose start folder need not be there yet. Raises BadInput."""
    data = training_data(config)
    told = dry_run_with(_without_start(config), data)
    plain: dict[str, Any] = {"adapter": "none", "base": "full", "freeze": [], "unfreeze": [], "start": None}
    bare = config.model_copy(update={"model": config.model.model_copy(update=plain)})
    outline = OriginSource(origin_for(bare, data.corpus), config.train.seed).outline()
    words = data.tokenizer
    return PhaseLook(told=told, shapes=state_shapes(outline), tokenizer="" if words is None else words.fingerprint)


def check_fits(look: PhaseLook) -> None:
    """Raise BadInput for a phase that needs more memory than its machines have."""
    memory = look.told["memory"]
    if not memory["fits"]:
        raise bad_input(
            wanted="a phase that fits into memory",
            got=str(memory["verdict"]),
            do="change it as said, or take it out",
        )


def check_goes_on(before: PhaseLook, after: PhaseLook, *, keeps_shapes: bool) -> None:
    """Raise BadInput for a phase that cannot go on with the weights of the one before."""
    if before.tokenizer != after.tokenizer and before.tokenizer and after.tokenizer:
        raise bad_input(
            wanted="the tokenizer of the phase before, whose ids its embeddings stand for",
            got="another one",
            do="set data.tokenizer for both phases to the same one that is trained on no data of a phase: byte or "
            "hf:DIR, say",
            key="data.tokenizer",
        )
    if not keeps_shapes:
        return
    for name in sorted(before.shapes.keys() ^ after.shapes.keys()):
        where = "the phase before" if name in before.shapes else "this phase"
        raise bad_input(
            wanted="the parameters of the phase before",
            got=f"{name} in {where} alone",
            do="give both phases one model, or say by which method one is made of the other (by)",
            key="model",
        )
    for name, shape in before.shapes.items():
        if after.shapes[name] != shape:
            raise bad_input(
                wanted=f"{name} of shape {shape}, as in the phase before",
                got=f"{after.shapes[name]}",
                do="give both phases one model, or say by which method one is made of the other (by)",
                key="model",
            )


def _without_start(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"start": None})})
