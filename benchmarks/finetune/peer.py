"""What a host runs for the peer: `python -m finetune.peer FOLDER METHOD STEPS WARM`; its last line is a JSON object.

The loop that a careful user writes around transformers and peft: the same rows, fused AdamW, clipping, and one
loss.item() a step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from finetune import setting
from peak import resident_peak_bytes


def main() -> None:
    folder, method, steps, warm = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(setting.SEED)
    model, version = made(folder, method)
    params = [p for p in model.parameters() if p.requires_grad]
    update = torch.optim.AdamW(
        params, lr=setting.LR[method], betas=setting.BETAS, weight_decay=setting.WEIGHT_DECAY, fused=True
    )
    rows = batches(folder)
    times, losses = [], []
    for step in range(warm + steps):
        began = time.perf_counter()
        loss = model(**rows(step), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, setting.CLIP)
        update.step()
        update.zero_grad(set_to_none=True)
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    said = {
        "steps_s": [round(one, 4) for one in times[warm:]],
        "step_s": median(times[warm:]),
        "peak_bytes": resident_peak_bytes(),
        "sent_bytes": 0,
        "loss": losses[-1],
        "version": version,
    }
    print("\n" + json.dumps(said), flush=True)


def made(folder: Path, method: str) -> tuple[Any, str]:
    """Return the model of a method, and the versions that it is of."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).train()
    version = f"transformers {transformers.__version__}"
    if method == "full":
        return model, version
    import peft

    blocks = [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and ".layers." in name]
    config = peft.LoraConfig(r=setting.RANK, lora_alpha=setting.ALPHA, target_modules=blocks)
    return peft.get_peft_model(model, config), f"peft {peft.__version__}, {version}"


def batches(folder: Path) -> Any:
    """Return a function of the step that returns its rows, those that a run of ours on one host sees."""
    from gossamer.job.training_data import corpus_of
    from gossamer.run.batches import Feed, TextBatches
    from gossamer.spec.config import DataSection
    from gossamer.spec.plan import Plan

    corpus = corpus_of(DataSection.model_validate(setting.data_section(folder)))
    feed = Feed(TextBatches(corpus.train), Plan(rows=(setting.ROWS,), microbatches=(1,)), 0, setting.SEED)
    return lambda step: feed.fetch(step)[0].rows


if __name__ == "__main__":
    main()
