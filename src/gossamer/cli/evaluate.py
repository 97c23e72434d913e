"""The command `gossamer eval`: the loss of a trained model on texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gossamer.api import verbs
from gossamer.cli.output import CommandResult, Json, table
from gossamer.spec.errors import bad_input
from gossamer.spec.units import show_seconds
from gossamer.view.screen import Screen


def evaluate(
    model: Path,
    /,
    *files: str,
    sequence: int | None = None,
    sequences: int | None = None,
    checkpoint: str = "latest",
    tasks: str = "",
    shots: int | None = None,
    json: Json = False,
) -> CommandResult:
    """Measure a model on texts, e.g. `gossamer eval runs/NAME notes.txt`: loss, perplexity, bits per byte.

    Or on tasks of lm-eval-harness: `gossamer eval runs/NAME --tasks arc_easy,my_task.yaml` (extra `lm-eval`).

    Parameters
    ----------
    model
        A run directory, a Hugging Face folder or a GGUF file.
    files
        Text files, JSON lines with a field `text`, or chats (of which the answers alone count); patterns in quotes.
        None: the validation sets of the run, as training evaluates them.
    sequence
        Tokens that the model sees at once. Default: as in training; of other models 1024 at most.
    sequences
        At most so many sequences of every text. Default: all; of the run's own text as many as in training.
    checkpoint
        latest, best (of a run with train.keep_best) or the step of a checkpoint.
    tasks
        lm-eval-harness's names, or yaml files with a task, with commas between them; --sequences: examples of each.
    shots
        Solved examples before each question of a task. Default: as the task says.
    """
    for name, value, least in (("sequence", sequence, 2), ("sequences", sequences, 1), ("shots", shots, 0)):
        if value is not None and value < least:
            raise bad_input(wanted=f"a number >= {least}", got=str(value), do=f"give {least} or more", key=f"--{name}")
    if tasks:
        return _on_tasks(model, files, tasks, shots=shots, sequence=sequence, examples=sequences, checkpoint=checkpoint)
    if shots is not None:
        do = "name tasks with --tasks, or leave --shots out"
        raise bad_input(wanted="--shots with --tasks", got="no tasks", do=do, key="--shots")
    with progress_bars() as tick:
        data = verbs.evaluate(
            model, files, sequence=sequence, sequences=sequences, checkpoint=checkpoint, progress=tick
        )
    return CommandResult(data, _told(data))


def _on_tasks(
    model: Path,
    files: Sequence[str],
    tasks: str,
    *,
    shots: int | None,
    sequence: int | None,
    examples: int | None,
    checkpoint: str,
) -> CommandResult:
    names = [name.strip() for name in tasks.split(",")]
    if files or not all(names):
        got = f"files too ({', '.join(files)})" if files else f"an empty name in {tasks!r}"
        raise bad_input(wanted="tasks alone", got=got, do="give files or --tasks NAME,NAME", key="--tasks")
    data = verbs.evaluate_on_tasks(
        model, names, shots=shots, sequence=sequence, examples=examples, checkpoint=checkpoint
    )
    return CommandResult(data, _told_of_tasks(data))


def _told_of_tasks(data: Mapping[str, Any]) -> str:
    """Return the figures as a table: a line per task and metric."""
    rows: list[Sequence[str]] = [("task", "metric", "value", "+-", "examples", "shots")]
    for one in data["tasks"]:
        spread = "" if one["stderr"] is None or math.isnan(one["stderr"]) else f"{one['stderr']:.4f}"
        metric = one["metric"] if one["filter"] == "none" else f"{one['metric']} ({one['filter']})"
        count, shots = ("" if number is None else str(number) for number in (one["examples"], one["shots"]))
        rows.append((one["task"], metric, f"{one['value']:.4f}", spread, count, shots))
    step = "" if data["step"] is None else f", step {data['step']}"
    return f"{data['model']}{step}, in {show_seconds(data['seconds'])}\n{table(rows)}"


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar per text on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def tick(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done)

        yield tick


def _told(data: Mapping[str, Any]) -> str:
    """Return the figures as a table: a line per text, and one of all where there are several."""
    rows: list[Sequence[str]] = [("text", "loss (nats/token)", "perplexity", "bits/byte", "tokens", "bytes")]
    rows += [_row(one["text"], one) for one in data["texts"]]
    if len(data["texts"]) > 1:
        rows.append(_row("all", data))
    step = "" if data["step"] is None else f", step {data['step']}"
    head = f"{data['model']}{step}, in {show_seconds(data['seconds'])}"
    said = [head, table(rows, screen=Screen.of()), *(f"note: {remark}" for remark in data["remarks"])]
    reported = [(one["text"], one["reported_loss"]) for one in data["texts"] if one.get("reported_loss") is not None]
    if reported:
        losses = ", ".join(f"{loss:.6f}{f' for {name}' if len(data['texts']) > 1 else ''}" for name, loss in reported)
        said.append(f"training reported {losses} at this step")
    return "\n".join(said)


def _row(name: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    bits = one["bits_per_byte"]
    perplexity = one["perplexity"]
    return (
        name,
        f"{one['loss']:.6f}",
        f"{perplexity:.4g}" if math.isfinite(perplexity) else "-",
        "-" if bits is None else f"{bits:.4f}",
        f"{one['labels']:,}",
        f"{one['bytes']:,}",
    )
