"""The order that an ssh launch sends to each host."""

from __future__ import annotations

from gossamer.process.json_lines import Said

FILES = "{files}"  # in arguments: the folder in which the order's files lie
STOP = b"stop"  # a line that may follow: the first asks to save and stop, the second to stop at once


class HostOrder(Said):
    """The command for one host. `files`: texts by file name, kept while the command runs.

    `folder`: working directory of the command, if it exists there.
    """

    argv: tuple[str, ...]
    files: dict[str, str]
    folder: str
