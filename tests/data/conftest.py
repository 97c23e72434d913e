"""A frozen slice of text, the same on every machine, and the corpora made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

_WORDS = (
    *("the", "of", "and", "to", "link", "byte", "rank", "step", "model", "token", "carries", "a", "thread", "between"),
    *("hosts", "caf\u00e9", "na\u00efve", "\u4e16\u754c", "\U0001f578"),
)


def frozen_text(number: int, words: int) -> str:
    """Deterministic nonsense: a linear congruence picks the words."""
    state, out = 12345 + number, []
    for _ in range(words):
        state = (1103515245 * state + 12345) % 2**31
        out.append(_WORDS[(state >> 16) % len(_WORDS)] + ("\n" if state % 97 < 9 else " "))
    return f"document {number}\r\n" + "".join(out)


@pytest.fixture
def frozen(tmp_path: Path) -> Path:
    """24 documents of unequal length in two folders, about 40 kB."""
    folder = tmp_path / "frozen"
    for number in range(24):
        file = folder / ("even" if number % 2 == 0 else "odd") / f"{number:02d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(frozen_text(number, 40 + 37 * number % 560).encode("utf-8"))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
