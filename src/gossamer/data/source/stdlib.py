"""A data source that reads the .py files of Python's standard library: text on every machine, without a download."""

from __future__ import annotations

import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gossamer.data.source import Document, Source
from gossamer.data.source._files import KEY, stamps, unreadable
from gossamer.spec.errors import BadInput, bad_input

# Distributions differ in whether they ship the tests, so they are left out everywhere; the rest is not the library.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "idle_test"})


@dataclass(frozen=True)
class Stdlib(Source):
    """The source of every *.py of the standard library, tests excluded, sorted by path.

    It has 11 to 12 MB in 630 to 734 files.

    Not identical across Python versions and distributions: the corpus manifest tells them apart.
    """

    licence: ClassVar[str] = "PSF-2.0"

    def documents(self) -> Iterator[Document]:
        for name, file in _files():
            if text := _read(file):
                yield Document(name, text)

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        return stamps(_files())


def _files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT and not name.startswith("test")]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    if not found:
        raise bad_input(
            wanted=f"the source of the standard library in {root}",
            got="no *.py file (a stripped or zipped Python)",
            do="give text of your own: data.source=text:GLOB",
            key=KEY,
        )
    return sorted((file.relative_to(root).as_posix(), file) for file in found)


def _read(file: Path) -> str:
    try:
        raw = file.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding)
    except OSError as error:
        raise unreadable(file, error) from None
    except (SyntaxError, UnicodeDecodeError) as error:
        do = "repair the Python installation, or give text of your own: data.source=text:GLOB"
        raise BadInput(f"cannot read {file}: {error}: {do}", key=KEY) from None
