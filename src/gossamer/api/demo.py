"""The demo: a complete training run on the source of Python's own library, in minutes on any machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.spec.config import RunConfig
from gossamer.spec.units import show_seconds
from gossamer.view.end_summary import DemoResult, Reference

PROMPT = "def "

CONFIG: dict[str, Any] = {
    "model": {
        "hf": "llama",
        "config": {
            "vocab_size": 257,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        },
    },
    "data": {"source": "stdlib", "tokenizer": "byte", "sequence": 128},
    "train": {
        "steps": 800,
        "batch": 8,
        "optimizer": {"adamw": {"lr": 2e-3, "weight_decay": 0.1}},
        "lr_schedule": {"cosine": {"warmup": 0.05, "min_lr_factor": 0.05}},
        "precision": "auto",
        "evaluate_every": 200,
        "checkpoint_every": 400,
    },
    "machines": {"processes": 2},
}
USUAL_S = 120.0  # for training; these steps take less on two cores with arithmetic for bf16
BESIDE_S = 40.0  # about: to start, to evaluate at the end, to write a sample and to read the text once more


@dataclass(frozen=True, slots=True)
class Demo:
    """The configuration of the demo, and its time limit: `seconds` of training."""

    seconds: float = USUAL_S

    def config(self) -> RunConfig:
        """Return the configuration: 800 steps, or fewer where `seconds` of training allow fewer (found while training).

        With more than the usual 120 seconds, steps grow in proportion.
        """
        steps = round(CONFIG["train"]["steps"] * max(1.0, self.seconds / USUAL_S))
        train = {**CONFIG["train"], "steps": steps, "seconds": self.seconds}
        return RunConfig.model_validate({**CONFIG, "train": train})

    def promise(self) -> str:
        """Return the message about the expected duration, shown before the start."""
        whole, training = show_seconds(round(self.seconds + BESIDE_S)), show_seconds(round(self.seconds))
        return f"This takes about {whole} at most: up to {training} to train, the rest for start-up and evaluation."


# Validation bits per byte of longer runs of this configuration, steps -> figure, as benchmarks/longer.py writes them
# (`reached`). Not measured yet: the demo says nothing of longer runs while it is empty.
LONGER: dict[int, float] = {}


def closing(summary: Mapping[str, Any], *, text: str, train: bytes, validation: bytes) -> DemoResult:
    """Return the contents of the last panel: validation bits per byte beside those of simple statistics of the same
    text.
    """
    from gossamer.data import statistics

    found = statistics(train, validation)
    run_dir = summary["directory"]
    return DemoResult(
        bits_per_byte=summary["validation_bits_per_byte"],
        references=(
            Reference(name="order 0", bits_per_byte=found.order0, note="how often each byte occurs"),
            Reference(name="order 2", bits_per_byte=found.order2, note="given the two bytes before"),
            Reference(name="zlib -9", bits_per_byte=found.zlib, note="for a longer run"),
            Reference(name="xz", bits_per_byte=found.xz, note="for a longer run"),
        ),
        prompt=PROMPT,
        sample=text,
        checkpoint=summary["checkpoint"],
        seconds=summary["seconds"],
        outlook=outlook(summary, {"zlib": found.zlib, "xz": found.xz}),
        try_next=(
            *activation(),
            (f'gossamer sample {run_dir} "class "', "more text from this model"),
            (f"gossamer export {run_dir} --to hf my-model", "a folder that transformers loads"),
            (
                f"gossamer resume {run_dir} train.steps={4 * summary['steps']} train.seconds=0",
                "train on, four times as long",
            ),
            ("gossamer init pretrain", "a run.yaml of your own, with comments; then: gossamer train run.yaml"),
        ),
    )


def activation() -> tuple[tuple[str, str], ...]:
    """Return the command that puts `gossamer` on the shell's path; none where it is there. `make demo` does without."""
    script = Path(sys.prefix, "bin", "activate")
    if shutil.which("gossamer") is not None or not script.is_file():
        return ()
    here = os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)
    return ((f"source {here}", "first, in every new shell: puts gossamer on the path"),)


def outlook(summary: Mapping[str, Any], marks: Mapping[str, float]) -> str:
    """Return a sentence about longer runs; "" if none is known.

    It names, for each mark in bits per byte, the steps to pass it and their time at this run's pace.
    """
    pace_s = summary["seconds"] / max(1, summary["steps"])
    said = []
    for name, bits in marks.items():
        steps = next((steps for steps, reached in sorted(LONGER.items()) if reached < bits), None)
        if steps is not None:
            said.append(f"{name} after {steps:,} steps, about {show_seconds(pace_s * steps)} here")
    return f"A longer run passes {' and '.join(said)}." if said else ""
