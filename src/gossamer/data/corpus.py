"""A corpus ready to train on: tokenized once into the cache, split into training and validation, cut into sequences."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.data.answer_spans import Rendered
from gossamer.data.cache import held, make_folder, open_cache, read_json, write_json
from gossamer.data.conversation_remarks import remarks_on
from gossamer.data.manifest import SIDES, CorpusManifest, Holdout, SplitSide, cached_manifest
from gossamer.data.packing import Split, split_of
from gossamer.data.rendering import Rendering
from gossamer.data.source import Source, parse_source
from gossamer.data.stream import Stream, is_intact, read_stream, write_conversations, write_stream
from gossamer.data.tokenizer import Tokenizer, parse_tokenizer
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Written

_FORMAT = 1  # raise it when the same input would be stored otherwise


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus with its two splits. `manifest` holds all that determines the tokens.

    `fingerprint` is a hash of the text, the holdout and the tokenizer: machines with the same corpus compute the same
    one.
    """

    train: Split
    validation: Split
    tokenizer: Tokenizer
    manifest: dict[str, Any]
    fingerprint: str
    remark: str = ""  # on what was read, for the user
    files: tuple[tuple[str, int, int], ...] = ()  # (path, bytes, modified_ns) of those read; empty: not known

    def text(self, side: SplitSide, *, limit_bytes: int = 1 << 24) -> bytes:
        """Return the first `limit_bytes` of text of one side, decoded from its tokens, documents joined without
        separator.
        """
        stream = {"train": self.train, "validation": self.validation}[side].stream
        some = stream.lengths[: 2 * limit_bytes]  # separators stand for no byte, hence the factor
        kept = int(np.searchsorted(np.cumsum(some, dtype=np.int64), limit_bytes, side="right"))
        return self.tokenizer.decode(stream.tokens[:kept]).encode("utf-8")


def open_corpus(
    *,
    source: Written = "stdlib",
    tokenizer: Written = "byte",
    sequence: int = 256,
    pack: bool = True,
    isolate: bool = False,
    validation: float = 0.05,
    cache: str | Path | None = None,
) -> Corpus:
    """Read the source, tokenize it (or find its tokens in the cache), and cut sequences, the same in every process.

    `sequence` counts tokens; `validation` is the fraction held out; `cache` defaults to the user's cache folder.
    Raises BadInput for what is wrong with any of them, and when a side is shorter than one sequence.
    """
    if sequence < 2:
        raise bad_input(wanted="at least 2 tokens", got=str(sequence), do="set 2 or more", key="data.sequence")
    text, recipe = parse_source(source), parse_tokenizer(tokenizer)
    where = open_cache(cache)
    found = cached_manifest(text, cache=where)
    holdout = Holdout.of(found, validation, whole=text.whole)
    words = recipe.make(
        lambda: holdout.texts(text, "train"), identity=_hash(found.sha256, asdict(holdout)), cache=where
    )
    reading = _Reading(text, found, holdout, words, text.rendering(words))
    settings = {"source": source, "tokenizer": tokenizer, "sequence": sequence, "pack": pack, "isolate": isolate}
    return _corpus(reading, where, settings)


def open_validation(
    name: str, source: Written, like: Corpus, *, pack: bool, isolate: bool, cache: str | Path | None = None
) -> Split:
    """Read a validation set of its own source, with the tokenizer and the sequence length of the corpus `like`.

    All of its text is in the sequences that are returned. Raises BadInput, with the key data.validation.`name`, for
    what is wrong with the source, and when it is shorter than one sequence.
    """
    key = f"data.validation.{name}"
    try:
        text = parse_source(source, key=key)
        where = open_cache(cache)
        found = cached_manifest(text, cache=where)
        reading = _Reading(text, found, Holdout.of(found, 0.0), like.tokenizer, text.rendering(like.tokenizer))
        settings = {"source": source, "sequence": like.train.sequence, "pack": pack, "isolate": isolate}
        return _corpus(reading, where, settings).train
    except BadInput as error:
        if error.key.startswith(key):
            raise
        raise BadInput(f"validation set {name}: {error.message}", key=key) from error


def _corpus(reading: _Reading, where: Path, settings: dict[str, Any]) -> Corpus:
    """Return the corpus of what is read, from the cache in `where` or written there, cut as `settings` say."""
    text, found, holdout, words, rendering = (
        reading.source,
        reading.found,
        reading.holdout,
        reading.tokenizer,
        reading.rendering,
    )
    sequence, pack, isolate = settings["sequence"], settings["pack"], settings["isolate"]
    identity = _hash(found.sha256, asdict(holdout))
    fingerprint = _hash(_FORMAT, identity, words.fingerprint, *([rendering.identity] if rendering else []))
    folder = where / "corpora" / fingerprint[:32]
    known = _kept(folder) or _tokenized(reading, folder)
    streams = {side: read_stream(folder, side, known[side], separator=words.separator) for side in SIDES}
    if rendering is None:
        _check_long_enough(streams, sequence, pack=pack, validation=holdout.fraction)
    splits = {
        side: split_of(
            streams[side],
            sequence=sequence,
            pack=pack,
            isolate=isolate,
            fingerprint=_hash(fingerprint, side, sequence, pack, isolate),
        )
        for side in SIDES
    }
    if rendering is not None:
        _check_conversations(splits, streams, validation=holdout.fraction)
    manifest = {**known, "settings": settings}
    remarks = (text.remark(), found.remark(), *([] if rendering is None else remarks_on(known, streams, sequence)))
    said = "; ".join(filter(None, remarks))
    return Corpus(splits["train"], splits["validation"], words, manifest, fingerprint, said, text.stamp())


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


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
                yield rendering(document.messages, document.where)

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
    splits: Mapping[SplitSide, Split], streams: Mapping[SplitSide, Stream], *, validation: float
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
