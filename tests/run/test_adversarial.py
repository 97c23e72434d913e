"""Adversarial training against a loop written out here: bit for bit in one process, and with two replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

import gossamer
from gossamer.data.ordering import SampleOrder
from gossamer.model.forward_adapter import caller_of
from gossamer.plan import Request, build
from gossamer.run.adversarial_step import perturbation, perturbed_inputs
from gossamer.spec import records
from gossamer.spec.config import AdversarialSection, RunConfig
from gossamer.spec.errors import BadInput

BATCH, STEPS, EPSILON = 8, 6, 0.1
NORMS = ("running_mean", "running_var", "num_batches_tracked")


class Images(Dataset):
    """Small images of three classes."""

    def __init__(self, count: int = 64) -> None:
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(0, 3, (count,), generator=generator)
        self.images = torch.randn(count, 1, 6, 6, generator=generator) + self.labels[:, None, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[index], "labels": self.labels[index]}


class Net(nn.Module):
    """A convolution and batch normalization; it counts its forwards in Python and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.forwards = 0

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        if self.training:
            self.seen += 1
        return self.head(torch.relu(self.norm(self.conv(image))).mean((2, 3)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def config(folder: Path, steps: int = STEPS, **adversarial: Any) -> dict[str, Any]:
    return {
        "train": {
            "steps": steps,
            "batch": BATCH,
            "accumulate": 1,
            "optimizer": {"sgd": {"lr": 0.1, "momentum": 0.9}},
            "lr_schedule": "constant",
            "max_grad_norm": 0.0,
            "loss": "classification",
            "evaluate_every": 0,
            "adversarial": {"epsilon": EPSILON, **adversarial},
        },
        "machines": {"threads": 1},
        "run": {"directory": str(folder), "name": "a", "display": "quiet"},
    }


def loss_of(model: Net, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(rows["image"]), rows["labels"])


def reference(delay: int) -> tuple[Net, dict[str, torch.Tensor]]:
    """The loop of the paper, with copies of the model in place of all care; the model, and the second statistics."""
    torch.set_num_threads(1)
    model, data, order = net(), Images(), SampleOrder(0, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    before, other = net(), net()
    for step in range(STEPS):
        rows = default_collate([data[int(i)] for i in order(np.arange(step * BATCH, (step + 1) * BATCH))])
        attacked = net()
        attacked.load_state_dict((before if delay else model).state_dict())
        x = rows["image"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(attacked, {**rows, "image": x}), x)
        perturbed = rows["image"] + (EPSILON * gradient.sign()).clamp(-EPSILON, EPSILON)
        before.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        clean = loss_of(model, rows)
        main = {n: getattr(model.norm, n).clone() for n in NORMS}
        for name in NORMS:
            setattr(model.norm, name, getattr(other.norm, name))
        total = clean + loss_of(model, {**rows, "image": perturbed})
        for name in NORMS:
            setattr(model.norm, name, main[name])
        total.backward()
        optimizer.step()
    return model, dict(other.norm.named_buffers())


@pytest.mark.parametrize("delay", [0, 1])
def test_it_is_the_loop_of_the_paper_bit_for_bit(tmp_path: Path, delay: int) -> None:
    model = net()
    gossamer.train(model, Images(), config(tmp_path, delay=delay))
    wanted, _ = reference(delay)
    for name, p in wanted.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], p), name
    for name in NORMS:
        assert torch.equal(getattr(model.norm, name), getattr(wanted.norm, name)), name
    assert int(model.norm.num_batches_tracked) == STEPS and float(model.seen) == STEPS


def test_the_delay_and_the_perturbation_change_what_is_learnt() -> None:
    now, late = reference(0)[0], reference(1)[0]
    assert not torch.equal(now.conv.weight, late.conv.weight)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_resumed_run_is_the_one_that_was_not_stopped(tmp_path: Path, delay: int) -> None:
    """With momentum, previous weights and both statistics; the stopped run ends by a callback."""

    def stop(record: Any) -> str | None:
        return "stop" if isinstance(record, records.Step) and record.step == 3 else None

    written = config(tmp_path, delay=delay)
    first, again = net(), net()
    gossamer.train(first, Images(), written, callbacks=[stop])
    gossamer.train(again, Images(), written, resume="auto")
    wanted, _ = reference(delay)
    assert not torch.equal(first.conv.weight, again.conv.weight)
    for name, p in wanted.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], p), name
    assert torch.equal(again.norm.running_mean, wanted.norm.running_mean)


def test_two_replicas_are_one_process(pool: Any, tmp_path: Path) -> None:
    """A model without batch statistics: the perturbation of a row depends on its own gradient alone."""
    sections = {
        "train": {
            "steps": 6,
            "batch": 8,
            "optimizer": {"sgd": {"lr": 0.1}},
            "adversarial": {"epsilon": 0.3, "delay": 1, "inputs": ["scale"]},
        },
        "plan": {"exchange": "dense"},
    }
    found = [pool.run("run.jobs:train", n, steps=6, values=True, sections=sections)[0] for n in (1, 2)]
    plain = {**sections, "train": {**sections["train"], "adversarial": {}}}
    without = pool.run("run.jobs:train", 1, steps=6, values=True, sections=plain)[0]
    one, two, other = (np.array(each["values"]) for each in (*found, without))
    assert np.abs(one - two).max() < 1e-5 < 1e-3 < np.abs(one - other).max()
    folder, parts = str(tmp_path / "parts"), {**sections, "plan": {"exchange": "dense", "sharding": "zero2"}}
    whole = pool.run("run.jobs:train", 2, steps=6, values=True, sections=parts)[0]
    pool.run("run.jobs:train", 2, folder=folder, steps=6, until=3, sections=parts)
    again = pool.run("run.jobs:train", 2, folder=folder, steps=6, resume=True, values=True, sections=parts)[0]
    assert again["digest"] == whole["digest"]


@pytest.mark.parametrize("direction", ["sign", "normalized"])
@pytest.mark.parametrize("alpha", ["auto", 0.03, 2.0])
def test_no_element_moves_further_than_epsilon(direction: Any, alpha: Any) -> None:
    gradient = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    gradient[1], gradient[2] = 0.0, float("nan")
    settings = AdversarialSection(epsilon=0.1, alpha=alpha, direction=direction)
    moved = perturbation(gradient, settings)
    assert moved.abs().max() <= 0.1 and bool((moved[1:3] == 0).all())
    assert bool((moved * gradient.nan_to_num() >= 0).all()) and bool((moved[0] != 0).all())
    if direction == "normalized" and alpha == 0.03:
        assert torch.allclose(moved[0].norm(), torch.tensor(0.03))


class Two(nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + second


@pytest.mark.parametrize(
    ("inputs", "rows", "said"),
    [
        ([], {"first": torch.ones(1, 2), "second": torch.ones(1, 2)}, "one real-valued input.*first, second"),
        ([], {"first": torch.ones(1, 2).long(), "second": torch.ones(1).int()}, r"first \(int64\), second \(int32\)"),
        (["third"], {"first": torch.ones(1, 2), "second": torch.ones(1)}, "got third"),
        (["second"], {"first": torch.ones(1, 2), "second": torch.ones(1).long()}, r"second \(int64\)"),
    ],
)
def test_inputs_that_cannot_be_perturbed_are_named(inputs: list[str], rows: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        perturbed_inputs(AdversarialSection(epsilon=0.1, inputs=inputs), rows, caller_of(Two(), rows))


def test_tokens_are_refused_before_the_first_step(tmp_path: Path) -> None:
    class Words(Dataset):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.arange(4), "labels": torch.arange(4)}

    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    written = config(tmp_path)
    written["train"]["loss"] = "next_token"
    with pytest.raises(BadInput, match="tokens have no gradient"):
        gossamer.train(model, Words(), written)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"plan": {"mesh": {"pipe": 2}}}, "no pipeline stages"),
        ({"plan": {"sync": "diloco"}}, "gradient exchange at every step"),
        ({"plan": {"sync": "just_one_byte"}, "train": {"optimizer": {"sgd": {}}}}, "gradient exchange at every step"),
        ({"plan": {"sharding": "zero3"}}, "zero2"),
        ({"train": {"precision": "fp16"}}, "train.precision"),
        ({"train": {"prove": "always"}}, "train.prove"),
        ({"train": {"optimizer": "eva"}}, "layers see their inputs in three passes"),
        ({"model": {"compile": True}}, "model.compile"),
        ({"train": {"verify": {"every": 5}}}, "train.verify.every"),
        ({"train": {"adversarial": {"epsilon": 0.0, "delay": 1}}}, "epsilon above 0"),
        ({"train": {"adversarial": {"epsilon": 0.0, "alpha": 0.1}}}, "epsilon above 0"),
    ],
)
def test_what_it_does_not_go_with_is_refused(sections: dict[str, Any], said: str) -> None:
    train = {"batch": 8, "adversarial": {"epsilon": 0.1}, **sections.get("train", {})}
    asked = RunConfig.model_validate({**sections, "train": train})
    with pytest.raises(BadInput, match=said):
        build("data_parallel").plan(Request(asked, 4))
