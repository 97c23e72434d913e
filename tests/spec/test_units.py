"""Numbers as people read and write them."""

from __future__ import annotations

import re

import pytest

from gossamer.spec.errors import BadInput
from gossamer.spec.suggest import nearest
from gossamer.spec.units import read_rate, show_bytes, show_gib, show_rate, show_seconds


@pytest.mark.parametrize("text", ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "56 kbit/s", "300 bit/s", "2.5 Gbit/s"])
def test_a_rate_survives_the_round_trip(text: str) -> None:
    assert show_rate(read_rate(text)) == text


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("100mbit", 12_500_000.0),
        ("1Gbit/s", 125_000_000.0),
        (" 8 bit ", 1.0),
        ("0.5kbit/s", 62.5),
        ("1tbit", 1.25e11),
        ("1Gbps", 125_000_000.0),
        ("100 Mbps", 12_500_000.0),
        (".5kbps", 62.5),
        ("10mbitps", 1_250_000.0),
    ],
)
def test_rates_are_read_in_every_usual_form(text: str, bytes_per_s: float) -> None:
    assert read_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    "text", ["", "100", "fast", "100mb", "-3mbit", "mbit", "1 mbit x", "100 MBps", "1.2.3mbit", ".mbit"]
)
def test_what_is_no_rate_is_told(text: str) -> None:
    with pytest.raises(
        BadInput, match=r"between: wanted a rate such as 100mbit or 1gbit, got " + re.escape(repr(text))
    ):
        read_rate(text, key="between")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1536, "1.54 kB"), (12_500_000, "12.5 MB"), (3e15, "3e+03 TB")]
)
def test_bytes(count: float, text: str) -> None:
    assert show_bytes(count) == text


@pytest.mark.parametrize(("count", "text"), [(25769803776, "24.0 GiB"), (2**30, "1.0 GiB"), (300 * 2**20, "300 MiB")])
def test_memory(count: float, text: str) -> None:
    assert show_gib(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (1, "1 s"), (59.04, "59 s"), (75, "1m15s"), (7500, "2h05m"), (3599.9, "1h00m")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


def test_nearest_offers_what_is_close_else_all() -> None:
    assert nearest("bach", ["batch", "steps"]) == "did you mean 'batch'?"
    assert nearest("xyz", ["b", "a"]) == "known: a, b"
    assert nearest("xyz", []) == "known: none"
