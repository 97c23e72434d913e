"""`gossamer eval` on what has no loss on a text: random weights, and runs that compare answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer.job.text_evaluation import evaluate_model
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.view.run_directory import RunDirectory


def test_a_folder_without_weights_is_not_given_random_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 64, "hidden_size": 32}))
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(BadInput, match=r"wanted weights in .*, got a config\.json without weights"):
        evaluate_model(
            tmp_path, [str(tmp_path / "a.txt")], sequence=8, sequences=None, progress=lambda name, done, total: None
        )


def test_a_run_of_pairs_is_refused_without_files(tmp_path: Path) -> None:
    from gossamer.job.text_evaluation import _own_texts

    config = RunConfig.model_validate({"data": {"source": "pairs:a.jsonl"}, "train": {"loss": "dpo"}})
    with pytest.raises(BadInput, match="got none, and the run compared pairs of answers, whose loss is no loss on a"):
        next(_own_texts(RunDirectory(tmp_path), config, None, 4))
