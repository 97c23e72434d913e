"""The logits of the token after a sequence: from the whole sequence each time, or with a cache of keys and values."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.forward_adapter import ForwardAdapter, caller_of
from gossamer.model.side import route_of
from gossamer.model.side_effects import gradless
from gossamer.spec.errors import bad_input

_CACHES = ("past_key_values", "cache", "cache_params")  # what forwards of transformers call their cache
_LAST = "logits_to_keep"
_CHANGING = ("dynamic", "longrope")  # rotary embeddings that turn earlier keys otherwise once a sequence is long
_PROBE = 13  # tokens
_FULL = (torch.float32, torch.float64)


class TokenLogits(ABC):
    """A source of the logits that follow a sequence. The module is in evaluation mode while it is used."""

    uncached: str  # why every token computes the whole sequence again; "": a cache spares that

    @abstractmethod
    def after(self, ids: Sequence[int]) -> Tensor:
        """Return the logits of the token after `ids` (at least one): (vocabulary,) float32 on the CPU.

        Raises BadInput for a model that returns none.
        """


@dataclass(frozen=True, slots=True)
class Recomputed(TokenLogits):
    """Logits from a forward of the whole sequence."""

    module: nn.Module
    caller: ForwardAdapter
    uncached: str

    def after(self, ids: Sequence[int]) -> Tensor:
        batch = {"input_ids": _tensor(self.module, ids)}
        return gradless(lambda: logits_of(self.caller(self.module, batch))[0, -1].float().cpu())


@dataclass(slots=True)
class Cached(TokenLogits):
    """Logits from a forward of the tokens that the cache does not hold yet.

    The cache is the model's own. It is kept from call to call as far as the sequences begin alike: where they part, it
    is cut back, and where its layers cannot be (they hold a window or a running state), built anew.
    """

    module: nn.Module
    whole: Recomputed
    argument: str  # of forward, and attribute of its output
    keeps_last: bool  # forward can leave out the logits of all tokens but the last
    limit: int | None  # longer sequences are computed whole; None: never
    many: bool = True  # whether several tokens can be added at once
    uncached: str = ""
    _held: list[int] = field(default_factory=list)  # the ids that the cache holds
    _cache: Any = None

    def after(self, ids: Sequence[int]) -> Tensor:
        if self.limit is not None and len(ids) > self.limit:
            return self.whole.after(ids)
        return self.rows(ids, last=True)[-1].float().cpu()

    def rows(self, ids: Sequence[int], *, last: bool = False) -> Tensor:
        """Return the logits after each id that the cache did not hold, or after the last alone: (rows, vocabulary)."""
        cache, held = self._cut_back(list(ids))
        new = ids[held:]
        # A forward that is interrupted leaves some layers of the cache longer than others: then it is gone.
        self._cache, self._held = None, []
        more: dict[str, Any] = {_LAST: 1} if self.keeps_last and last else {}
        with torch.no_grad():
            output = self.module(input_ids=_tensor(self.module, new), use_cache=True, **{self.argument: cache}, **more)
        self._cache, self._held = getattr(output, self.argument), list(ids)
        return logits_of(output)[0]

    def _cut_back(self, ids: list[int]) -> tuple[Any, int]:
        """Return the cache, and how many of `ids` it holds: at least one is left to compute."""
        cache, length = self._cache, len(self._held)
        held = _common(ids, self._held)
        held = min(held, len(ids) - 1)
        if cache is None or not held or (len(ids) - held > 1 and not self.many):
            return None, 0
        if held < length:
            if not all(getattr(layer, "is_croppable", False) for layer in getattr(cache, "layers", (None,))):
                return None, 0
            try:
                cache.crop(held - length)
            except RuntimeError:  # a sliding window that has moved on
                return None, 0
        return cache, held


def token_logits(module: nn.Module) -> TokenLogits:
    """Return the source of the logits of `module`, which must be in evaluation mode.

    A model of transformers uses its cache if that gives the logits of the whole sequence: this is tried out on a few
    tokens. Any other module computes the whole sequence for every token. Raises BadInput for a forward that takes no
    tokens.
    """
    caller = caller_of(module)
    inner = getattr(module, "_orig_mod", module)  # the module that torch.compile wrapped
    parameters = inspect.signature(inner.forward).parameters
    argument = next((name for name in _CACHES if name in parameters), None)
    is_known = any(base.__module__.startswith("transformers.") for base in type(inner).__mro__)
    if not is_known or argument is None or "use_cache" not in parameters:
        return Recomputed(module, caller, f"{type(inner).__name__} keeps no cache of keys and values")
    if route_of(module) is not None:
        return Recomputed(module, caller, "a side network reads all tokens again for every new one")
    whole = Recomputed(module, caller, "")
    cached = Cached(inner, whole, argument, _LAST in parameters, _limit(inner))
    why = _difference(cached, single=False)
    if why:
        cached = Cached(inner, whole, argument, _LAST in parameters, _limit(inner), many=False)
        why = _difference(cached, single=True)
    if why:
        return Recomputed(module, caller, f"the cache of {type(inner).__name__} cannot be used: {why}")
    return Cached(inner, whole, argument, cached.keeps_last, cached.limit, cached.many)


def _difference(cached: Cached, *, single: bool) -> str:
    """Return what is wrong with the logits that a cache gives; "" if nothing is.

    Tokens are added to it one by one, and several at once unless `single`, and some are taken away again.
    """
    vocabulary = cached.module.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = [(3 + 7 * i) % vocabulary for i in range(_PROBE)]
    try:
        with torch.no_grad():
            batch = {"input_ids": _tensor(cached.module, ids)}
            expected = logits_of(cached.whole.caller(cached.whole.module, batch))[0]
        lengths = (4, 5, 6) if single else (5, 13, 10)
        for length in lengths:
            rows = cached.rows(ids[:length])
            if (far := _too_far(rows, expected[length - len(rows) : length])) > 0:
                return f"its logits differ by {far:.2g} from those of the whole sequence"
    except Exception as error:  # whatever a model's own code raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _too_far(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of logits where it is more than rounding makes; else 0."""
    size = expected.abs().max()
    allowed = 1e-4 * size.clamp(min=1) if expected.dtype in _FULL else 0.1 * size
    far = (found - expected).abs().max()
    return 0.0 if bool(far <= allowed) else float(far)


def _limit(module: Any) -> int | None:
    """Return the length from which on a longer sequence changes the keys of its first tokens; None: there is none."""
    config = module.config.get_text_config()
    written = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [one for one in (written, *written.values()) if isinstance(one, dict)]  # one, or one per kind of layer
    found = [
        one.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
        for one in kinds
        if one.get("rope_type", one.get("type")) in _CHANGING
    ]
    return min(found, default=None)


def _common(ids: list[int], held: list[int]) -> int:
    """Return how many ids two sequences have in common from their beginning on."""
    if ids[: len(held)] == held:
        return len(held)
    return next((n for n, (a, b) in enumerate(zip(ids, held, strict=False)) if a != b), len(ids))


def _tensor(module: nn.Module, ids: Sequence[int]) -> Tensor:
    first = next(module.parameters(), None)
    return torch.tensor([list(ids)], device=first.device if first is not None else None)  # (1, tokens)


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
