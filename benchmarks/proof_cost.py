"""What models in stages pay for being exact or refused: the proof before the first step, and what every step looks for.

    python benchmarks/proof_cost.py [--models gpt2,smollm2,deep] [--stages 2] [--steps 12] [--repeats 3]

Models, of random weights, on random tokens, in float32: GPT-2 of 17 M parameters, the architecture of SmolLM2-135M, and
a GPT-2 of 48 narrow layers. Each is trained in stages, one process a stage, on this machine.

proof     in seconds: all of it, one process's part and the layout's; its micro-batches and builds of the whole model;
          and in median steps. `process_start_s`, from the start of the processes to the call of gossamer.train, and
          `cut_s`, from there to the proof (outline, trace, cuts, meeting), are told apart.
watched   the median step of stages as they are, beside that of the same plan where units are not compared with what
          they did in the trace (model/split/later_effects.py) and backwards with what forwards left (hindsight.py);
          runs take turns, `--repeats` of each. There is no switch for them: this file puts functions that find nothing
          in place of the two that decide.
absent_s  of a median step: in operators on tensors that are absent, timed in runs of their own, of the rank that has
          most of them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from loops.crew import four
from result import publish, ratio

GPT2 = {"n_embd": 256, "n_layer": 6, "n_head": 8, "vocab_size": 50257, "n_positions": 256}
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
DEEP = {"n_embd": 128, "n_layer": 48, "n_head": 4, "vocab_size": 4096, "n_positions": 256}
TINY = {"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 64, "n_positions": 256}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"hf": "gpt2", "config": GPT2},
    "smollm2": {"hf": "llama", "config": SMOLLM2},
    "deep": {"hf": "gpt2", "config": DEEP},
    "tiny": {"hf": "gpt2", "config": TINY},  # to try this file
}
SEQUENCE, BATCH, MICROBATCHES = 128, 8, 4
KINDS = ("checked", "unwatched", "timed")
FIRST = 3  # steps that do not count


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--models", default="gpt2,smollm2,deep")
    read.add_argument("--stages", type=int, default=2)
    read.add_argument("--steps", type=int, default=12)
    read.add_argument("--repeats", type=int, default=3)
    read.add_argument("--one", nargs=4, metavar=("MODEL", "KIND", "FOLDER", "BEGAN"), help="a rank, in this process")
    asked = read.parse_args()
    if asked.one:
        name, kind, folder, began = asked.one
        print(json.dumps(rank(name, kind, Path(folder), float(began), asked.stages, asked.steps)))
        return
    names = asked.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        sys.exit(f"there is no {', no '.join(unknown)}: name some of {', '.join(MODELS)}")
    figures = {name: cost(name, asked.stages, asked.steps, asked.repeats) for name in names}
    if set(names) <= {"gpt2", "smollm2", "deep"}:
        publish("proof_cost", {"stages": asked.stages, "steps": asked.steps, "models": figures})
    else:
        print(json.dumps(figures))


def cost(name: str, stages: int, steps: int, repeats: int) -> dict[str, Any]:
    """Of one model: runs of all kinds by turns."""
    runs: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in KINDS}
    for turn in range(repeats):
        for kind in KINDS:
            runs[kind].append(trained(name, kind, stages, steps))
            print(f"{name} {kind} {turn + 1}/{repeats}: {runs[kind][-1][0]['step_s']:.4f} s a step", file=sys.stderr)
    proofs = [ranks[0] for ranks in runs["checked"]]
    steps_s = {kind: [ranks[0]["step_s"] for ranks in runs[kind]] for kind in KINDS}
    step_s, proof_s = median(steps_s["checked"]), median(one["proof"]["seconds"] for one in proofs)
    return {
        "parameters": proofs[0]["parameters"],
        "step_s": round(step_s, 4),
        "process_start_s": round(median(one["start_s"] for one in proofs), 2),
        "cut_s": round(median(one["cut_s"] for one in proofs), 2),
        "proof": {
            "seconds": round(proof_s, 3),
            "alone_s": round(median(one["proof"]["alone_s"] for one in proofs), 3),
            "divided_s": round(median(one["proof"]["divided_s"] for one in proofs), 3),
            "microbatches": proofs[0]["proof"]["microbatches"],
            "builds": proofs[0]["proof"]["builds"],
            "steps": round(proof_s / step_s, 1),
            "message": proofs[0]["proof"]["message"],
        },
        "watched": {"step": ratio(steps_s["checked"], steps_s["unwatched"]), "steps_s": steps_s},
        "absent_s": round(median(max(one["absent_s"] for one in ranks) for ranks in runs["timed"]), 5),
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def trained(name: str, kind: str, stages: int, steps: int) -> list[dict[str, Any]]:
    """What every rank of a run says of it."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        began, ranks = time.time(), []
        for number in range(stages):
            given = [*("--stages", str(stages)), *("--steps", str(steps)), "--one", name, kind, folder, str(began)]
            env = os.environ | four(number, stages, port) | {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(stages)}
            command = [sys.executable, __file__, *given]
            ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        said = [one.communicate()[0] for one in ranks]
    assert not any(one.returncode for one in ranks), f"{name} {kind} failed, as is said above"
    return [json.loads(text.splitlines()[-1]) for text in said]


def rank(name: str, kind: str, folder: Path, began: float, stages: int, steps: int) -> dict[str, Any]:
    """One rank, in this process."""
    import gossamer
    from gossamer.model.split import stage, unit_calls
    from gossamer.model.split.absent_tensor import AbsentTensor
    from gossamer.run.trainer import Trainer

    spent = Spent(AbsentTensor.__torch_dispatch__)
    patches = []
    if kind == "timed":
        patches = [
            patch.object(AbsentTensor, "__torch_dispatch__", spent),
            patch.object(Trainer, "one_step", spent.around(Trainer.one_step)),
        ]
    if kind == "unwatched":
        deciding = ((stage, "changes_python"), (stage, "runs_in_backward"), (unit_calls, "changes_python"))
        patches = [patch.object(module, one, lambda module: False) for module, one in deciding]
    called = time.time()
    config = {
        "plan": {"mesh": {"pipe": stages}},
        "train": {
            "accumulate": MICROBATCHES,
            "steps": steps,
            "batch": BATCH,
            "evaluate_every": 0,
            "checkpoint_every": 0,
            "prove": "always" if kind == "checked" else "never",
        },
        "run": {"directory": str(folder), "name": "run", "display": "quiet"},
    }
    for one in patches:
        one.start()
    gossamer.train(MODELS[name], Tokens(MODELS[name]["config"]["vocab_size"]), config)
    for one in patches:
        one.stop()
    found = {"absent_s": median(spent.steps[FIRST:] or [0.0])}
    return found | (told(folder / "run" / "records.jsonl", began, called) if os.environ["RANK"] == "0" else {})


def told(file: Path, began: float, called: float) -> dict[str, Any]:
    """What the run's records say."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    step_s = median(one["step_s"] for one in records if one["kind"] == "step" and one["step"] > FIRST)
    start = next(one for one in records if one["kind"] == "start")
    proof = next((one for one in records if one["kind"] == "proof"), None)
    ready = start["time_s"] if proof is None else proof["time_s"] - proof["seconds"]
    return {
        "step_s": step_s,
        "start_s": called - began,
        "cut_s": ready - called,
        "parameters": start["parameters"],
        "proof": proof,
    }


class Tokens:
    """Rows of random tokens, the same on all ranks."""

    def __init__(self, words: int) -> None:
        self.words = words

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        row = torch.randint(self.words, (SEQUENCE,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


class Spent:
    """Around what is called for every operator on absent tensors; seconds of the outermost calls."""

    def __init__(self, real: Any) -> None:
        self.real, self.seconds, self.depth = real, 0.0, 0
        self.steps: list[float] = []

    def around(self, step: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """A step of a trainer, whose part of the seconds is noted."""

        def noted(trainer: Any) -> bool:
            before = self.seconds
            try:
                return step(trainer)
            finally:
                self.steps.append(self.seconds - before)

        return noted

    def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began, self.depth = time.perf_counter(), self.depth + 1
        try:
            return self.real(func, types, args, kwargs)
        finally:
            self.depth -= 1
            self.seconds += (time.perf_counter() - began) if not self.depth else 0.0


if __name__ == "__main__":
    main()
