"""Trackio: a local database, looked at with `trackio show`. TRACKIO_DIR says where; nothing leaves the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.spec.records import Record
from gossamer.view.tracker import Session, Tracker
from gossamer.view.tracker._parts import flat, hush, need, scalars


@dataclass(frozen=True)
class Trackio(Tracker):
    """The Trackio tracker: it compares all runs of a `project` on one page."""

    project: str = "gossamer"

    def start(self, run_name: str, config: Mapping[str, Any], directory: Path) -> Session:
        hush(("HF_HUB_DISABLE_TELEMETRY", "1"), ("GRADIO_ANALYTICS_ENABLED", "False"))
        trackio = need("trackio", extra="trackio")
        run = trackio.init(project=self.project, name=run_name, config=flat(config), resume="allow")
        return _Session(trackio, run)


@dataclass(frozen=True)
class _Session(Session):
    trackio: Any
    run: Any

    def log(self, record: Record) -> None:
        step, values = scalars(record)
        if values:
            self.run.log(values, step=step)

    def close(self) -> None:
        self.trackio.finish()  # run.finish() alone makes trackio finish, and print, again as Python exits
