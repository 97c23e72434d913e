"""Exchanges that send few entries: which ones, how many bytes, and what of the gradient is left."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from exchange.crew import kept
from exchange.few import NUMEL, exchanged, gaussian, layout, sparse, weighted
from gossamer import exchange as exchange_methods
from gossamer.comm.message import Collective, ProcessGroups
from gossamer.comm.random_key import Key
from gossamer.exchange import codec
from gossamer.exchange.random_k import drawn
from gossamer.ops import topk_indices as finding
from gossamer.spec.errors import BadInput

SHARED = ["random_k", "random_blocks"]
CONTRACTING = ["topk", "sampled_topk", "random_k", "random_blocks", "s2_reducer"]


def kinds() -> dict[str, Tensor]:
    one_hot = torch.zeros(NUMEL)
    one_hot[31_371] = -3.5
    return {
        "gaussian": gaussian(),
        "heavy": gaussian() / gaussian(seed=1).abs().clamp_min(1e-3),
        "one-hot": one_hot,
        "constant": torch.full((NUMEL,), 0.3),
        "sparse": sparse(0.05),
        "zeros": torch.zeros(NUMEL),
        "denormal": torch.full((NUMEL,), 1e-42),
    }


@pytest.mark.parametrize("k", [1, 10, 500, 5000, 24_999, NUMEL])
@pytest.mark.parametrize("kind", kinds())
def test_the_largest_are_found_exactly(k: int, kind: str) -> None:
    x = kinds()[kind]
    found = finding.largest(x, k, torch.Generator().manual_seed(5))
    assert found.unique().numel() == k
    assert torch.equal(x[found].abs().sort().values, x.abs().sort().values[-k:])


def test_the_selection_from_a_sample_is_taken_at_the_size_it_is_for() -> None:
    """Above the size of a sample; below it everything is selected from."""
    x = gaussian(400_003)
    assert not finding.is_small(x.numel(), 4000)
    threshold = finding.sampled_threshold(x, 4000, torch.Generator().manual_seed(5), margin=4.0)
    above = finding.at_least(x, threshold)
    assert 4000 <= above.numel() < 8000
    assert torch.equal(above, (finding.magnitudes(x) >= threshold).nonzero().view(-1))
    found = finding.largest(x, 4000, torch.Generator().manual_seed(5))
    assert torch.equal(found.sort().values, x.abs().topk(4000).indices.sort().values)


@pytest.mark.parametrize("name", ["topk", "sampled_topk"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_sent_first(name: str, bad: float) -> None:
    one, x = exchange_methods.build({name: {"fraction": 0.01}}), gaussian(400_003)
    for place in (0, 123_456, 400_002):
        x[place] = bad
    outcomes, _ = exchanged(one, [x, gaussian(400_003, 1)])
    assert (~torch.isfinite(outcomes[1].mean)).nonzero().view(-1).tolist() == [0, 123_456, 400_002]


@pytest.mark.parametrize("numel", [8, 1000, NUMEL])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
def test_bits_tell_the_places_they_were_made_of(numel: int, density: float) -> None:
    mask = sparse(density, numel + 3) != 0
    wanted = mask.nonzero().view(-1)
    assert torch.equal(finding.places_of(mask), wanted)
    packed = finding.to_bits(mask.clone())
    assert packed.numel() == -(-(numel + 3) // 8)
    assert finding.count_bits(packed) == wanted.numel()
    assert torch.equal(finding.places_of_bits(packed), wanted)


def test_a_message_with_room_for_fewer_takes_what_it_can_and_says_so() -> None:
    """Equal numbers all reach the threshold: capacity is what is sent, and the places change from step to step."""
    one, x = exchange_methods.build({"sampled_topk": {"fraction": 0.01}}), torch.full((400_000,), 0.5)
    first, second = (kept(x, exchanged(one, [x], step)[0][0]) for step in (0, 1))
    assert int((first != 0).sum()) == int((second != 0).sum()) == 4000
    assert not torch.equal(first, second)


@pytest.mark.parametrize("fraction", [0.5, 0.03, 0.001])
@pytest.mark.parametrize("name", SHARED)
def test_places_are_agreed_without_a_message(name: str, fraction: float) -> None:
    one = exchange_methods.build({name: {"fraction": fraction}})
    given = [gaussian(seed=r) for r in range(3)]
    outcomes, _ = exchanged(one, given)
    supports = [kept(x, o) != 0 for x, o in zip(given, outcomes, strict=True)]
    assert all(torch.equal(s, supports[0]) for s in supports) and bool(supports[0].any())
    later, _ = exchanged(one, given, step=1)
    assert not torch.equal(kept(given[0], later[0]) != 0, supports[0]), "the same places every step"


@pytest.mark.parametrize("name", CONTRACTING)
@pytest.mark.parametrize("kind", kinds())
def test_contraction_holds(name: str, kind: str) -> None:
    """On average over 20 keys; deterministic choices need no average."""
    one, x = exchange_methods.build({name: {"fraction": 0.25}} if name in SHARED else name), kinds()[kind]
    delta = one.contraction(layout(NUMEL))
    assert delta is not None and 0 < delta <= 1
    errors = [float(exchanged(one, [x], s)[0][0].lost.double().square().sum()) for s in range(20)]
    norm = float(x.double().square().sum())
    spread = torch.tensor(errors, dtype=torch.float64).std() / 20**0.5
    assert sum(errors) / 20 <= (1 - delta) * norm * 1.0001 + 5 * float(spread)


def test_contraction_holds_for_the_declared_part_where_samples_decide() -> None:
    one, x = exchange_methods.build("sampled_topk"), gaussian(400_000)
    sent = [int((kept(x, exchanged(one, [x], step)[0][0]) != 0).sum()) for step in range(30)]
    assert all(s <= 4000 for s in sent) and sum(sent) / 30 >= 0.95 * 4000


@pytest.mark.parametrize("numel,k", [(10, 3), (97, 41), (64, 1), (64, 64)])
def test_every_place_is_as_likely_as_any_other(numel: int, k: int) -> None:
    """And distinct: k of them in every draw."""
    draws, counts = 4096, torch.zeros(numel)
    for seed in range(draws):
        places = drawn(numel, k, Key(shared=seed, own=0), torch.device("cpu"))
        assert places.unique().numel() == k
        counts[places] += 1
    part = k / numel
    assert bool(((counts / draws - part).abs() <= 5.5 * (part * (1 - part) / draws) ** 0.5 + 1e-9).all())


@pytest.mark.parametrize(
    ("fraction", "numel", "k"), [(0.3, 12, 4), (0.3, 11, 3), (0.01, 10, 1), (0.999, 9, 9), (0.5, 0, 0)]
)
def test_a_fraction_is_rounded_to_the_nearest_count(fraction: float, numel: int, k: int) -> None:
    where = layout(numel)
    for name, size in (("topk", 8), ("sampled_topk", 8), ("random_k", 4)):
        (sent,) = exchange_methods.build({name: {"fraction": fraction}}).traffic(where, ProcessGroups.flat(2), 0)
        assert sent.nbytes == size * k
    x = gaussian(numel)
    (outcome,), _ = exchanged(exchange_methods.build({"topk": {"fraction": fraction}}), [x])
    assert int((kept(x, outcome) != 0).sum()) == k


def test_random_k_is_unbiased_where_it_says_so() -> None:
    one, x = exchange_methods.build({"random_k": {"fraction": 0.2, "unbiased": True}}), gaussian(40)
    draws = torch.stack([exchanged(one, [x], step)[0][0].mean.double() for step in range(1000)])
    error = draws.std(0) / len(draws) ** 0.5
    assert bool(((draws.mean(0) - x.double()).abs() <= 5.5 * error + 1e-6).all())
    assert one.contraction(layout(40)) is None
    most = exchange_methods.build({"random_k": {"fraction": 0.75, "unbiased": True}})
    assert most.contraction(layout(40)) == pytest.approx(2 - 4 / 3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "method,payload",
    [
        ({"topk": {"fraction": 0.01}}, (Collective.GATHER, 8 * 500)),
        ({"sampled_topk": {"fraction": 0.01}}, (Collective.GATHER, 8 * 500)),
        ({"random_k": {"fraction": 0.01}}, (Collective.SUM, 4 * 500)),
        ({"random_blocks": {"fraction": 0.1, "block_size": 500}}, (Collective.SUM, 4 * 5000)),
        ({"all_gather": "int8"}, (Collective.GATHER, NUMEL + 4 * 196)),
    ],
)
def test_bytes_are_these(method: dict, payload: tuple[Collective, int], ranks: int) -> None:
    one = exchange_methods.build(method)
    (priced,) = one.traffic(layout(NUMEL), ProcessGroups.flat(ranks), 0)
    assert (priced.combine, priced.nbytes) == payload
    _, sent = exchanged(one, [gaussian(seed=r) for r in range(ranks)])
    wanted = (ranks - 1) * payload[1] * (1 if payload[0] is Collective.GATHER else 2 / ranks)
    assert sent == pytest.approx(wanted, rel=0.02)  # a ring's chunks are not quite equal


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["topk", "sampled_topk", *SHARED])
def test_sending_all_is_the_dense_mean(name: str, ranks: int) -> None:
    inputs = [gaussian(1003, r) for r in range(ranks)]
    dense, _ = exchanged(exchange_methods.build("dense"), inputs)
    outcomes, _ = exchanged(exchange_methods.build({name: {"fraction": 1.0}}), inputs)
    torch.testing.assert_close(outcomes[0].mean, dense[0].mean, rtol=1e-6, atol=1e-7)
    assert torch.equal(kept(inputs[0], outcomes[0]), inputs[0])


def codec_named(name: str) -> Any:
    """A codec with its defaults; one that wraps another gets int8."""
    needs = [f.name for f in fields(codec.REGISTRY.type(name)) if f.default is MISSING and f.default_factory is MISSING]
    return {name: dict.fromkeys(needs, "int8")}


@pytest.mark.parametrize("numel", [0, 1, 1003])
@pytest.mark.parametrize("name", codec.names())
def test_gather_serves_every_codec(name: str, numel: int) -> None:
    """Messages of different lengths too: the third rank has nothing to say."""
    inputs = [gaussian(numel), gaussian(numel, 1).round(), torch.zeros(numel)]
    one = exchange_methods.build({"all_gather": {"codec": codec_named(name)}})
    outcomes, _ = exchanged(one, inputs)
    assert all(torch.equal(o.mean, outcomes[0].mean) for o in outcomes)
    wanted = weighted([kept(x, o) for x, o in zip(inputs, outcomes, strict=True)])
    torch.testing.assert_close(outcomes[0].mean.double(), wanted, rtol=1e-5, atol=1e-6)
    assert (outcomes[0].lost is None) == one.traits.lossless


@pytest.mark.parametrize(
    "method",
    [
        {"sampled_topk": {"fraction": 0.0}},
        {"random_k": {"fraction": 1.5}},
        {"random_blocks": {"block_size": 0}},
        {"s2_reducer": {"rows": 2}},
        {"s2_reducer": {"cells": -1.0}},
        {"block_sparse": {"block_size": 12}},
    ],
)
def test_senseless_settings_are_refused(method: dict) -> None:
    with pytest.raises(BadInput):
        exchange_methods.build(method)


@pytest.mark.parametrize("name,shrunk", [("sign_sgd", 30), ("qsgd", 3.9), ("mem_sgd", 40)])
def test_presets_are_what_their_papers_send(name: str, shrunk: float) -> None:
    """Two ranks: a dense exchange sends the bucket once."""
    one, x = exchange_methods.build(name), gaussian()
    outcomes, sent = exchanged(one, [x, x])
    assert 4 * NUMEL / sent > shrunk
    assert one.traits.remembers == (name != "qsgd")
    assert float(outcomes[0].mean @ x / (outcomes[0].mean.norm() * x.norm())) > 0.25
