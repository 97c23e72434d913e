"""The way of hidden states through a side network, as hooks on the modules of an unmodified model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from gossamer.model.side._aggregation import Aggregation
from gossamer.model.side._tokens import AUTO, CAUSAL, TokenView
from gossamer.spec.errors import BadInput, bad_input

_KEY = "model.side"
_CACHES = ("past_key_values", "cache_params", "cache")


class SideRoute(nn.Module):
    """A side network in a model: taps the outputs of blocks, and corrects the last of them.

    Hooks hold no graph of the backbone: what they are given is detached. So backward ends here, whatever is trained.
    They are bound to this module, so that a copy of the model has hooks of its own.
    """

    def __init__(self, aggregation: Aggregation, tokens: str) -> None:
        super().__init__()
        self.aggregation = aggregation
        self.tokens = tokens
        self.taps: tuple[str, ...] = ()
        self._held: list[Tensor] = []
        self._view: TokenView | None = None
        self._tokens: tuple[int, ...] | None = None  # (rows, tokens) of the first tap; None: it has none
        self._given: tuple[Tensor | None, Tensor | None] | None = None  # mask, positions; None: no forward is going on

    def hook(self, model: nn.Module, taps: Sequence[str]) -> list[RemovableHandle]:
        """Put the hooks on `model` and on its modules at `taps`, in the order in which they run; return them.

        Norms with running statistics stay in evaluation mode: the model is frozen, and these are a part of it.
        """
        self.taps = tuple(taps)
        parameters = tuple(inspect.signature(model.forward).parameters)
        return [
            model.register_forward_pre_hook(partial(self._begin, parameters), with_kwargs=True),
            *(model.get_submodule(path).register_forward_hook(partial(self._tap, n)) for n, path in enumerate(taps)),
            model.register_forward_hook(self._end),
            *(norm.register_forward_pre_hook(_still) for norm in model.modules() if isinstance(norm, _NormBase)),
        ]

    def _begin(self, parameters: tuple[str, ...], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        for name in _CACHES:
            cache = given.get(name)
            length = getattr(cache, "get_seq_length", None)
            if cache is not None and (length is None or length() > 0):
                raise bad_input(
                    wanted="the whole sequence, all of which a side network reads",
                    got=f"a part of it, with {name} of earlier tokens",
                    do="call the model with use_cache=False (transformers: model.generate(..., use_cache=False))",
                    key=_KEY,
                )
        self._held, self._view = [], None
        self._given = _mask(given.get("attention_mask")), _positions(given.get("position_ids"))

    def _tap(self, number: int, module: nn.Module, _: Any, output: Any) -> Any:
        if self._given is None or number != len(self._held):
            self._given = None
            raise bad_input(
                wanted="the tapped modules to run one after the other, once each, in a forward of the whole model",
                got=f"{self.taps[number]} out of turn",
                do="name other modules as taps (regular expressions of their paths), or use model.adapter",
                key=f"{_KEY}.taps",
            )
        hidden = output[0] if isinstance(output, tuple) else output
        flat = self._flat(number, hidden)
        tokens = tuple(hidden.shape[:2]) if hidden.ndim == 3 else None
        if self._view is None:
            self._view, self._tokens = self._viewed(hidden, flat), tokens
        elif tokens != self._tokens:
            self._given = None
            raise bad_input(
                wanted="taps of the same tokens",
                got=f"{self.taps[0]} and {self.taps[number]}, which returns {_told(hidden)}",
                do="name the modules of one part of the model as taps (regular expressions of their paths)",
                key=f"{_KEY}.taps",
            )
        self._held.append(self.aggregation.reduced(number, flat))
        if number < len(self.taps) - 1:
            return None
        taps, view = self._held, self._view
        self._held, self._view, self._given = [], None, None
        correction = self.aggregation(taps, view)
        corrected = hidden.detach() + _as(correction, hidden)
        return (corrected, *output[1:]) if isinstance(output, tuple) else corrected

    def _end(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._given is not None:
            self._given, self._held = None, []
            raise bad_input(
                wanted="a forward that calls the tapped modules",
                got=f"{type(module).__name__}.forward, which went past {self.taps[-1]} or calls its forward directly",
                do="name other modules as taps (regular expressions of their paths), or use model.adapter",
                key=f"{_KEY}.taps",
            )

    def _flat(self, number: int, hidden: Any) -> Tensor:
        """Return the hidden state of a tap as (rows, tokens, width), without its graph."""
        wanted = self.aggregation.down[number].in_features
        if isinstance(hidden, Tensor) and hidden.is_floating_point() and 2 <= hidden.ndim <= 4:
            found = hidden.detach()
            found = found[:, None] if found.ndim == 2 else found
            found = found.flatten(2).transpose(1, 2) if found.ndim == 4 else found  # (rows, channels, height, width)
            if found.shape[-1] == wanted:
                return found
        self._given = None
        raise bad_input(
            wanted=f"hidden states (rows, {wanted}), (rows, tokens, {wanted}) or (rows, {wanted}, height, width)",
            got=f"{self.taps[number]} returns {_told(hidden)}",
            do="write widths: [...], one for each tap, or name other modules as taps",
            key=f"{_KEY}.widths",
        )

    def _viewed(self, hidden: Tensor, flat: Tensor) -> TokenView:
        assert self._given is not None
        mask, positions = self._given
        form = self.tokens
        if form == AUTO:
            form = CAUSAL
        if hidden.ndim != 3:  # no tokens, to which a mask could belong
            return TokenView("mean", None, None, None)
        if mask is not None and mask.shape != flat.shape[:2]:
            raise _refused(f"attention_mask {tuple(mask.shape)} for hidden states {tuple(flat.shape)}")
        is_read = positions is not None and positions.shape[-1] == flat.shape[1]
        segments = _segments(positions.expand(flat.shape[0], -1)) if positions is not None and is_read else None
        return TokenView.of(form, flat.shape, flat.device, mask, segments)


def _still(norm: nn.Module, _: Any) -> None:
    """Keep the statistics of a norm, unless it is trained (model.unfreeze)."""
    norm.training = norm.training and any(p.requires_grad for p in norm.parameters())


def _mask(given: Any) -> Tensor | None:
    """Return an attention mask as (rows, tokens) bool. Raises BadInput for one of another kind."""
    if not isinstance(given, Tensor):
        return None
    if given.ndim != 2:
        raise _refused(f"attention_mask {tuple(given.shape)}")
    return given.bool()


def _positions(given: Any) -> Tensor | None:
    if not isinstance(given, Tensor):
        return None
    if given.ndim != 2:
        raise _refused(f"position_ids {tuple(given.shape)}")
    return given


def _refused(got: str) -> BadInput:
    return bad_input(
        wanted="attention_mask and position_ids (rows, tokens), by which a side network knows padding and documents",
        got=got,
        do="use model.adapter with such a model",
        key=_KEY,
    )


def _segments(positions: Tensor) -> Tensor:
    """Return the number of the document of each token: a new one begins where positions do not go on."""
    starts = positions[:, 1:] != positions[:, :-1] + 1
    return nn.functional.pad(starts.long().cumsum(1), (1, 0))


def _as(correction: Tensor, hidden: Tensor) -> Tensor:
    """Return a correction (rows, 1 or tokens, width) with the axes of `hidden`."""
    if hidden.ndim == 2:
        return correction[:, 0]
    return correction[:, 0, :, None, None] if hidden.ndim == 4 else correction


def _told(hidden: Any) -> str:
    return f"{tuple(hidden.shape)} {hidden.dtype}" if isinstance(hidden, Tensor) else f"a {type(hidden).__name__}"
