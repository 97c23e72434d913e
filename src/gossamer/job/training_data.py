"""The data of a run: text in a corpus, or a dataset that the user's code builds, in every process alike."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.data import Corpus, Sequences, open_corpus, open_validation
from gossamer.data.balanced_order import BalancedOrder
from gossamer.data.tokenizer import Tokenizer
from gossamer.job.rank_inputs import DataDescription
from gossamer.recipe import Recipe
from gossamer.run.batches import Batches, DatasetBatches, TextBatches
from gossamer.run.reference import ReferencedBatches
from gossamer.run.validation_set import ValidationSet
from gossamer.spec.config import DataSection, RunConfig
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import told
from gossamer.spec.user_function import check_arguments, complaint, function_named
from gossamer.spec.validation_sets import HELD_OUT, sets_of

_KEY = "data.factory"


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The data of a run: its batches, what is said of it, and its corpus if it is text.

    `validation`: the validation sets by name, in the order in which the configuration names them.
    """

    train: Batches
    validation: Mapping[str, ValidationSet]
    description: DataDescription
    corpus: Corpus | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of text; None for other data."""
        return None if self.corpus is None else self.corpus.tokenizer


def training_data(config: RunConfig) -> TrainingData:
    """Return the data that a configuration names. Raises BadInput."""
    if config.data.factory is not None:
        made = of_factory(config.data.factory, config.data.config)
        check_loss(made, config)
        return made
    found = of_corpus(corpus_of(config.data), config.data, text=str(config.data.source))
    check_loss(found, config)
    return found


def check_loss(data: TrainingData, config: RunConfig) -> None:
    """Raise BadInput for rows that belong together (preference pairs) without a loss that takes them as one, for such a
    loss without them, and for an order of batches of another size.
    """
    wanted, given = Recipe.loss_of(config).together, data.train.together
    if given == wanted:
        _check_order(data.train, config)
        return
    loss = told(config.train.loss)
    if wanted == 1 and given == 2:
        raise bad_input(
            wanted="a loss that compares two answers, for preference pairs",
            got=f"train.loss {loss}",
            do="set train.loss to dpo, or {dpo: {beta: 0.1}}",
            key="train.loss",
        )
    if wanted == 1:
        raise bad_input(
            wanted=f"a loss that takes {given} neighboring items as one, as the `together` of the dataset says",
            got=f"train.loss {loss}",
            do="name such a loss (margin_mse takes 3), or leave `together` out of the dataset",
            key="train.loss",
        )
    if wanted != 2:
        raise bad_input(
            wanted=f"a dataset whose `together` is {wanted}: {loss} takes that many neighboring items as one",
            got=f"{given}, of {data.description.text}",
            do="give the dataset of data.factory that attribute, or name another loss",
            key="data.factory",
        )
    raise bad_input(
        wanted=f"preference pairs (data.source pairs:GLOB), which the loss {loss} compares",
        got=f"data of another kind, {data.description.text}",
        do="name files of pairs, or another loss",
        key="data.source",
    )


def _check_order(batches: Batches, config: RunConfig) -> None:
    """Raise BadInput for a balanced order whose batches are not those of the steps: a step would mix two topics."""
    order = batches.order(config.train.seed) if len(batches) else None
    if not isinstance(order, BalancedOrder):
        return
    rows, held = order.size * order.together, len(order.query) * order.together
    if (rows, held, order.together) != (config.train.batch, len(batches), batches.together):
        raise bad_input(
            wanted=f"a BalancedOrder of train.batch, {config.train.batch} rows, over {len(batches)} rows, "
            f"{batches.together} together",
            got=f"one of {order.size} pairs, {rows} rows, over {held}, {order.together} together",
            do="give size the rows of train.batch / together, and a query and margin for each pair of the dataset",
            key="train.batch",
        )


def of_corpus(corpus: Corpus, data: DataSection, *, text: str) -> TrainingData:
    """Return the data of a corpus, which is called `text`, with the validation sets that `data` names.

    Raises BadInput for a validation set that cannot be read.
    """
    opened = open_validation_sets(corpus, data)
    sets = {name: ValidationSet(_batches(one.sequences), one.sequences.fingerprint) for name, one in opened.items()}
    remarks = [corpus.remark, *(f"validation set {name}: {one.remark}" for name, one in opened.items() if one.remark)]
    described = DataDescription(
        fingerprint=corpus.fingerprint,
        validation=" ".join(f"{name}:{one.fingerprint}" for name, one in sets.items()),
        text=text,
        remark="; ".join(filter(None, remarks)),
        vocabulary=corpus.tokenizer.vocabulary,
    )
    return TrainingData(_batches(corpus.train), sets, described, corpus)


@dataclass(frozen=True, slots=True)
class OpenedSet:
    """The text of a validation set. `remark`: on what was read for it alone, for the user."""

    sequences: Sequences
    remark: str = ""


def open_validation_sets(corpus: Corpus, data: DataSection) -> dict[str, OpenedSet]:
    """Return the validation sets of a configuration by name, in its order: the part held out, and other sources.

    A corpus that the caller has opened brings the part that is held out with it. Raises BadInput.
    """
    names = sets_of(data.validation).names
    if not isinstance(data.validation, Mapping):
        names = (HELD_OUT,) if len(corpus.validation) else ()
    found = {}
    for name in names:
        source = data.validation_sources.get(name)
        if source is None:
            found[name] = OpenedSet(corpus.validation)
        else:
            own = open_validation(name, source, corpus, pack=data.pack, isolate=data.isolate, cache=data.cache)
            found[name] = OpenedSet(own.train, own.remark)
    return found


def _batches(side: Sequences) -> Batches:
    """Return the batches of one side; those of preference pairs have room for a reference."""
    return TextBatches(side) if side.together == 1 else ReferencedBatches(TextBatches(side))


def of_dataset(dataset: Any, *, text: str, fingerprint: str, key: str = "data") -> TrainingData:
    """Return the data of a map-style dataset of dictionaries. Raises BadInput under `key` for anything else."""
    is_numbered = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not is_numbered or isinstance(dataset, (Mapping, str, bytes)):
        raise bad_input(
            wanted="a map-style dataset of dictionaries",
            got=_kind(dataset),
            do="wrap what you have in a torch Dataset with __len__ and __getitem__",
            key=key,
        )
    together = getattr(dataset, "together", 1)
    if not isinstance(together, int) or together < 1:
        raise bad_input(
            wanted="a dataset whose `together` is 1 or more neighboring items",
            got=repr(together),
            do="give the number of items that the loss takes as one, or leave it out",
            key=key,
        )
    return TrainingData(DatasetBatches(dataset), {}, DataDescription(fingerprint=fingerprint, text=text))


def of_factory(name: str, arguments: Mapping[str, Any]) -> TrainingData:
    """Return the data of the dataset that "package.module:function" returns for `arguments`.

    The fingerprint covers the name, the arguments, the source file of the function and that of the dataset's class,
    the number of items, and the first, the middle and the last item. So it notices a change of these; not one of
    another item, or of code that these files import. Raises BadInput.
    """
    function = function_named(name, key=_KEY)
    check_arguments(function, name, arguments, key="data.config")
    try:
        dataset = function(**arguments)
    except Exception as error:
        raise complaint(f"{name} to return a dataset", error, key=_KEY) from error
    made = of_dataset(dataset, text=name, fingerprint="", key=_KEY)
    count = len(made.train)
    files = {file for one in (function, type(dataset)) if (file := _source_file(one)) is not None}
    whole = hashlib.sha256(json.dumps([name, dict(arguments), count], sort_keys=True, default=str).encode())
    for file in sorted(files):
        whole.update(file.name.encode() + b"\0" + file.read_bytes())
    for index in sorted({0, count // 2, count - 1} if count else ()):
        try:
            _add(whole, dataset[index])
        except Exception as error:
            raise complaint(f"item {index} of the dataset of {name}", error, key=_KEY) from error
    return of_dataset(dataset, text=name, fingerprint=whole.hexdigest(), key=_KEY)


def corpus_of(data: DataSection) -> Corpus:
    """Return the corpus of a configuration."""
    return open_corpus(
        source=data.source,
        tokenizer=data.tokenizer,
        sequence=data.sequence,
        pack=data.pack,
        isolate=data.isolate,
        validation=data.held_out,
        cache=data.cache,
    )


def _source_file(of: Any) -> Path | None:
    """Return the file of the user's function or class; None for what is built in, or made at run time."""
    try:
        found = inspect.getsourcefile(of)
    except TypeError:
        return None
    return Path(found) if found and Path(found).is_file() else None


def _add(whole: Any, item: Any) -> None:
    """Add an item of a dataset to a hash: names, types, shapes and values."""
    if isinstance(item, Mapping):
        for name in sorted(item, key=str):
            whole.update(f"\0{name}\0".encode())
            _add(whole, item[name])
    elif isinstance(item, Tensor):
        whole.update(f"{item.dtype}{tuple(item.shape)}".encode())
        whole.update(item.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(item, np.ndarray):
        whole.update(f"{item.dtype}{item.shape}".encode() + np.ascontiguousarray(item).tobytes())
    else:
        whole.update(repr(item).encode())


def _kind(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
