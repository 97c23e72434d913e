"""Choose the network device for the exchange: the one on the route to the peers, or the fastest of several."""

from __future__ import annotations

import errno
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from gossamer.spec.errors import BadInput
from gossamer.spec.suggest import nearest

_SIOCGIFADDR = 0x8915  # Linux
_MEASURE_S = 0.25
_MEASURE_BYTES = 16 << 20
_CONNECT_S = 2.0


@dataclass(frozen=True, slots=True, order=True)
class Interface:
    """A network device and its IPv4 address."""

    name: str
    address: str


def interfaces() -> tuple[Interface, ...]:
    """Return the devices of this machine that have an IPv4 address, the loopback device included."""
    found = ((name, _address_of(name)) for _, name in socket.if_nameindex())
    return tuple(sorted(Interface(name, address) for name, address in found if address))


def _address_of(name: str) -> str:
    """Return the IPv4 address of a device, "" where it has none or the system is not Linux."""
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def route_to(address: str) -> str:
    """Return this machine's own address on the route to `address`, without sending anything.

    Raises BadInput when there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise BadInput(
                f"this host has no route to {address} ({error.strerror}): give an address that it can reach"
            ) from None
        own: str = probe.getsockname()[0]
    return own


def name_of(address: str) -> str:
    """Return the name of the device that has `address`, "" when none has it."""
    return next((device.name for device in interfaces() if device.address == address), "")


def candidates(wanted: str, peer: str) -> tuple[Interface, ...]:
    """Return the devices to choose from on this host, the one on the route to `peer` first.

    wanted: `machines.interface`: a device's name, or "auto" for all of them. Raises BadInput for an unknown name.
    """
    present = interfaces()
    if wanted != "auto":
        chosen = tuple(device for device in present if device.name == wanted)
        if not chosen and present:
            names = [device.name for device in present]
            raise BadInput(
                f"host {socket.gethostname()} has no network device {wanted!r} with an address: "
                f"{nearest(wanted, names)}",
                key="machines.interface",
            )
        return chosen or (Interface(wanted, route_to(peer)),)
    own = route_to(peer)
    first = Interface(name_of(own), own)
    others = [d for d in present if d.address != own and not d.address.startswith("127.")]
    return (first, *(others if not own.startswith("127.") else ()))


class RateServer:
    """A server on the given addresses of this host that discards what other hosts send to measure bandwidth."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._stack = ExitStack()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self.ports: dict[str, int] = {}
        for address in addresses:
            listener = self._stack.enter_context(socket.create_server((address, 0)))
            listener.settimeout(0.1)
            self.ports[address] = listener.getsockname()[1]
            thread = threading.Thread(target=self._serve, args=(listener,), name="gossamer-rate")
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop the threads and close the sockets."""
        self._is_closed = True
        for thread in self._threads:
            thread.join()
        self._stack.close()

    def _serve(self, listener: socket.socket) -> None:
        while not self._is_closed:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    self._swallow(connection)

    def _swallow(self, connection: socket.socket) -> None:
        connection.settimeout(_CONNECT_S)
        received = 0
        while data := connection.recv(1 << 16):
            received += len(data)
            if data.endswith(b"\n"):
                break
        connection.sendall(b"%d\n" % received)


def measure(own: str, peer: str, port: int) -> float:
    """Return the bandwidth in bytes/s from this host's address `own` to a `RateServer` at `peer`:`port`.

    Returns 0.0 when the server cannot be reached.
    """
    try:
        with socket.create_connection((peer, port), timeout=_CONNECT_S, source_address=(own, 0)) as connection:
            began_s, sent = time.monotonic(), 0
            piece = bytes(1 << 16)
            while time.monotonic() - began_s < _MEASURE_S and sent < _MEASURE_BYTES:
                sent += connection.send(piece)
            connection.sendall(b"\n")
            connection.settimeout(10 * _CONNECT_S)  # what lies in buffers has yet to cross a slow link
            answer = b""
            while not answer.endswith(b"\n"):
                if not (more := connection.recv(64)):
                    return 0.0
                answer += more
            return int(answer) / (time.monotonic() - began_s)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise
        return 0.0


def measure_all(own: Sequence[Interface], ports: Mapping[str, int]) -> dict[str, tuple[str, float]]:
    """Return for each address of host 0 in `ports` the fastest device of this host and its bandwidth in bytes/s.

    Addresses that no device reaches are left out.
    """
    best: dict[str, tuple[str, float]] = {}
    for peer, port in ports.items():
        rates = [(measure(device.address, peer, port), device.name) for device in own]
        rate, name = max(rates, default=(0.0, ""))
        if rate > 0:
            best[peer] = (name, rate)
    return best


def choose(first: Sequence[Interface], measured: Sequence[Mapping[str, tuple[str, float]]]) -> Interface:
    """Return the device of host 0 that the slowest other host reaches fastest, of those that all hosts reach.

    first: host 0's candidates; measured: the result of `measure_all` on every other host. Raises BadInput when no
    device is reached by all hosts.
    """
    worst = {
        device: min(rates[device.address][1] for rates in measured)
        for device in first
        if all(device.address in rates for rates in measured)
    }
    if not worst:
        names = ", ".join(f"{device.name} ({device.address})" for device in first)
        raise BadInput(
            f"no network device of host 0 is reached by all hosts; tried {names}: connect all hosts to one network",
            key="machines.interface",
        )
    return max(worst, key=lambda device: worst[device])
