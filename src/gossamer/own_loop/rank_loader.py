"""The loader of somebody's own loop: the same batches on all ranks, of which this one takes its rows."""

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


class RankDataLoader:
    """Gives this rank its rows of every batch of `loader`; everything else that is asked of it is that loader's own.

    `divider` None: every rank's loader gives its own data, which goes through as it is. Asking for a batch costs
    nothing: it may be looked at, skipped, or left.
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
        if self._party.ranks == 1:
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
        """A pass over the loader begins in the order that rank 0 draws: its generators are everybody's from here."""
        generators = _generators(self.inner) if self._divider is not None else []
        self._begun += 1
        for index, generator in enumerate(generators):
            key = f"order/{self._begun}/{index}"
            if self._party.rank == 0:
                self._party.store.set(key, generator.get_state().numpy().tobytes())
            else:
                state = bytearray(self._party.store.get(key))
                generator.set_state(torch.frombuffer(state, dtype=torch.uint8).clone())


def _generators(loader: Iterable[Any]) -> list[torch.Generator]:
    """What a DataLoader draws its order from; nothing where the order is not drawn."""
    if not isinstance(loader, DataLoader) or isinstance(loader.sampler, SequentialSampler):
        return []
    found = [loader.generator, getattr(loader.sampler, "generator", None)]
    known = [one for one in found if one is not None]
    usual = [] if all(one is not None for one in found) else [torch.default_generator]
    return list({id(one): one for one in (*known, *usual)}.values())


def _with_end(source: Iterator[Share], last: int | None, *, ahead: bool) -> Iterator[tuple[Share, bool]]:
    """(batch, whether it is the last): by the loader's length, else by a look at the next one, where it matters."""
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
    """How many rows a batch of the loader has, where it says so."""
    given = getattr(loader, "batch_size", None)
    return given if isinstance(given, int) and isinstance(loader, DataLoader) else None


def refuse_sampler(loader: Iterable[Any]) -> None:
    """A loader that is divided by rank already would be divided twice."""
    samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers += [getattr(samplers[1], "sampler", None)]
    for one in samplers:
        if "Distributed" in type(one).__name__ or getattr(one, "num_replicas", 1) not in (1, None):
            raise BadInput(
                f"the loader has a {type(one).__name__}, which gives every rank its own rows, and gossamer.wrap would "
                "divide them once more: leave it out (shuffle=True does), or pass split=False",
                key="loader",
            )
