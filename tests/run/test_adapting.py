"""Runs whose exchanges are adapted as they go on: one choice for all ranks, kept, resumed to the bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from gossamer import exchange as exchange_methods
from gossamer.autotune.adaptive_compression import uplinks_downlinks_of
from gossamer.autotune.exchange_chooser import ExchangeChooser, SelectionSettings
from gossamer.autotune.exchange_selection import ExchangeSelector
from gossamer.comm.channel.loopback import LoopbackChannel
from gossamer.comm.message import ProcessGroups
from gossamer.spec.network import Link, Network
from gossamer.spec.plan import MeshSizes, Plan
from run.test_trainer import losses, records

POWERSGD = {"error_feedback": {"powersgd": {"rank": 4}}}
BCRS = {"bcrs": {"fraction": 0.05}}


def plan(exchange, adapt, **more) -> dict[str, dict]:
    return {"plan": {"exchange": exchange, "adapt": adapt, "adapt_every": 4, "adapt_window": 3, **more}}


def kept(folder: Path) -> dict:
    return yaml.safe_load((folder / "run" / "plan.yaml").read_text())


def adapted(folder: Path) -> list[int]:
    return [e["step"] for e in records(folder, "event") if e["message"].startswith("adapted: ")]


@pytest.mark.parametrize(
    ("ranks", "exchange", "adapt"),
    [
        (2, POWERSGD, {"l_greco": {"alpha": 1.2}}),
        (3, POWERSGD, {"l_greco": {"alpha": 1.2}}),
        (2, {"error_feedback": {"two_shot": "int8"}}, {"l_greco": {"alpha": 3.0}}),
        (3, {"error_feedback": {"topk": {"fraction": 0.05}}}, BCRS),
    ],
)
def test_all_ranks_go_on_with_one_choice(pool, tmp_path: Path, ranks: int, exchange, adapt) -> None:
    runs = pool.run("run.jobs:train", ranks, folder=str(tmp_path), steps=10, sections=plan(exchange, adapt))
    assert len({r["digest"] for r in runs}) == 1
    assert adapted(tmp_path)[0] == 4
    assert kept(tmp_path)["exchange"] != exchange and kept(tmp_path)["adapted_from"] == exchange
    told = losses(tmp_path)
    assert len(told) == 10 and sum(told[-3:]) < sum(told[:3])


def test_ranks_of_factors_differ_by_parameter_and_fewer_bytes_go_out(pool, tmp_path: Path) -> None:
    pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=6, sections=plan(POWERSGD, {"l_greco": {"alpha": 1.2}}))
    *before, last = kept(tmp_path)["exchange"]
    assert last == [".*", "all", POWERSGD]
    assert all(list(written) == ["error_feedback"] for _, _, written in before), "feedback stays around"
    sent = [sum(step["wire_bytes"].values()) for step in records(tmp_path, "step")]
    assert sent[4] < sent[3] == sent[0]
    assert sum(kept(tmp_path)["forecast"]["wire_bytes"].values()) > 0


@pytest.mark.parametrize("exchange", [POWERSGD, {"error_feedback": {"two_shot": "int8"}}])
def test_a_run_that_stops_right_after_a_choice_resumes_to_the_bit(pool, tmp_path: Path, exchange) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    sections = plan(exchange, {"l_greco": {"alpha": 1.5}})
    (straight, *_) = pool.run("run.jobs:train", 2, folder=str(whole), steps=10, sections=sections)
    pool.run("run.jobs:train", 2, folder=str(halves), steps=10, until=4, sections=sections)
    assert kept(halves)["exchange"] != exchange, "the choice was taken before the stop"
    (second, other) = pool.run("run.jobs:train", 2, folder=str(halves), steps=10, resume=True, sections=sections)
    assert second["digest"] == straight["digest"] == other["digest"]
    assert losses(halves) == losses(whole)
    assert kept(halves)["exchange"] == kept(whole)["exchange"]


def test_a_window_cut_by_a_stop_is_told(pool, tmp_path: Path) -> None:
    sections = plan(POWERSGD, {"l_greco": {"alpha": 1.5}})
    pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=6, until=2, sections=sections)
    pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=6, resume=True, sections=sections)
    (event,) = (e for e in records(tmp_path, "event") if e["message"].startswith("adapted: "))
    assert "from 2 steps of 3" in event["message"]


def test_a_single_candidate_is_the_run_without_adapting(pool, tmp_path: Path) -> None:
    uniform, alone = tmp_path / "uniform", tmp_path / "alone"
    (plain, _) = pool.run("run.jobs:train", 2, folder=str(uniform), steps=10, sections={"plan": {"exchange": POWERSGD}})
    sections = plan(POWERSGD, {"l_greco": {"candidates": [POWERSGD]}})
    (same, _) = pool.run("run.jobs:train", 2, folder=str(alone), steps=10, sections=sections)
    assert same["digest"] == plain["digest"] and losses(alone) == losses(uniform)
    assert kept(alone)["exchange"] == POWERSGD and adapted(alone) == []


def test_lines_are_adapted_each_by_itself(pool, tmp_path: Path) -> None:
    """One line has neighbors, the other none: what serves the embedding stays."""
    topk = {"error_feedback": {"topk": {"fraction": 0.1}}}
    lines = [["^embed", "all", topk], [".*", "all", POWERSGD]]
    runs = pool.run(
        "run.jobs:train", 2, folder=str(tmp_path), steps=10, sections=plan(lines, {"l_greco": {"alpha": 1.5}})
    )
    assert runs[0]["digest"] == runs[1]["digest"]
    *chosen, embed, rest = kept(tmp_path)["exchange"]
    assert [embed, rest] == lines and chosen and not any("embed" in pattern for pattern, _, _ in chosen)


@pytest.mark.parametrize(
    ("exchange", "adapt", "said"),
    [
        ("dense", {"l_greco": {}}, "wanted an exchange with a rank or a codec"),
        ("dense", "ada_topk", "wanted a policy for gradients"),
        (POWERSGD, {"l_greco": {"candidates": [POWERSGD, "no_such"]}}, "no_such"),
    ],
)
def test_what_cannot_be_adapted_is_refused_before_the_first_step(pool, exchange, adapt, said) -> None:
    answers = pool.attempt("run.jobs:train", 2, steps=4, sections=plan(exchange, adapt))
    assert all(a["kind"] == "BadInput" and said in a["error"] for a in answers)


def test_where_auto_needs_nothing_nothing_is_adapted(pool, tmp_path: Path) -> None:
    """On one machine auto is the plain all-reduce: it is said, and the run is what it would be without."""
    pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=5, sections=plan("auto", {"l_greco": {}}))
    assert any("nothing is adapted: dense" in e["message"] for e in records(tmp_path, "event"))
    assert kept(tmp_path)["exchange"] == "dense"


def test_paths_are_the_links_with_their_exceptions() -> None:
    slow, fast = Link(latency_s=0.01, bytes_per_s=1e6), Link(latency_s=0.01, bytes_per_s=9e6)
    paths = uplinks_downlinks_of(
        Network(islands=((0, 2), (1,)), levels={"all": slow}, uplinks={1: fast}, downlinks={0: fast})
    )
    assert paths.up == (slow, fast, slow) and paths.down == (fast, slow, slow)


def test_a_choice_without_feedback_gets_it_where_something_is_owed(pool, tmp_path: Path) -> None:
    """Else what the ranks still owe would be lost."""
    exchange, adapt = {"error_feedback": {"topk": {"fraction": 0.05}}}, {"bcrs": {"fraction": 0.05, "feedback": ""}}
    runs = pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=6, sections=plan(exchange, adapt))
    assert runs[0]["digest"] == runs[1]["digest"]
    assert "uneven_topk" in kept(tmp_path)["exchange"]["error_feedback"]["inner"]


def test_a_run_that_broke_before_its_choice_was_saved_goes_on_with_the_choice(pool, tmp_path: Path) -> None:
    """plan.yaml is newer than the checkpoint: state that fits is taken, factors of another rank start anew."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    sections = plan(POWERSGD, {"l_greco": {"alpha": 1.5}})
    pool.run("run.jobs:train", 2, folder=str(whole), steps=6, sections=sections)
    pool.run("run.jobs:train", 2, folder=str(broken), steps=12, until=3, sections=sections)
    (broken / "run" / "plan.yaml").write_text((whole / "run" / "plan.yaml").read_text())
    runs = pool.run("run.jobs:train", 2, folder=str(broken), steps=12, resume=True, sections=sections)
    assert runs[0]["digest"] == runs[1]["digest"] and len(losses(broken)) == 12
    assert kept(broken)["adapted_from"] == POWERSGD and min(losses(broken)[6:]) < losses(broken)[2]


def test_a_change_to_an_exchange_without_feedback_is_made_once() -> None:
    """What drifted links bring about, too: around dense, feedback pays what is owed, and stays."""
    kept, module = [], torch.nn.Linear(3, 2)
    channel = LoopbackChannel(0, ProcessGroups.flat(2))
    chooser = ExchangeChooser(
        engine=SimpleNamespace(module=module),
        feed=None,
        pump=SimpleNamespace(channel=channel, busy_s=0.0),
        run=SelectionSettings(lossy=True, steps=100),
        tell=lambda message, step: None,
    )
    plan = Plan(
        mesh=MeshSizes(replica=2), batch_fractions=(0.5, 0.5), rows=(1, 1), microbatches=(1, 1), exchange=POWERSGD
    )
    exchanger = ExchangeSelector(chooser=chooser, plan=plan, keep=kept.append)
    changed = exchanger.change("dense", 7, "drifted", adapted_from="")
    assert all(exchange_methods.has_residual(one) for one in changed.exchange.values())
    assert [plan.exchange for plan in kept] == [{"error_feedback": {"inner": "dense"}}]
    assert sum(kept[0].forecast.wire_bytes.values()) > 0
    assert exchanger.change("dense", 8, "again", adapted_from="") is None and len(kept) == 1
