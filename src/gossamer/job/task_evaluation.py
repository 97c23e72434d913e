"""A trained model on tasks of lm-eval-harness (extra `lm-eval`): what `gossamer eval MODEL --tasks NAMES` shows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from gossamer.job.found_model import find_model
from gossamer.run.checkpoint.choice import LATEST
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.extras import install
from gossamer.spec.suggest import nearest

_SEEN = 2048  # tokens that a model without known limit sees


def evaluate_tasks(
    model: Path,
    tasks: Sequence[str],
    *,
    shots: int | None = None,
    examples: int | None = None,
    sequence: int | None = None,
    checkpoint: str | int = LATEST,
) -> dict[str, Any]:
    """Return the figures of a model on tasks; JSON-ready. `tasks`: names of the harness, or yaml files.

    `shots`: solved examples before each question, default as the task says; `examples`: at most so many of each task;
    `sequence`: tokens that the model sees at once, default as many as it can. Raises BadInput, CheckpointMismatch.
    """
    began = time.perf_counter()
    harness, manager = _harness(tasks)
    found = find_model(model.expanduser(), checkpoint)
    if torch.cuda.is_available():
        found.module.to("cuda")
    from gossamer.job.harness_model import HarnessModel

    most = found.positions or _SEEN
    if sequence is not None and sequence > most:
        do = f"give --sequence {most} or less"
        raise bad_input(wanted=f"at most {most} tokens", got=str(sequence), do=do, key="--sequence")
    with redirect_stdout(sys.stderr):  # standard output is the answer's alone
        try:
            results = harness.simple_evaluate(
                model=HarnessModel(found, sequence or most),
                tasks=list(tasks),
                num_fewshot=shots,
                limit=examples,
                log_samples=False,
                task_manager=manager,
            )
        except OSError as error:  # no network, no such file: the harness raises what the package datasets raises
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadInput(f"the data of the tasks cannot be read: {said}", key="--tasks") from None
    return {
        "model": str(model),
        "step": found.step,
        "sequence": sequence or most,
        "tasks": list(_figures(results)),
        "seconds": time.perf_counter() - began,
    }


def _harness(tasks: Sequence[str]) -> tuple[Any, Any]:
    """Return the package and its list of tasks. Raises BadInput where it is not installed, or has no such task."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise BadInput(f"--tasks needs the package lm-eval: {install('lm-eval')}", key="--tasks") from None
    manager = TaskManager()
    for name in tasks:
        if name not in manager.all_tasks and not (name.endswith((".yaml", ".yml")) and Path(name).is_file()):
            near = nearest(name, manager.all_tasks)
            do = near if near.startswith("did you mean") else "name another one"
            wanted = "a task of lm-eval-harness (`lm_eval ls tasks` lists them), or a yaml file with one"
            raise bad_input(wanted=wanted, got=repr(name), do=do, key="--tasks")
    return lm_eval, manager


def _figures(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row per task and metric. The harness names them `acc,none` and `acc_stderr,none`: metric and filter."""
    for task, row in results["results"].items():
        counted = results.get("n-samples", {}).get(task, {})
        for name, value in row.items():
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            spread = row.get(f"{metric}_stderr,{kind}")
            yield {
                "task": task,
                "metric": metric,
                "filter": kind,
                "value": float(value),
                "stderr": float(spread) if isinstance(spread, int | float) else None,
                "examples": counted.get("effective"),
                "shots": results.get("n-shot", {}).get(task),
                "version": results.get("versions", {}).get(task),
            }
