"""A GGUF file, as llama.cpp writes it: its config, its tokenizer, and its tensors dequantised."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gossamer.model.origin import Files, Origin
from gossamer.model.origin import _transformers as kit
from gossamer.model.origin._digest import digest
from gossamer.model.origin._seeded import seeded
from gossamer.model.origin._weights import put
from gossamer.model.profile import tied_names
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput, bad_input
from gossamer.store.gguf import GgufSummary, read_summary

_KEY = "model.gguf"
_READER = "transformers.modeling_gguf_pytorch_utils"


@dataclass(frozen=True)
class Gguf(Origin):
    """The model in the file `of`. Quantised tensors are dequantised to fp32 and then held in `dtype`: treat the
    result as a checkpoint of its own. `config` sets keys of the model's config, such as a dropout.
    """

    of: str
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dtype: str = "float32"

    @classmethod
    def read(cls, section: ModelSection) -> Gguf:
        assert section.gguf is not None
        return cls(of=section.gguf, config=section.config, dtype=section.dtype)

    def suited_to(self, vocabulary: int, separator: int) -> Gguf:
        return self

    def describe(self) -> str:
        return f"{self._file.name} ({self._summary.architecture}, its weights dequantised)"

    def vocabulary(self) -> int | None:
        return self._summary.vocabulary or None

    def positions(self) -> int | None:
        return self._summary.context or None

    def build(self, seed: int) -> nn.Module:
        config = self._config
        with seeded(seed), kit.quietly(_KEY, wanted=f"the weights of a {config.model_type} in {self.of}") as library:
            module = kit.fresh(library, config, self.dtype)
            missing, unexpected = module.load_state_dict(_tensors(self._file, module), strict=False)
        tied = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        tied -= {name for name, _ in module.named_parameters()}
        if wrong := sorted({*missing} - tied) + sorted(unexpected):
            raise bad_input(
                wanted=f"the weights of a {config.model_type} in {self.of}",
                got=f"{len(wrong)} names that do not match: {', '.join(wrong[:3])}",
                do="give a file of a model that transformers knows, or its safetensors by model.hf",
                key=_KEY,
            )
        return module

    def bare(self, seed: int) -> nn.Module:
        with seeded(seed), kit.quietly(_KEY, wanted=f"a model as in {self.of}") as library:
            return kit.fresh(library, self._config, self.dtype)

    def load(self, module: nn.Module, names: frozenset[str]) -> None:
        wanted = names & module.state_dict().keys()
        with kit.quietly(_KEY, wanted=f"the weights of a {self._config.model_type} in {self.of}"):
            found = _tensors(self._file, module, wanted)
        first = {name: group[0] for group in tied_names(module) for name in group}
        found = {first.get(name, name): tensor for name, tensor in found.items()}
        if missing := sorted(wanted - found.keys()):
            raise bad_input(
                wanted=f"{len(wanted)} tensors in {self.of}",
                got=f"none for {', '.join(missing[:3])} ({len(missing)} in all)",
                do="give a complete file",
                key=_KEY,
            )
        put(module, wanted, found)

    def files(self) -> Files:
        """The tokenizer in the file, as transformers writes it."""
        with kit.quietly(_KEY, wanted=f"a tokenizer in {self.of}") as library, tempfile.TemporaryDirectory() as folder:
            tokenizer = library.AutoTokenizer.from_pretrained(
                str(self._file.parent), gguf_file=self._file.name, local_files_only=True
            )
            tokenizer.save_pretrained(folder)
            return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}

    def fingerprint(self) -> str:
        return digest([self.dtype, dict(self.config)], [self._file])

    @cached_property
    def _file(self) -> Path:
        return self._summary.path

    @cached_property
    def _summary(self) -> GgufSummary:
        """What the file says of itself; a file that is cut or no GGUF is refused here."""
        try:
            return read_summary(Path(self.of).expanduser())
        except BadInput as error:
            raise BadInput(error.message, key=_KEY) from None

    @cached_property
    def _config(self) -> Any:
        with kit.quietly(_KEY, wanted=f"a model that transformers knows in {self.of}") as library:
            config = library.AutoConfig.from_pretrained(
                str(self._file.parent), gguf_file=self._file.name, local_files_only=True
            )
            kit.check_keys(type(config), self.config)
            config.update(dict(self.config))
            return config


def _tensors(file: Path, module: nn.Module, wanted: frozenset[str] | None = None) -> dict[str, Tensor]:
    """The tensors in `file`, fp32, under the names `module` has for them; those in `wanted`, or all."""
    reader, package = importlib.import_module(_READER), importlib.import_module("gguf")
    only = _Only(wanted)
    silent = kit.replaced(reader, "tqdm", only.tensors)
    mapped = kit.replaced(reader, "get_gguf_hf_weights_map", only.mapping)
    # the reader asks for one and the same table once per module: 4 of 10 seconds for a model of 30 blocks
    once = kit.replaced(package, "get_tensor_name_map", lru_cache(maxsize=None))
    with silent, mapped, once:
        loaded = reader.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=module)
    tensors: dict[str, Tensor] = loaded["tensors"]
    return tensors


@dataclass
class _Only:
    """Keeps a reader from dequantising what is not wanted; it walks over all tensors behind a progress bar."""

    wanted: frozenset[str] | None
    names: Mapping[str, str] = field(default_factory=dict)  # in the file -> in the model

    def mapping(self, original: Any) -> Any:
        def mapped(*args: Any, **kwargs: Any) -> Any:
            self.names = original(*args, **kwargs)  # calls itself for every module; the outermost ends last
            return self.names

        return mapped

    def tensors(self, _: Any) -> Any:
        def walked(tensors: Any, **__: Any) -> Any:
            return (t for t in tensors if self.wanted is None or self.names.get(t.name, t.name) in self.wanted)

        return walked
