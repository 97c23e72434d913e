"""The Languini Kitchen (Stanic et al., arXiv:2309.11197): a GPT and an LSTM after the same seconds of one core.

The paper's models train for 6 to 96 hours of an accelerator each. The GPT has the lower perplexity at all classes; the
LSTM's trend is steeper and would cross at about 50,000 hours. Ours are byte models of about 0.2M parameters, trained
for 30 to 240 seconds. Its classes are a setting of any study, see `_languini`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import mean

import torch
from torch import Tensor, nn

from claims import Row, Study
from claims._languini import CLASSES, Contender, crossing, scaled
from claims._lm import Lm, Shape, batches, loss_of, rate_at, text, validation_loss
from claims._trials import Trials
from gossamer import optimizer as optimizer_methods

SHAPE = Shape(width=64, layers=4)
QUICK = (1, 2)


class Lstm(nn.Module):
    """A byte model with as many parameters as `SHAPE` of an `Lm`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 96)
        self.lstm = nn.LSTM(96, 160, num_layers=1, batch_first=True)
        self.head = nn.Linear(160, 256, bias=False)

    def forward(self, bytes_: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.embed(bytes_))[0])
        return found


BUILD: Mapping[str, Callable[[], nn.Module]] = {"gpt": partial(Lm, SHAPE), "lstm": Lstm}


def studies(*, quick: bool) -> list[Study]:
    classes, sizes = (QUICK, (64,)) if quick else (CLASSES, (8, 16, 32, 64))
    return [Study("gpt_lstm", partial(gpt_lstm, classes, sizes, 1 if quick else 2, 1 if quick else 5))]


def gpt_lstm(classes: tuple[float, ...], sizes: tuple[int, ...], seeds: int, most: int, trials: Trials) -> list[Row]:
    contenders = [
        Contender(
            name=name, throughput=partial(throughput, name), train=partial(trained, name), batches=sizes, rate=4e-3
        )
        for name in BUILD
    ]
    found = scaled(contenders, trials, classes=classes, seeds=seeds, least=min(3, most), most=most)
    gpt, lstm = found["gpt"], found["lstm"]
    ratios = {c: mean(gpt.bits[c]) / mean(lstm.bits[c]) for c in gpt.bits}
    pairs = [a / b for c in gpt.bits for a, b in zip(gpt.bits[c], lstm.bits[c], strict=True)]
    last = max(ratios)
    crossed = crossing(gpt, lstm)
    sizes_told = ", ".join(f"{name} {sum(p.numel() for p in make().parameters()):,}" for name, make in BUILD.items())
    return [
        Row(
            method="gpt",
            claim="bits per byte at equal seconds, longest class; holds: below 1 at every class and seed",
            baseline="lstm",
            ratio=round(ratios[last], 5),
            paper_ratio=None,
            spread=(round(min(pairs), 5), round(max(pairs), 5)),
            seeds=seeds,
            setting=f"byte LMs ({sizes_told} parameters), classes of {min(classes):g} to {last:g} s of a core",
            holds=max(pairs) < 1,
            details={name: one.told() for name, one in found.items()}
            | {
                "ratios": {f"{c:g} s": round(r, 5) for c, r in ratios.items()},
                "trends_cross_at_s": crossed if math.isfinite(crossed) else None,
            },
        )
    ]


def throughput(name: str, rows: int) -> float:
    """Return the tokens per second of the processor of the loop below, once it is warm."""
    tokens = rows * SHAPE.context
    steps = max(3, 40_000 // tokens)
    trained(name, rows, 2 * tokens, 1e-4, 0, is_evaluated=False)
    return steps * tokens / trained(name, rows, steps * tokens, 1e-4, 0, is_evaluated=False)["seconds"]


def trained(
    name: str, rows: int, tokens: int, rate: float, seed: int, *, is_evaluated: bool = True
) -> dict[str, float]:
    """Train for so many tokens, and return bits per byte and the seconds of the processor, data included."""
    torch.set_num_threads(1)
    text()
    torch.manual_seed(seed)
    model = BUILD[name]()
    params = dict(model.named_parameters())
    rule = optimizer_methods.build({"adamw": {"lr": rate}})
    state = rule.init(params)
    steps = max(1, round(tokens / (rows * SHAPE.context)))
    began = time.process_time()
    for step, drawn in enumerate(batches(seed, rows, SHAPE.context, steps)):
        found = torch.autograd.grad(loss_of(model, drawn), list(params.values()))
        norm = math.sqrt(sum(float(one.square().sum()) for one in found))
        if norm > 1.0:
            found = tuple(torch._foreach_mul(found, 1.0 / norm))
        rule.update(params, dict(zip(params, found, strict=True)), state, lr_scale=rate_at(step, steps), step=step)
    seconds = time.process_time() - began
    loss = validation_loss(model, SHAPE.context) if is_evaluated else math.nan
    return {"bits_per_byte": loss / math.log(2), "seconds": round(seconds, 3)}
