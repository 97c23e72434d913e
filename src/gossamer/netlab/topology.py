"""The topology of an emulated network: hosts, link rates, islands, delay, processor shares."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate

from gossamer.spec.errors import BadInput, bad_input

MOST_HOSTS = 200  # one /24, and filters are a list that the kernel walks per packet
LEAST_RATE_BYTES_PER_S = 1000.0
MOST_DELAY_S = 10.0


@dataclass(frozen=True, slots=True)
class PairRate:
    """A limit in bytes/s on what `source` may send to `target` (one direction)."""

    source: int
    target: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LabTopology:
    """The topology of an emulated network; raises BadInput where it cannot be built.

    `rate_bytes_per_s`: every host's link, each direction (inf: not shaped).
    `islands`: hosts per island, in host order; () is one island. `between_bytes_per_s`: the uplink of an island,
    each direction, shared by its hosts. `delay_s`: one way, between any two hosts (a round trip takes twice that).
    `cpu`: cores per host, scaled down together where they exceed the machine; () sets no quota.
    `memory_bytes`: one limit for all hosts or one per host; () sets none. `exceptions`: pairs slower than their links.
    """

    hosts: int
    _: KW_ONLY
    rate_bytes_per_s: float = math.inf
    islands: tuple[int, ...] = ()
    between_bytes_per_s: float = math.inf
    delay_s: float = 0.0
    cpu: tuple[float, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    exceptions: tuple[PairRate, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise bad_input(
                wanted=f"1 to {MOST_HOSTS} hosts",
                got=str(self.hosts),
                do=f"set hosts to 1 to {MOST_HOSTS}",
                key="hosts",
            )
        check_rate(self.rate_bytes_per_s, key="rate")
        check_rate(self.between_bytes_per_s, key="inter-rate")
        self._check_islands()
        if not 0 <= self.delay_s <= MOST_DELAY_S:
            raise bad_input(
                wanted=f"a delay of 0 to {MOST_DELAY_S * 1000:.0f} ms",
                got=f"{self.delay_s * 1000:g} ms",
                do="lower delay, or give 0 for none",
                key="delay",
            )
        self._check_shares()
        for pair in self.exceptions:
            self._check_pair(pair)

    def island(self, host: int) -> int:
        """Return the island of `host`."""
        return next(k for k, end in enumerate(accumulate(self.sizes())) if host < end)

    def sizes(self) -> tuple[int, ...]:
        """Return the hosts per island; one island of all where none are named."""
        return self.islands or (self.hosts,)

    @property
    def has_uplinks(self) -> bool:
        """Return whether there are several islands, with an uplink each."""
        return len(self.sizes()) > 1

    def memory(self) -> tuple[int, ...]:
        """Return the memory limit of every host in bytes, or () for none."""
        return self.memory_bytes * self.hosts if len(self.memory_bytes) == 1 else self.memory_bytes

    def _check_islands(self) -> None:
        if sum(self.sizes()) != self.hosts or min(self.sizes()) < 1:
            written = "+".join(str(size) for size in self.islands)
            raise bad_input(
                wanted=f"island sizes that sum to {self.hosts} hosts",
                got=f"{written} = {sum(self.islands)}",
                do="change islands or hosts",
                key="islands",
            )
        if math.isfinite(self.between_bytes_per_s) and not self.has_uplinks:
            raise BadInput("a rate between islands needs at least two islands: name them, e.g. 2x2", key="inter-rate")

    def _check_shares(self) -> None:
        if self.cpu and (len(self.cpu) != self.hosts or not all(0 < c < math.inf for c in self.cpu)):
            raise bad_input(
                wanted=f"{self.hosts} positive numbers of cores, one per host",
                got=str(list(self.cpu)),
                do="give one number per host (an idle core of a host without a quota would speed up the others)",
                key="cpu",
            )
        if self.memory_bytes and (len(self.memory_bytes) not in (1, self.hosts) or min(self.memory_bytes) < 2**22):
            raise bad_input(
                wanted=f"one memory limit or {self.hosts}, each at least 4 MiB",
                got=f"{list(self.memory_bytes)} bytes",
                do=f"give one limit for all hosts, or {self.hosts}",
                key="memory",
            )

    def _check_pair(self, pair: PairRate) -> None:
        known = range(self.hosts)
        if pair.source not in known or pair.target not in known or pair.source == pair.target:
            raise bad_input(
                wanted=f"two different hosts of 0 to {self.hosts - 1}",
                got=f"{pair.source} and {pair.target}",
                do="name two different hosts in the exception",
                key="exceptions",
            )
        check_rate(pair.bytes_per_s, key="exceptions")


def check_rate(bytes_per_s: float, *, key: str) -> None:
    """Raise BadInput for a rate that no link can have."""
    if not bytes_per_s >= LEAST_RATE_BYTES_PER_S:  # also catches nan
        raise bad_input(
            wanted=f"a rate of at least {LEAST_RATE_BYTES_PER_S * 8 / 1000:.0f} kbit/s",
            got=f"{bytes_per_s * 8:g} bit/s",
            do="raise the rate (to stop a link, use the event cut)",
            key=key,
        )
