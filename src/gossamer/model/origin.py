"""The model source of a run: what the configuration names, with its adapter or side network, and what is frozen."""

from __future__ import annotations

from gossamer.model import adapter as adapters
from gossamer.model import side as sides
from gossamer.model.adapted_source import AdaptedSource
from gossamer.model.frozen_source import FrozenSource
from gossamer.model.quantized_folder import QuantizedFolderSource, quantized_folder_of
from gossamer.model.quantized_source import GgufBlocksSource, QuantizedSource
from gossamer.model.sided_source import SidedSource
from gossamer.model.source import ModelSource, named_by
from gossamer.model.started_source import StartedSource, start_of
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import MethodConfig


def origin_of(section: ModelSection) -> ModelSource:
    """Return the model source that the configuration names; raise BadInput, also if it names none."""
    quantized = quantized_folder_of(section)
    found = named_by(section) if quantized is None else QuantizedFolderSource.of(quantized, section.dtype)
    if section.start is not None and quantized is None:
        found = StartedSource(found, section.start)
    if section.base == "gguf":
        found = GgufBlocksSource(found)
    elif section.base != "full":
        found = QuantizedSource(found, section.base)
    if section.adapter != "none":
        adapter = adapters.build(section.adapter, key=adapters.KEY)
        _check_base(section, adapter, "integers" if quantized is not None else section.base)
        files = tuple(one.absolute() for one in adapter.files())
        found = AdaptedSource(found, adapter, section.adapter, start_of(section), files)
    if section.side != "none":
        found = SidedSource(found, sides.build(section.side, key=sides.KEY), section.side)
    if section.freeze or section.unfreeze:
        found = FrozenSource(found, tuple(section.freeze), tuple(section.unfreeze))
    return found


def _check_base(section: ModelSection, adapter: adapters.Adapter, held: str) -> None:
    """Raise BadInput for an adapter that cannot be put on layers in blocks."""
    if held == "full" or adapter.takes_blocks:
        return
    fit = [name for name in adapters.names() if adapters.REGISTRY.type(name).takes_blocks]
    raise bad_input(
        wanted=f"an adapter that goes on a base in {held}: {', '.join(fit)}",
        got=MethodConfig.parse(section.adapter).name,
        do="choose one of these, or a base in full precision",
        key="model.base",
    )
