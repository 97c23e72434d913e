"""Whole runs send what their plans have said, link by link, the votes of more than two ranks included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pool import Pool
from run.test_sharding_islands import check_bytes

SGD = {"optimizer": {"sgd": {"lr": 0.01}}}
PROBING = {"plan": {"sync": {"just_one_byte": {"directions": 3}}}, "train": SGD}
ISLANDS = {"machines": {"islands": [[0, 1], [2]]}}
HIERARCHICAL = {"plan": {"exchange": {"hierarchical": {"inter": "dense"}}}, **ISLANDS}


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [(3, {}), (5, {}), (3, HIERARCHICAL), (3, PROBING), (5, PROBING), (3, {**PROBING, **ISLANDS})],
    ids=["three", "five", "islands", "three probe", "five probe", "islands probe"],
)
def test_bytes_are_those_of_the_plan(pool: Pool, tmp_path: Path, ranks: int, sections: dict[str, Any]) -> None:
    pool.run("run.jobs:train", ranks, folder=str(tmp_path), steps=3, kind="small", sections=sections)
    assert check_bytes(tmp_path)
