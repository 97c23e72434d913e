"""A byte-level BPE trained on the corpus itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.data.cache import held, write_file
from gossamer.data.tokenizer import Tokenizer, TokenizerBuilder
from gossamer.data.tokenizer._fast import library, load
from gossamer.data.tokenizer._files import SEPARATOR
from gossamer.spec.errors import BadInput, bad_input

_KEY = "data.tokenizer"
_SMALLEST = 257  # every byte and the separator


@dataclass(frozen=True)
class Bpe(TokenizerBuilder):
    """The BPE tokenizer with at most `vocabulary` tokens: 256 bytes, merges as in GPT-2, and a separator.

    Short texts give fewer.

    Trained once on the training documents and kept in the cache under a hash of them.
    """

    vocabulary: int

    def __post_init__(self) -> None:
        if self.vocabulary < _SMALLEST:
            raise bad_input(
                wanted=f"at least {_SMALLEST} tokens (256 bytes and a separator)",
                got=str(self.vocabulary),
                do="write bpe:4096, or byte for no merges",
                key="vocabulary",
            )

    def make(self, texts: Callable[[], Iterable[str]], *, identity: str, cache: Path) -> Tokenizer:
        named = hashlib.sha256(f"bpe-v1 {self.vocabulary} {identity}".encode()).hexdigest()[:32]
        file = cache / "tokenizers" / f"bpe-{self.vocabulary}-{named}.json"
        return _kept(file) or self._trained(texts, file)

    def _trained(self, texts: Callable[[], Iterable[str]], file: Path) -> Tokenizer:
        file.parent.mkdir(parents=True, exist_ok=True)
        with held(file.with_suffix(".lock")):  # several ranks start at once; one of them trains
            found = _kept(file)
            if found is None:
                write_file(file, _train(texts(), self.vocabulary).encode("utf-8"))
                found = _kept(file)
        assert found is not None
        return found


def _kept(file: Path) -> Tokenizer | None:
    if not file.exists():
        return None
    try:
        return load(file.read_text("utf-8"), separator=SEPARATOR, key=_KEY)
    except BadInput as error:
        do = f"delete {file}; the next start trains the tokenizer again"
        raise BadInput(f"the cached tokenizer is damaged ({error.message}): {do}", key=_KEY) from None


def _train(texts: Iterable[str], vocabulary: int) -> str:
    kit: Any = library(_KEY)
    tokenizer = kit.Tokenizer(kit.models.BPE())
    tokenizer.pre_tokenizer = kit.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = kit.decoders.ByteLevel()
    trainer = kit.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(kit.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return str(tokenizer.to_str())
