"""`gossamer.train(model, data, config)`: train in the caller's own process, or as one rank under torchrun."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from numbers import Number
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel
from torch import nn

from gossamer.comm.patience import PatientStore
from gossamer.data import Corpus
from gossamer.data.source import names as source_names
from gossamer.job.agreed_run import agreed_run
from gossamer.job.rank_inputs import JobCallbacks, RankContext, RankJob
from gossamer.job.rank_job import run_job
from gossamer.job.run_files import keep
from gossamer.job.trainer_parts import parts_of
from gossamer.job.training_data import TrainingData, check_loss, of_corpus, of_dataset, training_data
from gossamer.job.user_callbacks import UserCallbacks
from gossamer.job.worker import device_of, origin_for, rendezvous
from gossamer.launch.environment import LauncherRank, MasterAddress, is_rank_of_launcher, launcher_of, read_environment
from gossamer.launch.worker import StopFlag
from gossamer.model.origin import origin_of
from gossamer.model.source import ModelSource
from gossamer.partition.model_provider import ModelProvider, ModuleSource, OriginSource
from gossamer.partition.rank_model import planned
from gossamer.partition.request import PartitionRequest
from gossamer.recipe import PlanMethods, Recipe
from gossamer.run.process_settings import set_memory, set_threads
from gossamer.run.trainer_services import FINISH, INTERRUPT
from gossamer.settings import Resolved, check
from gossamer.settings import load as load_settings
from gossamer.settings.phases import refuse_phases
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import RunFailed, bad_input
from gossamer.spec.records import Record
from gossamer.store.checkpoint import list_checkpoints
from gossamer.view.failed_start import rollback_failed_start
from gossamer.view.open_display import open_display
from gossamer.view.run_directory import RunDirectory, check_new, newest_like
from gossamer.view.run_lock import held
from gossamer.view.summary import summarize
from gossamer.view.training_result import TrainingResult

_ALONE = LauncherRank(
    rank=0,
    ranks=1,
    local_rank=0,
    local_ranks=1,
    host=0,
    hosts=1,
    hostname="",
    launcher="",
    master=MasterAddress(host="127.0.0.1", port=0),
)


def train_in_process(
    model: nn.Module | str | Mapping[str, Any],
    data: Any,
    config: RunConfig | Mapping[str, Any] | str | Path | None,
    resume: str | None = None,
    callbacks: Sequence[Any] = (),
) -> TrainingResult:
    """Train as `gossamer.train` describes, and return the summary and the records of the run.

    Raises BadInput, RunFailed, Interrupted. A SystemExit from the model, the data or a library becomes RunFailed.
    """
    try:
        return _train(model, data, config, resume, UserCallbacks(callbacks))
    except SystemExit as left:  # the caller's script would end with it, perhaps with exit code 0
        raise RunFailed(
            f"the model, the data or a library ended the process (SystemExit: {left.code}): "
            "remove or catch its call of sys.exit"
        ) from left


def _train(
    model: nn.Module | str | Mapping[str, Any],
    data: Any,
    config: RunConfig | Mapping[str, Any] | str | Path | None,
    resume: str | None,
    told: UserCallbacks,
) -> TrainingResult:
    _check_model(model)
    settings = _as_given(config_from(config), model, data)
    place = read_environment() if launcher_of(os.environ) else _ALONE
    _one_rank_per_process(settings, place)
    set_threads(settings, place.local_ranks)
    set_memory(PlanMethods.asked(settings.plan).sharding)
    given = _data(data, settings)
    check_loss(given, settings)
    source, described, origin = _source(model, settings, given.corpus)
    base = origin.base_digest(settings.train.seed) if origin is not None else ""
    asked = _request(settings, place, given)
    known = planned(source, asked)
    built = known.outline
    check_resume(resume)
    if not place.is_alone:
        _named(settings, place)
    where, stop = _where(place, settings), StopFlag()
    with ExitStack() as stack:
        stack.enter_context(stop.listening())

        def begin() -> tuple[RunDirectory, bool]:
            directory, resuming = _directory(settings, place, resume)
            stack.enter_context(held(directory.path))
            stack.enter_context(rollback_failed_start(directory))
            directory.keep(settings, Resolved.of(settings).origin)
            return directory, resuming

        if place.is_alone:
            directory, resuming = begin()
        else:
            directory, resuming = agreed_run(
                place, PatientStore(where.store, where.timeout_s), begin, timeout_s=where.timeout_s
            )
        display = open_display(settings.run.display, title=directory.name)
        stack.callback(display.close)

        def show(record: Record) -> None:
            display.show(record)
            told(record)

        callbacks = JobCallbacks(
            keep=lambda: keep(directory, given.tokenizer, origin), show=show if place.rank == 0 else None
        )
        run_job(
            RankJob(
                parts=parts_of(asked, built, validation=given.validation, words=given.tokenizer, base=base),
                planned=known,
                where=where,
                directory=directory,
                described=described,
                data=given.description,
                resume=resuming,
                at=lambda step, phase: None,
                asked_to_stop=lambda: INTERRUPT if stop.is_set else FINISH if told.wants_end else 0,
                callbacks=callbacks,
                is_kept=True,
            )
        )
    return TrainingResult(summarize(directory), run=directory)


def _request(settings: RunConfig, place: LauncherRank, given: TrainingData) -> PartitionRequest:
    return PartitionRequest(
        config=settings,
        ranks=place.ranks,
        rank=place.rank,
        device=device_of(place),
        objective=Recipe.loss_of(settings),
        batches=given.train,
        local_ranks=place.local_ranks,
    )


def config_from(config: RunConfig | Mapping[str, Any] | str | Path | None) -> RunConfig:
    """Return the configuration, given as an object, a mapping or a file. Raises BadInput, also for phases."""
    found = _read(config)
    refuse_phases(found, "in a program")
    return found


def phases_asked(
    model: nn.Module | str | Mapping[str, Any],
    data: Any,
    config: RunConfig | Mapping[str, Any] | str | Path | None,
    callbacks: Sequence[Any] = (),
) -> RunConfig | None:
    """Return the configuration of a run in phases as run.yaml holds it; None without phases.

    Phases run in processes of their own. Raises BadInput for what they cannot get from this one: a module or a dataset
    that is built already, functions of records.
    """
    found = _read(config)
    if not found.train.phases:
        return None
    _check_model(model)
    is_source = data is None or isinstance(data, str) or _is_source(data)
    for is_so, wanted, got, do, key in (
        (
            isinstance(model, nn.Module),
            "the name or the section of a model",
            f"{_article(_name(model))} {_name(model)} that is built already",
            "give {'hf': ...} or {'factory': 'package.module:function'}",
            "model",
        ),
        (
            not is_source,
            "a source of text, or data.factory",
            _kind(data),
            "set data.factory to 'package.module:function', which returns it, and give None",
            "data",
        ),
        (
            data is not None and found.data.factory is not None,
            "data from the argument of gossamer.train or from data.factory",
            "both",
            "leave data.factory out, or give None",
            "data.factory",
        ),
        (
            bool(callbacks),
            "no callbacks",
            f"{len(callbacks)}",
            "leave them out, and read the records of the result",
            "callbacks",
        ),
        (
            bool(found.machines.hosts),
            "the processes of this machine",
            f"machines.hosts {', '.join(found.machines.hosts)}",
            "start it with `gossamer train run.yaml`, which runs phases on several hosts",
            "machines.hosts",
        ),
        (
            is_rank_of_launcher(),
            "one process",
            f"a rank of {launcher_of(os.environ)}",
            "start `-m gossamer train run.yaml` with it, of which every rank goes through the phases",
            "train.phases",
        ),
    ):
        if is_so:
            raise bad_input(
                wanted=f"{wanted} with train.phases, which run in processes of their own", got=got, do=do, key=key
            )
    return _as_given(found, model, data)


def _read(config: RunConfig | Mapping[str, Any] | str | Path | None) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    if config is None or isinstance(config, Mapping):
        _check_written(config or {})
        return load_settings(None, given=config).config
    if isinstance(config, (str, os.PathLike)):
        return load_settings(Path(config)).config
    raise bad_input(
        wanted="a mapping of sections, a RunConfig, or the path of a file",
        got=_kind(config),
        do='write, for example, {"train": {"steps": 100}}',
        key="config",
    )


def _check_model(model: object) -> None:
    """Raise BadInput unless `model` is a model or the description of one."""
    if isinstance(model, (nn.Module, str, Mapping)):
        return
    do = "give a module, the name or folder of a Hugging Face model, or the keys of `model` as a mapping"
    if isinstance(model, type) and issubclass(model, nn.Module):
        do = f"give an instance: {model.__name__}(...)"
    elif callable(model):
        do = f"give what it returns, or {{'factory': 'package.module:{getattr(model, '__name__', 'function')}'}}"
    raise bad_input(wanted="a model", got=_kind(model), do=do, key="model")


def _check_written(values: Mapping[Any, Any], above: str = "") -> None:
    """Raise BadInput for values that no file can hold, such as an optimizer object."""
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            _check_written(value, f"{key}.")
        elif isinstance(value, (list, tuple)):
            _check_written(dict(enumerate(value)), f"{key}.")
        elif value is not None and not isinstance(value, (str, int, float, Number, os.PathLike, BaseModel)):
            raise bad_input(
                wanted="a number, a text, a list or a mapping, as in a file",
                got=_kind(value),
                do=f"write its name and its settings, such as {{'{_name(value).lower()}': {{...}}}}; "
                "`gossamer methods` lists the methods",
                key=key,
            )


def _kind(value: object) -> str:
    """Return the kind of a value in a word or two: its contents could fill pages."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"{_article(_name(value))} {_name(value)}"


def _name(value: object) -> str:
    return (value if isinstance(value, type) else type(value)).__name__


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"


def _one_rank_per_process(config: RunConfig, place: LauncherRank) -> None:
    if config.machines.processes > 1 and place.is_alone:
        raise bad_input(
            wanted=f"{config.machines.processes} processes",
            got="1, as the model was built in this process and other processes cannot use it",
            do="start this script with `torchrun --nproc-per-node N`, or use `gossamer train` with model.factory",
            key="machines.processes",
        )


def _data(data: Any, config: RunConfig) -> TrainingData:
    """Return the data of the argument: text, a corpus, or a dataset."""
    if config.data.factory is not None:
        raise bad_input(
            wanted="data from the argument of gossamer.train or from data.factory",
            got="both",
            do="leave data.factory out, or use `gossamer train`",
            key="data.factory",
        )
    if data is None or isinstance(data, str) or _is_source(data):
        return training_data(config)
    if isinstance(data, Corpus):
        return of_corpus(data, config.data, text=type(data).__name__)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (Mapping, bytes)):
        name = type(data).__name__
        if config.data.validation_sources:
            raise bad_input(
                wanted="validation sets of their own source beside text alone",
                got=f"{', '.join(config.data.validation_sources)} beside {_article(name)} {name}",
                do="leave data.validation out, or give text",
                key="data.validation",
            )
        return of_dataset(data, text=name, fingerprint=f"{type(data).__qualname__}:{len(data)}")
    raise bad_input(
        wanted="a source as in data.source, a Corpus, or a map-style dataset of dictionaries",
        got=_kind(data),
        do="wrap what you have in a torch Dataset with __len__ and __getitem__",
        key="data",
    )


def _is_source(data: object) -> bool:
    """Return whether it is a source with its parameters, such as {"text": {"files": "*.txt"}}."""
    return isinstance(data, Mapping) and len(data) == 1 and next(iter(data)) in source_names()


def _source(
    model: nn.Module | str | Mapping[str, Any], config: RunConfig, corpus: Corpus | None
) -> tuple[ModelProvider, str, ModelSource | None]:
    if isinstance(model, nn.Module):
        _check_as_it_is(config)
        return ModuleSource(model), type(model).__name__, None
    origin = origin_for(config, corpus) if corpus is not None else origin_of(config.model)
    return OriginSource(origin, config.train.seed), origin.describe(), origin


def _check_as_it_is(config: RunConfig) -> None:
    """Raise BadInput for settings that would change a module which a program passes: it is trained as it is. So for
    those that need another one in another process.
    """
    if config.train.adversarial.has_companion:
        raise bad_input(
            wanted="a model that Gossamer builds (model.hf, model.gguf, model.factory), to build it in the companion "
            "process too",
            got="a module that is built already",
            do="give {'factory': 'package.module:function'}, or set train.adversarial.ahead to false",
            key="train.adversarial.ahead",
        )
    if config.model.side != "none":
        raise bad_input(
            wanted="a model that Gossamer builds (model.hf, model.gguf, model.factory), to put it beside",
            got="a module that is built already",
            do="call gossamer.model.side.attach on it",
            key="model.side",
        )
    if config.model.adapter != "none" or config.model.freeze or config.model.unfreeze:
        raise bad_input(
            wanted="a model that Gossamer builds (model.hf, model.gguf, model.factory), to put an adapter on it",
            got="a module that is built already",
            do="call gossamer.model.adapter.adapt on it, or peft's inject_adapter_in_model, and freeze parameters with "
            "requires_grad_(False)",
            key="model.adapter" if config.model.adapter != "none" else "model.freeze",
        )


def _as_given(config: RunConfig, model: nn.Module | str | Mapping[str, Any], data: Any) -> RunConfig:
    """Return the configuration updated by the model and data arguments, so that run.yaml describes what is trained."""
    if isinstance(model, nn.Module):  # which no configuration can make again
        section = config.model.model_copy(update={"hf": None, "gguf": None, "factory": None, "config": {}})
    else:
        section = check({"model": model if isinstance(model, Mapping) else {"hf": model}}).model
    told: dict[str, Any] = {"model": section}
    if isinstance(data, str) or _is_source(data):
        told["data"] = config.data.model_copy(update={"source": data})
    return config.model_copy(update=told)


def _directory(config: RunConfig, place: LauncherRank, resume: str | None) -> tuple[RunDirectory, bool]:
    """Return the run directory, and whether to resume from it. Of several ranks, rank 0 calls it.

    A run is resumed only if it holds a checkpoint, which all ranks write together.
    """
    runs = Path(config.run.directory)
    if place.is_alone:
        found = newest_like(runs, config, is_fit=_has_checkpoint) if resume else None
        return (found, True) if found else (RunDirectory.create(runs, config.run.name or "run"), False)
    named = _named(config, place)
    if resume is None:
        check_new(named, resume='resume="auto"')
    return named, resume is not None and _has_checkpoint(named)


def _named(config: RunConfig, place: LauncherRank) -> RunDirectory:
    """Return the run directory of several ranks. Raises BadInput without a name, and for one that is none."""
    if not config.run.name:
        raise bad_input(
            wanted=f"the name of the run directory, to which all {place.ranks} ranks write",
            got="no name",
            do="set run.name, to the same name on all ranks",
            key="run.name",
        )
    return RunDirectory.named(Path(config.run.directory), config.run.name)


def check_resume(resume: str | None) -> None:
    """Raise BadInput for another value of `resume` than there is."""
    if resume not in (None, "auto"):
        raise bad_input(
            wanted='resume="auto" or None', got=repr(resume), do='give "auto", or call gossamer.resume(RUN_DIR)'
        )


def _has_checkpoint(directory: RunDirectory) -> bool:
    return bool(list_checkpoints(directory.checkpoints))


def _where(place: LauncherRank, config: RunConfig) -> RankContext:
    if place.is_alone:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        return RankContext(store=dist.HashStore(), interface=interface, timeout_s=config.machines.timeout_s)
    return rendezvous(place, config.machines.timeout_s)
