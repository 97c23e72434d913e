"""A run directory before its ranks start: it gets its settings, and after a failed start it is as it was before."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gossamer.settings import Resolved
from gossamer.settings.plan_file import asks_for_another_plan
from gossamer.spec.errors import BadInput, RunFailed
from gossamer.spec.records import Start
from gossamer.view.run_directory import RunDirectory


@contextmanager
def rollback_failed_start(directory: RunDirectory) -> Iterator[None]:
    """Restore the run's files where the ranks never began, inside the `with` block around preparing and starting.

    A run that could not begin because of the user's input leaves no folder. One that could not resume (other settings,
    a damaged checkpoint) keeps its configuration and plan. After another failure the folder with its logs stays.
    """
    files = (directory.config_file, directory.provenance_file, directory.plan_file)
    before = {file: file.read_bytes() for file in files if file.exists()}
    tail = directory.tail()
    tail.skip()
    try:
        yield
    except (BadInput, RunFailed) as error:
        if not any(isinstance(record, Start) for record in tail.read()):
            if before:
                _restore(files, before)
            elif isinstance(error, BadInput) and not directory.records_file.exists():
                shutil.rmtree(directory.path, ignore_errors=True)
        raise


def keep_settings(directory: RunDirectory, resolved: Resolved) -> None:
    """Write the configuration that a run starts or resumes with; its plan stays where the settings ask for the same."""
    before = directory.config() if directory.config_file.exists() else None
    directory.keep(resolved.config, resolved.origin)
    if before is not None and asks_for_another_plan(before, resolved.config):
        directory.plan_file.unlink(missing_ok=True)  # there may be none, or another host of a shared disk was first


def _restore(files: Sequence[Path], before: Mapping[Path, bytes]) -> None:
    for file in files:
        if file in before:
            beside = file.with_name(f".{file.name}.before")
            beside.write_bytes(before[file])
            beside.replace(file)
        else:
            file.unlink(missing_ok=True)
