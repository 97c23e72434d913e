"""A trained model in full precision, of which a command makes another one, and the texts that this is measured on.

The calibration text and the text on which the loss is measured never overlap: of a run they are its training text and
its validation sets, of files that the user names the first four fifths of each and the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gossamer.data import open_corpus
from gossamer.data.file_source import source_of_files
from gossamer.data.tokenizer import Tokenizer, parse_tokenizer
from gossamer.job.data_files import check_data_files
from gossamer.job.found_model import check_weights
from gossamer.job.run_files import folder_of
from gossamer.job.text_evaluation import SEQUENCE, EvaluatedModel
from gossamer.job.trained_run import check_no_choice, read_chosen, standing_in
from gossamer.job.training_data import corpus_of, open_validation_sets
from gossamer.loss import Loss
from gossamer.loss.next_token import NextToken
from gossamer.model.forward_adapter import caller_of
from gossamer.model.origin import origin_of
from gossamer.model.precision import precision_of
from gossamer.model.quantized_linear import quantized_layers
from gossamer.model.source import ModelSource
from gossamer.model.started_source import start_of
from gossamer.recipe import Recipe
from gossamer.run.batches import RankBatch, TextBatches, moved, row_slices
from gossamer.run.checkpoint.choice import LATEST
from gossamer.spec.config import ModelSection, RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Written
from gossamer.store.gguf import read_summary
from gossamer.store.quantized_folder import QuantizedFolder
from gossamer.store.start_folder import StartFolder
from gossamer.view.run_directory import RunDirectory, names_run, open_run

CALIBRATION = 128  # sequences in all
FILES = "files"  # the key of errors about the text files of a command
_BATCH_TOKENS = 2048
_HELD_OUT = 5  # every fifth part of a file is measured
_FULL = ("F32", "F16", "BF16")  # GGUF types that are no integers

Progress = Callable[[str, int, int], None]  # what is done, how many, of how many


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """A trained model with weights of its own.

    `written_tokenizer`: as a configuration names it; `dtype`: that its weights are stored in; `length`: tokens of a
    sequence; `config`: of a run; `start`: the start folder that it began from.
    """

    place: Path
    module: nn.Module
    tokenizer: Tokenizer | None
    written_tokenizer: Written
    origin: ModelSource
    loss: Loss
    dtype: torch.dtype
    length: int
    step: int | None = None
    config: RunConfig | None = None
    start: StartFolder | None = None

    def ready(self) -> nn.Module:
        """Return the module in evaluation mode, on the GPU where there is one."""
        return self.module.to(torch.device("cuda" if torch.cuda.is_available() else "cpu")).eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a model is opened. `verb`: what the command does with it, for messages; `sequence`: tokens of one.

    `takes_gguf`: GGUF files without integers, too; `takes_adapter`: a run of an adapter, too.
    """

    verb: str
    checkpoint: str | int = LATEST
    sequence: int | None = None
    takes_gguf: bool = False
    takes_adapter: bool = False


def is_run(place: Path) -> bool:
    """Return whether a place names a run, and no other model."""
    return (place / "records.jsonl").exists() or (not place.exists() and names_run(place))


def open_whole(place: Path, how: Opening) -> WholeModel:
    """Load the model at `place`.

    Raises BadInput for what is no model, an adapter, quantized, or sees fewer tokens than asked for, and
    CheckpointMismatch.
    """
    found = _of_run(place, how) if is_run(place) else _of_weights(place, how)
    positions = found.origin.positions()
    if positions is not None and found.length > positions:
        raise bad_input(
            wanted=f"sequences of at most {positions} tokens, as many as the model sees",
            got=str(found.length),
            do=f"give {positions} or fewer",
            key="--sequence",
        )
    return found


def _of_weights(place: Path, how: Opening) -> WholeModel:
    check_no_choice(place, how.checkpoint)
    is_gguf = place.is_file() and place.suffix == ".gguf"
    _check_plain(place, how, is_gguf=is_gguf)
    section = ModelSection(gguf=str(place)) if is_gguf else ModelSection(hf=str(place))
    origin = origin_of(section)
    check_weights(origin, place)
    return WholeModel(
        place=place,
        module=origin.build(0),
        tokenizer=parse_tokenizer(f"hf:{place}").make(lambda: (), identity="", cache=place),
        written_tokenizer=f"hf:{place}",
        origin=origin,
        loss=NextToken(),
        dtype=torch.float16 if is_gguf else _dtype_in(place),
        length=how.sequence or min(SEQUENCE, origin.positions() or SEQUENCE),
        start=start_of(section),
    )


def _check_plain(place: Path, how: Opening, *, is_gguf: bool) -> None:
    """Raise BadInput for what is no model, an adapter, or quantized already."""
    if is_gguf:
        kinds = [kind for kind in read_summary(place).tensors if kind not in _FULL]
        if kinds:
            raise _quantized(how, f"{place}, whose tensors are {', '.join(kinds)}")
        if how.takes_gguf:
            return
    if QuantizedFolder.is_at(place):
        raise _quantized(how, f"{place}, which gossamer quantize wrote")
    if (place / "adapter_config.json").is_file():
        do = "merge it with peft (merge_and_unload), or export the run that trained it with --to hf"
        raise _adapter(place, how, do)
    if not (place / "config.json").is_file():
        file = " or a GGUF file" if how.takes_gguf else ""
        raise bad_input(
            wanted=f"a run directory, a Hugging Face folder{file} at {place}",
            got="no such file" if not place.exists() else "something else",
            do="name the folder that `gossamer train` printed, or a model",
        )
    if "quantization_config" in json.loads((place / "config.json").read_text("utf-8")):
        raise _quantized(how, f"{place}, whose config.json has a quantization_config")


def _quantized(how: Opening, got: str) -> BadInput:
    return bad_input(
        wanted=f"a model in full precision to {how.verb}",
        got=f"a quantized one, {got}",
        do=f"{how.verb} the model that it was made from: integers of integers lose twice",
    )


def _adapter(place: Path, how: Opening, do: str) -> BadInput:
    return bad_input(wanted=f"a whole model to {how.verb}", got=f"an adapter on frozen weights in {place}", do=do)


def _dtype_in(place: Path) -> torch.dtype:
    """Return the type in which a Hugging Face folder holds its weights."""
    config = json.loads((place / "config.json").read_text("utf-8"))
    named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    found = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(named)
    return torch.float32 if found is None else found


def _of_run(place: Path, how: Opening) -> WholeModel:
    directory = RunDirectory(open_run(place).path.absolute())
    if directory.config().model.adapter != "none" and not how.takes_adapter:
        do = f"export it merged first: gossamer export {place} FOLDER --to hf, and {how.verb} FOLDER"
        raise _adapter(place, how, do)
    if directory.config().model.side != "none":
        raise bad_input(
            wanted=f"a whole model to {how.verb}",
            got=f"a side network beside a frozen model in {place}, which would be lost",
            do=f"{how.verb} the model that it was trained beside, which is as it was",
        )
    trained = read_chosen(place, how.checkpoint)
    if quantized_layers(trained.module) and not how.takes_adapter:
        raise _quantized(how, f"the run {place}, which trained on a quantized folder")
    assert trained.origin is not None  # a module that a program built cannot be read without it
    config = trained.config
    loss = Recipe.loss_of(config)
    return WholeModel(
        place=place,
        module=trained.module,
        tokenizer=trained.tokenizer,
        written_tokenizer=f"hf:{directory.tokenizer}",
        origin=trained.origin,
        loss=NextToken() if loss.needs_reference else loss,
        dtype=getattr(torch, config.model.dtype),
        length=how.sequence or config.data.sequence,
        step=trained.step,
        config=config,
        start=trained.start,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledText:
    """Some of the sequences of a text."""

    name: str
    batches: TextBatches
    chosen: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Which sequences are taken. `files`: none for a run's own text; `calibration`: sequences in all, drawn with
    `seed`, or, without one, the first of a run's text and evenly spread ones of files; `measured`: of each text.
    """

    files: Sequence[str] = ()
    calibration: int = CALIBRATION
    measured: int
    seed: int | None = None

    def calibrating(self, count: int, most: int) -> np.ndarray[Any, Any]:
        """Return at most `most` of the numbers below `count`, in order."""
        if self.seed is None:
            return _spread(0, count, most)
        drawn = np.random.default_rng(self.seed).permutation(count)[:most]
        return np.sort(drawn).astype(np.int64)


def sampled_texts(model: WholeModel, how: Sampling) -> tuple[list[SampledText], list[SampledText]]:
    """Return the sequences that calibrate, and those on which the loss is measured; none of a model without a text.

    Raises BadInput for files that are too short, and for a run that has no text.
    """
    if how.files:
        return _of_files(model, how)
    if model.config is None:
        return [], []
    config, directory = model.config, RunDirectory(open_run(model.place).path.absolute())
    if why := why_no_text(config):
        raise bad_input(wanted="text to measure the loss on", got=f"none: {why}", do="name text files", key=FILES)
    data = config.data.model_copy(update={"sequence": model.length})
    with standing_in(folder_of(directory)):
        corpus = corpus_of(data)
        check_data_files(directory.data_file, corpus)
        sets = open_validation_sets(corpus, data)
    train = TextBatches(corpus.train)
    first = train.first(how.calibration) if how.seed is None else how.calibrating(len(train), how.calibration)
    opened = {name: TextBatches(one.sequences) for name, one in sets.items()}
    return (
        [SampledText(name="training text", batches=train, chosen=first)],
        [SampledText(name=name, batches=one, chosen=one.first(how.measured)) for name, one in opened.items()],
    )


def why_no_text(config: RunConfig) -> str:
    """Return why a run has no text on which the loss of its model can be measured; "" if it has one."""
    if Recipe.loss_of(config).needs_reference:
        return "the run compared pairs of answers"
    return f"the run was trained on a dataset (data.factory {config.data.factory})" if config.data.factory else ""


def _of_files(model: WholeModel, how: Sampling) -> tuple[list[SampledText], list[SampledText]]:
    calibrating, measured = list[SampledText](), list[SampledText]()
    for file in how.files:
        try:
            corpus = open_corpus(
                source=source_of_files(file, {}),
                tokenizer=model.written_tokenizer,
                sequence=model.length,
                pack=False,
                validation=0.0,
            )
        except BadInput as error:  # of a file on the command line, not of a key in a configuration
            raise BadInput(error.message, key=FILES if error.key == "data.source" else error.key) from error
        batches, count = TextBatches(corpus.train), len(corpus.train)
        if count < 2:
            raise bad_input(
                wanted=f"at least 2 sequences of {model.length} tokens in {file}, of which one is held out",
                got=str(count),
                do="name a longer file, or lower --sequence",
                key=FILES,
            )
        border = count - max(1, count // _HELD_OUT)
        share = -(-how.calibration // len(how.files))
        calibrating.append(SampledText(name=file, batches=batches, chosen=how.calibrating(border, share)))
        measured.append(SampledText(name=file, batches=batches, chosen=_spread(border, count, how.measured)))
    return calibrating, measured


def _spread(start: int, stop: int, most: int) -> np.ndarray[Any, Any]:
    """Return at most `most` numbers from start to stop, evenly spread."""
    count = min(most, stop - start)
    return start + np.arange(count, dtype=np.int64) * (stop - start) // count


def calibration_batches(texts: Sequence[SampledText], device: torch.device) -> Iterator[RankBatch]:
    """Yield the batches of the calibration text, without its padding."""
    for text in texts:
        if not len(text.chosen):
            continue
        rows = max(1, _BATCH_TOKENS // text.batches.batch(text.chosen[:1])["input_ids"].shape[1])
        for some in row_slices(len(text.chosen), rows):
            for batch in without_padding(text.batches.batch(text.chosen[some])):
                yield moved(batch, device)


def without_padding(batch: RankBatch) -> Iterator[RankBatch]:
    """Yield the rows of a batch in groups of one length, cut where their padding begins, which is on the right."""
    mask = batch.get("attention_mask")
    if mask is None:
        yield batch
        return
    rest = {name: one for name, one in batch.items() if name != "attention_mask"}
    lengths = mask.sum(1)
    for length in sorted(set(lengths.tolist())):
        rows = lengths == length
        yield {name: one[rows][:, :length] if one.dim() > 1 else one[rows] for name, one in rest.items()}


def mean_losses(
    module: nn.Module, loss: Loss, texts: Sequence[SampledText], progress: Progress, when: str
) -> list[float]:
    """Return the mean loss per valid label on each text; nan without one. `when`: for the progress."""
    return [_mean_loss(module, loss, text, progress, when) for text in texts]


def _mean_loss(module: nn.Module, loss: Loss, text: SampledText, progress: Progress, when: str) -> float:
    evaluated = EvaluatedModel(
        module=module,
        caller=caller_of(module, text.batches.batch(text.chosen[:1])),
        loss=loss,
        precision=precision_of("fp32"),
        device=next(module.parameters()).device,
    )
    count = len(text.chosen)
    nats, labels = evaluated.on(text.batches, text.chosen, lambda done: progress(f"{text.name}, {when}", done, count))
    return nats / labels if labels else float("nan")


def loss_figures(texts: Sequence[SampledText], before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """Return the losses on each text, and those on the first one, JSON-ready."""
    found = [
        {"text": text.name, "loss_before": one, "loss_after": other, "sequences": len(text.chosen)}
        for text, one, other in zip(texts, before, after, strict=True)
    ]
    first: dict[str, Any] = found[0] if found else {"loss_before": None, "loss_after": None}
    return {"texts": found, "loss_before": first["loss_before"], "loss_after": first["loss_after"]}
