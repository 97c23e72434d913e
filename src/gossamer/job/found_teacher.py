"""A teacher at its place: the folder of a run or of a Hugging Face model, or a GGUF file, with its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from gossamer.data.tokenizer import Tokenizer, parse_tokenizer
from gossamer.job.found_model import weights_at
from gossamer.job.trained_run import read_chosen
from gossamer.loss.distillation.teacher_address import address_of
from gossamer.spec.errors import BadInput, bad_input

_KEY = "train.loss"
_TOKENIZER_FILES = ("token*", "vocab*", "spiece*", "sentencepiece*", "merges*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTeacher:
    """A teacher at its place. `positions`: tokens that it sees at most; `tokenizer`: None where it has none, for the
    reason `without`.
    """

    module: nn.Module
    tokenizer: Tokenizer | None
    positions: int | None
    without: str = "it has no tokenizer"


def refuse_elsewhere(written: str, *, key: str = _KEY) -> None:
    """Raise BadInput for a teacher on another host, where the model itself is needed."""
    if address_of(written, key=key) is not None:
        raise bad_input(
            wanted="the folder of a run or of a Hugging Face model, or a GGUF file, as the model itself is needed here",
            got=written,
            do=f"give its folder, or train with `gossamer train` and train.loss: {{kl: {{teacher: {written}}}}}",
            key=key,
        )


def place_of(written: str, *, key: str = _KEY) -> Path:
    """Return where a teacher's folder or file is. Raises BadInput, with `key`, for none and one on another host."""
    refuse_elsewhere(written, key=key)
    place = Path(written).expanduser()
    if not written.strip() or not place.exists():
        raise bad_input(
            wanted="the folder of a run or of a Hugging Face model, or a GGUF file, as the teacher",
            got=f"{written!r}, which does not exist" if written.strip() else "none",
            do="name one that is there",
            key=key,
        )
    return place


def with_tokenizer(found: FoundTeacher, place: Path, *, key: str = _KEY) -> FoundTeacher:
    """Return a teacher from a Hugging Face folder or a GGUF file with its tokenizer, where it has one.

    Raises BadInput for one that is there and cannot be read.
    """
    if place.is_dir() and not any(next(place.glob(one), None) for one in _TOKENIZER_FILES):
        return replace(found, without=f"{place} has no tokenizer")
    try:
        return replace(found, tokenizer=parse_tokenizer(f"hf:{place}").make(lambda: (), identity="", cache=place))
    except BadInput as error:
        if place.is_dir():
            raise BadInput(f"the teacher's tokenizer cannot be read: {error.message}", key=key) from None
        return replace(found, without=error.message)  # a GGUF file may hold one that only its own programs read


def find_teacher(written: str, *, key: str = _KEY) -> FoundTeacher:
    """Load a teacher from the folder of a run or of a Hugging Face model, or from a GGUF file.

    key: what names it. Raises BadInput.
    """
    place = place_of(written, key=key)
    origin = weights_at(place)
    if origin is not None:
        found = FoundTeacher(module=origin.build(0), tokenizer=None, positions=origin.positions())
        return with_tokenizer(found, place, key=key)
    run = read_chosen(place, "latest")
    known = run.origin.positions() if run.origin is not None else None
    return FoundTeacher(module=run.module, tokenizer=run.tokenizer, positions=known)
