"""A GGUF file, as llama.cpp writes it: its config, its tokenizer, and its tensors dequantized."""

from __future__ import annotations

import importlib
import mmap
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.model.model_profile import tied_names
from gossamer.model.seeded import seeded
from gossamer.model.source import Files, ModelSource
from gossamer.model.source import _transformers as kit
from gossamer.model.source._gguf_blocks import put_layers, read_blocks
from gossamer.model.source._gguf_config import complete
from gossamer.model.source._weights import give
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput, bad_input
from gossamer.store.file_digest import digest
from gossamer.store.gguf import GgufSummary, read_summary, without_words
from gossamer.store.gguf_vocabulary import with_pre_tokenizer

_KEY = "model.gguf"
_READER = "transformers.modeling_gguf_pytorch_utils"
_SLAB = 1 << 18  # elements that are dequantized at a time

Take = Callable[[str, Tensor], None]  # a tensor's name in the model, and the tensor


@dataclass(frozen=True)
class Gguf(ModelSource):
    """A model source that reads the GGUF file `of`. `config` sets keys of the model's config, such as a dropout.

    Quantized tensors are dequantized to fp32 and then held in `dtype`: treat the result as a checkpoint of its own.
    """

    of: str
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dtype: str = "float32"

    @classmethod
    def read(cls, section: ModelSection) -> Gguf:
        assert section.gguf is not None
        return cls(of=section.gguf, config=section.config, dtype=section.dtype)

    def fitted_to_tokenizer(self, vocabulary: int, separator: int) -> Gguf:
        return self

    def describe(self) -> str:
        return f"{self._file.name} ({self._summary.architecture}, its weights dequantized)"

    def vocabulary(self) -> int | None:
        return self._summary.vocabulary or None

    def positions(self) -> int | None:
        return self._summary.context or None

    def build(self, seed: int) -> nn.Module:
        module = self.bare(seed)
        self.load(module, _first_names(module), seed=seed)
        return module

    @property
    def has_weights(self) -> bool:
        return True

    @property
    def code(self) -> Callable[..., Any] | None:
        return None

    def bare(self, seed: int) -> nn.Module:
        with seeded(seed), kit.quietly(_KEY, wanted=f"to build the model of {self.of}") as library:
            return kit.fresh(library, self._config, self.dtype)

    def build_in_blocks(self, seed: int) -> nn.Module:
        """Build the model with its linear layers frozen, in the very blocks of the file (see `keep_blocks`)."""
        module = self.bare(seed)
        self.keep_blocks(module)
        self.load(module, _first_names(module), seed=seed)
        return module

    def keep_blocks(self, module: nn.Module) -> dict[str, str]:
        """Replace linear layers of `module` by quantized ones for the blocks of the file; return their GGUF types.

        The layers (by name) are those that `quantize_base` would take and the file does not hold in float32. They have
        no values yet: `load` fills them, by the names of their buffers, without decoding anything. Rows that llama.cpp
        permutes are put in order, which changes no block. Raises BadInput for an architecture whose weights llama.cpp
        holds in another layout.
        """
        with kit.quietly(_KEY, wanted=f"the blocks of a {self._config.model_type} in {self.of}"), without_words():
            return put_layers(importlib.import_module("gguf").GGUFReader(str(self._file)), module)

    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> frozenset[str]:
        first = {name: group[0] for group in tied_names(module) for name in group}
        wanted = frozenset(name for name in module.state_dict() if first.get(name, name) in names)
        missing = {first.get(name, name) for name in wanted}

        def take(name: str, tensor: Tensor) -> None:
            give(module, first.get(name, name), tensor)
            missing.discard(first.get(name, name))

        with kit.quietly(_KEY, wanted=f"the weights of a {self._config.model_type} in {self.of}"):
            _read(self._file, module, wanted, take)
        if missing:
            raise bad_input(
                wanted=f"{len(wanted)} tensors of a {self._config.model_type} in {self.of}",
                got=f"no weights for {', '.join(sorted(missing)[:3])} ({len(missing)} in all)",
                do="give a complete file of a model that transformers knows, or its safetensors by model.hf",
                key=_KEY,
            )
        return frozenset()

    def files(self) -> Files:
        """Return the tokenizer in the file, in the files that transformers writes."""
        with kit.quietly(_KEY, wanted=f"a tokenizer in {self.of}") as library, tempfile.TemporaryDirectory() as folder:
            tokenizer = library.AutoTokenizer.from_pretrained(
                str(self._file.parent), gguf_file=self._file.name, local_files_only=True
            )
            tokenizer.save_pretrained(folder)
            files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}
        files["tokenizer.json"] = with_pre_tokenizer(files["tokenizer.json"], self._summary.tokenizer.partition("/")[2])
        return dict(files)

    def kept(self) -> Files:
        return {**self.files(), "config.json": kit.written(self._config)}

    def fingerprint(self) -> str:
        return digest([self.dtype, dict(self.config)], [self._file])

    @cached_property
    def _file(self) -> Path:
        return self._summary.path

    @cached_property
    def _summary(self) -> GgufSummary:
        """Read the file's own summary; raise BadInput for a truncated file, or one that is no GGUF."""
        try:
            return read_summary(Path(self.of).expanduser().absolute())
        except BadInput as error:
            raise BadInput(error.message, key=_KEY) from None

    @cached_property
    def _config(self) -> Any:
        wanted = f"a model that transformers knows in {self.of}"
        with kit.quietly(_KEY, wanted=wanted) as library, without_words():
            config = library.AutoConfig.from_pretrained(
                str(self._file.parent), gguf_file=self._file.name, local_files_only=True
            )
            kit.check_keys(type(config), self.config)
            complete(config, importlib.import_module("gguf").GGUFReader(str(self._file)))
            config.update(dict(self.config))
            return config


def _first_names(module: nn.Module) -> frozenset[str]:
    """Return the names of all tensors of a module, tied ones once."""
    return frozenset(module.state_dict()) - {n for group in tied_names(module) for n in group[1:]}


def _read(file: Path, module: nn.Module, wanted: frozenset[str], take: Take) -> None:
    """Pass the tensors of `file` that are named in `wanted` in `module` to `take`, in fp32, one after the other."""
    reader, package = importlib.import_module(_READER), importlib.import_module("gguf")
    # the reader asks for one and the same table once per module: 4 of 10 seconds for a model of 30 blocks
    with without_words(), kit.replaced(package, "get_tensor_name_map", lru_cache(maxsize=None)):
        parsed = reader.load_gguf_checkpoint(str(file)) | {"tensors": {}}
        opened = package.GGUFReader(str(file))
        kind = bytes(opened.fields["general.architecture"].parts[-1]).decode()
        processor = reader.TENSOR_PROCESSORS.get(kind, reader.TensorProcessor)(config=parsed["config"])
        names = reader.get_gguf_hf_weights_map(module, processor)
    for name, blocks in read_blocks(opened, module, wanted):
        take(name, blocks)
    for held in opened.tensors:
        if names.get(held.name, held.name) not in wanted:
            continue
        made = processor.process(
            weights=_dequantized(held), name=held.name, tensor_key_mapping=names, parsed_parameters=parsed
        )
        if made.name in names:
            take(names[made.name], torch.from_numpy(np.ascontiguousarray(made.weights)))
    for name, tensor in parsed["tensors"].items():  # assembled from several tensors
        take(name, tensor)


def _dequantized(held: Any) -> Any:
    """Return a tensor dequantized in slabs of rows: at once, the package would hold all elements twice."""
    package = importlib.import_module("gguf")
    rows = max(1, len(held.data) * _SLAB // held.n_elements)
    whole: Any = None
    for start in range(0, len(held.data), rows):
        slab = package.dequantize(held.data[start : start + rows], held.tensor_type)
        if whole is None:
            whole = np.empty((len(held.data), *slab.shape[1:]), dtype=slab.dtype)
        whole[start : start + rows] = slab
        held.data._mmap.madvise(mmap.MADV_DONTNEED)  # pages that were read need not stay in memory
    return whole
