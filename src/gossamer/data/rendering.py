"""The rendering of conversations: a chat template, and which part of what it makes is learnt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

from gossamer.data.answer_spans import Learn, Rendered, rendered
from gossamer.data.chat_template import ChatTemplate
from gossamer.data.conversation import KEY, Conversation
from gossamer.data.tokenizer import Tokenizer
from gossamer.spec.errors import BadInput, bad_input

_TODAY = "strftime_now"


class Rendering(ABC):
    """What makes texts of the conversations of a source."""

    template: ChatTemplate
    together: int  # texts that one document gives, which stay side by side

    @abstractmethod
    def texts(self, messages: Conversation, rejected: Conversation, where: str) -> tuple[Rendered, ...]:
        """Return the texts of a document, with the spans of each that are learnt.

        Raises BadInput naming `where`, also for a message that spells a special token: read as that token, it would
        end its own turn.
        """

    @property
    @abstractmethod
    def identity(self) -> str:
        """Return a text that is equal for renderings that make equal texts of equal conversations."""


@dataclass(frozen=True, slots=True)
class ChatRendering(Rendering):
    """The rendering of conversations by one template.

    `learn`: the answers, or all of the text; `special`: the texts of the tokenizer's special tokens.
    """

    template: ChatTemplate
    learn: Learn
    special: tuple[str, ...]
    together: int = 1

    def texts(self, messages: Conversation, rejected: Conversation, where: str) -> tuple[Rendered, ...]:
        _check_special(messages, self.special, where)
        return (rendered(messages, self.template, self.learn, where),)

    @property
    def identity(self) -> str:
        return f"{self.template!r} {self.learn}"


@dataclass(frozen=True, slots=True)
class PairRendering(Rendering):
    """The rendering of preference pairs by one template: the chosen conversation, then the rejected one.

    The last answer of each counts.
    """

    template: ChatTemplate
    special: tuple[str, ...]
    together: int = 2

    def texts(self, messages: Conversation, rejected: Conversation, where: str) -> tuple[Rendered, ...]:
        chosen, other = (self._last_answer(one, where) for one in (messages, rejected))
        if chosen.text == other.text:
            raise bad_input(
                wanted=f"two different answers at {where}",
                got="two of which the chat template makes the same text",
                do="remove the line",
                key=KEY,
            )
        return chosen, other

    @property
    def identity(self) -> str:
        return f"{self.template!r} pairs"

    def _last_answer(self, messages: Conversation, where: str) -> Rendered:
        _check_special(messages, self.special, where)
        found = rendered(messages, self.template, "answers", where)
        return Rendered(found.text, found.spans[-1:])


def _check_special(messages: Conversation, special: tuple[str, ...], where: str) -> None:
    for number, message in enumerate(messages, start=1):
        if (found := next((mark for mark in special if mark in message.content), None)) is not None:
            raise bad_input(
                wanted=f"text without special tokens in message {number} (role {message.role}) at {where}",
                got=f"{found!r}, which the tokenizer reads as a mark of its own",
                do="write it otherwise, or remove the line",
                key=KEY,
            )


def template_in(file: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template in `file`, or the tokenizer's own where no file is named.

    Raises BadInput where there is neither, for a file that cannot be read, and for a template that asks for today's
    date: it would make another text tomorrow.
    """
    found = tokenizer.template if file is None else _read(Path(file).expanduser(), tokenizer)
    if found is None:
        raise bad_input(
            wanted="a chat template, which makes the text of a conversation",
            got="a tokenizer without one",
            do="use the tokenizer of a chat model (data.tokenizer hf:FOLDER, or a GGUF file), or name a file with a "
            "template: data.source {chat: {files: ..., template: FILE}}",
            key=KEY,
        )
    if _TODAY in found.source:
        raise bad_input(
            wanted="a chat template that makes the same text on any day",
            got=f"one that asks for the date ({_TODAY})",
            do="copy the template, write a date in place of the call, and name that file: "
            "data.source {chat: {files: ..., template: FILE}}",
            key=KEY,
        )
    return found


def _read(file: Path, tokenizer: Tokenizer) -> ChatTemplate:
    try:
        source = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"cannot read the chat template {file} ({said}): give a jinja file", key=KEY) from None
    own = tokenizer.template or ChatTemplate(source, eos_token=tokenizer.special[0])
    return replace(own, source=source, origin=str(file))
