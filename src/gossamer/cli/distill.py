"""The command `gossamer distill`: a smaller model that a larger one teaches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.api import verbs
from gossamer.cli.output import CommandResult, Json, table
from gossamer.cli.train import ending


def distill(teacher: str, /, *override: str, to: Path, by: str = "taid", json: Json = False) -> CommandResult:
    """Train the model of a configuration with a teacher: `gossamer distill runs/LARGE --to run.yaml --by taid`.

    It is `gossamer train` with train.loss {BY: {teacher: TEACHER}}, and says the losses of both before and after.

    Parameters
    ----------
    teacher
        A run directory, a Hugging Face folder or a GGUF file, with the vocabulary of the student.
    override
        key=value, wins over the file, such as train.loss.taid.label_weight=0.5.
    to
        The configuration of the student (YAML or TOML).
    by
        taid, kl, reverse_kl, jsd, hidden (hidden states beside kl) or expert_distillation (of a pruned mixture);
        `gossamer methods loss` explains them.
    """
    data = verbs.distill(teacher, to, list(override), by=by)
    return CommandResult(data, f"{_told(data)}{ending(data)}", is_report=True)


def _told(data: Mapping[str, Any]) -> str:
    """Return the losses as a table: a line per validation set."""
    losses = data["distillation"]["losses"]
    if not losses:
        return ""
    rows = [("validation", "teacher", "student before", "student after")]
    for name, one in losses.items():
        after = one.get("student_after")
        shown = "-" if after is None else f"{after:.4f}"
        rows.append((name, f"{one['teacher']:.4f}", f"{one['student']:.4f}", shown))
    return f"{table(rows)}\n(nats/token)\n"
