"""The commands `gossamer sample` and `gossamer export`: generate text with a trained model, or write its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gossamer.api import verbs
from gossamer.cli.output import CommandResult, Json
from gossamer.spec.errors import bad_input


def sample(
    run_dir: Path,
    text: str,
    /,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    json: Json = False,
) -> CommandResult:
    """Let the model of a run go on with a text, e.g. `gossamer sample runs/NAME "def "`.

    Parameters
    ----------
    run_dir
        The folder that `gossamer train` named.
    text
        What the model goes on from.
    tokens
        How many to generate.
    temperature
        0: always the likeliest token; 1: as likely as the model says.
    top_k
        Choose among so many likeliest tokens; 0: among all.
    seed
        The same seed gives the same text.
    """
    for name, value, least in (("tokens", tokens, 1), ("temperature", temperature, 0), ("top-k", top_k, 0)):
        if not value >= least:
            raise bad_input(wanted=f"a number >= {least}", got=f"{value:g}", do="write one", key=f"--{name}")
    said = verbs.sample(run_dir, text, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    return CommandResult({"prompt": text, "text": said}, text + said)


def export(run_dir: Path, target: Path, /, *, to: Literal["hf"], json: Json = False) -> CommandResult:
    """Write the model of a run as a folder another library loads, e.g. `gossamer export runs/NAME --to hf DIR`.

    Parameters
    ----------
    run_dir
        The folder that `gossamer train` named.
    target
        A folder that does not exist yet.
    to
        hf: weights, config and tokenizer for Hugging Face transformers.
    """
    data = verbs.export(run_dir, target)
    return CommandResult(data, f"{target} is written: {data['load']}", is_report=True)
