"""A run directory before its ranks start: it gets its settings."""

from __future__ import annotations

from gossamer.settings import Resolved
from gossamer.settings.plan_file import asks_for_another_plan
from gossamer.view.run_directory import RunDirectory


def keep_settings(directory: RunDirectory, resolved: Resolved) -> None:
    """Write the configuration that a run starts or resumes with; its plan stays where the settings ask for the same."""
    before = directory.config() if directory.config_file.exists() else None
    directory.keep(resolved.config, resolved.origin)
    if before is not None and asks_for_another_plan(before, resolved.config):
        directory.plan_file.unlink(missing_ok=True)  # there may be none, or another host of a shared disk was first
