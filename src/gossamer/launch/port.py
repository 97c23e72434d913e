"""Listen on an address that the user named; one clear message when that fails."""

from __future__ import annotations

import errno
import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from gossamer.launch.interface import interfaces
from gossamer.spec.errors import BadInput


def parse_address(text: str, *, key: str = "--rdzv-endpoint") -> tuple[str, int]:
    """Parse "10.0.0.1:29400" into ("10.0.0.1", 29400); raises BadInput."""
    match = re.fullmatch(r"([^:\s]+):(\d{1,5})", text)
    if match is None or not 1 <= int(match.group(2)) <= 65535:
        raise BadInput(f"wanted HOST:PORT such as 10.0.0.1:29400, got {text!r}", key=key)
    return match.group(1), int(match.group(2))


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket on exactly `address`:`port`.

    Raises BadInput, naming the process that already has the port where it can be found.
    """
    try:
        return socket.create_server((address, port), backlog=128)
    except socket.gaierror as error:
        raise BadInput(
            f"{address} is not an address or host name known to this host ({error.strerror}): check its spelling"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BadInput(
                f"port {port} on {address} is in use{owner(port)}: stop the program on it, or choose another port"
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            own = ", ".join(f"{d.address} ({d.name})" for d in interfaces()) or "none found"
            raise BadInput(
                f"{address} is not an address of this host, which has {own}: give an address of node 0, which listens"
            ) from None
        raise BadInput(f"cannot listen on {address}:{port}: {error.strerror}") from None


def owner(port: int) -> str:
    """Return " by process 1234 (python train.py)" for the process that listens on `port`.

    Another user's process has no name here; "" where no listening process can be found.
    """
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net") / table, port)}
    if not inodes:
        return ""
    sockets = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        if sockets & _open_files(process):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            return f" by process {process.name} ({command[:120]})"
    return " by a process of another user"


def _open_files(process: Path) -> set[str]:
    """What its descriptors stand for; nothing for another user's process, or one that has ended."""
    found: set[str] = set()
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # closed since it was listed
                found.add(os.readlink(link))
    return found


def _listening(table: Path, port: int) -> list[str]:
    """Socket inodes listening on `port`."""
    try:
        rows = [line.split() for line in table.read_text("ascii").splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]
