"""Trace of one forward, on shapes alone if these determine the data flow (see `trace_backends.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.model.split.dataflow import DataFlow
from gossamer.model.split.random_branches import RandomExtreme
from gossamer.model.split.restore import undone
from gossamer.model.split.trace_backends import EagerOps, FakeTensorOps, unlogged
from gossamer.model.split.tracer import ForwardTracer
from gossamer.spec.errors import BadInput, RunFailed


def trace(
    module: nn.Module,
    run: Callable[[], Any],
    *,
    units: Sequence[str],
    fake: bool = True,
    lot: RandomExtreme = RandomExtreme.ANY,
) -> DataFlow:
    """Trace `run`, which calls `module` once and returns all that its caller needs (a loss). Return the data flow.

    Parameters, buffers and generators are left as they were. Gradients are enabled, as in training. The first trace has
    no activations. If the forward needs values that are not there (or not `fake`), `run` is called again on real
    tensors, without saving tensors for a backward. If it needs these too (a gradient within the forward), it is called
    as in training. `lot`: random numbers that generators begin with, equal on every rank.
    """
    if fake:
        unreal = FakeTensorOps(module)
        try:
            flow = _traced(ForwardTracer(module, tuple(units), unreal, lot), run, unlogged())
        except Exception:  # whatever it was: the run on real tensors works, or fails with a better error
            unreal.refused = True
        if not unreal.refused:
            return flow
    try:
        return _traced(ForwardTracer(module, tuple(units), EagerOps(), lot), run, _without_graph())
    except BadInput:
        raise
    except Exception:
        return _traced(ForwardTracer(module, tuple(units), EagerOps(), lot), run, nullcontext())


def _traced(watch: ForwardTracer, run: Callable[[], Any], graph: AbstractContextManager[None]) -> DataFlow:
    with ExitStack() as stack:
        stack.enter_context(
            undone(watch.module, watch.buffers, parameters=not isinstance(watch.operators, FakeTensorOps))
        )
        watch.lot.begin()
        stack.enter_context(torch.enable_grad())
        stack.enter_context(graph)
        stack.enter_context(_uncached())
        watch.install(stack)
        with watch:
            result = _run(watch, run)
            ends = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        watch.finish(ends)
    return watch.flow()


def _run(watch: ForwardTracer, run: Callable[[], Any]) -> Any:
    watch.until = _run.__code__
    try:
        return run()
    except Exception:
        if watch.refused is not None:  # raised in a thread of the model's own, and lost there
            raise watch.refused from None
        raise


@contextmanager
def _without_graph() -> Iterator[None]:
    """Drop the tensors that operators save for their backward."""

    def absent(_: None) -> Tensor:
        raise RunFailed("a gradient is computed in a forward without a graph")

    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, absent):
        yield


@contextmanager
def _uncached() -> Iterator[None]:
    """Let autocast cast a weight wherever it is used: no stage has the copy that another one made."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
