"""Text files: one document per file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gossamer.data.source import Document, Source
from gossamer.data.source._files import find, read_text, remark, stamps


@dataclass(frozen=True)
class Text(Source):
    """The source of every UTF-8 file that matches `files`, e.g. "corpus/**/*.txt".

    A document is named by its path below the part of the pattern without wildcards.
    """

    files: str

    def documents(self) -> Iterator[Document]:
        for name, file in find(self.files):
            if text := read_text(file):
                yield Document(name, text)

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        return stamps(find(self.files))

    def remark(self) -> str:
        return remark(self.files)
