"""TensorBoard: event files in the run directory. Look at them with `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.spec.records import Record
from gossamer.view.tracker import Session, Tracker
from gossamer.view.tracker._parts import need, scalars


@dataclass(frozen=True)
class Tensorboard(Tracker):
    """The TensorBoard tracker. `flush_s`: seconds that figures may wait in memory.

    The configuration stays in run.yaml beside the event files.
    """

    flush_s: int = 10

    def start(self, run_name: str, config: Mapping[str, Any], directory: Path) -> Session:
        events = need("tensorboard.compat.proto.event_pb2", extra="tensorboard")
        summaries = need("tensorboard.compat.proto.summary_pb2", extra="tensorboard")
        writers = need("tensorboard.summary.writer.event_file_writer", extra="tensorboard")
        writer = writers.EventFileWriter(str(directory / "tensorboard"), flush_secs=self.flush_s)
        return _Session(writer=writer, event=events.Event, summary=summaries.Summary)


@dataclass(frozen=True)
class _Session(Session):
    writer: Any
    event: Any
    summary: Any

    def log(self, record: Record) -> None:
        step, values = scalars(record)
        if values:
            points = [self.summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self.writer.add_event(self.event(wall_time=record.time_s, step=step, summary=self.summary(value=points)))

    def close(self) -> None:
        self.writer.close()
