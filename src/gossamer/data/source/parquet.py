"""Parquet files: one document per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gossamer.data.source import Document, Source
from gossamer.data.source._arrow import parquet_texts
from gossamer.data.source._files import find, remark, stamps


@dataclass(frozen=True)
class Parquet(Source):
    """The source of Parquet files: `column` of every row of the files that match. Needs pyarrow.

    The document "a.parquet#3" is row 3, from 0.
    """

    files: str
    column: str = "text"

    def documents(self) -> Iterator[Document]:
        for name, file in find(self.files):
            for row, text in parquet_texts(file, self.column):
                yield Document(f"{name}#{row}", text)

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        return stamps(find(self.files))

    def remark(self) -> str:
        return remark(self.files)
