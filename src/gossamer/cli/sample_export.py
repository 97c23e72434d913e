"""The commands `gossamer sample` and `gossamer export`: generate text with a trained model, or write its weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from gossamer.api import verbs
from gossamer.cli.output import CommandResult, Json, write_piece
from gossamer.spec.errors import bad_input


def sample(
    run_dir: Path,
    prompt: str,
    /,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    checkpoint: str = "latest",
    json: Json = False,
) -> CommandResult:
    """Generate text from a prompt with the model of a run, e.g. `gossamer sample runs/NAME "def "`.

    Parameters
    ----------
    run_dir
        The run: its folder, a unique part of its name in runs/, or "latest".
    prompt
        The text to continue.
    max_new_tokens
        How many tokens to generate, at most.
    temperature
        0: always the likeliest token; 1: as likely as the model says.
    top_k
        Choose among so many likeliest tokens; 0: among all.
    seed
        The same seed gives the same text.
    checkpoint
        latest, best (of a run with train.keep_best) or the step of a checkpoint.
    """
    for name, value, least in (
        ("max-new-tokens", max_new_tokens, 1),
        ("temperature", temperature, 0),
        ("top-k", top_k, 0),
    ):
        if not value >= least:
            raise bad_input(
                wanted=f"a number >= {least}", got=f"{value:g}", do=f"give {least} or more", key=f"--{name}"
            )
    if sys.stdout.isatty() and not json:
        write_piece(prompt)
        for piece in verbs.stream(
            run_dir,
            prompt,
            tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            checkpoint=checkpoint,
        ):
            write_piece(piece)
        write_piece("\n")
        return CommandResult({})
    said = verbs.sample(
        run_dir,
        prompt,
        tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        checkpoint=checkpoint,
    )
    return CommandResult({"prompt": prompt, "text": said}, prompt + said)


def export(
    run_dir: Path,
    target: Path,
    /,
    *,
    to: Literal["hf", "peft", "gguf", "side"],
    type: Literal["f16", "q8_0"] | None = None,
    checkpoint: str = "latest",
    json: Json = False,
) -> CommandResult:
    """Export the model of a run: `gossamer export runs/NAME --to hf DIR`, or `--to gguf FILE` for llama.cpp.

    Parameters
    ----------
    run_dir
        The run: its folder, a unique part of its name in runs/, or "latest".
    target
        A folder (hf) or file (gguf) that does not exist yet.
    to
        hf: weights, config and tokenizer for Hugging Face transformers, an adapter merged into the weights. peft: the
        adapter alone, for Hugging Face peft. gguf: one file for llama.cpp. side: the side network alone, which
        gossamer.model.side_folder.load_side puts beside its model.
    type
        The type of the matrices in a GGUF file: f16, or q8_0 (8 bits in blocks of 32).
    checkpoint
        latest, best (of a run with train.keep_best) or the step of a checkpoint.
    """
    data = verbs.export(run_dir, target, to=to, type=type, checkpoint=checkpoint)
    said = [f"{target} is written: {data['load']}", *(f"note: {note}" for note in data.get("notes", ()))]
    return CommandResult(data, "\n".join(said), is_report=True)
