"""A first step that is not finite names where it comes from, and does not blame the learning rate."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gossamer.run.nonfinite_cause import NonFiniteCause, NonFiniteSite, Ranks, cause_of


class Net(nn.Module):
    """Has a mask of its own, which is no fault."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = (
            nn.Embedding(8, 4),
            nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            nn.Linear(4, 1),
        )
        self.register_buffer("mask", torch.full((4,), -math.inf))
        self.at, self.by = "", math.nan

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        x = self.embed(ids) * scale
        x = x * self.by if self.at == "between" else x
        x = self.inner(x)
        x = torch.log(-1 - x.square()) if self.at == "at the end" else x
        x = self.head(x)
        return x * self.by if self.at == "outcome" else x


def seen(module: Net, *, scale: float = 1.0, root: bool = False) -> tuple[NonFiniteCause, float]:
    rows = {"ids": torch.arange(4), "scale": torch.tensor(scale)}
    sight = NonFiniteSite(module)
    with sight.watching():
        out = module(rows["ids"], rows["scale"])
    loss = (out - out.detach()).square().sum().sqrt() if root else out.mean()
    loss.backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    alone = Ranks(gather=lambda row: torch.tensor([row], dtype=torch.float64), numbers=(0,), bad=(0,))
    return cause_of(sight, 0, [rows], gradients, alone), float(loss.detach())


@pytest.mark.parametrize(
    ("at", "what", "name"),
    [("between", "given", "inner.0"), ("at the end", "given", "head"), ("outcome", "outcome", "the model")],
)
def test_the_first_module_that_sees_it_is_named(at: str, what: str, name: str) -> None:
    module = Net()
    module.at = at
    cause, loss = seen(module)
    assert (cause.what, cause.name) == (what, name) and not math.isfinite(loss)
    assert name in cause.told(loss)


def test_a_parameter_and_a_column_come_before_what_they_lead_to() -> None:
    module = Net()
    assert seen(module, scale=math.inf)[0] == NonFiniteCause("column", "scale", 0)
    with torch.no_grad():
        module.inner[0].bias[2] = math.nan
    assert seen(module, scale=math.inf)[0] == NonFiniteCause("parameter", "inner.0.bias", 0)


def test_a_backward_alone_names_the_first_gradient_in_it() -> None:
    cause, loss = seen(Net(), root=True)
    assert loss == 0 and (cause.what, cause.name) == ("gradient", "head.bias")
    said = "the first gradient in the backward pass that is not finite is that of head.bias on rank 0"
    assert f"the loss is finite, and {said}" in cause.told(loss)


def test_what_is_not_seen_is_said_so() -> None:
    assert seen(Net())[0] == NonFiniteCause()
    assert "the loss function" in NonFiniteCause().told(math.nan) and "was repeated" in NonFiniteCause().told(1.0)


LIMITS = {"device": "64MB", "host": "64MB", "file": "64MB"}
TIERS, DIVIDED = ({"sharding": {"tiers": {**LIMITS, "shard_group": one}}} for one in ("none", "all"))


@pytest.mark.parametrize(
    ("kind", "ranks", "plan", "named"),
    [
        ("burst", 1, {}, "the first value that is not finite is the output of layers.2 on rank 0"),
        ("burst", 2, {}, "the first value that is not finite is the output of layers.2 on rank 0"),
        ("burst", 3, {"mesh": {"pipe": 3}}, "the first value that is not finite is the output of layers.2 on rank 1"),
        ("small", 2, {}, "has values in scale that are not finite"),
        ("burst", 2, {"sharding": "zero3"}, "the first value that is not finite is the output of layers.2 on rank 0"),
        ("burst", 2, TIERS, "the first value that is not finite is the output of layers.2 on rank 0"),
        ("small", 2, DIVIDED, "has values in scale that are not finite"),
        ("rooted", 2, DIVIDED, "the first gradient in the backward pass that is not finite is that of layers.3.inner"),
        ("spoilt", 2, DIVIDED, "parameter or buffer layers.3.bias on rank"),
    ],
)
def test_a_first_step_does_not_blame_the_learning_rate(
    pool, tmp_path: Path, kind: str, ranks: int, plan: dict, named: str
) -> None:
    if "tiers" in plan.get("sharding", {}):
        plan = {"sharding": {"tiers": {**plan["sharding"]["tiers"], "directory": str(tmp_path / "tiers")}}}
    sections = {"train": {"on_nonfinite": "stop", "prove": "never"}, "plan": plan}
    bad = {"bads": list(range(64))} if kind == "small" else {}
    ends = [
        one["ended"]
        for one in pool.run("run.jobs:train", ranks, folder=str(tmp_path), steps=4, kind=kind, sections=sections, **bad)
    ]
    assert len(set(ends)) == 1
    assert named in ends[0], ends[0]
    assert "Lower the learning rate" not in ends[0] and "train.on_nonfinite: skip" in ends[0]


def test_a_later_step_does(pool, tmp_path: Path) -> None:
    sections = {"train": {"on_nonfinite": "stop"}}
    (one,) = pool.run("run.jobs:train", 1, folder=str(tmp_path), steps=4, kind="burst later", sections=sections)
    assert "Lower the learning rate" in one["ended"]
