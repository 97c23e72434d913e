"""The batches of a user's own dataset: what does not stack is named by item and key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

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
