"""What pauses cost on a link: known to the host, worked out by hand, and the same on all ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local

import pytest

from gossamer.comm import slow_start
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.slow_start import begins_slowly, restart_s, told
from gossamer.spec.network import Link, Network


@pytest.mark.parametrize(
    ("switch", "control", "slowly"),
    [("1", "cubic", True), ("1", "reno", True), ("0", "cubic", False), ("1", "bbr", False), (None, "cubic", False)],
)
def test_a_host_says_whether_it_begins_slowly(tmp_path: Path, switch: str | None, control: str, slowly: bool) -> None:
    folder = tmp_path / "net" / "ipv4"
    folder.mkdir(parents=True)
    (folder / "tcp_congestion_control").write_text(f"{control}\n")
    if switch is not None:
        (folder / "tcp_slow_start_after_idle").write_text(f"{switch}\n")
    assert begins_slowly(tmp_path) is slowly


@pytest.mark.parametrize("doublings", [1, 3, 8])
def test_what_is_lost_is_what_windows_of_all_round_trips_lack(doublings: int) -> None:
    """By hand: each round trip carries a window where the link would carry the full one."""
    trip_s, first = 0.05, 14480
    full = first * 2**doublings
    lacking = sum(full - first * 2**number for number in range(doublings))
    assert restart_s(trip_s, full / trip_s) == pytest.approx(trip_s * lacking / full)


def test_a_link_that_ten_segments_fill_loses_nothing() -> None:
    assert restart_s(1e-3, 14_000_000) == 0.0
    assert restart_s(0.0, 1e9) == 0.0


def test_the_farthest_rank_is_told_where_most_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """A latency is the median over pairs, and a hop waits for all."""
    monkeypatch.setattr(slow_start, "begins_slowly", lambda: True)
    links = Network(islands=((0,),), levels={"all": Link(latency_s=1e-4, bytes_per_s=7e7, hop_s=5e-2)})
    (channel,) = LocalChannel.world(1, patience_s=60.0)
    assert "up to 0.35 s longer" in told(channel, links, 1.0)


@pytest.mark.parametrize(
    ("slow", "latency_s", "compute_s", "said"),
    [
        ((0, 1), 25e-3, 0.6, "as root on every host"),
        ((1,), 25e-3, 0.6, "as root on the hosts of ranks [1]"),
        ((), 25e-3, 0.6, ""),
        ((0, 1), 1e-4, 0.6, ""),
        ((0, 1), 25e-3, 0.2, ""),
    ],
)
def test_all_ranks_tell_the_same(
    monkeypatch: pytest.MonkeyPatch, slow: tuple[int, ...], latency_s: float, compute_s: float, said: str
) -> None:
    links = Network(islands=((0, 1),), levels={"all": Link(latency_s=latency_s, bytes_per_s=7e7)})
    channels = LocalChannel.world(2, patience_s=60.0)
    host = local()

    def one(channel: LocalChannel) -> str:
        host.is_slow = channel.rank in slow
        return told(channel, links, compute_s / (1 + channel.rank))

    monkeypatch.setattr(slow_start, "begins_slowly", lambda: host.is_slow)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, channels))
    assert found[0] == found[1]
    assert said in found[0] and bool(found[0]) is bool(said)
    assert not said or "up to 0.35 s longer" in found[0]
