"""Bits per byte of answers that training never saw, before and after: one seed of one method in a process.

python -m finetune.quality FOLDER METHOD SEED STEPS SEQUENCES
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune import setting


def main() -> None:
    folder, method = Path(sys.argv[1]), sys.argv[2]
    seed, steps, sequences = (int(word) for word in sys.argv[3:6])
    print("\n" + json.dumps(trained(folder, method, seed, steps, sequences)), flush=True)


def trained(folder: Path, method: str, seed: int, steps: int, sequences: int) -> dict[str, Any]:
    """Train by the command line's own path on all cores, and compare the model before and after."""
    import gossamer
    from gossamer.model.origin import origin_of
    from gossamer.settings import Resolved
    from gossamer.spec.config import ModelSection, RunConfig

    with tempfile.TemporaryDirectory() as place:
        config = RunConfig.model_validate(
            {
                "model": setting.model_section(folder, method),
                "data": setting.data_section(folder),
                "train": setting.train_section(method, hosts=1, steps=steps, seed=seed),
                "run": {"directory": place, "name": "run", "display": "quiet"},
            }
        )
        from gossamer.api.verbs import train_command

        done = train_command(Resolved.of(config, origin="benchmark"))
        before = origin_of(ModelSection.model_validate(setting.model_section(folder, method))).build(seed)
        after = gossamer.load(done["directory"]).module
        return {
            "before": bits_per_byte(before, folder, sequences),
            "after": bits_per_byte(after, folder, sequences),
            "steps": steps,
        }


@torch.no_grad()
def bits_per_byte(module: nn.Module, folder: Path, sequences: int) -> float:
    """Return the bits per byte of the held-out answers in the first `sequences` validation sequences."""
    from gossamer.job.training_data import corpus_of
    from gossamer.spec.config import DataSection

    held_out = corpus_of(DataSection.model_validate(setting.data_section(folder))).validation
    module.eval()
    nats, bytes_ = 0.0, 0
    for first in range(0, min(sequences, len(held_out)), setting.ROWS):
        indices = list(range(first, min(first + setting.ROWS, sequences, len(held_out))))
        rows = held_out.batch(indices)
        labels = rows.pop("labels")
        logits = module(**rows, use_cache=False).logits[:, :-1]
        wanted = labels[:, 1:]
        nats += float(nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"))
        bytes_ += held_out.bytes_of(indices)
    return nats / math.log(2) / bytes_


if __name__ == "__main__":
    main()
