"""The losses of a teacher and of its student before a distillation, on the run's own validation sets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn

from gossamer.job.found_teacher import find_teacher
from gossamer.job.text_evaluation import EvaluatedModel
from gossamer.job.training_data import corpus_of, open_validation_sets
from gossamer.job.worker import origin_for
from gossamer.loss.next_token import NextToken
from gossamer.model.forward_adapter import ForwardAdapter, caller_of
from gossamer.model.precision import precision_of
from gossamer.run.batches import TextBatches
from gossamer.run.engine import check_isolates
from gossamer.spec.config import RunConfig

Progress = Callable[[str, int, int], None]  # what is done, how many parts of it, of how many


def losses_before(
    config: RunConfig, teacher: str, progress: Progress = lambda what, done, total: None
) -> dict[str, dict[str, float]]:
    """Return the loss (nats/token) of "teacher" and of "student" on every validation set, by the set's name.

    They are over the sequences of which training reports the student's loss. Empty for data that is no text, or of
    which nothing is held out. Raises BadInput.
    """
    if config.data.factory is not None or not config.data.validation:
        return {}
    progress("reads the data", 0, 0)
    corpus = corpus_of(config.data)
    sets = {name: TextBatches(one.sequences) for name, one in open_validation_sets(corpus, config.data).items()}
    sets = {name: one for name, one in sets.items() if len(one)}
    found: dict[str, dict[str, float]] = {name: {} for name in sets}
    for who in ("teacher", "student"):
        progress(f"makes the {who} ready", 0, 0)
        module = (
            find_teacher(teacher).module if who == "teacher" else origin_for(config, corpus).build(config.train.seed)
        )
        caller = caller_of(module, corpus.train.batch(np.zeros(1, np.int64)))
        if config.data.isolate:
            check_isolates(module, caller, f"of the {who} ")
        for name, batches in sets.items():
            of = f"measures the {who} on {name} before the first step, sequences"
            found[name][who] = _loss(module, caller, batches, config.train.evaluate_sequences, partial(progress, of))
    return found


def _loss(
    module: nn.Module, caller: ForwardAdapter, batches: TextBatches, most: int, progress: Callable[[int, int], None]
) -> float:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = EvaluatedModel(
        module=module.to(device).eval(),
        caller=caller,
        loss=NextToken(),
        precision=precision_of("fp32"),
        device=device,
    )
    chosen = batches.first(most)
    progress(0, len(chosen))
    nats, labels = model.on(batches, chosen, lambda done: progress(done, len(chosen)))
    return nats / labels if labels else float("nan")
