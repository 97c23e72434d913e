"""Adapter that calls a module whose forward signature is unknown."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gossamer.spec.errors import bad_input

_FIRST, _LABELS = "input_ids", "labels"


@dataclass(frozen=True, slots=True)
class ForwardAdapter:
    """An adapter that passes a batch to one kind of forward: made once, then cheap at every call.

    Keys that are no name of a parameter ("loss.reference") are for the loss alone.
    """

    takes: frozenset[str]  # batch keys passed by name
    takes_all: bool  # forward has **kwargs: every key is passed
    first: str | None  # parameter that gets `input_ids` by position, unless the batch has a key of its name
    constant: tuple[tuple[str, Any], ...]  # arguments that are always passed

    def __call__(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        """Return the output of the module's forward on `batch`; keys that forward does not take are dropped."""
        named = {k: v for k, v in batch.items() if k in self.takes or (self.takes_all and k.isidentifier())}
        if self.first is None or self.first in batch or _FIRST not in batch:
            return module(**named, **dict(self.constant))
        named.pop(_FIRST, None)
        return module(batch[_FIRST], **named, **dict(self.constant))


def caller_of(module: nn.Module, given: Collection[str] = ()) -> ForwardAdapter:
    """Return the adapter that calls `module`. `given`: keys of its batches.

    A key is passed if forward has a parameter of that name, or takes **kwargs. If none is called `input_ids`, the
    tokens are the first argument, whatever its name. Models that keep a cache for generation get use_cache=False.
    Raises BadInput if forward takes neither tokens nor any key in `given`, or needs an argument that is neither usual
    nor in `given`.
    """
    inner = getattr(module, "_orig_mod", module)  # the module that torch.compile wrapped
    parameters = inspect.signature(inner.forward).parameters
    open_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    by_name = [n for n, p in parameters.items() if p.kind in open_kinds]
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    positional = _FIRST not in by_name and any(
        p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY) for p in parameters.values()
    )
    if not (_FIRST in by_name or positional or takes_all or set(by_name).intersection(given) - {_LABELS}):
        raise bad_input(
            wanted=f"a forward that takes tokens, as its first parameter or as {_FIRST}",
            got=f"{type(inner).__name__}.forward{inspect.signature(inner.forward)}",
            do=f"add a parameter {_FIRST} to forward",
            key="model",
        )
    first = next(iter(parameters)) if positional else None
    _check_required(inner, parameters, {_FIRST, _LABELS, "attention_mask", "position_ids", first, *given})
    return ForwardAdapter(
        takes=frozenset(by_name),
        takes_all=takes_all,
        first=first,
        constant=_without_cache(inner, by_name, takes_all),
    )


def _without_cache(module: nn.Module, by_name: list[str], takes_all: bool) -> tuple[tuple[str, Any], ...]:
    """Return use_cache=False for models of transformers.

    A cache costs memory, and with one packed documents are not kept apart.
    """
    configured = hasattr(getattr(module, "config", None), "use_cache")
    return (("use_cache", False),) if configured and (takes_all or "use_cache" in by_name) else ()


def _check_required(
    module: nn.Module, parameters: Mapping[str, inspect.Parameter], known: Collection[str | None]
) -> None:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needs = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in variable and n not in known]
    if needs:
        raise bad_input(
            wanted="a forward that needs only input_ids, labels, attention_mask, position_ids",
            got=f"{type(module).__name__}.forward, which also needs {', '.join(needs)}",
            do="give these parameters a default, or wrap the model in a module that fills them in (model.factory)",
            key="model",
        )
