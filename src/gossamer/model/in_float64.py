"""Run a forward in float64 throughout, also where its code asks for float32: for proofs to the last digits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that leaves float64 tensors in float64 where a copy in a smaller type is asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_cast = func is torch.ops.aten._to_copy.default and isinstance(args[0], Tensor)
        if is_cast and args[0].dtype is torch.float64:
            wanted = kwargs.get("dtype")
            if wanted is not None and wanted.is_floating_point:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
