"""The public verbs: what the command line and Python users call. The only room that sees all others."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.beginning import nothing_half_made
from gossamer.launching import Launch
from gossamer.run.launch.environment import launcher_of, read_environment
from gossamer.settings import Resolved
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, Interrupted, bad_input
from gossamer.spec.plan import Plan
from gossamer.view.rundir import RunDirectory, newest_like, open_run
from gossamer.view.screen import open_display
from gossamer.view.summary import summarise

if TYPE_CHECKING:  # torch costs a second, and a supervisor does without
    from torch import nn

    from gossamer.trained import Trained

_log = logging.getLogger(__name__)


def train_command(
    resolved: Resolved,
    *,
    plan: Path | None = None,
    hosts: list[str] | None = None,
    host: str | None = None,
    meet: str | None = None,
    resume: str | None = None,
    dry: bool = False,
) -> dict[str, Any]:
    """`gossamer train`: make the run's folder, start its processes, show what they record, sum up.

    `resume="auto"` goes on with the newest run of the same configuration, if there is one. Raises BadInput,
    RunFailed, Interrupted.
    """
    _check_ranks(resolved.config, hosts)
    if dry:
        from gossamer.dry import dry_run

        return dry_run(resolved.config, plan)
    directory, resuming = _directory(resolved, resume)

    def prepare(folder: RunDirectory) -> None:
        if not resuming:
            folder.keep(resolved.config, resolved.origin)
        if plan is not None:
            _adopt_plan(plan, folder)

    launch = Launch(directory=directory, config=resolved.config, resume=resuming)
    names = hosts or resolved.config.machines.hosts
    if host is not None and meet is not None:
        return summarise(launch.met(host, meet, prepare))
    if names:
        launch.over_ssh(names)
        return summarise(directory)
    if launcher_of(os.environ) in ("torchrun", "srun", "mpirun"):
        with nothing_half_made(directory) if _is_first() else nullcontext():
            if _is_first():
                prepare(directory)
            return _as_worker(directory, resolved.config, resume=resuming)
    with nothing_half_made(directory):
        prepare(directory)
        launch.here()
    return summarise(directory)


def _check_ranks(config: RunConfig, hosts: list[str] | None) -> None:
    """What needs no torch to be refused at once."""
    ranks = config.machines.processes * max(1, len(hosts or config.machines.hosts))
    if config.train.batch < ranks:
        raise bad_input(
            wanted="at least one sequence per process and step",
            got=f"a batch of {config.train.batch} for {ranks} processes",
            do=f"set train.batch to {ranks} or more, or machines.processes to at most {config.train.batch}",
            key="train.batch",
        )


def resume_command(run_dir: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """`gossamer resume`: go on from the newest good checkpoint, perhaps with other settings.

    Paths in what the run began with are relative to the folder it began in, those in `overrides` to the current one.
    """
    from gossamer.keeping import folder_of
    from gossamer.settings import anchored, reload

    directory = open_run(run_dir)
    folder = folder_of(directory)
    resolved = reload(run_dir, overrides or [])
    if folder != Path.cwd():
        resolved = anchored(resolved, Path.cwd())
        _log.warning("paths of this run are relative to %s, where it began", folder)
    config = resolved.config
    before = directory.config()
    with nothing_half_made(directory):
        directory.keep(config, resolved.origin)
        ranks = config.machines.processes * max(1, len(config.machines.hosts))
        asked = (config.plan, config.machines.islands) != (before.plan, before.machines.islands)
        if asked or (ranks, config.train.batch) != _planned(directory):
            directory.plan_file.unlink(missing_ok=True)  # plan again
        launch = Launch(directory=directory, config=config, resume=True, folder=folder)
        if config.machines.hosts:
            launch.over_ssh(config.machines.hosts)
        else:
            launch.here()
    return summarise(directory)


def _planned(directory: RunDirectory) -> tuple[int, int]:
    """For how many ranks, and with which batch."""
    plan = directory.plan()
    return (plan.mesh.size, plan.batch) if plan is not None else (0, 0)


def _directory(resolved: Resolved, resume: str | None) -> tuple[RunDirectory, bool]:
    """The run's folder, and whether it is one to go on with."""
    config = resolved.config
    runs = Path(config.run.directory)
    if resume not in (None, "auto"):
        raise bad_input(wanted="--resume auto", got=f"--resume {resume}", do="or use `gossamer resume RUN_DIR`")
    if resume == "auto" and (found := newest_like(runs, config)) is not None:
        return found, True
    name = config.run.name or os.environ.get("GOSSAMER_RUN_NAME")
    if name and launcher_of(os.environ):
        return RunDirectory(runs / name), False
    if launcher_of(os.environ) in ("torchrun", "srun", "mpirun"):
        raise BadInput(
            "started by a launcher, every rank must write to the same folder: give it a name", key="run.name"
        )
    return RunDirectory.create(runs, config.run.name or model_name(config)), False


def model_name(config: RunConfig) -> str:
    """A short name for the model of a configuration, for folders."""
    model = config.model
    written = model.factory or model.gguf or model.hf or "model"
    return Path(written.rpartition(":")[2] or written).stem


def _adopt_plan(file: Path, directory: RunDirectory) -> None:
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, directory.plan_file)
    except OSError as error:
        raise BadInput(f"cannot read the plan {file}: {error.strerror}. Make one with `gossamer train --dry`") from None


def _is_first() -> bool:
    return read_environment().rank == 0


def _as_worker(directory: RunDirectory, config: RunConfig, *, resume: bool) -> dict[str, Any]:
    """This process was started by torchrun, srun or mpirun: it is a worker itself."""
    from gossamer.run.launch.worker import Ready, run_worker
    from gossamer.worker import work

    first = _is_first()
    display = open_display(config.run.display if first else "quiet", title=directory.name)
    ended: list[BaseException] = []  # how it did, for the command line to say: no supervisor reads our note

    def body(ready: Ready) -> None:
        try:
            work(ready, directory, config, resume=resume, show=display.show)
        except (BadInput, Interrupted) as error:
            ended.append(error)
            raise

    try:
        code = run_worker(body)
    finally:
        display.close()
    if ended:
        raise ended[0]
    if code:
        sys.exit(3)
    return summarise(directory) if first else {}


def resume(run_dir: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> dict[str, Any]:
    """Go on with a run from its newest good checkpoint, in processes of its own; returns its summary.

    overrides: what is to be otherwise from now on, ["train.steps=2000"] or {"train.steps": 2000}. Call it from the
    main thread. Raises BadInput, RunFailed, Interrupted.
    """
    from gossamer.settings import written_overrides

    return resume_command(Path(run_dir), written_overrides(overrides))


def train(
    model: nn.Module | str | Mapping[str, Any],
    data: Any = "stdlib",
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    resume: str | None = None,
) -> dict[str, Any]:
    """Train `model` on `data` in this process, or as one rank under torchrun; returns the run's summary.

    model: an nn.Module nobody rewrote (or what the `model` section of a configuration says).
    data: a source as in `data.source`, a Corpus, or a map-style dataset of dictionaries of tensors.
    config: a RunConfig, a dictionary of its sections, or the path of a run.yaml.
    resume: "auto" goes on with the newest run of the same configuration that has a checkpoint, where there is one.
    """
    from gossamer.inline import train_inline

    return train_inline(model, data, config, resume)


def plan(model: nn.Module, config: RunConfig | Mapping[str, Any] | str | Path | None = None, *, ranks: int = 1) -> Plan:
    """The plan for training `model` on `ranks` processes: a value to read, change, save, and pass to `--plan`."""
    import torch

    from gossamer.inline import settings_of
    from gossamer.planning import make_plan

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return make_plan(settings_of(config), model, ranks=ranks, device=device)


def load(run_dir: str | Path, module: nn.Module | None = None) -> Trained:
    """What a run trained, from its directory alone: its model, tokenizer and configuration. See `gossamer.trained`.

    module: for a run of a module that a program made, one built alike, which is filled.
    """
    from gossamer.trained import read_trained

    return read_trained(Path(run_dir), module)


def sample(
    run_dir: str | Path, prompt: str, *, tokens: int = 200, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> str:
    """`gossamer sample`: text the model of a run goes on with after `prompt`."""
    from gossamer.model.sample import generate

    found = load(run_dir)
    return generate(found.module, found.words(), prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)


def export(run_dir: str | Path, target: str | Path) -> dict[str, Any]:
    """`gossamer export RUN_DIR --to hf DIR`: a folder that transformers loads, or for a model of your own its weights.
    `load` in what it returns is the Python that loads it. Refuses a folder that exists.
    """
    from gossamer.model.hand_over import export_hf

    target = Path(target)
    if target.exists():
        raise BadInput(f"{target} exists already: nothing was written. Name a new folder, or remove that one")
    found = load(run_dir)
    return {"exported": str(target), "load": export_hf(found.module, found.origin, found.tokenizer, target)}


def demo_command(*, seconds: float | None = None) -> dict[str, Any]:
    """`gossamer demo`: the main job on text every Python carries with it: train, reload, sample, compare."""
    from rich.console import Console

    from gossamer.demo import PROMPT, USUAL_S, Demo, closing
    from gossamer.view.closing import demo_panel

    config = Demo(seconds or USUAL_S).config()
    summary = train_command(Resolved.of(config, origin="gossamer demo"))
    run_dir = Path(summary["directory"])
    from gossamer.model.sample import generate
    from gossamer.worker import corpus_of

    found, corpus = load(run_dir), corpus_of(config.data)
    text = generate(found.module, found.words(), PROMPT, tokens=240, temperature=0.7, top_k=40, seed=0)
    result = closing(summary, text=text, train=corpus.text("train"), validation=corpus.text("validation"))
    console = Console()
    console.print(demo_panel(result, width=min(100, console.width)))
    return {**summary, "sample": PROMPT + text}
