"""The files of a tokenizer, written and read back: a trained tokenizer works without its training text."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from gossamer.data.cache import read_json
from gossamer.data.chat_template import ChatTemplate
from gossamer.data.tokenizer import Tokenizer
from gossamer.data.tokenizer._bytes import Bytes
from gossamer.data.tokenizer._fast import load
from gossamer.spec.errors import BadInput

_IDENTITY = "identity.json"
_KEY = "data.tokenizer"


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return name -> content: the files from which transformers loads `tokenizer`, and one that identifies it."""
    with tempfile.TemporaryDirectory() as folder:
        files = {file.name: file.read_bytes() for file in tokenizer.save(Path(folder))}
    identity = {
        "fingerprint": tokenizer.fingerprint,
        "vocabulary": tokenizer.vocabulary,
        "separator": tokenizer.separator,
        "sha256": {name: hashlib.sha256(text).hexdigest() for name, text in files.items()},
    }
    return {**files, _IDENTITY: (json.dumps(identity, indent=1) + "\n").encode("ascii")}


def fingerprint_in(folder: Path) -> str | None:
    """Return the fingerprint of the tokenizer whose files were kept in `folder`; None where that cannot be read.

    The tokenizer that is read back may have another one: its files are written anew.
    """
    known = read_json(folder / _IDENTITY)
    return None if known is None else str(known.get("fingerprint"))


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer whose `tokenizer_files` are in `folder`, with its chat template: the same ids for every text.

    Raises BadInput for files that are missing, or changed since they were written.
    """
    try:
        identity: dict[str, Any] = json.loads((folder / _IDENTITY).read_bytes())
        texts = {name: (folder / name).read_bytes() for name in identity["sha256"]}
        changed = [name for name, text in texts.items() if hashlib.sha256(text).hexdigest() != identity["sha256"][name]]
        separator = "" if changed else json.loads(texts["tokenizer_config.json"])["eos_token"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        do = "restore the files that the run wrote"
        raise BadInput(f"the tokenizer in {folder} cannot be read ({said}): {do}", key=_KEY) from None
    if changed:
        do = "restore the file that the run wrote"
        raise BadInput(f"{folder / changed[0]} has changed since the run wrote it (other SHA-256): {do}", key=_KEY)
    template = _template(folder, texts)
    if identity["fingerprint"] == Bytes().fingerprint:  # needs no package
        return Bytes(template=template)
    return load(texts["tokenizer.json"].decode("utf-8"), separator=separator, key=_KEY, template=template)


def _template(folder: Path, texts: dict[str, bytes]) -> ChatTemplate | None:
    """Return the template in a run's folder with the tokens it had: the configuration beside it also names a pad."""
    found = ChatTemplate.read(folder)
    if found is None or ChatTemplate.TOKENS_FILE not in texts:  # none, or one that the user has put there
        return found
    return ChatTemplate.of(found.source, json.loads(texts[ChatTemplate.TOKENS_FILE]), origin=found.origin)
