"""Sources of text: each an ordered stream of documents with stable names; one source per file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from gossamer.data._written import parse_written
from gossamer.data.conversation import Conversation, as_data
from gossamer.data.rendering import Rendering
from gossamer.data.tokenizer import Tokenizer
from gossamer.spec.method_config import Written
from gossamer.spec.registry import Registry


@dataclass(frozen=True, slots=True)
class Document:
    """A document of text. `path` names it within its source, equal on every machine; split and order depend on it."""

    path: str
    text: str
    messages: Conversation = ()  # of a conversation; `text` is then all that is said in it
    where: str = ""  # "file:line" for errors, where that is known
    rejected: Conversation = ()  # of a preference pair: `messages` with the worse answer

    @property
    def data(self) -> bytes:
        """The text as UTF-8: bits per byte counts these bytes. Of a conversation: who says what, as JSON."""
        if not self.messages:
            return self.text.encode("utf-8")
        return as_data(self.messages) + (as_data(self.rejected) if self.rejected else b"")


class Source(ABC):
    """A corpus of documents. A source is a frozen dataclass; nothing is read before `documents` is iterated."""

    licence: ClassVar[str] = "that of the files given: yours to know"
    whole: ClassVar[bool] = False  # whether documents are never divided, and equal ones count once (conversations)

    @property
    def paired(self) -> bool:
        """Whether documents are preference pairs, whose batches have other keys than those of texts."""
        return False

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Yield every document that is not empty, always in the same order, under unique paths.

        Raises BadInput for a source that does not exist and for unreadable text, naming the file (and line or row).
        Text stays untouched: no newline translation, no normalization.
        """

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        """Return (file, bytes, modified_ns) of all files read: equal stamps mean equal documents. Empty: not known."""
        return ()

    def remark(self) -> str:
        """Return a remark for the user on the files that are read; "" for none."""
        return ""

    def fetched(self, cache: Path) -> Source:
        """Return the source of the same documents on this machine; what comes over a network is kept in `cache`.

        Raises BadInput where it does not come.
        """
        return self

    def parts(self) -> dict[str, Part]:
        """Return the sources to draw from, by name: this one alone, or those of a mixture."""
        return {"": Part(self, 1.0)}

    def rendering(self, tokenizer: Tokenizer) -> Rendering | None:
        """Return what makes text of the conversations in this source; None where its documents are text.

        Raises BadInput where that cannot be made with this tokenizer.
        """
        return None


@dataclass(frozen=True, slots=True)
class Part:
    """A source of a mixture, with its weight."""

    source: Source
    weight: float


def written(source: Source) -> str:
    """Return a source as configurations write it: "text:corpus/*.txt"; fields after the first are left out."""
    name = type(source).__module__.rpartition(".")[2]
    first = next((str(getattr(source, one.name)) for one in fields(source)), "")  # type: ignore[arg-type]
    return f"{name}:{first}" if first else name


REGISTRY = Registry(__name__, Source)  # type: ignore[type-abstract]
names, build = REGISTRY.names, REGISTRY.build


def parse_source(written: Written, key: str = "data.source") -> Source:
    """Parse the source of text in a configuration; raises BadInput.

    It is `stdlib`, `sotu`, `text:GLOB`, `jsonl:GLOB`, `parquet:GLOB`, `hf:DIR`, `chat:GLOB`,
    `pairs:GLOB`, `hub:NAME`, or
    {jsonl: {files: GLOB, field: body}}, or {mixture: {sources: {NAME: SOURCE}, weights: {NAME: 2}}}.
    """
    return parse_written(REGISTRY, written, key=key)
