"""The commands `gossamer config show`, `check`, `upgrade` and `schema`, for configuration files."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path

from cyclopts import App

from gossamer.cli.output import CommandResult, Json
from gossamer.settings import load, schema, show
from gossamer.settings.methods import check_methods, check_names
from gossamer.settings.upgrade_file import upgrade_file
from gossamer.settings.validation_errors import DEFAULT, several
from gossamer.spec.unread_keys import unread

app = App(name="config")


@app.command(name="show")
def show_config(run: Path | None = None, /, *override: str, json: Json = False) -> CommandResult:
    """The merged configuration, with where each value came from.

    Parameters
    ----------
    run
        The configuration file; without one: all defaults.
    override
        key=value, wins over the file.
    """
    if run is not None and "=" in run.name and not run.exists():  # no file, overrides of the defaults only
        run, override = None, (str(run), *override)
    resolved = load(run, override)
    check_names(resolved)
    data = {"config": resolved.config.model_dump(mode="json"), "origin": dict(resolved.origin)}
    return CommandResult(data, show(resolved))


@app.command(name="check")
def check_config(run: Path, /, *override: str, json: Json = False) -> CommandResult:
    """Read a configuration file, build every method it names, and find keys that nothing reads; nothing is trained.

    Parameters
    ----------
    run
        The configuration file.
    override
        key=value, wins over the file.
    """
    resolved = load(run, override)
    check_methods(resolved)
    places = {key: where for key, where in resolved.origin.items() if where != DEFAULT}
    if mistakes := list(unread(resolved.config)):
        raise several(mistakes, places)
    changed = sum(where != DEFAULT for where in resolved.origin.values())
    total = len(resolved.origin)
    text = f"{run} is valid: {changed} of {total} keys set, {total - changed} defaults"
    return CommandResult({"ok": True, "set": changed, "values": len(resolved.origin)}, text)


@app.command(name="upgrade")
def upgrade_config(run: Path, /, *, json: Json = False) -> CommandResult:
    """Rename the keys and methods of an earlier version in a configuration file; comments and order stay.

    Parameters
    ----------
    run
        The configuration file, in YAML or JSON. It is changed in place.
    """
    found = upgrade_file(run)
    text = "\n".join(f"{run}:{one.line}: {one.old} -> {one.new}" for one in found)
    data = {"renamed": [{"line": one.line, "old": one.old, "new": one.new} for one in found]}
    return CommandResult(data, text or f"{run} has the present names already")


@app.command(name="schema")
def show_schema(*, json: Json = False) -> CommandResult:
    """The JSON Schema of configuration files, for editors that complete and check."""
    return CommandResult(schema(), jsonlib.dumps(schema(), indent=2))
