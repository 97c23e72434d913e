"""The inputs of a backward pass: the batch that it is of, and the denominator of its loss."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.loss_reader.batch_tensors import OfBatch
from gossamer.loss_reader.count import BatchRows, Kind, LossCount
from gossamer.own_loop.batch_structure import leaves
from gossamer.own_loop.batches import Share
from gossamer.own_loop.loss_denominator import LossDenominator
from gossamer.own_loop.pass_batch import UNKNOWN, KnownBatch, PassBatch
from gossamer.own_loop.status_rows import RowMark
from gossamer.spec.errors import BadInput

_SHAPES = 200  # different loss graphs to look through, at most
_LOOKS = 2  # looks through each different loss graph
_KEPT = 4  # batches that a loop may prefetch


class _Seen:
    """A forward hook of a wrapped model. A copy of the model, or a saved one, has one without effect."""

    def __init__(self, hand: Callable[[], PassInputs | None]) -> None:
        self._hand = hand

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (hand := self._hand()) is not None:
            tensors = [_bare(leaf) for _, leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            hand.see(tensors) if torch.is_grad_enabled() else hand.see_evaluated(tensors)

    def __deepcopy__(self, _: Any) -> _Seen:
        return _Seen(_nobody)

    def __reduce__(self) -> tuple[type[_Seen], tuple[Callable[[], None]]]:
        return _Seen, (_nobody,)


def _nobody() -> None:
    """Stand in for the inputs that a copy of a wrapped model does not report to."""


def _bare(tensor: Tensor) -> Tensor:
    """Return the tensor that torch.func or vmap has wrapped, whose memory can be inspected."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


class PassInputs(BatchRows):
    """The last batches given to the loop, and which of them the model's forward has seen last.

    A loop may fetch the next batch before it calls backward on the last one. So the batch of a pass is the one whose
    memory the model's forward was given. If that cannot be seen (batches moved to a device), it is the last one given
    out; in a loop that fetches ahead, an ambiguity that would matter raises BadInput. A batch that the model saw only
    without gradients was evaluated, and belongs to no pass.
    """

    def __init__(self, *, divides: bool) -> None:
        """Start without batches. `divides`: whether batches are split over ranks, else every rank has its own."""
        self._divides = divides
        self._looks: dict[int, int] = {}
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._means: set[int] = set()
        self.is_last = False  # whether the batch is its loader's last, if known
        self._given: deque[KnownBatch] = deque(maxlen=_KEPT)
        self._since = 0  # batches given out since the last pass began
        self._ahead = False
        self._seen: PassBatch = UNKNOWN
        self._evaluated: set[int] = set()
        self._many = False  # whether the model got several rows of no known batch
        self._part = False  # whether the model got only some of a batch's rows
        self._number = 0

    def give(self, share: Share, *, is_last: bool) -> None:
        """Record a batch that the loader gives to the loop; `is_last`: whether it is the loader's last one."""
        self._number += 1
        self._given.append(KnownBatch(self._number, share))
        self._since += 1
        self._evaluated = {one for one in self._evaluated if one > self._number - _KEPT}
        self._ahead |= self._since > 1
        self.is_last = is_last

    def look(self, model: nn.Module) -> Callable[[], None]:
        """Hook the model's forward to see its inputs; return a function that removes the hook."""
        self._models.append(weakref.ref(model))
        return model.register_forward_pre_hook(_Seen(weakref.ref(self)), with_kwargs=True).remove

    def know(self, optimizer: Optimizer) -> None:
        """Register an optimizer, whose parameters have no rows."""
        self._optimizers.append(weakref.ref(optimizer))

    def see(self, tensors: list[Tensor]) -> None:
        """Record which batch the tensors given to a forward with gradients belong to."""
        given: list[PassBatch] = [*self._given] if self._seen in self._given else [self._seen, *self._given]
        for one in reversed(given):
            held = [tensor for tensor in tensors if one.holds(tensor)]
            if held:
                self._seen = one
                self._evaluated.discard(one.number)
                self._part = any(one.lacks(tensor) for tensor in held)
                return
        self._seen, self._many = UNKNOWN, any(t.dim() > 0 and t.shape[0] > 1 for t in tensors)

    def see_evaluated(self, tensors: list[Tensor]) -> None:
        """Mark the last batch as evaluated if the tensors, given to a forward without gradients, belong to it."""
        number = self._number
        if self._given and number not in self._evaluated and any(self._given[-1].holds(one) for one in tensors):
            self._evaluated.add(number)

    @property
    def _at(self) -> PassBatch:
        """Return the batch of the pass that begins."""
        given = [one for one in self._given if one.number not in self._evaluated]
        if self._seen in self._given or (self._seen.is_known and not given):
            return self._seen
        given = given or [*self._given]
        if not given:
            return UNKNOWN
        if self._ahead and len({one.is_spare for one in given}) > 1:
            raise BadInput(
                "a batch has fewer rows than there are ranks, and the loop fetches batches ahead, so the batch of a "
                "backward pass is unknown. Create the loader with drop_last=True"
            )
        last = given[-1]
        if last.is_spare and self._many:
            raise BadInput(
                "a batch has fewer rows than there are ranks, and the model was given rows that are not from that "
                "batch, so the weight of this rank's loss is unknown. Create the loader with drop_last=True"
            )
        return last

    @property
    def mark(self) -> RowMark:
        """Return the number and hash of the batch of the pass that begins."""
        return self._at.mark

    @property
    def rows(self) -> int:  # type: ignore[override]
        """Return this rank's rows in the batch of the pass that begins; 0 if unknown."""
        at = self._at
        return at.rows if self._divides else 0

    @property
    def whole(self) -> int:  # type: ignore[override]
        """Return the rows of all ranks in that batch; 0 if unknown."""
        at = self._at
        return at.whole if self._divides else 0

    @property
    def first(self) -> int:  # type: ignore[override]
        """Return the dimension that has rows, if it is the same in all tensors of two or more dimensions, else 0."""
        return self._at.first

    @property
    def is_spare(self) -> bool:
        """Return whether this rank's batch is one row of weight 0, as there were fewer rows than ranks."""
        return self._at.is_spare

    def origin(self) -> OfBatch:
        """Return a reader of where tensors without an autograd graph have the rows of the batch."""
        at = self._at
        assert isinstance(at, KnownBatch)
        share = at.share
        found = [model() for model in self._models]
        own = [t for model in found if model is not None for t in (*model.parameters(), *model.buffers())]
        own += [p for one in self._optimizers if (o := one()) is not None for g in o.param_groups for p in g["params"]]
        owned = frozenset(t.untyped_storage().data_ptr() for t in own if t.layout == torch.strided)
        return OfBatch(share.rows, tuple(share.having_rows()), self.first, owned, folds=share.dims is not None)

    def counts(self) -> set[float]:
        """Return the values that a loss may divide by in this rank's rows."""
        return self._at.counts()

    def is_new(self, shape: int) -> bool:
        """Return whether a loss of this hash was looked through fewer than twice, and count the look. False beyond 200
        hashes.
        """
        if len(self._looks) > _SHAPES and shape not in self._looks:
            return False  # the loss graph differs in every pass
        self._looks[shape] = self._looks.get(shape, 0) + 1
        return self._looks[shape] <= _LOOKS

    def is_mean(self, kinds: int) -> bool:
        """Return whether a divided sum of this hash was found before to be a mean of the ranks' own counts."""
        return kinds in self._means

    def learn(self, counted: LossCount, kind: Kind) -> None:
        """Remember that a sum divided in the loop is a mean, once the ranks have agreed so."""
        if counted.is_divided and kind is Kind.MEAN:
            self._means.add(counted.kinds)

    def counted(self, read: LossCount | None, loss: LossDenominator) -> LossCount:
        """Return the denominator of this rank's loss. Begins the pass.

        `read`: the denominator found in the autograd graph, if any. Raises BadInput if the model was given only some of
        this rank's rows.
        """
        self._since = 0
        at = self._at
        if self._part:
            self._part = False
            raise BadInput(
                "the model was given only some of this rank's rows of a batch: micro-batches that the loop cuts from a "
                "rank's rows differ from those of one process. Let the loader yield micro-batches, and pass "
                "accumulate=, the number of backward passes before a step"
            )
        return loss.count(read, at)
