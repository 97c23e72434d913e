"""The data loader of the user's own loop: the same batches on all ranks, of which this rank takes its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler

from gossamer.own_loop.batches import Divider, Share
from gossamer.own_loop.own_rows import OwnRows
from gossamer.own_loop.pass_inputs import PassInputs
from gossamer.own_loop.process_group import LoopGroup
from gossamer.spec.errors import BadInput

_SAME_PASSES = "Every rank must begin the same passes over a shuffled loader: end a loop of epochs on all ranks at once"


class RankDataLoader:
    """A data loader that yields this rank's rows of every batch of `loader`; all other attributes are that loader's
    own.

    `divider` None: every rank's loader has its own data, which is passed through. Fetching a batch sends nothing: the
    loop may inspect it, skip it, or stop early.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        hand: PassInputs,
        party: LoopGroup,
        divider: Divider | None,
        *,
        looks_ahead: bool = False,
    ) -> None:
        self.inner, self._hand, self._party, self._divider = loader, hand, party, divider
        self._looks_ahead = looks_ahead
        self._begun = 0
        self._own = OwnRows(loader, divider) if OwnRows.serve(loader, divider) else None  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self._party.is_alone:
            yield from self.inner
            return
        self._meet()
        last = _length(self.inner)
        for share, is_end in _with_end(self._shares(last), last, ahead=self._looks_ahead):
            self._hand.give(share, is_last=is_end)
            yield share.batch

    def _shares(self, last: int | None) -> Iterator[Share]:
        if self._own is not None:
            yield from self._own.shares(last)
            return
        for index, batch in enumerate(self.inner):
            yield self._share(batch, last is None or index >= last - 1)

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _share(self, batch: Any, is_last: bool) -> Share:
        if self._divider is None:
            return Share(batch, 1, 1, 0)
        return self._divider.share(batch, is_last=is_last)

    def _meet(self) -> None:
        """Start a pass over the loader in rank 0's order: all ranks load the state of its random generators.

        torch's own generator is among them where the loader has none: what a loop or a dataset draws from it, alike on
        all ranks, is part of the one stream that one process draws from.
        """
        generators = _generators(self.inner) if self._divider is not None else []
        self._begun += 1
        for index, generator in enumerate(generators):
            key = f"order/{self._begun}/{index}"
            if self._party.rank == 0:
                self._party.store.set(key, generator.get_state().numpy().tobytes())
            else:
                state = bytearray(self._party.awaited(key, f"pass {self._begun} over the loader", do=_SAME_PASSES))
                generator.set_state(torch.frombuffer(state, dtype=torch.uint8).clone())


def _generators(loader: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators that a DataLoader draws its order from; none if the order is not random."""
    if not isinstance(loader, DataLoader) or isinstance(loader.sampler, SequentialSampler):
        return []
    found = [loader.generator, getattr(loader.sampler, "generator", None)]
    known = [one for one in found if one is not None]
    usual = [] if all(one is not None for one in found) else [torch.default_generator]
    return list({id(one): one for one in (*known, *usual)}.values())


def _with_end(source: Iterator[Share], last: int | None, *, ahead: bool) -> Iterator[tuple[Share, bool]]:
    """Yield (batch, whether it is the last), known by the loader's length, else by fetching one ahead if needed."""
    if last is not None or not ahead:
        for index, batch in enumerate(source):
            yield batch, last is not None and index == last - 1
        return
    held: list[Share] = []
    for batch in source:
        if held:
            yield held.pop(), False
        held.append(batch)
    if held:
        yield held.pop(), True


def _length(loader: Iterable[Any]) -> int | None:
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return None
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def rows_of(loader: Iterable[Any]) -> int | None:
    """Return the batch size of a DataLoader; None if it has none or is another loader."""
    given = getattr(loader, "batch_size", None)
    return given if isinstance(given, int) and isinstance(loader, DataLoader) else None


def refuse_sampler(loader: Iterable[Any]) -> None:
    """Raise BadInput if the loader's sampler already splits data by rank, as the rows would be split twice."""
    samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers += [getattr(samplers[1], "sampler", None)]
    for one in samplers:
        if "Distributed" in type(one).__name__ or getattr(one, "num_replicas", 1) not in (1, None):
            raise BadInput(
                f"the loader has a {type(one).__name__}, which gives every rank its own rows, and gossamer.wrap would "
                "split them again: remove the sampler (use shuffle=True), or pass split=False",
                key="loader",
            )
