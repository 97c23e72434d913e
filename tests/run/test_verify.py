"""Verification: who cheats or errs is named, and nobody who is honest; over gloo, through the real job."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.ops.fingerprint import digest, projected
from gossamer.run.majority_vote import Majority, ThreeWayVote, distance, odd_one
from gossamer.run.random_beacon import RandomBeacon
from pool import Pool

TEMPORARY = tempfile.gettempdir()


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "run" / "records.jsonl").read_text().splitlines()]
    return [one for one in found if one["kind"] == kind]


UNEQUAL = (
    "step 4: rank 1 on host {host}: its parameters or optimizer states differ from those of most ranks "
    "(equal after step 2)"
)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("skips", UNEQUAL),
        pytest.param("rate", UNEQUAL, marks=pytest.mark.nightly),
        ("bit", UNEQUAL),
        pytest.param("moment", UNEQUAL, marks=pytest.mark.nightly),
        ("label", "step 3: rank 1 on host {host}: its gradient of its own samples differs by "),
        pytest.param(
            "idle",
            "step 3: rank 1 on host {host}: its gradient of its own samples differs by 1 of its norm",
            marks=pytest.mark.nightly,
        ),
        ("judges", "step 3: rank 1 on host {host}: its gradient of rank "),
        ("secretly", "step 1: no rank can be named: the mean gradient differs by "),
        ("measures", "step 1: rank 1 on host {host}: its gradient of rank 0's samples differs by "),
        ("breaks", "step 2: rank 1 on host {host}: its random number is not the one it committed to"),
    ],
)
@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.nightly)])
def test_who_does_something_else_is_named_by_all(pool: Pool, tmp_path: Path, fault: str, said: str, ranks: int) -> None:
    import socket

    answers = pool.attempt("run.verify_jobs:run", ranks, fault=fault, folder=str(tmp_path))
    assert [one.get("kind") for one in answers] == ["Untrustworthy"] * ranks, answers
    for one in answers:
        assert said.format(host=socket.gethostname()) in one["error"]
        assert "rank 0 on host" not in one["error"] and "rank 2 on host" not in one["error"]
    (end,) = records(tmp_path, "end")
    assert end["outcome"] == "failed"


def test_no_false_alarm_on_ranks_with_other_numbers_of_threads(pool: Pool, tmp_path: Path) -> None:
    """17 steps of three ranks, each rank's work done again by two others: 102 reruns."""
    pool.run("run.verify_jobs:run", 3, threads=True, kind="causal", steps=17, folder=str(tmp_path))
    checks = records(tmp_path, "verification")
    assert len(checks) == 17 and not any(one["named"] for one in checks)


@pytest.mark.nightly
def test_a_hundred_honest_reruns_are_within_the_noise_and_one_wrong_label_is_not(pool: Pool) -> None:
    """Of a model large enough that numbers of threads change its last bits."""
    (found,) = pool.run("run.verify_jobs:reruns", 1, count=100)
    assert found["wrong"] > 10 * found["tolerance"]
    assert 0 < max(found["honest"]) < found["tolerance"]


def test_training_is_the_same_with_and_without_it(pool: Pool, tmp_path: Path) -> None:
    common = {"dropout": 0.1, "kind": "late"}
    plain = pool.run("run.jobs:train", 3, folder=str(tmp_path / "plain"), **common)
    found = pool.run("run.verify_jobs:run", 3, folder=str(tmp_path / "verified"), **common)
    assert [one["digest"] for one in found] == [one["digest"] for one in plain]
    assert [one["seen"] for one in found] == [one["seen"] for one in plain]


@pytest.mark.parametrize(
    "sections",
    [
        {"plan": {"exchange": {"error_feedback": {"topk": {"fraction": 0.1}}}}},
        {"plan": {"batch_fractions": [2, 1, 1]}, "train": {"accumulate": 2}},
        pytest.param({"train": {"precision": "bf16"}}, marks=pytest.mark.nightly),
        {"plan": {"savers": [{"activation_swap": {"host": "4MB", "file": "4MB", "directory": TEMPORARY, "least": 1}}]}},
        pytest.param({"plan": {"savers": [{"tiling": {"linears": "*", "tiles": 3}}]}}, marks=pytest.mark.nightly),
    ],
    ids=json.dumps,
)
def test_honest_ranks_pass_however_they_train(pool: Pool, tmp_path: Path, sections: dict[str, dict[str, Any]]) -> None:
    given = {**sections, "train": {**sections.get("train", {}), "verify": {"every": 1}}}
    pool.run("run.verify_jobs:run", 3, sections=given, folder=str(tmp_path), dropout=0.1)
    assert [one["named"] for one in records(tmp_path, "verification")] == [[]] * 6


def test_a_frozen_parameter_is_looked_at_before_it_is_saved(pool: Pool, tmp_path: Path) -> None:
    given = {"train": {"verify": {"every": 10**6}, "checkpoint_every": 2}}
    arguments = {"sections": given, "frozen": ["norm"], "folder": str(tmp_path)}
    answers = pool.attempt("run.verify_jobs:run", 3, fault="frozen", at=2, **arguments)
    assert [one.get("kind") for one in answers] == ["Untrustworthy"] * 3, answers
    assert "step 4: rank 1 on host" in answers[0]["error"] and "its parameters or optimizer" in answers[0]["error"]
    assert [one["step"] for one in records(tmp_path, "checkpoint")] == [2]


def test_a_noisy_rank_does_not_raise_what_the_others_are_allowed(pool: Pool, tmp_path: Path) -> None:
    """Its reruns are ten times as far apart as is always forgiven: it is named, and the tolerance is of the others."""
    tell = {"train": {"verify": {"every": 1, "on_failure": "warn"}}}
    for fault in ("", "jitters"):
        folder = tmp_path / (fault or "honest")
        pool.run("run.verify_jobs:run", 3, fault=fault, sections=tell, steps=1, folder=str(folder))
    honest, noisy = (records(tmp_path / name, "verification")[0] for name in ("honest", "jitters"))
    assert noisy["tolerance"] == pytest.approx(honest["tolerance"], rel=0.5)
    (first, *_) = [one for one in records(tmp_path / "jitters", "event") if one["level"] == "error"]
    assert first["rank"] == 1 and "its gradient of rank 0's samples" in first["message"]


def test_it_may_be_told_alone(pool: Pool, tmp_path: Path) -> None:
    given = {"train": {"verify": {"every": 1, "on_failure": "warn"}}}
    pool.run("run.verify_jobs:run", 3, fault="label", sections=given, folder=str(tmp_path))
    assert [one["named"] for one in records(tmp_path, "verification")] == [[], [], [1], [], [], []]
    (told,) = [one for one in records(tmp_path, "event") if one["level"] == "error"]
    assert (told["step"], told["rank"]) == (3, 1) and "its gradient of its own samples" in told["message"]


def test_a_run_goes_on_from_before(pool: Pool, tmp_path: Path) -> None:
    given = {"folder": str(tmp_path), "sections": {"train": {"verify": {"every": 1}, "checkpoint_every": 2}}}
    answers = pool.attempt("run.verify_jobs:run", 3, fault="bit", at=3, **given)
    assert answers[0]["kind"] == "Untrustworthy" and "step 4: rank 1" in answers[0]["error"]  # before it was saved
    again = pool.run("run.verify_jobs:run", 3, resume=True, **given)
    assert [one["step"] for one in records(tmp_path, "start")] == [0, 2]
    plain = pool.run("run.jobs:train", 3, folder=str(tmp_path / "plain"))
    assert again[0]["digest"] == plain[0]["digest"]


@pytest.mark.parametrize(
    ("ranks", "plan", "said"),
    [
        (2, {}, "train.verify.every: wanted 3 or more replicas, so that two can outvote one, got 2"),
        *(
            (3, {"sharding": one}, "train.verify.every: wanted plan.sharding none")
            for one in ("zero1", "zero3", "sdp4bit")
        ),
        (3, {"sync": "diloco"}, "train.verify.every: wanted replicas that hold the full model"),
        (3, {"sharding": "zero1"}, "train.verify.every: wanted plan.sharding none"),
    ],
)
def test_bad_input(pool: Pool, tmp_path: Path, ranks: int, plan: dict[str, Any], said: str) -> None:
    given = {"train": {"verify": {"every": 5}}, "plan": plan}
    answers = pool.attempt("run.verify_jobs:run", ranks, sections=given, folder=str(tmp_path))
    assert all(said in one["error"] for one in answers), answers


def test_the_majority_of_three() -> None:
    table = {
        (True, True, True): Majority.NOBODY,
        (True, False, False): Majority.THIRD,
        (False, True, False): Majority.SECOND,
        (False, False, True): Majority.FIRST,
        (True, True, False): Majority.UNDECIDED,
        (True, False, True): Majority.UNDECIDED,
        (False, True, True): Majority.UNDECIDED,
        (False, False, False): Majority.UNDECIDED,
    }
    assert {pairs: odd_one(*pairs) for pairs in itertools.product((True, False), repeat=3)} == table


def test_the_odd_one_is_named_with_its_distance_from_the_nearer() -> None:
    row = torch.tensor([2.0, 8.0, 1.0, 3.0, 4.0], dtype=torch.float64)
    other = row + torch.tensor([0.0, 0.0, 0.0, 0.5, 0.0])
    assert distance(row, row) == 0.0
    trio = ThreeWayVote((7, 5, 6), (row, other, row))
    assert trio.odd(1e-3) == (5, distance(row, other))
    assert trio.odd(1.0) is None
    near = row + torch.tensor([0.0, 0.0, 0.0, 0.01, 0.0])
    assert distance(near, other) < distance(row, other)
    assert ThreeWayVote((7, 5, 6), (row, other, near)).odd(0.01) == (5, distance(near, other))
    assert distance(row, row + torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])) == float("inf")
    assert distance(row * float("nan"), row) == float("inf")
    of_the_loss = row + torch.tensor([0.5, 0.0, 0.0, 0.0, 0.0])
    assert distance(row, of_the_loss) == 0.5 / 2.5  # a gradient that is right under a loss that is not


def test_distances_of_fingerprints_are_those_of_tensors() -> None:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(3001, generator=drawn)
    y = x + 1e-3 * torch.randn(3001, generator=drawn)
    found = []
    for seed in range(200):
        a, b = (projected(t.split([1, 1000, 2000]), seed, width=64) for t in (x, y))
        assert float(a[0]) == pytest.approx(float(x.norm()), rel=1e-6)
        found.append(float((a[1:] - b[1:]).square().sum()))
    assert sum(found) / 200 == pytest.approx(float((x - y).square().sum()), rel=0.05)
    torch.testing.assert_close(projected([x], 3, width=64), projected(x.split(7), 3, width=64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_digest_is_another_where_a_bit_is(dtype: torch.dtype) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[torch.empty(0, dtype=dtype).element_size()]
    x = torch.arange(1000).to(dtype)
    before = digest([x], 7)
    assert before == digest([x[:300], x[300:]], 7) != digest([x], 8)
    for place in (0, 499, 999):
        for bit in range(8 * x.element_size()):
            y = x.clone()
            y.view(bits)[place] ^= -(2**63) if bit == 63 else torch.tensor(1 << bit).to(bits).item()
            assert digest([y], 7) != before
    assert digest([x[[1, 0, *range(2, 1000)]]], 7) != before


def test_a_beacon_is_the_same_for_all_and_nobody_chooses_it() -> None:
    told: dict[str, list[Any]] = {"rows": []}

    def alone(row: tuple[float, ...]) -> torch.Tensor:
        told["rows"].append(row)
        return torch.tensor([row, row], dtype=torch.float64)

    beacon = RandomBeacon(alone)
    drawn = [beacon.draw() for _ in range(2000)]
    assert len({number for number, _ in drawn}) == 2000
    assert not any(false for _, false in drawn)
    counts = sum(number % 50 == 0 for number, _ in drawn)
    assert 15 < counts < 70  # 40 are expected
