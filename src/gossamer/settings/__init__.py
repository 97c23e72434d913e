"""Settings: what a run is configured to do, and where each value came from.

A file (`read`), the command line (`overrides`) and the defaults become one `RunConfig` (`resolve`). Every mistake is
told with its file and line (`complain`) in plain words (`words`); `record` shows the result, and reads an earlier one.
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
