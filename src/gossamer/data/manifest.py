"""The manifest of a corpus: one hash over all its documents, and the rule that splits off the validation text."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gossamer.data.cache import read_json, write_json
from gossamer.data.source import Document, Source, written
from gossamer.spec.errors import BadInput, bad_input

SplitSide = Literal["train", "validation"]
SIDES: tuple[SplitSide, SplitSide] = ("train", "validation")

_READING = 2  # raise it when a source makes other documents of the same files
_SETTLED_S = 2.0  # a file younger than this may change again without changing its time stamp


@dataclass(frozen=True)
class CorpusManifest:
    """The size and hash of a corpus. `sha256` covers the path and text of every document in order.

    `lowest`, `highest`: extremes of `place` over its documents; `repeated`: documents left out, as they are equal to
    earlier ones, of which `first_repeated` is the first ("b.jsonl#7, equal to a.jsonl#2").
    """

    documents: int
    bytes: int
    sha256: str
    lowest: float
    highest: float
    licence: str
    repeated: int = 0
    first_repeated: str = ""

    def remark(self) -> str:
        """Return the remark for the user on what was left out; "" for none."""
        if not self.repeated:
            return ""
        count = "1 conversation repeats" if self.repeated == 1 else f"{self.repeated} conversations repeat"
        return f"{count} another and {'is' if self.repeated == 1 else 'are'} left out (first: {self.first_repeated})"


def distinct(source: Source) -> Iterator[tuple[Document, str]]:
    """Yield every document with "", or with the path of the earlier one that it is equal to.

    Text is not compared: its files may be equal. An equal conversation could be on both sides of the holdout.
    """
    if not source.whole:
        yield from ((document, "") for document in source.documents())
        return
    seen: dict[bytes, str] = {}
    for document in source.documents():
        earlier = seen.setdefault(hashlib.sha256(document.data).digest()[:16], document.path)
        yield document, "" if earlier == document.path else earlier


def place(path: str) -> float:
    """Return the position of a document in [0, 1): a hash of its path, so equal on every machine and at any time."""
    return int.from_bytes(hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()[:7], "big") / 2**56


def manifest(source: Source) -> CorpusManifest:
    """Read the complete source once and return its manifest. Raises BadInput when there is no text in it."""
    whole, documents, bytes_, lowest, highest = hashlib.sha256(), 0, 0, 1.0, 0.0
    repeats: list[str] = []
    for document, earlier in distinct(source):
        if earlier:
            repeats.append(f"{document.path}, equal to {earlier}")
            continue
        path, data = document.path.encode("utf-8", "surrogateescape"), document.data
        for part in (path, data):
            whole.update(len(part).to_bytes(8, "little"))
            whole.update(part)
        at = place(document.path)
        documents, bytes_, lowest, highest = documents + 1, bytes_ + len(data), min(lowest, at), max(highest, at)
    if not documents:
        files = [file for file, _, _ in source.stamp()]
        which = f" ({len(files)} file{'s' * (len(files) != 1)}, the first is {files[0]})" if files else ""
        said = f"the corpus is empty: {written(source)}{which} holds 0 bytes of text: name files with text"
        raise BadInput(said, key="data.source")
    first = repeats[0] if repeats else ""
    return CorpusManifest(documents, bytes_, whole.hexdigest(), lowest, highest, source.licence, len(repeats), first)


def cached_manifest(source: Source, *, cache: Path) -> CorpusManifest:
    """Return `manifest(source)`, read back from the cache while no file of the source has changed its size or time."""
    stamp = source.stamp()
    name = hashlib.sha256(json.dumps([_READING, repr(source), stamp]).encode()).hexdigest()
    file = cache / "manifests" / f"{name[:32]}.json"
    kept = read_json(file) if stamp else None
    if kept is not None and set(kept) == set(CorpusManifest.__dataclass_fields__):
        return CorpusManifest(**kept)
    found = manifest(source)
    settled = stamp and time.time() - max(modified_ns for *_, modified_ns in stamp) / 1e9 > _SETTLED_S
    if settled and source.stamp() == stamp:
        write_json(file, asdict(found))
    return found


@dataclass(frozen=True)
class Holdout:
    """The rule that splits off the validation text: `fraction` of the documents, by hash of their path (`by` = "hash").

    Where the hash puts no document on one of the sides (one document, or few), the last `fraction` of every document is
    held out instead (`by` = "tail"). That is contiguous text that training never sees. Conversations are never
    divided: of few, at least one is held out and one is trained on. `by` = "none": nothing is held out.
    """

    fraction: float
    by: Literal["hash", "tail", "none"]

    @staticmethod
    def of(found: CorpusManifest, fraction: float, *, whole: bool = False) -> Holdout:
        """Return the holdout rule for a corpus; `whole`: documents are not to be divided.

        Raises BadInput unless 0 <= fraction < 1, and for one document that is not to be divided.
        """
        if not 0 <= fraction < 1:
            raise bad_input(
                wanted="a fraction of the text >= 0 and < 1",
                got=f"{fraction}",
                do="write the fraction to hold out for validation, such as 0.05, or 0 for none",
                key="data.validation",
            )
        if fraction == 0:
            return Holdout(fraction, "none")
        if found.lowest < fraction <= found.highest:
            return Holdout(fraction, "hash")
        if not whole:
            return Holdout(fraction, "tail")
        if found.documents == 1:
            raise bad_input(
                wanted="2 or more conversations, to hold one out",
                got="1 conversation",
                do="set data.validation to 0, or give more conversations",
                key="data.validation",
            )
        return Holdout(math.nextafter(found.lowest, 1.0) if fraction <= found.lowest else found.highest, "hash")

    def documents(self, source: Source, side: SplitSide) -> Iterator[Document]:
        """Yield the conversations of one side, in order, each once."""
        for document, earlier in distinct(source):
            if not earlier and (self.by == "hash" and place(document.path) < self.fraction) == (side == "validation"):
                yield document

    def texts(self, source: Source, side: SplitSide) -> Iterator[str]:
        """Yield the texts of one side, in order; none is empty."""
        for document, earlier in distinct(source):
            if not earlier and (text := self._part(document, side)):
                yield text

    def _part(self, document: Document, side: SplitSide) -> str:
        text, held_out = document.text, side == "validation"
        if self.by == "tail":
            cut = len(text) - round(len(text) * self.fraction)
            return text[cut:] if held_out else text[:cut]
        return text if (self.by == "hash" and place(document.path) < self.fraction) == held_out else ""
