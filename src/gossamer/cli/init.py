"""The command `gossamer init`, which writes a configuration or a program to start from."""

from __future__ import annotations

from pathlib import Path

from gossamer.api.starters import STARTERS, write_starter
from gossamer.cli.output import CommandResult, Json, table
from gossamer.view.screen import Screen


def init(kind: str | None = None, /, *, json: Json = False) -> CommandResult:
    """Write files to start from into the current folder, e.g. `gossamer init pretrain`; no existing file is changed.

    Parameters
    ----------
    kind
        What to start: pretrain, finetune, two_sites, own_loop, classify, kubernetes or skypilot. Without one: the list.
    """
    if kind is None:
        rows = [(name, one.said, ", ".join(one.files)) for name, one in STARTERS.items()]
        data = {"starts": {name: {"for": one.said, "files": list(one.files)} for name, one in STARTERS.items()}}
        listed = table([("start", "for", "files"), *rows], screen=Screen.of())
        return CommandResult(data, f"{listed}\nnext: gossamer init pretrain")
    written = write_starter(kind, Path())
    starter = STARTERS[kind]
    names = [str(path) for path in written]
    text = f"{', '.join(names)}: written, to {starter.said}\nneeds: {starter.needs}\nnext: {starter.then}"
    return CommandResult({"start": kind, "written": names, "next": starter.then}, text, is_report=True)
