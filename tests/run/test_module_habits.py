"""Modules as people write them, in three stages, against a loop of plain torch: a part of benchmarks/proof.py.

The whole of it (benchmarks/proof/pages) takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DAILY = (
    *("last_activations_of_a_block", "blocks_that_skip_themselves", "replicas_batch_norm"),
    "callback_that_collects_tensors",  # refused
)
BY_NIGHT = (
    *("eight_bit_copies", "positions_made_lazily", "old_spectral_norm", "mixtral", "full_backward_hooks_on_blocks"),
    "callback_that_collects_tensors",
)


@pytest.mark.parametrize("some", [DAILY, pytest.param(BY_NIGHT, marks=pytest.mark.nightly)], ids=["daily", "by night"])
def test_habits_are_exact_or_refused(some: tuple[str, ...]) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "proof.py"), "--habits", ",".join(some), "--json"]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["habit"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert set(rows) == set(some)
    bad = [f"{row['habit']}: wanted {row['wanted']}, {row['where']}" for row in rows.values() if not row["good"]]
    assert not bad, "\n".join(bad)
    assert {"equal", "refused"} == {row["result"] for row in rows.values()}
