"""The command `gossamer recommend`: what to try next, by the results of sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gossamer.cli.output import CommandResult, Json, table
from gossamer.spec.errors import bad_input
from gossamer.view.screen import Screen

_SHOWN = 6  # keys


def recommend(
    sweep: Path,
    /,
    *more: str,
    task: Annotated[Path | None, Parameter(name="--for")] = None,
    top: int = 5,
    json: Json = False,
) -> CommandResult:
    """Predict scores of combinations that no sweep has tried, e.g. `gossamer recommend runs/sweep-a runs/sweep-b`.

    Parameters
    ----------
    sweep
        The folder of a sweep that has ended.
    more
        Further folders of sweeps, and key=value,value: the combinations. Default: the values that the sweeps tried.
    task
        The configuration file that the combinations are for. Default: the first sweep's.
    top
        Combinations to show.
    """
    if top < 1:
        raise bad_input(wanted="a number >= 1", got=str(top), do="give 1 or more", key="--top")
    from gossamer.api.sweep.recommend import recommend_command

    settings = [one for one in more if "=" in one]
    data = recommend_command([sweep, *(Path(one) for one in more if "=" not in one)], settings, file=task, top=top)
    rows = [[f"predicted {data['unit']}", "combination"]]
    rows += [[f"{one['predicted']:.4f}", " ".join(one["overrides"])] for one in data["points"]]
    ours, plain = data["error"], data["error_of_mean"]
    worth = "" if ours < plain else ": it is worth nothing here"
    said = [
        f"{data['rows']} combinations with a result, {data['open']} not tried",
        table(rows, screen=Screen.of()),
        f"error on combinations left out: {ours:.4f}; of their mean: {plain:.4f}{worth}",
    ]
    if untold := data["untold"]:
        shown = f"{', '.join(untold[:_SHOWN])}{', ...' if len(untold) > _SHOWN else ''}"
        said.append(f"note: other than in all runs, so that no prediction counts it: {shown}")
    return CommandResult(data, "\n".join(said), is_report=True)
