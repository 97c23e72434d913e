"""Chats: one conversation per JSON line, in the dialects of `conversation`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gossamer.data.answer_spans import Learn
from gossamer.data.conversation import conversation_of
from gossamer.data.rendering import ChatRendering, Rendering, template_in
from gossamer.data.source import Document, Source
from gossamer.data.source._files import find, lines, remark, stamps
from gossamer.data.source.jsonl import record_of
from gossamer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Chat(Source):
    """The source of conversations: one per line of the JSON lines that match `files`, which may be gzipped.

    A line is {messages: [{role, content}]}, {conversations: [{from, value}]} or {instruction, input, output}. A chat
    template makes the text that a model reads: `template` is a file with one, null the tokenizer's own. `learn`:
    answers, each with the end of its turn; or all of the text. The conversation "a.jsonl#3" is the third line.
    """

    whole: ClassVar[bool] = True

    files: str
    learn: Learn = "answers"
    template: str | None = None

    def documents(self) -> Iterator[Document]:
        for name, file in find(self.files):
            yield from _conversations(name, file)

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        return stamps(find(self.files))

    def remark(self) -> str:
        return remark(self.files)

    def rendering(self, tokenizer: Tokenizer) -> Rendering:
        return ChatRendering(template_in(self.template, tokenizer), self.learn, tokenizer.special)


def _conversations(name: str, file: Path) -> Iterator[Document]:
    for number, line in lines(file):
        where = f"{file}:{number}"
        messages = conversation_of(record_of(line, where), where)
        yield Document(f"{name}#{number}", "\n".join(one.content for one in messages), messages, where)
