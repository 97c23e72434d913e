"""A Trainer with GossamerCallback beside the same Trainer with its own DDP, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameworks.two_ranks import distance, run, trained

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.nightly  # a minute of processes that import transformers
SCRIPT = """
import os, sys, torch
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from gossamer.frameworks.trainer import GossamerCallback

which, _, how = sys.argv[1].partition("-")  # "ddp", "dense", "lossy"; "resumed", "twice", "late"
accumulate, out = int(sys.argv[2]), sys.argv[3]
torch.manual_seed(int(os.environ.get("RANK", "0")))  # all start from rank 0's values
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
draw = torch.Generator().manual_seed(1)
rows = []
for _ in range(64):
    ids = torch.randint(64, (16,), generator=draw)
    labels = ids.clone()
    labels[: int(torch.randint(0, 12, (1,), generator=draw))] = -100
    rows.append({"input_ids": ids, "labels": labels})

seen = []
if how == "twice":
    next(model.parameters()).register_hook(lambda gradient: seen.append(gradient.norm()))

def make(steps, **more):
    arguments = TrainingArguments(
        output_dir=out + "-" + which, per_device_train_batch_size=4 // accumulate, max_steps=steps, learning_rate=1e-2,
        gradient_accumulation_steps=accumulate, use_cpu=True, report_to=[], disable_tqdm=True, seed=3,
        **{"save_strategy": "no", **more},
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8])
    if which != "ddp":
        lossy = {"error_feedback": {"two_shot": "int8"}}
        trainer.add_callback(GossamerCallback(trainer, exchange=lossy if which == "lossy" else "dense"))
    return trainer

if how == "late":
    trainer = Trainer(model=model, args=make(1).args, train_dataset=rows)
    late = GossamerCallback(trainer)
    trainer.accelerator.prepare_model = trainer.accelerator.prepare_model.args[0]  # as a new Accelerator would be
    trainer.add_callback(late)
    trainer.train()
elif how == "resumed":
    make(3, save_strategy="steps", save_steps=3).train()
    trainer = make(6)
    trainer.train(resume_from_checkpoint=True)
else:
    trainer = make(6, eval_strategy="steps", eval_steps=3)
    trainer.train()
if how == "twice":
    trainer.train()
module = type(trainer.model_wrapped).__name__
assert module == ("DistributedDataParallel" if which == "ddp" and "RANK" in os.environ else "LlamaForCausalLM"), module
if which != "ddp":  # after training a backward pass is this rank's own: it waits for nobody
    if os.environ.get("RANK", "0") == "0":
        trainer.model.zero_grad()
        before = len(seen)
        trainer.model(input_ids=rows[0]["input_ids"][None], labels=rows[0]["labels"][None]).loss.backward()
        assert sum(float(p.grad.abs().sum()) for p in trainer.model.parameters()) > 0
        assert len(seen) == before + (how == "twice")  # the user's own hooks are called again
if os.environ.get("RANK", "0") == "0":
    torch.save({name: p.detach().clone() for name, p in model.named_parameters()}, out)
"""


@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_it_equals_the_trainers_ddp(tmp_path: Path, accumulate: str) -> None:
    ours, theirs = (trained(SCRIPT, tmp_path, which, accumulate) for which in ("dense", "ddp"))
    assert distance(ours, theirs) <= 1e-6


def test_another_exchange_than_an_all_reduce_is_at_work(tmp_path: Path) -> None:
    ours, theirs = (trained(SCRIPT, tmp_path, which, "1") for which in ("lossy", "ddp"))
    assert 1e-6 < distance(ours, theirs) < 0.05


@pytest.mark.parametrize("how", ["resumed", "twice"])
def test_training_on_equals_ddp_that_trains_on(tmp_path: Path, how: str) -> None:
    ours, theirs = (trained(SCRIPT, tmp_path, f"{which}-{how}", "1") for which in ("dense", "ddp"))
    assert distance(ours, theirs) <= 1e-6


def test_one_process_is_a_plain_trainer(tmp_path: Path) -> None:
    ours, theirs = (trained(SCRIPT, tmp_path, which, "1", ranks=1) for which in ("dense", "ddp"))
    assert distance(ours, theirs) == 0.0


def test_a_model_that_is_in_ddp_already_is_refused(tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path, "dense-late", "1", str(tmp_path / "late.pt"))
    assert done.returncode != 0
    assert "construct GossamerCallback(trainer) before trainer.train()" in done.stderr
