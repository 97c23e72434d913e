"""The messages of a rendezvous of hosts, and the comparison of their versions, configuration and data."""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from gossamer.process.json_lines import JsonLineReader, Said, read_line, write_line
from gossamer.spec.errors import PeerLost

PROTOCOL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFingerprint:
    """The facts about one host that the rendezvous compares. Only `processes` and `checkpoints` may differ.

    processes: number of ranks on the host; versions: of packages and others by name; config, data: fingerprints;
    checkpoints: steps of the valid checkpoints on this host; secret: known to all hosts of the run ("" for none).
    """

    processes: int
    versions: dict[str, str] = field(default_factory=dict)
    config: str = ""
    data: str = ""
    checkpoints: tuple[int, ...] = ()
    secret: str = ""


class JoinRequest(Said):
    """A host's request to join, sent to host 0."""

    kind: Literal["hello"] = "hello"
    protocol: int
    host: int
    hosts: int
    processes: Annotated[int, Field(ge=1, le=4096)]
    hostname: Annotated[str, Field(max_length=255)]
    versions: dict[str, str]
    config: str
    data: str
    checkpoints: tuple[int, ...]
    secret: str


class HostQuery(Said):
    """A query of host 0: whether the host sees `token_file` (a shared run directory), and its bandwidth to `ports`."""

    kind: Literal["ask"] = "ask"
    run: str  # name of the run's folder
    token_file: str
    token: str
    ports: dict[str, int]


class HostReply(Said):
    """A host's reply to `HostQuery`.

    rates: (device, bandwidth in bytes/s) by address of host 0; problem: why the host cannot run, "" for none.
    """

    kind: Literal["answer"] = "answer"
    sees_file: bool
    rates: dict[str, tuple[str, float]]
    problem: str = ""


class JoinAccepted(Said):
    """Host 0's message that all hosts agree: ranks, addresses and the checkpoint to resume from."""

    kind: Literal["welcome"] = "welcome"
    offset: int
    ranks: int
    hostnames: tuple[str, ...]
    address: str
    port: int
    resume_step: int
    shared: bool
    interface: str  # your device that reaches `address` fastest; "" when it was not measured


class JoinRefused(Said):
    """Host 0's message that the run cannot start, with the reason."""

    kind: Literal["refusal"] = "refusal"
    message: str


RendezvousMessage: TypeAlias = Annotated[
    JoinRequest | HostQuery | HostReply | JoinAccepted | JoinRefused, Field(discriminator="kind")
]
_GREETING: TypeAdapter[JoinRequest | HostQuery | HostReply | JoinAccepted | JoinRefused] = TypeAdapter(
    RendezvousMessage
)


class Peer:
    """The connection to one other host during the rendezvous."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._lines = JsonLineReader()
        self._inbox: list[bytes] = []

    @property
    def is_gone(self) -> bool:
        """Whether the other host has closed the connection, or its process has ended."""
        before_s = self.socket.gettimeout()
        self.socket.setblocking(False)
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.socket.settimeout(before_s)

    def send(self, message: JoinRequest | HostQuery | HostReply | JoinAccepted | JoinRefused) -> None:
        """Send one message."""
        self.socket.sendall(write_line(message))

    def receive(self, *, within_s: float) -> JoinRequest | HostQuery | HostReply | JoinAccepted | JoinRefused:
        """Return the next message.

        Raises PeerLost after `within_s` seconds or when the peer closes the connection, WireMismatch for an invalid
        line.
        """
        deadline_s = time.monotonic() + within_s
        while not self._inbox:
            self.socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                data = self.socket.recv(1 << 16)
            except OSError as error:
                raise PeerLost(f"no message came from the other host within {within_s:.0f} s: {error}") from None
            if not data:
                raise PeerLost("the other host closed the connection")
            self._inbox += self._lines.feed(data)
        return read_line(self._inbox.pop(0), _GREETING)


def hello_of(facts: HostFingerprint, *, host: int, hosts: int) -> JoinRequest:
    """Build the join request of host `host` of `hosts`, with at most its 1000 newest checkpoints."""
    return JoinRequest(
        protocol=PROTOCOL,
        host=host,
        hosts=hosts,
        processes=facts.processes,
        hostname=socket.gethostname()[:255],
        versions=facts.versions,
        config=facts.config,
        data=facts.data,
        checkpoints=tuple(sorted(facts.checkpoints)[-1000:]),
        secret=facts.secret,
    )


def belongs(hello: JoinRequest, ours: JoinRequest) -> bool:
    """Return whether the host that sent `hello` belongs to this run: it knows the secret."""
    return hmac.compare_digest(hello.secret.encode(), ours.secret.encode())


def disagreements(ours: JoinRequest, others: Sequence[JoinRequest]) -> list[str]:
    """Return every difference between another host and host 0, one line each, naming the host."""
    return [line for other in others for line in _differences(ours, other)]


def newest_common(hellos: Sequence[JoinRequest]) -> int:
    """Return the step of the newest checkpoint that all hosts hold, -1 when there is none."""
    common = set.intersection(*(set(hello.checkpoints) for hello in hellos))
    return max(common, default=-1)


def _differences(ours: JoinRequest, other: JoinRequest) -> list[str]:
    who = f"host {other.host} ({other.hostname})"
    lines: list[str] = []
    for name, have, want in (("protocol", other.protocol, ours.protocol), ("number of hosts", other.hosts, ours.hosts)):
        if have != want:
            lines.append(f"{who} has {name} {have}, host 0 has {want}")
    for name in sorted({*ours.versions, *other.versions}):
        have_version, want_version = other.versions.get(name, "none"), ours.versions.get(name, "none")
        if have_version != want_version:
            lines.append(f"{who} has {name} {have_version}, host 0 has {want_version}")
    if other.config != ours.config:
        lines.append(f"{who} has another configuration ({other.config[:12]}, host 0 has {ours.config[:12]})")
    if other.data != ours.data:
        seen = f"other data ({other.data[:12]})" if other.data else "no data"
        lines.append(f"{who} has {seen}, host 0 has {ours.data[:12] or 'none'}")
    return lines
