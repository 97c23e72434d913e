"""What of a checkpoint each rank takes back, where the ranks are others than those that saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.run.checkpoint.stored import agreed, merged, of_rank
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.checkpoint import CheckpointSource, open_checkpoint
from gossamer.store.slices import Slice
from store.crew import good, save, whole

OWED = torch.tensor([[1.0, -2.0, 8.0], [3.0, 4.0, -5.0], [5.0, 1.0, 0.5]])  # by rank


def saved(folder: Path, islands: list[list[int]]) -> CheckpointSource:
    """Three ranks: what each is owed, a factor that is the same on all, a counter, the square of island or rank."""
    ranks = []
    for rank in range(3):
        leader = next((island[0] for island in islands if rank in island), rank)
        pieces = [
            whole("owed", OWED[rank], rank),
            whole("factor", torch.tensor([2.5]), rank),
            whole("count", torch.tensor([rank]), rank),
            whole("island/scale", torch.tensor([10.0 + rank]), rank),
        ]
        ranks.append([*pieces, *([whole("square", OWED[rank], rank)] if leader == rank else [])])
    ranks[0].append(whole("scale", torch.tensor([7.0])))
    good(save(folder, 1, ranks, {"ranks": 3, "islands": islands}))
    return CheckpointSource(open_checkpoint(folder, 1))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_owed_is_shared_out_and_what_all_had_stays(tmp_path: Path, ranks: int) -> None:
    """As many as there are now hold together what those that saved held together."""
    checkpoint = saved(tmp_path, [])
    torch.testing.assert_close(ranks * merged(checkpoint, "owed", 3, ranks), OWED.sum(0))
    assert torch.equal(merged(checkpoint, "factor", 3, ranks), torch.tensor([2.5]))
    assert torch.equal(merged(checkpoint, "count", 3, ranks), torch.tensor([0]))


def test_what_rules_kept_apart_is_the_mean_rank_by_rank(tmp_path: Path) -> None:
    """An island speaks for all of its ranks."""
    whole_of = Slice.whole("square", (3,))
    apart, joined = saved(tmp_path / "apart", [[0], [1], [2]]), saved(tmp_path / "joined", [[0, 2], [1]])
    torch.testing.assert_close(agreed(apart, whole_of), OWED.double().mean(0))
    torch.testing.assert_close(agreed(joined, whole_of), ((2 * OWED[0] + OWED[1]) / 3).double())
    part = Slice("square", (3,), (1,), (2,), -1)
    torch.testing.assert_close(agreed(joined, part), ((2 * OWED[0] + OWED[1]) / 3)[1:].double())


def test_a_mean_of_some_of_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=r"square of ranks \[0, 1\] of 3, wanted all ranks"):
        pieces = [[whole("square", OWED[rank], rank)] for rank in range(2)]
        good(save(tmp_path, 1, pieces, {"ranks": 3, "islands": []}))
        agreed(CheckpointSource(open_checkpoint(tmp_path, 1)), Slice.whole("square", (3,)))


def test_what_all_shared_goes_before_what_each_had(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, [])
    assert [float(of_rank(checkpoint, "scale", rank)) for rank in range(4)] == [7.0] * 4
    ranks = [[whole("island/other", torch.tensor([10.0 + rank]), rank)] for rank in range(3)]
    good(save(tmp_path, 2, ranks, {"ranks": 3}))
    source = CheckpointSource(open_checkpoint(tmp_path, 2))
    found = [float(of_rank(source, "other", rank)) for rank in range(4)]
    assert found == [10.0, 11.0, 12.0, 10.0]  # one that was not there takes another's
