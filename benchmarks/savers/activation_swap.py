"""Activations in a file: all blocks, and those that the cost model swaps beside those that it recomputes.

The model and the steps are those of the rows of recompute. Storages are freed by the thread that has written them,
which torch's profiler does not see, so peaks are those of resident memory. The file is in GOSSAMER_DISK, or else in the
folder of temporary files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

from savers import Row
from savers._resident import plain_memory
from savers.recompute import measured

_NAME = "activation_swap"


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Rows of plain training, of all blocks swapped, and of the choice."""
    steps = 2 if quick else 5
    with tempfile.TemporaryDirectory(prefix="gossamer-swap-", dir=os.environ.get("GOSSAMER_DISK")) as folder:
        given = {"host": "64MiB", "file": "1GiB", "directory": folder}
        asked: list[tuple[list[Any], str, str]] = [
            ([], "plain training", "plain"),
            ([{_NAME: {**given, "units": "all"}}], "all blocks swap", ""),
            ([{_NAME: {**given, "units": "auto"}}], "swap or recompute", ""),
        ]
        with plain_memory() as process:
            for savers, what, peer in asked:
                yield process.submit(measured, savers, what, steps, peer=peer, method=_NAME, is_resident=True).result()
