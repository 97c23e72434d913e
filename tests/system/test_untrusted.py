"""`gossamer train` with a machine that does not do what it should: the fault is in code that the model brings along."""

from __future__ import annotations

import socket

import pytest

from system.command import SIZES, Place, records

# The model of all; on rank 2 the factory also takes a share of the learning rate for itself, from the third step on.
CHEATING = f"""
import os
from transformers import LlamaConfig, LlamaForCausalLM

def make():
    if os.environ["RANK"] == "2":
        from gossamer.sharding import ShardedOptimizer
        update = ShardedOptimizer.update
        def more(self, grads, *, lr_scale, step, apart):
            update(self, grads, lr_scale=lr_scale * (1.01 if step > 1 else 1.0), step=step, apart=apart)
        ShardedOptimizer.update = more
    return LlamaForCausalLM(LlamaConfig(**{SIZES!r}))
"""


@pytest.mark.nightly
def test_a_rate_that_is_one_percent_higher_is_named_before_it_is_saved(place: Place) -> None:
    (place.folder / "cheating.py").write_text(CHEATING)
    config = place.config(model={"factory": "cheating:make"}, train={"verify": {"every": 1}}, machines={"processes": 3})
    done = place.run("train", config)
    assert done.code == 3, done.out[-2000:] + done.err[-2000:]
    (run,) = place.runs()
    (end,) = records(run, "end")
    said = (
        f"step 4: rank 2 on host {socket.gethostname()}: its parameters or optimizer states differ from "
        "those of most ranks (equal after"
    )
    assert said in end["message"]
    assert "rank 2 on host" in done.err.replace("\n", " ")
    assert [one["named"] for one in records(run, "verification")] == [[], [], [], [2]]
    assert [one["step"] for one in records(run, "checkpoint")] == [2]
