"""What the start of a run refuses by looking at the model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from gossamer.run.start_checks import check_before_start
from gossamer.spec.errors import BadInput
from run.test_untouched import parts_of


class Words(nn.Module):
    """An embedding and a head whose names say nothing of it."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        self.words, self.up, self.out = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)
        self.get_output_embeddings = lambda: self.out if head else None

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.out(self.up(self.words(input_ids)))


@pytest.mark.parametrize(
    ("written", "key", "told"),
    [
        ({"muon": {}}, "muon.matrices", {"muon": {"matrices": ["up.weight"]}}),
        ({"sst": {"rank": 2}}, "sst.matrices", {"sst": {"rank": 2, "matrices": ["up.weight"]}}),
        ({"static_mask": {"inner": "adamw"}}, "static_mask.parameters", {"static_mask": {"parameters": ["up.weight"]}}),
        (
            {"by_pattern": {"inner": "muon"}},
            "muon.matrices",
            {"by_pattern": {"inner": {"muon": {"matrices": ["up.weight"]}}}},
        ),
    ],
)
def test_an_embedding_that_is_not_called_one_is_no_matrix(written: Any, key: str, told: Any) -> None:
    for head, said in ((False, "words.weight, which is an embedding"), (True, "(words|out).weight, which is")):
        with pytest.raises(BadInput, match=f"{key}: wanted weights of linear layers.*got {said}"):
            check_before_start(parts_of(Words(head=head), optimizer=written))
        check_before_start(parts_of(Words(head=head), optimizer=told))
