"""What one host brings to a meeting of hosts, and what comes out of it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gossamer.launch.local import Among
from gossamer.launch.port import parse_address
from gossamer.launch.rendezvous_messages import HostFingerprint
from gossamer.spec.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """One host's call: `host` of `hosts`, meeting at `address`:`port`, which belong to host 0.

    runs: folder of run directories on this host; run: name of this run's folder, host 0's counts for all.
    """

    host: int
    hosts: int
    address: str
    port: int
    facts: HostFingerprint
    runs: Path
    run: str
    say: Callable[[str], None]
    interface: str = "auto"
    within_s: float = 120.0

    @staticmethod
    def parse_host(text: str) -> tuple[int, int]:
        """ "0/2" -> (0, 2); raises BadInput."""
        host, slash, hosts = text.partition("/")
        if not slash or not host.isdecimal() or not hosts.isdecimal() or int(host) >= int(hosts):
            raise BadInput(f"wanted NUMBER/HOSTS counted from 0, such as 0/2, got {text!r}", key="--host")
        return int(host), int(hosts)

    @staticmethod
    def parse_meet(text: str) -> tuple[str, int]:
        """ "10.0.0.1:29400" -> ("10.0.0.1", 29400); raises BadInput."""
        return parse_address(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMeeting:
    """What was agreed. `others`: open connections to the other hosts' supervisors, for the receiver to close."""

    among: Among
    rundir: Path
    others: Mapping[int, socket.socket]
