"""The parts of a rank's trainer, from the model that was planned and the request for which it was planned."""

from __future__ import annotations

from collections.abc import Mapping

from gossamer.model.text_stream import TextCoder
from gossamer.partition.rank_model import RankModel
from gossamer.partition.request import PartitionRequest
from gossamer.run.parts import Parts
from gossamer.run.validation_set import ValidationSet


def parts_of(
    asked: PartitionRequest,
    held: RankModel,
    *,
    validation: Mapping[str, ValidationSet] | None,
    words: TextCoder | None,
    base: str = "",
) -> Parts:
    """Return the parts; `words`: the tokenizer, where the data is text; `base`: digest of what an adapter is on."""
    return Parts(
        module=held.module,
        objective=asked.objective,
        train=asked.batches,
        validation=validation or {},
        config=asked.config,
        plan=held.plan,
        device=asked.device,
        cut=held.cut,
        words=words,
        base=base,
    )
