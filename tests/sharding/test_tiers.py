"""Model states in tiers: limits, bad input, what a killed run leaves, and bytes that are known before."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import gossamer
from gossamer import sharding
from gossamer.comm.bucket import Layout
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.comm_thread import CommStep
from gossamer.comm.message import ProcessGroups
from gossamer.partition.plan_file import make_plan
from gossamer.run import tiers as run_tiers
from gossamer.run.tiers import _check_disks
from gossamer.sharding import (
    RowPartition,
    TieredStates,
    TierLayout,
    TierLimits,
    TierShares,
    UnshardOrder,
    UpdateProgress,
    UpdateTerms,
    closing_order,
    read_tiers,
    remove_left_over,
    tier_path,
)
from gossamer.sharding._tier_limits import TierAccount
from gossamer.sharding._tier_shares import UnitUnderWay, compacted
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, CheckpointMismatch, PeerLost, RunFailed
from gossamer.spec.units import read_size
from gossamer.store import tier_file
from gossamer.store.checkpoint import open_checkpoint
from gossamer.store.tier_file import PAGE, TierFile, TierJournal, disk_number, file_system, is_far, page_buffer

WIDTH = 256


def die(gradient: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(gradient: Tensor) -> None:
    raise ValueError("no such word")


class Blocks(nn.Module):
    """Blocks of 256 KiB each, so that there are several buckets. A forward in training may be the last: `die_in`."""

    def __init__(self, die_in: int = -1, fault: Callable[[Tensor], None] = die) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(24))
        self.head = nn.Linear(WIDTH, 32)
        self.die_in, self.fault, self.forwards = die_in, fault, 0

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for i, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            if i == 4 and torch.is_grad_enabled() and self.training:
                self.forwards += 1
                if self.forwards == self.die_in:
                    x.register_hook(self.fault)  # in the middle of backward
        return self.head(x)


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (index + torch.arange(9)) % 32
        return {"input_ids": ids, "labels": ids}


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs set the allocator by this variable."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", os.environ.get("THP_MEM_ALLOC_ENABLE", "0"))


def trained(
    folder: Path,
    module: nn.Module,
    limits: dict[str, Any] | None,
    savers: Sequence[Any] = (),
    resume: str | None = None,
    **train: Any,
) -> dict[str, Any]:
    written = "none" if limits is None else {"tiers": {"directory": str(folder / "tiers"), **limits}}
    steps = {"steps": 3, "batch": 4, "evaluate_every": 0, "checkpoint_every": 0, "max_grad_norm": 0, **train}
    run = {"directory": str(folder / "runs"), "display": "quiet"}
    config = {
        "run": run,
        "data": {"sequence": 9},
        "train": steps,
        "plan": {"sharding": written, "savers": list(savers)},
    }
    config = {**config, "machines": {"threads": 1}}
    done = gossamer.train(module, Tokens(), config, resume=resume)
    return {**done, "directory": str(done.run.path)}


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_the_smallest_limits_work_and_one_byte_less_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float
) -> None:
    """Each is named by the refusal of less, and no account exceeds it. The bytes that a step reads are as planned."""
    seen: list[TieredStates] = []
    close = TieredStates.close
    monkeypatch.setattr(TieredStates, "close", lambda self: (seen.append(self), close(self))[1])
    limits = {"device": "1", "host": "1", "file": "1"}
    for tier in limits:
        with pytest.raises(BadInput, match=f"tiers.{tier}") as refused:
            trained(tmp_path, Blocks(), limits, max_grad_norm=clip)
        found = re.search(rf"set {tier} to (\d+)", str(refused.value))
        assert found is not None
        limits[tier] = found.group(1)
    assert not (tmp_path / "tiers").exists()  # refused before anything is written
    ours, plain = Blocks(), Blocks()
    trained(tmp_path, ours, limits, max_grad_norm=clip)
    trained(tmp_path, plain, None, max_grad_norm=clip)
    for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other), name
    used = seen[-1].limits
    assert used.device.peak <= used.device.limit < sum(p.nbytes for p in plain.parameters()) // 4
    assert used.host.peak <= used.host.limit
    assert used.file.peak == used.file.limit
    assert len(seen[-1].layout.trained) > 3
    read, written = seen[-1].layout.step_bytes({})
    assert seen[-1].progress.moved_bytes == 3 * (read + written)


class Wide(nn.Module):
    """Two blocks with large layers, one of which other code reads as well, beside an embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(WideBlock() for _ in range(2))
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.seen = nn.Linear(64, 1030), nn.Linear(1030, 64, bias=False), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.seen(self.down(torch.tanh(self.up(x)))) * self.seen.weight.mean()


def smallest(folder: Path, make: Callable[[], nn.Module], savers: Sequence[Any], tier: str) -> int:
    limits = {"device": "64MB", "host": "64MB", "file": "64MB", tier: "1"}
    with pytest.raises(BadInput, match=f"tiers.{tier}") as refused:
        trained(folder, make(), limits, savers)
    found = re.search(rf"set {tier} to (\d+)", str(refused.value))
    assert found is not None
    return int(found.group(1))


def test_of_a_layer_in_tiles_two_tiles_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-equal to the same tiles without tiers, within the smallest `device`."""
    seen: list[TieredStates] = []
    close = TieredStates.close
    monkeypatch.setattr(TieredStates, "close", lambda self: (seen.append(self), close(self))[1])
    savers = [{"tiling": {"linears": "*", "tiles": 8}}]
    whole, tiled = (smallest(tmp_path / "least", Wide, given, "device") for given in ([], savers))
    large, pages = 1030 * 64 * 4, 2 * PAGE
    assert tiled <= whole - 2 * large + 2 * (large // 8 + pages)
    plain, without, ours = Wide(), Wide(), Wide()
    trained(tmp_path / "0", plain, None)
    trained(tmp_path / "1", without, None, savers)
    limits = {"device": str(tiled), "host": "64MB", "file": "64MB"}
    done = trained(tmp_path / "2", ours, limits, savers, checkpoint_every=2)
    for (name, one), other, first in zip(
        without.named_parameters(), ours.parameters(), plain.parameters(), strict=True
    ):
        assert torch.equal(one, other), name
        assert torch.allclose(one, first, rtol=1e-3, atol=1e-4), name
    assert seen[-1].limits.device.peak <= tiled
    reader = seen[-1].parameters.tiles
    assert reader is not None
    assert sorted(reader.params) == [f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("down", "up")]
    known = open_checkpoint(Path(done["directory"]) / "checkpoints", 2)
    assert known.read("model/layers.0.up.weight").isfinite().all()
    with torch.no_grad():
        assert ours(torch.arange(4)[None]).isfinite().all()  # after the run it is a model as before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and direct reads as on Linux")
def test_a_run_that_is_killed_leaves_the_state_after_its_last_step(tmp_path: Path) -> None:
    """In its third step, when the last blocks are updated already: what is left is the state after two."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; from sharding import test_tiers as t\n"
        "t.trained(Path(sys.argv[1]), t.Blocks(die_in=3), dict(device='64MB', host='64MB', file='64MB'), steps=9)"
    )
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), tests], check=False, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    check_state_after_two(tmp_path)
    with pytest.raises(CheckpointMismatch, match="no journal"):
        read_tiers(tmp_path / "nothing")


def check_state_after_two(folder: Path) -> None:
    """What is left is what plain training has after two of its steps."""
    updates, left = read_tiers(folder / "tiers")
    assert updates == 2
    plain = Blocks()
    run = trained(folder / "plain", plain, None, steps=9, checkpoint_every=1, keep_checkpoints=9)
    known = open_checkpoint(Path(run["directory"]) / "checkpoints", updates)
    assert len(left) == 3 * len(list(plain.parameters()))
    for (name, slot), one in left.items():
        assert torch.equal(one, known.read(f"optim/{slot}/{name}" if slot else f"model/{name}")), name
    with pytest.raises(CheckpointMismatch, match="wanted the state after 1 updates, it holds the one after 2"):
        read_tiers(folder / "tiers", updates=1)  # the third step may have written over it


def test_a_run_that_fails_leaves_the_state_after_its_last_step(tmp_path: Path) -> None:
    """Whatever the error is. In its first step there is nothing to leave, and the next run has the directory."""
    limits = {"device": "64MB", "host": "64MB", "file": "64MB"}
    with pytest.raises(ValueError, match="no such word"):
        trained(tmp_path, Blocks(3, fail), limits, steps=9)
    check_state_after_two(tmp_path)
    (records,) = tmp_path.glob("runs/*/records.jsonl")
    assert "the state after the last step stays in" in records.read_text()
    with pytest.raises(ValueError, match="no such word"):
        trained(tmp_path, Blocks(1, fail), limits, steps=9)
    assert list((tmp_path / "tiers").iterdir()) == []


@pytest.mark.parametrize("place", ["TierFile.write", "TierFile.read", "TierFile.settle", "TierJournal.write"])
def test_a_disk_that_fails_in_the_third_step_leaves_the_state_after_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    kind, name = getattr(tier_file, place.partition(".")[0]), place.partition(".")[2]
    real, begun, begin = getattr(kind, name), list[UpdateTerms](), TieredStates.begin

    def counted(self: TieredStates, terms: UpdateTerms) -> None:
        begun.append(terms)
        begin(self, terms)

    def failing(self: Any, *given: Any) -> Any:
        if len(begun) == 3:
            raise OSError("no medium")
        return real(self, *given)

    monkeypatch.setattr(TieredStates, "begin", counted)
    with monkeypatch.context() as patched:
        patched.setattr(kind, name, failing)
        with pytest.raises(OSError, match="no medium"):
            trained(tmp_path, Blocks(), {"device": "64MB", "host": "64MB", "file": "64MB"}, steps=9)
    check_state_after_two(tmp_path)


def test_a_run_that_cannot_begin_leaves_no_file_and_lets_the_directory_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a disk that fails, or Ctrl-C while the first states are written."""

    def failing(file: TierFile) -> float:
        raise OSError("no medium")

    limits = {"device": "64MB", "host": "64MB", "file": "64MB"}
    with monkeypatch.context() as patched:
        patched.setattr("gossamer.sharding._tiered_states.mixed_rate", failing)
        with pytest.raises(OSError, match="no medium"):
            trained(tmp_path, Blocks(), limits)
    assert list((tmp_path / "tiers").iterdir()) == []
    trained(tmp_path, Blocks(), limits, steps=1)


def test_what_tiers_do_not_go_with_is_refused_by_name(tmp_path: Path) -> None:
    limits = {"device": "64MB", "host": "64MB", "file": "64MB"}
    beside: list[dict[str, Any]] = [
        {"plan": {"exchange": {"error_feedback": {"topk": {"fraction": 0.1}}}}},
        {"plan": {"sync": {"diloco": {}}}},
        {"plan": {"mesh": {"pipe": 2}, "sharding": {"shard_group": "all"}}},
        {"plan": {"mesh": {"pipe": 2}, "pipeline_schedule": {"split_backward": {}}}},
        {"model": {"adapter": "lora"}},
        {"model": {"compile": True}},
        {"plan": {"sharding": {"shard_group": "all"}, "savers": [{"tiling": {"linears": "*", "tiles": 2}}]}},
    ]
    for given in beside:
        plan = dict(given.get("plan", {}))
        more = plan.pop("sharding", {})
        there = {"plan": {"sharding": {"tiers": {**limits, "directory": str(tmp_path), **more}}, **plan}}
        config = RunConfig.model_validate({**given, **there})
        ranks = 2 if "mesh" in given.get("plan", {}) else 1
        with pytest.raises(BadInput, match="tiers"):
            make_plan(config, Blocks(), ranks=ranks, device=torch.device("cpu"))
    with pytest.raises(BadInput, match="a size such as"):
        trained(tmp_path, Blocks(), {**limits, "host": "much"})
    with pytest.raises(BadInput, match="directory"):
        sharding.build({"tiers": limits})


def test_an_account_never_exceeds_its_limit() -> None:
    account = TierAccount("host", 10)
    account.take(6)
    assert not account.try_take(5)
    with pytest.raises(AssertionError, match="exceed 10"):
        account.take(5)
    account.give(6)
    assert account.try_take(10)
    assert account.peak == 10


@pytest.mark.parametrize(
    ("written", "size"), [("4GiB", 4 << 30), ("500 MB", 500_000_000), (1024, 1024), ("1.5KiB", 1536), ("7", 7)]
)
def test_sizes(written: str | int, size: int) -> None:
    assert read_size(written) == size


@pytest.mark.parametrize("written", ["", "MB", "-1", "0", "4 apples"])
def test_sizes_that_are_none(written: str) -> None:
    with pytest.raises(BadInput, match="a size such as"):
        read_size(written)


def closed_after(folder: Path, steps: int) -> None:
    """A run of one rank with shard_group all, whose files stay as those of one that is killed after its last step."""
    limits = {"device": "64MB", "host": "64MB", "file": "64MB", "shard_group": "all"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gossamer.sharding._tiered_states.remove_files", lambda path: None)
        trained(folder, Blocks(), limits, steps=steps)


def test_a_rank_that_is_one_update_ahead_has_the_state_before_it_too(tmp_path: Path) -> None:
    closed_after(tmp_path, 3)
    run = trained(tmp_path / "plain", Blocks(), None, steps=3, checkpoint_every=1, keep_checkpoints=9)
    for wanted in (2, 3):
        known = open_checkpoint(Path(run["directory"]) / "checkpoints", wanted)
        updates, left = read_tiers(tmp_path / "tiers", updates=wanted)
        assert updates == wanted and len(left) == 3 * 51
        for (name, slot), one in left.items():
            assert torch.equal(one, known.read(f"optim/{slot}/{name}" if slot else f"model/{name}")), name


def test_what_more_ranks_have_left_is_removed_unless_it_is_in_use(tmp_path: Path) -> None:
    for rank in range(4):
        TierFile.create(tier_path(tmp_path, rank), PAGE).close()
        TierJournal(tier_path(tmp_path, rank).with_suffix(".json")).write({})
    used = TierFile.create(tier_path(tmp_path, 3), PAGE)
    (tmp_path / "rank-7.tier").touch()  # somebody else's
    remove_left_over(tmp_path, 2)
    assert sorted(one.name for one in tmp_path.glob("*.tier")) == [
        *(f"rank-0000{rank}.tier" for rank in (0, 1, 3)),
        "rank-7.tier",
    ]
    assert len(list(tmp_path.glob("*.json"))) == 3
    used.close()


def test_buckets_are_averaged_in_the_order_in_which_backward_fills_them() -> None:
    module = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("a", "b", "c")})
    walk = UnshardOrder.of(module, ["a", "b", "c"], loose={"b.bias"})
    buckets = [["b.bias"], ["a.weight", "c.weight"], ["b.weight"], ["c.bias"], ["a.bias"]]
    assert closing_order(walk, buckets) == (3, 2, 1, 4, 0)


def test_a_part_of_a_gradient_is_moved_to_its_start() -> None:
    for part in (((0, 3), (5, 9)), ((2, 11),), ((1, 1), (3, 2), (6, 10)), (), ((0, 16),)):
        flat = torch.arange(16.0)
        wanted = torch.cat([flat[at : at + count] for at, count in part] or [flat[:0]])
        assert torch.equal(compacted(flat, part), wanted)


def test_a_rank_that_waits_for_weights_in_vain_says_what_it_waited_for() -> None:
    read, step = Future[None](), CommStep([2])
    read.set_result(None)
    step.fail(PeerLost("rank 1 lost a peer"))
    with pytest.raises(PeerLost, match=r"lost a peer. It had waited .* for the weights of layers.3.*host higher"):
        UnitUnderWay(read, step, "layers.3").result()


def test_files_of_ranks_that_share_a_disk_must_fit_it_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row: disk, size of the file, of the one that is there, and what is free."""

    def check(*rows: list[float]) -> None:
        said = torch.tensor(rows, dtype=torch.float64)
        monkeypatch.setattr(run_tiers, "gathered", lambda channel, row: said)
        _check_disks(LocalChannel.world(len(rows))[1], tmp_path, 60)

    check([5, 60, 0, 130], [5, 60, 0, 125], [6, 60, 0, 60])
    check([5, 60, 40, 50], [5, 60, 30, 50])
    with pytest.raises(BadInput, match=r"120 B for .* of ranks 0, 2, which share a disk, got 110"):
        check([5, 60, 0, 110], [6, 60, 0, 60], [5, 60, 0, 119])
    with pytest.raises(BadInput, match=r"60 B for .* of rank 1, got 59 B free"):
        check([5, 60, 0, 60], [6, 60, 0, 59])
    assert disk_number(tmp_path / "nothing" / "yet") == disk_number(tmp_path) < 2**48


@pytest.mark.parametrize(("awaited", "said"), [("b.weight", r"set host to 20 or more. Full .* after that of b.weight")])
def test_gradients_in_another_order_than_traced_are_told(
    monkeypatch: pytest.MonkeyPatch, awaited: str, said: str
) -> None:
    """At once where nobody will give memory back, and not while a mean is under way."""
    monkeypatch.setattr("gossamer.sharding._tiered_states._STUCK_S", 0.0)
    limits = TierLimits.of(device=10, host=16, file=10)
    limits.host.take(12)
    states = TieredStates.__new__(TieredStates)
    states.limits, states.updater = limits, SimpleNamespace(progress=UpdateProgress())  # type: ignore[assignment]
    under_way = iter([None, None, None])
    with pytest.raises(RunFailed, match=said):
        states.open_gradient(Layout.of({"a": torch.empty(2)}), lambda: next(under_way, awaited))
    assert next(under_way, "all") == "all"


def test_a_file_in_use_and_a_damaged_journal(tmp_path: Path) -> None:
    one = TierFile.create(tmp_path / "rank-00000.tier", 4 * PAGE)
    with pytest.raises(BadInput, match="in use"):
        TierFile.create(one.path, 4 * PAGE)
    data = page_buffer(2 * PAGE)
    data.random_()
    one.write(PAGE, data)
    back = page_buffer(2 * PAGE)
    one.read(PAGE, back)
    assert torch.equal(back, data)
    assert torch.equal(one.mapped(PAGE, (2 * PAGE,), torch.uint8), data)
    one.close()
    many = TierFile.create(tmp_path / "many.tier", 400 * PAGE)
    data = page_buffer(400 * PAGE)
    data.random_()
    many.write(0, data)
    parts = [page_buffer(PAGE) for _ in range(397)]
    many.read(3 * PAGE, *parts, data[:0])  # more than one request takes
    assert torch.equal(torch.cat(parts), data[3 * PAGE :])
    with pytest.raises(OSError, match="the file ends"):
        many.read(399 * PAGE, page_buffer(PAGE), page_buffer(PAGE))
    many.close()
    journal = TierJournal(tmp_path / "one.json")
    journal.write({"updates": 3})
    assert journal.read() == {"updates": 3}
    journal.path.write_text(journal.path.read_text().replace("3", "4"))
    with pytest.raises(CheckpointMismatch, match="damaged"):
        journal.read()


def test_a_network_file_system_is_known() -> None:
    mounts = "/dev/sda / ext4 rw 0 0\nhost:/share /mnt/share nfs4 rw 0 0\n"
    assert is_far(file_system(Path("/mnt/share/states"), mounts))
    assert not is_far(file_system(Path("/mnt/other"), mounts))


def test_a_layout_covers_every_byte_once() -> None:
    from gossamer.optimizer.adamw import AdamW

    params = {"a": torch.empty(3, 5), "b": torch.empty(()), "c": torch.empty(4097), "frozen": torch.empty(2)}
    alone = TierShares(RowPartition(ProcessGroups.flat(1)), 0)
    layout = TierLayout.of(params, [("c", "b"), ("a",)], AdamW(), keeps_gradients=True, shares=alone)
    taken = [
        (start + one.start, start + one.start + one.nbytes)
        for group in layout.groups
        for start in group.starts
        for one in group.tensors
    ]
    taken += [(g.gradient_start, g.gradient_start + g.gradient_bytes) for g in layout.trained]
    taken.sort()
    assert all(low % PAGE == 0 for low, _ in taken)
    assert all(before[1] <= after[0] for before, after in pairwise(taken))
    assert taken[-1][1] <= layout.size_bytes
    numbers = sum(p.nbytes for n, p in params.items() if n != "frozen")
    assert sum(high - low for low, high in taken) == (2 * 3 + 1) * numbers + params["frozen"].nbytes
