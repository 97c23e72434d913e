"""Link rates as htb classes: one leaf per destination on a host's own end, one per source on the bridge's end.

A leaf is guaranteed its share of the link and may borrow up to the pair's rate (`ceil`). So neither the pair's nor the
link's rate is exceeded. Links are cut on the bridge's end only: to the sender a cut looks like silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gossamer.netlab.names import address, downlink, port, uplink
from gossamer.netlab.topology import LabTopology, check_rate
from gossamer.spec.errors import bad_input

_FIRST = 0x10  # class numbers of the leaves: host h is 1:(0x10 + h)
_CUT = 0x1000  # a cut leaf's queue has another number, so that putting it there drops what was queued
_MOST_BYTES_PER_S = 12.5e9  # "not shaped": 100 Gbit/s, beyond what veth carries


@dataclass(frozen=True, slots=True)
class LinkRates:
    """The link rates in force: the topology's, and the changes since."""

    topology: LabTopology
    links: Mapping[int, float] = field(default_factory=dict)
    pairs: Mapping[tuple[int, int], float] = field(default_factory=dict)
    cut: frozenset[tuple[int, int]] = frozenset()

    def link_bytes_per_s(self, host: int) -> float:
        """Return the rate of a host's link, each direction."""
        return min(_MOST_BYTES_PER_S, self.links.get(host, self.topology.rate_bytes_per_s))

    def pair_bytes_per_s(self, source: int, target: int) -> float:
        """Return the most that `source` can send to `target` when no other host sends."""
        top = self.topology
        between = top.between_bytes_per_s if top.island(source) != top.island(target) else _MOST_BYTES_PER_S
        written = {(p.source, p.target): p.bytes_per_s for p in top.exceptions}
        pair = self.pairs.get((source, target), written.get((source, target), _MOST_BYTES_PER_S))
        return min(pair, between, self.link_bytes_per_s(source), self.link_bytes_per_s(target))

    def others(self, host: int) -> list[int]:
        """Return all hosts but `host`; raises BadInput where there is no such host."""
        _known(host, self.topology.hosts)
        return [other for other in range(self.topology.hosts) if other != host]

    def slowed(self, host: int, rate_bytes_per_s: float, to: int | None) -> LinkRates:
        """Return a copy with another rate for a link, or for the pair (host, to) in both directions.

        Raises BadInput for an impossible rate or an unknown host.
        """
        check_rate(rate_bytes_per_s, key="slow")
        pairs = self._between(host, to)
        if to is None:
            return replace(self, links={**self.links, host: rate_bytes_per_s})
        return replace(self, pairs={**self.pairs, **dict.fromkeys(pairs, rate_bytes_per_s)})

    def severed(self, host: int, to: int | None) -> LinkRates:
        """Return a copy in which the host's link, or the pair, is cut."""
        return replace(self, cut=self.cut | self._between(host, to))

    def healed(self, host: int, to: int | None) -> LinkRates:
        """Return a copy with the topology's rates, and without cuts, for the host's link and pairs, or for the pair."""
        gone = self._between(host, to)
        links = {h: r for h, r in self.links.items() if h != host or to is not None}
        pairs = {p: r for p, r in self.pairs.items() if p not in gone}
        return replace(self, links=links, pairs=pairs, cut=self.cut - gone)

    def egress_lines(self, device: str, host: int, *, verb: str = "add") -> list[str]:
        """Return tc's lines for a host's own end; `verb` is add or change."""
        rate = self.link_bytes_per_s(host)
        leaves = [_Leaf(to, f"dst {address(to)}", self.pair_bytes_per_s(host, to)) for to in self.others(host)]
        return _tree(device, rate, leaves, verb=verb)

    def ingress_lines(self, host: int, *, verb: str = "add") -> list[str]:
        """Return tc's lines for the bridge's end of a host's link; `verb` is add or change."""
        rate = self.link_bytes_per_s(host)
        leaves = [_Leaf(o, f"src {address(o)}", rate, is_cut=(o, host) in self.cut) for o in self.others(host)]
        return _tree(port(host), rate, leaves, verb=verb)

    def uplink_lines(self) -> list[str]:
        """Return tc's lines for the links between the islands and the core."""
        rate = min(_MOST_BYTES_PER_S, self.topology.between_bytes_per_s)
        devices = [side(k) for k in range(len(self.topology.sizes())) for side in (uplink, downlink)]
        return [line for device in devices for line in _tree(device, rate, [], verb="add")]

    def _between(self, host: int, to: int | None) -> frozenset[tuple[int, int]]:
        others = self.others(host)
        if to is not None and to not in others:
            raise bad_input(
                wanted=f"another host than {host}, of 0 to {self.topology.hosts - 1}",
                got=str(to),
                do="name the other end of the link",
                key="host",
            )
        return frozenset(
            pair for other in ([to] if to is not None else others) for pair in ((host, other), (other, host))
        )


def peer_of(handle: str) -> int | None:
    """Return the host whose traffic the class "1:1a" carries, None if it is no leaf."""
    number = int(handle.partition(":")[2] or "0", 16) - _FIRST
    return number if number >= 0 else None


def _known(host: int, hosts: int) -> None:
    if host not in range(hosts):
        raise bad_input(
            wanted=f"a host from 0 to {hosts - 1}", got=str(host), do="give the number of one of its hosts", key="host"
        )


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One class: the peer it is for, how the kernel knows its packets, its most, and whether all of it is lost."""

    peer: int
    match: str
    ceil: float
    is_cut: bool = False


def _tree(device: str, rate: float, leaves: Sequence[_Leaf], *, verb: str) -> list[str]:
    share = max(125.0, rate / (len(leaves) + 1))
    lines = [f"qdisc add dev {device} root handle 1: htb default 2"] if verb == "add" else []
    lines += [
        f"class {verb} dev {device} parent 1: classid 1:1 htb {_rates(rate, rate)}",
        f"class {verb} dev {device} parent 1:1 classid 1:2 htb {_rates(share, rate)}",
        f"qdisc replace dev {device} parent 1:2 handle 2: bfifo limit {_queue_bytes(rate)}",
    ]
    for leaf in leaves:
        number = _FIRST + leaf.peer
        where, rates = f"parent 1:1 classid 1:{number:x}", _rates(min(share, leaf.ceil), leaf.ceil)
        handle, limit = (number + _CUT, 1) if leaf.is_cut else (number, _queue_bytes(rate))
        lines.append(f"class {verb} dev {device} {where} htb {rates}")
        lines.append(f"qdisc replace dev {device} parent 1:{number:x} handle {handle:x}: bfifo limit {limit}")
        if verb == "add":
            match = f"match ip {leaf.match}/32 flowid 1:{number:x}"
            lines.append(f"filter add dev {device} protocol ip parent 1: prio 1 u32 {match}")
    return lines


def _rates(rate: float, ceil: float) -> str:
    # A burst of 1 ms lets the kernel's timer be late without losing rate; less than a packet cannot be.
    burst, cburst = (max(1600, int(r * 0.001)) for r in (rate, ceil))
    return f"rate {int(rate * 8)}bit ceil {int(ceil * 8)}bit burst {burst} cburst {cburst} quantum 15140"


def _queue_bytes(rate: float) -> int:
    return int(min(64e6, max(262144.0, rate * 0.2)))  # 200 ms of the link, as home routers have it
