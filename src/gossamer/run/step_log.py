"""bytes.log, beside the checkpoints: the messages of all ranks in every zeroth-order step.

A step line holds all that moves the parameters from one step to the next; a mark is a checksum of them. From the state
that a mark names, the lines after it lead to every later state, bit for bit. So steps after the last checkpoint are not
lost. A process with an old checkpoint, or with the initial model, catches up with some hundred bytes per step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.checked_log import CheckedLog
from gossamer.sync import ParameterChecksum, StepMessage, parsed

NAME = "bytes.log"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoggedSteps:
    """The valid content of a log: messages by step, and parameter checksums (marks) by step."""

    steps: dict[int, StepMessage] = field(default_factory=dict)
    marks: dict[int, ParameterChecksum] = field(default_factory=dict)

    def is_elsewhere(self, mark: ParameterChecksum) -> bool:
        """Return whether the log has other parameters than `mark` after the same number of steps."""
        known = self.marks.get(mark.step, mark)
        return (known.parameters, known.checksum) != (mark.parameters, mark.checksum)

    def after(self, mark: ParameterChecksum, until: int) -> Iterator[StepMessage]:
        """Yield the steps after `mark`, up to `until` or the first gap; none if the log does not contain the mark."""
        at = mark.step
        if at not in self.marks or self.is_elsewhere(mark):
            return
        while at < until and at in self.steps and not self.steps[at].buffers:
            yield self.steps[at]
            at += 1


@dataclass(slots=True)
class StepLog:
    """The step log in `directory`.

    `is_writer`: this rank writes, one of those that see the directory. A failed write is logged once and does not stop
    the run.
    """

    directory: Path
    is_writer: bool
    _told: bool = False

    @property
    def lines(self) -> CheckedLog:
        return CheckedLog(self.directory / NAME)

    def tell(self, said: StepMessage | ParameterChecksum) -> None:
        """Append a step or a mark; flush marks to the disk."""
        if not self.is_writer:
            return
        try:
            self.lines.append(said.line(), durable=isinstance(said, ParameterChecksum))
        except OSError as error:
            if not self._told:
                text = "%s cannot be written (%s): the run continues without this log"
                _log.warning(text, self.lines.path, error.strerror)
            self._told = True

    def past(self) -> LoggedSteps:
        """Read the log and return its valid steps and marks.

        After a line that is damaged, or does not follow from the one before, lines are ignored up to the next start of
        a process. Raises CheckpointMismatch for intact lines of another format.
        """
        found, following, is_known = LoggedSteps(), 0, True
        for number, line in enumerate(self.lines.read(), 1):
            try:
                said = None if line is None else parsed(line)
            except CheckpointMismatch as error:
                raise CheckpointMismatch(
                    f"{self.lines.path}: line {number}: {error}. Remove the file to resume from the checkpoint alone"
                ) from None
            if isinstance(said, ParameterChecksum) and said.begins:
                found.steps = {step: one for step, one in found.steps.items() if step < said.step}
                found.marks = {step: one for step, one in found.marks.items() if step < said.step}
                following, is_known = said.step, True
            is_known = is_known and said is not None and said.step == following
            if isinstance(said, ParameterChecksum) and is_known:
                found.marks[said.step] = said
            elif isinstance(said, StepMessage) and is_known:
                found.steps[said.step], following = said, said.step + 1
        return found
