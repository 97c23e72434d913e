"""The writer of a run's plan.yaml while the run trains."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from gossamer.run.trainer_services import Sink
from gossamer.spec import records
from gossamer.spec.plan import Plan
from gossamer.view.run_directory import RunDirectory

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PlanWriter:
    """A writer of plan.yaml on one rank. `is_writer`: whether it writes for all ranks that see the directory.

    A failed write does not stop the run: it is told, and the plan is written before the next checkpoint, with whose
    states it belongs.
    """

    directory: RunDirectory
    rank: int
    is_writer: bool
    sink: Sink
    _unwritten: Plan | None = None

    def keep(self, plan: Plan) -> None:
        """Write a plan that has changed. Where that fails, or goes again, it is told once."""
        if not self.is_writer:
            return
        went, self._unwritten = self._unwritten is None, plan
        error, file = self._write(), self.directory.plan_file
        if error is not None and went:
            said = (
                f"the plan that is in force now could not be written to {file}: {error.strerror or error}; the "
                "training continues, and the plan is written with the next checkpoint"
            )
            self._tell("warning", said)
        elif error is None and not went:
            self._tell("info", f"{file} holds the plan that is in force again")

    def keep_unwritten(self) -> None:
        """Write the plan that could not be written before, if any: a checkpoint is about to be saved."""
        if self._unwritten is not None:
            self.keep(self._unwritten)

    def _write(self) -> OSError | None:
        assert self._unwritten is not None
        try:
            self.directory.keep_plan(self._unwritten)
        except OSError as error:
            return error
        self._unwritten = None
        return None

    def _tell(self, level: str, message: str) -> None:
        self.sink(records.Event(level=level, message=message, rank=self.rank))
        if self.rank and level == "warning":  # another host's directory: rank 0 alone writes records
            _log.warning("%s", message)
