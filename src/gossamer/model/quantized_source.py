"""A model source whose frozen linear layers are held in blocks: int8, int4, bf16, or those of a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from gossamer.model.quantize_base import quantize_base
from gossamer.model.source.gguf import Gguf
from gossamer.model.wrapped_source import WrappedSource
from gossamer.spec.errors import bad_input
from gossamer.store.file_digest import digest


@dataclass(frozen=True)
class QuantizedSource(WrappedSource):
    """The source of the model that `inner` builds, with its linear layers in blocks of `format`.

    Embeddings, a head tied to them and norms stay as they are. The weights are encoded when they have been read, so a
    rank of a model in stages encodes all of them.
    """

    format: str

    def describe(self) -> str:
        return f"{self.inner.describe()}, linear layers in {self.format}"

    def build(self, seed: int) -> nn.Module:
        module = self.inner.build(seed)
        quantize_base(module, self.format)
        return module

    def bare(self, seed: int) -> nn.Module:
        """Build what `build` builds: a weight is encoded from its values, so there is nothing to leave out."""
        return self.build(seed)

    @property
    def has_weights(self) -> bool:
        return False

    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> frozenset[str]:
        return frozenset()

    def fingerprint(self) -> str:
        return digest([self.inner.fingerprint(), self.format])


@dataclass(frozen=True)
class GgufBlocksSource(WrappedSource):
    """The source of a GGUF file's model, with its linear layers in the very blocks of the file."""

    def describe(self) -> str:
        return self.inner.describe().replace("its weights dequantized", "its linear layers in the file's blocks")

    def build(self, seed: int) -> nn.Module:
        return self._file().build_in_blocks(seed)

    def bare(self, seed: int) -> nn.Module:
        """Build what `build` builds: blocks are buffers, which every rank holds."""
        return self.build(seed)

    @property
    def has_weights(self) -> bool:
        return False

    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> frozenset[str]:
        return frozenset()

    def fingerprint(self) -> str:
        return digest([self.inner.fingerprint(), "blocks"])

    def _file(self) -> Gguf:
        if not isinstance(self.inner, Gguf):
            raise bad_input(
                wanted="a GGUF file (model.gguf), to keep its blocks",
                got=self.inner.describe(),
                do="write model.base: int8 or int4, which encode any weights",
                key="model.base",
            )
        return self.inner
