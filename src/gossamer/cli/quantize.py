"""The command `gossamer quantize`: the weights of a trained model in integers of 2 to 8 bits, at one or more widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.api import verbs
from gossamer.cli.evaluate import progress_bars
from gossamer.cli.losses import check_counts, losses_told
from gossamer.cli.output import CommandResult, Json, table
from gossamer.settings.written_method import written_method
from gossamer.spec.errors import bad_input
from gossamer.spec.units import show_bytes, show_seconds
from gossamer.view.screen import Screen

_SHOWN = 6  # layers, those of the largest errors
_MANY_ZEROS = 0.001  # share of all weights
_NAME_FILES = "name files after the model"


def quantize(
    source: Path,
    /,
    *data: str,
    by: str = "gptq",
    bits: str = "4",
    group: int = 64,
    symmetric: bool = False,
    budget: float | None = None,
    out: Path | None = None,
    calibration: int = 128,
    sequence: int | None = None,
    sequences: int = 1000,
    checkpoint: str = "latest",
    json: Json = False,
) -> CommandResult:
    """Quantize a trained model: size and loss before and after, e.g. `gossamer quantize runs/NAME --bits 4 --out DIR`.

    Linear layers become integers of 2 to 8 bits; embeddings, norms and the head stay. What is written is loaded by
    `gossamer eval DIR`, `sample`, `chat`, `export`, and as model.hf under an adapter.

    Parameters
    ----------
    source
        A run directory, a Hugging Face folder or a GGUF file, in full precision.
    data
        Text files: four fifths calibrate, the rest measures the loss. Default: of a run its training text and its
        validation sets.
    by
        A method of `gossamer methods quantize`: gptq (needs text) or round_to_nearest; or with its settings as JSON,
        '{"gptq": {"order": "activation"}}'.
    bits
        Of an integer, 2 to 8. Several, 2,3,4: --out is a folder of the integers of each, for model.adapter qfa.
    group
        Neighbors in a row that share a scale, a multiple of 8; 0: a whole row.
    symmetric
        Grids that are symmetric about zero, which have no minimum to store.
    budget
        Of a run with model.adapter qfa: average bits of the subnet to look for and to write.
    out
        A new folder, or a new FILE.gguf where a type of GGUF holds these integers exactly. Default: nothing is written.
    calibration
        Sequences of text that calibrate, in all.
    sequence
        Tokens of a sequence. Default: as in training; of other models 1024 at most.
    sequences
        At most so many sequences of every text are measured.
    checkpoint
        latest, best (of a run with train.keep_best) or the step of a checkpoint.
    """
    check_counts(calibration=calibration, sequences=sequences, sequence=sequence)
    with progress_bars() as tick:
        found = verbs.quantize(
            source,
            by=written_method(by, key="--by"),
            bits=_bits(bits),
            group=group,
            symmetric=symmetric,
            budget=budget,
            data=data,
            out=out,
            calibration=calibration,
            sequence=sequence,
            sequences=sequences,
            checkpoint=checkpoint,
            progress=tick,
        )
    return CommandResult(found, _told(found), is_report=True)


def _bits(written: str) -> int | tuple[int, ...]:
    """Return the bits, or those of several widths. Raises BadInput for what is no number."""
    try:
        found = tuple(int(one) for one in written.split(","))
    except ValueError:
        do = "write --bits 4, or --bits 2,3,4"
        raise bad_input(wanted="a number, or several with commas", got=written, do=do, key="--bits") from None
    return found if len(found) > 1 else found[0]


def _told(data: Mapping[str, Any]) -> str:
    if "widths" in data:
        return _told_of_widths(data)
    step = "" if data["step"] is None else f", step {data['step']}"
    layers = data["layers"]
    before, after = data["bytes_before"], data["bytes_after"]
    if "budget" in data:
        return "\n".join([f"{data['model']}{step}, in {show_seconds(data['seconds'])}", *_told_of_subnet(data)])
    said = [
        f"{data['model']}{step}, in {show_seconds(data['seconds'])}",
        f"{len(layers)} linear layers at {data['bits_per_weight']:.2f} bits per weight, {len(data['kept'])} other "
        f"matrices stay; {show_bytes(before)} -> {show_bytes(after)} ({after / before:.0%})",
    ]
    said += [losses_told(data["texts"], name_files=_NAME_FILES), _worst(layers)]
    said += [f"note: {name}: {one}" for name, one in _remarks(layers)]
    return "\n".join([*said, *_told_of_zeros(layers), *_told_of_target(data)])


def _told_of_zeros(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a note on weights of a pruned model that are not 0 any more; some are 0 by chance in any model."""
    filled = sum(one["zeros_filled"] for one in layers)
    share = filled / sum(one["shape"][0] * one["shape"][1] for one in layers)
    if share < _MANY_ZEROS:
        return []
    return [
        f"note: {share:.0%} of the weights were 0, as a pruned model has them, and are not any more "
        "(--by round_to_nearest --symmetric keeps zeros)"
    ]


def _told_of_subnet(data: Mapping[str, Any]) -> list[str]:
    counts: dict[int, int] = {}
    for one in data["layers"]:
        counts[one["bits"]] = counts.get(one["bits"], 0) + 1
    shown = ", ".join(f"{count} layers of {bits} bits" for bits, count in sorted(counts.items()))
    return [
        f"the best of {data['subnets']} subnets: {data['bits_per_weight']:.3f} bits on average ({shown}); "
        f"{show_bytes(data['bytes_before'])} at the largest widths -> {show_bytes(data['bytes_after'])}",
        losses_told(data["texts"], name_files=_NAME_FILES),
        *_told_of_target(data),
    ]


def _told_of_widths(data: Mapping[str, Any]) -> str:
    step = "" if data["step"] is None else f", step {data['step']}"
    before, widths = data["bytes_before"], data["widths"]
    said = [
        f"{data['model']}{step}, in {show_seconds(data['seconds'])}",
        f"{len(widths[0]['layers'])} linear layers at {', '.join(str(one['bits']) for one in widths)} bits, "
        f"{len(data['kept'])} other matrices stay; {show_bytes(before)} in full precision",
    ]
    rows: list[Sequence[str]] = [("bits", "per weight", "size", "text", "loss before", "after", "difference")]
    for one in widths:
        size = (
            f"{one['bits']}",
            f"{one['bits_per_weight']:.2f}",
            f"{show_bytes(one['bytes_after'])} ({one['bytes_after'] / before:.0%})",
        )
        rows += [(*size, *_losses(text)) for text in one["texts"]] or [(*size, "-", "-", "-", "-")]
    said.append(table(rows, screen=Screen.of()))
    if not widths[0]["texts"]:
        said.append(f"no text: the loss was not measured ({_NAME_FILES})")
    for one in widths:
        said += [f"note: {one['bits']} bits: {name}: {what}" for name, what in _remarks(one["layers"])]
    if data["out"] is not None:
        is_run = data["step"] is not None
        base = f"what gossamer export {data['model']} writes" if is_run else data["model"]
        said += [
            f"{data['out']} is written ({show_bytes(data['file_bytes'])})",
            f"next: train on {base} with model.adapter "
            f"{{qfa: {{integers: {data['out']}, group: {data['group']}, widths: {[one['bits'] for one in widths]}}}}}",
        ]
    return "\n".join(said)


def _losses(text: Mapping[str, Any]) -> tuple[str, ...]:
    before, after = text["loss_before"], text["loss_after"]
    return (text["text"], f"{before:.5f}", f"{after:.5f}", f"{after - before:+.5f}")


def _told_of_target(data: Mapping[str, Any]) -> list[str]:
    if data["out"] is None:
        return []
    written = f"{data['out']} is written ({show_bytes(data['file_bytes'])})"
    return [written, *(f"note: {note}" for note in data["notes"])]


def _worst(layers: Sequence[Mapping[str, Any]]) -> str:
    """Return the layers with the largest errors as a table."""
    order = sorted(layers, key=lambda one: -(one["output_error"] or one["weight_error"]))
    rows: list[Sequence[str]] = [("layers of the largest error", "shape", "weights", "outputs")]
    for one in order[:_SHOWN]:
        outputs = "-" if one["output_error"] is None else f"{one['output_error']:.2%}"
        rows.append((one["name"], "x".join(map(str, one["shape"])), f"{one['weight_error']:.2%}", outputs))
    if len(order) > _SHOWN:
        rows.append((f"... {len(order) - _SHOWN} more (--json)", "", "", ""))
    return table(rows, screen=Screen.of())


def _remarks(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    found = [
        (one["name"], one["said"]) for one in layers if one["said"] and "rounded to nearest, which" not in one["said"]
    ]
    if len(found) > _SHOWN:
        return [*found[:_SHOWN], ("...", f"{len(found) - _SHOWN} more layers (--json)")]
    return found
