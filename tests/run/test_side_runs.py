"""Side networks as whole runs: replicas and sharded states train what one process does, and a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from gossamer.model.origin import origin_of
from gossamer.recipe import Recipe
from gossamer.recipe.conflicts import check
from gossamer.recipe.conflicts.side import tokens_with_loss
from gossamer.spec.config import ModelSection, RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import MeshSizes, Plan
from pool import Pool
from run.adapter_jobs import HEADS, SIZES

SIDE: dict[str, Any] = {"model": {"side": {"unipt": {"reduction": 4}}}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small Llama."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    origin_of(ModelSection(hf="llama", config={**SIZES, **HEADS})).build(1).save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    return [one["loss"] for one in lines if one["kind"] == "step"]


def trained(pool: Pool, folder: Path, base: str, ranks: int, **more: Any) -> list[float]:
    sections = {**SIDE, **more.pop("sections", {})}
    pool.run("run.adapter_jobs:train", ranks, base=base, adapter="none", folder=str(folder), sections=sections, **more)
    return losses(folder)


def test_every_layout_trains_the_same_side_network(pool: Pool, tmp_path: Path, base: str) -> None:
    alone = trained(pool, tmp_path / "one", base, 1, steps=5)
    assert abs(alone[-1] - alone[0]) > 1e-3
    for way in ("none", "zero3"):
        sections = {"plan": {"sharding": way}}
        found = trained(pool, tmp_path / way, base, 2, steps=5, sections=sections)
        assert found == pytest.approx(alone, rel=1e-5), way
    stored = [name for file in (tmp_path / "none").glob("checkpoints/*/*.safetensors") for name in load_file(file)]
    weights = {name for name in stored if name.startswith("model/")}
    assert weights and all(name.startswith("model/side_network.") for name in weights)


def test_a_run_goes_on_with_other_ranks(pool: Pool, tmp_path: Path, base: str) -> None:
    alone = trained(pool, tmp_path / "one", base, 1, steps=5)
    trained(pool, tmp_path / "two", base, 2, steps=3)
    assert trained(pool, tmp_path / "two", base, 1, steps=5, resume=True) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"plan": {"mesh": {"pipe": 2}}}, "a model in one stage"),
        ({"model": {**SIDE["model"], "compile": True}}, "a model that is not compiled"),
        ({"train": {"adversarial": {"epsilon": 0.1}}}, "no adversarial training"),
        ({"model": {"side": {"unipt": {"tokens": "mean"}}}}, "no token may see a later one"),
        *(
            ({"model": {"side": {"sherl": {"tokens": "last"}}}, "train": {"loss": loss}}, f"the loss {name}.*later one")
            for name, loss in (
                ("dpo", "dpo"),
                *((one, {one: {"teacher": "x"}}) for one in ("kl", "reverse_kl", "jsd", "taid")),
            )
        ),
    ],
)
def test_what_cannot_be_combined_is_refused(sections: dict[str, Any], told: str) -> None:
    given = {"machines": {"processes": 2}, **sections}
    given["model"] = {"hf": "llama", **SIDE["model"], **sections.get("model", {})}
    asked = RunConfig.model_validate(given)
    with pytest.raises(BadInput, match=told):
        check(asked, planned(asked))


def test_a_side_network_that_pools_goes_with_a_loss_by_row() -> None:
    """Only what judges tokens one by one must not see later ones; a dataset of one's own may have one label a row."""
    for section in ({"train": {"loss": "classification"}}, {"train": {"loss": {"kl": {"teacher": "x"}}}}):
        data = {"factory": "a:b"}
        asked = RunConfig.model_validate(
            {"model": {"hf": "llama", "side": {"unipt": {"tokens": "mean"}}}, "data": data, **section}
        )
        assert tokens_with_loss(Recipe.of(asked, planned(asked))) is None
    causal = RunConfig.model_validate({"model": {"hf": "llama", "side": "unipt"}, "train": {"loss": "dpo"}})
    assert tokens_with_loss(Recipe.of(causal, planned(causal))) is None


def planned(asked: RunConfig) -> Plan:
    stages = 2 if asked.plan.mesh.pipe == 2 else 1
    units = {"units": ("a", "b"), "cuts": ("a", "b")} if stages == 2 else {}
    replicas = 2 // stages
    return Plan(
        mesh=MeshSizes(replica=replicas, pipe=stages),
        batch_fractions=(1 / replicas,) * replicas,
        rows=(8,) * replicas,
        microbatches=(2,) * replicas,
        pipeline_schedule="gpipe" if stages == 2 else "single_stage",
        **units,
    )
