"""Quantize a trained model: the result of a run, a Hugging Face folder or a GGUF file, as `gossamer quantize` does.

The calibration text and the text on which the loss is measured before and after never overlap: of a run they are its
training text and its validation sets, of files named by the user the first four fifths of each and the rest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
from gossamer.model.bit_widths import Widths, best_widths
from gossamer.model.export import export_hf
from gossamer.model.export_gguf import export_gguf
from gossamer.model.forward_adapter import caller_of
from gossamer.model.origin import origin_of
from gossamer.model.packed_gguf import gguf_type
from gossamer.model.precision import precision_of
from gossamer.model.qfa_linear import bit_widths, extract, nbytes_at, qfa_layers, set_widths
from gossamer.model.quantized_folder import quantized_content, stored
from gossamer.model.quantized_linear import quantized_layers
from gossamer.model.source import ModelSource
from gossamer.quantize import Quantizer, build
from gossamer.quantize.model.layers import Calibration, QuantizeReport, quantize_layers
from gossamer.recipe import Recipe
from gossamer.run.batches import TextBatches, moved, row_slices
from gossamer.run.checkpoint.choice import LATEST
from gossamer.spec.config import ModelSection, RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.store.gguf import read_summary
from gossamer.store.gguf_write import check_new
from gossamer.store.quantized_folder import QuantizedFolder, check_absent, write_quantized
from gossamer.view.run_directory import RunDirectory, names_run, open_run

MEASURED = 1000  # sequences of each text, at most
CALIBRATION = 128  # sequences in all
_BATCH_TOKENS = 2048
_HELD_OUT = 5  # every fifth part of a file is measured
_FULL = ("F32", "F16", "BF16")  # GGUF types that are no integers

Progress = Callable[[str, int, int], None]  # what is done, how many, of how many


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRequest:
    """What to quantize, and how. `data`: files; `sequences`: measured of each text; `out`: a folder or FILE.gguf;

    `budget`: average bits of the subnet of a run with the adapter qfa, in place of `by`.
    """

    source: Path
    by: Written
    data: tuple[str, ...] = ()
    calibration: int = CALIBRATION
    sequence: int | None = None
    sequences: int = MEASURED
    checkpoint: str | int = LATEST
    out: Path | None = None
    budget: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A trained model in full precision. `dtype`: that its weights are stored in; `config`: of a run."""

    module: nn.Module
    tokenizer: Tokenizer | None
    written_tokenizer: Written
    origin: ModelSource
    loss: Loss
    dtype: torch.dtype
    length: int
    step: int | None = None
    config: RunConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """Some of the sequences of a text."""

    name: str
    batches: TextBatches
    chosen: np.ndarray[Any, Any]


def quantize_model(request: QuantizeRequest, progress: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """Quantize the model that `request` names; return sizes, losses and the errors of the layers, JSON-ready.

    Raises BadInput, before anything is computed, for an adapter or a quantized model, for what the quantizer or the
    target cannot hold; CheckpointMismatch.
    """
    began = time.perf_counter()
    if request.budget is not None:
        return {**_subnet(request, request.budget, progress), "seconds": time.perf_counter() - began}
    quantizer = build(request.by, key="--by")
    _check_target(request.out, quantizer)
    source = _open(request)
    calibration, measured = _texts(request, source)
    if quantizer.needs_inputs and not calibration:
        raise bad_input(
            wanted="calibration text, from whose activations the integers are chosen",
            got="none",
            do="name text files, or use --by round_to_nearest",
            key="--data",
        )
    module = source.module.to(torch.device("cuda" if torch.cuda.is_available() else "cpu")).eval()
    bytes_before = _stored_bytes(module, source.dtype)
    before = [_loss(module, source, one, progress, "before") for one in measured]
    batches = _batches(calibration, module)
    report = quantize_layers(
        module,
        quantizer,
        Calibration(caller=caller_of(module, batches[0]), batches=batches) if batches else None,
        progress=lambda done, total: progress("quantize", done, total),
    )
    after = [_loss(module, source, one, progress, "after") for one in measured]
    data: dict[str, Any] = {
        "model": str(request.source),
        "step": source.step,
        "by": request.by,
        "bits": quantizer.bits,
        "group": quantizer.group,
        "symmetric": quantizer.symmetric,
        "bits_per_weight": report.bits_per_weight,
        "bytes_before": bytes_before,
        "bytes_after": _stored_bytes(module, source.dtype),
        **_losses(measured, before, after),
        "calibration_tokens": sum(one["input_ids"].numel() for one in batches),
        "layers": _layers(report),
        "kept": [*report.kept],
    }
    return {**data, **_write(request, module, source, data), "seconds": time.perf_counter() - began}


def _subnet(request: QuantizeRequest, budget: float, progress: Progress) -> dict[str, Any]:
    """Look for the widths of a supernet under a budget that have the lowest loss on the calibration text, and write it.

    The losses are those of the supernet at its largest widths, and of the subnet.
    """
    if request.out is not None:
        if request.out.suffix == ".gguf":
            raise bad_input(
                wanted="a folder for a subnet, whose layers are integers and an adapter",
                got=str(request.out),
                do="write a folder, and export that with --to gguf --type q8_0, which merges them",
                key="--out",
            )
        check_absent(request.out)
    source = _open(request)
    calibration, measured = _texts(request, source)
    module = source.module.to(torch.device("cuda" if torch.cuda.is_available() else "cpu")).eval()
    layers = bit_widths(module)
    largest = (layers.widths[-1],) * len(layers.names)
    set_widths(module, largest)
    before = [_loss(module, source, one, progress, "before") for one in measured]
    bytes_before = nbytes_at(module, largest)
    tried = 0

    def score(widths: Widths) -> float:
        nonlocal tried
        tried += 1
        set_widths(module, widths)
        return sum(_loss(module, source, one, progress, f"subnet {tried}") for one in calibration)

    chosen, _ = best_widths(layers, budget, score)
    set_widths(module, chosen)
    bytes_after = nbytes_at(module, chosen)
    extract(module, chosen)
    after = [_loss(module, source, one, progress, "after") for one in measured]
    data: dict[str, Any] = {
        "model": str(request.source),
        "step": source.step,
        "by": "qfa",
        "budget": budget,
        "bits_per_weight": layers.average(chosen),
        "bytes_before": bytes_before,
        "bytes_after": bytes_after,
        **_losses(measured, before, after),
        "subnets": tried,
        "layers": [{"name": name, "bits": bits} for name, bits in zip(layers.names, chosen, strict=True)],
    }
    return {**data, **_write(request, module, source, data)}


def export_quantized(place: Path, target: Path, *, to: str, type: str | None) -> dict[str, Any]:
    """Export the model of a quantized folder: with decoded weights (hf), or to a GGUF file, by default bit for bit."""
    origin = origin_of(ModelSection(hf=str(place)))
    tokenizer = parse_tokenizer(f"hf:{place}").make(lambda: (), identity="", cache=place)
    if to == "hf":
        return {"exported": str(target), "load": export_hf(origin.build(0), origin, tokenizer, target)}
    if to != "gguf":
        raise bad_input(wanted="--to hf or gguf of a quantized folder", got=to, do="choose one of them", key="--to")
    kind: Any = type or "held"
    module = origin.build(0)
    if kind == "held" and qfa_layers(module):
        raise bad_input(
            wanted="integers alone, to write them as they are",
            got="layers of integers and an adapter",
            do="export with --type q8_0 or f16, which merges them",
            key="--type",
        )
    made = export_gguf(module, origin, tokenizer, target, kind=kind)
    return {"exported": str(target), "load": f"llama_cpp.Llama({str(target)!r})", **made}


def _check_target(out: Path | None, quantizer: Quantizer) -> None:
    if out is None:
        return
    if out.suffix == ".gguf":
        gguf_type(quantizer.format)
        check_new(out)
    else:
        check_absent(out)


def _open(request: QuantizeRequest) -> _Source:
    place = request.source
    if (place / "records.jsonl").exists() or (not place.exists() and names_run(place)):
        return _of_run(place, request)
    if request.budget is not None:
        do = "leave --budget out, and say --bits"
        raise bad_input(wanted="a run of the adapter qfa", got=str(place), do=do, key="--budget")
    check_no_choice(place, request.checkpoint)
    is_gguf = place.is_file() and place.suffix == ".gguf"
    _check_plain(place, is_gguf=is_gguf)
    section = ModelSection(gguf=str(place)) if is_gguf else ModelSection(hf=str(place))
    origin = origin_of(section)
    check_weights(origin, place)
    return _Source(
        module=origin.build(0),
        tokenizer=parse_tokenizer(f"hf:{place}").make(lambda: (), identity="", cache=place),
        written_tokenizer=f"hf:{place}",
        origin=origin,
        loss=NextToken(),
        dtype=torch.float16 if is_gguf else _dtype_in(place),
        length=request.sequence or min(SEQUENCE, origin.positions() or SEQUENCE),
    )


def _check_plain(place: Path, *, is_gguf: bool) -> None:
    """Raise BadInput for what is no model, an adapter, or quantized already."""
    if is_gguf:
        kinds = [kind for kind in read_summary(place).tensors if kind not in _FULL]
        if kinds:
            raise _quantized(f"{place}, whose tensors are {', '.join(kinds)}")
        return
    if QuantizedFolder.is_at(place):
        raise _quantized(f"{place}, which gossamer quantize wrote")
    if (place / "adapter_config.json").is_file():
        raise _adapter(place, "merge it with peft (merge_and_unload), or export the run that trained it with --to hf")
    if not (place / "config.json").is_file():
        raise bad_input(
            wanted=f"a run directory, a Hugging Face folder or a GGUF file at {place}",
            got="no such file" if not place.exists() else "something else",
            do="name the folder that `gossamer train` printed, or a model",
        )
    if "quantization_config" in json.loads((place / "config.json").read_text("utf-8")):
        raise _quantized(f"{place}, whose config.json has a quantization_config")


def _quantized(got: str) -> BadInput:
    return bad_input(
        wanted="a model in full precision to quantize",
        got=got,
        do="quantize the model that it was made from: integers of integers lose twice",
    )


def _adapter(place: Path, do: str) -> BadInput:
    return bad_input(wanted="a whole model to quantize", got=f"an adapter on frozen weights in {place}", do=do)


def _of_run(place: Path, request: QuantizeRequest) -> _Source:
    directory = RunDirectory(open_run(place).path.absolute())
    section = directory.config().model
    is_supernet = section.adapter != "none" and MethodConfig.parse(section.adapter).name == "qfa"
    if is_supernet != (request.budget is not None):
        raise bad_input(
            wanted="--budget with a run of the adapter qfa, and with no other model",
            got=f"{'no budget' if is_supernet else 'a budget'} with model.adapter {section.adapter}",
            do="give the average bits of its subnet: --budget 3" if is_supernet else "leave --budget out",
            key="--budget",
        )
    if section.adapter != "none" and not is_supernet:
        raise _adapter(place, f"export it merged first: gossamer export {place} DIR --to hf, and quantize DIR")
    trained = read_chosen(place, request.checkpoint)
    if quantized_layers(trained.module) and not is_supernet:
        raise _quantized(f"the run {place}, which trained on a quantized folder")
    if trained.origin is None:  # a module that a program built cannot be read without it
        raise AssertionError(place)
    config = trained.config
    loss = Recipe.loss_of(config)
    return _Source(
        module=trained.module,
        tokenizer=trained.tokenizer,
        written_tokenizer=f"hf:{directory.tokenizer}",
        origin=trained.origin,
        loss=NextToken() if loss.needs_reference else loss,
        dtype=getattr(torch, config.model.dtype),
        length=request.sequence or config.data.sequence,
        step=trained.step,
        config=config,
    )


def _dtype_in(place: Path) -> torch.dtype:
    """Return the type in which a Hugging Face folder holds its weights."""
    config = json.loads((place / "config.json").read_text("utf-8"))
    named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    found = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(named)
    return torch.float32 if found is None else found


def _texts(request: QuantizeRequest, source: _Source) -> tuple[list[_Text], list[_Text]]:
    """Return the sequences that calibrate, and those that measure."""
    if request.data:
        return _of_files(request, source)
    if source.config is None:
        return [], []
    config, directory = source.config, RunDirectory(open_run(request.source).path.absolute())
    if config.data.factory is not None:
        raise bad_input(
            wanted="text to measure the loss on",
            got=f"none: the run was trained on a dataset (data.factory {config.data.factory})",
            do="name text files",
            key="--data",
        )
    with standing_in(folder_of(directory)):
        data = config.data.model_copy(update={"sequence": source.length})
        corpus = corpus_of(data)
        check_data_files(directory.data_file, corpus)
        sets = open_validation_sets(corpus, data)
    train = TextBatches(corpus.train)
    opened = {name: TextBatches(one.sequences) for name, one in sets.items()}
    return (
        [_Text(name="training text", batches=train, chosen=train.first(request.calibration))],
        [_Text(name=name, batches=one, chosen=one.first(request.sequences)) for name, one in opened.items()],
    )


def _of_files(request: QuantizeRequest, source: _Source) -> tuple[list[_Text], list[_Text]]:
    calibrating, measured = list[_Text](), list[_Text]()
    for file in request.data:
        corpus = open_corpus(
            source=source_of_files(file, {}),
            tokenizer=source.written_tokenizer,
            sequence=source.length,
            pack=False,
            validation=0.0,
        )
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
        calibrating.append(_Text(name=file, batches=batches, chosen=_spread(0, border, share)))
        measured.append(_Text(name=file, batches=batches, chosen=_spread(border, count, request.sequences)))
    return calibrating, measured


def _spread(start: int, stop: int, most: int) -> np.ndarray[Any, Any]:
    """Return at most `most` numbers from start to stop, evenly spread."""
    return start + np.arange(min(most, stop - start), dtype=np.int64) * (stop - start) // min(most, stop - start)


def _batches(texts: Sequence[_Text], module: nn.Module) -> list[Mapping[str, Tensor]]:
    device = next(module.parameters()).device
    found: list[Mapping[str, Tensor]] = []
    for text in texts:
        if not len(text.chosen):
            continue
        rows = max(1, _BATCH_TOKENS // text.batches.batch(text.chosen[:1])["input_ids"].shape[1])
        found += [moved(text.batches.batch(text.chosen[some]), device) for some in row_slices(len(text.chosen), rows)]
    return found


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


def _stored_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of all parameters and persistent buffers as they are stored, tied ones once."""
    tensors = {one.data_ptr() or id(one): (name, one) for name, one in module.state_dict().items()}
    return sum(stored(name, one, dtype).nbytes for name, one in tensors.values())


def _layers(report: QuantizeReport) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name,
            "shape": [*one.shape],
            "bits_per_weight": one.bits_per_weight,
            "weight_error": one.weight_error,
            "output_error": one.output_error,
            "said": one.said,
        }
        for one in report.layers
    ]


def _write(request: QuantizeRequest, module: nn.Module, source: _Source, data: Mapping[str, Any]) -> dict[str, Any]:
    """Write what was asked for; return where it is."""
    out = request.out
    if out is None:
        return {"out": None}
    module = module.cpu()
    if out.suffix == ".gguf":
        made = export_gguf(module, source.origin, source.tokenizer, out, kind="held")
        return {"out": str(out), "file_bytes": made["bytes"], "notes": made["notes"]}
    said = {key: data[key] for key in ("model", "step", "by", "bits_per_weight", "loss_before", "loss_after")}
    content = quantized_content(
        module, source.origin, source.tokenizer, method=request.by, said=said, dtype=source.dtype
    )
    return {"out": str(out), "file_bytes": write_quantized(out, content), "notes": []}
