"""Tracing: one forward run under watch, on shapes alone where that says all there is to say (see `operators.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.model.cut.chance import Lot
from gossamer.model.cut.flow import Flow
from gossamer.model.cut.operators import Real, Unreal, unlogged
from gossamer.model.cut.undo import undone
from gossamer.model.cut.watch import Watch
from gossamer.spec.errors import BadInput, RunFailed


def trace(
    module: nn.Module, run: Callable[[], Any], *, units: Sequence[str], fake: bool = True, lot: Lot = Lot.ANY
) -> Flow:
    """Run `run`, which calls `module` once and returns all that its caller wants of it (a loss); say what it did.

    Parameters, buffers and generators are left as they were. Under gradients, as training does. First without
    activations; where the forward needs numbers that are not there (or not `fake`) `run` is called again, on real
    tensors and without their graph, and where it needs that too (a gradient within the forward), as in training.
    Generators begin as `lot` says: every rank sees the same.
    """
    if fake:
        unreal = Unreal(module)
        try:
            flow = _traced(Watch(module, tuple(units), unreal, lot), run, unlogged())
        except Exception:  # whatever it was, the real run goes on, or says it better
            unreal.refused = True
        if not unreal.refused:
            return flow
    try:
        return _traced(Watch(module, tuple(units), Real(), lot), run, _without_graph())
    except BadInput:
        raise
    except Exception:
        return _traced(Watch(module, tuple(units), Real(), lot), run, nullcontext())


def _traced(watch: Watch, run: Callable[[], Any], graph: AbstractContextManager[None]) -> Flow:
    with ExitStack() as stack:
        stack.enter_context(undone(watch.module, watch.buffers, parameters=not isinstance(watch.operators, Unreal)))
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


def _run(watch: Watch, run: Callable[[], Any]) -> Any:
    watch.until = _run.__code__
    try:
        return run()
    except Exception:
        if watch.refused is not None:  # in a thread of the model's own, whose code went on
            raise watch.refused from None
        raise


@contextmanager
def _without_graph() -> Iterator[None]:
    """What an operator keeps for its backward is let go."""

    def absent(_: None) -> Tensor:
        raise RunFailed("a gradient within a forward, whose graph was not kept")

    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, absent):
        yield


@contextmanager
def _uncached() -> Iterator[None]:
    """Autocast casts a weight wherever it is used: no stage has the copy that another one made."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
