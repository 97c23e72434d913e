"""The masked exchange: the same mean as dense of the same mask, bit for bit, for the bytes of what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from exchange import crew
from gossamer import exchange as exchange_methods
from gossamer import sharding as sharding_methods
from gossamer.comm.bucket import Bucket
from gossamer.comm.message import Collective
from gossamer.exchange.static_mask import StaticMask
from gossamer.ops.static_mask import StaticMaskDraw
from gossamer.spec.errors import BadInput
from gossamer.sync._state_by_name import refilled, state_by_name

SHAPES = {"layers.0.up.weight": (24, 16), "layers.0.up.bias": (24,), "embed.weight": (9, 16), "scale": ()}
WHERE = crew.layout(SHAPES)
KEPT = 24 * 16 // 4 + 24 + 9 * 16 + 1


def masked(flat: torch.Tensor) -> torch.Tensor:
    kept = StaticMaskDraw(sparsity=0.75, seed=0).kept("layers.0.up.weight", (24, 16), torch.device("cpu"))
    return torch.cat([flat[:384] * kept.view(-1), flat[384:]])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_it_is_dense_of_the_masked_gradient_bit_for_bit(ranks: int) -> None:
    dense, one = exchange_methods.build("dense"), StaticMask()
    plain = [Bucket(WHERE, masked(crew.bucket(WHERE, r).flat)) for r in range(ranks)]
    wanted, _ = crew.world(dense, ranks, plain, [dense.init(WHERE)] * ranks)
    found, _ = crew.world(one, ranks, [crew.bucket(WHERE, r) for r in range(ranks)], [one.init(WHERE)] * ranks)
    assert all(torch.equal(a.mean, b.mean) for a, b in zip(found, wanted, strict=True))


def test_the_bytes_are_those_of_what_is_kept() -> None:
    levels = crew.levels_of(2)
    (sent,) = StaticMask().traffic(WHERE, levels, 0)
    assert (sent.combine, sent.nbytes) == (Collective.SUM, 4 * KEPT)
    (whole,) = exchange_methods.build("dense").traffic(WHERE, levels, 0)
    assert whole.nbytes - sent.nbytes == 4 * round(0.75 * 24 * 16)  # no indices
    matrix = crew.layout({"layers.0.up.weight": (64, 32)})
    for sparsity in (0.5, 0.75, 0.9):
        (one,) = StaticMask(sparsity=sparsity).traffic(matrix, levels, 0)
        assert one.nbytes == 4 * (64 * 32 - round(sparsity * 64 * 32))
    (coded,) = StaticMask(inner=exchange_methods.build({"all_gather": {"codec": "int8"}})).traffic(WHERE, levels, 0)
    (alone,) = exchange_methods.build({"all_gather": {"codec": "int8"}}).traffic(crew.layout({"x": (KEPT,)}), levels, 0)
    assert coded.nbytes == alone.nbytes


@pytest.mark.parametrize(
    "inner",
    [
        {"error_feedback": {"inner": {"topk": {"fraction": 0.25}}}},
        {"ef21": {"inner": {"topk": {"fraction": 0.25}}}},
        {"two_shot": "int8"},
        {"hierarchical": {"inter": {"error_feedback": {"inner": {"two_shot": "int8"}}}}},
    ],
    ids=str,
)
def test_what_is_inside_sees_kept_elements_alone(inner: object) -> None:
    """Its steps are those of the inner exchange on a bucket that has no others; states are kept by parameter."""
    one = StaticMask(inner=exchange_methods.build(inner))
    part = one._part(WHERE)
    alone, ranks = one.inner, 4
    states, theirs = [one.init(WHERE)] * ranks, [alone.init(part.layout)] * ranks
    for step in range(3):
        xs = [crew.bucket(WHERE, r, step) for r in range(ranks)]
        kept = [Bucket(part.layout, part.taken(x.flat)) for x in xs]
        found, _ = crew.world(one, ranks, xs, states, step)
        wanted, _ = crew.world(alone, ranks, kept, theirs, step)
        assert all(torch.equal(part.taken(a.mean), b.mean) for a, b in zip(found, wanted, strict=True))
        assert all(torch.equal(a.mean, masked(a.mean)) for a in found)
        states, theirs = [o.state for o in found], [o.state for o in wanted]
    by_name = state_by_name(WHERE, states[0])
    assert all(t.shape == SHAPES[name.partition("@")[2]] for name, t in by_name.items())
    again = refilled(WHERE, one.init(WHERE), by_name)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(again.flatten(), states[0].flatten(), strict=True))


def test_between_islands_it_masks_what_the_islands_have_summed() -> None:
    one = exchange_methods.build({"hierarchical": {"inter": "static_mask"}})
    dense = exchange_methods.build({"hierarchical": {"inter": "dense"}})
    found, channels = crew.world(one, 4, [crew.bucket(WHERE, r) for r in range(4)], [one.init(WHERE)] * 4)
    wanted, plain = crew.world(dense, 4, [crew.bucket(WHERE, r) for r in range(4)], [dense.init(WHERE)] * 4)
    assert all(torch.equal(a.mean, masked(b.mean)) for a, b in zip(found, wanted, strict=True))
    sent, whole = (sum(c.meter.snapshot().get("0>2", 0) for c in (world[0],)) for world in (channels, plain))
    assert sent < whole


@pytest.mark.parametrize("path", [["island"], ["island", "between"]], ids=str)
@pytest.mark.parametrize(
    "inter", ["static_mask", {"warmup": {"inner": "static_mask", "first": "static_mask"}}], ids=str
)
def test_with_rows_of_states_apart_masks_are_those_of_parameters(path: list[str], inter: object) -> None:
    """Where each rank of an island sends some rows between islands, a mask of these rows alone would be another one."""
    masks, dense = (
        sharding_methods.build("zero1").exchange(exchange_methods.build({"hierarchical": {"inter": one}}), path)
        for one in (inter, "dense")
    )
    found, _ = crew.world(masks, 4, [crew.bucket(WHERE, r) for r in range(4)], [masks.init(WHERE)] * 4)
    wanted, _ = crew.world(dense, 4, [crew.bucket(WHERE, r) for r in range(4)], [dense.init(WHERE)] * 4)
    for mine, mean in zip(found, wanted, strict=True):
        own = mean.mean != 0  # the rows that this rank owns
        assert own.any() and torch.allclose(mine.mean[own], masked(mean.mean)[own])


def test_parts_of_a_parameter_are_refused() -> None:
    part = crew.layout({"layers.0.up.weight[0:12]": (12, 16)})
    with pytest.raises(BadInput, match=r"whole parameters .* layers\.0\.up\.weight\[0:12\]"):
        exchange_methods.build({"hierarchical": {"inter": "static_mask"}}).check(part, crew.levels_of(4))


def test_what_is_masked_counts_as_lost() -> None:
    one = StaticMask()
    x = crew.bucket(WHERE, 0)
    given = x.flat.clone()
    (found,), _ = crew.world(one, 1, [x], [one.init(WHERE)])
    assert found.lost is not None and torch.equal(given - found.lost, masked(given))
    assert one.contraction(WHERE) is None and not one.traits.lossless and one.traits.masked


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"sparsity": 1.0}, "sparsity"),
        ({"parameters": ["("]}, "regular"),
        ({"inner": "static_mask"}, "without a mask"),
        ({"inner": {"warmup": {"inner": "static_mask"}}}, "without a mask"),
    ],
)
def test_bad_settings_are_named(written: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        exchange_methods.build({"static_mask": written})
    assert replace(StaticMask(), seed=3) != StaticMask()
