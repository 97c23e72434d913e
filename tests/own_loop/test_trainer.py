"""The Trainer subclass of docs/explanation/frameworks.md, as it stands there, beside the Trainer's DDP on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.nightly  # a minute of processes that import transformers
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "frameworks.md"
SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

{block}

which, accumulate, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
draw = torch.Generator().manual_seed(1)
rows = []
for _ in range(64):
    ids = torch.randint(64, (16,), generator=draw)
    labels = ids.clone()
    labels[: int(torch.randint(0, 12, (1,), generator=draw))] = -100
    rows.append({{"input_ids": ids, "labels": labels}})
arguments = TrainingArguments(
    output_dir=out, per_device_train_batch_size=4 // accumulate, gradient_accumulation_steps=accumulate, max_steps=6,
    learning_rate=1e-2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, seed=3,
)
if which == "lossy":
    GossamerTrainer.exchange = {{"error_feedback": {{"two_shot": "int8"}}}}
trainer = (Trainer if which == "ddp" else GossamerTrainer)(model=model, args=arguments, train_dataset=rows)
trainer.train()
if os.environ["RANK"] == "0":
    torch.save({{name: p.detach().clone() for name, p in model.named_parameters()}}, f"{{out}}.pt")
    print("MODULE", type(trainer.model_wrapped).__name__)
"""


def block() -> str:
    """The code of the page: the one block that defines the subclass."""
    (found,) = (
        one for one in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S) if "_wrap_model" in one
    )
    return str(found)


def trained(folder: Path, which: str, accumulate: int = 1) -> dict[str, torch.Tensor]:
    """The parameters after training on two processes."""
    script, out = folder / "script.py", folder / which
    script.write_text(SCRIPT.format(block=block()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, which, str(accumulate), str(out)], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    module = "DistributedDataParallel" if which == "ddp" else "LlamaForCausalLM"
    assert f"MODULE {module}" in done.stdout
    found: dict[str, torch.Tensor] = torch.load(f"{out}.pt", weights_only=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_trainer_with_gossamer_equals_trainer_with_ddp(tmp_path: Path, accumulate: int) -> None:
    ours, theirs = (trained(tmp_path, which, accumulate) for which in ("gossamer", "ddp"))
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
def test_another_exchange_than_an_all_reduce_is_at_work(tmp_path: Path) -> None:
    ours, theirs = (trained(tmp_path, which) for which in ("lossy", "ddp"))
    far = max(float((ours[name] - parameter).abs().max()) for name, parameter in theirs.items())
    assert 1e-6 < far < 0.05
