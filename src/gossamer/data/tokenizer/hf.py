"""The tokenizer of a Hugging Face model in a local folder."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.data.chat_template import ChatTemplate
from gossamer.data.tokenizer import Tokenizer, TokenizerBuilder
from gossamer.data.tokenizer._fast import load
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.extras import install
from gossamer.store.gguf import read_summary
from gossamer.store.gguf_vocabulary import with_pre_tokenizer

_KEY = "data.tokenizer"
_USUAL = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")


@dataclass(frozen=True)
class Hf(TokenizerBuilder):
    """The tokenizer in `directory`: a folder with tokenizer.json or files that transformers converts, or a GGUF file.

    Documents are separated by its end-of-text token (eos_token, else sep_token); no other special token is added.
    """

    directory: str

    def make(self, texts: Callable[[], Iterable[str]], *, identity: str, cache: Path) -> Tokenizer:
        where = Path(self.directory).expanduser()
        if (where / "tokenizer.json").is_file():
            text = _read(where / "tokenizer.json")
            return load(text, separator=_separator(where, text), key=_KEY, template=ChatTemplate.read(where))
        if where.is_dir():
            return _converted(where)
        if where.is_file() and where.suffix == ".gguf":
            return _converted(where.parent, gguf_file=where.name)
        raise bad_input(
            wanted="the folder of a tokenizer (tokenizer.json) or a GGUF file",
            got=str(where) if where.exists() else f"{where}, which does not exist",
            do="give a local path",
            key=_KEY,
        )


def _separator(where: Path, tokenizer_json: str) -> str:
    """Return the end-of-text token: the one the configuration names, else the usual one that the vocabulary has."""
    known = _added(tokenizer_json, where)
    named: list[str] = []
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        said = _object(_read(where / file), where / file) if (where / file).is_file() else {}
        tokens = (said.get("eos_token"), said.get("sep_token"))
        named += [t["content"] if isinstance(t, dict) else t for t in tokens if t]
    for token in (*named, *_USUAL):
        if token in known:
            return token
    told = f"eos_token {named[0]!r}, which is no special token" if named else "no eos_token and no sep_token"
    raise bad_input(
        wanted=f"an end-of-document token in {where}",
        got=f"{told}; the special tokens are {sorted(known)[:8]}",
        do='name a special token in tokenizer_config.json, {"eos_token": "..."}, or add one to the tokenizer',
        key=_KEY,
    )


def _added(tokenizer_json: str, where: Path) -> set[str]:
    said = _object(tokenizer_json, where / "tokenizer.json")
    vocabulary = said.get("model", {}).get("vocab", {})
    plain = set(vocabulary) if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
    return {token["content"] for token in said.get("added_tokens", [])} | (plain & {*_USUAL})


def _converted(where: Path, **options: str) -> Tokenizer:
    """Load through transformers, which converts older formats; from local files only."""
    try:
        auto: Any = importlib.import_module("transformers").AutoTokenizer
    except ImportError:
        raise bad_input(
            wanted=f"transformers, to read the tokenizer in {where}",
            got="no such package",
            do=install("hf"),
            key=_KEY,
        ) from None
    try:
        found = auto.from_pretrained(str(where), local_files_only=True, **options)
        text, separator = found.backend_tokenizer.to_str(), found.eos_token or found.sep_token
    except Exception as error:  # transformers raises whatever its many readers raise
        said = (str(error) or repr(error)).splitlines()[0]
        do = "give a folder with the files that `tokenizer.save_pretrained` writes"
        raise BadInput(f"no tokenizer can be read from {where} ({said}): {do}", key=_KEY) from None
    if gguf_file := options.get("gguf_file"):
        pre = read_summary(where / gguf_file).tokenizer.partition("/")[2]
        text = with_pre_tokenizer(text.encode(), pre).decode()
    if not separator:
        do = "name an eos_token in tokenizer_config.json"
        raise BadInput(f"the tokenizer in {where} has neither eos_token nor sep_token to end documents: {do}", key=_KEY)
    return load(text, separator=separator, key=_KEY, template=_template(found))


def _template(found: Any) -> ChatTemplate | None:
    """Return the chat template of a tokenizer that transformers has read (of several named ones the default)."""
    said = found.chat_template
    source = said.get("default") if isinstance(said, dict) else said
    return ChatTemplate(source, bos_token=found.bos_token or "", eos_token=found.eos_token or "") if source else None


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {file}: {error}: repair it, or name another tokenizer", key=_KEY) from None


def _object(text: str, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadInput(f"{file} is not JSON ({error}): replace it by an intact file", key=_KEY) from None
    if not isinstance(value, dict):
        raise bad_input(
            wanted=f"a JSON object in {file}", got=type(value).__name__, do="replace it by an intact file", key=_KEY
        )
    return value
