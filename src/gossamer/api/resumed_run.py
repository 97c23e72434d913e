"""A run that is resumed: `gossamer resume` goes on from a checkpoint, perhaps with other settings."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gossamer.api.launcher import Launcher
from gossamer.api.started_run import check_ranks, is_done
from gossamer.api.startup import keep_settings
from gossamer.settings import Resolved, located
from gossamer.settings.plan_file import contradictions
from gossamer.settings.validation_errors import DEFAULT
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.records import End, Start
from gossamer.spec.unread_keys import check_given
from gossamer.view.failed_start import rollback_failed_start
from gossamer.view.run_directory import RunDirectory, open_run
from gossamer.view.run_lock import held
from gossamer.view.summary import summarize

_log = logging.getLogger(__name__)


def resume_command(
    run_dir: Path, overrides: list[str] | None = None, *, checkpoint: str | int = "latest"
) -> dict[str, Any]:
    """Run `gossamer resume`: continue from a checkpoint, perhaps with other settings; return the summary.

    `checkpoint`: "latest" (the newest good one), "best" or a step.
    The plan is made anew where the settings ask for another one. A run that has made its steps stays unchanged. Paths
    in the run's own configuration are relative to the folder it began in, those in `overrides` to the current one.
    """
    from gossamer.job.run_files import folder_of
    from gossamer.settings import anchored, reload

    directory = open_run(run_dir)
    folder = folder_of(directory)
    with ExitStack() as lock:
        lock.enter_context(held(directory.path))
        resolved = reload(directory.path, overrides or [])  # "latest" may be another one by now
        if folder != Path.cwd():
            resolved = anchored(resolved, Path.cwd())
            _log.warning("relative paths in this run's settings refer to %s, the folder it was started in", folder)
        return go_on(directory, resolved, folder, lock, checkpoint=checkpoint)


def go_on(
    directory: RunDirectory, resolved: Resolved, folder: Path, lock: ExitStack, *, checkpoint: str | int = "latest"
) -> dict[str, Any]:
    """Continue the run of a directory with these settings; return the summary. `lock`: holds the directory's."""
    from gossamer.settings.methods import check_names

    config = resolved.config
    try:
        check_names(resolved)
        check_given(config)
        check_ranks(config, config.machines.processes * max(1, len(config.machines.hosts)))
        only = _asked_step(directory, config, checkpoint)
        if only is None and (ended := ended_early(directory, config)):
            return {**summarize(directory), "nothing_to_do": config.train.steps, "ended_early": ended}
        if only is None and is_done(directory, config):
            return {**summarize(directory), "nothing_to_do": config.train.steps}
        launch = Launcher(directory=directory, config=config, resume=True, folder=folder, checkpoint=only)
        with rollback_failed_start(directory):
            prepare_again(directory, resolved)
            if config.machines.hosts:
                lock.close()  # their supervisors hold it
                launch.over_ssh(config.machines.hosts)
            else:
                launch.here()
    except BadInput as error:
        raise located(error, resolved.origin) from error
    return summarize(directory)


def prepare_again(directory: RunDirectory, resolved: Resolved) -> None:
    """Write the configuration that a run resumes with; keep its plan only where the settings ask for the same one."""
    keep_settings(directory, resolved)
    if (plan := directory.plan()) is not None:  # the user may have edited it
        given = {key for key, where in resolved.origin.items() if where != DEFAULT}
        for error in contradictions(resolved.config, plan, given, name=str(directory.plan_file), lines={}):
            raise error


def _asked_step(directory: RunDirectory, config: RunConfig, checkpoint: str | int) -> int | None:
    """Return the step to resume from; None for the latest. Raises BadInput where it cannot be resumed from."""
    if checkpoint == "latest":
        return None
    from gossamer.recipe import PlanMethods
    from gossamer.run.checkpoint.choice import step_of  # both bring torch

    step = step_of(directory.checkpoints, checkpoint)
    for is_so, got in (
        (bool(config.machines.hosts), "machines.hosts, whose disks hold checkpoints of their own"),
        (
            config.plan.sync != "auto" and PlanMethods.asked(config.plan).sync.probe is not None,
            "zeroth-order training (plan.sync), whose log replays the later steps",
        ),
    ):
        if is_so:
            raise bad_input(
                wanted="the latest checkpoint, or a run on this machine's disk without a log of steps",
                got=f"--checkpoint {checkpoint} with {got}",
                do="leave --checkpoint out",
                key="--checkpoint",
            )
    if step is not None and step >= config.train.steps:
        raise bad_input(
            wanted=f"more than {step} steps, which the checkpoint has already",
            got=str(config.train.steps),
            do=f"set train.steps above {step}",
            key="train.steps",
        )
    return step


def ended_early(directory: RunDirectory, config: RunConfig) -> str:
    """Return why the run ended early, where its settings about that are the same still; "" where it is to go on."""
    last: Start | End | None = None
    for record in directory.records():
        if isinstance(record, (Start, End)):
            last = record
    if not isinstance(last, End) or last.outcome != "done" or last.reason != "early_stop":
        return ""
    from gossamer.store.checkpoint import list_checkpoints  # brings torch

    is_same = directory.config().train.early_stop == config.train.early_stop
    return last.message if is_same and last.step in list_checkpoints(directory.checkpoints) else ""
