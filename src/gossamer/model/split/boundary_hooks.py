"""Backward hooks of units at a stage boundary.

torch runs them around `forward` and the forward hooks of a module, but the stage boundary is directly after `forward`:
the output of a unit called in one stage would be sent without them. So they run around `forward` alone, on the stage
that owns the unit, and nowhere else.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import BackwardHook

from gossamer.model.split.pytree import leaves_of
from gossamer.model.split.split_error import split_error
from gossamer.spec.errors import BadInput

Hooks = Mapping[int, Callable[..., Any]]


class BoundaryHooks:
    """The calls of one unit on one stage, with the unit's backward hooks moved inside the stage boundary."""

    def __init__(self, name: str, unit: nn.Module) -> None:
        self.name, self.unit = name, unit
        self._call: Callable[..., Any] = unit._call_impl
        self._hooks: tuple[Hooks, Hooks] | None = None  # of the call that is about to reach `forward`
        self._given: Any = None
        unit._call_impl = self.call  # type: ignore[method-assign]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the unit, with its backward hooks run in `forward`.

        Raises BadInput if a forward hook replaces the output.
        """
        unit = self.unit
        if not unit._backward_hooks and not unit._backward_pre_hooks:
            return self._call(*args, **kwargs)
        with self._without() as hooks:
            self._hooks, self._given = hooks, None
            output = self._call(*args, **kwargs)
            given, self._hooks, self._given = self._given, None, None
        if given is not None and any(a is not b for a, b in zip(leaves_of(given), leaves_of(output), strict=False)):
            raise self._refused("forward hooks that replace the output")
        return output

    def forward(self, real: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the unit's own forward `real` with its backward hooks, on the stage that owns it.

        Raises BadInput for a hook of `register_backward_hook`, which is not a full backward hook.
        """
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            return real(*args, **kwargs)
        if self.unit._is_full_backward_hook is False:
            raise self._refused("register_backward_hook")
        around: Any = BackwardHook(self.unit, [*hooks[0].values()], [*hooks[1].values()])
        output = real(*around.setup_input_hook(tuple(args)), **kwargs)
        self._given = around.setup_output_hook(output)
        return self._given

    @contextmanager
    def _without(self) -> Iterator[tuple[Hooks, Hooks]]:
        unit = self.unit
        hooks: tuple[Any, Any] = (unit._backward_hooks, unit._backward_pre_hooks)
        unit._backward_hooks, unit._backward_pre_hooks = collections.OrderedDict(), collections.OrderedDict()
        try:
            yield hooks
        finally:
            unit._backward_hooks, unit._backward_pre_hooks = hooks

    def _refused(self, got: str) -> BadInput:
        return split_error(
            wanted=f"only full backward hooks (register_full_backward_hook) on {self.name}",
            got=f"backward hooks and {got}",
            do=f"set these hooks on a module within {self.name}",
        )


def check_around(module: nn.Module, called: Mapping[str, set[int]]) -> None:
    """Raise BadInput if a module with backward hooks contains units of several stages. `called`: {unit: stages}."""
    for path, outer in module.named_modules():
        if not path or not (outer._backward_hooks or outer._backward_pre_hooks):
            continue
        stages = [found for name, found in called.items() if name.startswith(f"{path}.")]
        if len(set().union(*stages)) > 1:
            raise split_error(
                wanted=f"{path}, which has backward hooks, in one stage",
                got=f"its units in stages {', '.join(map(str, sorted(set().union(*stages))))}",
                do=lambda say: f"set the hooks on its units, or set {say.cuts} so that one stage has all of its units",
            )
