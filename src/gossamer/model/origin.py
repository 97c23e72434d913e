"""The model source of a run: what the configuration names, with its adapter and its frozen parameters."""

from __future__ import annotations

from gossamer.model import adapter as adapters
from gossamer.model.adapted_source import AdaptedSource
from gossamer.model.frozen_source import FrozenSource
from gossamer.model.source import ModelSource, named_by
from gossamer.spec.config import ModelSection


def origin_of(section: ModelSection) -> ModelSource:
    """Return the model source that the configuration names; raise BadInput, also if it names none."""
    found = named_by(section)
    if section.adapter != "none":
        found = AdaptedSource(found, adapters.build(section.adapter, key=adapters.KEY), section.adapter)
    if section.freeze or section.unfreeze:
        found = FrozenSource(found, tuple(section.freeze), tuple(section.unfreeze))
    return found
