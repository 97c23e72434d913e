"""Runs whose ranks a launcher has started, as `gossamer.train` sees them; and ranks that began in other ways."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch

import gossamer
from gossamer.spec.errors import BadInput
from pool import Seat
from run.jobs import Small, Tokens, train


def named(seat: Seat, *, folder: str, port: int, resume: str | None = None, **changed: Any) -> dict[str, Any]:
    """Train as one rank of torchrun in the run `folder`/one. How many steps it has, and what was said against it."""
    config = {
        "train": {"steps": 2, "batch": 4, "checkpoint_every": 2, "evaluate_every": 0, **changed},
        "machines": {"timeout_s": 20, "threads": 1},
        "plan": {"exchange": "dense"},
        "run": {"directory": folder, "name": "one", "display": "quiet"},
    }
    torch.manual_seed(0)
    place = {"RANK": seat.rank, "WORLD_SIZE": seat.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with patch.dict(os.environ, {name: f"{value}" for name, value in place.items()}):
        try:
            done = gossamer.train(Small(0.0), Tokens(), config, resume=resume)
        except BadInput as error:
            return {"steps": 0, "said": str(error)}
    return {"steps": done["steps"], "said": ""}


def one_resumes(seat: Seat, **given: Any) -> dict[str, Any]:
    """As `jobs.train`, where the last rank alone goes on with a run."""
    return train(seat, resume=seat.rank == seat.ranks - 1, **given)
