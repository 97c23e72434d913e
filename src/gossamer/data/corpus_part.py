"""One source of a corpus: read, split into two sides, and tokenized once into the cache."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gossamer.data.answer_spans import Rendered
from gossamer.data.cache import held, make_folder, read_json, write_json
from gossamer.data.conversation_remarks import remarks_on, remarks_on_pairs
from gossamer.data.manifest import SIDES, CorpusManifest, Holdout, SplitSide, cached_manifest
from gossamer.data.packing import Sequences, split_of
from gossamer.data.pair_sequences import pairs_of
from gossamer.data.rendering import Rendering
from gossamer.data.source import Source
from gossamer.data.stream import Stream, is_intact, read_stream, write_conversations, write_stream
from gossamer.data.tokenizer import Tokenizer
from gossamer.spec.errors import BadInput, bad_input

_FORMAT = 1  # raise it when the same input would be stored otherwise


@dataclass(frozen=True, slots=True)
class Cut:
    """How sequences are cut: `sequence` tokens each, documents packed or not, and isolated or not."""

    sequence: int
    pack: bool
    isolate: bool


@dataclass(frozen=True, slots=True)
class ReadSource:
    """A source that was read once: its manifest, and which documents are held out."""

    source: Source
    found: CorpusManifest
    holdout: Holdout

    @staticmethod
    def of(source: Source, validation: float, *, cache: Path) -> ReadSource:
        """Read a source, or its manifest from the cache. Raises BadInput."""
        source = source.fetched(cache)
        found = cached_manifest(source, cache=cache)
        return ReadSource(source, found, Holdout.of(found, validation, whole=source.whole))

    @property
    def identity(self) -> str:
        """Return a hash of the documents and of the holdout."""
        return hash_of(self.found.sha256, asdict(self.holdout))

    def texts(self) -> Iterator[str]:
        """Yield the training texts, for a tokenizer that is trained on them."""
        return self.holdout.texts(self.source, "train")

    def tokenized(self, tokenizer: Tokenizer, cut: Cut, *, cache: Path) -> CorpusPart:
        """Return the sequences of both sides; their tokens are in the cache, or are put there. Raises BadInput."""
        rendering = self.source.rendering(tokenizer)
        fingerprint = hash_of(
            _FORMAT, self.identity, tokenizer.fingerprint, *([rendering.identity] if rendering else [])
        )
        folder = cache / "corpora" / fingerprint[:32]
        reading = _Reading(self.source, self.found, self.holdout, tokenizer, rendering)
        known = _kept(folder) or _tokenized(reading, folder)
        streams = {side: read_stream(folder, side, known[side], separator=tokenizer.separator) for side in SIDES}
        fraction = self.holdout.fraction
        if rendering is None:
            _check_long_enough(streams, cut.sequence, pack=cut.pack, validation=fraction)
        splits = {
            side: _sequences(stream, rendering, cut, hash_of(fingerprint, side, cut.sequence, cut.pack, cut.isolate))
            for side, stream in streams.items()
        }
        remarks = [self.source.remark(), self.found.remark()]
        if rendering is not None:
            _check_conversations(splits, streams, validation=fraction)
            on = remarks_on if rendering.together == 1 else remarks_on_pairs
            remarks += on(known, streams, cut.sequence)
        return CorpusPart(splits, known, fingerprint, rendering, "; ".join(filter(None, remarks)))


@dataclass(frozen=True, slots=True)
class CorpusPart:
    """The sequences of one source. `known`: the manifest of its tokens; `remark`: on what was read, for the user."""

    splits: Mapping[SplitSide, Sequences]
    known: dict[str, Any]
    fingerprint: str
    rendering: Rendering | None
    remark: str


def hash_of(*parts: object) -> str:
    """Return the SHA-256 of JSON values, in hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sequences(stream: Stream, rendering: Rendering | None, cut: Cut, fingerprint: str) -> Sequences:
    if rendering is not None and rendering.together == 2:
        return pairs_of(stream, sequence=cut.sequence, fingerprint=fingerprint)
    return split_of(stream, sequence=cut.sequence, pack=cut.pack, isolate=cut.isolate, fingerprint=fingerprint)


def _kept(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a corpus in the cache, where all its files are complete."""
    known = read_json(folder / "manifest.json")
    if known is None or not all(is_intact(folder, side, known[side]) for side in SIDES):
        return None
    return known


@dataclass(frozen=True, slots=True)
class _Reading:
    """A source as its tokens are written: its manifest, the holdout, the tokenizer, and what renders conversations."""

    source: Source
    found: CorpusManifest
    holdout: Holdout
    tokenizer: Tokenizer
    rendering: Rendering | None

    def write(self, folder: Path, side: SplitSide) -> dict[str, Any]:
        """Write the tokens of one side; `read` in what it returns counts the bytes of its documents."""
        if self.rendering is None:
            known = write_stream(self.holdout.texts(self.source, side), self.tokenizer, folder=folder, side=side)
            return {**known, "read": known["bytes"]}
        read = 0

        def texts(rendering: Rendering) -> Iterator[Rendered]:
            nonlocal read
            for document in self.holdout.documents(self.source, side):
                read += len(document.data)
                yield from rendering.texts(document.messages, document.rejected, document.where)

        known = write_conversations(texts(self.rendering), self.tokenizer, folder=folder, side=side)
        return {**known, "read": read}


def _tokenized(reading: _Reading, folder: Path) -> dict[str, Any]:
    """Fill the cache; of several processes that ask at once, one does the work and the others find it done."""
    found, tokenizer = reading.found, reading.tokenizer

    def fill(beside: Path) -> None:
        known: dict[str, Any] = {
            "format": _FORMAT,
            "source": asdict(found),
            "holdout": asdict(reading.holdout),
            "tokenizer": {name: getattr(tokenizer, name) for name in ("fingerprint", "vocabulary", "separator")},
        }
        for side in SIDES:
            known[side] = reading.write(beside, side)
        told = sum(known[side]["read"] for side in SIDES)
        if told != found.bytes:
            raise BadInput(
                f"the corpus changed while it was read ({found.bytes} bytes at first, then {told} bytes): "
                "start again, and leave its files unchanged until the first step",
                key="data.source",
            )
        write_json(beside / "manifest.json", known)

    folder.parent.mkdir(parents=True, exist_ok=True)
    with held(folder.with_suffix(".lock")):
        if _kept(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)  # something cut it short: it can be made again
            make_folder(folder, fill)
    known = _kept(folder)
    assert known is not None, f"{folder} was just written"
    return known


def _check_long_enough(streams: dict[SplitSide, Stream], sequence: int, *, pack: bool, validation: float) -> None:
    for side in SIDES:
        stream = streams[side]
        wanted = sequence if pack else 2
        if stream.tokens.size >= wanted or (side == "validation" and validation == 0):
            continue
        do = "lower data.sequence or give more text"
        if side == "validation":
            do += ", or set data.validation higher (or to 0, for none)"
        raise bad_input(
            wanted=f"at least {wanted} tokens in the {side} text, one sequence",
            got=f"{stream.tokens.size} ({stream.bytes} bytes in {stream.starts.size} documents)",
            do=do,
            key="data.sequence",
        )


def _check_conversations(
    splits: Mapping[SplitSide, Sequences], streams: Mapping[SplitSide, Stream], *, validation: float
) -> None:
    """Raise BadInput where a side that is not left empty on purpose has no conversation to learn from."""
    for side in SIDES:
        if len(splits[side]) or (side == "validation" and validation == 0):
            continue
        raise bad_input(
            wanted=f"a conversation in the {side} data with an answer within {splits[side].sequence} tokens",
            got=f"{streams[side].starts.size} conversations, none with one",
            do="raise data.sequence, or give more conversations",
            key="data.sequence",
        )
