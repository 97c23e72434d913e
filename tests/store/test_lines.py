"""Lines behind their checksums: what was written comes back, what was cut short or altered is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.store.checked_log import CheckedLog

WRITTEN = [{"step": i, "rate": 0.1 * i, "codes": "7f" * i} for i in range(4)]


@pytest.fixture
def lines(tmp_path: Path) -> CheckedLog:
    found = CheckedLog(tmp_path / "new" / "some.log")
    for values in WRITTEN:
        found.append(values, durable=True)
    return found


def test_what_was_written_comes_back(lines: CheckedLog) -> None:
    assert list(lines.read()) == WRITTEN
    assert list(CheckedLog(lines.path.with_name("none")).read()) == []


def test_a_line_cut_short_spoils_itself_alone(lines: CheckedLog) -> None:
    whole = lines.path.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[-1]) - 1):
        lines.path.write_bytes(whole[: -1 - cut])
        assert list(lines.read()) == [*WRITTEN[:3], None]
    lines.append({"step": 9})
    assert list(lines.read()) == [*WRITTEN[:3], None, {"step": 9}]


def test_every_flipped_bit_is_seen(lines: CheckedLog) -> None:
    whole = lines.path.read_bytes()
    first = len(whole.splitlines()[0])
    for bit in range(8 * first):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        lines.path.write_bytes(bytes(flipped))
        found = list(lines.read())
        assert found[0] is None and found[-3:] == WRITTEN[1:]


def test_what_is_no_object_is_no_line(lines: CheckedLog) -> None:
    import zlib

    text = b"[1, 2]"
    lines.path.write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    assert list(lines.read()) == [None]
    with pytest.raises(ValueError, match="JSON"):
        lines.append({"rate": float("nan")})
