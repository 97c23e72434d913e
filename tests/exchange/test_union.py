"""Exchanges for gradients that are sparse by themselves: what is recovered, and what zeros cost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exchange.few import NUMEL, exchanged, gaussian, layout, sparse, weighted
from gossamer import exchange as exchange_methods
from gossamer.comm.channel.counting import CountingChannel
from gossamer.comm.message import ProcessGroups
from gossamer.ops.sketch import Hashes, median


def test_one_row_of_a_sketch_is_unbiased() -> None:
    x = torch.cat((gaussian(40), torch.zeros(100)))
    one = exchange_methods.build({"s2_reducer": {"cells": 1.5, "rows": 1}})
    draws = torch.stack([exchanged(one, [x], step)[0][0].mean.double() for step in range(1000)])
    error = draws.std(0) / len(draws) ** 0.5
    assert bool(((draws.mean(0) - x.double()).abs() <= 5.5 * error + 1e-6).all())
    assert float(error[:40].min()) > 0, "nothing collided: the test says nothing"


@pytest.mark.parametrize("name", ["s2_reducer", "block_sparse"])
def test_the_support_is_the_union_of_supports(name: str) -> None:
    inputs = [sparse(0.03, seed=r) for r in range(3)]
    one = (
        exchange_methods.build({"block_sparse": {"block_size": 1}})
        if name == "block_sparse"
        else exchange_methods.build(name)
    )
    outcomes, _ = exchanged(one, inputs)
    union = torch.stack([x != 0 for x in inputs]).any(0)
    assert torch.equal(outcomes[0].mean != 0, union)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_sketch_without_collisions_is_exact(rows: int) -> None:
    inputs = [sparse(0.0002, seed=r) for r in range(2)]  # about 20 of 50 000, and 400 cells a row and entry
    one = exchange_methods.build({"s2_reducer": {"cells": 400.0 * rows, "rows": rows}})
    outcomes, sent = exchanged(one, inputs)
    assert sent < 4 * NUMEL, "dense is exact anyway"
    torch.testing.assert_close(outcomes[0].mean.double(), weighted(inputs), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 3])
def test_sketches_are_linear(rows: int) -> None:
    hashes = Hashes.draw(torch.arange(700) * 3, rows, 90, torch.Generator().manual_seed(2))
    a, b = gaussian(700), gaussian(700, 1)
    both = hashes.encode(2 * a + 3 * b).double()
    apart = 2 * hashes.encode(a).double() + 3 * hashes.encode(b).double()
    torch.testing.assert_close(both, apart, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "places", [torch.arange(5000), torch.arange(5000) * 64, torch.arange(5000) // 50 * 640 + torch.arange(5000) % 50]
)
def test_the_error_of_a_sketch_is_that_of_independent_hashes(places: Tensor) -> None:
    """Also for neighbors, a column and rows of a matrix, where multiplying once leaves errors ten times larger."""
    errors, x = [], gaussian(5000)
    rng = torch.Generator().manual_seed(3)
    for _ in range(40):
        hashes = Hashes.draw(places, 1, 20_000, rng)
        errors.append(float((hashes.decode(hashes.encode(x))[0] - x).square().sum() / x.square().sum()))
    assert 0.2 < sum(errors) / 40 < 0.3 and max(errors) < 0.4


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_the_median_is_one_of_the_rows(rows: int) -> None:
    x = gaussian(rows * 300).view(rows, 300).round()  # with ties
    assert torch.equal(x.gather(0, median(x))[0], x.median(0).values)


@pytest.mark.parametrize("name", ["s2_reducer", "block_sparse"])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_what_is_not_sparse_goes_dense(name: str, density: float) -> None:
    """At most the bitmap more than dense, and exact; nothing at all costs the bitmap."""
    inputs = [sparse(density, seed=r) for r in range(2)]
    outcomes, sent = exchanged(exchange_methods.build(name), inputs)
    _, dense = exchanged(exchange_methods.build("dense"), inputs)
    torch.testing.assert_close(outcomes[0].mean.double(), weighted(inputs), rtol=1e-6, atol=1e-7)
    bitmap = NUMEL / 8 if name == "s2_reducer" else NUMEL / 256
    assert sent == pytest.approx(bitmap + (dense if density else 0), rel=0.01, abs=8)


@pytest.mark.parametrize("small", [-0.0, 1e-42, -1e-45])
def test_negative_zero_and_denormals_count_as_non_zero(small: float) -> None:
    x = torch.zeros(NUMEL)
    x[777] = small
    _, empty = exchanged(exchange_methods.build("s2_reducer"), [torch.zeros(NUMEL)] * 2)
    _, sent = exchanged(exchange_methods.build("s2_reducer"), [x, torch.zeros(NUMEL)])
    assert sent > empty
    exact, _ = exchanged(exchange_methods.build("block_sparse"), [x, torch.zeros(NUMEL)])
    assert torch.equal(exact[0].mean, (x.double() / 3).float()), "the first of two ranks has a third of the weight"


def test_rows_that_nobody_used_cost_a_bit_per_block() -> None:
    """One rank uses rows 3 and 7, the other 7 and 9, of 1000 rows of 64: three rows travel."""
    inputs = [torch.zeros(1000, 64) for _ in range(2)]
    for x, rows in zip(inputs, ((3, 7), (7, 9)), strict=True):
        x[list(rows)] = gaussian(64).view(1, 64)
    outcomes, sent = exchanged(exchange_methods.build("block_sparse"), [x.flatten() for x in inputs])
    torch.testing.assert_close(outcomes[1].mean.double(), weighted([x.flatten() for x in inputs]))
    assert sent == pytest.approx(1000 * 64 / 32 / 8 + 3 * 64 * 4, abs=16)


@pytest.mark.parametrize("rows", [0, 1, 30, 500, 1000])
def test_what_a_table_is_expected_to_send_is_what_it_sends(rows: int) -> None:
    """To the bytes, where ranks have looked up the same rows; no more than that of a bucket of which all is in use."""
    x = torch.zeros(1000, 64)
    x[:rows] = gaussian(rows * 64).view(rows, 64)
    one, levels = exchange_methods.build("block_sparse"), ProcessGroups.flat(2)
    _, sent = exchanged(one, [x.flatten()] * 2)
    priced = CountingChannel(0, levels)
    priced.charge(one.expected_traffic(layout(64_000), levels, 0, rows / 1000))
    assert priced.meter.total_bytes == sent
    assert one.expected_traffic(layout(64_000), levels, 0, 1.0) == one.traffic(layout(64_000), levels, 0)


def test_the_median_of_three_rows_keeps_giants_out_of_what_they_collide_with() -> None:
    """A tenth of the entries are a million times the others: in one row of 800 cells each meets some 18 of these."""
    rng = torch.Generator().manual_seed(2)
    x = torch.zeros(4000)
    places = torch.randperm(4000, generator=rng)[:400]
    x[places] = torch.randn(400, generator=rng)
    x[places[:40]] *= 1e6
    spoilt = []
    for rows in (1, 3):
        outcomes, _ = exchanged(exchange_methods.build({"s2_reducer": {"cells": 2.0 * rows, "rows": rows}}), [x])
        small = places[40:]
        spoilt.append(int(((outcomes[0].mean - x)[small].abs() > 1e3).sum()))
    assert spoilt[0] > 10 and spoilt[1] <= spoilt[0] / 3


@pytest.mark.parametrize(("cells", "rows"), [(2.0, 1), (6.0, 3), (4.5, 3)])
def test_a_sketch_declares_the_error_of_one_of_its_rows(cells: float, rows: int) -> None:
    """Each row has cells / rows of a cell for every entry: delta = 1 - rows / cells, and what is lost is less than says
    that on average over hashes.
    """
    one = exchange_methods.build({"s2_reducer": {"cells": cells, "rows": rows}})
    assert one.contraction(layout(100)) == pytest.approx(1 - rows / cells)
    x = sparse(0.02, 20_000)
    part = [float((exchanged(one, [x], s)[0][0].lost.norm() / x.norm()).square()) for s in range(10)]
    assert 0 < sum(part) / 10 <= 1.1 * rows / cells


def test_a_sketch_with_no_more_cells_than_rows_declares_nothing() -> None:
    assert exchange_methods.build({"s2_reducer": {"cells": 3.0, "rows": 3}}).contraction(layout(100)) is None
