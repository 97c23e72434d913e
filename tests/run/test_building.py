"""A process that builds one stage of four never holds more than its own part, but for what any model takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# The tiny stage first: imports, and the allocator's first arenas, are no part of the model.
_SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from gossamer import loss
from gossamer.partition.model_provider import OriginSource
from gossamer.partition.rank_model import build_rank_model
from gossamer.partition.request import PartitionRequest
from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.model.origin import origin_of
from gossamer.run.batches import DatasetBatches
from gossamer.loss import Loss
from gossamer.spec.config import RunConfig

class Blocks(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(8))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

def mebibytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

class Squares(Loss):
    def __call__(self, output, batch):
        return output.square().mean()
    def weight(self, batch):
        return torch.tensor(len(batch["x"]))

def held(width):
    rows = [{"x": torch.zeros(width)} for _ in range(8)]
    config = RunConfig.model_validate({
        "model": {"factory": "__main__:Blocks", "config": {"width": width}},
        "train": {"batch": 8}, "plan": {"mesh": {"pipe": 4}},
    })
    asked = PartitionRequest(config=config, ranks=4, rank=int(sys.argv[1]), batches=DatasetBatches(rows),
                             objective=Squares(), device=torch.device("cpu"))
    return build_rank_model(OriginSource(origin_of(config.model), 0), asked).module

held(16)
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
before = mebibytes("VmRSS")
module = held(2896)
held = [p.untyped_storage() for p in module.parameters() if not isinstance(p, AbsentTensor)]
part = sum({one.data_ptr(): one.nbytes() for one in held}.values())
print(json.dumps([part / 2**20, mebibytes("VmHWM") - before]))
"""
# Skeletons of the modules, their trace, and the C library's slack: the same for models of any size.
_ALLOWED_MIB = 8


_PROCESSES = 3  # at most: pages of libraries that the kernel takes and gives back meanwhile can only add to a peak


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux to measure memory")
@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 3])
def test_building_a_stage_takes_its_own_part_and_a_tenth(stage: int) -> None:
    """A block too many is 32 MiB, in every process."""
    peaks = list[float]()
    for _ in range(_PROCESSES):
        part, taken = built(stage)
        assert 63 < part < 66, "two blocks of eight, each 32 MiB"
        if taken <= 1.1 * part + _ALLOWED_MIB:
            return
        peaks.append(taken)
    pytest.fail(f"{_PROCESSES} processes took {peaks} MiB for a part of {part} MiB")


def built(stage: int) -> tuple[float, float]:
    """The MiB of a stage's parameters, and those that building it has added to the process at most."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(stage)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    part, taken = json.loads(done.stdout.splitlines()[-1])
    return part, taken
