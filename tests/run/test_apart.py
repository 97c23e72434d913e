"""Islands that train apart, as whole runs: ends, checkpoints inside a round, other numbers of islands, bad input."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from contracts.test_sync import APART, SETTINGS
from gossamer.store.checkpoint import latest_good
from pool import Pool
from run.by_day import combined


def sections(written: Any, **machines: Any) -> dict[str, dict[str, Any]]:
    return {"plan": {"sync": written}, "machines": machines} if machines else {"plan": {"sync": written}}


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "records.jsonl").read_text().splitlines()]


BY_NIGHT = ("local_sgd", "post_local_sgd", "slowmo", "dsm", "cser_pl")  # another one keeps the same between rounds


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.nightly] if one in BY_NIGHT else []) for one in APART]
)
def test_a_run_stopped_in_a_round_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, name: str) -> None:
    given = {"steps": 8, "dropout": 0.1, "sections": {**sections(SETTINGS[name]), "train": {"checkpoint_every": 5}}}
    folders = {"whole": str(tmp_path / "whole"), "parts": str(tmp_path / "parts")}
    whole = pool.run("run.jobs:train", 2, folder=folders["whole"], **given)
    assert whole[0]["digest"] == whole[1]["digest"]
    shutil.rmtree(tmp_path / "whole" / "run" / "checkpoints" / "step-00000008")  # as if it had ended after the fifth
    stopped = pool.run("run.jobs:train", 2, folder=folders["parts"], until=3, **given)
    assert stopped[0]["ended"] == stopped[1]["ended"] != ""
    for folder in folders.values():
        again = pool.run("run.jobs:train", 2, folder=folder, resume=True, **given)
        assert [one["digest"] for one in again] == [one["digest"] for one in whole]


@pytest.mark.parametrize(
    ("name", "ranks"),
    combined(
        ["local_sgd", "streaming_diloco", "qsparse_local_sgd", "co2", "cser", "gossip"],
        [1, 3],
        by_day=[
            ("local_sgd", 1),
            ("streaming_diloco", 3),
            ("qsparse_local_sgd", 1),
            ("co2", 3),
            ("cser", 1),
            ("gossip", 3),
        ],
    ),
)
def test_other_islands_go_on_from_what_was_agreed(pool: Pool, tmp_path: Path, name: str, ranks: int) -> None:
    given = {"folder": str(tmp_path), "steps": 9, "sections": sections(SETTINGS[name])}
    pool.run("run.jobs:train", 2, until=5, **given)
    found = pool.run("run.jobs:train", ranks, resume=True, **given)
    assert all(one["digest"] == found[0]["digest"] and not one["ended"] for one in found)
    said = [one["message"] for one in records(tmp_path) if one["kind"] == "event"]
    assert any("start from its global parameters" in message for message in said)


def test_trained_together_then_apart_then_together(pool: Pool, tmp_path: Path) -> None:
    """Each time from what all agreed on: from a stop inside a round that is the anchor, and the mean of the rules'
    state, the same on all ranks.
    """
    ways = ["every_step", SETTINGS["cser"], "every_step", SETTINGS["streaming_diloco"]]
    for turn, written in enumerate(ways):
        given = {"folder": str(tmp_path), "steps": 17, "resume": turn > 0, "fresh_plan": True}
        until = {} if turn == 3 else {"until": 4 * (turn + 1) + 1}
        found = pool.run("run.jobs:train", 2, sections=sections(written), **until, **given)
        if turn != 1:  # stopped apart
            assert found[0]["digest"] == found[1]["digest"]
    steps = [one for one in records(tmp_path) if one["kind"] == "step"]
    assert [one["step"] for one in steps] == list(range(1, 18))
    assert steps[-1]["loss"] < steps[0]["loss"]
    said = [one["message"] for one in records(tmp_path) if one["kind"] == "event"]
    assert sum("synchronous steps go on from the global parameters: what islands have made" in one for one in said) == 1


def test_residuals_of_rounds_that_go_on_nowhere_are_told(pool: Pool, tmp_path: Path) -> None:
    """Islands of two ranks keep them at another depth, and an exchange without feedback not at all."""
    given, loop = {"folder": str(tmp_path), "fresh_plan": True}, SETTINGS["qsparse_local_sgd"]
    pool.run("run.jobs:train", 2, until=3, steps=9, sections=sections(loop), **given)
    pool.run("run.jobs:train", 2, until=5, steps=9, resume=True, sections=sections(loop), **given)
    dense = {"qsparse_local_sgd": {"sync_every": 2, "exchange": "dense"}}
    pool.run("run.jobs:train", 2, until=7, steps=9, resume=True, sections=sections(dense), **given)
    said = [one["message"] for one in records(tmp_path) if one["kind"] == "event" and "residual" in one["message"]]
    assert len(said) == 1 and "exchange residuals between islands start anew (" in said[0]


def test_islands_of_unequal_size_and_share(pool: Pool, tmp_path: Path) -> None:
    given = sections({"diloco": {"sync_every": 3}}, islands=[[0, 1], [2]])
    given["plan"]["batch_fractions"] = [1, 1, 2]
    found = pool.run("run.jobs:train", 3, folder=str(tmp_path), steps=7, sections=given)
    assert all(one["digest"] == found[0]["digest"] for one in found)
    steps = [one for one in records(tmp_path) if one["kind"] == "step"]
    across = [sum(n for link, n in one["wire_bytes"].items() if link.endswith(">2")) for one in steps]
    small = 2 * 8 * (1 + 5)  # weights and votes go to everybody
    assert [n > 10 * small for n in across] == [False, False, True, False, False, True, True]


PACED = {"diloco": {"sync_every": 4, "local_steps": [4, 2]}}


@pytest.mark.parametrize("steps", [[4, 2], [2, 4]])
def test_an_island_of_slow_machines_leaves_no_sample_out(pool: Pool, tmp_path: Path, steps: list[int]) -> None:
    given = sections({"diloco": {"sync_every": 4, "local_steps": steps}}, islands=[[0, 1], [2]])
    given["plan"]["batch_fractions"] = [3, 3, 2]
    found = pool.run("run.jobs:train", 3, folder=str(tmp_path), steps=8, sections=given)
    assert all(one["digest"] == found[0]["digest"] for one in found)
    lines = [one for one in records(tmp_path) if one["kind"] == "step"]
    assert [one["step"] for one in lines] == ([*range(1, 9)] if steps[0] == 4 else [2, 4, 6, 8])
    ends = [0, *(one["samples"][1] for one in lines)]
    assert [tuple(one["samples"]) for one in lines] == list(pairwise(ends))
    assert ends[-1] == (8 * 6 + 4 * 2 if steps[0] == 4 else 4 * 6 + 8 * 2)
    assert [one["tokens"] for one in lines] == [9 * (b - a) for a, b in pairwise(ends)]


def test_islands_of_unequal_pace_go_on_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    given = {"steps": 10, "dropout": 0.1, "sections": {**sections(PACED), "train": {"checkpoint_every": 7}}}
    whole = pool.run("run.jobs:train", 2, folder=str(tmp_path), **given)
    assert whole[0]["digest"] == whole[1]["digest"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000010")
    again = pool.run("run.jobs:train", 2, folder=str(tmp_path), resume=True, **given)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]


def test_auto_steps_are_measured_and_kept(pool: Pool, tmp_path: Path) -> None:
    given = sections({"streaming_diloco": {"sync_every": 4, "fragments": 2, "sync_delay": 1, "local_steps": "auto"}})
    pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=5, sections=given)
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    steps = plan["sync"]["streaming_diloco"]["local_steps"]
    assert max(steps) == 4 and len(steps) == 2
    assert "of computing a round" in plan["reasons"]["sync"]
    assert plan["forecast"]["compute_s"] > 0


def test_islands_send_as_much_as_their_ways_out_carry(pool: Pool, tmp_path: Path) -> None:
    given = sections({"diloco": {"sync_every": 3}})
    given["plan"]["adapt"] = {"bcrs": {"fraction": 0.05, "feedback": "", "gamma": 2.0}}
    found = pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=7, sections=given)
    assert found[0]["digest"] == found[1]["digest"]
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    assert plan["sync"]["diloco"]["exchange"] == "dense" or "uneven_topk" in plan["sync"]["diloco"]["exchange"]
    assert plan["reasons"]["adapt"]


@pytest.mark.parametrize(("islands", "steps"), [([[0], [1], [2]], []), ([[0, 1], [2]], [2, 4])])
def test_what_islands_send_may_differ_and_is_known_before(
    pool: Pool, tmp_path: Path, islands: list[list[int]], steps: list[int]
) -> None:
    one = {"uneven_topk": {"fractions": [0.01, 0.02, 0.2], "gamma": 2.0, "overlap_max_senders": 1}}
    given = sections({"local_sgd": {"sync_every": 4, "exchange": one, "local_steps": steps}}, islands=islands)
    found = pool.run("run.jobs:train", 3, folder=str(tmp_path), steps=8, sections=given)
    assert all(each["digest"] == found[0]["digest"] for each in found)
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    sent = sum(sum(line["wire_bytes"].values()) for line in records(tmp_path) if line["kind"] == "step")
    assert sent / 8 == pytest.approx(plan["forecast"]["sent_bytes"][0], rel=0.02, abs=8)


def test_what_is_frozen_neither_moves_nor_travels(pool: Pool, tmp_path: Path) -> None:
    """Adapters alone, or any part: the anchor, the displacements and the forecast are of what is trained."""
    sent = {}
    for name, frozen in (("all", []), ("part", ["layers.0", "norm"])):
        given = {"steps": 4, "frozen": frozen, "values": True, "sections": sections({"local_sgd": {"sync_every": 2}})}
        found = pool.run("run.jobs:train", 2, folder=str(tmp_path / name), **given)
        assert found[0]["digest"] == found[1]["digest"]
        steps = [one for one in records(tmp_path / name) if one["kind"] == "step"]
        sent[name] = sum(steps[1]["wire_bytes"].values())
    block = 12 * 24 + 24 + 24 * 12 + 12 + 2 * 12  # of two linear layers, and a norm
    assert sent["all"] - sent["part"] == 4 * block


def test_tied_and_frozen_parameters_and_buffers(pool: Pool, tmp_path: Path) -> None:
    given = {"folder": str(tmp_path), "steps": 6, "sections": sections({"diloco": {"sync_every": 2, "fragments": 2}})}
    found = pool.run("run.jobs:train", 2, kind="late", frozen=["layers.1"], **given)
    assert found[0]["digest"] == found[1]["digest"]


def test_a_rejected_step_does_not_shift_the_rounds(pool: Pool, tmp_path: Path) -> None:
    given = sections({"local_sgd": {"sync_every": 2}})
    given["train"] = {"on_nonfinite": "skip"}
    found = pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=6, bad=9, sections=given)
    assert found[0]["digest"] == found[1]["digest"]
    steps = [one for one in records(tmp_path) if one["kind"] == "step"]
    assert all(one["committed"] for one in steps), "it was the other island's"
    said = [one["message"] for one in records(tmp_path) if one["kind"] == "event"]
    assert any("the island of ranks [1] has rejected 1 of its last steps" in message for message in said)
    rejected = [one["rejected"] for one in records(tmp_path) if one["kind"] == "islands"]
    assert [sum(island) for island in zip(*rejected, strict=True)] == [0, 1]
    sent = [sum(one["wire_bytes"].values()) for one in steps]
    assert [n > 1000 for n in sent] == [False, True] * 3


def test_what_an_island_rejected_is_its_own_after_a_resume(pool: Pool, tmp_path: Path) -> None:
    """Bias corrections count the updates that its rule has made."""
    given = {"steps": 8, "bad": 9, "sections": sections({"diloco": {"sync_every": 4}})}
    given["sections"]["train"] = {"on_nonfinite": "skip", "checkpoint_every": 6}
    whole = pool.run("run.jobs:train", 2, folder=str(tmp_path), **given)
    assert any(one["kind"] == "event" and "rejected" in one["message"] for one in records(tmp_path))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    again = pool.run("run.jobs:train", 2, folder=str(tmp_path), resume=True, **given)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]


def test_an_island_that_gives_up_says_why_and_the_others_see_it_go(pool: Pool, tmp_path: Path) -> None:
    given = sections({"local_sgd": {"sync_every": 50}})
    given["train"] = {"on_nonfinite": "stop"}
    answers = pool.attempt("run.jobs:train", 2, folder=str(tmp_path), steps=6, bad=9, sections=given)
    assert answers[0]["kind"] == "PeerLost"
    assert "not finite on rank 1" in answers[1]["result"]["ended"]


def test_islands_tell_each_other_how_they_fare(pool: Pool, tmp_path: Path) -> None:
    """Of step 1 all; from then on rank 0's own, and of all islands every other step."""
    given = sections({"post_local_sgd": {"sync_every": 4, "warmup_steps": 1}}, islands=[[0, 1], [2]])
    pool.run("run.jobs:train", 3, folder=str(tmp_path), steps=8, sections=given)
    steps = {one["step"]: one for one in records(tmp_path) if one["kind"] == "step"}
    islands = [one for one in records(tmp_path) if one["kind"] == "islands"]
    assert [one["step"] for one in islands] == [3, 5, 7, 8]
    assert steps[1]["weight"] > steps[2]["weight"]
    for one in islands[:-1]:
        pair = [steps[one["step"] - 1], steps[one["step"]]]
        assert one["weights"][0] == sum(step["weight"] for step in pair)
        mean = sum(step["loss"] * step["weight"] for step in pair) / one["weights"][0]
        assert one["losses"][0] == pytest.approx(mean)
        assert one["losses"][1] != pytest.approx(mean)


def test_a_period_longer_than_the_run_meets_once(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(
        "run.jobs:train", 2, folder=str(tmp_path), steps=5, sections=sections({"local_sgd": {"sync_every": 50}})
    )
    assert found[0]["digest"] == found[1]["digest"]


ZERO_ONE = {
    "zero_one": {"local_step_clipper": 4, "var_freeze_step": 5, "var_update_scaler": 1, "local_step_scaler": 2}
}  # rounds end after 3, 5, 6, 7, 9 steps


@pytest.mark.parametrize(("kind", "stops"), [("small", (2, 4, 8)), ("halves", (10,))])
def test_zero_one_adam_stopped_anywhere_goes_on_bit_for_bit(
    pool: Pool, tmp_path: Path, kind: str, stops: tuple[int, ...]
) -> None:
    given = {"steps": 13, "kind": kind, "sections": {**sections(ZERO_ONE), "train": {"optimizer": "zero_one_adam"}}}
    whole = pool.run("run.jobs:train", 2, folder=str(tmp_path / "whole"), **given)
    assert whole[0]["digest"] == whole[1]["digest"]
    for until in stops:
        folder = str(tmp_path / f"parts{until}")
        assert "Interrupted" in pool.run("run.jobs:train", 2, folder=folder, until=until, **given)[0]["ended"]
        again = pool.run("run.jobs:train", 2, folder=folder, resume=True, **given)
        assert [one["digest"] for one in again] == [one["digest"] for one in whole]


def test_zero_one_adam_whose_gradients_always_meet_is_adamw_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    found = []
    for name in ("adamw", "zero_one_adam"):
        given = {
            **sections({"zero_one": {"var_freeze_step": 100, "var_update_scaler": 0}}),
            "train": {"optimizer": {name: {"lr": 1e-2}}},
        }
        found += pool.run("run.jobs:train", 2, folder=str(tmp_path / name), steps=6, sections=given)
    plain = {"train": {"optimizer": {"adamw": {"lr": 1e-2}}}}
    found += pool.run("run.jobs:train", 2, folder=str(tmp_path / "plain"), steps=6, sections=plain)
    assert len({one["digest"] for one in found}) == 1


def test_an_island_that_skips_a_step_of_its_own_keeps_the_others_second_moment(pool: Pool, tmp_path: Path) -> None:
    """Gradients of all meet in steps 1, 2, 4, 8; what follows a meeting is the same everywhere, bit for bit."""
    given = sections({"zero_one": {"var_freeze_step": 40, "var_update_scaler": 1}})
    given["train"] = {"optimizer": "zero_one_adam", "on_nonfinite": "skip"}
    found = pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=10, bad=9, sections=given)
    assert found[0]["digest"] == found[1]["digest"]
    rejected = [one["rejected"] for one in records(tmp_path) if one["kind"] == "islands"]
    assert [sum(island) for island in zip(*rejected, strict=True)] == [0, 1]
    saved, problems = latest_good(tmp_path / "run" / "checkpoints")
    assert saved.step == 10 and not problems
    for slot in ("square", "mean"):
        one, other = (saved.read(f"optim/{slot}/embed.weight", (0, 0), (16, 12), rank) for rank in range(2))
        assert torch.equal(one, other) and bool(one.any())


@pytest.mark.parametrize("islands", [[[0], [1]], [[0, 1]]], ids=["alone", "together"])
def test_in_an_island_nothing_is_left_of_what_goes_between_islands(
    pool: Pool, tmp_path: Path, islands: list[list[int]]
) -> None:
    """So one exchange serves both the steps before the islands part and those after."""
    between = {"error_feedback": {"two_shot": {"codec": "int8"}}}
    written = {"local_sgd": {"sync_every": 3}}
    found = []
    for name, exchange in (("dense", "dense"), ("levels", {"hierarchical": {"inter": between}})):
        given = sections(written, islands=islands)
        given["plan"]["exchange"] = exchange
        found.append(pool.run("run.jobs:train", 2, folder=str(tmp_path / name), steps=7, sections=given))
    assert [one["digest"] for one in found[0]] == [one["digest"] for one in found[1]]
    lone = sections(written, islands=[[0], [1]])
    lone["plan"]["exchange"] = between
    if len(islands) == 2:
        coded = pool.run("run.jobs:train", 2, folder=str(tmp_path / "coded"), steps=7, sections=lone)
        assert coded[0]["digest"] == found[0][0]["digest"]


def test_half_parameters_follow_their_float32_copies(pool: Pool, tmp_path: Path) -> None:
    given = {"steps": 8, "kind": "halves", "sections": sections({"diloco": {"sync_every": 3}})}
    whole = pool.run("run.jobs:train", 2, folder=str(tmp_path / "whole"), **given)
    assert whole[0]["digest"] == whole[1]["digest"]
    pool.run("run.jobs:train", 2, folder=str(tmp_path / "parts"), until=4, **given)
    again = pool.run("run.jobs:train", 2, folder=str(tmp_path / "parts"), resume=True, **given)
    assert again[1]["digest"] == whole[0]["digest"]


@pytest.mark.parametrize(("saved", "resumed"), [(2, 1), (1, 2)])
def test_rounds_of_other_fragments_are_refused(pool: Pool, tmp_path: Path, saved: int, resumed: int) -> None:
    """One is under way at the stop, of parameters that the other fragments divide in another way."""

    def divided(fragments: int) -> dict[str, Any]:
        written = {"streaming_diloco": {"sync_every": 4, "fragments": fragments, "sync_delay": 2}}
        return {"folder": str(tmp_path), "steps": 9, "fresh_plan": True, "sections": sections(written)}

    pool.run("run.jobs:train", 2, until=5, **divided(saved))
    for answer in pool.attempt("run.jobs:train", 2, resume=True, **divided(resumed)):
        assert answer["kind"] == "BadInput"
        assert f"other settings of plan.sync: wanted {saved} in plan.sync.fragments, got {resumed}; " in answer["error"]


BAD: list[tuple[dict[str, Any], str]] = [
    (sections({"diloco": {"sync_every": 0}}), "plan.sync.diloco.sync_every: wanted a period of at least 1 step, got 0"),
    (sections({"diloco": {"sync_every": 4, "fragments": 5}}), "plan.sync.diloco.fragments: wanted 1 to 4 fragments"),
    (
        sections({"diloco": {"sync_every": 4, "sync_delay": 4}}),
        "plan.sync.diloco.sync_delay: wanted a delay of 0 to 3 steps, got 4",
    ),
    (sections({"diloco": {"alpha": 1.5}}), "plan.sync.diloco.alpha: wanted a mixing factor from 0 to 1, got 1.5"),
    (
        sections({"local_sgd": {"warmup_steps": -1}}),
        "plan.sync.local_sgd.warmup_steps: wanted 0 or more steps, got -1",
    ),
    (
        sections({"diloco": {"outer_optimizer": {"nesterov": {"momentum": 1.0}}}}),
        "plan.sync.diloco.outer_optimizer.nesterov.momentum",
    ),
    (
        sections({"zero_one": {"var_update_scaler": -1}}),
        "plan.sync.zero_one.var_update_scaler: wanted 0 or more steps, got -1",
    ),
    (
        sections({"zero_one": {"local_step_scaler": -1}}),
        "plan.sync.zero_one.local_step_scaler: wanted 0 or more steps, got -1",
    ),
    (
        {"plan": {"sync": "local_sgd"}, "train": {"optimizer": "zero_one_adam"}},
        "train.optimizer: wanted synchronous first steps",
    ),
    (
        sections({"diloco": {"sync_every": 4, "local_steps": [4, 5]}}),
        "plan.sync.diloco.local_steps: wanted 1 to 4 steps",
    ),
    (sections({"diloco": {"sync_every": 4, "local_steps": [3, 2]}}), "and 4 (sync_every) for at least one, got [3, 2]"),
    (
        sections({"local_sgd": {"sync_every": 4, "local_steps": [4]}}),
        "plan.sync.local_steps: wanted one number of local steps for each of 2 islands",
    ),
    (
        sections({"cser": {"sync_every": 4, "local_steps": [4, 2]}}),
        "plan.sync.cser: cser has no parameter 'local_steps'",
    ),
    (
        sections({"gossip": {"global_sync_every": 0}}),
        "plan.sync.gossip.global_sync_every: wanted 1 or more rounds between averages over all islands, got 0",
    ),
    (
        sections({"gossip": {"gamma": 2}}),
        "plan.sync.gossip.gamma: wanted a consensus step size above 0 and up to 1, got 2",
    ),
    (sections({"gossip": {"codec": "lossless"}}), "plan.sync.gossip.codec: wanted a codec whose messages have a fixed"),
    (sections({"gossip": {"topology": "rings"}}), "plan.sync.gossip.topology: no topology is called 'rings'"),
    (sections({"dilocco": {}}), "no sync is called 'dilocco'"),
    ({"plan": {"sync": "diloco", "adapt": "l_greco"}}, "plan.adapt: wanted policy bcrs, or plan.sync every_step"),
    (
        {"plan": {"sync": "diloco", "adapt": "bcrs"}, "machines": {"islands": [[0, 1]]}},
        "plan.adapt: wanted islands of one rank each",
    ),
    ({"plan": {"sync": "diloco", "mesh": {"pipe": 2}}}, "plan.sync: wanted no pipeline stages with"),
    ({"plan": {"sync": "auto", "exchange": "dense"}}, "plan.sync: wanted plan.exchange: auto with plan.sync: auto"),
]


@pytest.mark.parametrize(("given", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_bad_input(pool: Pool, tmp_path: Path, given: dict[str, Any], said: str) -> None:
    answers = pool.attempt("run.jobs:train", 2, folder=str(tmp_path), steps=4, sections=given)
    assert all(one["kind"] == "BadInput" for one in answers), answers
    assert said in answers[0]["error"]
