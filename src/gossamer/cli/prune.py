"""The command `gossamer prune`: set weights of a trained model to zero, and say what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.api import verbs
from gossamer.cli.evaluate import progress_bars
from gossamer.cli.losses import check_counts, losses_told
from gossamer.cli.output import CommandResult, Json
from gossamer.settings.written_method import written_method
from gossamer.spec.units import show_bytes, show_seconds

_SHOWN = 6  # names of layers, at most


def prune(
    source: Path,
    /,
    *,
    by: str = "wanda",
    sparsity: float | None = None,
    pattern: str = "",
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    data: tuple[str, ...] = (),
    out: Path | None = None,
    calibration: int = 128,
    seed: int = 0,
    sequence: int | None = None,
    sequences: int = 256,
    checkpoint: str = "latest",
    json: Json = False,
) -> CommandResult:
    """Prune a trained model: loss before and after, e.g. `gossamer prune runs/NAME --sparsity 0.5 --out FOLDER`.

    The linear layers of the repeated blocks lose weights, experts included; embeddings, norms, routers and the head
    stay. The folder is loaded by transformers, and as `model.start` of a run that recovers.

    Parameters
    ----------
    source
        A run directory or a Hugging Face folder, in full precision.
    by
        A method of `gossamer methods prune`: wanda, magnitude (needs no text), moe_pruner; or with its settings as
        JSON.
    sparsity
        The fraction of each row that is set to zero. Default: 0.5.
    pattern
        In its place: n:m, n of every m neighbors in a row are kept, such as 2:4.
    include
        Regular expressions of the layers to prune. Default: all linear layers and experts in the blocks.
    exclude
        Regular expressions of layers that stay as they are.
    data
        Text files: four fifths calibrate, the rest measures the loss. Default: of a run its training text and its
        validation sets.
    out
        A new folder for the pruned model and its masks. Default: nothing is written.
    calibration
        Sequences of text that calibrate, in all.
    seed
        Of the choice of these sequences.
    sequence
        Tokens of a sequence. Default: as in training; of other models 1024 at most.
    sequences
        At most so many sequences of every text are measured.
    checkpoint
        latest, best (of a run with train.keep_best) or the step of a checkpoint.
    """
    check_counts(calibration=calibration, sequences=sequences, sequence=sequence)
    with progress_bars() as tick:
        found = verbs.prune(
            source,
            by=written_method(by, key="--by"),
            sparsity=sparsity,
            pattern=pattern,
            include=include,
            exclude=exclude,
            data=data,
            out=out,
            calibration=calibration,
            seed=seed,
            sequence=sequence,
            sequences=sequences,
            checkpoint=checkpoint,
            progress=tick,
        )
    return CommandResult(found, _told(found), is_report=True)


def _told(data: Mapping[str, Any]) -> str:
    step = "" if data["step"] is None else f", step {data['step']}"
    layers, dense, sparse = data["layers"], data["bytes"], data["bytes_sparse"]
    shares = [one["sparsity"] for one in layers]
    spread = f"{min(shares):.1%}" if max(shares) - min(shares) < 5e-4 else f"{min(shares):.1%} to {max(shares):.1%}"
    said = [
        f"{data['model']}{step}, in {show_seconds(data['seconds'])}",
        f"{len(layers)} matrices, {spread} of each are zero ({data['sparsity']:.1%} of {data['masked_weights']:,} "
        f"weights); {show_bytes(dense)}, of which a bit per weight and what is kept are {show_bytes(sparse)} "
        f"({sparse / dense:.0%})",
    ]
    said.append(losses_told(data["texts"], name_files="name files with --data"))
    if data["by_magnitude"]:
        said.append(f"no token reached {_some(data['by_magnitude'])}: pruned by magnitude")
    for why, names in _grouped(data["left_out"]).items():
        said.append(f"left as they are, {why}: {_some(names)}")
    if data["out"] is not None:
        said.append(f"{data['out']} is written: model.start: {data['out']} begins a run with it")
    return "\n".join(said)


def _grouped(left_out: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in left_out:
        found.setdefault(why, []).append(name)
    return found


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more (--json)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
