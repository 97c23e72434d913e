"""The settings of one host for a rendezvous of hosts, and its result."""

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
    """The settings of one host for the rendezvous: host number `host` of `hosts`, at `address`:`port` of host 0.

    facts: versions and fingerprints to compare; runs: folder of run directories on this host; run: name of this run's
    folder, host 0's counts for all; within_s: seconds to wait for the other hosts.
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
        """Parse "0/2" into (0, 2), the host's number and the number of hosts; raises BadInput."""
        host, slash, hosts = text.partition("/")
        if not slash or not host.isdecimal() or not hosts.isdecimal() or int(host) >= int(hosts):
            raise BadInput(f"wanted NUMBER/HOSTS counted from 0, such as 0/2, got {text!r}", key="--host")
        return int(host), int(hosts)

    @staticmethod
    def parse_meet(text: str) -> tuple[str, int]:
        """Parse "10.0.0.1:29400" into ("10.0.0.1", 29400); raises BadInput."""
        return parse_address(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMeeting:
    """The result of a rendezvous: this host's ranks and addresses, and the run directory.

    `others`: open connections to the other hosts' supervisors, by host; the receiver closes them.
    """

    among: Among
    rundir: Path
    others: Mapping[int, socket.socket]
