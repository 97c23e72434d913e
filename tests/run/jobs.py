"""What pool workers run for the tests of this folder: whole small runs through the real job."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from gossamer import loss
from gossamer.job.rank_inputs import DataDescription, RankContext, RankJob
from gossamer.job.rank_job import run_job
from gossamer.model.generate import generate
from gossamer.model.quantize_base import quantize_base
from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.partition.model_provider import ModuleSource
from gossamer.partition.rank_model import RankModel, build_rank_model
from gossamer.partition.request import PartitionRequest
from gossamer.prune import apply_masks, prune
from gossamer.prune import build as pruning
from gossamer.recipe import ParameterRules
from gossamer.run.batches import DatasetBatches
from gossamer.run.parts import Parts
from gossamer.run.validation_set import ValidationSet
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import Interrupted, StepRejected
from gossamer.view.run_directory import RunDirectory
from pool import Seat
from sync.held_up_clock import HeldUpClock


class Branches(nn.Module):
    """A layer that is never called, and one that only rows whose second token 4 divides are for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 12), nn.Linear(12, 16)
        self.never, self.even = nn.Linear(12, 12), nn.Linear(12, 12)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        chosen = (input_ids[:, 1] % 4 == 0).nonzero().flatten()
        if len(chosen):
            x = x.index_add(0, chosen, torch.tanh(self.even(x[chosen])))
        return self.head(x)


class Tokens(Dataset):
    """Sequences with a learnable pattern; every third has void labels. Item `poison` is not finite when embedded."""

    def __init__(self, count: int = 64, *, bad: int = -1, bads: Sequence[int] = ()) -> None:
        seed = torch.Generator().manual_seed(1)
        start = torch.randint(0, 16, (count, 1), generator=seed)
        self.ids = (start + torch.arange(9) * 3) % 16
        self.labels = self.ids.clone()
        self.labels[::3, :5] = -100
        self.bads = {bad, *bads}

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        scale = torch.tensor(float("nan") if index in self.bads else 1.0)
        return {"input_ids": self.ids[index], "labels": self.labels[index], "scale": scale}


VALIDATION = {"validation": Tokens(20)}


class Marking(nn.Module):
    """A block that hands on, beside what it computes, where that is large (bool) and how often it was (int64)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, large: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + torch.tanh(self.inner(x)) * torch.where(large, 0.5, 1.0) / (1 + count)
        return y, y > 1, count + (y > 1).long()


class Marks(nn.Module):
    """What crosses between its blocks is not all of floating-point numbers, and cannot be made anew elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.layers = nn.ModuleList(Marking() for _ in range(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        large, count = x > 1, torch.zeros_like(x, dtype=torch.int64)
        for layer in self.layers:
            x, large, count = layer(x, large, count)
        return x @ self.embed.weight.T


class Small(nn.Module):
    """A plain module with dropout and tied weights that returns logits."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, 12)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(12)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            self.seen += 1
        x = self.embed(input_ids) * scale[:, None, None]
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x) @ self.embed.weight.T


def quantized(module: nn.Module) -> nn.Module:
    """`module` with its linear layers frozen, in blocks of 4 bits."""
    quantize_base(module, "int4")
    return module


def mixture() -> nn.Module:
    """Return a mixture of experts of transformers, always the same."""
    from prune.experts import of_transformers

    return of_transformers("mixtral", vocab_size=16, max_position_embeddings=512)


def pruned_mixture() -> nn.Module:
    """Return `mixture` with half of its weights at zero."""
    module = mixture()
    apply_masks(module, prune(module, pruning("magnitude")).masks)
    module.register_buffer("seen", torch.zeros(()))
    return module


class Causal(nn.Module):
    """Blocks whose tokens see the mean of all before them; tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.register_buffer("seen", torch.zeros(()))

    def features(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        for layer in self.layers:
            x = x + torch.tanh(layer(x.cumsum(1) / counts))
        return 0.1 * x

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.features(input_ids) @ self.embed.weight.T


class Headed(Causal):
    """The same with a head of its own, which it declares."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 16)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(input_ids))


class Unrooted(nn.Module):
    """The root of what is below zero, from its forward number `first` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.inner, self.first, self.forwards = nn.Linear(12, 12), first, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.forwards += self.training
        return torch.sqrt(-1 - y * y) if self.forwards > self.first else y


class Burst(Causal):
    """Its third block gives nan."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.layers[2] = Unrooted(first)


class Root(nn.Module):
    """What adds the root of 0: a finite value, with a gradient that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y + torch.sqrt(y - y.detach())


class Rooted(Causal):
    """The gradient of its last block is nan."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = Root()


class Spoilt(Causal):
    """Begins with a nan in its last parameter."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.layers[3].bias, float("nan"))


class Thin(Causal):
    """Parameters of fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Parameter(torch.randn(1, 1, 12)), nn.Parameter(torch.ones(()))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(input_ids) + (self.first @ self.embed.weight.T)


@dataclass
class Carried:
    """What a block hands on, in a record torch knows nothing of."""

    x: torch.Tensor
    count: int = 0


class Habit(nn.Module):
    """A block that is checkpointed inside, changes what it was given, and leaves something behind for the loss."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.inner, self.gate = nn.Linear(12, 12), nn.Linear(12, 1)
        self.left = torch.zeros(())

    def forward(self, given: Carried) -> Carried | torch.Tensor:
        mixed = checkpoint(lambda x: torch.tanh(self.inner(x)), given.x.clone(), use_reentrant=False)
        if self.index == 1:
            x = given.x
            x += mixed  # in place, and given back
        else:
            x = self.inner(given.x.clone() + mixed)  # a view, as linear maps of sequences give
        self.left = self.gate(mixed).square().mean()
        return Carried(x, given.count + 1)


class Habits(nn.Module):
    """What models do that a unit's parameters must be there for. Two of them in a row are not trained in one test."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.layers = nn.ModuleList(Habit(index) for index in range(4))
        self.norm = nn.LayerNorm(12)
        self.aside = nn.Linear(12, 12)  # never called
        self.scale = nn.Parameter(torch.ones(12))  # in no unit
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        carried = Carried(self.embed(input_ids) * 1.0)
        for layer in self.layers:
            carried = layer(carried)
            carried.x += 0.1  # in place, of what a unit has returned
        logits = (self.norm(carried.x) * self.scale) @ self.embed.weight.T
        return logits + sum(layer.left for layer in self.layers) * torch.arange(16)


class Wide(Causal):
    """Large enough that its state is most of what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 192)
        self.layers = nn.ModuleList(nn.Linear(192, 192) for _ in range(6))

    def forward(self, input_ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(input_ids)
        return logits if scale is None else logits * scale[:, None, None]


class Wordless(Causal):
    """Says nothing unless it is told what to say."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(input_ids)
        return logits if labels is not None else logits.mean()


class Letters:
    """A tokenizer: p is token 15."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


class Row(nn.Module):
    """No list of blocks: children of a child, called in a row, with dropout between them. Python's `random` too."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.body = Body(dropout)
        self.head = nn.Linear(12, 16)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.body(self.embed(input_ids) * scale[:, None, None]))


class Body(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(12, 12), nn.Sequential(nn.Linear(12, 12)), Noisy()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            x = x + nn.functional.dropout(torch.tanh(layer(x)), self.dropout, self.training)
            x = x * random.uniform(1.0, 1.1) if self.training else x
        return x


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x) * random.uniform(0.9, 1.1) if self.training else self.mix(x)


class Masking(Causal):
    """Writes to the batch that it was given."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        input_ids[:, 2] = (input_ids[:, 2] + 1) % 5
        out: torch.Tensor = super().forward(input_ids)
        return out


class Counting(Causal):
    """Counts forwards in Python, in its own code, in its blocks, and in what these are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CountingBlock() for _ in range(4))
        self.steps = 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, log = self.embed(input_ids) * (1 + 0.1 * (self.steps % 3)), {"depth": 0}
        gains = iter([1.0, 0.5, 1.5, 0.7])
        for layer in self.layers:
            x = layer(x, log, gains) * (1 + 0.01 * log["depth"] + 0.05 * layer.n)
        self.steps += 1
        return 0.1 * x @ self.embed.weight.T


class CountingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.n = nn.Linear(12, 12), 0

    def forward(self, x: torch.Tensor, log: dict[str, int], gains: Iterable[float]) -> torch.Tensor:
        self.n = (self.n + 1) % 5
        log["depth"] += 1
        return x + next(iter(gains)) * torch.tanh(self.mix(x))


class Telling(Causal):
    """Blocks say in Python what they saw in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TellingBlock() for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x, word, mean, extra = layer(x)
            x = x * (1.1 if word == "up" else 0.9) * (1 + 0.1 * mean)
            x = x if extra is None else x + 0.1 * extra
        return 0.1 * x @ self.embed.weight.T


class TellingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str, float, torch.Tensor | None]:
        y = x + torch.tanh(self.mix(x))
        mean = float(y.detach().mean((0, 1)).numpy().mean())
        return y, "up" if mean > 0 else "down", mean, y.mean(1, keepdim=True) if y.sum() > -1e9 else None


class Sometimes(Causal):
    """Its third forward reads behind all blocks what the first one gave."""

    forwards = 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        first = x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            first = first if layer is not self.layers[0] else x * 1.0
        return 0.1 * (x if self.forwards < 6 else x + first) @ self.embed.weight.T


class Late(Marks):
    """Changes buffers at the end of its forward, of what its first and last block give."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(12))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        start = self.embed(input_ids)
        logits = super().forward(input_ids)
        if self.training:
            self.first.lerp_(start.detach().mean((0, 1)), 0.1)
            self.seen = 0.9 * self.seen + 0.1 * logits.detach().mean()
            self.count += 1
        return logits


class AveragingBlock(nn.Module):
    """A block with batch norm, and a count in a buffer that `total` may share with another block."""

    def __init__(self, total: torch.Tensor) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(12)
        self.register_buffer("total", total)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.total += 1
        return x + torch.tanh(self.norm(self.inner(x).flatten(0, 1)).view_as(x))


class Averaging(nn.Module):
    """Buffers that are written in place, replaced and shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 12), nn.Linear(12, 16)
        totals = [torch.zeros(()), torch.zeros(())]
        self.layers = nn.ModuleList(AveragingBlock(totals[n // 2]) for n in range(4))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, input_ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        start = x = self.embed(input_ids) * scale[:, None, None]
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        if self.training:
            self.mean.lerp_(start.detach().mean((0, 1)), 0.1)
            self.seen = 0.9 * self.seen + 0.1 * logits.detach().mean()
        return logits


class Labelled(nn.Module):
    """A model of transformers, some of whose losses count the first label of a sequence too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers

        small = {"vocab_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        if kind == "t5":
            shape = {"d_model": 12, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 2}
            config = transformers.T5Config(vocab_size=16, dropout_rate=0.0, decoder_start_token_id=0, **shape)
            self.inner = transformers.T5ForConditionalGeneration(config)
        elif kind.startswith("gpt2"):
            shape = {"n_embd": 12, "n_layer": 3, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
            is_tied = kind != "gpt2 untied"
            config = transformers.GPT2Config(vocab_size=16, tie_word_embeddings=is_tied, **shape)
            self.inner = transformers.GPT2LMHeadModel(config)
        elif kind == "llama":
            shape = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
            config = transformers.LlamaConfig(vocab_size=16, max_position_embeddings=16, **shape)
            self.inner = transformers.LlamaForCausalLM(config)
        else:
            shape = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
            self.inner = transformers.BertForMaskedLM(transformers.BertConfig(**small, **shape))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def train(
    seat: Seat,
    *,
    folder: str = "",
    steps: int = 6,
    until: int = 0,
    resume: bool = False,
    kind: str = "small",
    dropout: float = 0.0,
    bad: int = -1,
    bads: Sequence[int] = (),
    hosts: int = 1,
    frozen: Sequence[str] = (),
    words: bool = True,
    values: bool = False,
    fresh_plan: bool = False,
    disks: bool = False,
    counts: bool = False,
    logits: int = 0,
    finish: bool = False,
    held_up: Sequence[int] = (),
    sections: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """One run; `until` asks to stop after so many steps, with `finish` on rank 0 as a callback does; `held_up`: [rank,
    step, to] that goes on in a step when the next rank is in another one, which goes on when it is there as well. What
    its records say, and a digest of the parameters.
    """
    given = {
        "train": {"steps": steps, "batch": 8, "evaluate_every": 0, "checkpoint_every": 0, "max_grad_norm": 0.5},
        "machines": {"timeout_s": 40},
    }
    for name, section in (sections or {}).items():
        given[name] = {**given.get(name, {}), **section}
    config = RunConfig.model_validate(given)
    before = storages() if counts else {}
    torch.manual_seed(0)
    kinds = {
        "small": lambda: Small(dropout),
        "row": lambda: Row(dropout),
        "marks": Marks,
        "causal": Causal,
        "headed": Headed,
        "branches": Branches,
        "wordless": Wordless,
        "late": Late,
        "averaging": Averaging,
        "t5": lambda: Labelled("t5"),
        "bert": lambda: Labelled("bert"),
        "gpt2": lambda: Labelled("gpt2"),
        "gpt2 untied": lambda: Labelled("gpt2 untied"),
        "llama": lambda: Labelled("llama"),
        "masking": Masking,
        "counting": Counting,
        "telling": Telling,
        "sometimes": Sometimes,
        "doubles": lambda: Marks().double(),
        "thin": Thin,
        "burst": Burst,
        "rooted": Rooted,
        "spoilt": Spoilt,
        "burst later": lambda: Burst(2),
        "habits": Habits,
        "halves": lambda: Causal().bfloat16(),
        "wide": lambda: Wide(),
        "quantized": lambda: quantized(Small(dropout)),
        "mixture": pruned_mixture,
    }
    module = kinds[kind]()
    for name in frozen:
        module.get_submodule(name).requires_grad_(False)
    directory = RunDirectory(Path((folder or str(seat.folder)).format(rank=seat.rank)) / "run")
    kept = directory.plan() if resume and not fresh_plan else None
    ended, done, there, signals = "", [0], [], dist.PrefixStore("held up", seat.store())
    clock = HeldUpClock(signals)

    def at(step: int, phase: str) -> None:
        done[0] = step
        if held_up and phase == "compute":
            signals.set(f"{seat.rank} in {step}", "")
            if [seat.rank, step] == list(held_up[:2]):
                with clock.held_up():
                    signals.wait([f"{(seat.rank + 1) % seat.ranks} in {held_up[2]}"])
            if [seat.rank, step] == [(held_up[0] + 1) % seat.ranks, held_up[2]]:
                signals.wait([f"{held_up[0]} in {step}"])
        if counts and phase == "fetch" and step == steps - 1:
            there.append(sum(s.nbytes() for key, s in storages().items() if key not in before))

    data, objective = DatasetBatches(Tokens(bad=bad, bads=bads)), loss.build(config.train.loss)
    cpu = torch.device("cpu")
    asked = PartitionRequest(
        config=config, ranks=seat.ranks, rank=seat.rank, batches=data, objective=objective, device=cpu
    )
    kept = kept if kept is not None and kept.mesh.size == seat.ranks else None  # as `gossamer resume` does
    held = build_rank_model(ModuleSource(module), asked, kept)
    parts = Parts(
        module=held.module,
        objective=objective,
        train=data,
        validation={name: ValidationSet(DatasetBatches(one)) for name, one in VALIDATION.items()},
        config=config,
        plan=held.plan,
        device=cpu,
        cut=held.cut,
        words=Letters() if words else None,
    )
    job = RankJob(
        parts=parts,
        where=RankContext(
            rank=seat.rank,
            ranks=seat.ranks,
            hosts=hosts,
            writer=0 if disks else seat.rank,
            writers=1 if disks else seat.ranks,
            store=seat.store(),
            interface="lo",
        ),
        directory=directory,
        described="Small",
        data=DataDescription(fingerprint="tokens", text="tokens"),
        resume=resume,
        at=at,
        asked_to_stop=lambda: (2 * (seat.rank == 0) if finish else 1) * (bool(until) and done[0] + 1 >= until),
        is_kept=True,
    )
    try:
        with clock.in_force() if held_up else nullcontext():
            run_job(job)
    except (Interrupted, StepRejected) as error:
        ended = f"{type(error).__name__}: {error}"
    seen = float("nan") if isinstance(held.module.seen, AbsentTensor) else float(held.module.seen)
    found = {"digest": digest(held.module), "ended": ended, "seen": seen, "held": digests(held), "bytes": there}
    if logits:
        rows = data.batch(np.arange(logits))
        with torch.no_grad():
            found["logits"] = held.module.eval()(rows["input_ids"], rows["scale"]).tolist()
    if values:
        here = [p for _, p in sorted(held.module.named_parameters()) if not isinstance(p, AbsentTensor)]
        found["values"] = [x for p in here for x in p.detach().flatten().tolist()]
    if config.train.sample_prompt and held.cut is None:
        of = {"tokens": config.train.sample_max_new_tokens, "window": config.data.sequence, "top_k": 50}
        found["text"] = generate(held.module, Letters(), config.train.sample_prompt, seed=config.train.seed, **of)
    return found


def train_with_bad_samples(seat: Seat, *, fault: str, **given: Any) -> dict[str, Any]:
    """As `train`, where drawing a token fails on the last rank, or the tokenizer on all."""
    from gossamer.run import text_sampling

    class Broken(Letters):
        def decode(self, ids: Iterable[int]) -> str:
            raise ValueError("no such letter")

    def fail(*args: Any, **rest: Any) -> Any:
        raise RuntimeError("nothing to choose from")

    draw, words = text_sampling.sample_token, text_sampling._Words
    if fault == "decode":
        text_sampling._Words = lambda inner: words(Broken())
    elif seat.rank == seat.ranks - 1:
        text_sampling.sample_token = fail
    try:
        return train(seat, **given)
    finally:
        text_sampling.sample_token, text_sampling._Words = draw, words


def computing(seat: Seat, *, measured: list[list[float]]) -> list[str]:
    """What ranks choose to compute in that have measured so."""
    from unittest.mock import patch

    from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
    from gossamer.comm.comm_thread import CommThread
    from gossamer.comm.message import ProcessGroups
    from gossamer.run import auto_precision as chosen
    from run.test_untouched import parts_of

    levels = ProcessGroups.flat(seat.ranks)
    pump = CommThread(ProcessGroupChannel(Rendezvous(seat.store(), seat.rank, levels, interface="lo", timeout_s=20.0)))
    with patch.object(chosen, "matmul_seconds", lambda *_: measured[seat.rank]):
        found = chosen.choose_precision(parts_of(Small(0.0)), pump, kept="")
    pump.close()
    pump.channel.close()
    return list(found)


def train_in_small_buckets(seat: Seat, *, killed_at: int = 0, **given: Any) -> dict[str, Any]:
    """As `train`, in buckets of 200 kB. With `killed_at` rank 1 dies in that step, as its tiers take the third mean."""
    from unittest.mock import patch

    from gossamer.plan import data_parallel
    from gossamer.sharding import TieredStates

    begun, taken, begin, take = [0], [0], TieredStates.begin, TieredStates.take

    def counting(self: TieredStates, terms: Any) -> None:
        begun[0] += 1
        taken[0] = 0
        begin(self, terms)

    def dying(self: TieredStates, *means: Any) -> Any:
        taken[0] += 1
        if seat.rank == 1 and begun[0] == killed_at and taken[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self, *means)

    with (
        patch.object(data_parallel, "BUCKET_BYTES", 200_000),
        patch.object(TieredStates, "begin", counting),
        patch.object(TieredStates, "take", dying),
    ):
        return train(seat, **given)


def train_retracing(seat: Seat, **given: Any) -> dict[str, Any]:
    """As `train`, with the number of steps that ran units in another order than was expected of them."""
    from unittest.mock import patch

    from gossamer.sharding._tiered_parameters import TieredParameters

    counts, release = [0], TieredParameters.release

    def counting(self: TieredParameters) -> None:
        release(self)
        counts.append(self.retraced)

    with patch.object(TieredParameters, "release", counting):
        return {**train(seat, **given), "retraced": max(counts)}


def train_with_dead_updater(seat: Seat, **given: Any) -> dict[str, Any]:
    """As `train`, where the update process of rank 1 is killed as it is to get its third mean."""
    from unittest.mock import patch

    from gossamer.sharding import TieredStates

    taken, take = [0], TieredStates.take

    def killing(self: TieredStates, *mean: Any) -> Any:
        taken[0] += 1
        if seat.rank == 1 and taken[0] == 3:
            os.kill(self.updater.link.process.pid, signal.SIGKILL)
        return take(self, *mean)

    with patch.object(TieredStates, "take", killing):
        return train(seat, **given)


def train_behind(seat: Seat, *, islands: list[list[int]], **given: Any) -> dict[str, Any]:
    """As `train`, on two hosts whose links are found to be those of `islands`."""
    from gossamer.autotune import measured_links
    from gossamer.spec.network import Link, Network

    fast, slow = Link(latency_s=1e-4, bytes_per_s=1e9), Link(latency_s=1e-2, bytes_per_s=1e6)
    found = Network(islands=islands, levels={"all": slow, "island": fast, "between": slow})
    probe, measured_links.probe = measured_links.probe, lambda channel, **how: found
    try:
        return train(seat, hosts=2, **given)
    finally:
        measured_links.probe = probe


def storages() -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors that Python knows of, each once. As long as it is held, nothing else has its key."""
    time.sleep(0.1)  # threads of the backend let go of what they sent once they are given the interpreter
    gc.collect()
    found = [one.untyped_storage() for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    return {s._cdata: s for s in found if s.device.type != "meta"}


def digests(held: RankModel) -> dict[str, str]:
    """Of every parameter of this rank, bit for bit."""
    here = [(n, p.detach()) for n, p in held.module.named_parameters() if held.cut is None or n in held.cut.holds]
    return {
        name: hashlib.sha256(p.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, p in here
    }


def digest(module: nn.Module) -> str:
    """Of all parameters that are here, bit for bit."""
    found = hashlib.sha256()
    for _, param in sorted((n, p) for n, p in module.named_parameters() if not isinstance(p, AbsentTensor)):
        found.update(param.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def changing(seat: Seat, *, exchanges: list[Any]) -> dict[str, Any]:
    """Three steps with each exchange, changed at the border between two steps; states and means on the way."""
    from gossamer import exchange as exchange_methods
    from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
    from gossamer.comm.comm_thread import CommThread
    from gossamer.comm.message import ProcessGroups
    from gossamer.sync import GradientReducer, StepContext, StepVote

    torch.manual_seed(0)
    module = Small(0.0)
    params = dict(module.named_parameters())
    islands = ProcessGroups.islands([[rank] for rank in range(seat.ranks)])
    channel = ProcessGroupChannel(Rendezvous(seat.store(), seat.rank, islands, interface="lo", timeout_s=15.0))
    pump = CommThread(channel)
    replica = GradientReducer(params, ParameterRules.read(exchanges[0]).by_name(params), pump, bucket_bytes=1 << 20)
    data, kept, owed, carried = Tokens(), [], [], []

    def owing(states: dict[str, torch.Tensor]) -> float:
        return float(sum(t.abs().double().sum() for n, t in sorted(states.items()) if exchange_methods.is_residual(n)))

    for turn, written in enumerate(exchanges):
        if turn:
            before = {n: t.clone() for n, t in replica.states().items()}
            owed.append(owing(before))
            replica.adopt(ParameterRules.read(written).by_name(params), bucket_bytes=1 << (20 - turn))
            after = replica.states()
            carried.append(owing(after))
            kept.append(sorted(n for n in after if n in before and torch.equal(after[n], before[n])))
        for step in range(3 * turn, 3 * turn + 3):
            rows = torch.utils.data.default_collate([data[4 * step + 2 * seat.rank + i] for i in range(2)])
            replica.open(StepContext(step, 0, 1.0, float((rows["labels"] != -100).sum())))
            replica.watch()
            logits = module(rows["input_ids"], rows["scale"])
            nn.functional.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten()).backward()
            replica.reduce()
            assert replica.agree(StepVote(0.0)).finite
            replica.commit()
    mean = {n: float(g.square().sum()) for n, g in replica.gradients().items()}
    left = owing(replica.states())
    replica.close()
    pump.close()
    channel.close()
    return {"kept": kept, "mean": mean, "owed": owed, "carried": carried, "paid": left}


def resumed(seat: Seat, *, directories: list[str]) -> list[str]:
    """What this rank says as it resumes from what is good everywhere, where the ranks see `directories`."""
    from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
    from gossamer.comm.message import ProcessGroups
    from gossamer.run.checkpoint_directory import CheckpointDirectory
    from gossamer.run.checkpoint_manager import CheckpointManager
    from gossamer.spec.records import Event

    said: list[str] = []
    path = directories[seat.rank]
    directory = CheckpointDirectory(
        path=Path(path), writer=seat.rank - directories.index(path), writers=directories.count(path)
    )
    saver = CheckpointManager(
        directory=directory,
        rank=seat.rank,
        sink=lambda record: said.append(record.message) if isinstance(record, Event) else None,
        identity={},
    )
    saver.contents = SimpleNamespace(check=lambda source: None, restore=lambda source: "")
    channel = ProcessGroupChannel(
        Rendezvous(seat.store(), seat.rank, ProcessGroups.flat(seat.ranks), interface="lo", timeout_s=15.0)
    )
    try:
        assert saver.resume(channel)
    finally:
        channel.close()
    return said


def search(seat: Seat, *, directories: list[str], until: int | None = None) -> dict[str, Any] | None:
    """What this rank finds to go on from, where the ranks see `directories`; how many it read in full."""
    from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
    from gossamer.comm.message import ProcessGroups
    from gossamer.run.checkpoint_search import CheckpointSearch
    from gossamer.store.checkpoint import Checkpoint

    verified, verify = [], Checkpoint.verify

    def counted(self: Checkpoint, **how: Any) -> None:
        verify(self, **how)
        verified.append(self.step)

    channel = ProcessGroupChannel(
        Rendezvous(seat.store(), seat.rank, ProcessGroups.flat(seat.ranks), interface="lo", timeout_s=15.0)
    )
    Checkpoint.verify = counted
    try:
        is_reader = seat.rank == directories.index(directories[seat.rank])
        found = CheckpointSearch(channel, Path(directories[seat.rank]), is_reader).run(until)
    finally:
        Checkpoint.verify = verify
        channel.close()
    if found is None:
        return None
    checkpoint, problems = found
    return {"step": checkpoint.step, "bad": list(problems), "verified": len(verified)}
