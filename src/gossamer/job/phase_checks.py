"""What is known of a phase before the first step of the first one: its dry run, its model's shapes, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer import grow, sharding
from gossamer import optimizer as optimizers
from gossamer import prune as prunings
from gossamer.job.dry_run import Layout, dry_run_with
from gossamer.job.found_teacher import place_of
from gossamer.job.growth import GrowthSource, check_is_there, grown_between, whole_section
from gossamer.job.training_data import training_data
from gossamer.job.whole_model import why_no_text
from gossamer.job.worker import origin_for
from gossamer.loss.distillation.teacher_address import address_of
from gossamer.loss.hidden import distillation_in
from gossamer.model import adapter as adapters
from gossamer.model.quantized_folder import quantized_folder_of
from gossamer.model.source import ModelSource
from gossamer.model.split.meta_init import without_storage
from gossamer.model.started_source import start_of
from gossamer.partition.model_provider import OriginSource
from gossamer.prune import check_prunable
from gossamer.recipe import Recipe
from gossamer.spec.config import ModelSection, RunConfig
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.store.start_folder import MASKS, StartFolder, state_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLook:
    """A phase that has not begun. told: its dry run; origin, shapes: its model without an adapter or a side network;
    tokenizer: its fingerprint, "" where its data are no text.
    """

    config: RunConfig
    told: Mapping[str, Any]
    origin: ModelSource
    shapes: Mapping[str, tuple[int, ...]]
    tokenizer: str


def look_at(config: RunConfig, *, has_masks: bool = False, layout: Layout | None = None) -> PhaseLook:
    """Check and forecast a phase, whose start folder need not be there yet. Raises BadInput.

    has_masks: the folder will hold masks. layout: see `dry_run_with`.
    """
    check_teacher(config)
    data = training_data(config)
    told = dry_run_with(_without_start(config, has_masks=has_masks), data, layout=layout)
    bare = config.model_copy(update={"model": whole_section(config.model)})
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


def check_is_whole(before: PhaseLook, local_ranks: int) -> None:
    """Raise BadInput for a phase before whose weights are on no one disk, as hosts that share none divide them.

    local_ranks: the number of its ranks on each host.
    """
    plan = before.told["plan"]
    per_replica = plan["mesh"]["pipe"]
    shards = sharding.build(plan["sharding"], key="plan.sharding").takes_parameters
    if shards or per_replica > local_ranks:
        got = f"plan.sharding {plan['sharding']}" if shards else f"{per_replica} stages over hosts"
        raise bad_input(
            wanted="a phase before whose weights are whole on one host's disk, as the hosts share no run directory",
            got=f"{got}, of which each disk holds a part",
            do="set run.directory to a folder on a file system that all hosts share",
            key="run.directory",
        )


def check_source(before: RunConfig, by: Written | None) -> None:
    """Raise BadInput for a phase before whose weights are not those of a whole model, as this one begins with them."""
    quantized = quantized_folder_of(before.model)
    if before.model.base != "full" or quantized is not None:
        raise bad_input(
            wanted="a phase before whose weights are whole, model.base full",
            got=before.model.base if quantized is None else f"a quantized folder, {quantized.path}",
            do="make it the last phase, or set its model.base to full",
            key="model.base",
        )
    if before.model.side != "none":
        raise bad_input(
            wanted="a phase before that trains the model itself, or an adapter",
            got="one that trains a side network, which no other phase can begin with",
            do="make it the last phase, or train an adapter",
            key="model.side",
        )
    if before.model.adapter != "none" and by is not None:
        raise bad_input(
            wanted=f"a phase before that trains whole weights, of which {MethodConfig.parse(by).name} makes others",
            got=f"model.adapter {MethodConfig.parse(before.model.adapter).name} on frozen ones",
            do="put a phase without `by` between them, which begins with the adapter merged into the weights",
            key="model.adapter",
        )


def check_text(before: PhaseLook, by: Written) -> None:
    """Raise BadInput for a phase before without a text, on which the loss before and after a method is measured."""
    if why := why_no_text(before.config):
        raise bad_input(
            wanted=f"a phase before with text, on which {MethodConfig.parse(by).name} measures the loss",
            got=f"none: {why}",
            do="use the command after the run, which takes text files, and name its folder as model.start",
            key="data",
        )


def check_growth(before: PhaseLook, after: PhaseLook, by: Written) -> None:
    """Raise BadInput where the model of a phase cannot be grown of the one before: tried with random weights."""
    method = grow.build(by, key=grow.KEY)
    for place in method.others:
        check_is_there(Path(place))
    if method.others:  # they hold weights of the phase before, which is not trained yet
        return
    small = GrowthSource(module=before.origin.bare(before.config.train.seed).eval(), place="the phase before")
    grown_between(small, after.origin.bare(after.config.train.seed).eval(), method, after.config)


def check_pruning(before: PhaseLook, by: Written) -> None:
    """Raise BadInput where the model of the phase before cannot be pruned: looked at without its weights."""
    module = without_storage(before.origin.bare(before.config.train.seed))
    check_prunable(module, prunings.build(by, key="--by"))


def check_teacher(config: RunConfig) -> None:
    """Raise BadInput for a teacher whose folder is not there; an earlier phase may write one to `run.directory`."""
    inner = distillation_in(Recipe.loss_of(config))
    if inner is None or not inner.teacher.strip() or address_of(inner.teacher) is not None:
        return
    place = Path(inner.teacher).expanduser().resolve()
    if not place.is_relative_to(Path(config.run.directory).expanduser().resolve()):
        place_of(inner.teacher)


def starts_with_masks(section: ModelSection) -> bool:
    """Return whether a model begins from a folder that is there and has masks."""
    start = start_of(section)
    return start is not None and StartFolder.is_at(start.path) and bool(start.kinds(MASKS))


def fills_zeros(config: RunConfig) -> bool:
    """Return whether a run from a folder with masks surely trains over their zeros, or adds to them when it is merged.

    One that freezes parameters may leave some: its end tells which.
    """
    if config.model.adapter != "none":
        return not adapters.build(config.model.adapter).keeps_masks
    holds = optimizers.build(config.train.optimizer, key="train.optimizer").keeps_masks
    return not holds and not config.model.freeze


def check_masks(look: PhaseLook, *, has_masks: bool) -> None:
    """Raise BadInput for a phase that holds the zeros of masks, where the phase before leaves none."""
    model, key = look.config.model, "train.optimizer"
    wanted = optimizers.build(look.config.train.optimizer, key=key).keeps_masks
    if not wanted and model.adapter != "none":
        adapter = adapters.build(model.adapter)
        wanted = any(getattr(adapter, name) != value for name, value in adapter.without_start.items())
        key = "model.adapter"
    if wanted and not has_masks:
        raise bad_input(
            wanted="masks, which a phase with `by` of a pruning leaves, for what holds their zeros",
            got="none from the phase before",
            do="prune in this phase (by: magnitude, say), or hold no zeros",
            key=key,
        )


def _without_start(config: RunConfig, *, has_masks: bool) -> RunConfig:
    changed: dict[str, Any] = {"start": None}
    if has_masks and config.model.adapter != "none":
        adapter = MethodConfig.parse(config.model.adapter)
        given = adapters.REGISTRY.type(adapter.name, key=adapters.KEY).without_start
        changed["adapter"] = MethodConfig(adapter.name, {**adapter.parameters, **given}).written()
    return config.model_copy(update={"model": config.model.model_copy(update=changed)})
