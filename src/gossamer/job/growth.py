"""The job of `gossamer grow`: source and target, the method between them, the proof, and the start folder."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer import grow
from gossamer.data.tokenizer import Tokenizer
from gossamer.grow import Grown, Growth, GrowthTask
from gossamer.job.found_model import check_weights
from gossamer.job.trained_run import check_no_choice, read_chosen
from gossamer.model.adapter import adapter_tensors
from gossamer.model.export import config_of, files_beside, is_of_transformers, special_ids
from gossamer.model.forward_adapter import caller_of
from gossamer.model.in_float64 import InFloat64
from gossamer.model.module_copy import copied
from gossamer.model.origin import origin_of
from gossamer.model.quantized_linear import quantized_layers
from gossamer.model.side import route_of
from gossamer.model.source import Files, ModelSource
from gossamer.model.started_source import set_attributes
from gossamer.model.structure.model import structure_of
from gossamer.model.structure.norm_eps import eps_attributes, eps_keys
from gossamer.model.token_logits import logits_of
from gossamer.run.checkpoint.choice import LATEST, open_chosen
from gossamer.run.resources import memory
from gossamer.settings import load
from gossamer.spec.config import ModelSection, RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.store.checked_tensors import check_absent
from gossamer.store.gguf import read_summary
from gossamer.store.slices import REPLICATED
from gossamer.store.start_folder import MASKS, StartContent, StartFolder, start_state, write_start
from gossamer.view.run_directory import RunDirectory, open_run

_DEGREES = {"mean": 1, "momentum": 1, "square": 2}  # slots of which it is known how they follow the gradient
_ROWS, _TOKENS = 2, 64  # of the batch that proves
_WARMUP_STEPS = 30  # after which a grown model has not jumped (measured)
_CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4}  # of the largest logit, or of 1
_PLAIN_BLOCKS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthSource:
    """A model to grow from: its module in evaluation mode, where its tokenizer is, and moments of its optimizer."""

    module: nn.Module
    place: str
    step: int | None = None
    files: Files = field(default_factory=dict)
    vocabulary: int | None = None
    separator: int = 0
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)
    moment_steps: int = 0
    moment_rule: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters and persistent buffers by name."""
        return {name: tensor.detach() for name, tensor in start_state(self.module)}


def grow_model(
    source: Path,
    to: Path,
    by: Written,
    *,
    out: Path | None = None,
    checkpoint: str | int = LATEST,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Grow the model at `source` into the model of the configuration `to`; return what was done, in figures.

    out: the start folder to write; None: grown-NAME in the current folder. Raises BadInput, CheckpointMismatch.
    """
    method = grow.build(by, key=grow.KEY)
    config = load(to).config
    out = out or Path(f"grown-{source.resolve().name}")
    if not dry_run:
        check_absent(out, key="--out")
    small = read_source(source, checkpoint)
    large = _target(config, small)
    found = grown_between(small, large, method, config)
    data = {
        "source": small.place,
        "step": small.step,
        "target": str(to),
        "method": MethodConfig.parse(by).name,
        **found.said,
        "moments": sorted({name.partition("/")[0] for name in found.grown.moments}),
        "remarks": [*small.remarks, *filter(None, [found.remark])],
    }
    if dry_run:
        return {**data, "written": None}
    content = StartContent(
        tensors={name: found.tensors[name] for name, _ in start_state(large)},
        method=by,
        source=_digest(small),
        said=found.said,
        config=config_of(large) if is_of_transformers(large) else None,
        attributes=found.attributes,
        config_keys=found.config_keys,
        files={name: one for name, one in small.files.items() if name != "config.json"},
        moments=found.grown.moments,
        moment_steps=small.moment_steps if found.grown.moments else 0,
        moment_rule=small.moment_rule if found.grown.moments else "",
    )
    size = write_start(out, content)
    return {**data, "written": str(out), "bytes": size, "next": _next(to, out, config, found.said)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthResult:
    """What a growth gave: tensors in the target's types, what its norms are to be set to, and figures."""

    grown: Grown
    tensors: Mapping[str, Tensor]
    attributes: Mapping[str, float]
    config_keys: Mapping[str, float]
    said: Mapping[str, Any]
    remark: str


def grown_between(small: GrowthSource, large: nn.Module, method: Growth, config: RunConfig) -> GrowthResult:
    """Return the tensors of `large`, grown from `small`, which `large` holds then. Raises BadInput.

    What the method promises is proved on a batch of random tokens, in float64 where both models fit memory in it.
    """
    before = read_source(Path(method.before)).tensors if method.before else {}
    tokens = _length(small.module, large, config)
    structures = structure_of(small.module, tokens=tokens), structure_of(large, tokens=tokens)
    wide = _fits_wide(small.module, large)
    task = GrowthTask(
        source=structures[0],
        target=structures[1],
        tensors={name: one.to(wide) if one.is_floating_point() else one for name, one in small.tensors.items()},
        moments=small.moments,
        degrees=small.degrees,
        before=before,
        others=tuple(read_source(Path(one)).tensors for one in method.others),
        tokens=float(config.train.steps) * config.train.batch * config.data.sequence,
        seed=config.train.seed,
    )
    grown = method.grow(task)
    attributes = eps_attributes(structures[1], grown.eps)
    config_keys = eps_keys(large, structures[1], grown.eps)
    set_attributes(large, attributes, config_keys)
    ids = min(one.token_ids for one in structures)
    said = {**grown.said, **_proved(small.module, large, grown, method, wide=wide, shape=(_ROWS, tokens), ids=ids)}
    if attributes:
        said["eps"] = sorted(set(attributes.values()))
    tensors = {name: tensor.detach().clone() for name, tensor in start_state(large)}
    dropped = "" if grown.moments or not small.moments else "the optimizer starts anew: this method resets its moments"
    return GrowthResult(
        grown=grown, tensors=tensors, attributes=attributes, config_keys=config_keys, said=said, remark=dropped
    )


def read_source(place: Path, checkpoint: str | int = LATEST) -> GrowthSource:
    """Return the model of a run, of a Hugging Face folder or of a GGUF file, with its moments where it has them.

    Raises BadInput for an adapter, a side network, and for weights in blocks.
    """
    if _is_weights(place):
        check_no_choice(place, checkpoint)
        return _of_weights(place)
    trained = read_chosen(place, checkpoint)
    _check_plain(trained.module, trained.config.model, str(place))
    tokenizer = trained.tokenizer
    directory = RunDirectory(open_run(place).path.absolute())
    found = GrowthSource(
        module=trained.module,
        place=str(place),
        step=trained.step,
        files=_files(trained.origin, tokenizer),
        vocabulary=tokenizer.vocabulary if tokenizer is not None else None,
        separator=tokenizer.separator if tokenizer is not None else 0,
        remarks=_of_masks(trained.start),
    )
    return _with_moments(found, directory, trained.step)


def check_is_there(place: Path) -> None:
    """Raise BadInput where there is no model that `read_source` would read."""
    if not _is_weights(place):
        open_run(place)


def _is_weights(place: Path) -> bool:
    return place.is_file() or (place / "config.json").is_file()


def _of_weights(place: Path) -> GrowthSource:
    is_file = place.is_file()
    if is_file and (held := set(read_summary(place).tensors) - set(_PLAIN_BLOCKS)):
        raise bad_input(
            wanted="a source whose weights are numbers",
            got=f"{place} with tensors in {', '.join(sorted(held))}",
            do="take the model in f16 or f32, before it was quantized",
            key="CHECKPOINT",
        )
    if not is_file and (place / "adapter_config.json").is_file():
        raise _adapter(str(place))
    origin = origin_of(ModelSection(gguf=str(place)) if is_file else ModelSection(hf=str(place)))
    check_weights(origin, place)
    module = origin.build(0).eval()
    _check_plain(module, ModelSection(), str(place))
    return GrowthSource(module=module, place=str(place), files=origin.files(), vocabulary=origin.vocabulary())


def _check_plain(module: nn.Module, section: ModelSection, place: str) -> None:
    if section.adapter != "none" or next(adapter_tensors(module), None) is not None:
        raise _adapter(place)
    if route_of(module) is not None:
        raise bad_input(
            wanted="a source that is a whole model",
            got=f"{place} with a side network, which would be lost",
            do="name the model that it was trained beside, which is as it was",
            key="CHECKPOINT",
        )
    if section.base != "full" or quantized_layers(module):
        raise bad_input(
            wanted="a source whose weights are numbers",
            got=f"{place} with weights in quantized blocks",
            do="take the model before it was quantized",
            key="CHECKPOINT",
        )


def _adapter(place: str) -> Exception:
    return bad_input(
        wanted="a source that is a whole model",
        got=f"{place} with an adapter on frozen weights",
        do=f"merge it first: gossamer export {place} --to hf FOLDER, and name FOLDER",
        key="CHECKPOINT",
    )


def _files(origin: ModelSource | None, tokenizer: Tokenizer | None) -> Files:
    return files_beside(origin, tokenizer)


def _with_moments(source: GrowthSource, directory: RunDirectory, step: int) -> GrowthSource:
    """Return the source with the optimizer states of its checkpoint, where it is known how these follow gradients."""
    found = open_chosen(directory.checkpoints, step)
    names = [name for name in found.names() if name.startswith("optim/")]
    slots = {name.split("/")[1] for name in names}
    if not names:
        return _anew(source, "the checkpoint holds no optimizer states that all ranks share")
    if slots - _DEGREES.keys() or any(REPLICATED not in found.replicas(name) for name in names):
        return _anew(source, f"states {', '.join(sorted(slots))} of the source's optimizer cannot be grown")
    moments = {name.removeprefix("optim/"): found.read(name) for name in names}
    held = {name.partition("/")[2] for name in moments}
    if absent := [name for name, _ in source.module.named_parameters() if name not in held]:
        return _anew(source, f"the source's optimizer has no state of {absent[0]}, which was not trained")
    steps = int(found.meta.get("updates", step))
    degrees = {slot: _DEGREES[slot] for slot in slots}
    rule = str(found.meta.get("rule", ""))
    return replace(source, moments=moments, degrees=degrees, moment_steps=steps, moment_rule=rule)


def _anew(source: GrowthSource, why: str) -> GrowthSource:
    return replace(source, remarks=(*source.remarks, f"{why}: the optimizer starts anew"))


def _of_masks(start: StartFolder | None) -> tuple[str, ...]:
    if start is None or not StartFolder.is_at(start.path) or not start.kinds(MASKS):
        return ()
    return (f"the masks of {start.path} are of the source's sizes: they are left out, and its zeros may be trained",)


def _target(config: RunConfig, small: GrowthSource) -> nn.Module:
    """Return the model of the configuration, with random weights, without an adapter or a side network.

    Special token ids that the configuration leaves open are those of the source.
    """
    section = whole_section(config.model)
    if section.hf is not None and not Path(section.hf).expanduser().is_dir():  # a folder has a config of its own
        section = section.model_copy(update={"config": {**special_ids(small.module), **section.config}})
    origin = origin_of(section)
    if small.vocabulary is not None:
        origin = origin.fitted_to_tokenizer(small.vocabulary, small.separator)
    return origin.bare(config.train.seed).eval()


def whole_section(section: ModelSection) -> ModelSection:
    """Return the section of the model alone: all of it trained, from its own weights, nothing beside it."""
    plain: dict[str, Any] = {"adapter": "none", "side": "none", "base": "full", "freeze": [], "unfreeze": []}
    return section.model_copy(update={**plain, "start": None})


@torch.no_grad()
def _length(small: nn.Module, large: nn.Module, config: RunConfig) -> int:
    """Return the tokens of a sequence that both models take: a few, or as many as the run has.

    Raises BadInput for a model whose forward takes neither.
    """
    try:
        for module in (small, large):
            _logits(module, torch.zeros(1, _TOKENS, dtype=torch.long))
        return _TOKENS
    except BadInput:
        raise
    except Exception:  # whatever a forward of one length alone raises
        pass
    for module, which, key in ((small, "the source", "source"), (large, "the target", "--to")):
        try:
            _logits(module, torch.zeros(1, config.data.sequence, dtype=torch.long))
        except BadInput:
            raise
        except Exception as error:  # sizes in its config that do not fit each other, say
            raise bad_input(
                wanted=f"{which} to run on {config.data.sequence} tokens (data.sequence)",
                got=f"{type(error).__name__}: {error}",
                do="correct the sizes in its config, or set data.sequence to what it takes",
                key=key,
            ) from error
    return config.data.sequence


def _fits_wide(small: nn.Module, large: nn.Module) -> torch.dtype:
    """Return float64 where both models and what is between them fit memory in it, else float32."""
    numel = sum(p.numel() for module in (small, large) for p in module.parameters())
    return torch.float64 if 4 * 8 * numel < memory()[1] else torch.float32


@torch.no_grad()
def _proved(
    small: nn.Module,
    large: nn.Module,
    grown: Grown,
    method: Growth,
    *,
    wide: torch.dtype,
    shape: tuple[int, int],
    ids: int,
) -> dict[str, Any]:
    """Fill `large`, and return how far its logits are from those of `small`: in `wide`, and in the type it has.

    shape, ids: of the batch that proves, and how many token ids it is drawn from. Raises BadInput where a method that
    promises equal logits does not give them.
    """
    batch = torch.randint(0, ids, shape, generator=torch.Generator().manual_seed(0))
    first, second = copied(small).to(wide), copied(large).to(wide)
    _fill(second, grown.tensors)
    expected = _logits(first, batch)
    largest, difference = float(expected.abs().max()), float((_logits(second, batch) - expected).abs().max())
    del first, second
    _fill(large, grown.tensors)
    scale = max(1.0, largest)
    if (method.is_lossless or grown.is_lossless) and not difference <= _CLOSE[wide] * scale:
        raise bad_input(
            wanted=f"a target that computes what its source computes, to {_CLOSE[wide] * scale:.1g}",
            got=f"logits that differ by {difference:.3g} (of {scale:.3g})",
            do="something in its forward depends on its sizes: keep the number of blocks where norms are behind them, "
            "the number of heads where positions follow from it, and a width that is a multiple of the source's; or "
            "take a method that promises less (g_stack)",
            key="--to",
        )
    stored = _logits(copied(large), batch)
    return {
        "logit_difference": difference,
        "proved_in": str(wide).removeprefix("torch."),
        "logit_difference_as_stored": float((stored - expected.to(stored.dtype)).abs().max()),
        "largest_logit": largest,
    }


def _fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in start_state(module):
        tensor.copy_(tensors[name])


def _logits(module: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of a model in evaluation mode."""
    caller = caller_of(module)
    wide = next(module.parameters()).dtype is torch.float64
    with _in_float64() if wide else nullcontext():
        out = caller(module.eval(), {"input_ids": ids})
    return logits_of(out)


def _in_float64() -> InFloat64:
    return InFloat64()  # type: ignore[no-untyped-call]


def _digest(small: GrowthSource) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in small.tensors.items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _next(to: Path, out: Path, config: RunConfig, said: Mapping[str, Any]) -> str:
    """Return the command with which training goes on, with a warm-up of its own, and what is to rest meanwhile."""
    schedule = MethodConfig.parse(config.train.lr_schedule)
    warmup = min(max(_WARMUP_STEPS, round(0.02 * config.train.steps)), max(1, config.train.steps // 2))
    key = f" train.lr_schedule.{schedule.name}.warmup={warmup}"
    rest = [shlex.quote(f"model.{key}={json.dumps(said[key])}") for key in ("freeze", "unfreeze") if key in said]
    return " ".join([f"gossamer train {shlex.quote(str(to))} model.start={shlex.quote(str(out))}{key}", *rest])
