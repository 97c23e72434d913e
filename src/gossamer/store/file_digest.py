"""Hashes of files too large to read whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_SAMPLE_BYTES = 1 << 20


def digest(value: Any, files: Iterable[Path] = ()) -> str:
    """Return 16 hex digits over a JSON value and files: name, size, first and last MiB of each."""
    hashed = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode())
    for file in sorted(files):
        size = file.stat().st_size
        hashed.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            hashed.update(opened.read(_SAMPLE_BYTES))
            opened.seek(max(_SAMPLE_BYTES, size - _SAMPLE_BYTES))
            hashed.update(opened.read())
    return hashed.hexdigest()[:16]
