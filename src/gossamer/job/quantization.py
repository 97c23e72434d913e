"""Quantize a trained model: the result of a run, a Hugging Face folder or a GGUF file, as `gossamer quantize` does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer.data.tokenizer import parse_tokenizer
from gossamer.job.whole_model import (
    CALIBRATION,
    FILES,
    Opening,
    Progress,
    SampledText,
    Sampling,
    WholeModel,
    calibration_batches,
    is_run,
    loss_figures,
    mean_losses,
    open_whole,
    sampled_texts,
)
from gossamer.model.bit_widths import Widths, best_widths
from gossamer.model.export import config_of, export_hf
from gossamer.model.export_gguf import check_gguf, export_gguf
from gossamer.model.forward_adapter import caller_of
from gossamer.model.origin import origin_of
from gossamer.model.packed_gguf import gguf_type
from gossamer.model.qfa_linear import bit_widths, extract, nbytes_at, qfa_layers, set_widths
from gossamer.model.quantized_folder import quantized_content, stored
from gossamer.quantize import Quantizer, build
from gossamer.quantize.model.layers import Calibration, QuantizeReport, quantize_layers
from gossamer.run.batches import RankBatch
from gossamer.run.checkpoint.choice import LATEST
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.store.checked_tensors import check_absent
from gossamer.store.gguf_write import check_new
from gossamer.store.quantized_folder import write_quantized
from gossamer.store.start_folder import StartFolder
from gossamer.view.run_directory import RunDirectory, open_run

MEASURED = 1000  # sequences of each text, at most


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

    @property
    def sampling(self) -> Sampling:
        """Return which sequences calibrate and measure."""
        return Sampling(files=self.data, calibration=self.calibration, measured=self.sequences)


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
    source = open_source(request)
    calibration, measured = sampled_texts(source, request.sampling)
    check_calibration(quantizer, calibration)
    if request.out is not None and source.start is not None:
        _check_says_eps(source.module, source.start)
    module = source.ready()
    if request.out is not None and request.out.suffix == ".gguf":
        check_gguf(module, source.origin, source.tokenizer)
    bytes_before = stored_bytes(module, source.dtype)
    before = mean_losses(module, source.loss, measured, progress, "before")
    batches = list(calibration_batches(calibration, next(module.parameters()).device))
    report = quantize_layers(
        module,
        quantizer,
        calibration_of(module, batches),
        progress=lambda done, total: progress("quantize", done, total),
    )
    after = mean_losses(module, source.loss, measured, progress, "after")
    data: dict[str, Any] = {
        "model": str(request.source),
        "step": source.step,
        "by": request.by,
        "bits": quantizer.bits,
        "group": quantizer.group,
        "symmetric": quantizer.symmetric,
        "bits_per_weight": report.bits_per_weight,
        "bytes_before": bytes_before,
        "bytes_after": stored_bytes(module, source.dtype),
        **loss_figures(measured, before, after),
        "calibration_tokens": sum(one["input_ids"].numel() for one in batches),
        "layers": layer_figures(report),
        "kept": [*report.kept],
    }
    return {**data, **_write(request, module, source, data), "seconds": time.perf_counter() - began}


def check_calibration(quantizer: Quantizer, calibration: Sequence[SampledText]) -> None:
    """Raise BadInput for no text where the quantizer needs it."""
    if quantizer.needs_inputs and not calibration:
        raise bad_input(
            wanted="calibration text, from whose activations the integers are chosen",
            got="none",
            do="name text files, or use --by round_to_nearest",
            key=FILES,
        )


def calibration_of(module: nn.Module, batches: Sequence[RankBatch]) -> Calibration | None:
    """Return the inputs that calibrate; None without any."""
    return Calibration(caller=caller_of(module, batches[0]), batches=batches) if batches else None


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
        check_absent(request.out, key="--out")
    source = open_source(request)
    calibration, measured = sampled_texts(source, request.sampling)
    module = source.ready()
    layers = bit_widths(module)
    largest = (layers.widths[-1],) * len(layers.names)
    set_widths(module, largest)
    before = mean_losses(module, source.loss, measured, progress, "before")
    bytes_before = nbytes_at(module, largest)
    tried = 0

    def score(widths: Widths) -> float:
        nonlocal tried
        tried += 1
        set_widths(module, widths)
        return sum(mean_losses(module, source.loss, calibration, progress, f"subnet {tried}"))

    chosen, _ = best_widths(layers, budget, score)
    set_widths(module, chosen)
    bytes_after = nbytes_at(module, chosen)
    extract(module, chosen)
    after = mean_losses(module, source.loss, measured, progress, "after")
    data: dict[str, Any] = {
        "model": str(request.source),
        "step": source.step,
        "by": "qfa",
        "budget": budget,
        "bits_per_weight": layers.average(chosen),
        "bytes_before": bytes_before,
        "bytes_after": bytes_after,
        **loss_figures(measured, before, after),
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


def _check_says_eps(module: nn.Module, start: StartFolder) -> None:
    """Raise BadInput for a module of one's own whose start folder says the epsilon of norms: no other folder does."""
    if start.attributes and config_of(module) is None:
        raise bad_input(
            wanted="a model whose config says the epsilon of its norms, which a quantized folder keeps",
            got=f"{type(module).__name__} with {min(start.attributes)} of {start.path}",
            do="measure it without --out, or grow it to a multiple of the width, where no epsilon changes",
            key="--out",
        )


def _check_target(out: Path | None, quantizer: Quantizer) -> None:
    if out is None:
        return
    if out.suffix == ".gguf":
        gguf_type(quantizer.format)
        check_new(out)
    else:
        check_absent(out, key="--out")


def open_source(request: QuantizeRequest) -> WholeModel:
    """Load the model; `budget` goes with a run of the adapter qfa, and with nothing else."""
    place, is_supernet = request.source, False
    if is_run(place):
        section = RunDirectory(open_run(place).path.absolute()).config().model
        is_supernet = section.adapter != "none" and MethodConfig.parse(section.adapter).name == "qfa"
    if is_supernet != (request.budget is not None):
        raise bad_input(
            wanted="--budget with a run of the adapter qfa, and with no other model",
            got=f"no budget with {place}, a run of qfa" if is_supernet else f"a budget with {place}",
            do="give the average bits of its subnet: --budget 3" if is_supernet else "leave it out, and say --bits",
            key="--budget",
        )
    how = Opening(
        verb="quantize",
        checkpoint=request.checkpoint,
        sequence=request.sequence,
        takes_gguf=True,
        takes_adapter=is_supernet,
    )
    return open_whole(place, how)


def stored_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of all parameters and persistent buffers as they are stored, tied ones once."""
    tensors = {one.data_ptr() or id(one): (name, one) for name, one in module.state_dict().items()}
    return sum(stored(name, one, dtype).nbytes for name, one in tensors.values())


def layer_figures(report: QuantizeReport) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name,
            "shape": [*one.shape],
            "bits_per_weight": one.bits_per_weight,
            "weight_error": one.weight_error,
            "output_error": one.output_error,
            "zeros_filled": one.zeros_filled,
            "said": one.said,
        }
        for one in report.layers
    ]


def _write(request: QuantizeRequest, module: nn.Module, source: WholeModel, data: Mapping[str, Any]) -> dict[str, Any]:
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
