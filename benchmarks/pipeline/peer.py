"""What one host runs for the peer: `python -m pipeline.peer CLASS STEPS ROWS`; its last line is one JSON object.

torch.distributed.pipelining as its users write it: a PipelineStage around a module they cut by hand, a schedule of its
own, fused AdamW, one loss.item() a step where the loss is. `tracer` stands for its `pipeline()`, which cuts by itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline, schedules

from pipeline import setting
from pipeline.counted import counted

_PATIENCE = timedelta(seconds=600)


@dataclass(slots=True)
class Loss:
    """Of one micro-batch, so that the mean of all is that of the step's labels, however they fall on micro-batches."""

    labels: int = 1  # of the step, per micro-batch

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        found = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return found * (setting.MICROBATCHES / self.labels)


def main() -> None:
    name, steps, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_PATIENCE)
    stage = traced(rank, rows) if name.startswith("tracer:") else by_hand(rank)
    kind, loss = getattr(schedules, name.removeprefix("tracer:")), Loss()
    schedule = kind(stage, setting.MICROBATCHES, loss_fn=loss)
    rule = {"lr": setting.LR, "betas": setting.BETAS, "weight_decay": setting.DECAY}
    optimizer = torch.optim.AdamW(stage.submod.parameters(), fused=True, **rule)
    said = []
    for step in range(steps):
        batch = setting.batch_of(step, rows)
        loss.labels = int((batch["labels"][:, 1:] != -100).sum())
        found = one_step(schedule, optimizer, batch, rank)
        said.append({"time_s": time.perf_counter(), "loss": found, **counted()})
    print("\n" + json.dumps({"steps": said, "version": f"torch {torch.__version__}"}), flush=True)
    dist.destroy_process_group()


def by_hand(rank: int) -> PipelineStage:
    module = setting.stage_of(setting.whole(), rank)
    return PipelineStage(module, rank, setting.STAGES, torch.device("cpu"))


def traced(rank: int, rows: int) -> PipelineStage:
    example = setting.batch_of(0, rows)["input_ids"][: rows // setting.MICROBATCHES]
    cuts = dict.fromkeys(setting.CUTS[1:], SplitPoint.BEGINNING)
    return pipeline(setting.whole(), mb_args=(example,), split_spec=cuts).build_stage(rank, torch.device("cpu"))


def one_step(schedule: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], rank: int) -> float | None:
    """The mean loss of the step, on the last stage."""
    losses: list[Tensor] = []
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(batch["input_ids"], return_outputs=False)
    elif rank == setting.STAGES - 1:
        schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
    else:
        schedule.step(return_outputs=False)
    optimizer.step()
    return torch.stack(losses).mean().item() if losses else None


if __name__ == "__main__":
    main()
