"""The losses of a teacher and of its student before a distillation, on the run's own validation sets."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from gossamer.job.teaching import find_teacher
from gossamer.job.text_evaluation import EvaluatedModel
from gossamer.job.training_data import corpus_of, open_validation_sets
from gossamer.job.worker import origin_for
from gossamer.loss.next_token import NextToken
from gossamer.model.forward_adapter import ForwardAdapter, caller_of
from gossamer.model.precision import precision_of
from gossamer.run.batches import TextBatches
from gossamer.run.engine import check_isolates
from gossamer.spec.config import RunConfig


def losses_before(config: RunConfig, teacher: str) -> dict[str, dict[str, float]]:
    """Return the loss (nats/token) of "teacher" and of "student" on every validation set, by the set's name.

    They are over the sequences of which training reports the student's loss. Empty for data that is no text, or of
    which nothing is held out. Raises BadInput.
    """
    if config.data.factory is not None or not config.data.validation:
        return {}
    corpus = corpus_of(config.data)
    sets = {name: TextBatches(one.sequences) for name, one in open_validation_sets(corpus, config.data).items()}
    sets = {name: one for name, one in sets.items() if len(one)}
    found: dict[str, dict[str, float]] = {name: {} for name in sets}
    for who in ("teacher", "student"):
        module = (
            find_teacher(teacher).module if who == "teacher" else origin_for(config, corpus).build(config.train.seed)
        )
        caller = caller_of(module, corpus.train.batch(np.zeros(1, np.int64)))
        if config.data.isolate:
            check_isolates(module, caller, f"of the {who} ")
        for name, batches in sets.items():
            found[name][who] = _loss(module, caller, batches, config.train.evaluate_sequences)
    return found


def _loss(module: nn.Module, caller: ForwardAdapter, batches: TextBatches, most: int) -> float:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = EvaluatedModel(
        module=module.to(device).eval(),
        caller=caller,
        loss=NextToken(),
        precision=precision_of("fp32"),
        device=device,
    )
    nats, labels = model.on(batches, batches.first(most), lambda done: None)
    return nats / labels if labels else float("nan")
