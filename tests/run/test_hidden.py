"""Runs whose student is to hold its teacher's hidden states: equal on any number of ranks, over a stop, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.run.checkpoint import read_model
from gossamer.store.checkpoint import open_checkpoint
from pool import Pool
from run.jobs import Headed
from run.test_distillation import losses, records, saved, sections, train

MI = {"mi_alpha": {"alpha": 0.9, "width": 8, "tokens": 6}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("teacher"), 16)


def hidden(teacher: str, by: Any = "mse", **more: Any) -> dict[str, Any]:
    output = {"kl": {"teacher": teacher, "label_weight": 0.3, "tile_tokens": 5}}
    return {"hidden": {"output": output, "by": by, "pairs": 2, **more}}


def names(folder: Path) -> set[str]:
    """Return the names of all tensors in the newest checkpoint."""
    newest = max((folder / "run" / "checkpoints").glob("step-*"))
    return set(open_checkpoint(newest.parent, int(newest.name.removeprefix("step-"))).names())


@pytest.mark.parametrize("by", ["mse", "cosine"])
def test_unequal_ranks_train_as_one_does(pool: Pool, teacher: str, tmp_path: Path, by: str) -> None:
    """A mean over tokens is exact by their counts; the student takes steps in the direction of its match."""
    found = {}
    for ranks, plan in ((1, {}), (3, {"sharding": "zero1"})):
        given = sections(hidden(teacher, by), plan, accumulate=2)
        runs = train(pool, ranks, tmp_path / str(ranks), given)
        assert all(one["digest"] == runs[0]["digest"] for one in runs)
        found[ranks] = torch.tensor(runs[0]["values"])
    assert torch.allclose(found[1], found[3], rtol=1e-5, atol=1e-6)
    assert losses(tmp_path / "3") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    said = [one["message"] for one in records(tmp_path / "1", "event")]
    assert any("hidden states of layers.1 with model.layers.0, layers.3 with model.layers.1" in one for one in said)


def test_maps_are_trained_beside_the_student_and_no_part_of_it(pool: Pool, teacher: str, tmp_path: Path) -> None:
    """The checkpoint has them; what reads it as a model does not, and the module is as before after the run."""
    (run,) = train(pool, 1, tmp_path / "with", sections(hidden(teacher, MI)), steps=3)
    (without,) = train(pool, 1, tmp_path / "without", sections(hidden(teacher)["hidden"]["output"]), steps=3)
    assert len(run["values"]) == len(without["values"]) and run["digest"] != without["digest"]
    maps = {f"{name}_{pair}" for name in ("student", "teacher", "log_q") for pair in range(2)}
    assert names(tmp_path / "with") - names(tmp_path / "without") >= {f"model/hidden_match.{one}" for one in maps}
    torch.manual_seed(0)
    module = Headed()
    read_model(module, tmp_path / "with" / "run" / "checkpoints")
    assert [x for _, p in sorted(module.named_parameters()) for x in p.detach().flatten().tolist()] == run["values"]
    newest = max((tmp_path / "with" / "run" / "checkpoints").glob("step-*"))
    held = open_checkpoint(newest.parent, 3)
    assert all(float(held.read(f"model/hidden_match.log_q_{pair}")) != 0 for pair in range(2))  # drawn as 0
    ours, plain = (records(tmp_path / one, "evaluation")[-1]["loss"] for one in ("with", "without"))
    assert ours == pytest.approx(plain, rel=0.1)  # of the labels, and not of the match


@pytest.mark.parametrize("layers", [{}, {"layers": "emd", "pairs": 0}], ids=["skip", "emd"])
def test_a_resume_is_bit_equal(pool: Pool, teacher: str, tmp_path: Path, layers: dict[str, Any]) -> None:
    """Tokens are drawn (6 of some 60) by seed, step and micro-batch, and the maps go on with their moments."""
    given = sections(hidden(teacher, MI, **layers), accumulate=2)
    whole = train(pool, 2, tmp_path / "whole", given)
    train(pool, 2, tmp_path / "part", given, until=3)
    part = train(pool, 2, tmp_path / "part", given, resume=True)
    assert part[0]["digest"] == whole[0]["digest"]
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


def test_two_ranks_compare_the_same_micro_batches_as_one(pool: Pool, teacher: str, tmp_path: Path) -> None:
    """The bound is of a micro-batch: one rank with two of them does what two ranks with one do."""
    found = []
    for ranks, accumulate in ((1, 2), (2, 1)):
        folder = tmp_path / str(ranks)
        runs = train(pool, ranks, folder, sections(hidden(teacher, MI), accumulate=accumulate))
        found.append(torch.tensor(runs[0]["values"]))
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"mesh": {"pipe": 2}, "cuts": ["embed", "layers.1"]}, "a model in one stage"),
        ({"sharding": "zero3"}, "parameters that are there all the time"),
        ({"sync": {"local_sgd": {"sync_every": 2}}}, "gradients that are averaged at every step"),
        ({"savers": ["recompute"]}, "no savers"),
    ],
)
def test_what_keeps_blocks_elsewhere_is_refused(
    pool: Pool, teacher: str, tmp_path: Path, plan: dict[str, Any], said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        train(pool, 2, tmp_path, sections(hidden(teacher), plan))


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("branches", {}, "one list of repeated blocks in the student"),
        ("headed", {"pairs": 0}, "got 4 in the student and 2 in the teacher"),
        ("headed", {"output": {"kl": {}}}, "output: .kl: .teacher: FOLDER"),
    ],
)
def test_models_that_do_not_fit_are_refused(
    pool: Pool, teacher: str, tmp_path: Path, kind: str, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        train(pool, 1, tmp_path, sections(hidden(teacher, **more)), kind=kind)
