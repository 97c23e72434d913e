from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from gossamer.spec.errors import BadInput
from gossamer.store.checkpoint import (
    CheckpointWriter,
    SaveStatus,
    latest_good,
    list_checkpoints,
    open_checkpoint,
    save_attempt,
)
from gossamer.store.slices import Slice
from store.crew import finish, good, halves, left_over, model, save, whole


def test_what_is_stored_is_what_was_given_to_save(tmp_path: Path) -> None:
    weight = torch.arange(3_000_000.0)
    given = weight.clone()
    writer = CheckpointWriter(tmp_path, 0, 1)
    assert writer.save(7, [whole("w", weight)], {"step": 7}) is SaveStatus.STARTED
    weight.zero_()
    (result,) = finish(writer)
    assert result.ok and result.step == 7 and result.bytes == weight.nbytes
    assert torch.equal(open_checkpoint(tmp_path, 7).read("w"), given)


def test_staging_is_reused_and_holds_each_save_apart(tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    writer = CheckpointWriter(tmp_path, 0, 1, keep=3)
    for step in (1, 2, 3):
        weight.fill_(step)
        writer.save(step, [whole("w", weight), whole(f"only{step}", weight)], {}, patience_s=None)
    good(finish(writer))
    assert [open_checkpoint(tmp_path, step).read("w")[0].item() for step in (1, 2, 3)] == [1.0, 2.0, 3.0]
    assert open_checkpoint(tmp_path, 3).names() == ("only3", "w")


def test_no_thread_is_left_after_finish(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    writer = CheckpointWriter(tmp_path, 0, 1)
    writer.save(1, [whole("w", torch.zeros(10))], {})
    writer.finish()
    assert set(threading.enumerate()) <= before
    good(finish(writer))
    assert finish(writer) == [] and not writer.is_busy


def test_only_the_newest_are_kept_and_later_histories_are_left_alone(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        good(save(tmp_path, step, halves(model(step)), keep=2))
    assert list_checkpoints(tmp_path) == (30, 20)
    good(save(tmp_path, 25, halves(model()), keep=2))
    assert list_checkpoints(tmp_path) == (30, 25, 20)
    assert left_over(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    good(save(tmp_path, 5, halves(model(1))))
    good(save(tmp_path, 5, halves(model(2))))
    assert torch.equal(open_checkpoint(tmp_path, 5).read("cube"), model(2)["cube"])
    assert left_over(tmp_path) == []


def test_a_rank_that_cannot_write_fails_the_save_on_all_at_once(tmp_path: Path) -> None:
    good(save(tmp_path, 1, halves(model())))
    pieces = halves(model())
    pieces[1].append(whole("quantized", torch.zeros(3, dtype=torch.complex128)))
    results = save(tmp_path, 2, pieces)
    assert not any(result.ok for result in results)
    assert "rank 1: wanted a tensor of one of" in results[0].error and "complex128" in results[0].error
    assert "complex128" in results[1].error
    assert list_checkpoints(tmp_path) == (1,) and left_over(tmp_path) == []


def test_a_missing_rank_is_named_after_the_deadline(tmp_path: Path) -> None:
    good(save(tmp_path, 1, halves(model())))
    writer = CheckpointWriter(tmp_path, 0, 2, deadline_s=0.1)
    writer.save(2, halves(model())[0], {})
    (result,) = finish(writer)
    assert not result.ok and "the shards of rank(s) 1 of 2" in result.error
    assert list_checkpoints(tmp_path) == (1,) and left_over(tmp_path) == []


def test_a_save_is_called_off_by_the_abort_callback(tmp_path: Path) -> None:
    lost = threading.Event()
    writer = CheckpointWriter(tmp_path, 0, 2, abort=lost.is_set)
    writer.save(2, halves(model())[0], {})
    assert writer.is_busy
    lost.set()
    (result,) = finish(writer)
    assert not result.ok and "cancelled" in result.error and left_over(tmp_path) == []


def test_a_save_whose_other_ranks_are_lost_is_given_up_in_time(tmp_path: Path) -> None:
    """Ten minutes later, without it: rank 1 never comes. A whole one is not given up, however short the time."""
    writer = CheckpointWriter(tmp_path, 0, 2)
    writer.save(2, halves(model())[0], {})
    writer.finish(within_s=0.1)
    (result,) = writer.poll()
    assert not result.ok and "cancelled while waiting for the shards of rank(s) 1 of 2" in result.error
    assert list_checkpoints(tmp_path) == () and left_over(tmp_path) == []
    alone = CheckpointWriter(tmp_path / "alone", 0, 1)
    alone.save(3, [whole("w", torch.zeros(3_000_000))], {})
    alone.finish(within_s=0.0)
    good(alone.poll())


def test_a_second_save_is_skipped_while_the_first_is_written_and_the_others_learn_of_it(tmp_path: Path) -> None:
    leader = CheckpointWriter(tmp_path, 0, 2, deadline_s=20.0)
    follower = CheckpointWriter(tmp_path, 1, 2, deadline_s=20.0)
    pieces = halves(model())
    follower.save(1, pieces[1], {})  # waits for the leader
    assert follower.save(2, pieces[1], {}, patience_s=0.0) is SaveStatus.SKIPPED
    leader.save(1, pieces[0], {})
    good(finish(follower))
    leader.save(2, pieces[0], {}, patience_s=None)
    first, second = finish(leader)
    assert first.ok and not second.ok and "rank 1: skipped" in second.error
    assert list_checkpoints(tmp_path) == (1,) and left_over(tmp_path) == []


def test_a_leader_may_commit_as_soon_as_the_last_manifest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def slow(self: Path, target: Path) -> Path:
        done = rename(self, target)
        if target.name == "rank-00001.json":  # the follower goes on only after the leader has moved the folder
            end = time.monotonic() + 20
            while target.parent.exists() and time.monotonic() < end:
                time.sleep(0.001)
        return done

    monkeypatch.setattr(Path, "rename", slow)
    good(save(tmp_path, 1, halves(model())))


def test_a_follower_that_gives_up_never_takes_back_what_it_published(tmp_path: Path) -> None:
    follower = CheckpointWriter(tmp_path, 1, 2, deadline_s=0.02)
    follower.save(3, halves(model())[1], {})
    (result,) = finish(follower)
    assert not result.ok and "for rank 0 to commit" in result.error
    leader = CheckpointWriter(tmp_path / "other", 0, 2, deadline_s=20.0)  # its sweep happened before that
    (tmp_path / "step-00000003.partial").rename(tmp_path / "other" / "step-00000003.partial")
    leader.save(3, halves(model())[0], {})
    good(finish(leader))
    open_checkpoint(tmp_path / "other", 3).verify()


@pytest.mark.usefixtures("settled")
def test_a_step_that_could_not_be_saved_again_is_not_taken_for_saved(tmp_path: Path) -> None:
    first, second = halves(model(1))
    good(save(tmp_path, 1, [first, second]))
    assert [result.ok for result in save(tmp_path, 1, [halves(model(2))[0], second[1:]])] == [False, False]
    assert torch.equal(open_checkpoint(tmp_path, 1).read("cube"), model(1)["cube"])


def test_the_one_being_replaced_stays_until_the_new_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [[whole(name, tensor) for name, tensor in model(seed).items()] for seed in (1, 2)]
    good(save(tmp_path, 1, pieces[:1], keep=1))
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if target.name == "step-00000001":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        (result,) = save(tmp_path, 1, pieces[1:], keep=1)
        assert not result.ok and "Input/output error" in result.error
    found, problems = latest_good(tmp_path)
    assert problems == {} and torch.equal(found.read("cube"), model(1)["cube"])
    good(save(tmp_path, 1, pieces[1:], keep=1))
    assert torch.equal(open_checkpoint(tmp_path, 1).read("cube"), model(2)["cube"]) and left_over(tmp_path) == []


@pytest.mark.parametrize("token", ["", "generation-1", "generation-2"])
def test_what_a_dead_run_left_is_swept_by_the_leader_alone(tmp_path: Path, token: str) -> None:
    dead = tmp_path / "step-00000009.generation-1.partial"
    dead.mkdir()
    (dead / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / "step-00000003.replaced").mkdir()
    CheckpointWriter(tmp_path, 1, 2, token=token)
    assert dead.exists()
    assert list_checkpoints(tmp_path) == (3,)
    CheckpointWriter(tmp_path, 0, 2, token=token)
    assert not dead.exists() and (tmp_path / "step-00000003").is_dir()


def test_what_an_earlier_start_published_is_never_committed_by_a_later_one(tmp_path: Path) -> None:
    def opened() -> list[CheckpointWriter]:
        return [CheckpointWriter(tmp_path, rank, 2, deadline_s=0.5, token="g0") for rank in (0, 1)]

    _, died = opened()
    died.save(4, halves(model(1))[1], {})
    assert not finish(died)[0].ok and left_over(tmp_path) == ["step-00000004.g0.partial"]
    late, _ = opened()  # whose other rank does not come to save this step
    late.save(4, halves(model(2))[0], {})
    (result,) = finish(late)
    assert "waited 0 s for the shards of rank(s) 1" in result.error and list_checkpoints(tmp_path) == ()


def test_parts_of_an_earlier_attempt_are_not_mixed_in(tmp_path: Path) -> None:
    late = CheckpointWriter(tmp_path, 0, 2, deadline_s=20.0, token="b")
    old = CheckpointWriter(tmp_path, 1, 2, deadline_s=0.05, token="a")
    old.save(4, halves(model(1))[1], {})
    assert not finish(old)[0].ok
    new = CheckpointWriter(tmp_path, 1, 2, deadline_s=20.0, token="b")
    late.save(4, halves(model(2))[0], {})
    new.save(4, halves(model(2))[1], {})
    good(finish(late) + finish(new))
    assert torch.equal(open_checkpoint(tmp_path, 4).read("cube"), model(2)["cube"])


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file system shows a rename at once: a follower need not wait to be sure that the leader gave up."""
    monkeypatch.setattr(save_attempt, "_SETTLE_S", 0.01)


@pytest.mark.usefixtures("settled")
def test_slices_that_do_not_tile_their_tensor_are_refused(tmp_path: Path) -> None:
    first, second = halves(model())
    gap = save(tmp_path, 1, [first, second[1:]])
    assert "embed.weight: its slices hold 36 of 72 elements" in gap[0].error
    over = save(tmp_path, 1, [first, [*second, whole("cube", model()["cube"])]])
    assert "overlap" in over[0].error and "cube" in over[0].error
    shape = [(Slice("cube", (4, 3, 7), (0, 0, 6), (4, 3, 1)), torch.zeros(4, 3, 1))]
    assert "rank 1 as float32 (4, 3, 7)" in save(tmp_path, 1, [first, second + shape])[0].error


@pytest.mark.usefixtures("settled")
def test_replicated_state_that_differs_between_ranks_is_noticed(tmp_path: Path) -> None:
    same = torch.arange(5.0)
    good(save(tmp_path, 1, [[whole("w", same)], [whole("w", same)]]))
    results = save(tmp_path, 2, [[whole("w", same)], [whole("w", same + 1)]])
    assert "w should be the same on all ranks, but differs between ranks 0 and 1" in results[0].error


@pytest.mark.parametrize("meta", [{"a": (1, 2)}, {"a": {1: 2}}, {"a": [float("nan")]}, {"a": {"b": torch.zeros(1)}}])
def test_meta_that_json_would_change_is_refused_by_its_path(tmp_path: Path, meta: dict[str, object]) -> None:
    writer = CheckpointWriter(tmp_path, 0, 1)
    with pytest.raises(BadInput, match=r"meta\.a"):
        writer.save(1, [], meta)
    assert finish(writer) == []


def test_a_directory_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="file"):
        CheckpointWriter(tmp_path / "file" / "checkpoints", 0, 1)
    with pytest.raises(BadInput, match="keep"):
        CheckpointWriter(tmp_path, 0, 1, keep=0)


def test_a_failing_save_keeps_the_error_until_it_is_asked_for(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 0, 2, deadline_s=0.01)
    writer.save(1, [], {})
    while writer.is_busy:
        time.sleep(0.005)
    assert [result.ok for result in writer.poll()] == [False]
    assert writer.poll() == []
    with pytest.raises(BadInput, match="wanted a checkpoint, got none in"):
        latest_good(tmp_path)
