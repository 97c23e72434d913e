"""The tensors of models that no gradient moves, and that must be equal on all ranks all the same.

A loop may put another tensor in a buffer's place (`self.center = 0.9 * self.center + 0.1 * batch.mean(0)`), so they are
looked up whenever they are compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from torch import Tensor, nn


class UntrainedTensors:
    """The frozen parameters and the buffers of models, but BatchNorm's, which have a warning of their own.

    A buffer that is not saved with the model and has another shape than at first is a cache, which grows with what a
    rank has seen: it is left out.
    """

    def __init__(self, models: Sequence[nn.Module] = ()) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._unsaved = {name: buffer.shape for name, buffer, is_saved in self._buffers() if not is_saved}

    def by_name(self) -> dict[str, Tensor]:
        """Return the tensors as they are now."""
        held = {
            name: buffer
            for name, buffer, is_saved in self._buffers()
            if is_saved or self._unsaved.get(name) == buffer.shape
        }
        frozen = {
            f"{prefix}{name}": param
            for prefix, model in self._living()
            for name, param in model.named_parameters()
            if not param.requires_grad
        }
        return held | frozen

    def _living(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the models that are left, and before each what tells its names from those of the others."""
        for index, ref in enumerate(self._models):
            if (model := ref()) is not None:
                yield f"model {index} " if len(self._models) > 1 else "", model

    def _buffers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield name and buffer, and whether it is saved with the model."""
        for prefix, model in self._living():
            for name, layer in model.named_modules():
                if isinstance(layer, nn.modules.batchnorm._NormBase):
                    continue
                for own, buffer in layer.named_buffers(recurse=False):
                    is_saved = own not in layer._non_persistent_buffers_set
                    yield prefix + f"{name}.{own}".lstrip("."), buffer, is_saved
