"""A micro-batch counts as many labels as the model's own loss is the mean of, whether it shifts them or not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import gossamer
from gossamer.data.ordering import SampleOrder
from run.jobs import Labelled

LENGTH, WORDS = 9, 16


class Sequences(Dataset[dict[str, Tensor]]):
    """Every third sequence has labels at its end alone, every second no first one."""

    def __init__(self) -> None:
        self.ids = torch.randint(1, WORDS, (24, LENGTH), generator=torch.Generator().manual_seed(1))
        self.labels = self.ids.clone()
        self.labels[::3, :5] = -100
        self.labels[::2, 0] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def trained(model: nn.Module, folder: Path, *, steps: int, **train: Any) -> list[dict[str, Any]]:
    given = {"steps": steps, "batch": 8, "evaluate_every": 0, "checkpoint_every": 0, "max_grad_norm": 0.0, **train}
    gossamer.train(model, Sequences(), {"train": given, "run": {"directory": str(folder)}})
    (file,) = folder.glob("*/records.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def causal() -> nn.Module:
    import transformers

    shape = {"n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 2}
    still = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, **shape, **still))


@pytest.mark.parametrize("kind", ["t5", "bert", "gpt2"])
def test_unequal_micro_batches_are_the_plain_loop(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = causal() if kind == "gpt2" else Labelled(kind)
    plain = copy.deepcopy(model).train()
    more = {"accumulate": 2, "optimizer": {"sgd": {"lr": 0.1}}, "lr_schedule": "constant"}
    ours = [one["loss"] for one in trained(model, tmp_path, steps=4, **more) if one["kind"] == "step"]
    data, order, losses = Sequences(), SampleOrder(0, 24), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        rows = torch.from_numpy(order(np.arange(8 * step, 8 * step + 8)))
        loss = plain(input_ids=data.ids[rows], labels=data.labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert ours == pytest.approx(losses, rel=1e-6)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


class Own(nn.Module):
    """A model with a loss of its own. `kind` says how that counts, with what besides, and where its forward fails."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.kind = nn.Embedding(WORDS, 12), nn.Linear(12, WORDS), kind
        if "zero" in kind:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if "fails" in self.kind and not (labels != -100).any(1).all():
            raise ValueError("no label")
        logits = self.head(self.embed(input_ids))
        if "logits" in self.kind:
            return logits
        if "shifts" in self.kind:
            logits, labels = logits[:, :-1], labels[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels != -100).sum()
        loss = total / (count.clamp(min=1) if "clamped" in self.kind else count)
        return loss + 0.01 * logits.square().mean() if "terms" in self.kind else loss


@pytest.mark.parametrize(
    ("kind", "counts_first"),
    [
        ("shifts", False),
        ("shifts, clamped", False),
        ("shifts, terms", False),
        ("shifts, clamped, terms", False),
        ("shifts, zero", False),
        ("logits", False),
        ("all", True),
        ("all, clamped", True),
        ("all, terms", True),
        ("all, clamped, terms", True),
        ("all, zero, clamped", True),
    ],
)
def test_what_a_loss_counts_is_measured(kind: str, counts_first: bool, tmp_path: Path) -> None:
    records = trained(Own(kind), tmp_path, steps=1, batch=24)
    labels = Sequences().labels[:, 0 if counts_first else 1 :]
    assert [one["weight"] for one in records if one["kind"] == "step"] == [int((labels != -100).sum())]
    assert not [one for one in records if one["kind"] == "event" and "first label" in one["message"]]


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    records = trained(Own("all, fails"), tmp_path, steps=1)
    (said,) = [one["message"] for one in records if one["kind"] == "event" and "first label" in one["message"]]
    assert "could not be measured (ValueError: no label)" in said


@pytest.mark.parametrize(
    ("kind", "ranks", "plan"),
    [
        ("t5", 2, {"batch_fractions": [0.75, 0.25]}),
        pytest.param("bert", 2, {"batch_fractions": [0.75, 0.25]}, marks=pytest.mark.nightly),
        pytest.param("bert", 2, {"mesh": {"pipe": 2}}, marks=pytest.mark.nightly),
        pytest.param("bert", 2, {"sharding": "zero3"}, marks=pytest.mark.nightly),
    ],
)
def test_unequal_replicas_are_one_process(pool, tmp_path: Path, kind: str, ranks: int, plan: dict[str, Any]) -> None:
    train = {"accumulate": 2, "optimizer": {"sgd": {"lr": 0.5}}, "prove": "never", "evaluate_every": 3}
    given = {"kind": kind, "steps": 6, "values": True}
    alone = {"train": {**train, "accumulate": 1}}
    (one,) = pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), sections=alone, **given)
    if "mesh" in plan:
        given["values"] = False
    sections = {"train": train, "plan": plan}
    found = pool.run("run.jobs:train", ranks, folder=str(tmp_path / "all"), sections=sections, **given)
    if "mesh" not in plan:
        for other in found:
            torch.testing.assert_close(torch.tensor(other["values"]), torch.tensor(one["values"]), rtol=1e-5, atol=1e-6)
    for kind_of in ("step", "evaluation"):
        ours, plain = (_losses(tmp_path / name, kind_of) for name in ("all", "one"))
        assert plain and ours == pytest.approx(plain, rel=1e-5)


def _losses(folder: Path, kind: str) -> list[float]:
    lines = map(json.loads, (folder / "run" / "records.jsonl").read_text().splitlines())
    return [one["loss"] for one in lines if one["kind"] == kind]
