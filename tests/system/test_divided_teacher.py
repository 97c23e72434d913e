"""`gossamer teach --stage`: processes that each hold a part of a teacher, and a run that learns from all of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import yaml

from gossamer.job.divided_teacher import AskedStage, find_stage
from gossamer.job.found_teacher import find_teacher
from gossamer.job.teacher_facts import digest_of, joined_digest
from gossamer.spec.errors import BadInput
from pool import Pool
from ports import free_port
from run.test_distillation import course, losses, records, saved, sections, taid, train
from system.command import Place, ended
from system.conftest import Trained


def test_a_run_has_the_losses_of_the_whole_teacher(place: Place, pool: Pool, tmp_path: Path) -> None:
    """Two ranks with unequal labels, micro-batches, an adaptive t: the same losses, bit for bit. The last stage is
    started first, and waits.
    """
    teacher, (first, last) = saved(tmp_path / "teacher", 16), (free_port(), free_port())
    where = f"tcp://127.0.0.1:{first}"
    stages = [
        place.start("teach", teacher, "--listen", f"127.0.0.1:{last}", "--stage", "2/2", "--previous", where, "--json"),
        place.start("teach", teacher, "--listen", f"127.0.0.1:{first}", "--stage", "1/2", "--json"),
    ]
    whole = sum(one.nbytes for one in find_teacher(teacher).module.parameters())
    train(pool, 2, tmp_path / "whole", sections(taid(teacher), accumulate=2))
    for line in iter(stages[0].stderr.readline, ""):  # type: ignore[union-attr]
        if "Ctrl-C ends it" in line:
            break
    train(pool, 2, tmp_path / "divided", sections(taid(f"tcp://127.0.0.1:{last}"), accumulate=2))
    assert losses(tmp_path / "divided") == losses(tmp_path / "whole")
    assert course(tmp_path / "divided") == course(tmp_path / "whole")
    said = [one["message"] for one in records(tmp_path / "divided", "event")]
    assert any("in 2 stages, the last one at" in one and "64 bytes a token" in one for one in said)
    for one in stages:
        os.kill(one.pid, signal.SIGTERM)
    (second, theirs), (one, ours) = ((done, done.last()) for done in map(ended, stages))
    assert (second.code, one.code) == (0, 0) and (theirs["stage"], ours["stage"]) == (2, 1)
    assert theirs["held_bytes"] + ours["held_bytes"] == whole == ours["whole_bytes"]
    assert max(theirs["held_bytes"], ours["held_bytes"]) < 0.7 * whole
    assert theirs["students"] == ours["students"] == 2
    assert theirs["tokens"] > 0 == ours["tokens"] and "stage 2 at 127.0.0.1, for student" in one.err


def test_a_run_is_a_teacher_in_stages(trained: Trained, tmp_path: Path) -> None:
    """Of its newest checkpoint, each stage reads its part; a run with an adapter has a part of the weights alone."""
    whole = find_teacher(str(trained.run)).module
    parts = [find_stage(str(trained.run), AskedStage(number, 2), torch.device("cpu")) for number in (1, 2)]
    values = dict(whole.named_parameters())
    for part in parts:
        held = part.stage.parameters()
        assert held and all(torch.equal(one, values[name]) for name, one in held.items())
        assert part.held_bytes == sum(one.nbytes for one in held.values()) < part.whole_bytes
    assert joined_digest(*(part.digest for part in parts)) == digest_of(whole)
    other = trained.copy(tmp_path / "adapted")
    config = yaml.safe_load((other / "run.yaml").read_text())
    config["model"]["adapter"] = "lora"
    (other / "run.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(BadInput, match=r"a run whose checkpoints hold all weights, .* which trained an adapter"):
        find_stage(str(other), AskedStage(1, 2), torch.device("cpu"))
