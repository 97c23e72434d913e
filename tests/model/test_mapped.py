"""A model that is built whole beyond a rank's share of the memory lies in files that leave nothing behind."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer.model import mapped_storage as room
from gossamer.model.mapped_storage import mapped
from gossamer.model.source.factory import Factory
from gossamer.model.split.constructor_state import tensors_of
from gossamer.partition import model_provider
from gossamer.partition.model_provider import OriginSource
from gossamer.spec.errors import BadInput

MIB = 1 << 20


def large() -> nn.Module:
    """Eight layers of 4 MiB; each but the first begins as a copy of the first, and a scale is read from it."""
    net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    first = net[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        for layer in list(net)[1:]:
            assert isinstance(layer, nn.Linear)
            layer.weight.add_(first.weight * float(first.weight.std()))
    return net


def files_mapped() -> int:
    return len(
        {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "gossamer-model" in line}
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux to see what is mapped")
def test_numbers_are_the_same_and_files_have_no_names(folder: Path) -> None:
    before = files_mapped()
    torch.manual_seed(1)
    expected = large()
    torch.manual_seed(1)
    with mapped(10 * MIB):
        found = large()
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), found.parameters(), strict=True))
    assert files_mapped() - before >= 6, "two of eight fit"
    assert not list(folder.iterdir())
    found(torch.ones(1, 1024)).sum().backward()
    del found
    gc.collect()
    assert files_mapped() == before


def test_parts_of_such_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_provider, "memory", lambda: (8 * MIB, 8 * MIB))
    given = OriginSource(Factory(f"{__name__}:large"), 3)
    expected = tensors_of(given.whole())
    given.share(2)
    assert "a number is read from 0.weight" in given.construction().reason
    before = files_mapped()
    part = given.part(frozenset({"3.weight", "7.weight"}))
    gc.collect()
    assert files_mapped() == before, "what is held is in memory"
    ours = dict(part.named_parameters())
    assert torch.equal(ours["3.weight"], expected["3.weight"])
    assert ours["2.weight"].untyped_storage().nbytes() == 4
    assert not list(folder.iterdir())


def test_a_disk_without_room_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room.os, "posix_fallocate", full)
    with pytest.raises(BadInput, match=r"No space left on device: set TMPDIR"), mapped(0):
        torch.zeros(MIB)
    assert not list(folder.iterdir())
