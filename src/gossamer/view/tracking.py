"""The trackers of a run, and the guard that keeps their failures from stopping the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.spec.records import Record
from gossamer.view.tracker import Session, build

_THEIRS = (Exception, SystemExit)  # other people's code, other people's servers


class Trackers:
    """The trackers of one run. An exception of one of them is reported once, to `warn`; that tracker is dropped.

    What their packages print goes to stderr: stdout belongs to the command, and may end with one JSON object.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._sessions: dict[str, Session] = {}

    @staticmethod
    def start(
        written: Sequence[Written],
        *,
        run_name: str,
        config: Mapping[str, Any],
        directory: Path,
        warn: Callable[[str], None],
    ) -> Trackers:
        """Start all of `run.trackers`; raises BadInput for an unknown one and for one whose package is missing."""
        trackers = Trackers(warn)
        built = [
            (f"{at}: {MethodConfig.parse(one).name}", build(one, key="run.trackers"))
            for at, one in enumerate(written, 1)
        ]
        try:
            for name, tracker in built:
                try:
                    with redirect_stdout(sys.stderr):
                        trackers._sessions[name] = tracker.start(run_name, config, directory)
                except BadInput:
                    raise
                except _THEIRS as error:
                    trackers._drop(name, error)
        except BadInput:
            trackers.close()
            raise
        return trackers

    def log(self, record: Record) -> None:
        """Pass a record to every tracker."""
        self._each(lambda session: session.log(record))

    def close(self) -> None:
        """Close every tracker's session."""
        self._each(lambda session: session.close())
        self._sessions.clear()

    def _each(self, act: Callable[[Session], None]) -> None:
        for name, session in list(self._sessions.items()):
            try:
                with redirect_stdout(sys.stderr):
                    act(session)
            except _THEIRS as error:
                self._drop(name, error)

    def _drop(self, name: str, error: BaseException) -> None:
        self._sessions.pop(name, None)
        said = (str(error).splitlines() or [""])[0]
        self._warn(f"tracker {name} failed and is off for the rest of the run: {type(error).__name__}: {said}")
