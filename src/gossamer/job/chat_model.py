"""The model to speak with: the result of a run, a Hugging Face folder, or a GGUF file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gossamer.data.answer_end import answer_end
from gossamer.data.chat_template import ChatTemplate
from gossamer.data.rendering import template_in
from gossamer.job.found_model import FoundModel, find_model
from gossamer.model.chat import Chat
from gossamer.model.generate import TokenChoice
from gossamer.model.token_logits import token_logits
from gossamer.run.checkpoint.choice import LATEST
from gossamer.spec.errors import BadInput, bad_input

_GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """How answers are generated. `template`: a file with a chat template; None: the tokenizer's own."""

    choice: TokenChoice
    max_new_tokens: int
    seed: int
    system: str = ""
    template: Path | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            got = str(self.max_new_tokens)
            raise bad_input(wanted="at least 1 new token", got=got, do="set it to 1 or more", key="max_new_tokens")


def open_chat(place: Path, settings: ChatSettings, checkpoint: str | int = LATEST) -> Chat:
    """Load the model at `place` and begin a dialogue: a run directory, a Hugging Face folder, or a GGUF file.

    `checkpoint`: of a run. Raises BadInput, also where there is no chat template; CheckpointMismatch.
    """
    found = find_model(place.expanduser(), checkpoint)
    template = _template(found, place, settings.template)
    chat = Chat(
        logits=token_logits(found.module.eval()),
        tokenizer=found.tokenizer,
        template=template,
        end=answer_end(template, found.tokenizer, _eos_ids(found)),
        window=found.positions or _SEEN,
        choice=settings.choice,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        name=f"{found.name} ({type(found.module).__name__}, {_millions(found.module)})",
        step=found.step,
    )
    if settings.system:
        chat.system(settings.system)
    return chat


def _millions(module: nn.Module) -> str:
    return f"{sum(one.numel() for one in module.parameters()) / 1e6:.1f}M parameters"


_SEEN = 2048  # tokens that a model without known limit sees


def _template(found: FoundModel, place: Path, file: Path | None) -> ChatTemplate:
    """Return the template in `file`, else the tokenizer's own."""
    if file is not None:
        try:
            return template_in(str(file), found.tokenizer)
        except BadInput as error:
            raise BadInput(error.message, key="--template") from None
    if found.tokenizer.template is not None:
        return found.tokenizer.template
    others = f", or let it continue a text: gossamer sample {place} PROMPT" if found.step is not None else ""
    raise bad_input(
        wanted=f"a chat template with the tokenizer of {place}",
        got="none: the model was not trained on chats, or its template is not beside it",
        do=f"give a file with one, --template FILE{others}",
        key="chat",
    )


def _eos_ids(found: FoundModel) -> list[int]:
    """Return the ids at which the model's own settings say that generation ends."""
    told: list[Any] = [getattr(getattr(found.module, "generation_config", None), "eos_token_id", None)]
    for folder in found.folders:
        try:
            told.append(json.loads((folder / _GENERATION).read_bytes()).get("eos_token_id"))
        except (OSError, ValueError, AttributeError):  # there is none, or none that says it
            continue
    ids = [one for given in told for one in (given if isinstance(given, list) else [given])]
    return [one for one in ids if isinstance(one, int)]
