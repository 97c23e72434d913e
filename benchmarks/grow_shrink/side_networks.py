"""Side networks UniPT (arXiv:2308.14316) and SHERL (arXiv:2407.07523) beside LoRA, LoRA-FA, a probe and full training.

A small Llama that learnt Python code is adapted to English (the language reference that ships with Python). Kept bytes
are counted, not computed: what autograd saves in one forward, parameters left out, memory that is shared once. Both
papers say: less memory than adapters inside of the model, at a result on par. They have no figure for language models.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from claims import Row, Study
from claims._grid import tuned
from claims._trials import Trials
from gossamer import optimizer as optimizer_methods
from gossamer.model import adapter as adapters
from gossamer.model import side as sides
from gossamer.model.origin import origin_of
from gossamer.spec.config import ModelSection

WIDTH, LAYERS, CONTEXT, ROWS = 96, 4, 128, 8
WIDE, DEEP = 128, 6  # where bytes are counted
CODE = ("email", "xml", "asyncio", "http", "unittest", "importlib", "concurrent")
ADAPTED: Mapping[str, Any] = {
    "full": None,
    "probe": None,
    "lora": {"lora": {"rank": 8}},
    "lora_fa": {"lora_fa": {"rank": 8}},
    "unipt": {"unipt": {"reduction": 4}},
    "sherl": {"sherl": {"reduction": 4, "late": 1}},
}
RATES = {"full": 1e-3, "probe": 4e-3, "lora": 4e-3, "lora_fa": 4e-3, "unipt": 4e-3, "sherl": 4e-3}
PAIRS = (("unipt", "lora"), ("sherl", "lora"), ("unipt", "lora_fa"), ("unipt", "probe"), ("sherl", "unipt"))


def studies(*, quick: bool) -> list[Study]:
    return [
        Study("memory", memory),
        Study("loss", partial(loss, 20 if quick else 400, 10 if quick else 100, 1 if quick else 2)),
    ]


def memory(trials: Trials) -> list[Row]:
    found = trials("kept bytes and seconds", measured)
    rows = []
    for one, other in (("unipt", "lora"), ("unipt", "full"), ("sherl", "lora")):
        ratio = found[one]["kept_bytes"] / found[other]["kept_bytes"]
        rows.append(
            Row(
                method=one,
                claim="bytes kept for backward, measured; holds: below 1, and unipt < sherl < lora < full",
                baseline=other,
                ratio=round(ratio, 4),
                paper_ratio=None,
                setting=f"Llama of {DEEP} layers of {WIDE}, {ROWS} x {CONTEXT} tokens, float32",
                holds=ratio < 1 and _ordered(found),
                details=found,
            )
        )
    return rows


def _ordered(found: Mapping[str, Mapping[str, float]]) -> bool:
    bytes_ = [found[name]["kept_bytes"] for name in ("unipt", "sherl", "lora", "full")]
    return bytes_ == sorted(bytes_)


def loss(before: int, steps: int, seeds: int, trials: Trials) -> list[Row]:
    def once(name: str, rate: float, seed: int) -> dict[str, float]:
        key = f"{name}, {before} and {steps} steps, rate {rate:.4g}, seed {seed}"
        found: dict[str, float] = trials(key, partial(adapted, name, rate, before, steps, seed))
        return found

    def score(name: str) -> Callable[[float], float]:
        return lambda rate: once(name, rate, 0)["loss"]

    grids = tuned({name: score(name) for name in ADAPTED}, RATES, least=3, most=4)
    runs = {name: [once(name, grid.best, seed) for seed in range(seeds)] for name, grid in grids.items()}
    started = trials(f"unadapted, {before} steps", lambda: held(learnt(before, 0)))
    details = {name: {"runs": runs[name], "rates": grids[name].told()} for name in ADAPTED} | {"unadapted": started}
    rows = []
    for one, other in PAIRS:
        each = [a["loss"] / b["loss"] for a, b in zip(runs[one], runs[other], strict=True)]
        rows.append(
            Row(
                method=one,
                claim="loss after adapting; holds: at most 1.01 with every seed",
                baseline=other,
                ratio=round(mean(each), 5),
                paper_ratio=None,
                spread=(round(min(each), 5), round(max(each), 5)),
                seeds=seeds,
                setting=f"Llama of {LAYERS} layers of {WIDTH} after {before} steps of code; {steps} steps of "
                f"{ROWS * CONTEXT:,} bytes of English; seed 0 tuned all",
                holds=max(each) <= 1.01,
                details=details if (one, other) == PAIRS[0] else {},
            )
        )
    return rows


def adapted(name: str, rate: float, before: int, steps: int, seed: int) -> dict[str, float]:
    torch.set_num_threads(1)
    module = with_method(copy.deepcopy(learnt(before, seed)), name, seed)
    began = time.process_time()
    train(module, english()[0], steps, rate, seed)
    seconds = time.process_time() - began
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return {"loss": held(module), "seconds": round(seconds, 2), "trained_parameters": trained}


def with_method(module: nn.Module, name: str, seed: int) -> nn.Module:
    written = ADAPTED[name]
    if name == "probe":
        module.requires_grad_(False)
        module.lm_head.requires_grad_(True)
    elif name in sides.names():
        sides.attach(module, sides.build(written), seed)
    elif name != "full":
        adapters.adapt(module, adapters.build(written), seed)
    return module


@cache
def learnt(steps: int, seed: int, width: int = WIDTH, layers: int = LAYERS) -> nn.Module:
    """Return the Llama after `steps` of code."""
    config = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": 256}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": CONTEXT}
    module = origin_of(ModelSection(hf="llama", config=config)).build(seed)
    return train(module, code(), steps, 3e-3, seed)


def train(module: nn.Module, text: Tensor, steps: int, rate: float, seed: int) -> nn.Module:
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rule = optimizer_methods.build({"adamw": {"lr": rate}})
    state, drawn = rule.init(params), torch.Generator().manual_seed(seed)
    for step in range(steps):
        starts = torch.randint(0, len(text) - CONTEXT, (ROWS,), generator=drawn)
        grads = torch.autograd.grad(loss_of(module, text, starts), list(params.values()))
        by_name = dict(zip(params, grads, strict=True))
        scale = min(1.0, (step + 1) / (0.1 * steps)) * (1 - 0.9 * step / steps)
        rule.update(params, by_name, state, lr_scale=scale, step=step)
    return module


def loss_of(module: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    ids = text[starts[:, None] + torch.arange(CONTEXT)]
    found: Tensor = module(input_ids=ids, labels=ids, use_cache=False).loss
    return found


@torch.no_grad()
def held(module: nn.Module) -> float:
    text = english()[1]
    starts = torch.linspace(0, len(text) - CONTEXT - 1, 128).long()
    return mean(float(loss_of(module, text, part)) for part in starts.split(32))


@cache
def code() -> Tensor:
    root = Path(json.__file__).parents[1]
    files = (file for package in CODE for file in sorted((root / package).rglob("*.py")) if "test" not in file.parts)
    return _bytes(b"\n".join(file.read_bytes() for file in files))


@cache
def english() -> tuple[Tensor, Tensor]:
    """Return the text to adapt to, and that to report on."""
    from pydoc_data.topics import topics

    texts = [topics[name].encode() for name in sorted(topics)]
    kept = [text for at, text in enumerate(texts) if at % 8]
    return _bytes(b"\n".join(kept)), _bytes(b"\n".join(texts[::8]))


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def measured() -> dict[str, dict[str, float]]:
    """Return the bytes that a forward keeps, and the median seconds of a step, by method; on one core."""
    torch.set_num_threads(1)
    base, found = learnt(0, 0, WIDE, DEEP), {}
    for name in ADAPTED:
        module = with_method(copy.deepcopy(base), name, 0)
        starts = torch.arange(ROWS) * CONTEXT
        seconds = []
        for _ in range(5):
            began = time.process_time()
            params = [p for p in module.parameters() if p.requires_grad]
            torch.autograd.grad(loss_of(module, code(), starts), params)
            seconds.append(time.process_time() - began)
        found[name] = {
            "kept_bytes": kept_bytes(module, starts),
            "step_s": round(median(seconds), 4),
            "trained_parameters": sum(p.numel() for p in params),
        }
    return found


def kept_bytes(module: nn.Module, starts: Tensor) -> int:
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = tensor, memory.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        kept_alive = loss_of(module, code(), starts)
    del kept_alive
    return sum(size for _, size in kept.values())
