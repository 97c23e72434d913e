"""The denominator of a loss, as `loss` and `weight` of `gossamer.wrap` say it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from gossamer.loss_reader.count import Kind, LossCount
from gossamer.own_loop.pass_batch import PassBatch, Weigh
from gossamer.spec.errors import bad_input
from gossamer.spec.suggest import nearest

READ = "read"


class LossDenominator(ABC):
    """The rule by which the denominator of a rank's loss is known."""

    @property
    @abstractmethod
    def reads_graph(self) -> bool:
        """Return whether the loss's autograd graph is read in each backward pass."""

    @abstractmethod
    def count(self, read: LossCount | None, batch: PassBatch) -> LossCount:
        """Return the denominator of a loss over this batch.

        `read`: the denominator that the autograd graph shows, if it was read. Raises BadInput.
        """


@dataclass(frozen=True, slots=True)
class ReadDenominator(LossDenominator):
    """The denominator that the loss's autograd graph shows."""

    @property
    def reads_graph(self) -> bool:
        return True

    def count(self, read: LossCount | None, batch: PassBatch) -> LossCount:
        if read is None:
            return LossCount(Kind.UNKNOWN, said="a backward pass that did not come through torch.autograd.backward")
        if batch.is_spare:
            counts = tuple(-1.0 if read.kind is Kind.SUM else 0.0 for _ in read.counts)
            return replace(read, counts=counts)
        return replace(read, counts=(1.0,)) if read.kind is Kind.SUM else read


@dataclass(frozen=True, slots=True)
class SumDenominator(LossDenominator):
    """No denominator: the loss is a sum over rows."""

    @property
    def reads_graph(self) -> bool:
        return False

    def count(self, read: LossCount | None, batch: PassBatch) -> LossCount:
        return LossCount(Kind.SUM, (-1.0 if batch.is_spare else 1.0,))


@dataclass(frozen=True, slots=True)
class MeanDenominator(LossDenominator):
    """The number that `weight` gives for a batch, else its rows: the loss is a mean over so many."""

    weight: Weigh | None = None

    @property
    def reads_graph(self) -> bool:
        return False

    def count(self, read: LossCount | None, batch: PassBatch) -> LossCount:
        return LossCount(Kind.MEAN, (0.0 if batch.is_spare else batch.weight(self.weight),))


def denominator_of(loss: str, weight: Weigh | None) -> LossDenominator:
    """Return the denominator that the words of `gossamer.wrap` ask for; with `weight` it is that of a mean.

    Raises BadInput for another word, a sum that has a weight, or a weight that is no function.
    """
    kinds: dict[str, LossDenominator] = {READ: ReadDenominator(), "mean": MeanDenominator(), "sum": SumDenominator()}
    found = kinds.get(loss) if isinstance(loss, str) else None
    if found is None:
        raise bad_input(wanted="one of read, mean, sum", got=repr(loss), do=nearest(str(loss), kinds), key="loss")
    if weight is None:
        return found
    if found == SumDenominator():
        raise bad_input(
            wanted="no weight with loss='sum', which has no denominator",
            got=repr(weight),
            do="leave weight out, or pass loss='mean'",
            key="weight",
        )
    if not callable(weight):
        raise bad_input(
            wanted="a function of a batch", got=repr(weight), do="pass weight=lambda batch: ...", key="weight"
        )
    return MeanDenominator(weight)


__all__ = ["READ", "LossDenominator", "MeanDenominator", "ReadDenominator", "SumDenominator", "denominator_of"]
