"""A rank fetches its own rows alone, and what it gets is what it would have got of whole batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from gossamer.own_loop.batches import Divider, Share
from gossamer.own_loop.own_rows import OwnRows


class Data(Dataset[Any]):
    """Rows of three numbers. `asked`, which is nobody's state, notes who was asked for."""

    def __init__(self, asked: list[int], change: Callable[[Tensor], Tensor] = lambda row: row) -> None:
        self.rows = torch.arange(72.0).view(24, 3)
        self.asked, self.change = asked, change

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        return {"x": self.change(self.rows[index]), "y": self.rows[index].sum()}


def divider(rank: int, parts: tuple[float, ...] = (0.5, 0.5)) -> Divider:
    return Divider(rank=rank, parts=parts, given_rows=6)


def loader(data: Dataset[Any], **settings: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=6, **settings)


def shares(rank: int, change: Callable[[Tensor], Tensor], *, parts: tuple[float, ...] = (0.5, 0.5)) -> list[Share]:
    """Of one rank, of a shuffled epoch."""
    seeded()
    given = loader(Data([], change), shuffle=True)
    assert OwnRows.serve(given, divider(rank, parts))
    return list(OwnRows(given, divider(rank, parts)).shares(len(given)))


def seeded() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def whole(change: Callable[[Tensor], Tensor]) -> Iterator[dict[str, Tensor]]:
    """The same epoch in one process."""
    seeded()
    return iter(loader(Data([], change), shuffle=True))


CHANGES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "none": lambda: lambda row: row,
    "torch": lambda: lambda row: row + torch.randn(()),
    "python": lambda: lambda row: row + random.random(),
    "numpy": lambda: lambda row: row + float(np.random.rand()),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("parts", [(0.5, 0.5), (0.6, 0.2, 0.2)])
def test_ranks_have_the_rows_of_one_process(name: str, parts: tuple[float, ...]) -> None:
    ranks = [shares(rank, CHANGES[name](), parts=parts) for rank in range(len(parts))]
    for number, batch in enumerate(whole(CHANGES[name]())):
        mine = [one[number] for one in ranks]
        assert [one.whole for one in mine] == [6] * len(parts)
        for key, rows in batch.items():
            assert torch.equal(torch.cat([one.batch[key] for one in mine]), rows)
        assert len({one.mark for one in mine}) == 1


def test_own_rows_and_one_more_are_asked_for() -> None:
    asked: list[int] = []
    given = loader(Data(asked))
    found = list(OwnRows(given, divider(1)).shares(len(given)))
    assert asked[:12] == list(range(12))  # two batches whole
    for number in (2, 3):
        mine = set(range(6 * number + 3, 6 * number + 6))
        others = set(asked[12:]) & set(range(6 * number, 6 * number + 6)) - mine
        assert mine <= set(asked[12:]) and len(others) <= 1
        assert found[number].batch["x"].tolist() == Data([]).rows[6 * number + 3 : 6 * number + 6].tolist()


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), random.random, lambda: float(np.random.rand())])
def test_rows_that_draw_later_are_those_of_one_process(draw: Callable[[], float]) -> None:
    def change(row: Tensor) -> Tensor:
        return row + draw() if float(row[0]) >= 54 else row  # in the fourth batch

    seeded()
    expected = list(loader(Data([], change)))
    for rank in range(2):
        seeded()
        given = loader(Data([], change))
        found = list(OwnRows(given, divider(rank)).shares(len(given)))
        for share, batch in zip(found, expected, strict=True):
            assert torch.equal(share.batch["x"], batch["x"][3 * rank : 3 * rank + 3])


def test_other_orders_and_other_rows_have_other_marks() -> None:
    plain = [share.mark for share in shares(0, lambda row: row)]
    other = [share.mark for share in shares(1, lambda row: row + 1)]
    assert not set(plain) & set(other)
    given = loader(Data([]))
    assert [one.mark for one in OwnRows(given, divider(0)).shares(4)] != plain


class Drawn(Data):
    def __init__(self) -> None:
        super().__init__([])
        self.draws = [torch.Generator()]


class Batched(Data):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


GENERATOR = np.random.default_rng(1)


class Global(Data):
    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + float(GENERATOR.normal())


@pytest.mark.parametrize(
    "given",
    [
        loader(Drawn()),
        loader(Subset(Drawn(), range(12))),
        loader(Batched([])),
        loader(Global([])),
        loader(Data([], lambda row: row + float(GENERATOR.normal()))),
        loader(Data([]), collate_fn=lambda rows: rows),
        loader(Data([]), num_workers=1),
        DataLoader(Data([]), batch_size=None),
        [1, 2],
    ],
)
def test_what_may_depend_on_other_rows_is_loaded_whole(given: Any) -> None:
    assert not OwnRows.serve(given, divider(0))


def test_rows_that_are_counted_are_loaded_whole() -> None:
    class Counted(Data):
        given = 0

        def __getitem__(self, index: int) -> Any:
            self.given += 1
            return self.rows[index] * self.given

    for rank in range(2):
        counted = loader(Counted([]))
        found = list(OwnRows(counted, divider(rank)).shares(4))
        for share, batch in zip(found, loader(Counted([])), strict=True):
            assert torch.equal(share.batch, batch[3 * rank : 3 * rank + 3])
