"""The command `gossamer sweep`: train several values and seeds, and compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gossamer.cli.output import CommandResult, Json, table
from gossamer.spec.errors import bad_input
from gossamer.spec.units import show_seconds
from gossamer.view.screen import Screen

_POINTS = 20  # that a sampler chooses unless told otherwise


def sweep(
    run: Path,
    /,
    *settings: str,
    seeds: int = 1,
    jobs: int = 1,
    halving: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    sampler: str = "",
    points: int | None = None,
    folder: Path | None = None,
    json: Json = False,
) -> CommandResult:
    """Train every combination of values, e.g. `gossamer sweep run.yaml train.optimizer.adamw.lr=1e-4,3e-4 --seeds 3`.

    Parameters
    ----------
    run
        The configuration file.
    settings
        key=value,value: a key with its values. A list in brackets is one value. One value: a setting of all runs.
    seeds
        Train every combination with so many seeds: train.seed, and those after it.
    jobs
        Runs at a time; they share the cores.
    halving
        Successive halving: all on a part of the steps first, the better half on twice as many, the last on all.
    sampler
        tpe, gp or random of Optuna (extra `optuna`) chooses the values, also from ranges: lr=1e-5..1e-2:log.
    points
        Combinations that the sampler chooses. Default: 20; the same command with more goes on.
    folder
        The sweep's folder. Default: one in run.directory, the same for the same command, which so goes on.
    """
    for name, value in (("seeds", seeds), ("jobs", jobs), ("points", points)):
        if value is not None and value < 1:
            raise bad_input(wanted="a number >= 1", got=str(value), do="give 1 or more", key=f"--{name}")
    from rich.console import Console

    from gossamer.api.sweep.command import sweep_command
    from gossamer.api.sweep.search import search_command

    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    _check_search(settings, sampler=sampler, points=points, halving=halving)
    shared: dict[str, Any] = {"seeds": seeds, "jobs": jobs, "folder": folder, "tell": console.print}
    if sampler:
        data = search_command(run, settings, sampler=sampler, points=points or _POINTS, **shared)
    else:
        data = sweep_command(run, settings, halving=halving, **shared)
    return CommandResult(data, told(data), is_report=True)


def _check_search(settings: tuple[str, ...], *, sampler: str, points: int | None, halving: bool) -> None:
    """Raise BadInput for options that belong to a sampler without one, and for halving with one."""
    from gossamer.api.sweep.search import Range

    if sampler and halving:
        do = "leave one of the two out"
        raise bad_input(wanted="--halving or --sampler", got="both", do=do, key="--sampler")
    if sampler:
        return
    if points is not None:
        do = "write --sampler tpe, or leave --points out"
        raise bad_input(wanted="--points with --sampler", got="no sampler", do=do, key="--points")
    if ranges := [found.key for one in settings if (found := Range.parse(one)) is not None]:
        do = "write --sampler tpe, or its values with commas between them"
        raise bad_input(wanted="several values, or --sampler", got="a range", do=do, key=ranges[0])


def told(data: Mapping[str, Any]) -> str:
    """Return the ranking as a table: best first, mean and spread over seeds; below it every failure with its reason."""
    from gossamer.api.sweep.command import first_line

    points = data["points"]
    varied = _varied([one["overrides"] for one in points])
    several_seeds, several_steps = points[0]["seeds"] > 1, len({one["steps"] for one in points}) > 1
    head = [*varied, str(data["unit"]), "spread" if several_seeds else "", "steps" if several_steps else "", "time"]
    rows = [head]
    for one in points:
        values = dict(text.split("=", 1) for text in one["overrides"])
        average = "failed" if one["mean"] is None else f"{one['mean']:.4f}"
        if 0 < len(one["values"]) < one["seeds"]:
            average += f" ({len(one['values'])} of {one['seeds']} seeds)"
        spread = "" if not several_seeds else "-" if one["spread"] is None else f"{one['spread']:.4f}"
        steps = str(one["steps"]) if several_steps else ""
        rows.append([*(values[key] for key in varied), average, spread, steps, show_seconds(one["seconds"])])
    kept = [n for n, name in enumerate(head) if name]
    lines = [f"{data['folder']}: {data['trials']} trials, {data['failed']} failed"]
    lines.append(table([[row[n] for n in kept] for row in rows], screen=Screen.of()))
    for one in points:
        for error in dict.fromkeys(one["errors"]):
            lines.append(f"failed: {' '.join(one['overrides'])}: {first_line(error)}")
    if points[0]["best"]:
        lines.append(f"best: {points[0]['best']}\nnext: gossamer sample {points[0]['best']} PROMPT")
    return "\n".join(lines)


def _varied(overrides: list[list[str]]) -> list[str]:
    """Return the keys whose values differ among the points; all keys where there is one point."""
    first = dict(text.split("=", 1) for text in overrides[0])
    if len(overrides) == 1:
        return list(first)
    others = [dict(text.split("=", 1) for text in one) for one in overrides]
    return [key for key in first if len({one[key] for one in others}) > 1]
