"""The result of a run, read from its directory alone: model, tokenizer and configuration."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from gossamer.data.kept import read_tokenizer
from gossamer.data.tokenizer import Tokenizer
from gossamer.job.run_files import folder_of
from gossamer.job.training_data import corpus_of
from gossamer.model.origin import origin_of
from gossamer.model.source import ModelSource
from gossamer.model.started_source import start_of
from gossamer.model.wrapped_source import WrappedSource
from gossamer.run.checkpoint import read_model, read_part
from gossamer.run.checkpoint.choice import LATEST, best_step, open_chosen, step_of
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.store.checkpoint import Checkpoint
from gossamer.store.file_digest import digest
from gossamer.store.start_folder import StartFolder
from gossamer.view.run_directory import RunDirectory, open_run

_log = logging.getLogger(__name__)
_IN_CODE = ("attn_implementation",)  # keys of a model's config that no config.json holds


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """The result of a run: its model in evaluation mode, from the checkpoint of step `step`.

    `best_step`: the step of the best checkpoint, where the run keeps one. `tokenizer` is None for a run on data other
    than text, `origin` for a module that a program made. `start`: the start folder that the run began from, which need
    not be there any more.
    """

    module: nn.Module
    tokenizer: Tokenizer | None
    config: RunConfig
    origin: ModelSource | None
    step: int
    base: str = ""  # folder, file or name of the model that the adapter goes on
    best_step: int | None = None
    start: StartFolder | None = None

    @property
    def which(self) -> str:
        """Return which checkpoint it is, for people, where the run keeps a best one; "" where there is no choice."""
        if self.best_step is None:
            return ""
        if self.step == self.best_step:
            return f"the best checkpoint, of step {self.step}"
        return f"the checkpoint of step {self.step}; the best one is of step {self.best_step} (--checkpoint best)"

    def words(self) -> Tokenizer:
        """Return the tokenizer. Raises BadInput if there is none."""
        if self.tokenizer is None:
            raise BadInput(
                "the run has no tokenizer, as it was trained on data other than text: call its module, "
                "gossamer.load(RUN_DIR).module, with tensors"
            )
        return self.tokenizer


def read_trained(run_dir: Path, module: nn.Module | None = None, *, checkpoint: str | int = LATEST) -> TrainedRun:
    """Load the result of a run as `gossamer.load` describes.

    `checkpoint`: "latest", "best" or a step; it is looked for before the model is built.
    Reads no training text if the run directory holds the tokenizer. Raises BadInput, CheckpointMismatch.
    """
    directory = open_run(run_dir)
    directory = RunDirectory(directory.path.absolute())
    config, origin, base = directory.config(), None, ""
    step_of(directory.checkpoints, checkpoint)
    with standing_in(folder_of(directory)) as here:
        start = start_of(config.model)
        start = None if start is None else replace(start, path=start.path.absolute())
        tokenizer = _tokenizer(directory, config) if module is None or directory.tokenizer.is_dir() else None
        if module is None:
            with _importing(config, here):
                origin = _origin(directory, config, tokenizer)
                base = origin.base_digest(config.train.seed)
                module = origin.build(config.train.seed) if base else origin.bare(config.train.seed)
        place = _base_of(config) if base else ""
    step = read_model(module, directory.checkpoints, base, checkpoint)
    return TrainedRun(
        module=module.eval(),
        tokenizer=tokenizer,
        config=config,
        origin=origin,
        step=step,
        base=place,
        best_step=best_step(directory.checkpoints),
        start=start,
    )


@dataclass(frozen=True)
class CheckpointedSource(WrappedSource):
    """The source of a run's model, with the weights of a checkpoint: any part of them is read alone.

    `folder`: that in which the run was started, where code of a factory may be.
    """

    found: Checkpoint
    folder: Path

    def build(self, seed: int) -> nn.Module:
        module = self.bare(seed)
        self.load(module, frozenset(module.state_dict()), seed=seed)
        return module

    def bare(self, seed: int) -> nn.Module:
        with standing_in(self.folder):
            return self.inner.bare(seed)

    @property
    def has_weights(self) -> bool:
        return True

    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> frozenset[str]:
        read_part(module, names, self.found)
        return frozenset()

    def fingerprint(self) -> str:
        files = (one for one in self.found.folder.rglob("*") if one.is_file())
        return digest([self.inner.fingerprint(), self.found.step], files)


@dataclass(frozen=True, slots=True)
class RunSource:
    """The model of a run as a source, and its tokenizer, None for data other than text."""

    origin: ModelSource
    tokenizer: Tokenizer | None


def read_source(run_dir: Path) -> RunSource:
    """Return a run's model as a source with the weights of the newest good checkpoint; none of them is kept yet.

    Raises BadInput for a run with an adapter or a side network, whose checkpoints hold a part of the weights, and
    CheckpointMismatch.
    """
    directory = RunDirectory(open_run(run_dir).path.absolute())
    config, folder = directory.config(), folder_of(directory)
    with standing_in(folder) as here:
        tokenizer = _tokenizer(directory, config)
        with _importing(config, here):
            origin = _origin(directory, config, tokenizer)
            base = origin.base_digest(config.train.seed)
    if base:
        raise bad_input(
            wanted="a run whose checkpoints hold all weights, to read a part of them",
            got=f"{run_dir}, which trained an adapter or a side network beside a frozen base",
            do="merge an adapter with gossamer export, and give that folder",
            key="model.adapter",
        )
    return RunSource(CheckpointedSource(origin, open_chosen(directory.checkpoints, LATEST), folder), tokenizer)


def read_chosen(run_dir: Path, checkpoint: str | int) -> TrainedRun:
    """Load the result of a run, and say which checkpoint that is where the run keeps a best one too."""
    found = read_trained(run_dir, checkpoint=checkpoint)
    if found.which:
        _log.warning("this is %s", found.which)
    return found


def check_no_choice(place: Path, checkpoint: str | int) -> None:
    """Raise BadInput for another checkpoint than the latest of what is no run."""
    if checkpoint != LATEST:
        raise bad_input(
            wanted="a run, which has checkpoints",
            got=f"{checkpoint} with the model {place}",
            do="leave --checkpoint out",
            key="--checkpoint",
        )


def _tokenizer(directory: RunDirectory, config: RunConfig) -> Tokenizer | None:
    """Return the tokenizer in the run directory, or, for runs of earlier versions, the one of its configuration and
    text. None for a run on the dataset of a factory.
    """
    if directory.tokenizer.is_dir():
        return read_tokenizer(directory.tokenizer)
    if config.data.factory is not None:
        return None
    try:
        return corpus_of(config.data).tokenizer
    except BadInput as error:
        raise BadInput(
            f"{directory.path} contains no tokenizer (an earlier version created the run), and data.source does not "
            f"give it: {error.message}. Run the command in the folder in which the run was started; `gossamer resume` "
            "there stores the tokenizer",
            key=error.key,
        ) from None


def _base_of(config: RunConfig) -> str:
    """Return the folder, file or name of the base model; a path as an absolute one."""
    named = config.model.hf or config.model.gguf or config.model.factory or ""
    path = Path(named).expanduser()
    return str(path.absolute()) if path.exists() else named


def _origin(directory: RunDirectory, config: RunConfig, tokenizer: Tokenizer | None) -> ModelSource:
    """Return the model source for the checkpoint to fill: from the run directory, or from the configured source."""
    section = config.model
    if directory.model.is_dir() and section.adapter == "none" and section.side == "none":
        in_code = {key: value for key, value in section.config.items() if key in _IN_CODE}
        here = {"hf": str(directory.model), "gguf": None, "start": None, "config": in_code}
        section = section.model_copy(update=here)
    elif not any((section.hf, section.gguf, section.factory)):
        raise BadInput(
            f"the run in {directory.path} trained a module that a Python program built, and has no copy of its code: "
            "in that program, call gossamer.load(RUN_DIR, module=...) with a new module of the same structure",
            key="model",
        )
    origin = origin_of(section)
    return origin if tokenizer is None else origin.fitted_to_tokenizer(tokenizer.vocabulary, tokenizer.separator)


@contextmanager
def _importing(config: RunConfig, here: Path) -> Iterator[None]:
    """Explain which module is missing if the code that makes the model cannot be imported."""
    try:
        yield
    except BadInput as error:
        if config.model.factory is None or not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        missing, places = error.__cause__.name, " and ".join(dict.fromkeys([str(Path.cwd()), str(here)]))
        raise BadInput(
            f"the model of this run is made by {config.model.factory}, and there is no module {missing!r} to import "
            f"(looked for in {places} and on the path): a run keeps weights, not your code. "
            f"Run the command in the folder that contains {missing}, or add that folder to PYTHONPATH",
            key="model.factory",
        ) from None


@contextmanager
def standing_in(folder: Path) -> Iterator[Path]:
    """Change to `folder` inside this context; yield the former folder, where modules can still be imported from."""
    here = Path.cwd()
    if str(here) not in sys.path:
        sys.path.append(str(here))  # stays: a module may import its neighbors later, when it is called
    os.chdir(folder)
    try:
        yield here
    finally:
        os.chdir(here)
