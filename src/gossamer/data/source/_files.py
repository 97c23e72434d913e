"""Text files found by pattern: names that are equal on every machine, and their text."""

from __future__ import annotations

import glob
import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gossamer.spec.errors import BadInput, bad_input

KEY = "data.source"


def find(pattern: str) -> list[tuple[str, Path]]:
    """Return (name, file) of every file that matches, sorted by name: the path below the part without wildcards.

    `**` matches any number of folders. A file that links give several names counts once, under the shortest of them.
    Otherwise its text would be learned twice, or held out under one name and trained on under another. Raises BadInput
    when nothing matches.
    """
    return once(_matching(pattern))


def remark(pattern: str) -> str:
    """Return the remark for the user on the files that match: the links that are left out; "" for none."""
    return told_of_links(_matching(pattern), pattern)


def once(named: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Return each file once, under the shortest of its names; sorted by name."""
    shortest_last = sorted(named, key=lambda one: (len(one[0]), one), reverse=True)
    return sorted({_identity(file): (name, file) for name, file in shortest_last}.values())


def told_of_links(named: list[tuple[str, Path]], where: str) -> str:
    """Return the remark for the user on the names that `once` has left out; "" for none."""
    kept = {name for name, _ in once(named)}
    twice = sorted(name for name, _ in named if name not in kept)
    if not twice:
        return ""
    count = f"{len(twice)} file names are" if len(twice) > 1 else "1 file name is"
    return f"{count} left out of {where}: links to files that are read under shorter names (first: {twice[0]})"


def _matching(pattern: str) -> list[tuple[str, Path]]:
    """Return (name, file) of every name that matches."""
    pattern = os.path.expanduser(pattern)
    fixed = _fixed_part(pattern)
    found = {Path(f) for f in glob.glob(pattern, recursive=True) if os.path.isfile(f)}
    if not found:
        _explain_nothing(pattern)
    return [(file.relative_to(fixed).as_posix(), file) for file in found]


def _identity(file: Path) -> tuple[int, int]:
    """Return device and inode of the file itself, equal for all links to it, hard ones too."""
    stat = file.stat()
    return stat.st_dev, stat.st_ino


def _fixed_part(pattern: str) -> Path:
    parts = Path(pattern).parts
    whole = next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:whole])


def _explain_nothing(pattern: str) -> None:
    here = Path(pattern)
    if here.is_dir():
        raise bad_input(
            wanted="files",
            got=f"the folder {pattern}",
            do=f"write a pattern such as {pattern.rstrip('/')}/**/*",
            key=KEY,
        )
    do = f"write the path relative to {Path.cwd()}, or an absolute path"
    links = sorted(found for found in glob.glob(pattern, recursive=True) if os.path.islink(found))
    if links:  # glob finds them, and there is nothing behind them
        raise BadInput(
            f"{links[0]} is a link to {os.readlink(links[0])}, which is no file: repair or remove it", key=KEY
        )
    if glob.has_magic(pattern):
        raise BadInput(f"no file matches {pattern!r}: {do}", key=KEY)
    raise BadInput(f"there is no file {pattern}: {do}", key=KEY)


def stamps(files: list[tuple[str, Path]]) -> tuple[tuple[str, int, int], ...]:
    """Return (path, bytes, modified_ns) of each file."""
    return tuple((str(file.resolve()), s.st_size, s.st_mtime_ns) for _, file in files for s in (file.stat(),))


def read_text(file: Path) -> str:
    """Return the complete file as UTF-8, newlines untouched; raises BadInput with file and first invalid byte."""
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise unreadable(file, error) from None
    except UnicodeDecodeError as error:
        raise bad_input(
            wanted="UTF-8 text",
            got=f"byte 0x{error.object[error.start]:02x} at offset {error.start} of {file}",
            do="convert the file (iconv -f ENCODING -t utf-8) or leave it out of the pattern",
            key=KEY,
        ) from None


def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) of a text file, gunzipped when its name ends in .gz; blank lines are left out."""
    try:
        with _open(file) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError) as error:
        raise unreadable(file, error) from None


def _open(file: Path) -> BinaryIO:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")  # type: ignore[return-value]


def unreadable(file: Path, error: Exception) -> BadInput:
    """Return the error about a file that exists but cannot be read: its name, the reason, and what to do."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, gzip.BadGzipFile):
        said = "it is no gzip file, though its name ends in .gz"
    return BadInput(f"cannot read {file} ({said.rstrip('.')}): repair it, or leave it out of the source", key=KEY)
