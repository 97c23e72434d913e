"""Modules as people write them, in three stages, against a loop of plain torch: a part of benchmarks/proof.py.

The whole of it (benchmarks/proof/pages) takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
HABITS = (
    *("eight_bit_copies", "last_activations_of_a_block", "positions_made_lazily", "blocks_that_skip_themselves"),
    *("old_spectral_norm", "mixtral", "replicas_batch_norm", "full_backward_hooks_on_blocks"),
    "callback_that_collects_tensors",  # refused
)


def test_habits_are_exact_or_refused() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "proof.py"), "--habits", ",".join(HABITS), "--json"]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["habit"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert set(rows) == set(HABITS)
    bad = [f"{row['habit']}: wanted {row['wanted']}, {row['where']}" for row in rows.values() if not row["good"]]
    assert not bad, "\n".join(bad)
    assert {"equal", "refused"} == {row["result"] for row in rows.values()}
