"""One small byte language model through phases: each with an optimizer, a text and a length of its own.

The model and its text are those of claims._lm. Another text, to fine-tune on, are the pages in docs/ of this folder's
repository: prose, where the first is mostly source.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from claims._lm import Lm, Shape, loss_of, rate_at, text

DOCS = Path(__file__).parents[2] / "docs"
VALIDATION = 512  # sequences


class Rule(Protocol):
    """The part of an optimizer that a phase calls."""

    def init(self, params: Mapping[str, Tensor]) -> Any: ...

    def update(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: Any, *, lr_scale: float, step: int
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Phase:
    """`steps` of `rule` on the text `of` (library or docs), from states of its own."""

    rule: Rule
    steps: int
    of: str = "library"


@cache
def prose() -> tuple[Tensor, Tensor]:
    """Return the bytes of the documentation to train on, and those to validate on: every fifth page."""
    pages = sorted(path for path in DOCS.rglob("*.md") if path.name != "journal.md")
    parts = [path.read_text("utf-8") for path in pages]
    found = ("\n".join(p for i, p in enumerate(parts) if (i % 5 == 0) is held).encode() for held in (False, True))
    return tuple(torch.frombuffer(bytearray(one), dtype=torch.uint8).long() for one in found)  # type: ignore[return-value]


def batches(of: str, seed: int, rows: int, context: int, steps: int) -> Iterator[Tensor]:
    train, _ = text() if of == "library" else prose()
    drawn = torch.Generator().manual_seed(1_000 + seed)
    for _ in range(steps):
        starts = torch.randint(0, len(train) - context - 1, (rows,), generator=drawn)
        yield train[starts[:, None] + torch.arange(context + 1)]


@torch.no_grad()
def validation(model: nn.Module, of: str, context: int) -> float:
    """Return the nats per byte of evenly spaced sequences of a text's held part."""
    _, held = text() if of == "library" else prose()
    starts = torch.linspace(0, len(held) - context - 1, VALIDATION).long()
    rows = held[starts[:, None] + torch.arange(context + 1)]
    return sum(float(loss_of(model, part)) * len(part) for part in rows.split(64)) / VALIDATION


def run(model: Lm, phases: list[Phase], *, tokens: int, seed: int, clip: float = 1.0) -> dict[str, Any]:
    """Train through the phases; return the loss of each one's text after it, and the seconds of the processor."""
    torch.set_num_threads(1)
    losses, began, context = [], time.process_time(), model.shape.context
    for phase in phases:
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        state = phase.rule.init({name: param.detach() for name, param in params.items()})
        held = {name: param.detach() for name, param in params.items()}
        for step, rows in enumerate(batches(phase.of, seed, tokens // context, context, phase.steps)):
            found = torch.autograd.grad(loss_of(model, rows), list(params.values()))
            grads = dict(zip(params, found, strict=True))
            if hasattr(phase.rule, "restrict"):
                phase.rule.restrict(grads, state)
            norm = math.sqrt(sum(float(one.square().sum()) for one in found))
            if norm > clip:
                torch._foreach_mul_(found, clip / norm)
            phase.rule.update(held, grads, state, lr_scale=rate_at(step, phase.steps), step=step)
        losses.append(validation(model, phase.of, context))
    return {"loss": losses[-1], "losses": losses, "seconds": round(time.process_time() - began, 2)}


def fresh(shape: Shape, seed: int) -> Lm:
    torch.manual_seed(seed)
    return Lm(shape)
