"""The order that a launch over ssh or on Ray sends to each host."""

from __future__ import annotations

from gossamer.process.json_lines import Said

FILES = "{files}"  # in arguments: the folder in which the order's files lie
STOP = b"stop"  # a line that may follow: the first asks to save and stop, the second to stop at once


class HostOrder(Said):
    """The command for one host. `files`: texts by file name, kept while the command runs.

    `folder`: working directory of the command, if it exists there. `env`: variables beside those of the host.
    """

    argv: tuple[str, ...]
    files: dict[str, str]
    folder: str
    env: dict[str, str]


def node_arguments(rank: int, nodes: int, endpoint: str) -> tuple[str, ...]:
    """Return the arguments of `gossamer train` that say which host it is of how many, and where host 0 listens."""
    return "--node-rank", str(rank), "--nnodes", str(nodes), "--rdzv-endpoint", endpoint
