"""The logits of the next token: from a model's key-value cache where that is equal, else from the whole window."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.forward_adapter import ForwardAdapter, caller_of
from gossamer.model.side_effects import gradless
from gossamer.spec.errors import bad_input

_CACHES = ("past_key_values", "cache", "cache_params")  # the arguments of transformers models that hold a cache
_CROPPABLE = "DynamicLayer"  # a cache layer that holds every key and value: (batch, heads, tokens, features)
_TRIAL = (6, 1, 1, 4)  # tokens per forward when a cache is compared with the whole window
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the largest logit
_TOLERANCE_16_BIT = 5e-2


class NextLogits(ABC):
    """A reader of a model's logits, one sequence at a time. The model must be in evaluation mode."""

    @abstractmethod
    def after(self, ids: Sequence[int]) -> Tensor:
        """Return the logits (vocabulary,) of the token after `ids` (at least one), in fp32 on the CPU.

        Equal ids give equal logits (to rounding), whatever was asked before. Raises BadInput for a model without
        logits.
        """

    @property
    @abstractmethod
    def computed(self) -> int:
        """Return how many tokens went through the model so far."""

    @property
    @abstractmethod
    def has_cache(self) -> bool:
        """Return whether a key-value cache is in use."""


class RecomputedLogits(NextLogits):
    """The reader without a cache, for any module: every call computes all of `ids`."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._caller = module, caller_of(module)
        self._computed = 0

    def after(self, ids: Sequence[int]) -> Tensor:
        self._computed += len(ids)
        return gradless(lambda: _all_logits(self._module, self._caller, ids)[-1]).float().cpu()

    @property
    def computed(self) -> int:
        return self._computed

    @property
    def has_cache(self) -> bool:
        return False


class CachedLogits(NextLogits):
    """The reader of a transformers model with the model's own cache.

    Tokens that `ids` begin with and that the cache holds are not computed again. Where `ids` differ from what it holds,
    it is cut back to what they have in common; one that cannot be cut (of a sliding window, of a recurrent state) is
    built anew. `argument`: the name under which forward takes and returns the cache. `steps_only`: a filled cache takes
    one token at a time, and is built anew for several (some recurrent models).
    """

    def __init__(self, module: nn.Module, argument: str, *, steps_only: bool = False) -> None:
        self._module, self._argument, self._steps_only = module, argument, steps_only
        parameters = inspect.signature(module.forward).parameters
        self._constant = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._ids: list[int] = []
        self._cache: Any = None
        self._computed = 0

    def after(self, ids: Sequence[int]) -> Tensor:
        given = list(ids)
        held, cache = self._ids, self._cache
        self._ids, self._cache = [], None  # an interrupted forward leaves a cache that is written in part
        kept = _common(held, given)
        kept = kept if kept < len(given) else kept - 1  # one token at least, for its logits
        refused = self._steps_only and len(given) - kept > 1
        if refused or (kept < len(held) and not _cut(cache, kept, len(held))):
            kept, cache = 0, None
        logits, cache = self._forward(given[kept:], cache)
        self._computed += len(given) - kept
        self._ids, self._cache = given, cache
        return logits.float().cpu()

    @property
    def computed(self) -> int:
        return self._computed

    @property
    def has_cache(self) -> bool:
        return True

    def _forward(self, ids: list[int], cache: Any) -> tuple[Tensor, Any]:
        """Return the logits (vocabulary,) after the last of `ids`, and the cache with them."""
        batch = torch.tensor([ids], device=_device(self._module))
        with torch.no_grad():
            output = self._module(batch, use_cache=True, **{self._argument: cache}, **self._constant)
            return logits_of(output)[0, -1], output[self._argument]


def next_logits_of(module: nn.Module) -> NextLogits:
    """Return the reader for `module`, in evaluation mode: with a cache if it is a transformers model whose cache works.

    A few random tokens are computed with the cache, in parts, and at once: where the logits differ by more than
    rounding (1e-4 of the largest in fp32, 5e-2 in 16 bit), or the cache cannot be used so, it is tried one token at a
    time, and where that differs too, there is none.
    """
    inner = getattr(module, "_orig_mod", module)  # what torch.compile wrapped: every new length would be compiled
    argument = _cache_argument(inner)
    if argument is None or inner.training:
        return RecomputedLogits(module)
    for steps_only in (False, True):
        reader = CachedLogits(inner, argument, steps_only=steps_only)
        with suppress(Exception):  # whatever a model's own code raises when it is called in parts
            if _is_equal(inner, reader):
                return reader
    return RecomputedLogits(module)


def logits_of(output: Any) -> Tensor:
    """Return the logits (batch, sequence, vocabulary) in the output of a forward without labels.

    Raises BadInput if there are none.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, dict):
        logits = output.get("logits")
    if logits is None and isinstance(output, tuple | list):
        logits = next((o for o in output if isinstance(o, Tensor) and o.ndim == 3), None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise bad_input(
            wanted="logits (batch, sequence, vocabulary) from a forward without labels",
            got=f"{tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(output).__name__} without logits",
            do="let forward return its logits where no labels are given",
            key="model",
        )
    return logits


def _all_logits(module: nn.Module, caller: ForwardAdapter, ids: Sequence[int]) -> Tensor:
    """Return the logits (sequence, vocabulary) after each of `ids`, from one forward without a cache."""
    return logits_of(caller(module, {"input_ids": torch.tensor([list(ids)], device=_device(module))}))[0]


def _device(module: nn.Module) -> torch.device | None:
    first = next(module.parameters(), None)
    return first.device if first is not None else None


def _cache_argument(module: nn.Module) -> str | None:
    """Return the name under which a transformers model takes its cache; None for other modules."""
    if not hasattr(getattr(module, "config", None), "use_cache"):
        return None
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


def _is_equal(module: nn.Module, reader: CachedLogits) -> bool:
    """Return whether the logits of a few tokens are equal with the cache, in parts, and at once without one."""
    config: Any = module.config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, int(config.get_text_config().vocab_size), (sum(_TRIAL),), generator=generator).tolist()
    whole = gradless(lambda: _all_logits(module, caller_of(module), ids))
    types = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    tolerance = max((_TOLERANCE.get(one, _TOLERANCE_16_BIT) for one in types), default=_TOLERANCE_16_BIT)
    at = 0
    for count in _TRIAL:
        at += count
        expected = whole[at - 1].float().cpu()
        limit = tolerance * float(expected.abs().max())
        if not float((reader.after(ids[:at]) - expected).abs().max()) <= limit:  # also for NaN
            return False
    return True


def _common(one: list[int], other: list[int]) -> int:
    """Return how many tokens two sequences have in common from their start."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next(place for place in range(size) if one[place] != other[place])


def _cut(cache: Any, kept: int, held: int) -> bool:
    """Cut a cache of `held` tokens back to the first `kept`; return whether it can be cut."""
    layers = getattr(cache, "layers", None)
    if not kept or not layers or any(type(layer).__name__ != _CROPPABLE for layer in layers):
        return False
    filled = [layer for layer in layers if layer.get_seq_length()]  # layers that share keys and values hold none
    if any(layer.get_seq_length() != held for layer in filled):
        return False
    for layer in filled:
        layer.keys, layer.values = layer.keys[..., :kept, :], layer.values[..., :kept, :]
    return True
