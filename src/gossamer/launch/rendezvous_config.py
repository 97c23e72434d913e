"""The settings of one host for a rendezvous of hosts, and its result."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gossamer.launch.local import Among
from gossamer.launch.port import parse_address
from gossamer.launch.rendezvous_messages import HostFingerprint
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class Node:
    """Node number `rank` of `nodes`; node 0 listens at `address`:`port`."""

    rank: int
    nodes: int
    address: str
    port: int

    @staticmethod
    def parse(rank: int, nodes: int, endpoint: str) -> Node:
        """Check the numbers and parse `endpoint`, "10.0.0.1:29400"; raises BadInput."""
        if nodes < 1:
            raise bad_input(wanted="1 or more", got=str(nodes), do="give the number of nodes", key="--nnodes")
        if not 0 <= rank < nodes:
            raise bad_input(
                wanted=f"0 to {nodes - 1}, as --nnodes is {nodes}", got=str(rank), do="count from 0", key="--node-rank"
            )
        return Node(rank, nodes, *parse_address(endpoint))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMeeting:
    """The result of a rendezvous: this host's ranks and addresses, and the run directory.

    `others`: open connections to the other hosts' supervisors, by host; the receiver closes them.
    """

    among: Among
    rundir: Path
    others: Mapping[int, socket.socket]
