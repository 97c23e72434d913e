"""Runs that begin from a start folder: the same first loss on any number of ranks, and moments that go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossamer.model.origin import origin_of
from gossamer.model.started_source import set_attributes, start_of
from gossamer.optimizer.adamw import AdamW
from gossamer.run.batches import DatasetBatches, Feed
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.store.start_folder import MASKS, MOMENTS, WEIGHTS, StartContent, StartFolder, start_state, write_start
from run.adapter_jobs import HEADS, LR, SIZES, Rows

STEPS, MOMENT_STEPS, EPS = 4, 7, "model.norm.variance_epsilon"
CONFIG = {**SIZES, **HEADS, "num_hidden_layers": 2}


def section(folder: Path, **more: object) -> ModelSection:
    return ModelSection.model_validate({"hf": "llama", "config": CONFIG, "start": str(folder), **more})


def model(seed: int = 5) -> nn.Module:
    return origin_of(ModelSection(hf="llama", config=CONFIG)).build(seed)


def written(folder: Path, slots: tuple[str, ...] = ("mean", "square"), **more: object) -> tuple[nn.Module, dict]:
    module = model()
    draw = torch.Generator().manual_seed(3)
    moments = {
        f"{slot}/{name}": 1e-3 * torch.randn(p.shape, generator=draw) ** (2 if slot == "square" else 1)
        for slot in slots
        for name, p in module.named_parameters()
    }
    content = StartContent(
        tensors={name: tensor.detach() for name, tensor in start_state(module)},
        method="by_hand",
        source="0",
        said={"loss": 1.5},
        moments=moments,
        moment_steps=MOMENT_STEPS,
        attributes={EPS: 0.5},
        config_keys={"rms_norm_eps": 0.5},
        **more,
    )
    write_start(folder, content)
    module.model.norm.variance_epsilon = 0.5
    return module, moments


def by_hand(module: nn.Module, moments: dict[str, Tensor]) -> list[float]:
    """The losses of the same steps in one process, of which the first update is number `MOMENT_STEPS` + 1."""
    rule, losses = AdamW(lr=LR, weight_decay=0.0), []
    params = dict(module.named_parameters())
    state = {name: {slot: moments[f"{slot}/{name}"].clone() for slot in rule.slots} for name in params}
    feed = Feed(DatasetBatches(Rows()), Plan(rows=(8,), microbatches=(1,)), 0, 0)
    for step in range(STEPS):
        rows = feed.fetch(step)[0].rows
        logits = module(input_ids=rows["input_ids"]).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), rows["labels"][:, 1:].flatten())
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        rule.update(params, grads, state, lr_scale=1.0, step=MOMENT_STEPS + step)
        losses.append(float(loss.detach()))
    return losses


def records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "records.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def run(pool, folder: Path, start: Path, ranks: int, **sections: dict) -> list[float]:
    model = {"config": CONFIG, "start": str(start), **sections.pop("model", {})}
    adapter = model.pop("adapter", "none")
    given = {"model": model, **sections}
    pool.run(
        "run.adapter_jobs:train",
        ranks,
        base="llama",
        adapter=adapter,
        folder=str(folder),
        steps=STEPS,
        sections=given,
    )
    return [step["loss"] for step in records(folder, "step")]


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [(1, {}), (2, {}), (2, {"sharding": "zero1"}), (2, {"sharding": "zero3"}), (2, {"mesh": {"pipe": 2}})],
)
def test_a_run_begins_with_weights_and_moments_on_any_number_of_ranks(pool, tmp_path: Path, ranks, plan) -> None:
    module, moments = written(tmp_path / "start")
    losses = run(pool, tmp_path / "run", tmp_path / "start", ranks, plan=plan)
    assert losses == pytest.approx(by_hand(module, moments), rel=2e-5)
    told = [one["message"] for one in records(tmp_path / "run", "event")]
    assert any("begins with the optimizer's mean, square" in one for one in told)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"slots": ("momentum",)}, "(momentum) are not those of train.optimizer adamw (mean, square)"),
        ({"moment_rule": "lamb"}, "are those of lamb, not of train.optimizer adamw: they are dropped"),
    ],
)
def test_moments_of_another_rule_are_dropped_and_that_is_said(pool, tmp_path: Path, more, said: str) -> None:
    module, _ = written(tmp_path / "start", **more)
    losses = run(pool, tmp_path / "run", tmp_path / "start", 1)
    zeros = {f"{slot}/{n}": torch.zeros_like(p) for slot in ("mean", "square") for n, p in module.named_parameters()}
    assert losses[0] == pytest.approx(by_hand(module, zeros)[0], rel=1e-5)
    told = [one["message"] for one in records(tmp_path / "run", "event")]
    assert any(said in one for one in told)


UP, QUERY = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
TRAINED = f"has masks of 1 parameters ({UP}), which train.optimizer"


@pytest.mark.parametrize(
    ("given", "optimizer", "said"),
    [
        ({}, None, TRAINED),
        ({"adapter": {"mask_lora": {"targets": ["q_proj"]}}}, None, ""),
        ({"adapter": {"mask_lora": {"targets": ["q_proj"]}}, "unfreeze": ["up_proj"]}, None, TRAINED),
        ({"adapter": {"lora": {"targets": ["q_proj"]}}}, None, ""),
        (
            {"adapter": {"lora": {"targets": ["up_proj"]}}},
            None,
            f"has masks of 1 parameters ({UP}), which model.adapter",
        ),
        ({}, {"static_mask": {"inner": "adamw", "masks": "start"}}, "holds the zeros of the masks"),
        ({}, {"static_mask": {"inner": "adamw"}}, TRAINED),  # it draws masks of its own
    ],
)
def test_zeros_that_fill_are_said_and_no_others(pool, tmp_path: Path, given: dict, optimizer, said: str) -> None:
    module, draw = model(), torch.Generator().manual_seed(3)
    names = [UP, QUERY] if "mask_lora" in given.get("adapter", {}) else [UP]
    masks = {name: torch.rand(module.get_parameter(name).shape, generator=draw) > 0.5 for name in names}
    for name, mask in masks.items():
        module.get_parameter(name).data.mul_(mask)
    tensors = {name: tensor.detach() for name, tensor in start_state(module)}
    write_start(tmp_path / "start", StartContent(tensors=tensors, method="by_hand", source="0", masks=masks))
    train = {} if optimizer is None else {"train": {"optimizer": optimizer}}
    run(pool, tmp_path / "run", tmp_path / "start", 1, model=dict(given), **train)
    told = [one["message"] for one in records(tmp_path / "run", "event") if str(tmp_path / "start") in one["message"]]
    assert [said in one for one in told] == [True] * bool(said)
    assert all(torch.equal(one, masks[name]) for name, one in StartFolder(tmp_path / "start").masks())


def test_weights_come_back_bit_for_bit_and_damage_is_found(tmp_path: Path) -> None:
    module, _ = written(tmp_path / "start")
    again = origin_of(section(tmp_path / "start")).build(0)
    for (name, one), (_, other) in zip(module.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert StartFolder(tmp_path / "start").said == {"loss": 1.5}
    file = tmp_path / "start" / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadInput, match="with other data"):
        origin_of(section(tmp_path / "start")).build(0)
    assert (
        set(StartFolder(tmp_path / "start").kinds(MASKS))
        == set()
        != set(StartFolder(tmp_path / "start").kinds(MOMENTS))
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2.*no such tensor"),
        ({"num_hidden_layers": 1}, "model.layers.1.*a tensor that the model does not have"),
        ({"intermediate_size": 48}, r"mlp.*of shape \(48, 32\).*got.*\(64, 32\)"),
    ],
)
def test_a_start_folder_of_another_model_is_refused_by_name(tmp_path: Path, changes: dict, said: str) -> None:
    written(tmp_path / "start")
    other = section(tmp_path / "start", config={**CONFIG, **changes})
    with pytest.raises(BadInput, match=said):
        origin_of(other).build(0)


def test_what_is_no_start_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"model\.start: wanted a start folder, with start\.json"):
        origin_of(section(tmp_path)).build(0)
    (tmp_path / "start.json").write_text('{"format": 99}')
    with pytest.raises(BadInput, match="format 99"):
        origin_of(section(tmp_path)).build(0)
    with pytest.raises(BadInput, match="which exists"):
        written(tmp_path)
    with pytest.raises(BadInput, match="a parameter 'x'"):
        write_start(tmp_path / "new", StartContent(tensors={}, method="m", source="", masks={"x": torch.ones(1)}))
    assert not (tmp_path / "new").exists()


def test_an_attribute_is_set_wherever_the_model_is_built_and_kept_in_its_config(tmp_path: Path) -> None:
    written(tmp_path / "start")
    origin = origin_of(section(tmp_path / "start"))
    assert origin.build(0).model.norm.variance_epsilon == origin.bare(0).model.norm.variance_epsilon == 0.5
    kept = origin.kept()["config.json"]
    assert isinstance(kept, bytes) and json.loads(kept)["rms_norm_eps"] == 0.5
    with pytest.raises(BadInput, match=r"with the number model\.norm\.eps"):
        set_attributes(model(), {"model.norm.eps": 1.0}, {})


def test_a_hugging_face_folder_that_is_a_start_folder_gives_its_moments(tmp_path: Path) -> None:
    written(tmp_path / "start")
    found = start_of(ModelSection(hf=str(tmp_path / "start")))
    assert found is not None and found.slots == {"mean", "square"} and found.moment_steps == MOMENT_STEPS
    assert start_of(ModelSection(hf="llama")) is None
