"""What the studies of pruning share: models trained here on real text, and recovery of a pruned model by a few steps.

The text is that of `claims._lm`, bytes of the standard library. Seconds are those of the processor, evaluations left
out.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from claims._lm import text

CONTEXT, ROWS = 128, 16
HELD = 128  # sequences of the validation text
CALIBRATION = 32  # sequences of the training text
TUNING_SEED = 100  # of the data while rates are tuned; no seed that is reported
Masks = Mapping[str, Tensor]
Logits = Callable[[nn.Module, Tensor], Tensor]


def drawn(seed: int, steps: int, rows: int = ROWS) -> Iterator[Tensor]:
    """Yield `steps` batches (rows, CONTEXT + 1) of the training text."""
    source, generator = text()[0], torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(source) - CONTEXT - 1, (rows,), generator=generator)
        yield source[starts[:, None] + torch.arange(CONTEXT + 1)]


def mean_loss(logits: Tensor, rows: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_loss(module: nn.Module, logits: Logits) -> float:
    """Return nats per byte on evenly spaced sequences of the validation text."""
    held, was = text()[1], module.training
    module.eval()
    starts = torch.linspace(0, len(held) - CONTEXT - 1, HELD).long()
    parts = held[starts[:, None] + torch.arange(CONTEXT + 1)].split(32)
    found = sum(float(mean_loss(logits(module, part[:, :-1]), part)) for part in parts) / len(parts)
    module.train(was)
    return found


def calibration(module: nn.Module, logits: Logits, seed: int) -> list[Callable[[], object]]:
    """Return the forwards over `CALIBRATION` sequences that a seed draws."""
    return [partial(logits, module, rows[:, :-1]) for rows in drawn(1_000_000 + seed, CALIBRATION // 8, 8)]


def stepped(
    module: nn.Module,
    objective: Callable[[Tensor], Tensor],
    *,
    rate: float,
    steps: int,
    seed: int,
    masks: Masks | None = None,
) -> dict[str, float]:
    """Train what requires a gradient; return seconds and the number of parameters. Masked weights stay where they are.

    AdamW without decay, the rate up over a tenth of the steps and linearly down to 0, gradients clipped to norm 1.
    """
    torch.set_num_threads(1)
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    rule = torch.optim.AdamW(trained.values(), lr=rate, weight_decay=0.0, betas=(0.9, 0.95))
    seconds = 0.0
    for step, rows in enumerate(drawn(seed, steps)):
        began = time.process_time()
        scale = min((step + 1) / max(1, steps // 10), (steps - step) / (steps - steps // 10))
        rule.param_groups[0]["lr"] = rate * scale
        rule.zero_grad()
        objective(rows).backward()
        for name, mask in (masks or {}).items():
            if (grad := trained[name].grad) is not None:
                grad.masked_fill_(~mask, 0.0)
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        rule.step()
        seconds += time.process_time() - began
    return {"seconds": round(seconds, 2), "parameters": sum(one.numel() for one in trained.values())}


def kept_model(name: str, module: nn.Module, train: Callable[[], object]) -> nn.Module:
    """Train `module`, or load what it became before: a study that was ended goes on with the same model.

    name: of the model and its training; it is kept in the user's cache.
    """
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    file = Path(home, "gossamer-grow_shrink", "models", f"{name}, torch {torch.__version__}.safetensors")
    if file.exists():
        load_model(module, file)
        return module
    train()
    file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_suffix(".partial")
    save_model(module, str(partial_file))
    partial_file.rename(file)
    return module


def copied(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def zeros_kept(module: nn.Module, masks: Masks) -> bool:
    """Return whether all pruned weights are +0, bit for bit."""
    params = dict(module.named_parameters())
    return all(not bool(params[name].detach()[~mask].view(torch.int32).any()) for name, mask in masks.items())
