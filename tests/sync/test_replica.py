"""The replica: gradients of any split of the batch equal those of one process; nothing moves unless all agree."""

from __future__ import annotations

import pytest
import torch

from sync.jobs import Branchy, mean_loss, params_of, rows_of


def reference(steps: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module = Branchy()
    found = []
    for step in range(steps):
        module.zero_grad()
        loss = mean_loss(module, *rows_of(step), step)
        loss.backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in params_of(module).items()}
        found.append(grads | {"loss": loss.detach()})
    return found


@pytest.mark.parametrize("rows", [[6], [3, 3], [5, 1], [1, 2, 3]])
@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_gradients_equal_one_process(pool, rows: list[int], bucket_bytes: int) -> None:
    """Unequal rows, void labels, tied, frozen, unused and sometimes-used parameters; small and large buckets."""
    found = pool.run("sync.jobs:gradients", len(rows), rows=rows, steps=4, bucket_bytes=bucket_bytes)
    for mine in found[1:]:
        assert mine == found[0], "ranks must agree bit for bit"
    for step, expected in enumerate(reference(4)):
        for name, value in expected.items():
            got = torch.tensor(found[0][step][name]).view_as(value)
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-7, msg=lambda m, n=name, s=step: f"{n} {s}: {m}")


@pytest.mark.parametrize("exchange", ["dense", {"two_shot": "bfloat16"}])
def test_planned_buckets_in_a_planned_order_bring_the_same(pool, exchange: object) -> None:
    """The last bucket first, which fills last: every other one waits for it, and nothing else changes."""
    given = {"rows": [5, 1], "steps": 3, "bucket_bytes": 1 << 20, "exchange": exchange}
    usual, planned = (pool.run("sync.jobs:gradients", 2, planned=one, **given) for one in (False, True))
    assert planned[0] == planned[1]
    exact = exchange == "dense"
    for mine, other in zip(usual[0], planned[0], strict=True):
        for name, value in mine.items():
            expected = torch.tensor(value)
            torch.testing.assert_close(torch.tensor(other[name]), expected, rtol=1e-5 if exact else 0.02, atol=1e-3)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_on_one_rank_is_known_to_all(pool, where: str) -> None:
    found = pool.run("sync.jobs:votes", 3, poison=1, where=where)
    assert found[0] == found[1] == found[2]
    first, second = found[0]
    assert not first["finite"] and first["bad"] == [1], "all have the mean, one has spoilt it"
    assert second["finite"] and second["bad"] == []
    assert first["ask"] == 2, "the largest request of all ranks"


def test_the_wait_for_the_vote_is_no_wait_for_an_exchange(pool) -> None:
    reduced_s, exposed_s, agreed_s, exchanged_s, *anew = pool.run("sync.jobs:late_vote", 2, late_s=1.0)[0]
    assert agreed_s > 0.2, "the other rank slept longer"
    assert exchanged_s == pytest.approx(reduced_s) and exposed_s == pytest.approx(exchanged_s + agreed_s)
    assert anew == [0.0, 0.0]


def test_ranks_at_different_steps_find_out(pool) -> None:
    for said in pool.run("sync.jobs:out_of_step", 2):
        kind, _, text = said.partition(": ")
        assert kind == "WireMismatch"
        assert text == "wanted all ranks at the same step, got steps [3, 4] by rank: start them from one checkpoint"


def test_two_exchanges_in_one_model_and_loss_scaling_leave_the_same_traces(pool) -> None:
    """Matrices by top-k with feedback, vectors densely; residuals lie by parameter; a loss scale is divided out."""
    plain = pool.run("sync.jobs:mixed", 2, scale=1.0)
    scaled = pool.run("sync.jobs:mixed", 2, scale=1024.0)
    assert plain == scaled, "a power of two changes nothing, neither in gradients nor in residuals"
    first, second = plain
    assert {k: v for k, v in first.items() if k != "residual"} == {k: v for k, v in second.items() if k != "residual"}
    names = {n for n, p in params_of(Branchy()).items() if p.dim() > 1}
    assert set(first["states"]) == {f"e@{n}" for n in names}
    assert first["residual"][0] > 0 and first["restored"] == [True]


def test_a_lossy_exchange_cannot_hide_what_is_not_finite(pool) -> None:
    """The step is rejected on all ranks, and no residual keeps the bad number."""
    for verdicts in pool.run("sync.jobs:hidden", 2):
        assert verdicts == [False, True, True]


@pytest.mark.parametrize("rows", [[6], [1, 2, 3]])
def test_buckets_that_are_given_back_bring_the_same_bit_for_bit(pool, rows: list[int]) -> None:
    for found in pool.run("sync.jobs:by_rows", len(rows), rows=rows, steps=3):
        assert found["True"] == found["False"]


def test_few_buckets_are_there_at_a_time(pool) -> None:
    """Those whose end the order of messages holds back, the one after, and the one that is being filled."""
    for ahead in (1, 4):
        for buckets, most in pool.run("sync.jobs:under_way", 2, look_ahead=ahead):
            assert buckets == 24 and most <= ahead + 2
