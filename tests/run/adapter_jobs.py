"""What pool workers run for the tests of adapters: whole small runs of a small Llama, and the same steps by peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gossamer import loss
from gossamer.job.rank_inputs import DataDescription, RankContext, RankJob
from gossamer.job.rank_job import run_job
from gossamer.job.trainer_parts import parts_of
from gossamer.model.origin import origin_of
from gossamer.partition.model_provider import OriginSource
from gossamer.partition.rank_model import planned
from gossamer.partition.request import PartitionRequest
from gossamer.run.batches import DatasetBatches, Feed
from gossamer.spec.config import RunConfig
from gossamer.view.run_directory import RunDirectory
from pool import Seat

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
LR = 5e-3


class Rows(Dataset[dict[str, Tensor]]):
    """Sequences that count upwards, from anywhere and in steps of 1 to 5."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (index * 7 + torch.arange(16) * (1 + index % 5)) % 64
        return {"input_ids": ids, "labels": ids.clone()}


def config_of(base: str, adapter: Any, steps: int, sections: dict[str, dict[str, Any]]) -> RunConfig:
    given: dict[str, dict[str, Any]] = {
        "model": {"hf": base, "adapter": adapter},
        "train": {
            "steps": steps,
            "batch": 8,
            "evaluate_every": 0,
            "checkpoint_every": 0,
            "max_grad_norm": 0.0,
            "optimizer": {"adamw": {"lr": LR, "weight_decay": 0.0}},
            "lr_schedule": "constant",
        },
        "machines": {"timeout_s": 40},
    }
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    return RunConfig.model_validate(given)


def train(
    seat: Seat,
    *,
    base: str,
    adapter: Any,
    folder: str,
    held: str = "full",
    steps: int = 5,
    resume: bool = False,
    sections: dict[str, dict[str, Any]] | None = None,
) -> None:
    """One run of Gossamer, whose records and checkpoints are in `folder`."""
    given = sections or {}
    config = config_of(base, adapter, steps, {**given, "model": {**given.get("model", {}), "base": held}})
    asked = PartitionRequest(
        config=config,
        ranks=seat.ranks,
        rank=seat.rank,
        batches=DatasetBatches(Rows()),
        objective=loss.build("next_token"),
        device=torch.device("cpu"),
    )
    origin = origin_of(config.model)
    model = planned(OriginSource(origin, config.train.seed), asked)
    run_job(
        RankJob(
            parts=parts_of(asked, model.outline, validation=None, words=None, base=origin.base_digest(0)),
            planned=model,
            where=RankContext(
                rank=seat.rank,
                ranks=seat.ranks,
                writer=seat.rank,
                writers=seat.ranks,
                store=seat.store(),
                interface="lo",
            ),
            directory=RunDirectory(Path(folder)),
            described=origin.describe(),
            data=DataDescription(fingerprint="rows", text="rows"),
            resume=resume,
            at=lambda step, phase: None,
            asked_to_stop=lambda: False,
        )
    )


def by_peft(
    base: str, adapter: Any, steps: int, *, sgd: float | None = None, model: dict[str, Any] | None = None
) -> tuple[list[float], nn.Module]:
    """The losses of the same steps in one process, by peft and torch alone, and the module after them.

    `sgd`: the rate of plain SGD in place of AdamW; `model`: more keys of the section.
    """
    from gossamer.spec.plan import Plan

    config = config_of(base, adapter, steps, {"model": model or {}})
    module = origin_of(config.model).build(0)
    trained = [p for p in module.parameters() if p.requires_grad]
    update: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, betas=(0.9, 0.95))
    if sgd is not None:
        update = torch.optim.SGD(trained, lr=sgd)
    feed, losses = Feed(DatasetBatches(Rows()), Plan(rows=(8,), microbatches=(1,)), 0, 0), list[float]()
    for step in range(steps):
        rows = feed.fetch(step)[0].rows
        found = module(**rows, use_cache=False).loss
        update.zero_grad()
        found.backward()
        update.step()
        losses.append(float(found.detach()))
    return losses, module


def islands_by_peft(base: str, adapter: Any, steps: int, *, period: int, lr: float, momentum: float) -> list[Tensor]:
    """The trained tensors of two islands of one rank each, after DiLoCo's loop in one process."""
    from gossamer.spec.plan import Plan

    modules = [origin_of(config_of(base, adapter, steps, {}).model).build(0) for _ in range(2)]
    trained = [[p for p in module.parameters() if p.requires_grad] for module in modules]
    updates = [torch.optim.AdamW(params, lr=LR, weight_decay=0.0, betas=(0.9, 0.95)) for params in trained]
    common = [p.detach().clone() for p in trained[0]]
    moved = [torch.zeros_like(p) for p in common]
    feed = Feed(DatasetBatches(Rows()), Plan(rows=(8,), microbatches=(2,)), 0, 0)
    for step in range(steps):
        for island, rows in feed.fetch(step).items():
            updates[island].zero_grad()
            modules[island](**rows.rows, use_cache=False).loss.backward()
            updates[island].step()
        if (step + 1) % period == 0:
            with torch.no_grad():
                for mine, kept, one, other in zip(common, moved, *trained, strict=True):
                    mean = mine - (one + other) / 2
                    kept.mul_(momentum).add_(mean)
                    mine.sub_(lr * (mean + momentum * kept))
                    one.copy_(mine)
                    other.copy_(mine)
    return common
