"""The public verbs, which the command line and Python users call. Only this package imports all others."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gossamer.api.launcher import Launcher
from gossamer.api.startup import rollback_failed_start
from gossamer.launch.environment import launcher_of, read_environment
from gossamer.launch.rendezvous_config import Node
from gossamer.settings import Resolved, located
from gossamer.settings.plan_file import asks_for_another_plan, contradictions, with_plan
from gossamer.settings.validation_errors import DEFAULT
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, CheckpointMismatch, Interrupted, bad_input
from gossamer.spec.plan import Plan
from gossamer.spec.records import End, Saved, Start
from gossamer.spec.unread_keys import check_given
from gossamer.view.open_display import open_display
from gossamer.view.run_directory import RunDirectory, newest_like, open_run
from gossamer.view.run_lock import check_free, held
from gossamer.view.summary import summarize

if TYPE_CHECKING:  # torch costs a second, and a supervisor does without
    from torch import nn

    from gossamer.job.trained_run import TrainedRun
    from gossamer.model.chat import Chat
    from gossamer.view.training_result import TrainingResult

_log = logging.getLogger(__name__)


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
    resolved = _planned(resolved, plan, node.nodes if node is not None else ray_nodes or len(hosts or ()))
    if dry_run:
        from gossamer.job import dry_run as dry

        return dry.dry_run(resolved.config, plan)
    directory, resuming = _directory(resolved, resume)

    def prepare(folder: RunDirectory) -> None:
        if not resuming:
            folder.keep(resolved.config, resolved.origin)
        if plan is not None:
            _adopt_plan(plan, folder)

    launch = Launcher(directory=directory, config=resolved.config, resume=resuming)
    names = hosts or resolved.config.machines.hosts
    if node is not None:
        with rollback_failed_start(directory):
            return summarize(launch.met(node, prepare))
    if names or ray_nodes:
        if resuming:
            check_free(directory.path)  # their supervisors will hold it
        with rollback_failed_start(directory):
            launch.on_ray(ray_nodes, plan) if ray_nodes else launch.over_ssh(names, plan)
        return summarize(directory)
    if launcher_of(os.environ) in ("torchrun", "srun", "mpirun"):
        if not _is_first():
            return _as_worker(directory, resolved.config, resume=resuming)
        with held(directory.path), rollback_failed_start(directory):
            prepare(directory)
            return _as_worker(directory, resolved.config, resume=resuming)
    if resuming and _is_done(directory, resolved.config):
        return {**summarize(directory), "nothing_to_do": resolved.config.train.steps}
    with held(directory.path), rollback_failed_start(directory):
        prepare(directory)
        launch.here()
    return summarize(directory)


def _planned(resolved: Resolved, plan: Path | None, hosts: int) -> Resolved:
    """Return the configuration with the plan's decisions; raises BadInput for errors that are found without torch."""
    config, launched = resolved.config, launcher_of(os.environ) in ("torchrun", "srun", "mpirun")
    machines = hosts or max(1, len(config.machines.hosts))
    ranks = read_environment().ranks if launched else config.machines.processes * machines
    if plan is not None:
        resolved = with_plan(resolved, plan, ranks=ranks)
    check_given(resolved.config)
    _check_ranks(resolved.config, ranks)
    return resolved


def _check_ranks(config: RunConfig, ranks: int) -> None:
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
    from gossamer.settings.methods import check_names

    directory = open_run(run_dir)
    folder = folder_of(directory)
    with ExitStack() as lock:
        lock.enter_context(held(directory.path))
        resolved = reload(directory.path, overrides or [])  # "latest" may be another one by now
        if folder != Path.cwd():
            resolved = anchored(resolved, Path.cwd())
            _log.warning("relative paths in this run's settings refer to %s, the folder it was started in", folder)
        config = resolved.config
        try:
            check_names(resolved)
            check_given(config)
            _check_ranks(config, config.machines.processes * max(1, len(config.machines.hosts)))
            only = _asked_step(directory, config, checkpoint)
            if only is None and (ended := _ended_early(directory, config)):
                return {**summarize(directory), "nothing_to_do": config.train.steps, "ended_early": ended}
            if only is None and _is_done(directory, config):
                return {**summarize(directory), "nothing_to_do": config.train.steps}
            launch = Launcher(directory=directory, config=config, resume=True, folder=folder, checkpoint=only)
            with rollback_failed_start(directory):
                _prepare_again(directory, resolved)
                if config.machines.hosts:
                    lock.close()  # their supervisors hold it
                    launch.over_ssh(config.machines.hosts)
                else:
                    launch.here()
        except BadInput as error:
            raise located(error, resolved.origin) from error
    return summarize(directory)


def _prepare_again(directory: RunDirectory, resolved: Resolved) -> None:
    """Write the configuration that a run resumes with; keep its plan only where the settings ask for the same one."""
    config, before, plan = resolved.config, directory.config(), directory.plan()
    directory.keep(config, resolved.origin)
    if plan is not None and asks_for_another_plan(before, config):
        directory.plan_file.unlink()
    elif plan is not None:  # the user may have edited it
        given = {key for key, where in resolved.origin.items() if where != DEFAULT}
        for error in contradictions(config, plan, given, name=str(directory.plan_file), lines={}):
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


def _ended_early(directory: RunDirectory, config: RunConfig) -> str:
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


def _is_done(directory: RunDirectory, config: RunConfig) -> bool:
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


def _directory(resolved: Resolved, resume: str | None) -> tuple[RunDirectory, bool]:
    """Return the run's folder, and whether the run in it is resumed."""
    config = resolved.config
    runs = Path(config.run.directory)
    if resume not in (None, "auto"):
        raise bad_input(
            wanted="--resume auto", got=f"--resume {resume}", do="write auto, or use `gossamer resume RUN_DIR`"
        )
    if resume == "auto" and (found := newest_like(runs, config)) is not None:
        return found, True
    name = config.run.name or os.environ.get("GOSSAMER_RUN_NAME")
    if name and launcher_of(os.environ):
        return RunDirectory(runs / name), False
    if launcher_of(os.environ) in ("torchrun", "srun", "mpirun"):
        raise bad_input(
            wanted="the name of the run directory, to which all ranks of torchrun, srun or mpirun write",
            got="no name",
            do="set run.name, to the same name on all ranks",
            key="run.name",
        )
    return RunDirectory.create(runs, config.run.name or model_name(config)), False


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


def _is_first() -> bool:
    return read_environment().rank == 0


def _as_worker(directory: RunDirectory, config: RunConfig, *, resume: bool) -> dict[str, Any]:
    """Run this process as a worker: torchrun, srun or mpirun started it."""
    from gossamer.job.worker import run_rank
    from gossamer.launch.worker import Ready, run_worker

    first = _is_first()
    display = open_display(config.run.display if first else "quiet", title=directory.name)
    ended: list[BaseException] = []  # how it did, for the command line to say: no supervisor reads our note

    def body(ready: Ready) -> None:
        try:
            run_rank(ready, directory, config, resume=resume, show=display.show)
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
    return summarize(directory) if first else {}


def resume(
    run_dir: str | Path, overrides: Iterable[str] | Mapping[str, Any] = (), *, checkpoint: str | int = "latest"
) -> TrainingResult:
    """Resume a run from a checkpoint, in processes of its own; return its summary and records.

    overrides: settings to change from now on, ["train.steps=2000"] or {"train.steps": 2000}. checkpoint: "latest" (the
    newest good one), "best" or a step; from another one than the latest, the later ones are set aside. Call it from the
    main thread. Raises BadInput, RunFailed, Interrupted.
    """
    from gossamer.settings import written_overrides
    from gossamer.view.training_result import TrainingResult

    data = resume_command(Path(run_dir), written_overrides(overrides), checkpoint=checkpoint)
    return TrainingResult(data, run=RunDirectory(Path(run_dir)))


def train(
    model: nn.Module | str | Mapping[str, Any],
    data: Any = "stdlib",
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    resume: str | None = None,
    callbacks: Sequence[Any] = (),
) -> TrainingResult:
    """Train `model` on `data` in this process, or as one rank under torchrun; return the run's summary and records.

    model:  an unmodified nn.Module (or what the `model` section of a configuration holds).
    data:   a source as in `data.source`, a Corpus, or a map-style dataset of dictionaries of tensors.
    config: a RunConfig, a dictionary of its sections, or the path of a run.yaml.
    resume: "auto" resumes the newest run of the same configuration that has a checkpoint, where there is one;
            on several ranks, the run of the name that is given.
    callbacks: functions of a record, or objects with on_step, on_evaluation, on_save and on_end, called on rank 0 with
            a copy of the record. One that returns "stop" ends the run after the next step, on all ranks.

    The result is a mapping with the figures of the run; `steps`, `losses` and `evaluations` are its records as arrays.
    """
    from gossamer.job.in_process import train_in_process

    return train_in_process(model, data, config, resume, callbacks)


def plan(model: nn.Module, config: RunConfig | Mapping[str, Any] | str | Path | None = None, *, ranks: int = 1) -> Plan:
    """Return the plan to train `model` on `ranks` processes: a value to read, change, save, or pass to `--plan`."""
    import torch

    from gossamer.job.in_process import config_from
    from gossamer.partition.plan_file import make_plan

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return make_plan(config_from(config), model, ranks=ranks, device=device)


def load(run_dir: str | Path, module: nn.Module | None = None, *, checkpoint: str | int = "latest") -> TrainedRun:
    """Load the trained model, tokenizer and configuration of a run from its directory alone.

    module: for a run whose module was built in a program, one built alike, to load the weights into. checkpoint:
    "latest", "best" (of a run with train.keep_best) or a step. Returns a `gossamer.job.trained_run.TrainedRun`. Raises
    BadInput, CheckpointMismatch.
    """
    from gossamer.job.trained_run import read_trained

    return read_trained(Path(run_dir), module, checkpoint=checkpoint)


def sample(
    run_dir: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    checkpoint: str | int = "latest",
) -> str:
    """Generate text with the model of a run (`gossamer sample`); return the text after `prompt`, without it.

    checkpoint: "latest", "best" or a step, as in `load`.
    """
    from gossamer.job.trained_run import read_chosen
    from gossamer.model.generate import generate

    found = read_chosen(Path(run_dir), checkpoint)
    return generate(found.module, found.words(), prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)


def stream(
    run_dir: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    checkpoint: str | int = "latest",
) -> Iterator[str]:
    """Yield the text that `sample` returns, in pieces, each as soon as it is final."""
    from gossamer.job.trained_run import read_chosen
    from gossamer.model.generate import TokenChoice
    from gossamer.model.generate import stream as streamed

    found, choice = read_chosen(Path(run_dir), checkpoint), TokenChoice(temperature=temperature, top_k=top_k)
    yield from streamed(found.module, found.words(), prompt, tokens=tokens, choice=choice, seed=seed)


def chat(
    model: str | Path,
    *,
    system: str = "",
    template: str | Path | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.7,
    top_k: int = 50,
    top_p: float = 0.95,
    seed: int = 0,
    checkpoint: str | int = "latest",
) -> Chat:
    """Begin a dialogue with the model of a run, of a Hugging Face folder or of a GGUF file (`gossamer chat`).

    template: a file with a chat template, in place of the tokenizer's own. checkpoint: of a run, as in `load`. The
    result, a `gossamer.model.chat.Chat`, answers: `chat.ask("Hello")` returns text, `chat.stream("Hello")` yields it in
    pieces; `reset`, `undo`, `system` and `save` change or keep the dialogue. Raises BadInput, CheckpointMismatch.
    """
    from gossamer.job.chat_model import ChatSettings, open_chat
    from gossamer.model.generate import TokenChoice

    settings = ChatSettings(
        system=system,
        template=None if template is None else Path(template),
        max_new_tokens=max_new_tokens,
        choice=TokenChoice(temperature=temperature, top_k=top_k, top_p=top_p),
        seed=seed,
    )
    return open_chat(Path(model), settings, checkpoint)


def export(
    run_dir: str | Path,
    target: str | Path,
    *,
    to: Literal["hf", "peft", "gguf"] = "hf",
    type: Literal["f16", "q8_0"] | None = None,
    checkpoint: str | int = "latest",
) -> dict[str, Any]:
    """Write the model of a run as a folder that transformers loads, a folder of peft, or a GGUF file for llama.cpp.

    to: "hf" merges an adapter into the weights, and writes the weights alone of a model of your own; "peft" writes the
    adapter alone; "gguf" merges an adapter. type: how "gguf" writes matrices, f16 if None. `gossamer export RUN_DIR
    --to hf DIR` calls it. `load` in the result is the Python code that loads what was written, `notes` (GGUF) says what
    differs there in rare cases. checkpoint: "latest", "best" or a step, as in `load`.
    Raises BadInput for a target that exists, and for a model or tokenizer that llama.cpp has no equal of.
    """
    from gossamer.job.trained_run import read_chosen
    from gossamer.model.export import export_hf, export_peft
    from gossamer.model.export_gguf import export_gguf

    target = Path(target)
    if target.exists():
        new = "file" if to == "gguf" else "folder"
        raise BadInput(f"{target} exists already: nothing was written. Name a new {new}, or remove that one")
    if to != "gguf" and type is not None:
        raise bad_input(
            wanted="a type with --to gguf alone",
            got=f"{type} with --to {to}, which writes the type that the model has",
            do="leave it out, or export with --to gguf",
            key="--type",
        )
    found = read_chosen(Path(run_dir), checkpoint)
    if to == "peft":
        return {"exported": str(target), "load": export_peft(found.module, found.base, found.origin, target)}
    if to == "gguf":
        made = export_gguf(found.module, found.origin, found.tokenizer, target, kind=type or "f16")
        return {"exported": str(target), "load": f"llama_cpp.Llama({str(target)!r})", **made}
    return {"exported": str(target), "load": export_hf(found.module, found.origin, found.tokenizer, target)}


def evaluate(
    model: str | Path,
    files: Iterable[str | Path] = (),
    *,
    sequence: int | None = None,
    sequences: int | None = None,
    checkpoint: str | int = "latest",
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> dict[str, Any]:
    """Return loss (nats/token), perplexity and bits per byte of a model on text or chat files (`gossamer eval`).

    model:      a run directory, a Hugging Face folder or a GGUF file.
    files:      files or patterns; none: the run's own validation sets, as training evaluates them.
    sequence:   tokens that the model sees at once; None: as in training, of other models 1024 at most.
    sequences:  at most so many of every text; None: all.
    checkpoint: of a run, as in `load`.
    progress:   called with the text's name, the sequences done, and all of them.
    Of chat files the answers alone count. Raises BadInput, CheckpointMismatch.
    """
    from gossamer.job.text_evaluation import evaluate_model

    named = [str(file) for file in files]
    return evaluate_model(
        Path(model), named, sequence=sequence, sequences=sequences, checkpoint=checkpoint, progress=progress
    )


def evaluate_on_tasks(
    model: str | Path,
    tasks: Iterable[str],
    *,
    shots: int | None = None,
    examples: int | None = None,
    sequence: int | None = None,
    checkpoint: str | int = "latest",
) -> dict[str, Any]:
    """Return the figures of a model on tasks of lm-eval-harness (`gossamer eval --tasks`, extra `lm-eval`).

    model:      a run directory, a Hugging Face folder or a GGUF file.
    tasks:      the harness's names, or yaml files with a task.
    shots:      solved examples before each question; None: as the task says.
    examples:   at most so many of each task; None: all.
    sequence:   tokens that the model sees at once; None: as many as it can.
    checkpoint: of a run, as in `load`.
    Raises BadInput, CheckpointMismatch.
    """
    from gossamer.job.task_evaluation import evaluate_tasks

    return evaluate_tasks(
        Path(model), [*tasks], shots=shots, examples=examples, sequence=sequence, checkpoint=checkpoint
    )


def demo_command(*, seconds: float | None = None) -> dict[str, Any]:
    """Run `gossamer demo`: train on the source of Python's own library, reload, sample, compare; return the summary."""
    from rich.console import Console

    from gossamer.api.demo import PROMPT, USUAL_S, Demo, closing
    from gossamer.view.end_summary import demo_panel

    demo, console = Demo(seconds or USUAL_S), Console()
    Console(stderr=True).print(demo.promise(), highlight=False)
    config = demo.config()
    summary = train_command(Resolved.of(config, origin="gossamer demo"))
    run_dir = Path(summary["directory"])
    said = "Now it writes a sample, and zlib, xz and byte counts are measured on the same text."
    Console(stderr=True).print(said, highlight=False)
    from gossamer.job.training_data import corpus_of
    from gossamer.model.generate import generate

    found, corpus = load(run_dir), corpus_of(config.data)
    text = generate(found.module, found.words(), PROMPT, tokens=240, temperature=0.7, top_k=40, seed=0)
    result = closing(summary, text=text, train=corpus.text("train"), validation=corpus.text("validation"))
    console.print(demo_panel(result, width=min(100, console.width)))
    return {**summary, "sample": PROMPT + text}
