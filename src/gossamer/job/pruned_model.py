"""Prune a trained model, the result of a run or a Hugging Face folder, as `gossamer prune` does.

The calibration text and the text on which the loss is measured before and after never overlap: of a run they are its
training text and its validation sets, of files named by the user the first four fifths of each and the rest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from gossamer.model.export import config_of, files_beside
from gossamer.model.forward_adapter import caller_of
from gossamer.model.origin import origin_of
from gossamer.model.precision import precision_of
from gossamer.model.source import ModelSource
from gossamer.prune import Pruned, Pruning, apply_masks, build, prune
from gossamer.recipe import Recipe
from gossamer.run.batches import RankBatch, TextBatches, moved, row_slices
from gossamer.run.checkpoint.choice import LATEST
from gossamer.spec.config import ModelSection, RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Written
from gossamer.store.start_folder import StartContent, start_state, write_start
from gossamer.view.run_directory import RunDirectory, names_run, open_run

MEASURED = 256  # sequences of each text, at most
CALIBRATION = 128  # sequences in all
_BATCH_TOKENS = 2048
_HELD_OUT = 5  # every fifth part of a file is measured

Progress = Callable[[str, int, int], None]  # what is done, how many, of how many


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneRequest:
    """What to prune, and how.

    `data`: files; `calibration`: sequences in all, drawn with `seed`; `sequence`: tokens of one; `sequences`: measured
    of each text, at most; `out`: a new folder, None: nothing is written.
    """

    source: Path
    by: Written
    data: tuple[str, ...] = ()
    calibration: int = CALIBRATION
    seed: int = 0
    sequence: int | None = None
    sequences: int = MEASURED
    checkpoint: str | int = LATEST
    out: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A trained model with weights of its own. `written_tokenizer`: as a configuration names it; `config`: of a run."""

    module: nn.Module
    tokenizer: Tokenizer | None
    written_tokenizer: Written
    origin: ModelSource
    loss: Loss
    length: int
    step: int | None = None
    config: RunConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """Some of the sequences of a text."""

    name: str
    batches: TextBatches
    chosen: np.ndarray[Any, Any]


def prune_model(request: PruneRequest, progress: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """Prune the model that `request` names; return losses, sparsities and bytes, JSON-ready.

    Raises BadInput (before anything is computed: for an adapter, a quantized model, a folder that exists, settings),
    CheckpointMismatch.
    """
    began = time.perf_counter()
    pruning = build(request.by, key="--by")
    if request.out is not None and (request.out.exists() or request.out.is_symlink()):
        do = "name another folder, or remove this one first: nothing is ever overwritten"
        raise bad_input(wanted="a new folder to write", got=f"{request.out}, which exists", do=do, key="--out")
    source = _opened(request)
    positions = source.origin.positions()
    if positions is not None and source.length > positions:
        do = f"give {positions} or fewer"
        wanted = f"sequences of at most {positions} tokens, as many as the model sees"
        raise bad_input(wanted=wanted, got=str(source.length), do=do, key="--sequence")
    calibration, measured = _texts(request, source, pruning)
    module = source.module.to(torch.device("cuda" if torch.cuda.is_available() else "cpu")).eval()
    before = [_loss(module, source, one, progress, "before") for one in measured]
    made = prune(module, pruning, _forwards(module, calibration, progress) if pruning.needs_text else ())
    apply_masks(module, made.masks)
    after = [_loss(module, source, one, progress, "after") for one in measured]
    data: dict[str, Any] = {
        "model": str(request.source),
        "step": source.step,
        "by": request.by,
        "sparsity": made.sparsity,
        "masked_weights": sum(one.weights for one in made.matrices),
        **bytes_of(module, made),
        **_losses(measured, before, after),
        "calibration_sequences": sum(len(one.chosen) for one in calibration) if pruning.needs_text else 0,
        "layers": [
            {"name": one.name, "sparsity": one.sparsity, "weights": one.weights, "tokens": one.tokens}
            for one in made.matrices
        ],
        "by_magnitude": [one.name for one in made.matrices if one.fell_back],
        "left_out": [*made.left_out],
    }
    if request.out is not None:
        keys = ("model", "step", "sparsity", "masked_weights", "loss_before", "loss_after")
        said = {key: data[key] for key in keys} | {"by_magnitude": len(data["by_magnitude"])}
        content = pruned_content(module, made, source.origin, source.tokenizer, method=request.by, said=said)
        write_start(request.out, content)
    return {
        **data,
        "out": None if request.out is None else str(request.out),
        "seconds": time.perf_counter() - began,
    }


def pruned_content(
    module: nn.Module,
    pruned: Pruned,
    origin: ModelSource,
    tokenizer: Tokenizer | None,
    *,
    method: Written,
    said: Mapping[str, Any],
) -> StartContent:
    """Return what a start folder of a pruned model holds, which transformers loads where the model is one of its."""
    return StartContent(
        tensors={name: tensor.detach().cpu() for name, tensor in start_state(module)},
        method=method,
        source=origin.fingerprint(),
        said=said,
        config=config_of(module),
        files={n: file for n, file in files_beside(origin, tokenizer).items() if n not in ("config.json", "README.md")},
        masks={name: mask.cpu() for name, mask in pruned.masks.items()},
    )


def bytes_of(module: nn.Module, pruned: Pruned) -> dict[str, int]:
    """Return the bytes of the weights as they are, and with each masked parameter as a bit per weight and what it
    keeps.
    """
    state = dict(start_state(module))
    sparse = {
        name: -(-mask.numel() // 8) + int(mask.sum()) * state[name].element_size()
        for name, mask in pruned.masks.items()
    }
    return {
        "bytes": sum(one.nbytes for one in state.values()),
        "bytes_sparse": sum(sparse.get(name, one.nbytes) for name, one in state.items()),
    }


def _opened(request: PruneRequest) -> _Source:
    place = request.source
    if (place / "records.jsonl").exists() or (not place.exists() and names_run(place)):
        return _of_run(place, request)
    check_no_choice(place, request.checkpoint)
    _check_folder(place)
    origin = origin_of(ModelSection(hf=str(place)))
    check_weights(origin, place)
    return _Source(
        module=origin.build(0),
        tokenizer=parse_tokenizer(f"hf:{place}").make(lambda: (), identity="", cache=place),
        written_tokenizer=f"hf:{place}",
        origin=origin,
        loss=NextToken(),
        length=request.sequence or min(SEQUENCE, origin.positions() or SEQUENCE),
    )


def _check_folder(place: Path) -> None:
    """Raise BadInput for what is no model, an adapter, or quantized."""
    if (place / "adapter_config.json").is_file():
        raise _adapter(place, "merge it with peft (merge_and_unload), or export the run that trained it with --to hf")
    if (place / "quantized.json").is_file() or place.suffix == ".gguf":
        raise _quantized(str(place))
    if not (place / "config.json").is_file():
        raise bad_input(
            wanted=f"a run directory or a Hugging Face folder at {place}",
            got="no such folder" if not place.exists() else "something else",
            do="name the folder that `gossamer train` printed, or a model",
        )
    if "quantization_config" in json.loads((place / "config.json").read_text("utf-8")):
        raise _quantized(f"{place}, whose config.json has a quantization_config")


def _adapter(place: Path, do: str) -> BadInput:
    return bad_input(wanted="a whole model to prune", got=f"an adapter on frozen weights in {place}", do=do)


def _quantized(got: str) -> BadInput:
    return bad_input(
        wanted="a model in full precision to prune",
        got=f"a quantized one, {got}",
        do="prune the model that it was made from, and quantize the result",
    )


def _of_run(place: Path, request: PruneRequest) -> _Source:
    directory = RunDirectory(open_run(place).path.absolute())
    if directory.config().model.adapter != "none":
        raise _adapter(place, f"export it merged (gossamer export {place} FOLDER --to hf), and prune FOLDER")
    trained = read_chosen(place, request.checkpoint)
    assert trained.origin is not None  # a module that a program built cannot be read without it
    config = trained.config
    loss = Recipe.loss_of(config)
    return _Source(
        module=trained.module,
        tokenizer=trained.tokenizer,
        written_tokenizer=f"hf:{directory.tokenizer}",
        origin=trained.origin,
        loss=NextToken() if loss.needs_reference else loss,
        length=request.sequence or config.data.sequence,
        step=trained.step,
        config=config,
    )


def _texts(request: PruneRequest, source: _Source, pruning: Pruning) -> tuple[list[_Text], list[_Text]]:
    """Return the sequences that calibrate, and those on which the loss is measured."""
    if request.data:
        return _of_files(request, source)
    if source.config is None:
        if pruning.needs_text:
            raise bad_input(
                wanted="calibration text, for what reaches each layer",
                got="none (only a run has a text of its own)",
                do="name text files with --data, or prune with --by magnitude",
                key="--data",
            )
        return [], []
    config, directory = source.config, RunDirectory(open_run(request.source).path.absolute())
    why = f"the run was trained on a dataset (data.factory {config.data.factory})" if config.data.factory else ""
    if Recipe.loss_of(config).needs_reference:
        why = "the run compared pairs of answers"
    if why:
        raise bad_input(wanted="text files", got=f"none, and {why}", do="name some with --data", key="--data")
    data = config.data.model_copy(update={"sequence": source.length})
    with standing_in(folder_of(directory)):
        corpus = corpus_of(data)
        check_data_files(directory.data_file, corpus)
        sets = open_validation_sets(corpus, data)
    train = TextBatches(corpus.train)
    opened = {name: TextBatches(one.sequences) for name, one in sets.items()}
    return (
        [_Text(name="training text", batches=train, chosen=_drawn(0, len(train), request.calibration, request.seed))],
        [_Text(name=name, batches=one, chosen=one.first(request.sequences)) for name, one in opened.items()],
    )


def _of_files(request: PruneRequest, source: _Source) -> tuple[list[_Text], list[_Text]]:
    calibrating, measured = list[_Text](), list[_Text]()
    for file in request.data:
        try:
            corpus = open_corpus(
                source=source_of_files(file, {}),
                tokenizer=source.written_tokenizer,
                sequence=source.length,
                pack=False,
                validation=0.0,
            )
        except BadInput as error:  # of a file on the command line, not of a key in a configuration
            raise BadInput(error.message, key="--data" if error.key == "data.source" else error.key) from error
        batches, count = TextBatches(corpus.train), len(corpus.train)
        if count < 2:
            raise bad_input(
                wanted=f"at least 2 sequences of {source.length} tokens in {file}, of which one is held out",
                got=str(count),
                do="name a longer file, or lower --sequence",
                key="--data",
            )
        border = count - max(1, count // _HELD_OUT)
        share = -(-request.calibration // len(request.data))
        calibrating.append(_Text(name=file, batches=batches, chosen=_drawn(0, border, share, request.seed)))
        held_out = np.arange(border, min(count, border + request.sequences))
        measured.append(_Text(name=file, batches=batches, chosen=held_out))
    return calibrating, measured


def _drawn(start: int, stop: int, most: int, seed: int) -> np.ndarray[Any, Any]:
    """Return at most `most` numbers from start to stop, drawn with `seed`, in order."""
    drawn = np.random.default_rng(seed).permutation(stop - start)[:most]
    return start + np.sort(drawn).astype(np.int64)


def _forwards(module: nn.Module, texts: Sequence[_Text], progress: Progress) -> Iterator[Callable[[], object]]:
    """Yield the forwards over the calibration text, without its padding."""
    device = next(module.parameters()).device
    for text in texts:
        if not len(text.chosen):
            continue
        first = text.batches.batch(text.chosen[:1])
        caller = caller_of(module, first)
        rows = max(1, _BATCH_TOKENS // first["input_ids"].shape[1])
        for some in row_slices(len(text.chosen), rows):
            for batch in without_padding(text.batches.batch(text.chosen[some])):
                yield partial(caller, module, moved(batch, device))
            progress(f"{text.name}, calibration", min(some.stop, len(text.chosen)), len(text.chosen))


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


def _loss(module: nn.Module, source: _Source, text: _Text, progress: Progress, when: str) -> float:
    """Return the mean loss per valid label."""
    evaluated = EvaluatedModel(
        module=module,
        caller=caller_of(module, text.batches.batch(text.chosen[:1])),
        loss=source.loss,
        precision=precision_of("fp32"),
        device=next(module.parameters()).device,
    )
    count = len(text.chosen)
    nats, labels = evaluated.on(text.batches, text.chosen, lambda done: progress(f"{text.name}, {when}", done, count))
    return nats / labels if labels else float("nan")


def _losses(texts: Sequence[_Text], before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """Return the losses on each text, and those on the first one."""
    found = [
        {"text": text.name, "loss_before": one, "loss_after": other, "sequences": len(text.chosen)}
        for text, one, other in zip(texts, before, after, strict=True)
    ]
    first: dict[str, Any] = found[0] if found else {"loss_before": None, "loss_after": None}
    return {"texts": found, "loss_before": first["loss_before"], "loss_after": first["loss_after"]}
