"""The writer of a run's records."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from gossamer.spec import records
from gossamer.spec.errors import RunFailed
from gossamer.view.progress import Doubtful
from gossamer.view.run_directory import RunDirectory

_AGAIN_S = 1.0  # before the end record of a run is written again
_UNWRITTEN = 20_000  # records kept for a disk that has no room: the newest
_log = logging.getLogger(__name__)


def forget(record: records.Record) -> None:
    """Drop a record: only rank 0 writes the run's records."""


class RecordWriter:
    """A writer that appends records to the run directory.

    A failed write does not stop the run: it is reported once, and the records follow, in order, with the next write
    that succeeds. Raises RunFailed if the end of a successful run cannot be written, since readers would miss it.
    """

    def __init__(self, directory: RunDirectory, show: Callable[[records.Record], None] | None) -> None:
        self._directory, self._show = directory, show
        self._unwritten: deque[records.Record] = deque(maxlen=_UNWRITTEN)
        self._told = False
        self._doubtful = Doubtful()

    def __call__(self, record: records.Record) -> None:
        for said in self._doubtful.add(record):
            _log.warning("%s", said)
        self._unwritten.append(record)
        problem = self._write()
        if problem is not None and not self._told:
            self._told = True
            said = "%s cannot be written (%s): the run continues, and writes its records as soon as it can"
            _log.warning(said, self._directory.records_file, problem.strerror)
        if problem is not None and isinstance(record, records.End) and record.outcome != "failed":
            self._insist(record)
        if self._show is not None:
            self._show(record)

    def _insist(self, record: records.End) -> None:
        time.sleep(_AGAIN_S)
        if (problem := self._write()) is not None:
            raise RunFailed(
                f"the run ended ({record.outcome}) at step {record.step} and its checkpoint is saved, but "
                f"{len(self._unwritten)} records are not in {self._directory.records_file}: {problem.strerror}. "
                f"Free disk space, then run `gossamer resume {self._directory.path}`: nothing else is lost"
            )

    def _write(self) -> OSError | None:
        try:
            while self._unwritten:
                self._directory.append(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            return error
        return None
