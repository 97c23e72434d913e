"""Run a script on two ranks, or alone, and read the parameters that it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import gossamer

Weights = dict[str, torch.Tensor]
_SOURCE = str(Path(gossamer.__file__).parents[1])


def run(
    script: str, folder: Path, *words: str, ranks: int = 2, launcher: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `script` with `words` as its arguments: under torchrun, or by itself where the script starts its ranks."""
    file = folder / "script.py"
    file.write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if launcher and ranks > 1 else []), str(file), *words]
    path = os.pathsep.join([_SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False)


def trained(script: str, folder: Path, *words: str, ranks: int = 2, launcher: bool = True) -> Weights:
    """Return the parameters that rank 0 of the script wrote to the file that its last argument names."""
    out = folder / ("-".join([*words, str(ranks)]) + ".pt")
    done = run(script, folder, *words, str(out), ranks=ranks, launcher=launcher)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found: Weights = torch.load(out, weights_only=True)
    return found


def distance(ours: Weights, theirs: Weights) -> float:
    """Return the largest difference of a parameter."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - parameter).abs().max()) for name, parameter in theirs.items())
