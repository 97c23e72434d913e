"""Islands that a round does not wait for: what it goes on with, what the late one finds, in small loops on gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer import sync
from gossamer.comm.message import ProcessGroups
from gossamer.plan._traffic import word_bytes
from gossamer.spec.errors import BadInput
from gossamer.sync._quorum import quorum_timed_out
from pool import Pool

PLAIN: dict[str, Any] = {"diloco": {"sync_every": 4, "outer_optimizer": "average", "straggler_timeout_s": 1.0}}
LATE: dict[str, dict[str, Any]] = {
    "local_sgd": {"local_sgd": {"sync_every": 4, "straggler_timeout_s": 0.3}},
    "diloco": {"diloco": {"sync_every": 4, "straggler_timeout_s": 0.3}},
    "fragments": {
        "diloco": {
            "sync_every": 4,
            "fragments": 2,
            "sync_delay": 1,
            "straggler_timeout_s": 0.3,
            "average_second_moments_every": 1,
        }
    },
    "carried": {
        "diloco": {
            "sync_every": 4,
            "fragments": 2,
            "sync_delay": 3,
            "keep_local_progress": True,
            "outer_optimizer": "average",
            "straggler_timeout_s": 0.3,
            "exchange": {"error_feedback": {"two_shot": {"codec": "int4"}}},
        }
    },
    "after": {"diloco": {"sync_every": 4, "warmup_steps": 3, "local_steps": [4, 2], "straggler_timeout_s": 0.3}},
}


def rounds(pool: Pool, ranks: int, written: Any, **given: Any) -> list[dict[str, Any]]:
    return pool.run("sync.apart_jobs:rounds", ranks, written=written, **{"steps": 20, **given})


def test_a_round_goes_on_without_the_late_one(pool: Pool) -> None:
    """Held up in step 6, the second of its second round, until the first island is in its fourth: what that has done is
    all there is to the rounds in between; the late one leaves them out and goes on from where they led.
    """
    first, second = rounds(pool, 2, PLAIN, late=[1, 5, 13])
    assert first["heard"] == [[4, [False, False]], [8, [False, True]], [12, [False, True]], [16, [False, False]]]
    assert not first["idle"] and second["idle"] == [6, 7, 8, 9, 10, 11] and second["heard"] == first["heard"]
    assert first["anchor"][11] == first["at"][11] != first["anchor"][7] == first["at"][7]
    assert [second["at"][7], second["at"][11]] == [first["at"][7], first["at"][11]]
    assert first["at"][-1] == second["at"][-1]
    whole = rounds(pool, 2, PLAIN)
    assert first["at"][:4] == whole[0]["at"][:4] and first["at"][7] != whole[0]["at"][7]


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("rank", [0, 1])
def test_all_agree_bit_for_bit_whoever_is_late(pool: Pool, name: str, rank: int) -> None:
    """With rounds that end at other steps than those of fragments, displacements that are owed, and unequal paces."""
    found = rounds(pool, 2, LATE[name], steps=24, late=[rank, 8, 17])
    assert found[0]["at"][-1] == found[1]["at"][-1]
    assert all(one["heard"] == found[0]["heard"] for one in found)
    assert sum(late[rank] for _, late in found[0]["heard"]) >= 2 and 9 in found[rank]["idle"]
    for first, second in zip(found[0]["anchor"], found[1]["anchor"], strict=True):
        assert first == second


@pytest.mark.parametrize("name", LATE)
def test_who_is_in_time_finds_no_difference(pool: Pool, name: str) -> None:
    ((kind, settings),) = LATE[name].items()
    patient, plain = ({kind: {**settings, "straggler_timeout_s": wait}} for wait in (60.0, 0.0))
    assert [one["at"] for one in rounds(pool, 2, patient)] == [one["at"] for one in rounds(pool, 2, plain)]


def test_ranks_of_an_island_leave_out_the_same_steps(pool: Pool) -> None:
    """Where one of them is late, the other waits for it within the step."""
    first, *others = rounds(pool, 3, PLAIN, islands=[[0], [1, 2]], late=[2, 5, 13])
    assert others[0]["idle"] == others[1]["idle"] == [6, 7, 8, 9, 10, 11]
    assert first["at"][-1] == others[0]["at"][-1] == others[1]["at"][-1]
    assert first["heard"][1] == [8, [False, True]]


def test_weights_are_of_those_who_are_there(pool: Pool) -> None:
    """Of three, two by what they have seen."""
    found = rounds(pool, 3, PLAIN, samples=[1.0, 3.0, 8.0], late=[2, 1, 6], steps=8)
    alone = rounds(pool, 3, {"local_sgd": {"sync_every": 50}}, steps=4, finish=False)
    own = [torch.tensor(one["at"][3], dtype=torch.float64) for one in alone]
    met = torch.tensor(found[0]["at"][3], dtype=torch.float64)
    torch.testing.assert_close(met, own[0] / 4 + own[1] * 3 / 4, rtol=0, atol=1e-6)
    assert found[0]["heard"][0] == [4, [False, False, True]]


@pytest.mark.parametrize(
    ("waited_s", "is_enough"),
    [
        ([5.0, -1.0], True),
        ([4.0, -1.0], False),
        ([9.0, -1.0, -1.0], False),
        ([9.0, 5.0, -1.0], True),
        ([9.0, 4.9, -1.0, -1.0], False),
        ([9.0, 9.0, float("-inf")], False),
    ],
)
def test_half_of_the_islands_must_have_waited(waited_s: list[float], is_enough: bool) -> None:
    assert quorum_timed_out(waited_s, 5.0) is is_enough


@pytest.mark.parametrize(("wait", "sent"), [(0.0, 16), (1.0, 8)])
def test_words_go_every_other_step_or_with_every_fragment(wait: float, sent: int) -> None:
    """32 bytes each, in a mean step."""
    loop = sync.build({"diloco": {"sync_every": 8, "fragments": 2, "straggler_timeout_s": wait}}).loop
    assert loop is not None
    assert word_bytes(loop, ProcessGroups.islands([[0], [1]])) == {"0>1": sent, "1>0": sent}


def test_no_more_rounds_are_missed_than_there_is_room_for(pool: Pool) -> None:
    """What has come of each is kept until the late one has followed: so the others wait for it at last."""
    written = {"local_sgd": {"sync_every": 1, "straggler_timeout_s": 0.3}}
    first, second = rounds(pool, 2, written, late=[1, 3, 11, 1.5])
    assert second["idle"][:7] == [4, 5, 6, 7, 8, 9, 10] and second["left_behind"] is False
    assert first["at"][-1] == second["at"][-1]


@pytest.mark.parametrize("wait", [-1.0, float("inf"), float("nan")])
def test_a_patience_that_is_none(wait: float) -> None:
    with pytest.raises(BadInput, match="straggler_timeout_s: wanted 0 seconds or more"):
        sync.build({"diloco": {"straggler_timeout_s": wait}})


@pytest.mark.parametrize("exchange", [{"ef21": "topk"}, {"hierarchical": {"inter": {"econtrol": "topk"}}}])
def test_an_exchange_in_which_nobody_can_be_left_out(exchange: Any) -> None:
    with pytest.raises(BadInput, match="keeps counting the last message of an island that missed a round"):
        sync.build({"diloco": {"exchange": exchange, "straggler_timeout_s": 1.0}})


def test_a_loop_whose_islands_owe_each_other_waits_for_all() -> None:
    loop = sync.build("cser").loop
    assert loop is not None
    with pytest.raises(BadInput, match="needs all islands in every round"):
        type(loop)(
            sync_every=4,
            outer_optimizer=loop.outer_optimizer,
            exchange=loop.exchange,
            error_reset=True,
            straggler_timeout_s=1.0,
        )
