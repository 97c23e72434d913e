"""What was measured before, in a JSON file: a sweep that was ended goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Kept:
    """A dictionary that is on disk after every change."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._held: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def get(self, key: str) -> Any:
        return self._held.get(key)

    def put(self, key: str, value: Any) -> None:
        self._held[key] = value
        self._file.parent.mkdir(parents=True, exist_ok=True)
        beside = self._file.with_suffix(".beside")
        beside.write_text(json.dumps(self._held, indent=1))
        beside.replace(self._file)
