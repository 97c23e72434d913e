"""Rounds: one side of a comparison, trained in fresh processes, whose rank 0 prints its figures as its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path


def one_round(
    script: str, kind: str, *, ranks: int, steps: int, env: Mapping[str, str], limit_s: float = 900.0
) -> dict[str, float]:
    """Run `script --round kind` as `ranks` processes that find each other by their environment; rank 0's figures."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, script, "--round", kind, "--steps", str(steps)]
        shared = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(20000 + os.getpid() % 10000),
            "FOLDER": folder,
            **env,
        }
        processes = [
            subprocess.Popen(
                argv, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
            for rank in range(ranks)
        ]
        said = [process.communicate(timeout=limit_s)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), said
    return json.loads(said[0].splitlines()[-1])


class Tokens:
    """A fixed set of sequences; both sides read rows by index from it."""

    def __init__(self, count: int, sequence: int, vocabulary: int) -> None:
        import torch

        seed = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, vocabulary, (count, sequence), generator=seed)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def run_section() -> dict[str, str]:
    """Where our side of a round keeps its records."""
    return {"directory": os.environ["FOLDER"], "name": "round", "display": "quiet"}


def step_times() -> list[float]:
    """Seconds of every step of our side of this round."""
    files = Path(os.environ["FOLDER"]).glob("*/records.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [record["step_s"] for record in lines if record["kind"] == "step"]
