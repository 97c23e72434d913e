"""Tensors that are computed once: read again where all ranks have them, and made where one has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.run import kept_tensors
from gossamer.run.kept_tensors import KeptTensors, Tensors


def test_a_file_is_read_where_all_ranks_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [1.0]  # whether the other rank has its file
    channel: Any = None
    monkeypatch.setattr(kept_tensors, "gathered", lambda _, mine: torch.tensor([mine, others]))
    made = list[int]()

    def make() -> Tensors:
        made.append(len(made))
        return {"x": torch.full((3,), float(len(made)))}

    file = tmp_path / "x-1.safetensors"
    kept = KeptTensors(file=file, fits=lambda found: found["x"].shape == (3,), writes=True)
    first, is_there = kept.read_or_made(channel, make)
    assert not is_there and made == [0] and [one.name for one in tmp_path.iterdir()] == [file.name]
    again, is_there = kept.read_or_made(channel, make)
    assert is_there and made == [0] and torch.equal(again["x"], first["x"])
    others[0] = 0.0
    found, is_there = kept.read_or_made(channel, make)
    assert not is_there and found["x"].tolist() == [2.0] * 3
    others[0] = 1.0
    for data in (b"cut off", file.read_bytes()[:-1]):
        file.write_bytes(data)
        assert not kept.read_or_made(channel, make)[1]
        assert kept.read_or_made(channel, make)[1]
    other = KeptTensors(file=file, fits=lambda found: found["x"].shape == (4,), writes=False)
    assert not other.read_or_made(channel, make)[1]
    assert kept.read_or_made(channel, make)[1]  # what is written by nobody leaves the file
