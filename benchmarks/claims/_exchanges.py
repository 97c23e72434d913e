"""Seconds per step of several exchanges of the same gradients, in turns, on every host of a laboratory.

A host gets its buckets one after the other in the course of `compute_s` of rest, as from an accelerator that computes
backward, and the step ends when all their means have come. Rest, since all hosts of a laboratory share the processor.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Layout, partition
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ExchangeContext, ProcessGroups
from gossamer.exchange import Exchange
from gossamer.netlab import Lab, LabTopology

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class Trial:
    """What every host does. `methods` is as in a plan: {"acp": {"error_feedback": {"acp_sgd": {"rank": 4}}}}."""

    methods: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    steps: int
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of every step, and payload bytes per step of host 0."""

    steps_s: tuple[float, ...]
    sent_bytes: float

    @property
    def step_s(self) -> float:
        return median(self.steps_s)


def on_lab(topology: LabTopology, trial: Trial) -> dict[str, Timed]:
    """What host 0 measured, by method."""
    with tempfile.TemporaryDirectory() as folder, Lab(topology) as lab:
        said = Path(folder, "said.json")
        command = [sys.executable, "-m", "claims._exchanges", json.dumps(asdict(trial)), str(said)]
        code = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        path = {"PYTHONPATH": code, "OMP_NUM_THREADS": "1"}
        codes = lab.run(command, env=lambda host: path)
        assert not any(codes), f"the hosts ended with {codes}"
        return {
            name: Timed(tuple(one["steps_s"]), one["sent_bytes"]) for name, one in json.loads(said.read_text()).items()
        }


class Contender:
    """One exchange with its states, on this host."""

    def __init__(self, exchange: Exchange, layouts: tuple[Layout, ...]) -> None:
        self.exchange, self.layouts = exchange, layouts
        self.states = [exchange.init(layout) for layout in layouts]
        self.steps_s: list[float] = []
        self.sent_bytes: list[int] = []

    def step(self, pump: CommThread, number: int, compute_s: float) -> None:
        rank, levels = pump.channel.rank, pump.channel.levels
        ranks = len(levels.group("all", rank))
        weights = torch.full((ranks,), 1 / ranks, dtype=torch.float64)
        at = ExchangeContext(rank, levels, weights, (0, number), 0.1)
        buckets = [layout.allocate() for layout in self.layouts]
        for bucket in buckets:
            bucket.flat.normal_()
        meet(pump)
        before, began = pump.channel.meter.total_bytes, time.perf_counter()
        step = pump.begin([len(self.exchange.traffic(layout, levels, rank)) for layout in self.layouts])
        for index, bucket in enumerate(buckets):
            time.sleep(max(0.0, began + compute_s * (index + 1) / len(buckets) - time.perf_counter()))
            step.submit(index, self.exchange.run(bucket, self.states[index], at))
        self.states = [step.result(index).state for index in range(len(buckets))]
        self.steps_s.append(time.perf_counter() - began)
        self.sent_bytes.append(pump.channel.meter.total_bytes - before)


def meet(pump: CommThread) -> None:
    """Nobody begins before all are there."""
    layout = Layout.of({"ready": torch.zeros(1)})
    dense, levels = exchange_methods.build("dense"), pump.channel.levels
    ranks = len(levels.group("all", pump.channel.rank))
    at = ExchangeContext(pump.channel.rank, levels, torch.full((ranks,), 1 / ranks, dtype=torch.float64), (0, 0), 0.0)
    step = pump.begin([1])
    step.submit(0, dense.run(layout.allocate(), dense.init(layout), at))
    step.result(0)


def host(trial: Trial, said: Path) -> None:
    """Every method once to get warm, then all of them in turns."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, ranks, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    meeting = Rendezvous(store, rank, ProcessGroups.flat(ranks), interface=os.environ["GLOO_SOCKET_IFNAME"])
    pump = CommThread(ProcessGroupChannel(meeting))
    shapes = {name: torch.empty(tuple(shape), device="meta") for name, shape in trial.shapes.items()}
    cut = partition(shapes, bucket_bytes=BUCKET_BYTES)
    layouts = tuple(Layout(layout.entries, torch.float32) for layout in cut)
    contenders = {name: Contender(exchange_methods.build(written), layouts) for name, written in trial.methods.items()}
    for number in range(trial.steps + 1):
        for one in contenders.values():
            one.step(pump, number, trial.compute_s)
    meet(pump)
    pump.close()
    if rank == 0:
        found = {n: {"steps_s": c.steps_s[1:], "sent_bytes": _mean(c.sent_bytes[1:])} for n, c in contenders.items()}
        said.write_text(json.dumps(found))


def _mean(counts: list[int]) -> float:
    return sum(counts) / len(counts)


if __name__ == "__main__":
    host(Trial(**json.loads(sys.argv[1])), Path(sys.argv[2]))
