"""A trained model with its tokenizer, wherever it is: the result of a run, a Hugging Face folder, or a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from gossamer.data.tokenizer import Tokenizer, parse_tokenizer
from gossamer.job.trained_run import check_no_choice, read_chosen
from gossamer.model.origin import origin_of
from gossamer.model.source import ModelSource
from gossamer.run.checkpoint.choice import LATEST
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import bad_input
from gossamer.view.run_directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """What was found at a place. `positions`: tokens that it sees at most; `step`: of the run's checkpoint, None for
    another model.
    """

    module: nn.Module
    tokenizer: Tokenizer
    positions: int | None
    name: str
    step: int | None
    folders: tuple[Path, ...]  # where generation_config.json may be


def find_model(place: Path, checkpoint: str | int = LATEST) -> FoundModel:
    """Load the model at `place`. `checkpoint`: of a run. Raises BadInput, CheckpointMismatch."""
    origin = weights_at(place)
    if origin is None:
        return _of_run(place, checkpoint)
    check_no_choice(place, checkpoint)
    tokenizer = parse_tokenizer(f"hf:{place}").make(lambda: (), identity="", cache=place)
    return FoundModel(
        module=origin.build(0),
        tokenizer=tokenizer,
        positions=origin.positions(),
        name=str(place),
        step=None,
        folders=(place,) if place.is_dir() else (),
    )


def weights_at(place: Path) -> ModelSource | None:
    """Return the source of the model in a Hugging Face folder or GGUF file; None for anything else.

    Raises BadInput for a folder without weights.
    """
    is_file = place.is_file()
    if not is_file and not (place / "config.json").is_file():
        return None
    origin = origin_of(ModelSection(gguf=str(place)) if is_file else ModelSection(hf=str(place)))
    check_weights(origin, place)
    return origin


def check_weights(origin: ModelSource, place: Path) -> None:
    """Raise BadInput for a folder without weights, of which random ones would be built."""
    if not origin.has_weights:
        do = "give a folder with model.safetensors"
        raise bad_input(wanted=f"weights in {place}", got="a config.json without weights", do=do, key="model.hf")


def _of_run(place: Path, checkpoint: str | int) -> FoundModel:
    trained = read_chosen(place, checkpoint)
    tokenizer, config = trained.words(), trained.config
    known = trained.origin.positions() if trained.origin is not None else None
    base = Path(trained.base or config.model.hf or "")
    return FoundModel(
        module=trained.module,
        tokenizer=tokenizer,
        positions=known or config.data.sequence,
        name=str(place),
        step=trained.step,
        folders=(RunDirectory(place).model, base),
    )
