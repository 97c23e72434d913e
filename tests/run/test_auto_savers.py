"""`plan.savers: auto`: none where a run fits, recompute or cut cross-entropy where it does not, said with figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer import loss
from gossamer.job.auto_savers import choose, is_open
from gossamer.job.dry_run import dry_run
from gossamer.job.fit import ProcessBase
from gossamer.job.memory_forecast import MemoryForecast
from gossamer.model.source.hf import Hf
from gossamer.partition.model_provider import ModuleSource
from gossamer.partition.rank_model import planned
from gossamer.partition.request import PartitionRequest
from gossamer.run.batches import DatasetBatches
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import Plan
from model.tiny import LLAMA, batch
from saver.test_recompute_budget_in_stages import looked_at as staged

MIB = 1 << 20
MANY_WORDS = {**LLAMA, "vocab_size": 20_000, "num_hidden_layers": 1}
FITS = "none: the run fits without: "
USUAL = ProcessBase.usual()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("To be, or not to be, that is the question. " * 400)
    return folder


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process takes what it usually does, so that the verdict of the dry run is about the same bytes."""
    monkeypatch.setattr("gossamer.job.fit.resident_bytes", lambda: (USUAL.own - 40 * MIB, USUAL.shared))


def sections(text: Path, *, model: dict[str, Any] = LLAMA, ranks: int = 1, **plan: Any) -> dict[str, Any]:
    return {
        "model": {"hf": "llama", "config": model},
        "data": {"source": f"text:{text}/*.txt", "sequence": 32, "cache": str(text / "cache")},
        "train": {"batch": 16, "steps": 4, "lr_schedule": "constant", "evaluate_every": 0, "checkpoint_every": 2},
        "machines": {"processes": ranks},
        "plan": {"exchange": "dense", **plan},
        "run": {"directory": str(text / "runs"), "display": "quiet"},
    }


def looked_at(text: Path, **given: Any) -> tuple[Plan, dict[str, Any]]:
    """The plan of a dry run, and its verdict on the memory."""
    found = dry_run(RunConfig.model_validate(sections(text, **given)))
    return Plan.model_validate(found["plan"]), found["memory"]


def on_a_machine(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    for place in ("gossamer.job.fit.memory", "gossamer.run.resources.memory"):
        monkeypatch.setattr(place, lambda: (total, total))


KNOWN: dict[str, tuple[int, int]] = {}


def needed(text: Path, **given: Any) -> tuple[int, int]:
    """The bytes that the machine needs, and those that it needs with all blocks recomputed."""
    if str(given) in KNOWN:
        return KNOWN[str(given)]
    found = []
    for savers in ("none", ["recompute"]):
        peaks = looked_at(text, savers=savers, **given)[1]["peak_bytes"]
        found.append(sum(peaks) - (len(peaks) - 1) * USUAL.shared)
    KNOWN[str(given)] = found[0], found[1]
    return KNOWN[str(given)]


@pytest.mark.nightly
def test_a_run_that_fits_gets_none_and_says_so(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most, _ = needed(text)
    on_a_machine(monkeypatch, most)
    plan, memory = looked_at(text)
    assert plan.savers == () and plan.reasons["savers"].startswith(FITS) and memory["fits"]
    on_a_machine(monkeypatch, most - 1)
    assert looked_at(text)[0].savers, "a byte less, and it does not fit without"


def test_the_model_is_not_run_on_shapes_where_a_generous_figure_fits(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.job.memory_forecast.ghost_step", None)  # would raise
    given = sections(text)
    plan = gossamer.train(given.pop("model"), None, given).run.plan()
    assert plan is not None and plan.reasons["savers"].startswith(f"{FITS}less than ")


@pytest.mark.parametrize("sequence", [64, 2048])
def test_the_generous_figure_counts_the_scores_of_attention(sequence: int) -> None:
    """In a long sequence they are most of what a block keeps."""
    module = Hf("gpt2", {"n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": sequence})
    rows = {name: value[0] for name, value in batch(rows=1, sequence=sequence).items()}
    asked = PartitionRequest(
        config=RunConfig.model_validate({"train": {"batch": 1}}),
        ranks=1,
        rank=0,
        batches=DatasetBatches([rows]),
        objective=loss.build("next_token"),
        device=torch.device("cpu"),
    )
    one = planned(ModuleSource(module.fitted_to_tokenizer(257, sequence).build(0)), asked)
    (exact,), (most,) = (each(one, local_ranks=1).ranks for each in (MemoryForecast.of, MemoryForecast.at_most))
    assert exact.total <= most.total


@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param({"ranks": 2}, marks=pytest.mark.nightly),
        pytest.param({"ranks": 2, "mesh": {"pipe": 2}}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_recompute_within_what_the_machine_has_left(
    text: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    most, least = needed(text, **given)
    total = (most + least) // 2
    on_a_machine(monkeypatch, total)
    plan, memory = looked_at(text, **given)
    saver = plan.savers[0]
    assert len(plan.savers) == 1 and isinstance(saver, dict) and 0 < len(saver["recompute"]["units"]) < 4, (
        "not all blocks"
    )
    assert memory["fits"] and sum(memory["peak_bytes"]) - (plan.ranks - 1) * USUAL.shared <= total
    why = plan.reasons["savers"]
    assert why.startswith("recompute: ") and "without" in why and "more work in the forward pass" in why
    named, _ = looked_at(text, savers=[{"recompute": {"budget": saver["recompute"]["budget"]}}], **given)
    assert named.savers == plan.savers, "the same as the budget by name"


@pytest.mark.nightly
def test_where_nothing_is_enough_the_figure_and_todays_advice_are_there(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, least = needed(text)
    on_a_machine(monkeypatch, least - 2 * MIB)
    plan, memory = looked_at(text)
    assert plan.savers == () and plan.reasons["savers"].startswith("none: no exact saver makes the run fit: ")
    assert "a budget of at least" in plan.reasons["savers"] or "recompute: " in plan.reasons["savers"]
    assert not memory["fits"] and "does not fit" in memory["verdict"]


def test_logits_that_recompute_cannot_save_are_cut(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, least = needed(text, model=MANY_WORDS)
    on_a_machine(monkeypatch, least - 4 * MIB)
    plan, memory = looked_at(text, model=MANY_WORDS)
    assert plan.savers == ("cut_cross_entropy",) and memory["fits"]
    assert plan.reasons["savers"].startswith("cut_cross_entropy: ")


@pytest.mark.nightly
def test_of_two_machines_that_with_less_memory_decides() -> None:
    found = staged("")
    needs = [USUAL.own + USUAL.shared + one.total for one in MemoryForecast.of(found, local_ranks=1).ranks]
    spans = [range(1), range(1, 2)]
    assert choose(found, [*zip(spans, needs, strict=True)]).planned.plan.savers == ()
    chosen = choose(found, [(spans[0], 2 * needs[0]), (spans[1], needs[1] - MIB)])
    assert chosen.fits and chosen.planned.plan.savers and chosen.message.startswith("savers: recompute: the run needs")
    ranks = MemoryForecast.of(chosen.planned, local_ranks=1).ranks
    assert USUAL.own + USUAL.shared + ranks[1].total <= needs[1] - MIB
    assert not is_open(chosen.planned), "a resumed run keeps what its plan says"
    none = choose(found, [(spans[0], 2 * needs[0]), (spans[1], USUAL.own)])
    assert not none.fits and none.planned.plan.savers == () and "no exact saver" in none.message


@pytest.mark.nightly
def test_named_savers_and_none_are_left_as_they_are(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine(monkeypatch, 100 * MIB)
    for savers in ("none", ["fp8_activations"]):
        plan, _ = looked_at(text, savers=savers)
        assert plan.savers == (() if savers == "none" else tuple(savers)) and "savers" not in plan.reasons


def test_what_cannot_be_looked_at_is_said_and_trained(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise TypeError("cannot copy a lock")

    monkeypatch.setattr("gossamer.job.auto_savers.MemoryForecast.of", refuses)
    on_a_machine(monkeypatch, USUAL.own + USUAL.shared + MIB)  # the generous figure does not fit
    given = sections(text)
    result = gossamer.train(given["model"], None, {k: v for k, v in given.items() if k != "model"})
    plan = result.run.plan()
    assert plan is not None and plan.reasons["savers"].startswith("none: the memory of the run is not known (TypeError")


@pytest.mark.nightly
def test_a_run_in_python_its_dry_run_and_its_resumed_run_have_one_plan(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the losses are those of the run that recomputes nothing, bit for bit."""
    most, least = needed(text)
    given = {name: value for name, value in sections(text).items() if name != "model"}
    plain = gossamer.train(sections(text)["model"], None, given)
    on_a_machine(monkeypatch, (most + least) // 2)
    dry, _ = looked_at(text)
    saved = gossamer.train(sections(text)["model"], None, given)
    plan = saved.run.plan()
    assert plan is not None and plan.savers == dry.savers and plan.reasons["savers"] == dry.reasons["savers"]
    assert dry.savers and any(plan.reasons["savers"] in str(one) for one in saved.run.records())
    assert plain.losses.tolist() == saved.losses.tolist()
    again = gossamer.train(sections(text)["model"], None, given, resume="auto")
    kept = again.run.plan()
    assert again.run.path == saved.run.path and kept is not None and kept.savers == plan.savers
