"""What every member of the sync room keeps, over gloo, through the driver; tests/references have the equations."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from gossamer import sync
from gossamer.comm.message import ProcessGroups
from gossamer.plan._traffic import Shapes, round_bytes
from pool import Pool
from sync.apart_jobs import RATE, SHAPES, gradient, start

# Every member, with rounds short enough for a few steps.
SETTINGS: dict[str, Any] = {
    "every_step": "every_step",
    "local_sgd": {"local_sgd": {"sync_every": 3}},
    "post_local_sgd": {"post_local_sgd": {"sync_every": 2, "warmup_steps": 2}},
    "qsparse_local_sgd": {
        "qsparse_local_sgd": {"sync_every": 2, "exchange": {"error_feedback": {"topk": {"fraction": 0.2}}}}
    },
    "diloco": {"diloco": {"sync_every": 3}},
    "streaming_diloco": {"streaming_diloco": {"sync_every": 4, "fragments": 2, "sync_delay": 1}},
    "dasgd": {"dasgd": {"sync_every": 3}},
    "dsm": {"dsm": {"sync_every": 3, "outer_optimizer": {"sign_momentum": {"randomized": True, "weight_decay": 0.01}}}},
    "slowmo": {"slowmo": {"sync_every": 3}},
    "fedhyper": {"fedhyper": {"sync_every": 2}},
    "co2": {"co2": {"sync_every": 2}},
    "cser": {"cser": {"sync_every": 3, "step_exchange": {"random_blocks": {"fraction": 0.25, "block_size": 8}}}},
    "gossip": {"gossip": {"sync_every": 2, "global_sync_every": 2}},
    "zero_one": {
        "zero_one": {"local_step_clipper": 2, "var_freeze_step": 3, "var_update_scaler": 1, "local_step_scaler": 1}
    },
    "cser_pl": {"cser_pl": {"sync_every": 3, "step_exchange": {"random_blocks": {"fraction": 0.25, "block_size": 8}}}},
}
APART = sorted(set(SETTINGS) - {"every_step"})
BY_LOSSES = {"just_one_byte"}  # what they keep is in tests/sync/test_probing.py
ISLANDS = {2: [[0], [1]], 3: [[0, 1], [2]]}


def test_every_member_is_here() -> None:
    assert {*SETTINGS, *BY_LOSSES} == set(sync.names())
    assert {name for name in sync.names() if sync.build(name).probe is not None} == BY_LOSSES
    assert all(sync.build(name).loop is not None for name in APART)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_all_ranks_end_bit_for_bit_in_the_same_place(pool: Pool, name: str) -> None:
    found = pool.run("sync.apart_jobs:rounds", 3, written=SETTINGS[name], steps=7, islands=ISLANDS[3])
    assert all(one["at"][-1] == found[0]["at"][-1] for one in found)
    assert all(one["anchor"] == found[0]["anchor"] for one in found)  # after every step
    assert all(abs(x) < 10 for x in found[0]["at"][-1])


@pytest.mark.parametrize("name", APART)
def test_ranks_of_one_island_are_never_apart(pool: Pool, name: str) -> None:
    first, second, alone = pool.run(
        "sync.apart_jobs:rounds", 3, written=SETTINGS[name], steps=6, islands=ISLANDS[3], finish=False
    )
    assert first["at"] == second["at"]
    assert first["at"] != alone["at"]


@pytest.mark.parametrize("name", APART)
def test_bytes_of_a_round_are_known_before(pool: Pool, name: str) -> None:
    loop = sync.build(SETTINGS[name]).loop
    assert loop is not None
    first = loop.steady + loop.cycle  # by then all fragments take turns
    found = pool.run("sync.apart_jobs:rounds", 2, written=SETTINGS[name], steps=first + loop.cycle, finish=False)
    shapes: Shapes = tuple(SHAPES.items())
    links = round_bytes(loop, shapes, ProcessGroups.islands(ISLANDS[2]), units=("a", "b"), bucket_bytes=1 << 20)
    for rank, one in enumerate(found):  # alone on their islands, they vote alone
        assert sum(one["sent"][first:]) == links[f"{rank}>{1 - rank}"]


def reference(
    steps: int, every: int, lr: float, mu: float, ranks: int, weights: list[float], made: list[set[int]] | None = None
) -> list[torch.Tensor]:
    """DiLoCo as its paper writes it, in one process, with torch's own outer optimizer. `made`: the steps of each rank,
    where they do not make all.
    """
    anchor = {n: t.clone().requires_grad_() for n, t in start().items()}
    outside = torch.optim.SGD(anchor.values(), lr=lr, momentum=mu, nesterov=mu > 0)
    own = [{n: t.detach().clone() for n, t in anchor.items()} for _ in range(ranks)]
    seen = [0.0] * ranks
    for step in range(steps):
        for rank in range(ranks):
            if made is not None and step not in made[rank]:
                continue
            seen[rank] += weights[rank]
            for name, value in own[rank].items():
                value.sub_(gradient(name, value, rank, step), alpha=RATE)
        if (step + 1) % every == 0 or step == steps - 1:
            total = sum(seen)
            for name, value in anchor.items():
                gone = [w / total * (value.detach() - one[name]) for w, one in zip(seen, own, strict=True)]
                value.grad = torch.stack(gone).sum(0)
            outside.step()
            own = [{n: t.detach().clone() for n, t in anchor.items()} for _ in range(ranks)]
            seen = [0.0] * ranks
    return torch.cat([anchor[n].detach().flatten() for n in sorted(anchor)])


def test_an_island_of_slow_machines_makes_some_steps_and_counts_by_what_it_saw(pool: Pool) -> None:
    outer = {"nesterov": {"lr": 0.7, "momentum": 0.9}}
    written = {"diloco": {"sync_every": 4, "local_steps": [4, 1, 3], "outer_optimizer": outer}}
    found = pool.run("sync.apart_jobs:rounds", 3, written=written, steps=10, samples=[1.0, 2.0, 1.0])
    assert found[0]["at"][-1] == found[1]["at"][-1] == found[2]["at"][-1]
    made = [set(range(10)), {3, 7}, {1, 2, 3, 5, 6, 7, 9}]
    wanted = reference(10, 4, 0.7, 0.9, 3, [1.0, 2.0, 1.0], made)
    assert torch.allclose(torch.tensor(found[0]["at"][-1]), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["slowmo", "dsm", "streaming_diloco", "post_local_sgd"])
def test_islands_that_make_other_steps_agree_in_the_end(pool: Pool, name: str) -> None:
    """Rules in units of the learning rate see the mean of the islands' rates, the same on all."""
    ((base, given),) = SETTINGS[name].items()
    written = {base: {**given, "local_steps": [1, given["sync_every"]]}}
    found = pool.run("sync.apart_jobs:rounds", 3, written=written, steps=9, islands=ISLANDS[3])
    assert all(one["at"][-1] == found[0]["at"][-1] for one in found)
    assert all(one["anchor"] == found[0]["anchor"] for one in found)


# What reduces to plain data parallelism, which all members share: SGD steps of the mean gradient.
TOGETHER = [
    {"local_sgd": {"sync_every": 1}},
    {"diloco": {"sync_every": 1, "outer_optimizer": {"nesterov": {"lr": 1.0, "momentum": 0.0}}}},
    {"diloco": {"sync_every": 1, "outer_optimizer": {"slow_momentum": {"momentum": 0.0}}}},
    {"diloco": {"sync_every": 1, "outer_optimizer": {"hypergradient": {"inner": "average", "low": 1.0, "high": 1.0}}}},
    {"cser": {"sync_every": 3, "step_exchange": "dense"}},
    {"cser": {"sync_every": 1, "step_exchange": None, "exchange": "dense"}},
    {"local_sgd": {"sync_every": 3, "warmup_steps": 100}},
    {"gossip": {"topology": "complete", "global_sync_every": 100}},
    {"gossip": {"global_sync_every": 1}},
    {"zero_one": {"var_freeze_step": 100, "var_update_scaler": 0}},
    {"zero_one": {"var_freeze_step": 100, "var_update_scaler": 2, "exchange": "dense"}},
    {"zero_one": {"var_freeze_step": 0, "local_step_scaler": 100, "exchange": "dense"}},
]


@pytest.mark.parametrize("written", TOGETHER, ids=json.dumps)
def test_a_period_of_one_is_plain_data_parallelism(pool: Pool, written: Any) -> None:
    plain = pool.run("sync.apart_jobs:rounds", 2, written="every_step", steps=5)
    found = pool.run("sync.apart_jobs:rounds", 2, written=written, steps=5)
    assert torch.allclose(torch.tensor(found[0]["at"]), torch.tensor(plain[0]["at"]), rtol=1e-5, atol=1e-6)


def test_all_gradients_meet_at_distances_that_double() -> None:
    """As 0/1 Adam's paper writes it: t_0 = 0, t_{j+1} = t_j + 2^floor(j / kappa)."""
    for kappa in (1, 2, 3, 16):
        wanted, at = set(), 0
        for j in range(200):
            wanted.add(at)
            at += 2 ** min(j // kappa, 20)
        loop = sync.build({"zero_one": {"var_freeze_step": 300, "var_update_scaler": kappa}}).loop
        assert loop is not None and not loop.apart(-1)
        assert [step for step in range(300) if not loop.apart(step)] == sorted(t for t in wanted if t < 300)
        assert all(loop.sends(0, step + 1) == loop.apart(step) for step in range(300))


def test_rounds_grow_until_they_are_as_long_as_said() -> None:
    loop = sync.build(
        {"zero_one": {"var_freeze_step": 5, "var_update_scaler": 0, "local_step_scaler": 8, "local_step_clipper": 6}}
    ).loop
    assert loop is not None
    ends = [done for done in range(60) if loop.sends(0, done)]
    assert ends == [*range(6, 14), 15, 17, 19, 21, 25, 29, 35, 41, 47, 53, 59]  # rounds of 1, 2, 4 and then 6 steps
    assert loop.steady == 5 + 3 * 8


@pytest.mark.parametrize(
    "written",
    [
        {"local_sgd": {"sync_every": 3}},
        {"local_sgd": {"sync_every": 3, "exchange": {"two_shot": {"codec": "int4"}}}},
        {"diloco": {"sync_every": 4, "fragments": 2, "outer_optimizer": "average", "alpha": 0.5}},
        {"cser": {"sync_every": 3}},
    ],
    ids=json.dumps,
)
def test_one_island_trains_as_if_there_were_no_rounds(pool: Pool, written: Any) -> None:
    plain = pool.run("sync.apart_jobs:rounds", 2, written="every_step", steps=5)
    found = pool.run("sync.apart_jobs:rounds", 2, written=written, steps=5, islands=[[0, 1]])
    assert torch.allclose(torch.tensor(found[0]["at"]), torch.tensor(plain[0]["at"]), rtol=1e-5, atol=1e-6)


def test_no_fragments_no_delay_no_mix_is_diloco_bit_for_bit(pool: Pool) -> None:
    streaming = {
        "streaming_diloco": {"sync_every": 3, "fragments": 1, "sync_delay": 0, "alpha": 0.0, "exchange": "dense"}
    }
    plain = {"diloco": {"sync_every": 3, "outer_optimizer": {"nesterov": {"lr": 0.4}}}}
    one, other = (pool.run("sync.apart_jobs:rounds", 2, written=w, steps=7) for w in (streaming, plain))
    assert one == other


def test_who_takes_nothing_over_goes_on_alone(pool: Pool) -> None:
    written = {"diloco": {"sync_every": 2, "alpha": 1.0}}
    found = pool.run("sync.apart_jobs:rounds", 2, written=written, steps=5, finish=False)
    for rank, one in enumerate(found):
        alone = {n: t.clone() for n, t in start().items()}
        for step in range(5):
            for name, value in alone.items():
                value.sub_(gradient(name, value, rank, step), alpha=RATE)
        wanted = torch.cat([alone[n].flatten() for n in sorted(alone)])
        assert torch.allclose(torch.tensor(one["at"][-1]), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fragments", [1, 2])
def test_what_is_carried_on_is_not_lost(pool: Pool, fragments: int) -> None:
    """The islands' quadratics are alike but for their centers: where they are on the mean is a matter of their steps
    alone, however they meet, unless steps are thrown away.
    """
    late = {"sync_every": 4, "fragments": fragments, "sync_delay": 2, "outer_optimizer": "average"}
    alone, kept, lost = (
        pool.run("sync.apart_jobs:rounds", 2, written={"diloco": {**late, **how}}, steps=9, finish=False)
        for how in ({"alpha": 1.0}, {"keep_local_progress": True}, {})
    )

    def middle(found: list[dict[str, Any]]) -> torch.Tensor:
        return torch.tensor([one["at"] for one in found]).mean(0)

    assert torch.allclose(middle(kept), middle(alone), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(middle(lost), middle(alone), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "each", [None, {"random_blocks": {"fraction": 0.25, "block_size": 8}}, {"topk": {"fraction": 0.1}}]
)
def test_cser_s_mean_is_that_of_plain_sgd(pool: Pool, each: Any) -> None:
    """Nothing is held back: the mean of the islands follows SGD with the gradients where they are, whatever is lost."""
    exchange = {"random_blocks": {"fraction": 0.5, "block_size": 8}}
    written = {"cser": {"sync_every": 2, "step_exchange": each, "exchange": exchange}}
    found = pool.run("sync.apart_jobs:rounds", 2, written=written, steps=5, finish=False)
    at = torch.tensor([one["at"] for one in found])  # (rank, step, number)
    names = sorted(SHAPES)
    for step in range(1, 5):
        moved = torch.zeros(at.shape[-1])
        for rank in range(2):
            pieces = torch.split(at[rank, step - 1], [torch.Size(SHAPES[n]).numel() for n in names])
            flats = [gradient(n, p.view(SHAPES[n]), rank, step).flatten() for n, p in zip(names, pieces, strict=True)]
            moved += torch.cat(flats) / 2
        assert torch.allclose(at[:, step].mean(0), at[:, step - 1].mean(0) - RATE * moved, atol=1e-5)


def test_the_last_steps_count_though_a_fragment_is_under_way(pool: Pool) -> None:
    """One island: what has left lands and is mixed in, and what the island has gone since then leaves as well."""
    loop = {"sync_every": 4, "sync_delay": 2, "alpha": 0.5, "outer_optimizer": "average"}
    found = pool.run("sync.apart_jobs:rounds", 1, written={"diloco": loop}, steps=6)
    own = {n: t.clone() for n, t in start().items()}
    for step in range(6):
        for name, value in own.items():
            value.sub_(gradient(name, value, 0, step), alpha=RATE)
        if step == 3:
            left = {n: t.clone() for n, t in own.items()}
    wanted = torch.cat([(0.5 * own[n] + 0.5 * left[n]).flatten() for n in sorted(own)])
    assert torch.allclose(torch.tensor(found[0]["at"][-1]), wanted, atol=1e-6)


def test_what_is_quantized_is_bounded_by_the_displacement(pool: Pool) -> None:
    exact = pool.run("sync.apart_jobs:rounds", 2, written={"local_sgd": {"sync_every": 3}}, steps=3)
    coded = {"local_sgd": {"sync_every": 3, "exchange": {"two_shot": {"codec": "int8"}}}}
    found = pool.run("sync.apart_jobs:rounds", 2, written=coded, steps=3)
    off = torch.tensor(found[0]["at"][-1]) - torch.tensor(exact[0]["at"][-1])
    moved = torch.tensor(exact[0]["at"][-1]) - torch.cat([start()[n].flatten() for n in sorted(SHAPES)])
    assert 0 < off.abs().max() < 0.02 * moved.abs().max()


POISONED = [SETTINGS[name] for name in ("local_sgd", "diloco", "streaming_diloco", "dsm", "co2", "cser", "gossip")]


@pytest.mark.parametrize("written", [*POISONED, {"cser": {"sync_every": 3, "step_exchange": "dense"}}], ids=json.dumps)
def test_an_island_that_is_not_finite_is_left_out_and_comes_back(pool: Pool, written: Any) -> None:
    apart = [[0], [1], [2]]
    found = pool.run("sync.apart_jobs:rounds", 3, written=written, steps=2, islands=apart, poison=[1, 1])
    assert all(one["at"][-1] == found[0]["at"][-1] for one in found)
    assert all(abs(x) < 10 for x in found[0]["at"][-1])


def test_who_is_left_out_does_not_count(pool: Pool) -> None:
    written = {"local_sgd": {"sync_every": 2}}
    three = pool.run("sync.apart_jobs:rounds", 3, written=written, steps=2, poison=[2, 1], samples=[1.0, 3.0, 5.0])
    two = pool.run("sync.apart_jobs:rounds", 2, written=written, steps=2, samples=[1.0, 3.0])
    assert torch.allclose(torch.tensor(three[2]["at"][-1]), torch.tensor(two[0]["at"][-1]), rtol=1e-6, atol=1e-7)


def test_where_nobody_is_finite_all_go_back(pool: Pool) -> None:
    found = pool.run("sync.apart_jobs:rounds", 1, written={"local_sgd": {"sync_every": 2}}, steps=2, poison=[0, 1])
    assert found[0]["at"][-1] == [x for n in sorted(SHAPES) for x in start()[n].flatten().tolist()]
