"""A run in phases (`train.phases`): each is a run of its own in RUN/phases, begun from what the one before became.

Everything that can be known of all phases is checked before the first step of the first. A start folder is there
completely or not at all, so whatever is interrupted, the files say where to go on.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from gossamer.api import resumed_run, started_run
from gossamer.api.launcher import Launcher
from gossamer.api.startup import rollback_failed_start
from gossamer.api.transitions import StartRequest, Transition, made_by, make_start, transition_of, written_by
from gossamer.launch.environment import launcher_of
from gossamer.launch.rendezvous_config import Node
from gossamer.settings import Resolved, located
from gossamer.settings.describe import leaves
from gossamer.settings.phases import KEY, Phase, of_phase, phases_of
from gossamer.settings.resolve import value_at
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, Interrupted, bad_input
from gossamer.spec.method_config import MethodConfig
from gossamer.spec.records import Event
from gossamer.spec.unread_keys import check_given
from gossamer.view.open_display import open_display
from gossamer.view.run_directory import RunDirectory, find_run, newest_like
from gossamer.view.run_lock import held
from gossamer.view.summary import summarize
from gossamer.view.told_progress import ToldProgress

_log = logging.getLogger(__name__)
_FIGURES = ("directory", "outcome", "steps", "seconds", "final_loss", "validation_loss", "validation_bits_per_byte")


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
    """Run `gossamer train`, see `started_run.train_command`; of a configuration with phases, one after the other."""
    config = resolved.config
    if not config.train.phases:
        return started_run.train_command(
            resolved, plan=plan, hosts=hosts, node=node, ray_nodes=ray_nodes, resume=resume, dry_run=dry_run
        )
    _check_is_here(config, plan, is_elsewhere=bool(hosts or node or ray_nodes))
    runs = Path(config.run.directory)
    if dry_run:
        phases = phases_of(resolved, runs / "RUN")
        return {"phases": {phase.name: told for phase, told in zip(phases, _checked(phases), strict=True)}}
    if resume == "auto" and (found := newest_like(runs, config)) is not None:
        return _resumed(found, resolved)
    _checked(phases_of(resolved, runs / "RUN"))
    directory = RunDirectory.create(runs, config.run.name or started_run.model_name(config))
    with held(directory.path):
        directory.keep(config, resolved.origin)
        return _run(directory, phases_of(resolved, directory.path))


def resume_command(
    run_dir: Path, overrides: list[str] | None = None, *, checkpoint: str | int = "latest"
) -> dict[str, Any]:
    """Run `gossamer resume`, see `resumed_run.resume_command`; a run in phases goes on in the one it was in."""
    from gossamer.job.run_files import folder_of
    from gossamer.job.trained_run import standing_in
    from gossamer.settings import anchored, reload

    found = find_run(run_dir)
    if not found.config_file.exists() or not found.config().train.phases:
        return resumed_run.resume_command(run_dir, overrides, checkpoint=checkpoint)
    if checkpoint != "latest":
        raise bad_input(
            wanted="one phase to resume from another checkpoint than its latest",
            got=f"--checkpoint {checkpoint} with a run in phases",
            do=f"name the folder of the phase in {found.path / 'phases'}, or leave --checkpoint out",
            key="--checkpoint",
        )
    here, directory = Path.cwd(), RunDirectory(found.path.absolute())
    resolved = reload(directory.path, overrides or [])
    with standing_in(folder_of(directory)):
        return _resumed(directory, anchored(resolved, here) if here != Path.cwd() else resolved)


def _resumed(directory: RunDirectory, resolved: Resolved) -> dict[str, Any]:
    with held(directory.path):
        if not resolved.config.train.phases:
            do = "leave train.phases as it was; train.steps in it may change"
            raise bad_input(wanted="the phases that the run has", got="none", do=do, key=KEY)
        phases = phases_of(resolved, directory.path)
        begun = [one.path.name for one in directory.phases]
        if begun != [phase.directory.path.name for phase in phases[: len(begun)]]:
            raise bad_input(
                wanted=f"phases that begin with those there are: {', '.join(begun)}",
                got=", ".join(phase.directory.path.name for phase in phases),
                do="change phases that have not begun, and add new ones at the end",
                key=KEY,
            )
        left = phases[max(0, len(begun) - 1) :]
        _checked(left)
        directory.keep(resolved.config, resolved.origin)
        return _run(directory, phases)


def _check_is_here(config: RunConfig, plan: Path | None, *, is_elsewhere: bool) -> None:
    """Raise BadInput for phases that other processes than ours would have to follow."""
    for is_so, got, do in (
        (is_elsewhere or bool(config.machines.hosts), "several hosts", "train each phase as a run, with model.start"),
        (launcher_of(os.environ) in ("torchrun", "srun", "mpirun"), "a launcher", "start it with `gossamer train`"),
        (plan is not None, f"--plan {plan}", "write the keys of `plan` that differ into each phase"),
    ):
        if is_so:
            raise bad_input(wanted="phases on the processes of this machine", got=got, do=do, key=KEY)


def _checked(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Return the dry run of each phase. Raises BadInput, with the phase's name, for one that cannot run."""
    from gossamer.job.phase_checks import (
        check_fits,
        check_masks,
        check_source,
        check_tokenizers,
        fills_zeros,
        look_at,
        starts_with_masks,
    )
    from gossamer.settings.methods import check_names

    found: list[Any] = []
    last: Transition | None = None
    has_masks = False
    for phase in phases:
        config = phase.config
        try:
            transition = transition_of(phase.by, key=phase.key("by"))
            if config.machines.hosts:
                _check_is_here(config, None, is_elsewhere=True)
            check_names(phase.resolved)
            check_given(config)
            started_run.check_ranks(config, config.machines.processes)
            if found:
                is_kept = has_masks and transition.keeps_masks and not fills_zeros(found[-1].config)
                has_masks = transition.gives_masks or is_kept
            else:
                has_masks = starts_with_masks(config.model)
            look = look_at(config, has_masks=has_masks)
            check_fits(look)
            if found:
                _check_whole(last)
                check_source(found[-1].config, phase.by)
                check_tokenizers(found[-1], look)
                with _keys_of(phase):
                    transition.check(found[-1], look, phase.by or "")
                check_masks(look, has_masks=has_masks)
        except BadInput as error:
            raise of_phase(located(error, phase.resolved.origin), phase.name) from error
        found.append(look)
        last = transition
    made = [None, *(phase.by or "the weights of the phase before" for phase in phases[1:])]
    return [({"by": by} if by else {}) | dict(one.told) for by, one in zip(made, found, strict=True)]


def _check_whole(before: Transition | None) -> None:
    if before is not None and before.gives_integers:
        raise bad_input(
            wanted="a phase before whose weights are whole",
            got="one that begins with a quantized model",
            do="make it the last phase",
            key=KEY,
        )


@contextmanager
def _keys_of(phase: Phase) -> Iterator[None]:
    """Let errors about an option of a command name the key of the phase that stands for it."""
    try:
        yield
    except BadInput as error:
        if error.key.partition(".")[0] in RunConfig.model_fields:
            raise
        if error.key == "--to":
            raise BadInput(error.message, key="model") from error
        is_option = error.key in ("", "CHECKPOINT", "files") or error.key.startswith("--")
        raise BadInput(error.message if is_option else str(error), key=phase.key("by")) from error


def _run(directory: RunDirectory, phases: Sequence[Phase]) -> dict[str, Any]:
    """Run the phases that are not done; return the summary of the last with the figures of all."""
    told: list[dict[str, Any]] = []
    for index, phase in enumerate(phases):
        is_past = index + 1 < len(phases) and phases[index + 1].is_begun
        if is_past:
            _say_unchanged(phase)
        else:
            try:
                _prepare(phase, phases[index - 1] if index else None)
                if _train(phase) and index + 1 < len(phases):
                    raise Interrupted("asked to stop as the phase ended")
            except Interrupted:
                raise Interrupted(
                    f"stopped in phase {phase.name}, number {phase.number} of {len(phases)}, and all steps are saved; "
                    f"go on with: gossamer resume {directory.path}"
                ) from None
            except BadInput as error:
                raise of_phase(error, phase.name) from error
        one = summarize(phase.directory)
        told.append({"name": phase.name, "by": phase.by} | {key: one[key] for key in _FIGURES})
    last = summarize(phases[-1].directory)
    return {**last, "run": directory.name, "directory": str(directory.path), "phases": told}


def _say_unchanged(phase: Phase) -> None:
    """Warn of settings that a phase which is done was not trained with."""
    before = phase.directory.config()
    other = [
        key
        for key, _ in leaves()
        if key.startswith(("model.", "data.", "train.")) and value_at(before, key) != value_at(phase.config, key)
    ]
    if _is_other(phase):
        other.append(phase.key("by"))
    if other and other != ["model.start"]:
        _log.warning("phase %s is done and stays as it is, without the new %s", phase.name, ", ".join(other))


def _prepare(phase: Phase, before: Phase | None) -> None:
    """Write the start folder of a phase where it is missing, or was made otherwise; say so, as it may take minutes."""
    if phase.start is None or before is None:
        return
    if phase.directory.config_file.exists() and phase.start.is_dir():
        if _is_other(phase):
            raise bad_input(
                wanted=f"the method by which phase {phase.name} began, {made_by(phase.start)}",
                got=f"{written_by(phase.by)}",
                do="write that one, or add a phase at the end",
                key=phase.key("by"),
            )
        return
    display = open_display("quiet" if phase.config.run.display == "quiet" else "plain")
    how = "the weights" if phase.by is None else f"{MethodConfig.parse(phase.by).name}, of the weights"
    try:
        display.show(Event(level="info", message=f"phase {phase.name}: its start, {how} of phase {before.name}"))
        with _stop_is_interrupted(), _keys_of(phase):
            told = make_start(
                StartRequest(
                    by=phase.by,
                    source=before.directory.path,
                    target=phase.config,
                    out=phase.start.absolute(),
                    progress=ToldProgress(display=display, whose=f"phase {phase.name}"),
                )
            )
        for remark in told.get("remarks", ()):
            display.show(Event(level="warning", message=f"phase {phase.name}: {remark}"))
    finally:
        display.close()


def _is_other(phase: Phase) -> bool:
    """Return whether a phase is configured to begin otherwise than it did."""
    known = None if phase.start is None else made_by(phase.start)
    return known is not None and known != written_by(phase.by)


def _train(phase: Phase) -> bool:
    """Train a phase, or go on with it; return whether the user asked to stop, also where it was done just then."""
    directory, resolved = phase.directory, phase.resolved
    with ExitStack() as lock:
        lock.enter_context(held(directory.path))
        if directory.config_file.exists():
            return bool(resumed_run.go_on(directory, resolved, Path.cwd(), lock).get("asked_to_stop", False))
        with rollback_failed_start(directory):
            directory.keep(resolved.config, resolved.origin)
            return Launcher(directory=directory, config=resolved.config, resume=False).here()


@contextmanager
def _stop_is_interrupted() -> Iterator[None]:
    """Raise Interrupted for a stop signal inside: every step is saved, and a start folder is made anew."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted("stopped between phases")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asking = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {one: signal.signal(one, stop) for one in asking}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
