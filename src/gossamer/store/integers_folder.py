"""The folder of a model's integers at several widths: what `model.adapter: qfa` begins from.

integers.safetensors  LAYER.BITS.weight_blocks and LAYER.BITS.weight_scales of every linear layer and every width
integers.json         format, method as written, group, widths, layers; name -> shape, dtype and checksum; of the model
                      that was quantized the checksum of every parameter, in float32; figures that were said

It is no model: the model that was quantized is needed with it. A folder is there completely or not at all. A tensor is
compared with its checksum when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Written
from gossamer.store.checked_tensors import check_absent, read_tensor, write_tensors
from gossamer.store.huggingface import new_folder

FORMAT = 1
HEAD, TENSORS = "integers.json", "integers.safetensors"
_ENTRIES = ("method", "group", "widths", "layers", "weights", "said", "tensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegersContent:
    """What a folder of integers is to hold.

    `tensors`: by LAYER.BITS.BUFFER; `method`: the quantizer as written, without its bits; `weights`: checksums of the
    parameters of the model that was quantized, by name; `said`: figures for people.
    """

    tensors: Mapping[str, Tensor]
    method: Written
    group: int
    widths: Sequence[int]
    layers: Sequence[str]
    weights: Mapping[str, int]
    said: Mapping[str, Any]


def write_integers(target: Path, content: IntegersContent) -> int:
    """Write the new folder `target`, completely or not at all; return the bytes of its tensors.

    Raises BadInput where `target` exists or cannot be written, RunFailed where the disk is full.
    """
    check_absent(target)
    head: dict[str, Any] = {"format": FORMAT, "method": content.method, "group": content.group}
    head |= {"widths": [*content.widths], "layers": [*content.layers], "said": dict(content.said)}
    head["weights"] = dict(content.weights)
    with new_folder(target) as partial:
        head["tensors"] = write_tensors(partial / TENSORS, content.tensors)
        (partial / HEAD).write_text(json.dumps(head, indent=2) + "\n")
    return sum(tensor.nbytes for tensor in content.tensors.values())


@dataclass(frozen=True)
class IntegersFolder:
    """A folder of integers that is there. `key`: of the configuration that names it, for messages."""

    path: Path
    key: str

    @property
    def group(self) -> int:
        """The neighbors in a row that share a scale; 0: a row."""
        return int(self._head["group"])

    @property
    def widths(self) -> tuple[int, ...]:
        """The bits of an integer that every layer is held at, rising."""
        return tuple(int(one) for one in self._head["widths"])

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers."""
        return tuple(str(one) for one in self._head["layers"])

    @property
    def weights(self) -> dict[str, int]:
        """The checksums of the parameters of the model that was quantized, by name."""
        return {str(name): int(one) for name, one in self._head["weights"].items()}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, compared with its checksum. Raises BadInput."""
        known = self._head["tensors"].get(name)
        if known is None:
            raise self.damaged(f"a {HEAD} without {name}")
        return read_tensor(self.path / TENSORS, name, known, self.damaged)

    def files(self) -> list[Path]:
        """Return its files, for a fingerprint. Raises BadInput for one that is missing."""
        found = [self.path / HEAD, self.path / TENSORS]
        if missing := [one.name for one in found if not one.is_file()]:
            raise bad_input(
                wanted=f"the folder of integers {self.path}, which gossamer quantize --bits 2,3,4 --out wrote",
                got=f"no {missing[0]} there",
                do="write it, or leave integers out, to round to nearest",
                key=self.key,
            )
        return found

    def damaged(self, got: str) -> BadInput:
        """Return the error for a folder that is not as it was written."""
        do = "write the folder anew with gossamer quantize"
        return bad_input(wanted=f"{self.path} as it was written", got=got, do=do, key=self.key)

    @cached_property
    def _head(self) -> dict[str, Any]:
        head, _ = self.files()
        try:
            found = json.loads(head.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise self.damaged(f"a {HEAD} that cannot be read ({error})") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            got = found.get("format") if isinstance(found, dict) else type(found).__name__
            do = "write it anew with gossamer quantize of this version"
            raise bad_input(wanted=f"format {FORMAT} in {head}", got=str(got), do=do, key=self.key)
        if missing := [one for one in _ENTRIES if one not in found]:
            raise self.damaged(f"a {HEAD} without {missing[0]}")
        return found
