"""Preference pairs: one prompt with a better and a worse answer per JSON line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gossamer.data.preference import pair_of
from gossamer.data.rendering import PairRendering, Rendering, template_in
from gossamer.data.source import Document, Source
from gossamer.data.source._files import find, lines, remark, stamps
from gossamer.data.source.jsonl import record_of
from gossamer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Pairs(Source):
    """The source of preference pairs: one per line of the JSON lines that match `files`, which may be gzipped.

    A line is {prompt, chosen, rejected}, each a text or messages. `template`: as of chats. The two answers of a pair
    are neighboring sequences of a batch, never packed; they need train.loss dpo.
    """

    whole: ClassVar[bool] = True

    files: str
    template: str | None = None

    @property
    def paired(self) -> bool:
        return True

    def documents(self) -> Iterator[Document]:
        for name, file in find(self.files):
            yield from _pairs(name, file)

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        return stamps(find(self.files))

    def remark(self) -> str:
        return remark(self.files)

    def rendering(self, tokenizer: Tokenizer) -> Rendering:
        return PairRendering(template_in(self.template, tokenizer), tokenizer.special)


def _pairs(name: str, file: Path) -> Iterator[Document]:
    for number, line in lines(file):
        where = f"{file}:{number}"
        pair = pair_of(record_of(line, where), where)
        text = "\n".join([*(one.content for one in pair.chosen), pair.rejected[-1].content])
        yield Document(f"{name}#{number}", text, pair.chosen, where, pair.rejected)
