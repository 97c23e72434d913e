"""What `gossamer distill` measures before the first step, and what it says while it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gossamer.api import verbs
from gossamer.job.distillation_losses import losses_before
from gossamer.job.found_teacher import find_teacher
from gossamer.spec.config import RunConfig
from run.test_distillation import saved

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def sections(folder: Path) -> dict[str, Any]:
    (folder / "text.txt").write_text("".join(f"{number} and {number * number}.\n" for number in range(300)))
    return {
        "model": {"hf": "llama", "config": SIZES},
        "data": {"source": f"text:{folder / 'text.txt'}", "tokenizer": "byte", "sequence": 16, "validation": 0.2},
        "train": {"steps": 1, "batch": 2, "evaluate_sequences": 8, "loss": {"kl": {"teacher": str(folder / "large")}}},
        "run": {"directory": str(folder / "runs"), "display": "plain"},
    }


def test_losses_are_measured_and_every_part_is_told(tmp_path: Path) -> None:
    teacher, told = saved(tmp_path / "large", 257), list[tuple[str, int, int]]()
    config = RunConfig.model_validate(sections(tmp_path))
    found = losses_before(config, teacher, lambda *one: told.append(one))
    assert list(dict.fromkeys(what for what, _, _ in told)) == [
        "reads the data",
        "makes the teacher ready",
        "measures the teacher on validation before the first step, sequences",
        "makes the student ready",
        "measures the student on validation before the first step, sequences",
    ]
    assert told[2][1:] == (0, 8) and told[-1][1:] == (8, 8)
    (one,) = found.values()
    ids = torch.tensor([[*(tmp_path / "text.txt").read_bytes()]])
    with torch.no_grad():
        whole = float(find_teacher(teacher).module(ids[:, -400:], labels=ids[:, -400:]).loss)
    assert one["teacher"] == pytest.approx(whole, rel=0.2) and abs(one["student"] - one["teacher"]) > 0.1


def test_the_command_says_what_it_does_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gossamer.api import verbs as called

    class Trained(Exception):
        pass

    def train(resolved: object) -> dict[str, Any]:
        raise Trained

    saved(tmp_path / "large", 257)
    given = sections(tmp_path)
    for display in ("plain", "quiet"):
        given["run"]["display"] = display
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
        monkeypatch.setattr(called, "train_command", train)
        with pytest.raises(Trained):
            verbs.distill(tmp_path / "large", tmp_path / "run.yaml", by="kl")
        said = capsys.readouterr().out
        assert ("info       distill: measures the teacher on validation" in said) == (display == "plain")
        assert (said == "") == (display == "quiet")
