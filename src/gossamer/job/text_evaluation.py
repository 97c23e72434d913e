"""The loss of a trained model on texts: of a run, a Hugging Face folder or a GGUF file, as `gossamer eval` shows it.

The loss is the one of training: the mean over valid labels in nats per token. Bits per byte is the sum of the losses in
bits, divided by the UTF-8 bytes that these labels stand for, so that models with other tokenizers can be compared.
Perplexity is exp(loss).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.data import Corpus, open_corpus
from gossamer.data.file_source import source_of_files
from gossamer.data.kept import fingerprint_in
from gossamer.data.tokenizer import Tokenizer
from gossamer.job.data_files import check_data_files
from gossamer.job.found_model import check_weights
from gossamer.job.run_files import folder_of
from gossamer.job.trained_run import TrainedRun, check_no_choice, read_chosen, standing_in
from gossamer.job.training_data import corpus_of, open_validation_sets
from gossamer.job.worker import origin_for
from gossamer.loss import Loss
from gossamer.loss.next_token import NextToken
from gossamer.model.forward_adapter import ForwardAdapter, caller_of
from gossamer.model.input_checks import check_sequence, explain
from gossamer.model.origin import origin_of
from gossamer.model.precision import Precision, precision_of
from gossamer.recipe import Recipe
from gossamer.run.batches import TextBatches, moved, row_slices
from gossamer.run.checkpoint.choice import LATEST
from gossamer.spec.config import DataSection, ModelSection, RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.spec.records import Evaluation, Start
from gossamer.view.run_directory import RunDirectory, names_run, open_run

SEQUENCE = 1024  # tokens that a model without a run sees at once, at most
_BATCH_TOKENS = 2048  # so many are computed together: logits over 50,000 tokens take 0.4 GB

Progress = Callable[[str, int, int], None]  # name of the text, sequences done, sequences in all


@dataclass(frozen=True, slots=True)
class TextLoss:
    """The loss on one text. `nats`: sum over `labels`; `bytes`: UTF-8 bytes that the labels stand for."""

    name: str
    nats: float
    labels: int
    bytes: int
    sequences: int
    remark: str = ""

    @property
    def loss(self) -> float:
        """Return the mean loss in nats per valid label; nan without one."""
        return self.nats / self.labels if self.labels else math.nan

    def figures(self) -> dict[str, Any]:
        """Return the figures, JSON-ready."""
        loss = self.loss
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "bits_per_byte": self.nats / math.log(2) / self.bytes if self.bytes else None,
            "labels": self.labels,
            "bytes": self.bytes,
            "sequences": self.sequences,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    """A model in evaluation mode, and what its loss on a batch needs."""

    module: nn.Module
    caller: ForwardAdapter
    loss: Loss
    precision: Precision
    device: torch.device

    @torch.no_grad()
    def on(self, batches: TextBatches, chosen: np.ndarray[Any, Any], tick: Callable[[int], None]) -> tuple[float, int]:
        """Return the sum of the losses (nats) over the valid labels of the chosen sequences, and their number."""
        largest = max(1, _BATCH_TOKENS // batches.batch(chosen[:1])["input_ids"].shape[1])
        nats, labels = 0.0, 0
        for rows in row_slices(len(chosen), largest):
            batch = moved(batches.batch(chosen[rows]), self.device)
            count = int(self.loss.weight(batch))
            if count:  # the mean over no label is no number
                nats += float(self._mean(batch)) * count
            labels += count
            tick(min(rows.stop, len(chosen)))
        return nats, labels

    def _mean(self, batch: dict[str, Tensor]) -> Tensor:
        with self.precision.autocast(self.device):
            try:
                output = self.caller(self.module, batch)
            except IndexError as error:
                explain(error, batch.get("input_ids"))
                raise
            return self.loss(output, batch).float()


def evaluate_model(
    model: Path,
    files: Sequence[str],
    *,
    sequence: int | None,
    sequences: int | None,
    checkpoint: str | int = LATEST,
    progress: Progress,
) -> dict[str, Any]:
    """Return the figures of a model on `files`, or of a run on its own validation sets; JSON-ready.

    `sequence`: tokens that the model sees at once, default those it was trained with; `sequences`: at most so many of
    each text, default all (of a run's own validation sets those of training); `checkpoint`: of a run. Raises BadInput,
    CheckpointMismatch.
    """
    began = time.perf_counter()
    if (model / "records.jsonl").exists() or (not model.exists() and names_run(model)):
        data, found = _of_run(model, files, sequence, sequences, checkpoint, progress)
    else:
        check_no_choice(model, checkpoint)
        data, found = _of_weights(model, files, sequence, sequences, progress)
    nats, labels = sum(one.nats for one in found), sum(one.labels for one in found)
    total = TextLoss("all", nats, labels, sum(one.bytes for one in found), sum(one.sequences for one in found))
    remarks = [f"{one.name}: {one.remark}" for one in found if one.remark]
    texts = [{"text": one.name, **one.figures()} for one in found]
    if (reported := data.pop("reported", None)) is not None:
        texts = [{**one, "reported_loss": reported.get(one["text"])} for one in texts]
        data["reported_loss"] = texts[0]["reported_loss"] if len(texts) == 1 else None
    return {**data, **total.figures(), "texts": texts, "remarks": remarks, "seconds": time.perf_counter() - began}


def _of_run(
    path: Path,
    files: Sequence[str],
    sequence: int | None,
    sequences: int | None,
    checkpoint: str | int,
    progress: Progress,
) -> tuple[dict[str, Any], list[TextLoss]]:
    directory = RunDirectory(open_run(path).path.absolute())
    trained = read_chosen(path, checkpoint)
    config = trained.config
    data: dict[str, Any] = {"model": str(path), "step": trained.step}
    length = sequence or config.data.sequence
    if files:
        texts = _texts(files, _run_tokenizer(directory, trained), length, config.data.cache, _chat(directory, config))
        _check_tokenizer(texts[0][1].tokenizer, directory, trained)
        if trained.origin is not None:
            check_sequence(trained.origin.positions(), length)
        chosen = [_Text(name, TextBatches(corpus.train), sequences, corpus.remark) for name, corpus in texts]
    else:
        wanted = sequences or config.train.evaluate_sequences
        chosen = list(_own_texts(directory, config, sequence, wanted))
        if sequence is None and sequences is None:
            data["reported"] = _reported(directory, trained.step)
    module = _ready(trained.module, config, _precision(directory, config), chosen[0].batches)
    return data, list(_losses(module, chosen, progress))


def _of_weights(
    path: Path, files: Sequence[str], sequence: int | None, sequences: int | None, progress: Progress
) -> tuple[dict[str, Any], list[TextLoss]]:
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if not is_gguf and not (path / "config.json").is_file():
        raise bad_input(
            wanted=f"a run directory, a Hugging Face folder or a GGUF file at {path}",
            got=_kind(path),
            do="name the folder that `gossamer train` printed, or a model",
        )
    if not files:
        raise bad_input(
            wanted="files to evaluate on", got="none (only a run has a text of its own)", do="name text or chat files"
        )
    section = ModelSection(gguf=str(path)) if is_gguf else ModelSection(hf=str(path))
    check_weights(origin_of(section), path)
    length = sequence or _positions(section)
    texts = _texts(files, f"hf:{path}", length, None, {})
    config = RunConfig(model=section, data=DataSection(tokenizer=f"hf:{path}", sequence=length))
    origin = origin_for(config, texts[0][1])
    chosen = [_Text(name, TextBatches(corpus.train), sequences, corpus.remark) for name, corpus in texts]
    module = _ready(origin.build(0).eval(), config, "fp32", chosen[0].batches)
    return {"model": str(path), "step": None}, list(_losses(module, chosen, progress))


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a folder with neither records.jsonl nor config.json"
    return "another file" if path.exists() else "no such file"


def _positions(section: ModelSection) -> int:
    return min(SEQUENCE, origin_of(section).positions() or SEQUENCE)


def _ready(module: nn.Module, config: RunConfig, precision: str, batches: TextBatches) -> EvaluatedModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = module.to(device)
    return EvaluatedModel(
        module=module,
        caller=caller_of(module, batches.batch(np.zeros(1, np.int64))),
        loss=NextToken() if Recipe.loss_of(config).needs_reference else Recipe.loss_of(config),
        precision=precision_of(precision),
        device=device,
    )


@dataclass(frozen=True, slots=True)
class _Text:
    """A text to evaluate on, at most `most` sequences of it (None: all)."""

    name: str
    batches: TextBatches
    most: int | None
    remark: str


def _losses(model: EvaluatedModel, texts: Sequence[_Text], progress: Progress) -> Iterator[TextLoss]:
    for text in texts:
        chosen = text.batches.first(len(text.batches) if text.most is None else text.most)

        def tick(done: int, name: str = text.name, total: int = len(chosen)) -> None:
            progress(name, done, total)

        nats, labels = model.on(text.batches, chosen, tick)
        yield TextLoss(text.name, nats, labels, text.batches.text_bytes(chosen) or 0, len(chosen), text.remark)


def _precision(directory: RunDirectory, config: RunConfig) -> str:
    """Return the precision that the run computed in, also where it was measured."""
    starts = [one.precision for one in directory.records() if isinstance(one, Start) and one.precision]
    return config.train.precision if config.train.precision != "auto" else starts[-1] if starts else "fp32"


def _reported(directory: RunDirectory, step: int) -> dict[str, float]:
    """Return the loss on each validation set that training reported at `step`; none where it did not evaluate there."""
    found = [one for one in directory.records() if isinstance(one, Evaluation) and one.step == step]
    return {one.name: one.loss for one in found}


def _own_texts(directory: RunDirectory, config: RunConfig, sequence: int | None, most: int) -> Iterator[_Text]:
    """Yield the validation sets of a run. Raises BadInput where its text changed, or it has none."""
    if config.data.factory is not None or not config.data.validation:
        why = "the run held no text out (data.validation 0)"
        if config.data.factory is not None:
            why = f"the run was trained on a dataset (data.factory {config.data.factory})"
        raise bad_input(wanted="files to evaluate on", got=f"none, and {why}", do="name text or chat files")
    if Recipe.loss_of(config).needs_reference:
        why = "the run compared pairs of answers, whose loss is no loss on a text"
        raise bad_input(wanted="files to evaluate on", got=f"none, and {why}", do="name text or chat files")
    data = config.data if sequence is None else config.data.model_copy(update={"sequence": sequence})
    with standing_in(folder_of(directory)):
        corpus = corpus_of(data)
        check_data_files(directory.data_file, corpus)
        opened = open_validation_sets(corpus, data)
    for name, one in opened.items():
        remark = one.remark if name in data.validation_sources else corpus.remark
        yield _Text(name, TextBatches(one.sequences), most, remark)


def _run_tokenizer(directory: RunDirectory, trained: TrainedRun) -> Written:
    """Return the tokenizer of a run as a configuration writes it: a folder's own, which has a chat template, or the
    one that the run keeps.
    """
    written = trained.config.data.tokenizer
    if written == "byte":
        return written
    name, _, folder = written.partition(":") if isinstance(written, str) else ("", "", "")
    if name == "hf" and (place := folder_of(directory) / Path(folder).expanduser()).exists():
        return f"hf:{place}"
    return f"hf:{directory.tokenizer}"


def _chat(directory: RunDirectory, config: RunConfig) -> dict[str, Any]:
    """Return how the run reads conversations: the parameters of its source, without the files."""
    choice = next((one for one in _sources(config.data.source) if one.name in ("chat", "pairs")), None)
    if choice is None:
        return {}
    given = {name: value for name, value in choice.parameters.items() if name in ("learn", "template")}
    if given.get("template") is not None:  # its path is relative to the folder of the run
        given["template"] = str(folder_of(directory) / Path(given["template"]).expanduser())
    return given


def _sources(written: Written) -> Iterator[MethodConfig]:
    """Yield the sources that a configuration writes out, of a mixture its parts, of the hub what reads its rows."""
    choice = MethodConfig("") if isinstance(written, str) else MethodConfig.parse(written)
    if choice.name == "mixture":
        for part in choice.parameters["sources"].values():
            yield from _sources(part)
    elif choice.name == "hub":
        yield from _sources(choice.parameters.get("read", ""))
    else:
        yield choice


def _check_tokenizer(tokenizer: Tokenizer, directory: RunDirectory, trained: TrainedRun) -> None:
    """Raise BadInput where the tokenizer's files are others than when the run was trained."""
    if tokenizer.fingerprint not in (trained.words().fingerprint, fingerprint_in(directory.tokenizer)):
        raise bad_input(
            wanted="the tokenizer that the run was trained with",
            got=f"{trained.config.data.tokenizer}, which has changed since",
            do="restore its files",
            key="data.tokenizer",
        )


def _texts(
    files: Sequence[str], tokenizer: Written, sequence: int, cache: str | None, chat: Mapping[str, Any]
) -> list[tuple[str, Corpus]]:
    """Return each file (or pattern) with its corpus, of which nothing is held out; a document is cut, never joined."""
    found = []
    for file in files:
        try:
            source = source_of_files(file, chat)
            corpus = open_corpus(
                source=source, tokenizer=tokenizer, sequence=sequence, pack=False, validation=0.0, cache=cache
            )
        except BadInput as error:  # of a file on the command line, not of a key in a configuration
            raise BadInput(error.message, key="" if error.key == "data.source" else error.key) from error
        if not len(corpus.train):
            raise bad_input(wanted=f"text in {file}", got="none that can be predicted", do="name another file")
        found.append((file, corpus))
    return found
