"""A run directory after a failed start: it is as it was before, with all that the user has in it."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from gossamer.spec.errors import BadInput, RunFailed
from gossamer.spec.records import Start
from gossamer.view.run_directory import RunDirectory

# What a start writes before the first step, by its name in the directory.
_MADE = (
    *("run.yaml", "provenance.json", "plan.yaml", "began.json", "proved.json", "data.json", "tokenizer", "model"),
    *("logs", "errors", "reference-*.safetensors", "teacher-*.safetensors", "tensorboard", "mlflow", "wandb"),
)
_LOCKS = {".lock", ".lock.beat"}  # of this start, which holds the directory


@contextmanager
def rollback_failed_start(directory: RunDirectory) -> Iterator[None]:
    """Restore the run's files where the ranks never began, inside the `with` block around preparing and starting.

    A run that could not begin because of the user's input leaves none of its files, and no folder where nothing else is
    in it: what was there before, or was put there by others, stays. One that could not resume (other settings, a
    damaged checkpoint) keeps its configuration and plan. After another failure the folder with its logs stays.
    """
    files = (directory.config_file, directory.provenance_file, directory.plan_file)
    before = {file: file.read_bytes() for file in files if file.exists()}
    others = _names(directory.path)
    tail = directory.tail()
    tail.skip()
    try:
        yield
    except (BadInput, RunFailed) as error:
        if not any(isinstance(record, Start) for record in tail.read()):
            if before:
                _restore(files, before)
            is_new = directory.config_file not in before and not directory.records_file.exists()
            if isinstance(error, BadInput) and is_new:
                _remove_made(directory, others)
        raise


def _restore(files: Sequence[Path], before: Mapping[Path, bytes]) -> None:
    for file in files:
        if file in before:
            beside = file.with_name(f".{file.name}.before")
            beside.write_bytes(before[file])
            beside.replace(file)
        else:
            file.unlink(missing_ok=True)


def _remove_made(directory: RunDirectory, others: Collection[str]) -> None:
    """Remove what the start has made, and the folder where nothing else is in it. `others`: names that were there."""
    for name in _names(directory.path) - set(others):
        if any(fnmatchcase(name, made) for made in _MADE):
            path = directory.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()
    if directory.checkpoints.name not in others:
        with suppress(OSError):
            directory.checkpoints.rmdir()  # which has none: the ranks never began
    if _names(directory.path) <= _LOCKS:
        shutil.rmtree(directory.path, ignore_errors=True)


def _names(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()} if folder.is_dir() else set()
