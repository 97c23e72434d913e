"""One process of a trial, and what a run leaves behind."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from loops.rank import Outcome
from proof import plain
from proof.habit import Habit
from proof.scene import BATCH, EVALUATE_EVERY, EVALUATED, MICROBATCHES, SAMPLED, SEED, STEPS

LOOKED = {"evaluate_every": EVALUATE_EVERY, "evaluate_sequences": EVALUATED, "sample_max_new_tokens": SAMPLED}
WAIT_S = 20.0  # for a message, before its sender is given up


def run_plain(habit: Habit, told: Mapping[str, Any], replicas: int = 1) -> Outcome:
    """`state` is what plain.train says, `notes` the names that a refusal may give."""
    module = plain.model_of(habit, plain.corpus_of(told) if told else None)
    names = {name for name, _ in (*module.named_modules(), *module.named_parameters(), *module.named_buffers())}
    kinds = {type(inner).__name__ for inner in module.modules()}
    state = plain.train(habit, told, replicas)
    return Outcome(ending="returned", state=state, notes=json.dumps(sorted((names | kinds) - {""})))


def run_ours(habit: Habit, told: Mapping[str, Any], *, resume: bool) -> Outcome:
    """One rank under the configuration `told`; "refused" is what the command line ends with exit code 2 for."""
    import gossamer
    from gossamer.spec.errors import BadInput, PeerLost, StepRejected

    data = told["data"]["source"] if "data" in told else habit.data()
    try:
        gossamer.train({"factory": habit.written}, data, told, resume="auto" if resume else None)
    except BadInput as error:
        return Outcome(ending="refused", said=str(error))
    except StepRejected as error:
        return Outcome(ending="rejected", said=str(error))
    except PeerLost as error:
        return Outcome(ending="lost", said=str(error))
    except BaseException:
        return Outcome(ending="crash", said=traceback.format_exc())
    return Outcome(ending="returned")


def knows_proof() -> bool:
    """Whether `train.prove` is a key."""
    from gossamer.spec.config import TrainSection

    return "prove" in TrainSection.model_fields


def settings(habit: Habit, data: Mapping[str, Any], ranks: int, prove: str, folder: str) -> dict[str, Any]:
    """The configuration of a trial; on one rank, that of one process."""
    train = {
        "steps": STEPS,
        "batch": BATCH,
        "optimizer": dict(habit.optimizer),
        "lr_schedule": "constant",
        "max_grad_norm": 0,
        "seed": SEED,
        "on_nonfinite": "stop",
        **(LOOKED | {"sample_prompt": habit.text} if habit.text else {}),
        **habit.train,
        **({"prove": prove} if prove else {}),
    }
    replicas = habit.replicas if ranks > 1 else 1
    train["accumulate"] = MICROBATCHES // replicas
    plan: dict[str, Any] = {}
    if ranks > 1:
        plan |= {"mesh": {"pipe": habit.stages, "replica": replicas}, **habit.plan}
    return {
        "train": train,
        "machines": {"processes": ranks, "timeout_s": WAIT_S},
        "plan": plan,
        **({"data": dict(data)} if data else {}),
        "run": {"directory": folder, "name": "run", "display": "quiet"},
    }


def warned(folder: str) -> str:
    """Every warning of the run."""
    lines = (line for path in Path(folder).glob("*/records.jsonl") for line in path.read_text().splitlines())
    events = (record for record in map(json.loads, lines) if record["kind"] == "event")
    return "; ".join(event["message"] for event in events if event["level"] == "warning")


def lengthen(folder: str) -> None:
    """A run that ended early becomes one that was stopped: on one rank resume="auto" looks for the same steps."""
    for path in Path(folder).glob("*/run.yaml"):
        said = yaml.safe_load(path.read_text())
        said["train"]["steps"] = STEPS
        path.write_text(yaml.safe_dump(said))


def left_behind(folder: str) -> dict[str, Tensor]:
    """As plain.train has it: the losses of the steps that were made, and the model of the last checkpoint."""
    from gossamer.store.checkpoint import latest_good, list_checkpoints

    paths = [found.parent for found in Path(folder).glob("*/records.jsonl")]
    if len(paths) != 1:  # a run that was to be resumed and began anew shows here
        return {}
    (path,) = paths
    records = [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]
    found = dict(_told(records))
    if list_checkpoints(path / "checkpoints"):
        checkpoint, _ = latest_good(path / "checkpoints")
        if checkpoint.step == STEPS:
            names = [name for name in checkpoint.names() if name.startswith("model/")]
            found |= {name.removeprefix("model/"): checkpoint.read(name) for name in names}
    return found


def _told(records: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    yield "loss", torch.tensor([r["loss"] for r in records if r["kind"] == "step"])
    if looked := [r["loss"] for r in records if r["kind"] == "evaluation"]:
        yield "evaluation", torch.tensor(looked)
    if samples := [r["text"] for r in records if r["kind"] == "sample"]:
        yield "sample", torch.stack([plain.as_bytes(text) for text in samples])
