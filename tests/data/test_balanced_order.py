"""Batches of one topic with pairs of all margins: purity, flatness, and the same rows on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.data.balanced_order import BalancedOrder, clusters_of
from gossamer.job.training_data import check_loss, of_dataset
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput

QUERIES, PAIRS, CLUSTERS, SIZE = 120, 40, 6, 8


def order(seed: int = 0, bins: int = 10) -> BalancedOrder:
    """Most of a query's margins are large: a tenth of them lies in the lower half of their range."""
    draws = np.random.default_rng(1)
    query = np.repeat(np.arange(QUERIES), PAIRS)
    margin = 1 - draws.random(QUERIES * PAIRS) ** 4 * 0.9
    return BalancedOrder(
        seed=seed, query=query, margin=margin, cluster=np.arange(QUERIES) % CLUSTERS, size=SIZE, bins=bins
    )


def test_a_batch_has_queries_of_one_cluster_each_once() -> None:
    one = order()
    seen = set()
    for number in range(60):
        queries = one.query[one.batch(number)]
        assert len(set(queries)) == SIZE
        assert len(set(one.cluster[queries])) == 1
        seen.add(int(one.cluster[queries[0]]))
    assert seen == set(range(CLUSTERS))


def test_margins_are_flat_over_the_bins_of_a_query_and_not_without_bins() -> None:
    shares = {}
    for bins in (10, 1):
        one = order(bins=bins)
        pairs = np.concatenate([one.batch(number) for number in range(500)])
        place = []
        for pair in pairs:
            own = one.margin[one.query == one.query[pair]]
            place.append((one.margin[pair] - own.min()) / (own.max() - own.min()))
        shares[bins] = np.histogram(place, bins=10, range=(0, 1))[0] / len(pairs)
    assert shares[10].min() > 0.05 and shares[10].max() < 0.2  # a bin of a query may be empty
    assert shares[1].max() > 0.4


def test_rows_are_a_function_of_seed_and_index_alone() -> None:
    whole = order()(np.arange(SIZE * 3 * 4))
    assert np.array_equal(whole.reshape(-1, 3) % 3, np.tile([0, 1, 2], (SIZE * 4, 1)))
    assert np.array_equal(whole.reshape(-1, 3)[:, 0] + 1, whole.reshape(-1, 3)[:, 1])
    parts = [order()(np.arange(a, a + 12)) for a in range(0, SIZE * 12, 12)]  # of eight ranks
    assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(order(seed=1)(np.arange(SIZE * 12)), whole)
    assert int(order()(5)) == whole[5]


def test_a_cluster_smaller_than_a_batch_gives_its_queries_again() -> None:
    one = BalancedOrder(
        seed=0, query=np.arange(3), margin=np.ones(3), cluster=np.zeros(4, np.int64), size=7, bins=10, together=1
    )
    assert sorted(np.bincount(one.batch(0))) == [2, 2, 3]


def test_means_find_what_is_apart() -> None:
    draws = np.random.default_rng(0)
    centres = np.eye(5, 8, dtype=np.float32)
    points = np.repeat(centres, 20, axis=0) + 0.05 * draws.standard_normal((100, 8)).astype(np.float32)
    found = clusters_of(points, 5, seed=3)
    assert np.array_equal(found, clusters_of(points, 5, seed=3))
    purity = sum(np.bincount(found[np.repeat(np.arange(5), 20) == k]).max() for k in range(5)) / 100
    assert purity >= 0.8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": 0}, "got 0 pairs"),
        ({"bins": 0}, "0 bins"),
        ({"together": 0}, "0 rows per pair"),
        ({"margin": np.ones(2)}, "2 margins for 3 pairs of 3 queries"),
        ({"cluster": np.zeros(1, np.int64)}, "3 margins for 3 pairs of 1 queries"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], said: str) -> None:
    given = {"seed": 0, "query": np.arange(3), "margin": np.ones(3), "cluster": np.zeros(3, np.int64), "size": 2}
    with pytest.raises(BadInput, match=said):
        BalancedOrder(**{**given, **change})  # type: ignore[arg-type]


class Triples:
    """A dataset of 40 pairs with an order of batches of `size` pairs."""

    def __init__(self, size: int = 4, pairs: int = 40, together: int = 3) -> None:
        self.size, self.pairs, self.together = size, pairs, together

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"input_ids": index}

    def sample_order(self, seed: int) -> BalancedOrder:
        query = np.arange(self.pairs) % 10
        return BalancedOrder(
            seed=seed, query=query, margin=np.ones(self.pairs), cluster=np.zeros(10, np.int64), size=self.size
        )


def checked(dataset: Triples, loss: str = "margin_mse") -> None:
    config = RunConfig.model_validate({"train": {"loss": loss, "batch": 12}})
    check_loss(of_dataset(dataset, text="triples", fingerprint=""), config)


def test_an_order_has_batches_of_the_steps() -> None:
    """Of another size a step would mix topics, or pairs of two queries would be taken for one."""
    checked(Triples())
    for other, said in (
        (Triples(size=12), "one of 12 pairs, 36 rows"),
        (Triples(size=3), "one of 3 pairs, 9 rows"),
        (Triples(pairs=39), "over 117"),
    ):
        with pytest.raises(BadInput, match=f"a BalancedOrder of train.batch, 12 rows, over 120 rows.*{said}"):
            checked(other)


def test_what_belongs_together_is_told_by_its_number() -> None:
    with pytest.raises(BadInput, match="a loss that takes 3 neighboring items as one"):
        checked(Triples(), "classification")
    with pytest.raises(BadInput, match=r"whose `together` is 3: margin_mse.*got 1, of triples"):
        checked(Triples(together=1))
    for wrong in (0, -3, 1.5):
        with pytest.raises(BadInput, match="whose `together` is 1 or more"):
            checked(Triples(together=wrong))  # type: ignore[arg-type]


def test_more_clusters_than_points_are_refused() -> None:
    with pytest.raises(BadInput, match="1 to 3 clusters"):
        clusters_of(np.ones((3, 2), np.float32), 4)
