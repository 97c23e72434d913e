"""One process that runs a script: quiet, without downloads, to so many steps of its optimizers."""

from __future__ import annotations

import os
import random
import runpy
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from scripts import stand_ins


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one process is to do. `chunk` 0: run `steps` and give the parameters; else time chunks as it is told."""

    folder: Path
    file: str
    arguments: tuple[str, ...]
    steps: int
    chunk: int
    is_double: bool
    in_order: bool
    variables: Mapping[str, str]


class Enough(SystemExit):
    """The run has made its steps."""


def process(run: Run, pipe: Connection) -> None:
    """Say what came of it: ("parameters", ...), ("seconds", ...) after every chunk, or ("error", ...)."""
    os.setpgid(0, 0)
    rank = run.variables.get("RANK", "0")
    log = open(run.folder / f"log.{rank}", "w")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ.update(run.variables)
    try:
        _prepare(run)
        _count(run, pipe)
        script = run.folder / run.file
        os.chdir(script.parent)
        stand_ins.lay_out(Path.cwd())
        sys.path[:0] = [str(script.parent), str(run.folder)]
        sys.argv = [script.name, *run.arguments]
        runpy.run_path(str(script), run_name="__main__")
        pipe.send(("error", "the script ended before its steps were made"))
    except Enough:
        pass
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"[:2000]))
        traceback.print_exc()
    pipe.recv()  # until it is told to go: rank 0 keeps what others may still need


def _prepare(run: Run) -> None:
    """The same seeds and no noise for all, and data that are here."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if run.is_double else torch.float32)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    stand_ins.install()

    def kept(input: Tensor, *_: Any, **__: Any) -> Tensor:
        return input

    torch.nn.functional.dropout = torch.nn.functional.dropout2d = kept  # type: ignore[assignment]
    usual = DataLoader.__init__

    def here(self: Any, dataset: Any, *given: Any, **more: Any) -> None:
        more |= {"num_workers": 0, "pin_memory": False}
        if run.in_order:
            if isinstance(sampler := more.get("sampler"), DistributedSampler):
                sampler.shuffle = False
            elif isinstance(sampler, RandomSampler):
                more["sampler"] = SequentialSampler(dataset)
            more |= {"shuffle": False}
        usual(self, dataset, *given, **more)

    DataLoader.__init__ = here  # type: ignore[method-assign]


def _count(run: Run, pipe: Connection) -> None:
    """After every step of any optimizer."""
    seen: list[Optimizer] = []
    state = {"steps": 0, "began_s": 0.0, "cpu_s": 0.0}

    def after(optimizer: Optimizer, *_: Any) -> None:
        if not any(one is optimizer for one in seen):
            seen.append(optimizer)
        state["steps"] += 1
        if run.chunk and state["steps"] % run.chunk == 0:
            pipe.send(("seconds", (time.perf_counter() - state["began_s"], time.process_time() - state["cpu_s"])))
            if pipe.recv() == "end":
                os._exit(0)
            state["began_s"], state["cpu_s"] = time.perf_counter(), time.process_time()
        if not run.chunk and state["steps"] == run.steps:
            params = [p for one in seen for group in one.param_groups for p in group["params"]]
            pipe.send(("parameters", [p.detach().double().numpy().copy() for p in params]))
            raise Enough

    register_optimizer_step_post_hook(after)
