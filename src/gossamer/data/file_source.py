"""The source for a file that somebody names: conversations, JSON lines or text, found by its name and first line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import Any

from gossamer.data.source._files import find, lines
from gossamer.data.source.jsonl import record_of
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import Written

_CHAT_KEYS = ("messages", "conversations", "instruction")  # of the dialects in data/conversation.py


def source_of_files(named: str, chat: Mapping[str, Any]) -> Written:
    """Return the source, as a configuration writes it, that reads the file or the pattern `named`.

    A name that ends in .jsonl or .jsonl.gz holds conversations if its first line is one, else JSON lines with a field
    `text`; every other name is text. `chat`: parameters for conversations, such as a template. Raises BadInput for a
    file that is missing, empty (of JSON lines) or damaged in its first line.
    """
    path = Path(named).expanduser()
    pattern = escape(str(path)) if os.path.lexists(path) else named  # brackets in a file's name are no wildcards
    if not named.removesuffix(".gz").endswith(".jsonl"):
        return {"text": {"files": pattern}}
    first = find(pattern)[0][1]
    return {"chat": {**chat, "files": pattern}} if _is_chat(first) else {"jsonl": {"files": pattern}}


def _is_chat(path: Path) -> bool:
    for number, line in lines(path):
        return any(key in record_of(line, f"{path}:{number}") for key in _CHAT_KEYS)
    raise BadInput(f"{path} is empty: name a file with text or conversations")
