"""The batches of a user's own dataset: what does not stack is named by item and key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gossamer.data import Order
from gossamer.run.batches import DatasetBatches
from gossamer.spec.errors import BadInput


class Rows(Dataset[Any]):
    """Eight alike items, but for one."""

    def __init__(self, odd: int, item: Any) -> None:
        self.odd, self.item = odd, item

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.item if index == self.odd else {"input_ids": torch.arange(4), "labels": torch.arange(4)}


IDS = torch.arange(4)
ODD: list[tuple[Any, str]] = [
    ({"input_ids": IDS, "labels": IDS[:3]}, r"\{'labels': \(3,\)\} in item 5 and \{'labels': \(4,\)\} in item 2"),
    ({"input_ids": IDS}, r"\{'labels': 'missing'\} in item 5 and \{'labels': \(4,\)\} in item 2"),
    ({"input_ids": IDS, "labels": "text"}, r"\{'labels': 'str'\} in item 5"),
    ({"input_ids": IDS, "labels": None}, r"\{'labels': 'NoneType'\} in item 5"),
    (IDS, r"got \(4,\) in item 5 and \{'input_ids': \(4,\), 'labels': \(4,\)\} in item 2"),
]


@pytest.mark.parametrize(("item", "said"), ODD)
def test_items_that_do_not_stack_are_named_by_number_and_key(item: Any, said: str) -> None:
    batches = DatasetBatches(Rows(5, item))
    assert batches.batch(np.array([2, 3, 4]))["labels"].shape == (3, 4)
    with pytest.raises(BadInput, match=rf"^data: wanted dataset items that can be stacked.*{said}"):
        batches.batch(np.array([2, 3, 5]))


def test_items_that_nobody_can_stack_are_told_in_the_words_of_torch() -> None:
    with pytest.raises(BadInput, match=r"^data: wanted dataset items that can be stacked.*NoneType"):
        DatasetBatches(Rows(0, {"input_ids": None})).batch(np.array([0]))


def test_a_dataset_can_keep_items_together_and_have_an_order() -> None:
    class Triples(Dataset[dict[str, Tensor]]):
        together = 3

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"x": torch.tensor(index)}

    class Ordered(Triples):
        def sample_order(self, seed: int) -> Order:
            return lambda indices: np.asarray(indices) + seed

    plain, own = DatasetBatches(Triples()), DatasetBatches(Ordered())
    found = plain.order(0)(np.arange(12)).reshape(-1, 3)
    assert plain.together == 3 and sorted(found[:, 0]) == [0, 3, 6, 9]
    assert np.array_equal(found - found[:, :1], np.tile([0, 1, 2], (4, 1)))
    assert list(plain.first(7)) == [0, 1, 2, 3, 4, 5]
    assert list(own.order(5)(np.arange(2))) == [5, 6]
