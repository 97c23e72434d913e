"""A run that is started: `gossamer train` makes its folder and starts its processes, here or on other machines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.api.launcher import RUN_FOLDER, Launcher
from gossamer.api.startup import keep_settings
from gossamer.launch.environment import is_rank_of_launcher, launcher_of, read_environment
from gossamer.launch.rendezvous_config import Node
from gossamer.settings import Resolved
from gossamer.settings.plan_file import with_plan
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, CheckpointMismatch, Interrupted, bad_input
from gossamer.spec.records import End, Saved, Start
from gossamer.spec.unread_keys import check_given
from gossamer.view.failed_start import rollback_failed_start
from gossamer.view.open_display import open_display
from gossamer.view.run_directory import RunDirectory, check_new, newest_like
from gossamer.view.run_lock import check_free, held
from gossamer.view.summary import summarize

if TYPE_CHECKING:
    from gossamer.launch.worker import Ready


def train_command(
    resolved: Resolved,
    *,
    plan: Path | None = None,
    hosts: list[str] | None = None,
    node: Node | None = None,
    ray_nodes: int = 0,
    resume: str | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Run `gossamer train`: make the run's folder, start its processes, display their records, return the summary.

    `ray_nodes`: so many nodes of a Ray cluster are its hosts; 0: Ray is not asked. `resume="auto"` resumes the newest
    run of the same configuration, if there is one. Raises BadInput, RunFailed, Interrupted.
    """
    resolved = on_hosts(resolved, hosts)
    resolved = planned_by(resolved, plan, node.nodes if node is not None else ray_nodes or len(hosts or ()))
    if dry_run:
        from gossamer.job import dry_run as dry

        return dry.dry_run(resolved.config, plan)

    def prepare(folder: RunDirectory, resuming: bool) -> None:
        # Where the two differ, `gossamer resume RUN key=value` was typed on the launching machine.
        if not resuming or folder.config() != resolved.config:
            keep_settings(folder, resolved)
        if plan is not None:
            _adopt_plan(plan, folder)

    names = resolved.config.machines.hosts
    if is_rank_of_launcher() and node is None and not names and not ray_nodes:
        return _as_rank(resolved, resume, prepare)
    directory, resuming = run_directory(resolved, resume)
    launch = Launcher(directory=directory, config=resolved.config, resume=resuming)
    if node is not None:
        with rollback_failed_start(directory):
            return summarize(launch.met(node, lambda folder: prepare(folder, resuming))[0])
    if names or ray_nodes:
        if resuming:
            check_free(directory.path)  # their supervisors will hold it
        with rollback_failed_start(directory):
            launch.on_ray(ray_nodes, plan) if ray_nodes else launch.over_ssh(names, plan)
        return summarize(directory)
    if resuming and is_done(directory, resolved.config):
        return {**summarize(directory), "nothing_to_do": resolved.config.train.steps}
    with held(directory.path), rollback_failed_start(directory):
        prepare(directory, resuming)
        launch.here()
    return summarize(directory)


def on_hosts(resolved: Resolved, hosts: list[str] | None) -> Resolved:
    """Return the configuration as if machines.hosts named `hosts`: what is kept says where the run goes on."""
    if not hosts:
        return resolved
    machines = resolved.config.machines.model_copy(update={"hosts": hosts})
    return replace(resolved, config=resolved.config.model_copy(update={"machines": machines}))


def planned_by(resolved: Resolved, plan: Path | None, hosts: int) -> Resolved:
    """Return the configuration with the plan's decisions; raises BadInput for errors that are found without torch."""
    config, launched = resolved.config, is_rank_of_launcher()
    machines = hosts or max(1, len(config.machines.hosts))
    ranks = read_environment().ranks if launched else config.machines.processes * machines
    if plan is not None:
        resolved = with_plan(resolved, plan, ranks=ranks)
    check_given(resolved.config)
    check_ranks(resolved.config, ranks)
    return resolved


def check_ranks(config: RunConfig, ranks: int) -> None:
    stages = 1 if config.plan.mesh.pipe == "auto" else config.plan.mesh.pipe
    if config.train.batch * stages < ranks and config.plan.stage_ranks == "auto":
        raise bad_input(
            wanted="at least one sequence per process and step",
            got=f"a batch of {config.train.batch} for {ranks} processes",
            do=f"set train.batch to {ranks} or more, or machines.processes to at most {config.train.batch}",
            key="train.batch",
        )
    if config.plan.stage_ranks == "auto" and ranks % stages:
        raise bad_input(
            wanted=f"a multiple of {stages} processes, one for every stage",
            got=f"{ranks}",
            do=f"set machines.processes to a multiple of {stages}, or plan.mesh.pipe to a divisor of {ranks}",
            key="plan.mesh.pipe",
        )


def is_done(directory: RunDirectory, config: RunConfig) -> bool:
    """Return whether a run has made all wanted steps, and has them in a good checkpoint.

    Raises BadInput where it made more.
    """
    wanted, made, ended = config.train.steps, 0, False
    for record in directory.records():
        if isinstance(record, Saved) and not record.error:
            made = record.step
        if isinstance(record, (Start, End)):
            ended = isinstance(record, End) and record.outcome == "done"
    if made > wanted:
        raise bad_input(
            wanted=f"at least {made} steps, which this run has already trained and saved",
            got=str(wanted),
            do=f"leave train.steps out, or set it above {made}",
            key="train.steps",
        )
    if made < wanted or not ended:
        return False
    from gossamer.store.checkpoint import latest_good  # brings torch

    try:
        checkpoint, _ = latest_good(directory.checkpoints)
    except (BadInput, CheckpointMismatch):
        return False  # going on says what is wrong
    return int(checkpoint.meta["step"]) == wanted  # else the last steps are made again


def run_directory(resolved: Resolved, resume: str | None) -> tuple[RunDirectory, bool]:
    """Return the run's folder, and whether the run in it is resumed. Of the ranks of a launcher, rank 0 calls it.

    Raises BadInput for a folder of that name with another run in it, or with one that is not to be resumed.
    """
    config = resolved.config
    runs = Path(config.run.directory)
    if named := os.environ.get(RUN_FOLDER):
        directory = RunDirectory(runs / named)
        return directory, resume == "auto" and directory.config_file.exists()
    check_asked(config, resume)
    if resume == "auto" and (found := newest_like(runs, config)) is not None:
        return found, True
    if launcher_of(os.environ) and (name := _name_of(config)):
        directory = RunDirectory.named(runs, name)
        check_new(directory, resume="--resume auto", is_other=resume == "auto")
        return directory, False
    if is_rank_of_launcher():
        raise _nameless()
    return RunDirectory.create(runs, config.run.name or model_name(config)), False


def check_asked(config: RunConfig, resume: str | None) -> None:
    """Raise BadInput for what is asked for wrongly, as far as no folder tells it: so every rank can by itself."""
    if resume not in (None, "auto"):
        raise bad_input(
            wanted="--resume auto", got=f"--resume {resume}", do="write auto, or use `gossamer resume RUN_DIR`"
        )
    if launcher_of(os.environ) and (name := _name_of(config)):
        RunDirectory.named(Path(config.run.directory), name)
    elif is_rank_of_launcher() and resume is None:
        raise _nameless()


def _name_of(config: RunConfig) -> str | None:
    return config.run.name or os.environ.get("GOSSAMER_RUN_NAME")


def _nameless() -> BadInput:
    return bad_input(
        wanted="the name of the run directory, to which all ranks of torchrun, srun or mpirun write",
        got="no name",
        do="set run.name, to the same name on all ranks",
        key="run.name",
    )


def model_name(config: RunConfig) -> str:
    """Return a short name for the model of a configuration, for folders."""
    model = config.model
    written = model.factory or model.gguf or model.hf or "model"
    return Path(written.rpartition(":")[2] or written).stem


def _adopt_plan(file: Path, directory: RunDirectory) -> None:
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, directory.plan_file)
    except OSError as error:
        raise BadInput(
            f"cannot copy the plan {file} to {directory.plan_file}: {error.strerror}: check both paths"
        ) from None


def is_first() -> bool:
    """Return whether this is rank 0 of a launcher."""
    return read_environment().rank == 0


def _as_rank(resolved: Resolved, resume: str | None, prepare: Callable[[RunDirectory, bool], None]) -> dict[str, Any]:
    """Run as one of the ranks that torchrun, srun or mpirun started. `prepare`: called on rank 0, while others wait."""
    from gossamer.comm.patience import PatientStore
    from gossamer.job.agreed_run import agreed_run
    from gossamer.job.worker import joined, run_rank, time_limit_s

    config = resolved.config
    check_asked(config, resume)
    ended: list[RunDirectory] = []

    def body(ready: Ready) -> None:
        timeout_s = time_limit_s(ready.place, config)
        store = joined(ready.place, timeout_s)
        with ExitStack() as stack:

            def begin() -> tuple[RunDirectory, bool]:
                directory, resuming = run_directory(resolved, resume)
                stack.enter_context(held(directory.path))
                stack.enter_context(rollback_failed_start(directory))
                prepare(directory, resuming)
                return directory, resuming

            directory, resuming = agreed_run(ready.place, PatientStore(store, timeout_s), begin, timeout_s=timeout_s)
            display = open_display(config.run.display if is_first() else "quiet", title=directory.name)
            stack.callback(display.close)
            run_rank(ready, directory, config, resume=resuming, show=display.show, store=store)
            ended.append(directory)

    run_as_worker(body)
    return summarize(ended[0]) if is_first() else {}


def run_as_worker(body: Callable[[Ready], None]) -> None:
    """Run `body` as the worker that torchrun, srun or mpirun started; end the process where it fails.

    Raises BadInput and Interrupted for the command line to say: no supervisor reads the worker's note.
    """
    from gossamer.launch.worker import run_worker

    ended: list[BaseException] = []

    def noted(ready: Ready) -> None:
        try:
            body(ready)
        except (BadInput, Interrupted) as error:
            ended.append(error)
            raise

    code = run_worker(noted)
    if ended:
        raise ended[0]
    if code:
        sys.exit(3)
