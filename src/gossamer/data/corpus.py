"""A corpus ready to train on: tokenized once into the cache, split into training and validation, cut into sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.data.cache import open_cache
from gossamer.data.chat_template import ChatTemplate
from gossamer.data.corpus_part import CorpusPart, Cut, ReadSource, hash_of
from gossamer.data.manifest import SIDES, SplitSide
from gossamer.data.mixed_sequences import MixedSequences
from gossamer.data.packing import Sequences, Split
from gossamer.data.source import Source, parse_source
from gossamer.data.tokenizer import Tokenizer, parse_tokenizer
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Written


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus with its two splits. `manifest` holds all that determines the tokens.

    `fingerprint` is a hash of the text, the holdout and the tokenizer: machines with the same corpus compute the same
    one.
    """

    train: Sequences
    validation: Sequences
    tokenizer: Tokenizer
    manifest: dict[str, Any]
    fingerprint: str
    remark: str = ""  # on what was read, for the user
    files: tuple[tuple[str, int, int], ...] = ()  # (path, bytes, modified_ns) of those read; empty: not known

    def text(self, side: SplitSide, *, limit_bytes: int = 1 << 24) -> bytes:
        """Return the first `limit_bytes` of text of one side, decoded from its tokens, documents joined without
        separator.
        """
        found = b""
        for stream in {"train": self.train, "validation": self.validation}[side].streams():
            left = limit_bytes - len(found)
            some = stream.lengths[: 2 * left]  # separators stand for no byte, hence the factor
            kept = int(np.searchsorted(np.cumsum(some, dtype=np.int64), left, side="right"))
            found += self.tokenizer.decode(stream.tokens[:kept]).encode("utf-8")
        return found


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
    where, cut = open_cache(cache), Cut(sequence, pack, isolate)
    read = {name: ReadSource.of(part.source, validation, cache=where) for name, part in text.parts().items()}
    identities = [[name, one.identity] for name, one in read.items()]
    identity = read[""].identity if "" in read else hash_of(identities)
    words = recipe.make(lambda: chain(*(one.texts() for one in read.values())), identity=identity, cache=where)
    settings = {"source": source, "tokenizer": tokenizer, "sequence": sequence, "pack": pack, "isolate": isolate}
    return _tokenized(text, read, words, cut, settings, cache=where)


def open_validation(
    name: str, source: Written, like: Corpus, *, pack: bool, isolate: bool, cache: str | Path | None = None
) -> Corpus:
    """Read a validation set of its own source, with the tokenizer and the sequence length of the corpus `like`.

    All of its text is in the training side of the corpus that is returned. Raises BadInput, with the key
    data.validation.`name`, for what is wrong with the source, and when it is shorter than one sequence.
    """
    key = f"data.validation.{name}"
    try:
        text, where = parse_source(source, key=key), open_cache(cache)
        read = {each: ReadSource.of(part.source, 0.0, cache=where) for each, part in text.parts().items()}
        cut = Cut(like.train.sequence, pack, isolate)
        settings = {"source": source, "sequence": cut.sequence, "pack": pack, "isolate": isolate}
        return _tokenized(text, read, like.tokenizer, cut, settings, cache=where)
    except BadInput as error:
        if error.key.startswith(key):
            raise
        raise BadInput(f"validation set {name}: {error.message}", key=key) from error


def _tokenized(
    text: Source, read: Mapping[str, ReadSource], words: Tokenizer, cut: Cut, settings: dict[str, Any], *, cache: Path
) -> Corpus:
    """Return the corpus of a source whose parts were `read`, its tokens from the cache or put there."""
    parts = {name: one.tokenized(words, cut, cache=cache) for name, one in read.items()}
    said = "; ".join(f"{name}: {part.remark}".removeprefix(": ") for name, part in parts.items() if part.remark)
    files = tuple(file for one in read.values() for file in one.source.stamp())
    template = _template_of(parts)
    if template is not None:  # the template in use, perhaps another than the tokenizer's own
        words = words.with_template(template)
    if "" in parts:
        (part,) = parts.values()
        manifest = {**part.known, "settings": settings}
        sides: dict[SplitSide, Sequences] = {**part.splits}
        fingerprint = part.fingerprint
    else:
        weights = {name: one.weight for name, one in text.parts().items()}
        fingerprint = hash_of("mixture", [[name, part.fingerprint, weights[name]] for name, part in parts.items()])
        manifest = {"parts": {name: part.known for name, part in parts.items()}, "settings": settings}
        sides = {side: _mixed(parts, weights, side, cut, fingerprint) for side in SIDES}
    return Corpus(sides["train"], sides["validation"], words, manifest, fingerprint, said, files)


def _mixed(
    parts: Mapping[str, CorpusPart], weights: Mapping[str, float], side: SplitSide, cut: Cut, fingerprint: str
) -> MixedSequences:
    """Return one side of a mixture."""
    return MixedSequences(
        names=tuple(parts),
        splits=tuple(_split(part.splits[side]) for part in parts.values()),
        weights=tuple(weights[name] for name in parts),
        sequence=cut.sequence,
        fingerprint=hash_of(fingerprint, side, cut.sequence, cut.pack, cut.isolate),
    )


def _split(side: Sequences) -> Split:
    assert isinstance(side, Split), "no mixture has preference pairs"
    return side


def _template_of(parts: Mapping[str, CorpusPart]) -> ChatTemplate | None:
    """Return the chat template of the conversations; None without any. Raises BadInput for two different ones."""
    found = {name: part.rendering.template for name, part in parts.items() if part.rendering is not None}
    different = [name for name, one in found.items() if one != next(iter(found.values()))]
    if different:
        raise bad_input(
            wanted="one chat template for all conversations, as the model is asked in one form later",
            got=f"{next(iter(found))} and {different[0]} with different ones",
            do="name the same file as template of both",
            key="data.source",
        )
    return next(iter(found.values()), None)
