"""Quantize a trained model at several widths, for `model.adapter: qfa`: `gossamer quantize --bits 2,3,4` does it.

Each width is quantized by itself, of the weights in full precision: its integers are those of that width alone.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from gossamer.job.quantization import (
    QuantizeRequest,
    calibration_of,
    check_calibration,
    layer_figures,
    open_source,
    stored_bytes,
)
from gossamer.job.whole_model import Progress, calibration_batches, loss_figures, mean_losses, sampled_texts
from gossamer.model.integer_widths import integers_of, weight_checksums
from gossamer.quantize import Quantizer, build
from gossamer.quantize.model.layers import quantize_layers
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import MethodConfig
from gossamer.store.checked_tensors import check_absent
from gossamer.store.integers_folder import IntegersContent, write_integers


def quantize_widths(
    request: QuantizeRequest, widths: Sequence[int], progress: Progress = lambda what, done, total: None
) -> dict[str, Any]:
    """Quantize the model that `request` names at each of `widths` bits; return the figures of each, JSON-ready.

    `request.out` becomes a folder of integers. Raises BadInput, before anything is computed, for what no supernet can
    hold, and as `quantize_model` does.
    """
    began = time.perf_counter()
    quantizers = _quantizers(request, widths)
    if request.out is not None:
        check_absent(request.out, key="--out")
    source = open_source(request)
    calibration, measured = sampled_texts(source, request.sampling)
    check_calibration(quantizers[0], calibration)
    module = source.ready()
    bytes_before = stored_bytes(module, source.dtype)
    before = mean_losses(module, source.loss, measured, progress, "before")
    batches = list(calibration_batches(calibration, next(module.parameters()).device))
    tensors: dict[str, Tensor] = {}
    found: list[dict[str, Any]] = []
    kept: tuple[str, ...] = ()
    for quantizer in quantizers:
        what = f"{quantizer.bits} bits"
        made: nn.Module = copy.deepcopy(module)
        report = quantize_layers(
            made,
            quantizer,
            calibration_of(made, batches),
            progress=lambda done, total, what=what: progress(what, done, total),  # type: ignore[misc]
        )
        after = mean_losses(made, source.loss, measured, progress, what)
        kept = report.kept
        found.append(
            {
                "bits": quantizer.bits,
                "bits_per_weight": report.bits_per_weight,
                "bytes_after": stored_bytes(made, source.dtype),
                **loss_figures(measured, before, after),
                "layers": layer_figures(report),
            }
        )
        if request.out is not None:
            tensors |= {name: one.cpu() for name, one in integers_of(made, quantizer.bits).items()}
    data: dict[str, Any] = {
        "model": str(request.source),
        "step": source.step,
        "by": request.by,
        "group": quantizers[0].group,
        "bytes_before": bytes_before,
        "calibration_tokens": sum(one["input_ids"].numel() for one in batches),
        "widths": found,
        "kept": [*kept],
        "out": None if request.out is None else str(request.out),
    }
    if request.out is not None:
        content = IntegersContent(
            tensors=tensors,
            method=request.by,
            group=quantizers[0].group,
            widths=widths,
            layers=[one["name"] for one in found[0]["layers"]],
            weights=weight_checksums(module),
            said={key: data[key] for key in ("model", "step", "by", "calibration_tokens")},
        )
        data["file_bytes"] = write_integers(request.out, content)
    return {**data, "seconds": time.perf_counter() - began}


def _quantizers(request: QuantizeRequest, widths: Sequence[int]) -> list[Quantizer]:
    """Return the quantizer of each width. Raises BadInput for what no supernet can hold."""
    method = MethodConfig.parse(request.by, key="--by")
    for is_wrong, wanted, got, do, key in (
        (
            len(widths) < 2 or list(widths) != sorted(set(widths)),
            "several widths, rising",
            ",".join(map(str, widths)),
            "write 2,3,4",
            "--bits",
        ),
        (
            "bits" in method.parameters,
            "the bits of an integer in one place",
            f"bits in --by beside --bits {','.join(map(str, widths))}",
            "leave them out of --by",
            "--by",
        ),
        (
            request.budget is not None,
            "--bits of one width beside --budget, which looks for a subnet of a run of qfa",
            ",".join(map(str, widths)),
            "leave --bits out, or --budget",
            "--bits",
        ),
        (
            request.out is not None and request.out.suffix == ".gguf",
            "a folder for integers of several widths",
            str(request.out),
            "name a folder",
            "--out",
        ),
    ):
        if is_wrong:
            raise bad_input(wanted=wanted, got=got, do=do, key=key)
    found = [build({method.name: {**method.parameters, "bits": bits}}, key="--by") for bits in widths]
    if found[0].symmetric:
        raise bad_input(
            wanted="grids with a minimum, as the adapter qfa has them at every width",
            got="--symmetric",
            do="leave it out, or quantize at one width",
            key="--symmetric",
        )
    return found
