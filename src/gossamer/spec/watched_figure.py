"""The figure of an evaluation that a run looks at to keep its best checkpoint or to stop: how it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gossamer.spec.errors import bad_input

Watched: TypeAlias = str | dict[Literal["lowest", "highest"], str]  # as people write it: "books", {highest: accuracy}
Figures: TypeAlias = Mapping[tuple[str, str], float]  # of an evaluation: by validation set, and LOSS or the metric
LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedFigure:
    """A figure of one validation set: its loss or a metric, of which the lowest or the highest value is the best."""

    of: str  # the validation set
    figure: str = LOSS
    highest: bool = False

    @staticmethod
    def parse(written: Watched, *, sets: Sequence[str], metrics: Sequence[str], key: str) -> WatchedFigure:
        """Read "", SET, METRIC, SET/METRIC or one of them under `lowest` or `highest`; "" is the first set's loss.

        `sets`: the validation sets; `metrics`: the names of the metrics. Raises BadInput that lists both.
        """
        highest, name = _direction(written, key)
        if not sets:
            raise bad_input(
                wanted="validation data, on which the run is evaluated",
                got="none",
                do=f"set data.validation to a fraction or to sources, or leave {key} out",
                key=key,
            )
        first, slash, second = name.partition("/")
        of, figure = (first, second) if slash else (first, LOSS) if first in sets else (sets[0], first or LOSS)
        if of not in sets or figure not in (LOSS, *metrics):
            known = [*sets, *metrics, *(f"{one}/{metric}" for one in sets for metric in metrics)]
            raise bad_input(
                wanted="the name of a validation set, of a metric of train.metrics, or SET/METRIC",
                got=repr(name),
                do=f"write one of {', '.join(known)}",
                key=key,
            )
        return WatchedFigure(of=of, figure=figure, highest=highest)

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Return whether `value` is better than `than` by more than `by`; not a number is never better."""
        return value > than + by if self.highest else value < than - by

    @property
    def words(self) -> str:
        """Return the figure for people: "validation loss", "books accuracy"."""
        return f"{self.of} {self.figure}"


def _direction(written: Watched, key: str) -> tuple[bool, str]:
    """Return whether the highest value is the best, and the name."""
    if isinstance(written, str):
        return False, written
    if len(written) != 1:
        raise bad_input(
            wanted="one of lowest and highest",
            got=str(dict(written)),
            do="write, for example, {highest: accuracy}",
            key=key,
        )
    ((direction, name),) = written.items()
    return direction == "highest", name


def metric_names(written: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the metrics in `train.metrics`, those of their functions. Raises BadInput for a bad list."""
    for one in written:
        module, _, function = one.partition(":")
        if not module or not function.isidentifier():
            raise bad_input(
                wanted='"package.module:function"', got=repr(one), do="write module and function", key="train.metrics"
            )
    names = tuple(one.partition(":")[2] for one in written)
    twice = sorted({name for name in names if names.count(name) > 1 or name == LOSS})
    if twice:
        raise bad_input(
            wanted=f"functions of different names, and none called {LOSS}",
            got=f"{', '.join(twice)} in {', '.join(written)}",
            do="rename a function: the records name a metric by it",
            key="train.metrics",
        )
    return names
