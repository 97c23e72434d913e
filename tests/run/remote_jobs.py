"""Modules of many shapes, trained in stages through the real job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gossamer.job.rank_inputs import DataDescription, RankContext, RankJob
from gossamer.job.rank_job import run_job
from gossamer.job.trainer_parts import parts_of
from gossamer.loss import Loss
from gossamer.partition.model_provider import ModuleSource
from gossamer.partition.rank_model import build_rank_model
from gossamer.partition.request import PartitionRequest
from gossamer.run.batches import DatasetBatches
from gossamer.spec.config import RunConfig
from gossamer.view.run_directory import RunDirectory
from model.cuttable import MODULES
from model.test_cut_segments import Bare
from pool import Seat


@dataclass(frozen=True, slots=True)
class Energy(Loss):
    """The mean square of whatever comes out; every row counts one."""

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return output.square().mean()

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.tensor(len(batch["input_ids"]))


class Inputs(Dataset):
    def __init__(self, like: Tensor) -> None:
        self.items = torch.randn(32, *like.shape[1:], generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.items[index]}


def train(seat: Seat, *, kind: str, folder: str, plan: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Sums over every parameter this rank holds, after some steps of SGD."""
    build, like = {**MODULES, "bare": (Bare, lambda: torch.zeros(5, 8))}[kind]
    torch.manual_seed(0)
    module = build()
    section = {
        "steps": steps,
        "batch": 8,
        "accumulate": 4,
        "evaluate_every": 0,
        "checkpoint_every": 0,
        "max_grad_norm": 0.0,
    }
    section |= {"optimizer": {"sgd": {"lr": 0.1}}, "lr_schedule": "constant"}
    given = {"train": section, "plan": plan, "machines": {"timeout_s": 40}}
    config, cpu = RunConfig.model_validate(given), torch.device("cpu")
    data, objective = DatasetBatches(Inputs(like())), Energy()
    asked = PartitionRequest(
        config=config, ranks=seat.ranks, rank=seat.rank, batches=data, objective=objective, device=cpu
    )
    held = build_rank_model(ModuleSource(module), asked)
    parts = parts_of(asked, held, validation=None, words=None)
    job = RankJob(
        parts=parts,
        where=RankContext(
            rank=seat.rank,
            ranks=seat.ranks,
            hosts=1,
            writer=seat.rank,
            writers=seat.ranks,
            store=seat.store(),
            interface="lo",
        ),
        directory=RunDirectory(Path(folder) / "run"),
        described=kind,
        data=DataDescription(fingerprint="inputs", text="inputs"),
        resume=False,
        at=lambda step, phase: None,
        asked_to_stop=lambda: False,
    )
    run_job(job)
    names = held.module.named_parameters()
    mine = {n: p for n, p in names if held.cut is None or n in held.cut.holds}
    return json.loads(json.dumps({n: p.detach().double().flatten()[:64].tolist() for n, p in mine.items()}))
