"""What a step costs on the links between machines, before the run starts, and which setting makes it cheaper.

The bytes are those that the plan will send, counted by link. Bandwidths are measured over ssh where hosts are named;
where they are not, the seconds are told for three common ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gossamer.launch.ssh_link import SshLink, measure_link
from gossamer.spec.units import show_bytes, show_rate, show_seconds

WireBytes = Mapping[str, int]  # by link, "0>1"
_COMMON = (10e6 / 8, 100e6 / 8, 1e9 / 8)  # bytes/s
_SLOW_S = 0.2  # of a step: what a link may cost before a cure is named


@dataclass(frozen=True, slots=True)
class Cure:
    """A setting that sends less, and the bytes by link that a step then sends; None where it cannot be combined."""

    setting: str
    wire_bytes: Callable[[], WireBytes | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLinks:
    """The hosts of a run, the host of each rank, and the links to them from here; None: could not be measured."""

    names: tuple[str, ...]
    host_of: tuple[int, ...]
    links: tuple[SshLink | None, ...]

    @staticmethod
    def measured(names: Sequence[str], host_of: Sequence[int], python: str) -> HostLinks:
        """Measure the link to every host, one after the other: they may share this machine's own."""
        with ThreadPoolExecutor(max_workers=1) as one_by_one:
            links = list(one_by_one.map(lambda name: measure_link(name, python), names))
        return HostLinks(names=tuple(names), host_of=tuple(host_of), links=tuple(links))

    def seconds(self, wire_bytes: WireBytes) -> list[tuple[float, int]]:
        """Return (seconds of a step, host) of every link that was measured, the slowest first."""
        found = []
        for host, link in enumerate(self.links):
            if link is not None:
                out, into = self._crossing(wire_bytes, host)
                found.append((max(out, into) / link.bytes_per_s, host))
        return sorted(found, reverse=True)

    def _crossing(self, wire_bytes: WireBytes, host: int) -> tuple[int, int]:
        """Return the bytes that a step sends from a host to others, and those that it receives from them."""
        out = into = 0
        for name, sent in wire_bytes.items():
            a, b = (self.host_of[int(rank)] for rank in name.split(">"))
            out += sent if a == host and b != host else 0
            into += sent if b == host and a != host else 0
        return out, into


def told_of_hosts(hosts: HostLinks, wire_bytes: WireBytes, cures: Sequence[Cure]) -> dict[str, object]:
    """Return what the links between named hosts cost, by host, and what cures the slowest of them."""
    by_host: dict[str, object] = {}
    for name, link in zip(hosts.names, hosts.links, strict=True):
        rate = "could not be measured" if link is None else f"{show_rate(link.bytes_per_s)} from here"
        trip = "" if link is None else f", {show_seconds(link.round_trip_s)} there and back"
        by_host[name] = f"{rate}{trip}"
    found: dict[str, object] = {"measured_over_ssh": by_host}
    if not (slowest := hosts.seconds(wire_bytes)):
        return found
    seconds, host = slowest[0]
    found["slowest"] = f"the link of {hosts.names[host]} takes {show_seconds(seconds)} of every step"
    found["seconds_per_step"] = seconds
    if seconds >= _SLOW_S:
        found["cures"] = _cures(cures, lambda bytes_then: max(hosts.seconds(bytes_then))[0], seconds)
    return found


def told_of_common(wire_bytes: WireBytes, cures: Sequence[Cure]) -> dict[str, object]:
    """Return what a step would cost if each rank were on a machine of its own, on three common links."""
    sent = _most_sent(wire_bytes)
    if not sent:
        return {}
    rates = {show_rate(rate): f"{show_seconds(sent / rate)} per step" for rate in _COMMON}
    slow = next((rate for rate in reversed(_COMMON) if sent / rate >= _SLOW_S), None)
    found: dict[str, object] = {
        "said": f"every process is on this machine; on machines of their own each sends {show_bytes(sent)} per step",
        "if_links_had": rates,
    }
    if slow is not None:
        rate = slow
        found["cures"] = _cures(cures, lambda then: _most_sent(then) / rate, sent / rate, f" at {show_rate(rate)}")
    return found


def _most_sent(wire_bytes: WireBytes) -> int:
    by_rank: dict[str, int] = {}
    for name, sent in wire_bytes.items():
        by_rank[name.partition(">")[0]] = by_rank.get(name.partition(">")[0], 0) + sent
    return max(by_rank.values(), default=0)


def _cures(
    cures: Sequence[Cure], seconds_of: Callable[[WireBytes], float], now_s: float, at: str = ""
) -> dict[str, str]:
    """Return by setting the seconds per step with it, of those that take less, the least first."""
    found = []
    for cure in cures:
        wire_bytes = cure.wire_bytes()
        if wire_bytes and (seconds := seconds_of(wire_bytes)) < now_s:
            found.append((seconds, cure.setting))
    return {name: f"{show_seconds(seconds)} per step{at}" for seconds, name in sorted(found)}
