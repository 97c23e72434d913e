"""Prune a trained model, the result of a run or a Hugging Face folder, as `gossamer prune` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from gossamer.job.whole_model import (
    CALIBRATION,
    FILES,
    Opening,
    Progress,
    SampledText,
    Sampling,
    WholeModel,
    calibration_batches,
    loss_figures,
    mean_losses,
    open_whole,
    sampled_texts,
)
from gossamer.model.export import config_of, files_beside
from gossamer.model.forward_adapter import caller_of
from gossamer.prune import Pruned, apply_masks, build, prune
from gossamer.run.checkpoint.choice import LATEST
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Written
from gossamer.store.checked_tensors import check_absent
from gossamer.store.start_folder import StartContent, start_state, write_start

MEASURED = 256  # sequences of each text, at most


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


def prune_model(request: PruneRequest, progress: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """Prune the model that `request` names; return losses, sparsities and bytes, JSON-ready.

    Raises BadInput (before anything is computed: for an adapter, a quantized model, a folder that exists, settings),
    CheckpointMismatch.
    """
    began = time.perf_counter()
    pruning = build(request.by, key="--by")
    if request.out is not None:
        check_absent(request.out, key="--out")
    how = Opening(verb="prune", checkpoint=request.checkpoint, sequence=request.sequence)
    source = open_whole(request.source, how)
    sampling = Sampling(
        files=request.data, calibration=request.calibration, measured=request.sequences, seed=request.seed
    )
    calibration, measured = sampled_texts(source, sampling)
    if pruning.needs_text and not calibration:
        raise bad_input(
            wanted="calibration text, for what reaches each layer",
            got="none (only a run has a text of its own)",
            do="name text files with --data, or prune with --by magnitude",
            key=FILES,
        )
    module = source.ready()
    before = mean_losses(module, source.loss, measured, progress, "before")
    made = prune(
        module, pruning, _forwards(module, calibration), lambda done, total: progress("matrices pruned", done, total)
    )
    apply_masks(module, made.masks)
    after = mean_losses(module, source.loss, measured, progress, "after")
    data: dict[str, Any] = {
        "model": str(request.source),
        "step": source.step,
        "by": request.by,
        "sparsity": made.sparsity,
        "masked_weights": sum(one.weights for one in made.matrices),
        **bytes_of(module, made),
        **loss_figures(measured, before, after),
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
        write_start(request.out, pruned_content(module, made, source, method=request.by, said=said))
    return {
        **data,
        "out": None if request.out is None else str(request.out),
        "seconds": time.perf_counter() - began,
    }


def pruned_content(
    module: nn.Module, pruned: Pruned, source: WholeModel, *, method: Written, said: Mapping[str, Any]
) -> StartContent:
    """Return what a start folder of a pruned model holds, which transformers loads where the model is one of its."""
    return StartContent(
        tensors={name: tensor.detach().cpu() for name, tensor in start_state(module)},
        method=method,
        source=source.origin.fingerprint(),
        said=said,
        config=config_of(module),
        attributes=source.start.attributes if source.start is not None else {},
        config_keys=source.start.config_keys if source.start is not None else {},
        files={
            name: file
            for name, file in files_beside(source.origin, source.tokenizer).items()
            if name not in ("config.json", "README.md")
        },
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


def _forwards(module: nn.Module, texts: Sequence[SampledText]) -> list[Callable[[], object]]:
    """Return the forwards over the calibration text."""
    batches = calibration_batches(texts, next(module.parameters()).device)
    return [partial(caller_of(module, batch), module, batch) for batch in batches]
