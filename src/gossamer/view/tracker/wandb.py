"""Weights & Biases, on this machine only unless WANDB_MODE or `mode` says otherwise; `wandb sync` uploads later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.spec.records import Record
from gossamer.view.tracker import Session, Tracker
from gossamer.view.tracker._parts import hush, need, scalars


@dataclass(frozen=True)
class Wandb(Tracker):
    """The Weights & Biases tracker. `mode`: "online", "offline" or "disabled"; empty: WANDB_MODE, else offline."""

    project: str = "gossamer"
    mode: str = ""

    def start(self, run_name: str, config: Mapping[str, Any], directory: Path) -> Session:
        hush(("WANDB_ERROR_REPORTING", "false"), ("WANDB_SILENT", "true"), ("WANDB_CONSOLE", "off"))
        wandb = need("wandb", extra="wandb")
        mode = self.mode or os.environ.get("WANDB_MODE") or "offline"
        project = os.environ.get("WANDB_PROJECT") or self.project
        # An offline run cannot be continued: after a resume it gets an identity of its own.
        again = {"id": run_name, "resume": "allow"} if mode == "online" else {}
        return _Session(
            wandb.init(project=project, name=run_name, dir=str(directory), config=dict(config), mode=mode, **again)
        )


@dataclass(frozen=True)
class _Session(Session):
    run: Any

    def log(self, record: Record) -> None:
        step, values = scalars(record)
        if values:
            self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()
