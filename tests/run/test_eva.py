"""Eva in whole runs: its vectors over micro-batches and unequal replicas, its states over a stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossamer import recipe
from gossamer.run.start_checks import check_before_start
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from pool import Pool
from run.test_untouched import parts_of, run_alone

NAMES = ("eva", "eva_f", "eva_s")


def sections(name: str, **train: Any) -> dict[str, dict[str, Any]]:
    rule = {name: {"lr": 0.05, "damping": 0.1}}
    return {"train": {"optimizer": rule, "lr_schedule": "constant", **train}, "plan": {"exchange": "dense"}}


@pytest.mark.parametrize("name", NAMES)
def test_unequal_replicas_and_micro_batches_have_the_vectors_of_one(pool: Pool, tmp_path: Path, name: str) -> None:
    """8 sequences with unequal labels on 1 and on 3 ranks (3, 3 and 2), in one micro-batch and in several."""
    found = []
    for ranks, pieces in ((1, 1), (1, 4), (3, 1)):
        folder = str(tmp_path / f"{ranks}-{pieces}")
        given = {"values": True, "folder": folder}  # a model without random numbers
        ended = pool.run("run.jobs:train", ranks, sections=sections(name, accumulate=pieces), **given)
        assert len({one["digest"] for one in ended}) == 1
        found.append(torch.tensor(ended[0]["values"]))
    plain = sections("sgd", optimizer={"sgd": {"lr": 0.05, "momentum": 0.9}})
    given = {"values": True, "folder": str(tmp_path / "sgd")}
    sgd = torch.tensor(pool.run("run.jobs:train", 1, sections=plain, **given)[0]["values"])
    assert (found[0] - sgd).abs().max() > 1e-3
    for one in found[1:]:
        assert torch.allclose(one, found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["eva", "eva_s"])
def test_a_resumed_run_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, name: str) -> None:
    given: dict[str, Any] = {"kind": "row", "sections": sections(name)}
    straight = pool.run("run.jobs:train", 2, folder=str(tmp_path / "a"), **given)
    for more in ({"until": 3}, {"resume": True}):
        broken = pool.run("run.jobs:train", 2, folder=str(tmp_path / "b"), **given, **more)
    assert straight[0]["digest"] == broken[0]["digest"]


class Aside(nn.Module):
    """It uses the weight of a linear layer without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.used = nn.Embedding(16, 12), nn.Linear(12, 12)
        self.out = nn.Linear(12, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(nn.functional.linear(self.embed(input_ids), self.used.weight))
        return out


def test_a_layer_that_is_not_called_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"wanted linear layers that the model calls.*such as used\.weight"):
        run_alone(parts_of(Aside(), optimizer="eva"), tmp_path)
    parts = parts_of(Aside(), optimizer={"eva": {"plain": ["embed", "used"]}})
    run_alone(parts, tmp_path / "plain")
    assert not parts.module.get_submodule("out")._forward_hooks  # the caller's module is given back as it was


@pytest.mark.parametrize(
    ("plan", "laid", "said"),
    [
        ({"mesh": {"pipe": 2}}, {"mesh": {"pipe": 2}, "cuts": ("a", "b")}, "wanted no pipeline stages with eva"),
        ({"sync": {"diloco": {"sync_every": 3}}}, {"mesh": {"replica": 2}}, "wanted plan.sync every_step with eva"),
        ({"sharding": "zero1"}, {"mesh": {"replica": 2}}, "wanted an optimizer that is the same by rows or by whole"),
        ({"sharding": "zero3"}, {"mesh": {"replica": 2}}, "wanted an optimizer that is the same by rows or by whole"),
    ],
)
def test_what_it_does_not_go_with(plan: dict[str, Any], laid: dict[str, Any], said: str) -> None:
    config = RunConfig.model_validate(
        {"train": {"batch": 4, "optimizer": "eva", "lr_schedule": "constant"}, "plan": plan}
    )
    replicas: dict[str, Any] = {"rows": (2, 2), "microbatches": (1, 1), "batch_fractions": (0.5, 0.5)}
    if "cuts" in laid:
        replicas = {"rows": (4,), "microbatches": (2,), "pipeline_schedule": "one_f_one_b"}
    with pytest.raises(BadInput, match=said):
        recipe.check(
            config, Plan.model_validate({**replicas, **{k: v for k, v in plan.items() if k != "mesh"}, **laid})
        )


def test_compiled_units_are_refused() -> None:
    parts = parts_of(Aside(), optimizer="eva")
    compiled = parts.config.model.model_copy(update={"compile": True})
    with pytest.raises(BadInput, match="wanted a model that is not compiled with eva"):
        check_before_start(replace(parts, config=parts.config.model_copy(update={"model": compiled})))
