"""What pool workers run to prove a layout: all but the training that would follow."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gossamer import loss
from gossamer.autotune.plan_groups import levels_of
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommThread
from gossamer.job.trainer_parts import parts_of
from gossamer.model.origin import origin_of
from gossamer.partition.model_provider import ModuleSource, OriginSource
from gossamer.partition.rank_model import Planned, planned
from gossamer.partition.request import PartitionRequest
from gossamer.proof.startup import Proving
from gossamer.run.batches import DatasetBatches
from gossamer.spec import records
from gossamer.spec.config import ModelSection, RunConfig
from gossamer.spec.errors import BadInput, Interrupted
from pool import Seat

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # the faults are a benchmark's, too

from proof import faults


class Padded(Dataset):
    """Rows of tokens, padded at their ends."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        ids, mask = torch.randint(0, 31, (10,), generator=drawn), torch.ones(10, dtype=torch.int64)
        mask[10 - index % 4 :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Opened(nn.Module):
    """A zero that hides what is before it, and a tensor that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(31, 12), nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.gate, self.never, self.head = nn.Parameter(torch.zeros(12)), nn.Linear(2, 2), nn.Linear(12, 31)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + self.gate * torch.tanh(block(x))
        return self.head(x)


class Statistics(nn.Module):
    """Its gradient is that of what it keeps, which every replica does for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(31, 12), nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 31)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        self.seen.add_(1)
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) / self.seen
        return self.head(x)


class Normed(nn.Module):
    """Batch norm: what it keeps changes nothing in training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(31, 12), nn.BatchNorm1d(12), nn.Linear(12, 31)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2))


class Averages(nn.Linear):
    """Assigns its buffer anew in every forward."""

    def __init__(self) -> None:
        super().__init__(12, 12)
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return super().forward(x - self.mean)


class Assigned(Opened):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Averages() for _ in range(4))


class Renormed(Opened):
    """Its forward writes to a parameter: rows that are too long are shortened when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 12, max_norm=1.0)


class Counted(Statistics):
    """What it keeps is in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = None  # type: ignore[assignment]
        self.counts: list[int] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        self.counts.append(1)
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) / len(self.counts)
        return self.head(x)


CALLS = [0]


class Global(Opened):
    """Its forward changes what is not the module's."""

    def forward(self, input_ids: Tensor) -> Tensor:
        CALLS[0] += 1
        return super().forward(input_ids) * (1 + 0.1 * CALLS[0])


class Choosy(Opened):
    """Looks at labels, and refuses rows of which half are void."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if bool((labels[:, 6] == -100).any()):
            raise ValueError("too few labels")
        return super().forward(input_ids)


def unsteady() -> nn.Module:
    """Another one every time."""
    module = Opened()
    with torch.no_grad():
        module.blocks[1].bias.fill_(time.monotonic() % 1.0)  # a float32 of a clock of many days stands still
    return module


KINDS: dict[str, Callable[[], nn.Module]] = {
    "subject": faults.subject,
    "opened": Opened,
    "statistics": Statistics,
    "normed": Normed,
    "assigned": Assigned,
    "renormed": Renormed,
    "counted": Counted,
    "global": Global,
    "choosy": Choosy,
}


@contextmanager
def pump_of(seat: Seat, model: Planned) -> Iterator[CommThread]:
    levels = levels_of(model.plan)
    store = seat.store()
    pump = CommThread(ProcessGroupChannel(Rendezvous(store, seat.rank, levels, interface="lo", timeout_s=20.0)))
    try:
        # A proof may send nothing at all: a rank that left then would end the others' joining.
        store.set(f"joined/{seat.rank}", "")
        store.wait([f"joined/{rank}" for rank in range(seat.ranks)])
        yield pump
    finally:
        pump.close()
        pump.channel.close()


def prove(
    seat: Seat,
    *,
    kind: str = "subject",
    fault: str = "",
    sections: dict[str, dict[str, Any]] | None = None,
    stop: bool = False,
    factory: str = "",
    seeds: bool = False,
    free_bytes: int = 0,
    times: int = 1,
) -> dict[str, Any]:
    """What becomes of a proof: what it tells, and what it refuses. `seeds`: every rank's module is another one;
    `times`: it is asked for so often in one folder.
    """
    given = {"train": {"batch": 8, "steps": 5, "accumulate": 4}}
    for name, section in (sections or {}).items():
        given[name] = {**given.get(name, {}), **section}
    config = RunConfig.model_validate(given)
    torch.manual_seed(seat.rank if seeds else 0)
    data, objective, cpu = DatasetBatches(Padded()), loss.build("next_token"), torch.device("cpu")
    asked = PartitionRequest(
        config=config, ranks=seat.ranks, rank=seat.rank, batches=data, objective=objective, device=cpu
    )
    module = ModuleSource(KINDS[kind]()) if not factory else None
    model = planned(module or OriginSource(origin_of(ModelSection(factory=factory)), 0), asked)
    CALLS[0] = 0
    held = model.outline
    parts = parts_of(asked, held, validation=None, words=None)
    told: list[records.Record] = []
    with pump_of(seat, model) as pump, faults.planted(fault, seat.rank) if fault else nullcontext():
        proving = Proving(
            planned=model,
            parts=parts,
            pump=pump,
            sink=told.append,
            at=lambda step, phase: None,
            asked_to_stop=lambda: stop and seat.rank == 1,
            file=seat.folder / "proved.json",
        )
        with patch("gossamer.proof.startup.memory", lambda: (0, free_bytes)) if free_bytes else nullcontext():
            ended = _ended(proving, times)
    return {"told": [asdict(one) for one in told], "calls": CALLS[0], **ended}


def _ended(proving: Proving, times: int) -> dict[str, str]:
    try:
        for _ in range(times):
            proving.prove()
    except BadInput as error:
        return {"refused": str(error)}
    except Interrupted as error:
        return {"interrupted": str(error)}
    return {}
