"""The parts of the studies of sparse training: data, metric and baselines by their definitions."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gossamer.spec.errors import BadInput

FOLDER = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def studies() -> Iterator[dict[str, ModuleType]]:
    """The modules, as the script imports them: a package called claims is here, too."""
    names = ("claims", "grow_shrink")
    before = {name: one for name, one in sys.modules.items() if name.partition(".")[0] in names}
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, FOLDER)
    yield {name: import_module(f"grow_shrink.{name}") for name in ("spdf", "sst", "sparse_tables")}
    sys.path.remove(FOLDER)
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    sys.modules.update(before)


def test_ndcg_is_that_of_one_held_item(studies: dict[str, ModuleType]) -> None:
    params = {"user_embed.weight": torch.eye(2), "item_embed.weight": torch.tensor([[3.0, 0], [2, 5], [1, 4], [0, 9]])}
    held, seen = torch.tensor([[0, 2], [1, 1]]), [torch.tensor([[0, 0], [1, 3]])]
    # user 0 ranks items 1, 2 first and second of those not seen; user 1 has its item on top
    assert studies["sparse_tables"].ndcg(params, held, seen) == pytest.approx((1 / math.log2(3) + 1) / 2)


def test_movielens_is_split_by_time(studies: dict[str, ModuleType]) -> None:
    try:
        pairs = studies["sparse_tables"].interactions()
    except BadInput as error:
        pytest.skip(str(error))
    train, tuning, report = studies["sparse_tables"].parts()
    assert (len(pairs), len(tuning), len(report)) == (100_000, 943, 943) and len(train) == 98_114
    assert int(pairs[:, 1].max()) == 1681 and report[:, 0].tolist() == list(range(943))


def test_galore_with_all_directions_is_adam_scaled(studies: dict[str, ModuleType]) -> None:
    """Of a gradient of no more rows than the rank the projection is a rotation; then it is Adam."""
    rule = studies["sst"].GaLore(0.1, studies["sst"].rule_of("full", 1e-3), scale=1.0)
    params, grad = {"up.weight": torch.zeros(3, 5)}, torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    rule.update(params, {"up.weight": grad}, rule.init(params), lr_scale=1.0, step=0)
    left = torch.linalg.svd(grad, full_matrices=False)[0]
    wanted = -0.1 * left @ (left.t() @ grad).sign()
    torch.testing.assert_close(params["up.weight"], wanted, rtol=1e-4, atol=1e-5)


def test_an_adapter_from_scratch_trains_its_factors_alone(studies: dict[str, ModuleType]) -> None:
    names = {study.name for one in studies.values() for study in one.studies(quick=True)}
    assert names == {"loss", "link", "ndcg"}
    layer = studies["sst"].LowRank(4, 3)
    assert torch.equal(layer(torch.ones(4, 3)), torch.ones(4, 3))
