"""Inputs of layers kept in FP8: peaks of a forward and backward pass beside plain training, and the loss in the end.

The peaks are those of `recompute`'s model. The loss is of `small_states`'s model, with AdamW from the same seeds, on
the same batches, in pairs; AdamW's runs are those of `small_states`. Seconds of its steps are those of the processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median, stdev

from claims._trials import Trials
from savers import Row
from savers.recompute import measured
from savers.small_states import LR, QUICK_TOKENS, SEEDS, TOKENS, in_turns, told

NOT_QUICK = f"{TOKENS:,} tokens and 3 seeds: quick trains one seed on {QUICK_TOKENS:,}"
_METHOD = "fp8_activations"


def rows(*, quick: bool, trials: Trials, tokens: int = TOKENS) -> Iterator[Row]:
    """Rows of the peak and of the loss."""
    for savers, what, peer in (([], "plain training", "plain"), ([_METHOD], "inputs of all layers", "")):
        yield measured(savers, what, 2 if quick else 5, peer=peer, method=_METHOD)
    tokens, seeds = (QUICK_TOKENS, SEEDS[:1]) if quick else (tokens, SEEDS)
    found = in_turns(("adamw", _METHOD), seeds, tokens, trials)
    pairs = list(zip(found["adamw"], found[_METHOD], strict=True))
    plain, ours = ([pair[side]["loss"] for pair in pairs] for side in (0, 1))
    ratios = [b / a for a, b in zip(plain, ours, strict=True)]
    yield Row(
        method=_METHOD,
        setting=f"{tokens:,} tokens, {told(seeds[: len(pairs)], seeds)}, adamw, lr {LR:g}, 1 thread",
        step_s=round(median(pair[1]["step_s"] for pair in pairs), 4),
        loss=round(mean(ours), 5),
        details={
            "losses": [round(one, 5) for one in ours],
            "of_plain": [round(one, 6) for one in ratios],
            "mean_of_plain": round(mean(ratios), 6),
            "spread_of_plain": round(stdev(plain) / mean(plain), 6) if len(plain) > 1 else None,
            "step_of_plain": round(median(b["step_s"] / a["step_s"] for a, b in pairs), 4),
        },
    )
