"""The parts of a rendered conversation that are learnt: its answers, each with the end of its turn.

Where an answer lies in the text that a chat template makes is found by rendering prefixes of the conversation, which
needs no mark in the template. With r(k) the rendering of the first k messages and g(k) the same followed by the start
of an answer (add_generation_prompt), the answer of message k is what r(k + 1) has after g(k). That holds for templates
that add a system prompt or strip texts. It needs g(k) to be a prefix of r(k + 1), and r(k + 1) one of the complete
text; a template for which it is none (one that drops the thoughts of earlier answers) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gossamer.data.chat_template import ChatTemplate
from gossamer.data.conversation import KEY, Message, written_messages
from gossamer.spec.errors import BadInput, bad_input

Learn = Literal["answers", "all"]


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """The place of an answer in a rendered text, in letters: [start, end) is learnt.

    [start, text_end) is the answer's own text, and the rest the end of its turn: it stands for no bytes of text.
    """

    start: int
    text_end: int
    end: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the text that a model reads, and the spans of it that are learnt, in order."""

    text: str
    spans: tuple[AnswerSpan, ...]


def rendered(messages: Sequence[Message], template: ChatTemplate, learn: Learn, where: str) -> Rendered:
    """Render a conversation and find its answers; `where` is named in errors.

    Raises BadInput where the template refuses the conversation, or renders a prefix of it otherwise than the whole.
    """
    written = written_messages(messages)
    text = _render(template, written, where, starts_answer=False)
    if learn == "all":
        return Rendered(text, (AnswerSpan(0, len(text), len(text)),))
    return Rendered(text, tuple(_answers(messages, template, text, where)))


def _answers(messages: Sequence[Message], template: ChatTemplate, text: str, where: str) -> Iterator[AnswerSpan]:
    written = written_messages(messages)
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = _render(template, written[:number], where, starts_answer=True)
        through = text
        if number + 1 < len(messages):
            through = _render(template, written[: number + 1], where, starts_answer=False)
        if not (text.startswith(through) and through.startswith(before)):
            raise _no_prefix(before, through, text, f"message {number + 1} at {where}")
        if len(before) == len(through):
            raise bad_input(
                wanted=f"a template that renders message {number + 1} at {where}",
                got="no letter of it",
                do="give another template: data.source {chat: {files: ..., template: FILE}}",
                key=KEY,
            )
        yield _span(len(before), through, message.content)


def _span(start: int, through: str, content: str) -> AnswerSpan:
    """Return the span of the answer that `through` ends with, from `start` on.

    White space behind the end-of-turn mark is not learnt: no model that has made the mark goes on to write it. Where
    the turn has no mark, or the template rewrites the text, all is learnt.
    """
    own, text = content.strip(), through[start:]
    first = start + len(text) - len(text.lstrip())
    found = first if through.startswith(own, first) else through.rfind(own, start)  # the mark may spell it once more
    if found < 0:
        return AnswerSpan(start, len(through), len(through))
    text_end = found + len(own)
    text_end += _common_prefix(through[text_end:], content[len(content.rstrip()) :])
    closing = through[text_end:].rstrip()
    return AnswerSpan(start, text_end, text_end + len(closing) if closing else len(through))


def _common_prefix(one: str, other: str) -> int:
    """Return how many letters the two texts have in common from their start."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _no_prefix(before: str, through: str, text: str, where: str) -> BadInput:
    """Return the error about a template whose rendering of a prefix is no prefix; it shows where the two part."""
    whole, part = (through, before) if not through.startswith(before) else (text, through)
    at = _common_prefix(whole, part)
    return bad_input(
        wanted="a chat template that renders the start of a conversation as it renders it within the whole, "
        f"to find the answer of {where}",
        got=f"{part[at : at + 40]!r} alone and {whole[at : at + 40]!r} within the whole, at letter {at}",
        do="give a template without that difference: data.source {chat: {files: ..., template: FILE}}, or learn: all",
        key=KEY,
    )


def _render(template: ChatTemplate, written: list[dict[str, str]], where: str, *, starts_answer: bool) -> str:
    try:
        return template.render(written, add_generation_prompt=starts_answer)
    except BadInput as error:
        raise BadInput(f"{error.message} (conversation at {where})", key=error.key or KEY) from None
