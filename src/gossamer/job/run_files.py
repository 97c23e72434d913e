"""The files that a run keeps beside its checkpoints, so that it can be used and resumed anywhere.

tokenizer/   the tokenizer
model/       config.json of a transformers model, and the files beside it: with the checkpoint, all for an export
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from gossamer.data.kept import tokenizer_files
from gossamer.data.tokenizer import Tokenizer
from gossamer.model.source import ModelSource
from gossamer.view.run_directory import RunDirectory


def keep(directory: RunDirectory, tokenizer: Tokenizer | None, origin: ModelSource | None) -> None:
    """Write the folders that are missing, each completely or not at all. Raises OSError, e.g. on a full disk."""
    if tokenizer is not None and not directory.tokenizer.is_dir():
        _write(directory.tokenizer, tokenizer_files(tokenizer))
    if origin is not None and not directory.model.is_dir() and (files := origin.kept()):
        _write(directory.model, files)


def _write(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        for name, content in files.items():
            (beside / name).write_bytes(content.read_bytes() if isinstance(content, Path) else content)
        beside.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def folder_of(directory: RunDirectory) -> Path:
    """Return the folder that relative paths in a run's configuration refer to.

    The current folder, if the run began there. Also if the run directory lies in it as it lay in its first folder: then
    all was moved or copied together. Otherwise the folder where the run began, if that exists, else the current one.
    """
    here = Path.cwd()
    began, inside = directory.began_in()
    if began is None or not began.is_dir():
        return here
    lies_here = inside is not None and (here / inside).resolve() == directory.path.resolve()
    return here if lies_here or began.samefile(here) else began
