"""States in 8 bits: bytes per parameter of every kind of optimizer state, and the loss that training ends with.

Bytes: of the states that an optimizer makes for the model of LAYERS layers below. Loss: of held-out text after so many
tokens of a language model of bytes, trained from the same seeds in pairs: the same parameters and the same batches, one
rate for all. `details`: the loss of every seed, and the ratio to AdamW's of the same seed. Where the hours were over
before all seeds were trained, the row is of those that all methods trained, and its setting says how many. Seconds are
those of the processor. Peers, whose packages are in an environment of their own, train in a process of that one's
`python`, which the variable of PYTHON names; without it they are left out.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from claims._trials import Trials

WIDTH, HEADS, LAYERS, SEQUENCE, BATCH, BYTES = 192, 6, 5, 128, 8, 256
LR, WARMUP, CLIP = 1e-3, 0.1, 1.0
TOKENS, QUICK_TOKENS, SEEDS = 2_000_000, 30_000, (0, 1, 2)
TRAINED = ("adamw", "adamw_8bit", "coat")
COUNTED = {
    "adamw": {"adamw": {}},
    "adamw, parameters in bf16": {"master": {"inner": {"adamw": {}}}},
    "adamw_8bit": {"adamw_8bit": {}},
    "coat": {"coat": {}},
    "muon": {"muon": {}},
    "muon, the rest in coat": {"muon": {"rest": {"coat": {}}}},
    "sgd with momentum": {"sgd": {"momentum": 0.9}},
    "lamb": {"lamb": {}},
    "one_bit_adam": {"one_bit_adam": {}},
}
PEERS = {"torchao AdamWFp8": "fp8", "torchao AdamW8bit": "8bit", "bitsandbytes AdamW8bit": "bnb"}
PYTHON = "SMALL_STATES_PEERS"  # the python of an environment with torchao and bitsandbytes
NOT_QUICK = f"{TOKENS:,} tokens and 3 seeds: quick trains one seed on {QUICK_TOKENS:,}; no peers"

Update = Callable[[float], None]  # given the factor on the rate


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        met = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(met.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Bytes(nn.Module):
    """A language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(BYTES, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)
        for one in self.modules():
            if isinstance(one, nn.Linear | nn.Embedding):
                nn.init.normal_(one.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text[:, :-1]) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def rows(*, quick: bool, trials: Trials, tokens: int = TOKENS) -> Iterator[Any]:
    from savers import Row

    yield from (Row(method=name, setting="states as made for a model", **one) for name, one in counted().items())
    tokens, seeds = (QUICK_TOKENS, SEEDS[:1]) if quick else (tokens, SEEDS)
    found = in_turns(TRAINED, seeds, tokens, trials)
    done = seeds[: len(found["adamw"])]
    python = "" if quick else os.environ.get(PYTHON, "")
    peers = {name: _peer(python, kind, tokens, done) for name, kind in PEERS.items()} if python else {}
    plain = [one["loss"] for one in found["adamw"]]
    spread = stdev(plain) / mean(plain) if len(plain) > 1 else None
    numel = sum(p.numel() for p in Bytes().parameters())
    setting = f"{numel / 1e6:.2f} M parameters, {tokens:,} tokens, {told(done, seeds)}, lr {LR:g}, 1 thread"
    for name, runs in {**found, **peers}.items():
        losses = [one["loss"] for one in runs]
        ratios = [round(a / b, 6) for a, b in zip(losses, plain, strict=True)]
        yield Row(
            method="adamw_8bit" if name in PEERS and "8bit" in name else "coat" if name in PEERS else name,
            peer=name if name in PEERS else "",
            setting=setting,
            step_s=round(median(one["step_s"] for one in runs), 4),
            bytes_per_parameter=round(runs[0]["bytes"] / numel, 4),
            loss=round(mean(losses), 5),
            details={
                "losses": [round(one, 5) for one in losses],
                "of_adamw": ratios,
                "mean_of_adamw": round(mean(ratios), 6),
                "spread_of_adamw": spread and round(spread, 6),
                "update_s": round(median(one["update_s"] for one in runs), 4),
            },
        )


def in_turns(
    names: Sequence[str], seeds: Sequence[int], tokens: int, trials: Trials
) -> dict[str, list[dict[str, Any]]]:
    """Return what `trained` says of every method, by seed: as many seeds as all methods were trained with.

    Raise OutOfTime where the hours were over before one seed was done.
    """
    from claims._trials import OutOfTime

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in seeds:  # in turns, so that what else the machine does meets all of them
        try:
            ran = [trials(f"{n}, {tokens} tokens, seed {seed}", partial(trained, n, seed, tokens)) for n in names]
        except OutOfTime:
            if seed == seeds[0]:
                raise
            break
        for name, one in zip(names, ran, strict=True):
            found[name].append(one)
    return found


def told(done: Sequence[int], seeds: Sequence[int]) -> str:
    """Return how many seeds a row is of."""
    return f"{len(done)} seeds" if len(done) == len(seeds) else f"{len(done)} of {len(seeds)} seeds"


def counted() -> dict[str, dict[str, Any]]:
    """Bytes of states per parameter, of a matrix that is coded and of the whole model."""
    from gossamer import optimizer as optimizers

    found = {}
    for name, written in COUNTED.items():
        is_half = "bf16" in name
        params = {n: p.detach().bfloat16() if is_half else p.detach() for n, p in Bytes().named_parameters()}
        state = optimizers.build(written).init(params)
        matrix = "blocks.0.up.weight"
        total = sum(t.nbytes for slots in state.values() for t in slots.values())
        one = sum(t.nbytes for t in state[matrix].values()) / params[matrix].numel()
        numel = sum(p.numel() for p in params.values())
        found[name] = {"bytes_per_parameter": round(total / numel, 4), "details": {"of_a_matrix": round(one, 4)}}
    return found


def trained(kind: str, seed: int, tokens: int) -> dict[str, Any]:
    """Train once with an optimizer, or with AdamW and a saver.

    Return the loss at the end, the bytes of the states and the median processor seconds of a step and of its update.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, (text, held) = Bytes(), _text()
    draw = torch.Generator().manual_seed(1000 + seed)
    steps = tokens // (BATCH * SEQUENCE)
    update, state_bytes = _ours(kind, model) if kind not in PEERS.values() else _theirs(kind, model)
    times, updates = [], []
    for step in range(steps):
        began = time.process_time()
        starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH,), generator=draw)
        loss = model(torch.stack([text[s : s + SEQUENCE + 1] for s in starts.tolist()]).long())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        done, before = step / steps, time.process_time()
        update((step + 1) / (WARMUP * steps) if done < WARMUP else 0.55 + 0.45 * math.cos(math.pi * done))
        model.zero_grad(set_to_none=True)
        updates.append(time.process_time() - before)
        times.append(time.process_time() - began)
    with torch.no_grad():
        losses = [float(model(part.long())) for part in held]
    said = {"loss": mean(losses), "bytes": state_bytes(), "step_s": median(times), "update_s": median(updates)}
    print(f"{kind}, {tokens} tokens, seed {seed}: {said}", file=sys.stderr, flush=True)
    return said


def _ours(kind: str, model: nn.Module) -> tuple[Update, Callable[[], int]]:
    from gossamer import loss, optimizer, saver

    if kind in saver.names():
        saver.build(kind).install(model, saver.Site(units=(), objective=loss.build("next_token")))
        kind = "adamw"
    rule, params = optimizer.build({kind: {"lr": LR}}), dict(model.named_parameters())
    state, done = rule.init(params), [0]

    def update(factor: float) -> None:
        grads = {name: p.grad for name, p in params.items() if p.grad is not None}
        rule.update(params, grads, state, lr_scale=factor, step=done[0])
        done[0] += 1

    return update, lambda: sum(t.nbytes for slots in state.values() for t in slots.values())


def _theirs(kind: str, model: nn.Module) -> tuple[Update, Callable[[], int]]:
    """The same rule of another package; vectors do not decay there either."""
    flat = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2]}, {"params": flat, "weight_decay": 0.0}]
    given: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    if kind == "bnb":
        import bitsandbytes

        rule = bitsandbytes.optim.AdamW8bit(groups, **given)
    else:
        import torchao.optim

        rule = (torchao.optim.AdamWFp8 if kind == "fp8" else torchao.optim.AdamW8bit)(groups, **given)

    def update(factor: float) -> None:
        for group in rule.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(LR * factor)
            else:
                group["lr"] = LR * factor
        rule.step()

    return update, lambda: sum(_bytes(t) for slots in rule.state.values() for t in slots.values())


def _bytes(value: Any) -> int:
    """Of a tensor, or of the tensors that a subclass of it is made of."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return 0
    parts = getattr(value, "tensor_attrs", ())
    return sum(_bytes(getattr(value, part)) for part in parts) if parts else value.nbytes


def _peer(python: str, kind: str, tokens: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    argv = [python, __file__, kind, str(tokens), *map(str, seeds)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def _text() -> tuple[Tensor, list[Tensor]]:
    """The sources of Python's library as bytes, and sequences of every twentieth file that is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    kept = b"".join(one.read_bytes() for at, one in enumerate(files) if at % 20)
    held = torch.frombuffer(bytearray(b"".join(one.read_bytes() for one in files[::20])), dtype=torch.uint8)
    parts = held[: len(held) // (SEQUENCE + 1) * (SEQUENCE + 1)].view(-1, SEQUENCE + 1)[:2048]
    return torch.frombuffer(bytearray(kept), dtype=torch.uint8), list(parts.split(64))


if __name__ == "__main__":
    print(json.dumps([trained(sys.argv[1], int(seed), int(sys.argv[2])) for seed in sys.argv[3:]]))
