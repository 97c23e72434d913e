"""What everything is compared with: a loop of plain torch in one process, on the same micro-batches.

Of Gossamer it takes the model that a factory and a seed make, the order of the samples, the tokens of a text, and,
where the forward draws random numbers, their keys.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from proof.habit import Habit
from proof.scene import BATCH, EVALUATE_EVERY, EVALUATED, LENGTH, MICROBATCHES, SAMPLED, SEED, STEPS

IGNORED = -100


def train(habit: Habit, told: Mapping[str, Any], replicas: int = 1) -> dict[str, Tensor]:
    """By name: the loss of every step, all parameters and persistent buffers at the end, evaluations, and bytes of
    samples. `told` is the section `data`, where it is trained on text. Each of the replicas has a module of its own,
    of which gradients are summed, and nothing else is shared; the first one's buffers are kept.
    """
    loop, losses, heard = _Loop(habit, told, replicas), list[float](), list[dict[str, Tensor]]()
    for step in range(STEPS):
        if step and step == habit.stopped:
            kept, loop = loop, _Loop(habit, told, replicas)
            loop.load(kept)
        losses.append(loop.step(step))
        if habit.text and (step + 1) % EVALUATE_EVERY == 0:
            heard.append(loop.heard())
    looked = {name: torch.stack([one[name] for one in heard]) for name in (heard[0] if heard else ())}
    return {"loss": torch.tensor(losses), **looked, **loop.state()}


class _Loop:
    def __init__(self, habit: Habit, told: Mapping[str, Any], replicas: int = 1) -> None:
        self.habit = habit
        self.corpus = corpus_of(told) if told else None
        self.module = model_of(habit, self.corpus)
        self.replicas = [self.module, *(copy.deepcopy(self.module) for _ in range(replicas - 1))]
        self.data = habit.data()
        self.order = order_of(len(self.corpus.train) if self.corpus else len(self.data))  # type: ignore[arg-type]
        self.optimizer = optimizer_of(habit, self.module)
        self.keyed = keys_of(habit, self.module)

    def step(self, step: int) -> float:
        pieces = list(self._pieces(step))
        labels = sum(weight_of(rows) for _, rows in pieces)
        total = 0.0
        for number, (key, rows) in enumerate(pieces):
            module = self.replicas[number * len(self.replicas) // len(pieces)]
            with self.keyed(step, key):
                loss = loss_of(module, rows) * (weight_of(rows) / labels)
                loss.backward()
            total += float(loss.detach())
        self._meet()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._follow()
        return total

    def _meet(self) -> None:
        """The first replica has the gradients of all."""
        for other in self.replicas[1:]:
            for mine, theirs in zip(self.module.parameters(), other.parameters(), strict=True):
                if theirs.grad is not None:
                    mine.grad = theirs.grad if mine.grad is None else mine.grad + theirs.grad
                    theirs.grad = None

    @torch.no_grad()
    def _follow(self) -> None:
        for other in self.replicas[1:]:
            for mine, theirs in zip(self.module.parameters(), other.parameters(), strict=True):
                theirs.copy_(mine)

    def _pieces(self, step: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        rows = BATCH // MICROBATCHES
        for key in range(0, BATCH, rows):
            chosen = [self.order(step * BATCH + key + i) for i in range(rows)]
            if self.corpus:
                yield key, self.corpus.train.batch(np.array(chosen))
            else:
                yield key, default_collate([self.data[i] for i in chosen])

    @torch.no_grad()
    def heard(self) -> dict[str, Tensor]:
        """The mean loss of the first validation sequences, and what the model goes on with; of a copy."""
        module, held_out = copy.deepcopy(self.module).eval(), self.corpus.validation
        total, labels = 0.0, 0
        for i in range(min(EVALUATED, len(held_out))):
            rows = held_out.batch(np.array([i]))
            total += float(loss_of(module, rows)) * weight_of(rows)
            labels += weight_of(rows)
        return {"evaluation": torch.tensor(total / labels), "sample": self.sampled(module)}

    def sampled(self, module: nn.Module) -> Tensor:
        """The bytes of the text, drawn as `gossamer sample` draws."""
        from gossamer.model.generate import sample_token

        words, drawn = self.corpus.tokenizer, torch.Generator().manual_seed(SEED)
        ids = [int(i) for i in words.encode(self.habit.text)]
        for _ in range(SAMPLED):
            logits = logits_of(module(torch.tensor([ids[-LENGTH:]])))[0, -1].float()
            ids.append(sample_token(logits, drawn, temperature=0.8, top_k=50))
        return as_bytes(words.decode(ids)[len(self.habit.text) :])

    def state(self) -> dict[str, Tensor]:
        persistent = set(self.module.state_dict(keep_vars=True))
        buffers = ((n, b) for n, b in self.module.named_buffers() if n in persistent)
        return {n: t.detach().clone() for n, t in (*self.module.named_parameters(), *buffers)}

    def load(self, other: _Loop) -> None:
        """As from its checkpoint."""
        self.module.load_state_dict(other.module.state_dict())
        self.optimizer.load_state_dict(other.optimizer.state_dict())


def as_bytes(text: str) -> Tensor:
    """The first so many, as a sample may have half a letter at its end."""
    return torch.tensor([*text.encode()[:SAMPLED], *[0] * SAMPLED][:SAMPLED])


def corpus_of(told: Mapping[str, Any]) -> Any:
    from gossamer.data import open_corpus

    return open_corpus(**told)


def model_of(habit: Habit, corpus: Any = None) -> nn.Module:
    from gossamer.model.origin import origin_of
    from gossamer.spec.config import ModelSection

    origin = origin_of(ModelSection(factory=habit.written))
    if corpus is not None:
        origin = origin.fitted_to_tokenizer(corpus.tokenizer.vocabulary, corpus.tokenizer.separator)
    return origin.build(SEED)


def order_of(size: int) -> Any:
    """The number of a sample of the run -> its number in the data."""
    from gossamer.data import SampleOrder

    order = SampleOrder(SEED, size)
    return lambda number: int(order(number))


def keys_of(habit: Habit, module: nn.Module) -> Any:
    if not habit.draws:
        return _nothing
    from gossamer.model.unit_seeds import unit_seeds

    return unit_seeds(module, seed=SEED).at


def _nothing(step: int, key: int) -> AbstractContextManager[None]:
    return nullcontext()


def optimizer_of(habit: Habit, module: nn.Module) -> torch.optim.Optimizer:
    """As `train.optimizer` says it: vectors do not decay."""
    ((name, told),) = habit.optimizer.items()
    trained = [p for p in module.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(trained, **told)
    told = {"betas": (0.9, 0.95), "weight_decay": 0.1, **told}
    groups = [{"params": [p for p in trained if p.ndim >= 2]}]
    groups += [{"params": [p], "weight_decay": 0.0} for p in trained if p.ndim < 2]
    return torch.optim.AdamW([group for group in groups if group["params"]], **told)


def weight_of(rows: dict[str, Tensor]) -> int:
    """What is to be told of them: the next tokens, or a class each."""
    labels = rows["labels"]
    return int(((labels[:, 1:] if labels.ndim > 1 else labels) != IGNORED).sum())


def loss_of(module: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    """The model's own loss, or the mean cross-entropy of the next tokens."""
    output = module(**taken(module, rows))
    first = output[0] if isinstance(output, tuple) else output
    own = first if isinstance(first, Tensor) and not first.ndim else _named(output, "loss")
    if own is not None:
        return own
    logits = logits_of(output)
    labels = rows["labels"][:, 1:].flatten()
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return total / max(1, int((labels != IGNORED).sum()))


def logits_of(output: Any) -> Tensor:
    """(B, T, V)"""
    found = _named(output, "logits")
    while found is None:
        output = output[0] if isinstance(output, (tuple, list)) else output
        found = output if isinstance(output, Tensor) else None
    return found


def _named(output: Any, name: str) -> Tensor | None:
    if isinstance(output, dict) or hasattr(output, "keys"):
        return output.get(name)
    return None if isinstance(output, Tensor) else getattr(output, name, None)


def taken(module: nn.Module, rows: dict[str, Tensor]) -> dict[str, Any]:
    """Those of the batch that its forward takes, by name, the tokens under the name of its first parameter."""
    known = inspect.signature(module.forward).parameters
    named: dict[str, Any] = {name: value for name, value in rows.items() if name in known}
    if "input_ids" in rows and "input_ids" not in known:
        first = next(iter(known.values()))
        named["input_ids" if first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD) else first.name] = rows[
            "input_ids"
        ]
    return {**named, "use_cache": False} if "use_cache" in known else named
