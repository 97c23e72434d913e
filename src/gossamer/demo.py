"""The demo: the main job end to end on text that every Python carries with it, in under three minutes on two cores."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gossamer.settings import Resolved
from gossamer.spec.config import RunConfig
from gossamer.view.picture import Comparison, demo_panel

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
        "steps": 500,
        "batch": 32,
        "optimizer": {"adamw": {"lr": 2e-3, "weight_decay": 0.1}},
        "schedule": {"cosine": {"warmup": 0.05, "floor": 0.05}},
        "precision": "bf16",
        "evaluate_every": 100,
        "checkpoint_every": 250,
    },
    "machines": {"processes": 2},
    "run": {"name": "demo"},
}


def demo(*, seconds: float | None = None) -> dict[str, Any]:
    """Train, reload, sample, compare. `seconds` shortens or lengthens the run from its usual 100 s."""
    from gossamer import api

    config = RunConfig.model_validate(CONFIG)
    if seconds is not None:
        steps = max(10, round(config.train.steps * seconds / 100))
        config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
    summary = api.train_command(Resolved(config=config, origin={}))
    run_dir = Path(summary["run"])
    text = api.sample(run_dir, PROMPT, tokens=240, temperature=0.7, top_k=40)
    from gossamer.data import statistics
    from gossamer.worker import corpus_of

    corpus = corpus_of(config.data)
    found = statistics(corpus.text("train"), corpus.text("validation"))
    comparison = Comparison(
        model=summary["bits_per_byte"], order0=found.order0, order2=found.order2, zlib=found.zlib, xz=found.xz
    )
    panel = demo_panel(comparison, sample=PROMPT + text, run_dir=run_dir, summary=summary)
    sys.stdout.write(panel)
    return {**summary, "validation_bits_per_byte": summary["bits_per_byte"], "sample": text}
