"""The figures that `train.keep_best` and `train.early_stop` look at, read from a configuration and checked."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.spec.config import RunConfig
from gossamer.spec.errors import bad_input
from gossamer.spec.validation_sets import sets_of
from gossamer.spec.watched_figure import WatchedFigure, metric_names


def best_figure(config: RunConfig, sets: Sequence[str]) -> WatchedFigure | None:
    """Return the figure whose best checkpoint is kept; None where none is. `sets`: the validation sets of the run.

    Raises BadInput for a name that is none of theirs.
    """
    written = config.train.keep_best
    if written is False:
        return None
    metrics = metric_names(config.train.metrics)
    return WatchedFigure.parse("" if written is True else written, sets=sets, metrics=metrics, key="train.keep_best")


def stop_figure(config: RunConfig, sets: Sequence[str]) -> WatchedFigure | None:
    """Return the figure that must improve for the run to go on; None where the run has no early stop.

    Raises BadInput for a name that is none of theirs.
    """
    stop = config.train.early_stop
    if not stop.patience:
        return None
    metrics = metric_names(config.train.metrics)
    return WatchedFigure.parse(stop.monitor, sets=sets, metrics=metrics, key="train.early_stop.monitor")


def check_watched(config: RunConfig) -> None:
    """Raise BadInput for figures that the configuration has no validation set or metric for, and for no evaluations."""
    _check_is_text(config)
    names = sets_of(config.data.validation).names
    best_figure(config, names)
    stop_figure(config, names)
    if metric_names(config.train.metrics) and not names:
        raise bad_input(
            wanted="validation data, on which metrics are computed",
            got="data.validation 0",
            do="set data.validation to a fraction or to sources, or leave train.metrics out",
            key="train.metrics",
        )
    if config.train.early_stop.patience and not config.train.evaluate_every:
        raise bad_input(
            wanted="evaluations during the run, which decide whether it ends early",
            got="train.evaluate_every 0: only at the end",
            do="set train.evaluate_every to a number of steps, or train.early_stop.patience to 0",
            key="train.early_stop.patience",
        )


def _check_is_text(config: RunConfig) -> None:
    """Raise BadInput for a key that looks at evaluations where data.factory makes the data: it has no validation."""
    train = config.train
    for key, is_written in (
        ("train.keep_best", train.keep_best is not False),
        ("train.early_stop.patience", train.early_stop.patience > 0),
        ("train.metrics", bool(train.metrics)),
    ):
        if is_written and config.data.factory is not None:
            raise bad_input(
                wanted="validation data, which text alone has (data.source)",
                got=f"data.factory {config.data.factory}",
                do=f"leave {key} out",
                key=key,
            )
