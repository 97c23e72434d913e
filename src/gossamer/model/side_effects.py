"""A look at what a model computes, of which nothing stays: counting, rehearsing, judging, evaluating, sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from gossamer.model.snapshot import Copies, Snapshot, context_kept

T = TypeVar("T")


@contextmanager
def untouched(module: nn.Module, *, is_timed: bool = False, parameters: bool = True) -> Iterator[None]:
    """Parameters, buffers, gradients, Python state, generators and modes are afterwards as they were.

    Of a tensor that a forward writes to, a copy is made right before. `is_timed`: of all tensors before the first
    forward, so that nothing but the model's own work is done in between; so it is where code is compiled, whose writes
    nobody sees. Without `parameters` these are not the module's to write to: they come and go while it runs.
    """
    snapshot = Snapshot.of(module, without=() if parameters else list(module.parameters()))
    copies = Copies(snapshot.tensors if is_timed or snapshot.is_compiled else snapshot.tensors + snapshot.gradients)
    with ExitStack() as stack:
        stack.callback(snapshot.put_back)
        stack.callback(copies.put_back)
        stack.enter_context(context_kept())
        if is_timed or snapshot.is_compiled:
            copies.make()
        else:
            stack.enter_context(copies.watching())
        yield


def gradless(run: Callable[[], Tensor]) -> Tensor:
    """What `run` gives, without a graph; where it takes a gradient on its way (a penalty), cut off afterwards."""
    with torch.no_grad():
        try:
            return run()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
    with torch.enable_grad():
        return run().detach()
