import numpy as np
import pytest

from gossamer.data import global_indices, order, rows_for, share_rows
from gossamer.spec.errors import BadInput

SIZES = (*range(1, 40), 63, 64, 65, 255, 256, 257, 1000, 4097, 65537)


@pytest.mark.parametrize("size", SIZES)
def test_every_epoch_visits_every_sequence_once(size: int) -> None:
    at = order(7, size)
    for epoch in (0, 1, 5):
        found = at(range(epoch * size, (epoch + 1) * size))
        assert np.array_equal(np.sort(found), np.arange(size))


def test_epochs_and_seeds_differ() -> None:
    size = 1000
    runs = [order(seed, size)(range(e * size, (e + 1) * size)) for seed in (0, 1) for e in (0, 1, 2)]
    agreeing = [np.mean(a == b) for i, a in enumerate(runs) for b in runs[:i]]
    assert max(agreeing) < 0.02  # one in a thousand by chance


def test_it_looks_random() -> None:
    size, epochs = 500, 200
    places = order(3, size)(range(size * epochs)).reshape(epochs, size)
    first = np.bincount(places[:, 0] // 50, minlength=10)
    assert first.min() >= 5 and first.max() <= 40  # 20 expected in each tenth
    assert max(abs(np.corrcoef(np.arange(size), row)[0, 1]) for row in places) < 0.2
    steps = np.diff(places, axis=1) % size
    assert np.bincount(steps.reshape(-1), minlength=size)[1:].std() < 2 * np.sqrt(epochs)


GOLDEN_FIRST = [431, 760, 967, 312, 795, 114, 223, 762]
GOLDEN_SECOND_EPOCH = [944, 748, 680, 496]


def test_golden() -> None:
    assert order(0, 1000)(range(8)).tolist() == GOLDEN_FIRST
    assert order(0, 1000)(range(1000, 1004)).tolist() == GOLDEN_SECOND_EPOCH


def test_one_index_or_many_in_any_shape() -> None:
    at = order(1, 77)
    many = at(np.arange(200).reshape(4, 50))
    assert many.shape == (4, 50) and many.dtype == np.int64
    assert [int(at(n)) for n in range(200)] == many.reshape(-1).tolist()
    assert at([]).shape == (0,)


def test_any_place_of_a_huge_order_is_asked_directly() -> None:
    size = 10**12
    at = order(5, size)
    far = 37 * size + np.arange(1000)
    found = at(far)
    assert found.min() >= 0 and found.max() < size and len(set(found.tolist())) == 1000
    assert np.array_equal(order(5, size)(far[500:]), found[500:])  # resuming needs nothing but the index


def test_a_run_resumes_at_the_very_sample_on_any_number_of_ranks() -> None:
    batch, at = 12, order(9, 100)
    whole = [at(global_indices(step, batch)) for step in range(30)]
    for share in ([1.0], [1, 1, 1], [0.6, 0.3, 0.1, 2.0]):
        again = order(9, 100)
        for step in range(15, 30):
            indices = np.asarray(global_indices(step, batch))
            parts = [again(indices[list(rows_for(rank, share, batch))]) for rank in range(len(share))]
            assert np.array_equal(np.concatenate(parts), whole[step])


def test_nothing_to_order() -> None:
    with pytest.raises(BadInput, match="0 sequences"):
        order(0, 0)


@pytest.mark.parametrize(
    ("batch", "share", "rows"),
    [
        (8, [1], (8,)),
        (8, [1, 1], (4, 4)),
        (7, [1, 1], (4, 3)),
        (10, [0.6, 0.4], (6, 4)),
        (10, [1, 1, 1], (4, 3, 3)),
        (5, [0.98, 0.01, 0.01], (3, 1, 1)),
        (3, [100, 1, 1], (1, 1, 1)),
        (64, [3.0, 1.0, 0.5], (43, 14, 7)),
        (1000003, [0.1, 0.2, 0.7], (100000, 200001, 700002)),
    ],
)
def test_rows_by_largest_remainder(batch: int, share: list[float], rows: tuple[int, ...]) -> None:
    assert share_rows(batch, share) == rows


def test_shares_are_as_near_as_whole_rows_allow() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        share = draw.uniform(0.2, 1, draw.integers(1, 9))
        batch = int(draw.integers(50, 400))
        rows = np.array(share_rows(batch, share.tolist()))
        assert rows.sum() == batch and np.abs(rows - batch * share / share.sum()).max() < 1


@pytest.mark.parametrize("share", [[1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0]])
def test_impossible_shares(share: list[float]) -> None:
    with pytest.raises(BadInput, match=r"plan\.batch_fractions.*positive"):
        share_rows(8, share)


def test_more_ranks_than_sequences() -> None:
    with pytest.raises(BadInput, match=r"batch of 3 for 4 ranks.*set train\.batch to 4"):
        share_rows(3, [1, 1, 1, 1])
