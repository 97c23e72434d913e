"""Settings: the configuration of a run, and the origin of each of its values.

A file (`read`), the command line (`overrides`) and the defaults become one `RunConfig` (`resolve`). Every mistake is
reported with its file and line (`validation_errors`) in plain words (`describe`). `provenance` shows the result, and
reads that of an earlier run.
"""

from __future__ import annotations

from gossamer.settings.paths import anchored, written_overrides
from gossamer.settings.provenance import reload, show
from gossamer.settings.resolve import Resolved, load, override, schema
from gossamer.settings.validation_errors import check, located

__all__ = [
    "Resolved",
    "anchored",
    "check",
    "load",
    "located",
    "override",
    "reload",
    "schema",
    "show",
    "written_overrides",
]
