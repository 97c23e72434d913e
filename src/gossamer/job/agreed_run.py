"""The run directory of ranks that a launcher started: rank 0 alone looks for it, and all learn what it found.

Ranks that looked by themselves could differ: a late one would find the run that rank 0 has just begun.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from gossamer.comm.patience import PatientStore
from gossamer.launch.agreement import Agreement
from gossamer.launch.agreement_ranks import RankStore
from gossamer.launch.environment import LauncherRank
from gossamer.view.run_directory import RunDirectory


def agreed_run(
    place: LauncherRank, store: PatientStore, begin: Callable[[], tuple[RunDirectory, bool]], *, timeout_s: float
) -> tuple[RunDirectory, bool]:
    """Return the run's directory, and whether the run in it is resumed, as `begin` returns them on rank 0.

    `begin` is called on rank 0 alone, while the others wait, and may make the directory ready. All ranks raise its
    error. Raises PeerLost, which names a rank that does not come within `timeout_s`.
    """
    keys = store.under(f"begin/{place.start.generation}")
    line = RankStore(keys, place.rank, place.ranks, timeout_s=timeout_s, when="before the run")

    def found() -> str:
        directory, resuming = begin()
        return json.dumps([str(directory.path), resuming])

    try:
        path, resuming = json.loads(Agreement(line).agreed(found))
    finally:
        line.leave()  # rank 0 may hold the store, and end at once: the others have read what it said by then
    return RunDirectory(Path(path)), resuming
