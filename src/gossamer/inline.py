"""`gossamer.train(model, data, config)`: the same job in the caller's own process, or one rank of it under torchrun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from gossamer.cutting import Asked, ModuleSource, OriginSource, Source, hold
from gossamer.data import Corpus
from gossamer.job import Job, Where, run_job
from gossamer.model.origin import origin_of
from gossamer.run.batches import Batches, DatasetBatches, TextBatches
from gossamer.run.build import Parts, set_memory, set_threads
from gossamer.run.launch.environment import Place, launcher_of, read_environment
from gossamer.run.launch.worker import StopFlag
from gossamer.settings import Resolved
from gossamer.settings import load as load_settings
from gossamer.spec.config import ModelSection, RunConfig
from gossamer.spec.errors import BadInput, RunFailed, bad_input
from gossamer.view.occupied import held
from gossamer.view.rundir import RunDirectory
from gossamer.view.screen import open_display
from gossamer.view.summary import summarise
from gossamer.worker import corpus_of, device_of, objective_of, origin_for, place_to_meet

_ALONE = Place(
    rank=0,
    ranks=1,
    local_rank=0,
    local_ranks=1,
    host=0,
    hosts=1,
    hostname="",
    address="127.0.0.1",
    port=0,
    launcher="",
)


def train_inline(
    model: nn.Module | str | Mapping[str, Any],
    data: Any,
    config: RunConfig | Mapping[str, Any] | str | Path | None,
) -> dict[str, Any]:
    """See `gossamer.train`. Raises BadInput, RunFailed, Interrupted."""
    try:
        return _train(model, data, config)
    except SystemExit as left:  # the caller's script would end with it, perhaps with exit code 0
        raise RunFailed(f"the model, the data or a library ended the process (SystemExit: {left.code})") from left


def _train(
    model: nn.Module | str | Mapping[str, Any],
    data: Any,
    config: RunConfig | Mapping[str, Any] | str | Path | None,
) -> dict[str, Any]:
    settings = settings_of(config)
    place = read_environment() if launcher_of(os.environ) else _ALONE
    _one_rank_per_process(settings, place)
    set_threads(settings.machines.threads, place.local_ranks)
    set_memory(settings.plan.states)
    corpus, train, validation, fingerprint = _data(data, settings)
    source, described = _source(model, settings, corpus)
    device, objective = device_of(place), objective_of(settings)
    built = hold(
        source,
        Asked(
            config=settings,
            ranks=place.ranks,
            rank=place.rank,
            batches=train,
            objective=objective,
            device=device,
            local_ranks=place.local_ranks,
        ),
    )
    directory = _directory(settings, place)
    stop = StopFlag()
    with held(directory.path) if place.rank == 0 else nullcontext(), stop.listening():
        if place.rank == 0:
            directory.keep(settings, Resolved.of(settings).origin)
        display = open_display(settings.run.display, title=directory.name)
        try:
            run_job(
                Job(
                    parts=Parts(
                        module=built.module,
                        objective=objective,
                        train=train,
                        validation=validation,
                        config=settings,
                        plan=built.plan,
                        device=device,
                        cut=built.cut,
                        words=None if corpus is None else corpus.tokenizer,
                    ),
                    where=_where(place, settings),
                    directory=directory,
                    described=described,
                    data=fingerprint,
                    text=data if isinstance(data, str) else type(data).__name__,
                    remark="" if corpus is None else corpus.remark,
                    resume=False,
                    at=lambda step, phase: None,
                    asked_to_stop=lambda: stop.is_set,
                    show=display.show if place.rank == 0 else None,
                    is_kept=True,
                )
            )
        finally:
            display.close()
    return summarise(directory)


def settings_of(config: RunConfig | Mapping[str, Any] | str | Path | None) -> RunConfig:
    """A configuration however it was given; raises BadInput."""
    if isinstance(config, RunConfig):
        return config
    if config is None or isinstance(config, Mapping):
        return load_settings(None, given=config).config
    return load_settings(Path(config)).config


def _one_rank_per_process(config: RunConfig, place: Place) -> None:
    if config.machines.processes > 1 and place.ranks == 1:
        raise bad_input(
            wanted=f"{config.machines.processes} processes",
            got="one: a model that lives in this process cannot be in several",
            do="start this script with `torchrun --nproc-per-node N`, or use `gossamer train` with model.factory",
            key="machines.processes",
        )


def _data(data: Any, config: RunConfig) -> tuple[Corpus | None, Batches, Batches | None, str]:
    """Corpus (for text), training and validation batches, and what identifies the data."""
    if isinstance(data, str):
        data = corpus_of(config.data.model_copy(update={"source": data}))
    if isinstance(data, Corpus):
        held_out = TextBatches(data.validation) if len(data.validation) else None
        return data, TextBatches(data.train), held_out, data.fingerprint
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return None, DatasetBatches(data), None, f"{type(data).__qualname__}:{len(data)}"
    raise bad_input(
        wanted="a source as in data.source, a Corpus, or a map-style dataset of dictionaries",
        got=type(data).__name__,
        do="wrap what you have in a torch Dataset with __len__ and __getitem__",
        key="data",
    )


def _source(model: nn.Module | str | Mapping[str, Any], config: RunConfig, corpus: Corpus | None) -> tuple[Source, str]:
    if isinstance(model, nn.Module):
        return ModuleSource(model), type(model).__name__
    section = ModelSection.model_validate(model if isinstance(model, Mapping) else {"hf": model})
    settings = config.model_copy(update={"model": section})
    origin = origin_for(settings, corpus) if corpus is not None else origin_of(section)
    return OriginSource(origin, config.train.seed), origin.describe()


def _directory(config: RunConfig, place: Place) -> RunDirectory:
    runs = Path(config.run.directory)
    if place.ranks == 1:
        return RunDirectory.create(runs, config.run.name or "run")
    if config.run.name is None:
        raise BadInput("several ranks write to one folder: give it a name", key="run.name")
    return RunDirectory(runs / config.run.name)


def _where(place: Place, config: RunConfig) -> Where:
    if place.ranks == 1:
        return Where(store=dist.HashStore(), interface=os.environ.get("GLOO_SOCKET_IFNAME", ""))
    return place_to_meet(place, config.machines.timeout_s)
