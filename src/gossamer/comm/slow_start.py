"""What a pause costs on a link: after one, TCP begins slowly again, as Linux does by default.

A connection that sends nothing for longer than its retransmission timeout (0.2 s and a round trip) loses its window
(RFC 5681, section 4.1) and doubles it in every round trip from ten segments on. A step pauses that long while it
computes its forward pass. Linux has a switch for it, which only root can turn, so Gossamer says what it would gain.
"""

from __future__ import annotations

import math
from pathlib import Path

from gossamer.comm.channel import Channel, gathered
from gossamer.spec.network import Link, Network

SWITCH = "net.ipv4.tcp_slow_start_after_idle"
_SETTINGS = Path("/proc/sys")
_FIRST_BYTES = 10 * 1448  # of a window: ten segments (RFC 6928)
_PACED = "bbr"  # paces what it sends by what the path has carried, and begins as it ended
_TIMEOUT_S = 0.2  # of a connection, and a round trip
_WORTH_TELLING_S = 0.02


def begins_slowly(settings: Path = _SETTINGS) -> bool:
    """Return whether TCP on this host begins slowly after a pause; False where the host does not say."""
    return _said(settings, SWITCH) == "1" and not _said(settings, "net.ipv4.tcp_congestion_control").startswith(_PACED)


def restart_s(round_trip_s: float, bytes_per_s: float) -> float:
    """Return what a message of many bytes takes longer after a pause.

    A window that fills the link holds w times the first one. It is reached after log2 w round trips, in which the link
    has carried w - 1 first windows, 1 - 1 / w of a round trip.
    """
    times = bytes_per_s * round_trip_s / _FIRST_BYTES
    return round_trip_s * (math.log2(times) - 1 + 1 / times) if times > 1 else 0.0


def told(channel: Channel, links: Network, compute_s: float) -> str:
    """Return what pauses cost, and what to do, where they cost at least 20 ms; "" elsewhere.

    `compute_s`: what a step computes on this rank, and so the longest that its links may rest. The same on all ranks,
    which call it together.
    """
    lost_s, trip_s = max((restart_s(_trip_s(link), link.bytes_per_s), _trip_s(link)) for link in links.levels.values())
    rows = gathered(channel, [float(begins_slowly()), compute_s])
    ranks = [rank for rank, is_slow in zip(channel.levels.everyone, rows[:, 0].tolist(), strict=True) if is_slow]
    if not ranks or lost_s < _WORTH_TELLING_S or float(rows[:, 1].max()) < _TIMEOUT_S + trip_s:
        return ""
    where = "every host" if len(ranks) == len(rows) else f"the hosts of ranks {ranks}"
    return (
        f"after a pause of {_TIMEOUT_S + trip_s:.2f} s TCP sends slowly again: a step's first messages take up to "
        f"{lost_s:.2f} s longer. To avoid that, run `sysctl -w {SWITCH}=0` as root on {where}"
    )


def _trip_s(link: Link) -> float:
    """Return the round trip of the farthest ranks: a latency is the median over pairs, and a hop waits for all."""
    return max(2 * link.latency_s, link.hop_s)


def _said(settings: Path, switch: str) -> str:
    try:
        return settings.joinpath(*switch.split(".")).read_text(encoding="utf-8").strip()
    except OSError:  # another system, or a container that hides it
        return ""
