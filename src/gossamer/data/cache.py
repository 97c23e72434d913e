"""A cache folder for files that can be made again: written beside, renamed into place, by one process at a time."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gossamer.spec.errors import BadInput, bad_input

try:
    import fcntl
except ImportError:  # not POSIX: two processes may then do the same work; the renames keep it correct
    fcntl = None  # type: ignore[assignment]


def default_cache() -> Path:
    """Return the default cache folder: $XDG_CACHE_HOME/gossamer, else ~/.cache/gossamer."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "gossamer"


def open_cache(folder: str | Path | None) -> Path:
    """Return the cache folder (None: the default one), made if missing; raises BadInput where it cannot be written."""
    cache = default_cache() if folder is None else Path(folder).expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError as error:
        raise bad_input(
            wanted=f"to write in the cache folder {cache}",
            got=error.strerror or str(error),
            do="set data.cache (or XDG_CACHE_HOME) to a folder that can be written",
            key="data.cache",
        ) from None


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Hold the file lock `lock` inside the `with` block; wait for it without limit.

    The system frees it when its holder ends, in any way.
    """
    with lock.open("w") as stream:
        if fcntl is not None:
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def write_file(target: Path, data: bytes) -> None:
    """Write `data` to `target` atomically: all of it or nothing; raises BadInput where that cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as stream:
            beside = Path(stream.name)
            try:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
                os.replace(beside, target)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
    except OSError as error:
        do = "check the free space and the permissions of its folder"
        raise BadInput(f"cannot write {target}: {error.strerror or error}: {do}") from None


def make_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Create the folder `target` atomically with the files that `fill` writes; a folder already there is kept."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        fill(beside)
        os.rename(beside, target)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        if target.is_dir():  # another process was first
            return
        do = "free disk space, or set data.cache to another folder"
        raise BadInput(f"cannot write the cache {target}: {error.strerror or error}: {do}", key="data.cache") from None
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in `file`; None where there is no such file or no object in it."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a JSON object, readable and atomically: all of it or nothing."""
    write_file(file, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())
