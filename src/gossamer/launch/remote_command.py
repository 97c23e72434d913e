"""What an ssh launch tells each host to do."""

from __future__ import annotations

from gossamer.process.json_lines import Said

FILES = "{files}"  # in arguments: the folder in which the order's files lie
STOP = b"stop"  # a line that may follow: the first asks to save and stop, the second to stop at once


class HostOrder(Said):
    """`files`: texts by name, kept while the command runs; `folder`: where it runs, if that is there."""

    argv: tuple[str, ...]
    files: dict[str, str]
    folder: str
