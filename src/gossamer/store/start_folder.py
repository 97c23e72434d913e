"""The start folder: initial weights that another model was made into, from which a run begins on any number of ranks.

model.safetensors    all parameters and persistent buffers by canonical name, tied ones once
start.json           format, method, digest of the source, name -> shape, dtype and checksum, figures that were said
moments.safetensors  optional: optimizer states, "SLOT/PARAMETER", e.g. mean/h.0.attn.weight; start.json has their steps
masks.safetensors    optional: which elements a parameter keeps (uint8, 1: kept), by parameter name
config.json, ...     of a Hugging Face model, with its tokenizer files: transformers loads the folder as it is

A folder is there completely or not at all. Every tensor is compared with its checksum when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Written
from gossamer.store.checked_tensors import check_absent, read_tensor, write_tensors
from gossamer.store.huggingface import new_folder

FORMAT = 1
HEAD, WEIGHTS, MOMENTS, MASKS = "start.json", "model.safetensors", "moments.safetensors", "masks.safetensors"
KEY = "model.start"
_MASK = torch.uint8
_ENTRIES = {"method", "source", "said", "moment_steps", "attributes", "config_keys"}

Kind: TypeAlias = tuple[tuple[int, ...], str]  # shape and dtype, such as ((8, 4), "float32")
Content: TypeAlias = Mapping[str, bytes | Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartContent:
    """What a start folder is to hold.

    method: as written, such as "lemon" or {"lemon": {"spread": 0.1}}; source: digest of the model it was made of; said:
    figures for people; config: of a Hugging Face model; attributes, config_keys: what the model that is built gets
    other values of, by path ("norm.eps") and by key of its config ("layer_norm_epsilon"); moments: "SLOT/PARAMETER" ->
    optimizer state, after `moment_steps` updates of the optimizer `moment_rule` ("": not known); masks: parameter ->
    which of its elements are kept.
    """

    tensors: Mapping[str, Tensor]
    method: Written
    source: str
    said: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    attributes: Mapping[str, float] = field(default_factory=dict)
    config_keys: Mapping[str, float] = field(default_factory=dict)
    files: Content = field(default_factory=dict)
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    moment_steps: int = 0
    moment_rule: str = ""
    masks: Mapping[str, Tensor] = field(default_factory=dict)


def write_start(target: Path, content: StartContent) -> int:
    """Write the new folder `target`, completely or not at all; return the bytes of the weights.

    Raises BadInput where `target` exists or cannot be written, and for a moment or mask of no parameter.
    """
    check_absent(target)
    for name in [*(slot.partition("/")[2] for slot in content.moments), *content.masks]:
        if name not in content.tensors:
            do = "write the moments and masks of its own parameters alone"
            raise bad_input(wanted=f"a parameter {name!r}, of which there is a moment or mask", got="none", do=do)
    masks = {name: mask.to(dtype=_MASK) for name, mask in content.masks.items()}
    head: dict[str, Any] = {"format": FORMAT, "method": content.method, "source": content.source}
    head |= {"said": dict(content.said), "moment_steps": content.moment_steps}
    head |= {"moment_rule": content.moment_rule}
    head |= {"attributes": dict(content.attributes), "config_keys": dict(content.config_keys)}
    with new_folder(target) as partial:
        for file, tensors in ((WEIGHTS, content.tensors), (MOMENTS, content.moments), (MASKS, masks)):
            if tensors or file == WEIGHTS:
                head[file] = write_tensors(partial / file, tensors)
        for name, data in content.files.items():
            (partial / name).write_bytes(data.read_bytes() if isinstance(data, Path) else data)
        if content.config is not None:
            (partial / "config.json").write_text(json.dumps(dict(content.config), indent=2) + "\n")
        (partial / HEAD).write_text(json.dumps(head, indent=2) + "\n")
    return sum(tensor.nbytes for tensor in content.tensors.values())


@dataclass(frozen=True)
class StartFolder:
    """A start folder that is there. `key`: of the configuration that names it, for messages."""

    path: Path
    key: str = KEY

    @staticmethod
    def is_at(path: Path) -> bool:
        """Return whether a folder is a start folder."""
        return (path / HEAD).is_file()

    @property
    def method(self) -> Written:
        """The method that made the weights, as written."""
        found: Written = self._head["method"]
        return found

    @property
    def source(self) -> str:
        """The digest of the model that the weights were made of."""
        return str(self._head["source"])

    @property
    def said(self) -> Mapping[str, Any]:
        """The figures that were said when it was written."""
        found: dict[str, Any] = self._head["said"]
        return found

    @property
    def attributes(self) -> Mapping[str, float]:
        """The attributes of modules that get another value, by path, such as the epsilon of a norm."""
        return {str(path): float(value) for path, value in self._head["attributes"].items()}

    @property
    def config_keys(self) -> Mapping[str, float]:
        """The keys of the model's config that get another value."""
        return {str(key): float(value) for key, value in self._head["config_keys"].items()}

    @property
    def moment_steps(self) -> int:
        """The updates after which the moments are."""
        return int(self._head["moment_steps"])

    @property
    def moment_rule(self) -> str:
        """The optimizer that the moments belong to, as `Optimizer.made_by` says; "" where that is not known."""
        return str(self._head.get("moment_rule", ""))

    def kinds(self, file: str = WEIGHTS) -> dict[str, Kind]:
        """Return shape and dtype of each tensor of a file, by name; empty where that file is not written."""
        found = self._head.get(file, {})
        return {name: (tuple(one["shape"]), str(one["dtype"])) for name, one in found.items()}

    @property
    def slots(self) -> frozenset[str]:
        """The slots of which there are moments."""
        return frozenset(name.partition("/")[0] for name in self.kinds(MOMENTS))

    def tensor(self, name: str, file: str = WEIGHTS) -> Tensor:
        """Read one tensor and compare it with its checksum. Raises BadInput."""
        return read_tensor(self.path / file, name, self._head[file][name], self._damaged)

    def masks(self) -> Iterator[tuple[str, Tensor]]:
        """Yield which elements a parameter keeps (bool), by name."""
        for name in self.kinds(MASKS):
            yield name, self.tensor(name, MASKS).bool()

    def check_fits(self, wanted: Mapping[str, tuple[int, ...]], model: str) -> None:
        """Raise BadInput unless the weights have these names and shapes, which are those of `model`."""
        there = self.kinds()
        for names, got in (
            (wanted.keys() - there.keys(), "no such tensor"),
            (there.keys() - wanted.keys(), "a tensor that the model does not have"),
        ):
            if names:
                first = min(names)
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise self._misfit(model, f"{first}{more}", f"the parameters of {model}", got)
        for name, shape in wanted.items():
            if there[name][0] != shape:
                raise self._misfit(model, name, f"{name} of shape {shape}", f"{there[name][0]}")

    def _misfit(self, model: str, name: str, wanted: str, got: str) -> BadInput:
        do = f"give the model that {self.path} was written for ({self.method}), or write it anew for {model}"
        return bad_input(wanted=f"{wanted} in {self.path}", got=f"{name}: {got}", do=do, key=self.key)

    def files(self) -> list[Path]:
        """Return the files of tensors, for a fingerprint."""
        return [self.path / file for file in (HEAD, WEIGHTS, MOMENTS, MASKS) if (self.path / file).is_file()]

    def _damaged(self, got: str) -> BadInput:
        do = "write the folder anew with the command that made it"
        return bad_input(wanted=f"{self.path} as it was written", got=got, do=do, key=self.key)

    @cached_property
    def _head(self) -> dict[str, Any]:
        file = self.path / HEAD
        try:
            found = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            do = "name a folder that gossamer grow, prune, quantize or distill wrote"
            wanted = f"a start folder, with {HEAD}"
            raise bad_input(wanted=wanted, got=f"{self.path}: {error}", do=do, key=self.key) from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            got = f"format {found.get('format')!r}" if isinstance(found, dict) else "another kind of file"
            do = "write the folder anew with this version of Gossamer"
            raise bad_input(wanted=f"{file} of format {FORMAT}", got=got, do=do, key=self.key)
        if not (isinstance(found.get(WEIGHTS), dict) and found.keys() >= _ENTRIES):
            raise self._damaged(f"{HEAD} that lacks entries")
        return found


def state_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a start folder for `module` holds: parameters (tied ones once) and persistent buffers."""
    return {name: tuple(tensor.shape) for name, tensor in start_state(module)}


def start_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters (tied ones once, under their first name) and persistent buffers, by name."""
    yield from module.named_parameters()
    persistent = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer
