"""Tensors that a run computes once, before step 1, and keeps in its folder: a later start reads them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer.comm.channel import Channel, gathered

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensors:
    """A file of tensors, whose name says what they were made of. `writes`: whether this rank writes it.

    `fits`: whether tensors that were read are those of the run; a file of others counts as none.
    """

    file: Path
    fits: Callable[[Tensors], bool]
    writes: bool

    def read_or_made(self, channel: Channel, make: Callable[[], Tensors]) -> tuple[Tensors, bool]:
        """Return the tensors, and whether they are from the file, where all ranks have it; else all `make` them."""
        kept = self._read()
        if bool(gathered(channel, [float(kept is not None)]).all()):
            assert kept is not None
            return kept, True
        made = make()
        if self.writes:
            beside = self.file.with_suffix(".part")  # so that the file is complete or absent
            save_file(dict(made), beside)
            beside.rename(self.file)
        return made, False

    def _read(self) -> Tensors | None:
        try:
            found = load_file(self.file)
        except (OSError, SafetensorError):
            return None
        return found if self.fits(found) else None
