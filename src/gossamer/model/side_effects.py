"""Run a model without lasting effects: to count, profile, verify, evaluate or generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from gossamer.model.python_state.context_variables import context_kept
from gossamer.model.snapshot import Snapshot
from gossamer.model.tensor_copies import Copies

T = TypeVar("T")


@contextmanager
def untouched(module: nn.Module, *, is_timed: bool = False, parameters: bool = True) -> Iterator[None]:
    """Restore parameters, buffers, gradients, Python state, generators and modes on exit.

    A tensor that a forward writes to is copied right before. `is_timed`: all tensors are copied before the first
    forward, so that nothing but the model's own work is timed. The same holds for compiled code, whose writes cannot be
    observed. Without `parameters`, parameters are not saved: the module must not write to them, and they may come and
    go (sharding).
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


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set the model to evaluation mode inside this context; every module has its own mode again afterwards."""
    modes = {inner: inner.training for inner in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for inner, training in modes.items():
            inner.training = training


def gradless(run: Callable[[], Tensor]) -> Tensor:
    """Return the output of `run` without a graph.

    If `run` computes a gradient itself (a penalty), it runs with a graph, and the output is detached.
    """
    with torch.no_grad():
        try:
            return run()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
    with torch.enable_grad():
        return run().detach()
