"""Text forms of numbers with units: bytes, seconds, bit rates."""

from __future__ import annotations

import math
import re

from gossamer.spec.errors import bad_input


def show_bytes(count: float) -> str:
    """Return bytes in powers of ten, as networks count them: 1536 -> "1.54 kB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def show_gib(count: float) -> str:
    """Return a memory size in powers of two: 25769803776 -> "24.0 GiB"."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kKMGT]?)(i?)B?\s*")


def read_size(written: str | int, *, key: str = "") -> int:
    """Parse a size into bytes: "4GiB" -> 4294967296, "500 MB" -> 500_000_000, 1024 -> 1024; raises BadInput."""
    match = _SIZE.fullmatch(str(written))
    if match is None or float(match.group(1)) <= 0:
        raise bad_input(wanted="a size such as 500MB or 4GiB", got=repr(written), do="write number and unit", key=key)
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}[match.group(2).lower()]
    return int(float(match.group(1)) * (1024 if match.group(3) else 1000) ** power)


def show_seconds(seconds: float) -> str:
    """Return a duration as text: 0.0123 -> "12.3 ms"; 75 -> "1m15s"; 7500 -> "2h05m"."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def show_rate(bytes_per_s: float) -> str:
    """Return the bandwidth of a link in bits: 12_500_000 -> "100 Mbit/s"."""
    bits = bytes_per_s * 8
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"):
        if bits < 1000 or unit == "Gbit/s":
            return f"{bits:.3g} {unit}"
        bits /= 1000
    raise AssertionError


# "Mbps" is megabits; "MBps" and "mb" may mean megabytes, so they are refused.
_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kKmMgGtT]?)(?:(?i:bit(?:/s|ps)?)|bps)\s*")


def read_rate(text: str, *, key: str = "") -> float:
    """Parse a bandwidth into bytes per second: "100mbit", "100 Mbps" -> 12_500_000.0; raises BadInput."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise bad_input(wanted="a rate such as 100mbit or 1gbit", got=repr(text), do="write number and unit", key=key)
    scale = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[match.group(2).lower()]
    return float(match.group(1)) * scale / 8
