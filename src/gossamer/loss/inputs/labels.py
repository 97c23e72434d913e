"""The labels of a batch: found, shifted to the rows that predict them, and their cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from gossamer.loss import IGNORE
from gossamer.spec.errors import bad_input

LABELS = "labels"


def labels_of(batch: Mapping[str, Tensor], key: str) -> Tensor:
    """Return the labels of a batch. Raise BadInput that lists the keys the batch has."""
    if key in batch:
        return batch[key]
    raise bad_input(
        wanted=f"a batch with the key {key!r}, which holds the labels",
        got=f"a batch with {', '.join(sorted(batch)) or 'no keys'}",
        do=f"add {key!r} to every item of the data set",
        key="data",
    )


def targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the label that each row of logits predicts, flat, -100 for none: those of tokens are shifted."""
    labels = labels_of(batch, LABELS)
    if labels.ndim == 1:
        return labels
    shifted = labels.new_full(labels.shape, IGNORE)
    shifted[:, :-1] = labels[:, 1:]
    return shifted.flatten()


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over labels other than -100, () float32, of logits (N, C) and labels (N,); 0 without any.

    Raises BadInput for a label that the model has no logit for.
    """
    try:
        total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")
    except IndexError as error:  # on a CPU; a GPU ends the process
        wrong = sorted(
            {int(label) for label in set(labels.tolist()) if label != IGNORE and not 0 <= label < logits.shape[1]}
        )
        raise bad_input(
            wanted=f"labels from 0 to {logits.shape[1] - 1}, as the model gives {logits.shape[1]} logits, or {IGNORE}",
            got=", ".join(map(str, wrong[:3])) or str(error),
            do="correct the labels of the data, or build the model with more outputs",
            key="data",
        ) from None
    return total / (labels != IGNORE).sum().clamp(min=1)
