"""A run in phases (`train.phases`): each is a run of its own in RUN/phases, begun from what the one before became.

Everything that can be known of all phases is checked before the first step of the first. A start folder is there
completely or not at all, so whatever is interrupted, the files say where to go on.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from gossamer.api import resumed_run, started_run
from gossamer.api.launcher import Launcher
from gossamer.api.phase_runner import PhaseRunner
from gossamer.api.phase_runner.local import LocalRunner
from gossamer.api.transitions import StartRequest, Transition, made_by, make_start, transition_of, written_by
from gossamer.launch.environment import is_rank_of_launcher
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
from gossamer.view.run_lock import check_free, held
from gossamer.view.summary import summarize
from gossamer.view.told_progress import ToldProgress

if TYPE_CHECKING:
    from gossamer.launch.worker import Ready

_log = logging.getLogger(__name__)
_NEW, _BEGUN, _DONE = "new", "begun", "done"
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
    if not resolved.config.train.phases:
        return started_run.train_command(
            resolved, plan=plan, hosts=hosts, node=node, ray_nodes=ray_nodes, resume=resume, dry_run=dry_run
        )
    if plan is not None:
        do = "write the keys of `plan` that differ into each phase"
        raise bad_input(wanted="phases, each with a plan of its own", got=f"--plan {plan}", do=do, key=KEY)
    resolved = started_run.on_hosts(resolved, hosts)
    config = resolved.config
    runs = Path(config.run.directory)
    phases = phases_of(resolved, runs / "RUN")
    if dry_run:
        return {"phases": {phase.name: told for phase, told in zip(phases, _checked(phases), strict=True)}}
    if node is not None:
        return _on_this_host(resolved, node, resume)
    if config.machines.hosts or ray_nodes:
        return _elsewhere(resolved, started_run.run_directory(resolved, resume), ray_nodes)
    if is_rank_of_launcher():
        started_run.check_asked(config, resume)
        return _as_rank(resolved, lambda: started_run.run_directory(resolved, resume))
    if resume == "auto" and (found := newest_like(runs, config)) is not None:
        return _driven(LocalRunner(), found, resolved)
    _checked(phases)
    directory = RunDirectory.create(runs, config.run.name or started_run.model_name(config))
    return _driven(LocalRunner(), directory, resolved, is_checked=True)


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
        resolved = anchored(resolved, here) if here != Path.cwd() else resolved
        if resolved.config.machines.hosts and resolved.config.train.phases:
            return _elsewhere(resolved, (directory, True), 0)
        if is_rank_of_launcher():
            return _as_rank(resolved, lambda: (directory, True))
        return _driven(LocalRunner(), directory, resolved)


def _on_this_host(resolved: Resolved, node: Node, resume: str | None) -> dict[str, Any]:
    """Go through the phases as one of several hosts on which the same command was started."""
    from gossamer.api.phase_runner.hosts import HostsRunner

    directory, is_resumed = started_run.run_directory(resolved, resume)
    launch = Launcher(directory=directory, config=resolved.config, resume=is_resumed)
    with launch.gathered(node) as (found, line):
        return _driven(HostsRunner(node, line), found, resolved)


def _elsewhere(resolved: Resolved, found: tuple[RunDirectory, bool], ray_nodes: int) -> dict[str, Any]:
    """Start the same command on every host, over ssh or on nodes of a Ray cluster; return what is known of it here."""
    directory, is_resumed = found
    if is_resumed:
        check_free(directory.path)  # their supervisors will hold it
    folder = Path.cwd() if is_resumed else None
    launch = Launcher(directory=directory, config=resolved.config, resume=is_resumed, folder=folder)
    launch.on_ray(ray_nodes) if ray_nodes else launch.over_ssh(resolved.config.machines.hosts)
    return _told(directory, phases_of(resolved, directory.path))


def _as_rank(resolved: Resolved, begin: Callable[[], tuple[RunDirectory, bool]]) -> dict[str, Any]:
    """Go through the phases as one of the ranks that torchrun, srun or mpirun started. `begin`: called on rank 0."""
    from gossamer.api.phase_runner.ranks import RanksRunner
    from gossamer.job.agreed_run import agreed_run
    from gossamer.job.worker import time_limit_s

    config = resolved.config
    told: dict[str, Any] = {}

    def body(ready: Ready) -> None:
        with RanksRunner.joined(ready, config) as runner:
            limit_s = time_limit_s(ready.place, config)
            directory, _ = agreed_run(ready.place, runner.store, begin, timeout_s=limit_s)
            told.update(_driven(runner, directory, resolved))

    started_run.run_as_worker(body)
    return told if started_run.is_first() else {}


def _driven(
    runner: PhaseRunner, directory: RunDirectory, resolved: Resolved, *, is_checked: bool = False
) -> dict[str, Any]:
    """Go through the phases of a run, new or begun; all processes of `runner` call it. `is_checked`: they can run."""
    if not resolved.config.train.phases:
        do = "leave train.phases as it was; train.steps in it may change"
        raise bad_input(wanted="the phases that the run has", got="none", do=do, key=KEY)
    phases = phases_of(resolved, directory.path)

    def check() -> str:
        left = _left(directory, phases)
        if not is_checked:
            _checked(left, runner)
        return ""

    with held(directory.path) if runner.holds else nullcontext():
        runner.agreed(check)
        if runner.holds:
            directory.keep(resolved.config, resolved.origin)
        return _run(runner, directory, phases)


def _left(directory: RunDirectory, phases: Sequence[Phase]) -> Sequence[Phase]:
    """Return the phase that a run is in, and those after it. Raises BadInput where it began with others."""
    begun = [one.path.name for one in directory.phases]
    if begun != [phase.directory.path.name for phase in phases[: len(begun)]]:
        raise bad_input(
            wanted=f"phases that begin with those there are: {', '.join(begun)}",
            got=", ".join(phase.directory.path.name for phase in phases),
            do="change phases that have not begun, and add new ones at the end",
            key=KEY,
        )
    return phases[max(0, len(begun) - 1) :]


def _checked(phases: Sequence[Phase], runner: PhaseRunner | None = None) -> list[dict[str, Any]]:
    """Return the dry run of each phase. Raises BadInput, with the phase's name, for one that cannot run."""
    from gossamer.job.dry_run import Layout
    from gossamer.job.phase_checks import (
        check_fits,
        check_is_whole,
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
    before_ranks = 1  # of the phase before, on each host
    has_masks = False
    for phase in phases:
        config = phase.config
        try:
            transition = transition_of(phase.by, key=phase.key("by"))
            _check_hosts(phases[0].config, config)
            check_names(phase.resolved)
            check_given(config)
            spread = (runner or LocalRunner()).spread(config)
            started_run.check_ranks(config, spread.ranks)
            layout = None if spread.asks_hosts else Layout(ranks=spread.ranks, local_ranks=spread.local_ranks)
            if found:
                is_kept = has_masks and transition.keeps_masks and not fills_zeros(found[-1].config)
                has_masks = transition.gives_masks or is_kept
            else:
                has_masks = starts_with_masks(config.model)
            look = look_at(config, has_masks=has_masks, layout=layout)
            check_fits(look)
            if found:
                _check_whole(last)
                if not spread.shared:
                    check_is_whole(found[-1], before_ranks)
                check_source(found[-1].config, phase.by)
                check_tokenizers(found[-1], look)
                with _keys_of(phase):
                    transition.check(found[-1], look, phase.by or "")
                check_masks(look, has_masks=has_masks)
        except BadInput as error:
            raise of_phase(located(error, phase.resolved.origin), phase.name) from error
        found.append(look)
        last, before_ranks = transition, spread.local_ranks
    made = [None, *(phase.by or "the weights of the phase before" for phase in phases[1:])]
    return [({"by": by} if by else {}) | dict(one.told) for by, one in zip(made, found, strict=True)]


def _check_hosts(first: RunConfig, config: RunConfig) -> None:
    """Raise BadInput for a phase on other hosts than the first: the processes that drive them are on all of them."""
    if config.machines.hosts != first.machines.hosts:
        raise bad_input(
            wanted=f"the hosts of the run in every phase: {', '.join(first.machines.hosts) or 'this machine'}",
            got=", ".join(config.machines.hosts) or "none",
            do="set machines.hosts for the run, and machines.processes where a phase takes fewer ranks",
            key="machines.hosts",
        )


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


def _run(runner: PhaseRunner, directory: RunDirectory, phases: Sequence[Phase]) -> dict[str, Any]:
    """Run the phases that are not done; return the summary of the last with the figures of all."""
    for index, phase in enumerate(phases):
        after = phases[index + 1] if index + 1 < len(phases) else None
        try:
            if runner.agreed(lambda: "past" if after is not None and after.is_begun else "") == "past":  # noqa: B023
                if runner.is_first:
                    _say_unchanged(phase)
                continue
            before = phases[index - 1] if index else None
            runner.agreed(lambda: _prepare(phase, before))  # noqa: B023
            if phase.start is not None:
                runner.given(phase.start)
            is_asked = _train(runner, phase)
            if after is not None and runner.agreed(lambda: "asked" if is_asked else ""):  # noqa: B023
                raise Interrupted("asked to stop as the phase ended")
        except Interrupted:
            raise Interrupted(
                f"stopped in phase {phase.name}, number {phase.number} of {len(phases)}, and all steps are saved; "
                f"go on with: gossamer resume {directory.path}"
            ) from None
        except BadInput as error:
            raise of_phase(error, phase.name) from error
    return _told(directory, phases)


def _told(directory: RunDirectory, phases: Sequence[Phase]) -> dict[str, Any]:
    """Return the summary of the last phase, as far as it is known here, with the figures of all."""
    told: list[dict[str, Any]] = []
    for phase in phases:
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


def _prepare(phase: Phase, before: Phase | None) -> str:
    """Write the start folder of a phase where it is missing, or was made otherwise; say so, as it may take minutes."""
    if phase.start is None or before is None:
        return ""
    if phase.directory.config_file.exists() and phase.start.is_dir():
        if _is_other(phase):
            raise bad_input(
                wanted=f"the method by which phase {phase.name} began, {made_by(phase.start)}",
                got=f"{written_by(phase.by)}",
                do="write that one, or add a phase at the end",
                key=phase.key("by"),
            )
        return ""
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
    return ""


def _is_other(phase: Phase) -> bool:
    """Return whether a phase is configured to begin otherwise than it did."""
    known = None if phase.start is None else made_by(phase.start)
    return known is not None and known != written_by(phase.by)


def _train(runner: PhaseRunner, phase: Phase) -> bool:
    """Train a phase, or go on with it; return whether the user asked this process to stop, also as it was done."""
    try:
        standing = runner.agreed(lambda: _standing(phase))
        if standing == _DONE:
            return False
        return runner.train(phase, resume=standing == _BEGUN)
    except BadInput as error:
        raise located(error, phase.resolved.origin) from error


def _standing(phase: Phase) -> str:
    """Return whether a phase is new, begun or done. Raises BadInput where it cannot go on with its settings."""
    directory, config = phase.directory, phase.config
    if not directory.config_file.exists():
        return _NEW
    is_over = resumed_run.ended_early(directory, config) or started_run.is_done(directory, config)
    return _DONE if is_over else _BEGUN


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
