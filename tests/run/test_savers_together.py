"""What saves memory or learns more per step, beside each other: equal to what each is without the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pool import Pool

STEPS = 4


def ended(
    pool: Pool, folder: Path, ranks: int = 1, kind: str = "small", **sections: dict[str, Any]
) -> list[dict[str, Any]]:
    given = {"steps": STEPS, "values": True, "dropout": 0.1, "kind": kind}
    return pool.run("run.jobs:train", ranks, folder=str(folder), sections=sections, **given)


def tiers(folder: Path) -> dict[str, Any]:
    return {"tiers": {"device": "64MB", "host": "64MB", "file": "64MB", "directory": str(folder / "tiers")}}


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "coat", "muon", "lamb", {"proximal": {"inner": "sgd"}}])
def test_tiers_hold_the_states_of_every_optimizer(pool: Pool, tmp_path: Path, optimizer: Any) -> None:
    train = {"optimizer": optimizer, "max_grad_norm": 0.0}
    ours = ended(pool, tmp_path / "a", plan={"sharding": tiers(tmp_path)}, train=train)
    assert ours[0]["digest"] == ended(pool, tmp_path / "b", train=train)[0]["digest"]


@pytest.mark.parametrize(
    "plan", [{"sharding": "tiers"}, {"sharding": "zero1"}, {"sync": {"local_sgd": {"sync_every": 2}}}, {}]
)
def test_cut_cross_entropy_and_recompute_in_every_layout(pool: Pool, tmp_path: Path, plan: dict[str, Any]) -> None:
    """Micro-batches, clipped steps, dropout. Recompute changes no bit, the loss in tiles the last ones."""
    is_tiered, found = plan.get("sharding") == "tiers", []
    for savers in ([], ["cut_cross_entropy"], ["cut_cross_entropy", "recompute"]):
        folder = tmp_path / str(len(found))
        asked = {"exchange": "dense", **plan, **({"sharding": tiers(folder)} if is_tiered else {}), "savers": savers}
        optimizer = {"sgd": {"lr": 0.1}}  # AdamW divides rounding errors by rounding errors where gradients are 0
        train = {"accumulate": 2, "optimizer": optimizer}
        ranks = 1 if is_tiered else 2
        found.append(torch.tensor(ended(pool, folder, ranks, "row", plan=asked, train=train)[0]["values"]))
    plain, cut, both = found
    assert torch.allclose(plain, cut, rtol=1e-5, atol=1e-6)
    assert torch.equal(cut, both)


@pytest.mark.parametrize("optimizer", [{"eva": {"lr": 0.05, "damping": 0.1}}, {"schedule_free_adamw": {"lr": 1e-2}}])
def test_recompute_gives_an_optimizer_what_it_had(pool: Pool, tmp_path: Path, optimizer: Any) -> None:
    """Vectors of layers count once, though their forward runs twice; averaged points are the same."""
    train = {"optimizer": optimizer, "lr_schedule": "constant", "accumulate": 2}
    found = [
        ended(pool, tmp_path / str(bool(savers)), 2, plan={"exchange": "dense", "savers": savers}, train=train)
        for savers in ([], ["recompute"])
    ]
    assert [one["digest"] for one in found[0]] == [one["digest"] for one in found[1]]


def test_perturbed_batches_are_recomputed_and_cut_as_others(pool: Pool, tmp_path: Path) -> None:
    """Three passes a step: with the same random numbers where one of them runs twice."""
    attack = {"epsilon": 0.3, "delay": 1, "inputs": ["scale"]}
    train = {"optimizer": {"sgd": {"lr": 0.1}}, "accumulate": 2, "adversarial": attack}
    sizes = {"host": "4MB", "file": "16MB", "directory": str(tmp_path / "swap"), "least": 1}
    found = [
        ended(pool, tmp_path / f"with {number}", 1, "row", plan={"savers": savers}, train=train)[0]
        for number, savers in enumerate(([], ["recompute"], ["cut_cross_entropy"], [{"activation_swap": sizes}]))
    ]
    assert found[0]["digest"] == found[1]["digest"] == found[3]["digest"]
    assert torch.allclose(torch.tensor(found[0]["values"]), torch.tensor(found[2]["values"]), rtol=1e-5, atol=1e-6)
