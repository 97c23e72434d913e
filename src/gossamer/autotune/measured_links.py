"""The links as probes find them, and whether they have changed since an exchange was chosen for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gossamer.autotune.bandwidth_monitor import differ
from gossamer.autotune.link_use import links_of_islands
from gossamer.comm.channel import Channel
from gossamer.comm.link_probe import probe
from gossamer.spec.network import Link, Network

_Islands = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class MeasuredLinks:
    """What probes have found; every rank has the same, as all of them probe together.

    `hosts`: the ranks of each host; empty where unknown.
    """

    hosts: _Islands = ()
    _chosen_for: Mapping[str, Link] = field(default_factory=dict)  # the levels; empty: not known
    _is_unsure: bool = False  # whether they may have changed since, unseen
    _contradicted: _Islands = ()  # islands that were found last, of those that the plan does not have

    def find(self, channel: Channel, *, ways: bool = False) -> Network:
        """Measure the links. It takes some seconds. All ranks call it together."""
        return probe(channel, ways=ways, hosts=self.hosts)

    def choose_for(self, levels: Mapping[str, Link], *, may_change: bool) -> None:
        """Take note of the links that an exchange is chosen for; `may_change`: look at them once more."""
        self._chosen_for, self._is_unsure = levels, may_change

    def doubt(self, levels: Mapping[str, Link]) -> None:
        """Take note that an earlier start has chosen for links that may be others now; empty: it has not said which."""
        self.choose_for(levels, may_change=bool(levels))

    def look_again(self, channel: Channel, islands: _Islands) -> Network | None:
        """Measure the links once more at the end of the first window after a choice, if asked to; None: they are alike.

        Later windows are compared with that one: links that heal, or fail again, within it are in what is compared, so
        no later window would show it. `islands`: of the plan. All ranks call it together.
        """
        if not self._is_unsure:
            return None
        self._is_unsure = False
        links = self.find(channel)
        is_new = not islands and links.has_islands
        return links if is_new or differ(self._chosen_for, links_of_islands(links, islands).levels) else None

    def contradicts(self, links: Network, islands: _Islands) -> bool:
        """Return whether links show other islands than `islands`, those of the plan, and other ones than before."""
        shown = links.islands
        if not links.has_islands or set(shown) in (set(islands), set(self._contradicted)):
            return False
        self._contradicted = shown
        return True
