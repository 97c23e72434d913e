"""The command `gossamer grow`: a larger model that starts where a smaller one ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.api import verbs
from gossamer.cli.output import CommandResult, Json
from gossamer.spec.units import show_bytes


def grow(
    checkpoint_or_model: Path,
    /,
    *,
    to: Path,
    by: str = "lemon",
    out: Path | None = None,
    checkpoint: str = "latest",
    dry_run: bool = False,
    json: Json = False,
) -> CommandResult:
    """Make a larger model of a smaller one, e.g. `gossamer grow runs/NAME --to large.yaml --by lemon`.

    Parameters
    ----------
    checkpoint_or_model
        The small model: a run directory, a Hugging Face folder or a GGUF file.
    to
        The configuration of the run that trains the large one; its `model` is the target.
    by
        A method of `gossamer methods grow`, with settings as in a configuration: "{lemon: {depth: 2}}".
    out
        The start folder to write. Default: grown-NAME in the current folder.
    checkpoint
        latest, best (of a run with train.keep_best) or the step of a checkpoint.
    dry_run
        Compute and prove, and write nothing.
    """
    data = verbs.grow(checkpoint_or_model, to, by, out=out, checkpoint=checkpoint, dry_run=dry_run)
    return CommandResult(data, _told(data), is_report=data["written"] is not None)


def _told(data: Mapping[str, Any]) -> str:
    step = "" if data["step"] is None else f", step {data['step']}"
    said = [
        f"{data['source']}{step}: {data['source_parameters']:,} parameters, "
        f"{data['target']} has {data['target_parameters']:,} ({data['method']})"
    ]
    for name, label in (("width", "width"), ("blocks", "blocks")):
        if name in data and data[name][0] != data[name][1]:
            said.append(f"{label} {data[name][0]} -> {data[name][1]}")
    if data.get("logit_difference") is not None:
        stored = data.get("logit_difference_as_stored")
        said.append(
            f"logits differ by {data['logit_difference']:.2g} in {data['proved_in']}"
            + (f", by {stored:.2g} as stored" if stored is not None else "")
            + f" (largest logit {data['largest_logit']:.3g})"
        )
    if "eps" in data:
        said.append(f"the epsilon of norms becomes {', '.join(f'{one:g}' for one in data['eps'])}")
    if "advised_source_tokens" in data:
        said.append(
            f"train the small model for about {data['advised_source_tokens']:,} tokens of the target's "
            f"{data['target_tokens']:,} (the paper's equation says {data['paper_source_tokens']:.3g})"
        )
    if data["moments"]:
        said.append(f"the optimizer's {', '.join(data['moments'])} are grown too")
    said += [f"note: {remark}" for remark in data["remarks"]]
    if data["written"] is None:
        said.append("nothing was written (--dry-run)")
    else:
        said += [f"{data['written']} is written ({show_bytes(data['bytes'])}). To go on:", f"  {data['next']}"]
    return "\n".join(said)
