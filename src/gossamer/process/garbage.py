"""Python's collector of reference cycles, paused where it would take time or change what is counted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Free no cycles of references in this context.

    When they are freed depends on all that a process does. And each time the collector looks through all objects, of
    which a process with torch and transformers has half a million: work that makes many objects waits for it.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
