"""Masks and counts that cross between stages cross as they are, whatever way the boundary has, and are priced so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.p2p import TensorSpec, activation
from gossamer.spec.plan import Plan
from gossamer.view.run_directory import RunDirectory
from run.test_trainer import losses, records

_BATCHES, _SHAPE = 4, (2, 9, 12)  # of what one micro-batch's blocks hand on: a float32, a bool and an int64 each
_WAYS: list[tuple[Any, float]] = [  # with how far from plain a loss may be
    ({"codec": {"codec": "int8"}}, 1 / 127),
    ({"topk": {"fraction": 0.5}}, 0.2),
]


def test_a_boundary_in_few_bits_keeps_masks(pool, tmp_path: Path) -> None:
    train = {"accumulate": _BATCHES}
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), steps=2, kind="marks", sections={"train": train})
    rest = set()
    for number, (boundary, within) in enumerate(_WAYS):
        folder = tmp_path / str(number)
        sections = {"train": train, "plan": {"mesh": {"pipe": 2}, "activation_compression": boundary, "cuts": [0, 2]}}
        pool.run("run.jobs:train", 2, folder=str(folder), steps=2, kind="marks", sections=sections)
        assert losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=within)
        plan = RunDirectory(folder / "run").plan()
        assert isinstance(plan, Plan)
        (mine,) = (n for link, n in plan.forecast.wire_bytes.items() if link.startswith("0>"))
        assert [sum(step["wire_bytes"].values()) for step in records(folder, "step")] == [mine] * 2
        way = activation.build(boundary, key="plan.activation_compression")
        rest.add(mine - _BATCHES * way.nbytes(TensorSpec(_SHAPE, torch.float32)))
    masks = _BATCHES * TensorSpec(_SHAPE, torch.int64).nbytes + _BATCHES * TensorSpec(_SHAPE, torch.bool).nbytes
    assert len(rest) == 1 and min(rest) > masks


def test_what_a_way_cannot_take_is_refused_before_the_ranks_meet(pool, tmp_path: Path) -> None:
    sections = {"plan": {"mesh": {"pipe": 2}, "activation_compression": {"codec": {"codec": "int8"}}}}
    job = {"folder": str(tmp_path), "kind": "doubles", "sections": sections}
    for answer in pool.attempt("run.jobs:train", 2, **job):
        assert (
            answer["kind"] == "BadInput"
            and "fp32, bf16 or fp16 tensors to compress, got torch.float64" in answer["error"]
        ), answer
        assert "run_job" not in answer["error"]
