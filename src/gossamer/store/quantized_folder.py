"""The folder of a quantized model: packed integers and their scales, and the tensors that stay as they are.

quantized.safetensors  every tensor once: LAYER.weight_blocks and LAYER.weight_scales of a quantized layer, the others
                       by their canonical name
quantized.json         format, method as written, digest of the source, each layer's format and shape, name -> shape,
                       dtype and checksum, figures that were said
config.json, ...       of the model, with its tokenizer files

transformers does not take it for a model of its own, as it finds no weights there: `gossamer export FOLDER` writes one.
A folder is there completely or not at all. Every tensor is compared with its checksum when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Written
from gossamer.store.checked_tensors import check_absent, read_tensor, write_tensors
from gossamer.store.huggingface import new_folder

FORMAT = 1
HEAD, WEIGHTS = "quantized.json", "quantized.safetensors"

Content: TypeAlias = Mapping[str, bytes | Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHead:
    """What quantized.json says of a layer. `format`: as written; `is_turned`: it stands for a Conv1D.

    `rank`: of the low-rank adapter beside it, 0 for none, which counts `scale` times.
    """

    format: Written
    shape: tuple[int, int]
    is_turned: bool
    has_bias: bool
    rank: int = 0
    scale: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedContent:
    """What a quantized folder is to hold.

    `model`: what builds the model without weights: {"hf": "."}, or {"factory": ..., "config": ...}, with its dtype.
    `method`: the quantizer as written; `source`: digest of the model it was made of; `said`: figures for people.
    """

    tensors: Mapping[str, Tensor]
    layers: Mapping[str, LayerHead]
    model: Mapping[str, Any]
    method: Written
    source: str
    config: Mapping[str, Any]
    files: Content = field(default_factory=dict)
    said: Mapping[str, Any] = field(default_factory=dict)


def write_quantized(target: Path, content: QuantizedContent) -> int:
    """Write the new folder `target`, completely or not at all; return the bytes of its tensors.

    Raises BadInput where `target` exists or cannot be written, RunFailed where the disk is full.
    """
    check_absent(target)
    layers = {name: asdict(one) for name, one in content.layers.items()}
    head: dict[str, Any] = {"format": FORMAT, "method": content.method, "source": content.source}
    head |= {"model": dict(content.model), "said": dict(content.said), "layers": layers}
    with new_folder(target) as partial:
        head["tensors"] = write_tensors(partial / WEIGHTS, content.tensors)
        for name, data in content.files.items():
            (partial / name).write_bytes(data.read_bytes() if isinstance(data, Path) else data)
        (partial / "config.json").write_text(json.dumps(dict(content.config), indent=2) + "\n")
        (partial / HEAD).write_text(json.dumps(head, indent=2) + "\n")
    return sum(tensor.nbytes for tensor in content.tensors.values())


@dataclass(frozen=True)
class QuantizedFolder:
    """A quantized folder that is there. `key`: of the configuration that names it, for messages."""

    path: Path
    key: str = "model.hf"

    @staticmethod
    def is_at(path: Path) -> bool:
        """Return whether a folder is a quantized folder."""
        return (path / HEAD).is_file()

    @property
    def method(self) -> Written:
        """The quantizer that made the integers, as written."""
        found: Written = self._head["method"]
        return found

    @property
    def model(self) -> Mapping[str, Any]:
        """What builds the model without weights, as in the section `model` of a configuration."""
        found: dict[str, Any] = self._head["model"]
        return found

    @property
    def said(self) -> Mapping[str, Any]:
        """The figures that were said when it was written."""
        found: dict[str, Any] = self._head["said"]
        return found

    @property
    def layers(self) -> dict[str, LayerHead]:
        """The quantized layers, by name."""
        return {
            name: LayerHead(
                format=one["format"],
                shape=(int(one["shape"][0]), int(one["shape"][1])),
                is_turned=bool(one["is_turned"]),
                has_bias=bool(one["has_bias"]),
                rank=int(one["rank"]),
                scale=float(one["scale"]),
            )
            for name, one in self._head["layers"].items()
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by name, each compared with its checksum. Raises BadInput."""
        known: dict[str, Any] = self._head["tensors"]
        try:
            with safe_open(str(self.path / WEIGHTS), framework="pt") as stored:
                there = sorted(stored.keys())
        except (OSError, SafetensorError) as error:
            raise self.damaged(f"{WEIGHTS} that cannot be read ({error})") from None
        if there != sorted(known):
            raise self.damaged(f"{WEIGHTS} with other tensors")
        for name, one in known.items():
            yield name, read_tensor(self.path / WEIGHTS, name, one, self.damaged)

    def files(self) -> list[Path]:
        """Return the files of tensors, for a fingerprint."""
        return [self.path / HEAD, self.path / WEIGHTS]

    def damaged(self, got: str) -> BadInput:
        """Return the error for a folder that is not as it was written."""
        do = "write the folder anew with gossamer quantize"
        return bad_input(wanted=f"{self.path} as it was written", got=got, do=do, key=self.key)

    @cached_property
    def _head(self) -> dict[str, Any]:
        try:
            found = json.loads((self.path / HEAD).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise self.damaged(f"a {HEAD} that cannot be read ({error})") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            got = found.get("format") if isinstance(found, dict) else type(found).__name__
            do = "write it anew with gossamer quantize of this version"
            raise bad_input(wanted=f"format {FORMAT} in {self.path / HEAD}", got=str(got), do=do, key=self.key)
        if missing := [k for k in ("method", "source", "model", "said", "layers", "tensors") if k not in found]:
            raise self.damaged(f"a {HEAD} without {missing[0]}")
        return found
