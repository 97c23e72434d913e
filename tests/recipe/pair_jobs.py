"""What pool workers run for the tests of this folder: several short runs one after the other, through the real job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gossamer import loss
from gossamer.job.rank_inputs import DataDescription, RankContext, RankJob
from gossamer.job.rank_job import run_job
from gossamer.job.trainer_parts import parts_of
from gossamer.partition.model_provider import ModuleSource
from gossamer.partition.rank_model import build_rank_model
from gossamer.partition.request import PartitionRequest
from gossamer.run.batches import DatasetBatches
from gossamer.spec.config import RunConfig
from gossamer.view.run_directory import RunDirectory
from pool import Seat
from run.jobs import Causal, Tokens, digest


class EqualTokens(Tokens):
    """Sequences that all have labels: islands weigh by samples what replicas weigh by labels."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = self.ids.clone()


class Headed(Causal):
    """Its logits come from a layer, with the weight of the embedding: a loss in tiles finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(input_ids))


def losses(seat: Seat, *, runs: Sequence[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Train each of `runs`, sections of a configuration: the losses of its steps, digest and norms of parameters."""
    store = seat.store()
    return [_trained(seat, dist.PrefixStore(f"run {n}", store), sections, n) for n, sections in enumerate(runs)]


def _trained(seat: Seat, store: dist.Store, sections: dict[str, dict[str, Any]], number: int) -> dict[str, Any]:
    config = RunConfig.model_validate(sections)
    torch.manual_seed(0)
    data, objective, cpu = DatasetBatches(EqualTokens()), loss.build("next_token"), torch.device("cpu")
    asked = PartitionRequest(
        config=config, ranks=seat.ranks, rank=seat.rank, batches=data, objective=objective, device=cpu
    )
    held = build_rank_model(ModuleSource(Headed()), asked, None)
    directory = RunDirectory(Path(seat.folder) / str(number))
    parts = parts_of(asked, held, validation=None, words=None)
    where = RankContext(
        rank=seat.rank, ranks=seat.ranks, writer=seat.rank, writers=seat.ranks, store=store, interface="lo"
    )
    job = RankJob(
        parts=parts,
        where=where,
        directory=directory,
        described="Headed",
        data=DataDescription(fingerprint="tokens", text="tokens"),
        resume=False,
        at=lambda step, phase: None,
        asked_to_stop=lambda: False,
        is_kept=True,
    )
    run_job(job)
    if held.cut is not None:
        found: dict[str, Any] = {"digest": "", "norms": []}
    else:
        norms = [float(p.detach().double().norm()) for _, p in sorted(held.module.named_parameters())]
        found = {"digest": digest(held.module), "norms": norms}
    if seat.rank == 0:
        lines = [json.loads(line) for line in (directory.path / "records.jsonl").read_text().splitlines()]
        found["losses"] = [one["loss"] for one in lines if one["kind"] == "step"]
    return found
