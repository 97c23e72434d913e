"""`frameworks.accelerate.prepare` beside `accelerator.prepare`, which wraps the model in DDP, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from frameworks.two_ranks import distance, run, trained
from gossamer.spec.errors import BadInput

accelerate = pytest.importorskip("accelerate")

NIGHTLY = pytest.mark.nightly  # processes that import accelerate
SCRIPT = """
import sys, torch
from functools import partial
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from gossamer.frameworks.accelerate import prepare

torch.set_num_threads(1)
which, accumulate, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
torch.manual_seed(accelerator.process_index)  # all start from rank 0's values
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
draw = torch.Generator().manual_seed(1)
labels = torch.randint(4, (64,), generator=draw)
labels[torch.rand(64, generator=draw) < 0.4] = -100  # so ranks count other numbers of labels
data = TensorDataset(torch.randn(64, 8, generator=draw), labels)
rows = 8 if which == "whole" else 4  # of each rank
loader = DataLoader(data, batch_size=rows, shuffle=False)
ours = {
    "ddp": accelerator.prepare,
    "dense": partial(prepare, accelerator),
    "read": partial(prepare, accelerator, loss="read"),
    "whole": partial(prepare, accelerator),
    "lossy": partial(prepare, accelerator, exchange={"error_feedback": {"two_shot": "int8"}}),
}[which]
model, optimizer, loader, scheduler = ours(model, optimizer, loader, scheduler)
assert (type(model).__name__ == "DistributedDataParallel") == (which == "ddp")
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            if which == "whole":
                scheduler.step()  # as Accelerate does, once for each process
            optimizer.zero_grad()
accelerator.save_state(out + "-state")
if accelerator.is_main_process:
    torch.save({name: p.detach().clone() for name, p in accelerator.unwrap_model(model).named_parameters()}, out)
accelerator.end_training()
"""


@NIGHTLY
@pytest.mark.parametrize("accumulate", ["1", "2", "3"])
def test_it_equals_accelerates_ddp(tmp_path: Path, accumulate: str) -> None:
    ours, theirs = (trained(SCRIPT, tmp_path, which, accumulate) for which in ("dense", "ddp"))
    assert distance(ours, theirs) <= 1e-6


@NIGHTLY
def test_a_loss_that_is_read_equals_one_process_and_ddp_does_not(tmp_path: Path) -> None:
    alone = trained(SCRIPT, tmp_path, "whole", "1", ranks=1)
    ours, theirs = (trained(SCRIPT, tmp_path, which, "1") for which in ("read", "ddp"))
    assert distance(ours, alone) <= 1e-6 < 1e-4 < distance(theirs, alone)


@NIGHTLY
def test_another_exchange_than_an_all_reduce_is_at_work(tmp_path: Path) -> None:
    ours, theirs = (trained(SCRIPT, tmp_path, which, "1") for which in ("lossy", "ddp"))
    assert 1e-6 < distance(ours, theirs) < 0.05


@NIGHTLY
def test_an_unknown_exchange_is_refused_before_anything_is_prepared(tmp_path: Path) -> None:
    done = run(SCRIPT.replace("two_shot", "two_shots"), tmp_path, "lossy", "1", "out")
    assert done.returncode != 0 and "did you mean" in done.stderr


@pytest.fixture
def accelerator() -> object:
    return accelerate.Accelerator(cpu=True)


def test_a_model_without_its_optimizer_is_refused(accelerator: object) -> None:
    from gossamer.frameworks.accelerate import prepare

    with pytest.raises(BadInput, match="wanted a model, and the optimizers of its parameters, in one call, got 1"):
        prepare(accelerator, torch.nn.Linear(2, 2))


def test_what_is_prepared_already_is_refused(accelerator: object) -> None:
    from gossamer.frameworks.accelerate import prepare

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = prepare(accelerator, model, optimizer)
    assert done[0] is model and type(done[1]).__name__ == "AcceleratedOptimizer"
    with pytest.raises(BadInput, match="that are not prepared yet"):
        prepare(accelerator, *done)


def test_what_owns_the_gradients_is_refused() -> None:
    from types import SimpleNamespace

    from accelerate.utils import DistributedType

    from gossamer.frameworks.accelerate import check_accelerator

    with pytest.raises(BadInput, match="distributed type FSDP, which owns gradients"):
        check_accelerator(SimpleNamespace(distributed_type=DistributedType.FSDP))  # type: ignore[arg-type]
