"""The callbacks of `gossamer.train`: functions of the user that are told of a run's records, on rank 0."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossamer.process.stack_position import place_of
from gossamer.spec import records
from gossamer.spec.errors import RunFailed, bad_input

STOP = "stop"
_METHODS: dict[type[records.Record], str] = {
    records.Step: "on_step",
    records.Evaluation: "on_evaluation",
    records.Saved: "on_save",
    records.End: "on_end",
}


@dataclass(slots=True)
class UserCallbacks:
    """The callbacks of a run: functions of every record, or objects with on_step, on_evaluation, on_save, on_end.

    Each gets a copy of a record, so that nothing of the run changes with it. One that returns "stop" ends the run after
    the next step, whose vote tells the other ranks; `wants_end` tells the trainer.
    """

    callbacks: Sequence[Any]
    wants_end: bool = False
    _has_failed: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        """Raise BadInput for a callback that is no function and has none of the methods."""
        for number, one in enumerate(self.callbacks):
            if isinstance(one, type) or not (callable(one) or any(hasattr(one, name) for name in _METHODS.values())):
                raise bad_input(
                    wanted=f"a function of a record, or an object with one of {', '.join(_METHODS.values())}",
                    got=f"the class {one.__name__}"
                    if isinstance(one, type)
                    else f"an object of type {type(one).__name__}",
                    do="give an instance of it" if isinstance(one, type) else "give such a function or object",
                    key=f"callbacks[{number}]",
                )

    def __call__(self, record: records.Record) -> None:
        """Tell all callbacks of a step, an evaluation, a checkpoint or the end; other records are passed over.

        Raises RunFailed with the place of an error of a callback. None of them is called after that.
        """
        method = _METHODS.get(type(record))
        if method is None or self._has_failed:
            return
        for number, one in enumerate(self.callbacks):
            function: Callable[[records.Record], Any] | None = getattr(one, method, one if callable(one) else None)
            if function is None:
                continue
            try:
                answer = function(copy.deepcopy(record))
            except Exception as error:
                self._has_failed = True
                place = place_of(error)
                raise RunFailed(
                    f"callbacks[{number}] raised {type(error).__name__}{f' at {place}' if place else ''} after step "
                    f"{getattr(record, 'step', 0)} ({method}): {error}"
                ) from error
            self._take(answer, number, method)

    def _take(self, answer: object, number: int, method: str) -> None:
        if answer is None:
            return
        if answer != STOP:
            self._has_failed = True
            raise RunFailed(
                f'callbacks[{number}] returned {answer!r} from {method}: wanted None, or "stop" to end the run'
            )
        self.wants_end = True
