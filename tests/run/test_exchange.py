"""Runs with lossy exchanges, chosen or named: resumed to the bit, merged on other ranks, changed at a step's border."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from run.test_trainer import losses, records

PAYING = {"error_feedback": "dense"}
MIXED = [
    ["^embed", "all", {"error_feedback": {"topk": {"fraction": 0.1}}}],
    ["^layers.*weight$", "all", {"error_feedback": {"powersgd": {"rank": 2}}}],
    [".*", "all", {"two_shot": "int8"}],
]


@pytest.mark.parametrize("exchange", [{"error_feedback": {"two_shot": "int4"}}, {"ef21": {"topk": {}}}, MIXED])
def test_a_lossy_run_resumes_to_the_bit(pool, tmp_path: Path, exchange) -> None:
    """Residuals, factors and estimates are state, kept per rank."""
    whole, halves, sections = tmp_path / "whole", tmp_path / "halves", {"plan": {"exchange": exchange}}
    (straight, *_) = pool.run("run.jobs:train", 2, folder=str(whole), steps=8, sections=sections)
    pool.run("run.jobs:train", 2, folder=str(halves), steps=8, until=4, sections=sections)
    (second, other) = pool.run("run.jobs:train", 2, folder=str(halves), steps=8, resume=True, sections=sections)
    assert second["digest"] == straight["digest"] == other["digest"]
    assert losses(halves) == losses(whole)


@pytest.mark.parametrize(
    ("policy", "said"), [("redistribute", "residuals were merged"), ("reset", "residuals start anew")]
)
def test_on_other_ranks_residuals_are_merged_or_dropped_and_it_is_said(pool, tmp_path: Path, policy, said) -> None:
    plan = {"exchange": {"error_feedback": {"topk": {"fraction": 0.05}}}, "residuals_on_resume": policy}
    pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=8, until=4, sections={"plan": plan})
    runs = pool.run("run.jobs:train", 3, folder=str(tmp_path), steps=8, resume=True, sections={"plan": plan})
    assert len({r["digest"] for r in runs}) == 1
    assert any(said in event["message"] for event in records(tmp_path, "event"))
    assert len(losses(tmp_path)) == 8


def test_auto_between_hosts_measures_chooses_and_says_so(pool, tmp_path: Path) -> None:
    """The choice is in the plan; measuring left no trace in parameters or buffers."""
    dense, auto = tmp_path / "dense", tmp_path / "auto"
    plain = pool.run("run.jobs:train", 2, folder=str(dense), steps=4, sections={"plan": {"exchange": "dense"}})
    chosen = pool.run("run.jobs:train", 2, folder=str(auto), steps=4, hosts=2)
    plan = yaml.safe_load((auto / "run" / "plan.yaml").read_text())
    assert plan["exchange"] != "auto" and "links:" in plan["reasons"]["exchange"]
    assert any("exchange: " in event["message"] for event in records(auto, "event"))
    assert plan["forecast"]["step_s"] > 0 and len(plan["forecast"]["sent_bytes"]) == 2
    assert [r["seen"] for r in chosen] == [r["seen"] for r in plain], "the rehearsal is undone"
    assert losses(auto) == pytest.approx(losses(dense), rel=0 if plan["exchange"] == "dense" else 1e-2)


def test_auto_on_one_machine_is_the_plain_all_reduce(pool, tmp_path: Path) -> None:
    pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=2)
    assert yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())["exchange"] == "dense"


def test_an_exchange_changed_between_steps_keeps_its_residuals(pool) -> None:
    """From top-k to int4 the residual e goes on, though buckets are cut anew; the last mean is the same everywhere."""
    turns = [{"error_feedback": {"topk": {"fraction": 0.1}}}, {"error_feedback": {"two_shot": "int4"}}, PAYING]
    first, second = pool.run("run.jobs:changing", 2, exchanges=turns)
    assert first["mean"] == second["mean"]
    assert all("e@embed.weight" in kept for kept in first["kept"])
    assert all(before > 0 for before in first["owed"]) and first["paid"] == 0 == second["paid"], "dense pays it all"


def test_what_is_owed_goes_on_when_feedback_moves_between_islands(pool) -> None:
    turns = [{"error_feedback": {"topk": {"fraction": 0.1}}}, {"hierarchical": {"inter": PAYING}}]
    first, _ = pool.run("run.jobs:changing", 2, exchanges=turns)
    assert first["carried"] == first["owed"] and first["owed"][0] > 0


@pytest.mark.parametrize("bare", ["dense", {"two_shot": "int8"}, {"ef21": {"topk": {}}}])
def test_an_exchange_that_would_drop_what_is_owed_is_refused(pool, bare) -> None:
    answers = pool.attempt("run.jobs:changing", 2, exchanges=[{"error_feedback": {"topk": {}}}, bare])
    assert all("wanted an exchange with error feedback for " in a["error"] and a["kind"] == "BadInput" for a in answers)
