"""Every altered bit, byte and file is found, named, and passed by."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gossamer.spec.errors import BadInput, CheckpointMismatch
from gossamer.store.checkpoint import latest_good, open_checkpoint
from gossamer.store.checkpoint.manifest import seal
from store.crew import good, halves, model, read_manifest, save, whole

SHARD0, SHARD1, MANIFEST = "rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, by two ranks."""
    directory = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        good(save(directory, step, halves(model(step)), {"step": step}))
    return directory


@contextmanager
def altered(path: Path, data: bytes) -> Iterator[None]:
    """The file holds `data` for a while."""
    whole_data = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(whole_data)


def complaint(directory: Path, step: int = 2) -> str:
    """What opening and verifying says."""
    with pytest.raises(CheckpointMismatch) as caught:
        open_checkpoint(directory, step).verify()
    return str(caught.value)


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ (1 << bit % 8)]) + data[bit // 8 + 1 :]


@pytest.mark.parametrize("name", [SHARD0, SHARD1, MANIFEST])
def test_every_flipped_bit_is_found_and_its_file_named(saved: Path, name: str) -> None:
    path = saved / "step-00000002" / name
    data = path.read_bytes()
    for bit in random.Random(name).sample(range(len(data) * 8), 100):
        with altered(path, flipped(data, bit)):
            assert str(path) in complaint(saved), f"bit {bit}"
    open_checkpoint(saved, 2).verify()


def test_a_flip_in_data_names_the_slice_when_it_is_read_and_spares_the_others(saved: Path) -> None:
    folder = saved / "step-00000002"
    (part,) = [part for part in read_manifest(folder)["parts"] if part["file"] == SHARD1]
    for placed in part["slices"]:
        for bit in range(placed["bytes"][0] * 8, placed["bytes"][1] * 8, 97):
            path = folder / SHARD1
            with altered(path, flipped(path.read_bytes(), bit)):
                checkpoint = open_checkpoint(saved, 2)
                with pytest.raises(CheckpointMismatch, match=rf"{SHARD1}: slice {placed['name']}\["):
                    checkpoint.read(placed["name"])
                other = next(name for name in checkpoint.names() if name != placed["name"])
                assert torch.equal(checkpoint.read(other), model(2)[other])


@pytest.mark.parametrize("name", [SHARD0, SHARD1, MANIFEST])
def test_every_truncation_and_extension_is_found(saved: Path, name: str) -> None:
    path = saved / "step-00000002" / name
    data = path.read_bytes()
    for length in [0, 1, 7, 8, 9, len(data) // 2, len(data) - 1]:
        with altered(path, data[:length]):
            assert str(path) in complaint(saved)
    for more in (b"\0", b" ", b"\n"):
        with altered(path, data + more):
            assert str(path) in complaint(saved)


def test_a_truncated_shard_says_which_slice_is_lost(saved: Path) -> None:
    path = saved / "step-00000002" / SHARD0
    data = path.read_bytes()
    last = read_manifest(path.parent)["parts"][0]["slices"][-1]
    with altered(path, data[:-1]):
        assert f"{len(data) - 1} bytes long, {len(data)} bytes were written; the first missing slice is" in complaint(
            saved
        )
        assert last["name"] in complaint(saved)


def test_a_missing_file_is_named(saved: Path) -> None:
    for name in (SHARD1, MANIFEST):
        path = saved / "step-00000002" / name
        data = path.read_bytes()
        path.unlink()
        assert str(path) in complaint(saved)
        path.write_bytes(data)


def test_swapped_shards_of_one_size_are_found(tmp_path: Path) -> None:
    layers = [torch.randn(4, 4) for _ in range(2)]
    good(save(tmp_path, 1, [[whole(f"layer{i}", layer)] for i, layer in enumerate(layers)]))
    good(save(tmp_path, 2, [[whole("state", layer, i)] for i, layer in enumerate(layers)]))
    for step in (1, 2):
        folder = tmp_path / f"step-0000000{step}"
        one, two = (folder / SHARD0), (folder / SHARD1)
        assert one.stat().st_size == two.stat().st_size
        swapped = two.read_bytes()
        two.write_bytes(one.read_bytes())
        one.write_bytes(swapped)
        assert SHARD0 in complaint(tmp_path, step)


def test_data_under_a_swapped_header_are_found(tmp_path: Path) -> None:
    """Headers in place, bodies exchanged: only the checksums of the data can tell."""
    layers = [torch.randn(4, 4) for _ in range(2)]
    good(save(tmp_path, 1, [[whole("state", layer, i)] for i, layer in enumerate(layers)]))
    one, two = (tmp_path / "step-00000001" / name for name in (SHARD0, SHARD1))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(first[:-64] + second[-64:])
    two.write_bytes(second[:-64] + first[-64:])
    with pytest.raises(CheckpointMismatch, match=rf"{SHARD0}: slice state@rank0"):
        open_checkpoint(tmp_path, 1).read("state", replica=0)


def test_equal_data_under_another_identity_have_another_checksum(tmp_path: Path) -> None:
    same = torch.ones(4, 4)
    pieces = [whole("a", same), whole("b", same), whole("a", same, 0), whole("c", same.to(torch.int32))]
    good(save(tmp_path, 1, [[*pieces, whole("d", torch.ones(16)), whole("e", torch.ones(2, 8))]]))
    sums = [placed["crc32"] for placed in read_manifest(tmp_path / "step-00000001")["parts"][0]["slices"]]
    assert len(set(sums)) == 6


def test_a_shard_of_another_step_is_found(saved: Path) -> None:
    path = saved / "step-00000002" / SHARD0
    with altered(path, (saved / "step-00000001" / SHARD0).read_bytes()):
        assert str(path) in complaint(saved)


def test_a_foreign_manifest_is_found(saved: Path, tmp_path: Path) -> None:
    path = saved / "step-00000002" / MANIFEST
    with altered(path, (saved / "step-00000001" / MANIFEST).read_bytes()):
        assert "belongs to step 1" in complaint(saved)
    good(save(tmp_path, 2, halves(model(99)), {"step": 2}))  # same run layout, same step, other numbers
    with altered(path, (tmp_path / "step-00000002" / MANIFEST).read_bytes()):
        assert "has checksum" in complaint(saved)
    body = read_manifest(path.parent)
    for foreign in (
        [],
        {"step": 2},
        {"step": 2, "parts": [{}]},
        {"step": 2, "parts": [{**body["parts"][0], "slices": 3}]},
    ):
        with altered(path, seal(foreign)):
            assert str(path) in complaint(saved)
    body["parts"][0]["file"] = "../step-00000001/" + SHARD0
    with altered(path, seal(body)):
        assert "is no file of this folder" in complaint(saved)


def test_a_manifest_of_a_later_format_is_refused_with_both_versions(saved: Path) -> None:
    path = saved / "step-00000002" / MANIFEST
    later = json.loads(path.read_bytes())
    later["gossamer_checkpoint"] = 2
    with altered(path, json.dumps(later).encode()):
        assert "has format 2, this version reads format 1" in complaint(saved)


def test_the_previous_good_one_is_found_and_the_bad_one_named(saved: Path) -> None:
    found, problems = latest_good(saved)
    assert found.step == 2 and problems == {}
    path = saved / "step-00000002" / SHARD1
    data = path.read_bytes()
    with altered(path, flipped(data, len(data) * 8 - 5)):
        found, problems = latest_good(saved)
        assert found.step == 1 and found.meta == {"step": 1}
        assert problems.keys() == {2} and "step 2 is bad" in problems[2] and f"{SHARD1}: slice " in problems[2]


def test_no_good_one_at_all_is_said_with_every_reason(saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(saved, directory)
    for step in (1, 2):
        (directory / f"step-0000000{step}" / MANIFEST).write_bytes(b"{}")
    with pytest.raises(CheckpointMismatch, match=r"step 2 is bad.*step 1 is bad"):
        latest_good(directory)


def test_the_newest_good_one_up_to_a_step_with_a_beat_per_file(saved: Path) -> None:
    beats: list[int] = []
    found, problems = latest_good(saved, until=1, beat=lambda: beats.append(1))
    assert (found.step, problems, len(beats)) == (1, {}, 2)
    with pytest.raises(BadInput, match="wanted a checkpoint of a step up to 0, got none"):
        latest_good(saved, until=0)
