"""bytes.log, beside the checkpoints: what the ranks have told each other in steps that losses alone decide.

A step line has what moves the parameters from one step to the next, a mark where they were. From a state that a mark
names, the lines behind it lead to every later state, bit for bit: so no step is lost that a checkpoint missed, and who
has an old checkpoint, or the model that the run began with, needs some hundred bytes a step to be where the others are.
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
    """What a log says that still holds: steps by number, and marks."""

    steps: dict[int, StepMessage] = field(default_factory=dict)
    marks: dict[int, ParameterChecksum] = field(default_factory=dict)

    def is_elsewhere(self, mark: ParameterChecksum) -> bool:
        """Whether the parameters were others after as many steps."""
        known = self.marks.get(mark.step, mark)
        return (known.parameters, known.checksum) != (mark.parameters, mark.checksum)

    def after(self, mark: ParameterChecksum, until: int) -> Iterator[StepMessage]:
        """The steps that lead on from where `mark` is, up to `until` or the first gap; none where that is not known."""
        at = mark.step
        if at not in self.marks or self.is_elsewhere(mark):
            return
        while at < until and at in self.steps and not self.steps[at].buffers:
            yield self.steps[at]
            at += 1


@dataclass(slots=True)
class StepLog:
    """The log in `directory`. One rank of those that see it writes: `is_writer`. A disk that does not take it is told
    once and does not stop the run.
    """

    directory: Path
    is_writer: bool
    _told: bool = False

    @property
    def lines(self) -> CheckedLog:
        return CheckedLog(self.directory / NAME)

    def tell(self, said: StepMessage | ParameterChecksum) -> None:
        """Append it. Marks are forced to the disk."""
        if not self.is_writer:
            return
        try:
            self.lines.append(said.line(), durable=isinstance(said, ParameterChecksum))
        except OSError as error:
            if not self._told:
                _log.warning("%s cannot be written (%s): the run goes on", self.lines.path, error.strerror)
            self._told = True

    def past(self) -> LoggedSteps:
        """What it says. Behind a line that is damaged, or does not follow from the one before, nothing counts until a
        process began anew. Raises CheckpointMismatch for whole lines that are not ours.
        """
        found, following, is_known = LoggedSteps(), 0, True
        for number, line in enumerate(self.lines.read(), 1):
            try:
                said = None if line is None else parsed(line)
            except CheckpointMismatch as error:
                raise CheckpointMismatch(
                    f"{self.lines.path}: line {number}: {error}. Without the file the run goes on from its checkpoint"
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
