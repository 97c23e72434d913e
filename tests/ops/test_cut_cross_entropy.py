"""Cut cross-entropy beside the plain one: losses, gradients, log-sum-exps, reductions, ragged shapes, one head on two
ranks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.ops.cut_cross_entropy import (
    HeadLoss,
    LogitMap,
    cut_bytes,
    cut_cross_entropy,
    plain_bytes,
    token_losses,
)
from ops import head_jobs
from pool import Pool

N, V, D = 252, 507, 123  # ragged in every dim
TILE = (100, 64)
MAPS = (LogitMap(), LogitMap(inner=0.25), LogitMap(inner=1 / 5, is_capped=True, outer=5.0))


def _made(bias: bool = True, dtype: torch.dtype = torch.float32, ignored: bool = True) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, D, generator=generator).to(dtype)
    weight = (torch.randn(V, D, generator=generator) / 4).to(dtype)
    labels = torch.randint(V, (N,), generator=generator)
    if ignored:
        labels[::7] = -100
    return hidden, weight, labels, torch.randn(V, generator=generator).to(dtype) if bias else None


def _plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, logits: LogitMap) -> Tensor:
    x = F.linear(hidden, weight, bias).float() * logits.inner
    return logits.outer * torch.tanh(x) if logits.is_capped else x


def _leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if one is None else one.clone().requires_grad_() for one in tensors]


def _grads(loss: Tensor, leaves: list[Tensor | None]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [one for one in leaves if one is not None]))


def _close(ours: list[Tensor], plain: list[Tensor], tolerance: float) -> None:
    for a, b in zip(ours, plain, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("logits", MAPS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_the_plain_loss(reduction: str, logits: LogitMap, bias: bool, in_forward: bool) -> None:
    hidden, weight, labels, shift = _made(bias)
    ours, plain = _leaves(hidden, weight, shift), _leaves(hidden, weight, shift)
    head = HeadLoss(logits=logits, tile=TILE)
    loss = cut_cross_entropy(ours[0], ours[1], labels, ours[2], reduction=reduction, in_forward=in_forward, head=head)
    wanted = F.cross_entropy(_plain(*plain, logits), labels, reduction=reduction)
    _close([loss.detach()], [wanted.detach()], 1e-6)
    by_row = torch.linspace(-1, 2, N) if reduction == "none" else torch.tensor(3.0)
    _close(_grads((loss * by_row).sum(), ours), _grads((wanted * by_row).sum(), plain), 2e-6)


@pytest.mark.parametrize("tile", [None, (1, 1), (N, V), (37, 200)])
@pytest.mark.parametrize("in_forward", [False, True])
def test_tiles_change_nothing(tile: tuple[int, int] | None, in_forward: bool) -> None:
    hidden, weight, labels = (x[:40] for x in _made(False)[:3])
    labels = labels.remainder(40)
    ours, plain = _leaves(hidden, weight), _leaves(hidden, weight)
    loss = cut_cross_entropy(ours[0], ours[1], labels, in_forward=in_forward, head=HeadLoss(tile=tile))
    _close(_grads(loss, ours), _grads(F.cross_entropy(plain[0] @ plain[1].t(), labels), plain), 2e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("in_forward", [False, True])
def test_half_precision_sums_in_float32(dtype: torch.dtype, tolerance: float, in_forward: bool) -> None:
    hidden, weight, labels, shift = _made(dtype=dtype)
    ours, plain = _leaves(hidden, weight, shift), _leaves(hidden.float(), weight.float(), shift.float())
    loss = cut_cross_entropy(ours[0], ours[1], labels, ours[2], in_forward=in_forward, head=HeadLoss(tile=TILE))
    assert loss.dtype is torch.float32
    wanted = F.cross_entropy(F.linear(*plain), labels)
    _close([loss.detach()], [wanted.detach()], tolerance)
    _close([one.float() for one in _grads(loss, ours)], _grads(wanted, plain), 2 * tolerance)


@pytest.mark.parametrize("in_forward", [False, True])
def test_a_large_common_offset(in_forward: bool) -> None:
    """Logits around 1e4: the gap to the largest keeps its digits, where m + log s would have lost them."""
    hidden, weight, labels, _ = _made(False)
    shift = torch.full((V,), 1e4)
    ours, plain = _leaves(hidden, weight, shift), _leaves(hidden, weight, shift)
    loss = cut_cross_entropy(ours[0], ours[1], labels, ours[2], in_forward=in_forward, head=HeadLoss(tile=TILE))
    wanted = F.cross_entropy(F.linear(*plain), labels)
    _close([loss.detach()], [wanted.detach()], 2e-4)  # a float32 at 1e4 is known to 1e-3; the means of both agree
    exact = [one.double() for one in (hidden, weight, shift)]
    leaves = _leaves(*exact)
    truth = _grads(F.cross_entropy(F.linear(*leaves), labels), leaves)
    ours_off = [(a - b).norm() / b.norm() for a, b in zip(_grads(loss, ours), truth, strict=True)]
    plain_off = [(a - b).norm() / b.norm() for a, b in zip(_grads(wanted, plain), truth, strict=True)]
    assert all(a <= 1.5 * b + 1e-6 for a, b in zip(ours_off, plain_off, strict=True))


def test_log_sum_exp_has_a_gradient() -> None:
    hidden, weight, labels, shift = _made(ignored=False)
    ours, plain = _leaves(hidden, weight, shift), _leaves(hidden, weight, shift)
    losses, lse = token_losses(ours[0], ours[1], labels, ours[2], head=HeadLoss(tile=TILE))
    logits = F.linear(*plain)
    known = logits.logsumexp(1)
    _close([lse.detach()], [known.detach()], 1e-6)
    wanted = F.cross_entropy(logits, labels) + 0.1 * (known**2).mean()
    _close(_grads(losses.mean() + 0.1 * (lse**2).mean(), ours), _grads(wanted, plain), 2e-6)


def test_gradients_of_logits_sum_to_zero() -> None:
    """Adding the same to all logits changes no loss, so the gradient of the bias sums to zero."""
    hidden, weight, labels, shift = _made()
    leaves = _leaves(hidden, weight, shift)
    by_bias = _grads(cut_cross_entropy(leaves[0], leaves[1], labels, leaves[2], reduction="sum"), leaves)[2]
    assert by_bias.sum().abs() < 1e-3 < by_bias.abs().max()


def test_the_filter_loses_what_pushes_unlikely_words_down() -> None:
    """At the start of training every word is unlikely: above 1/V the filter leaves the labels alone."""
    hidden, weight, labels, _ = _made(False)
    weight = weight / 100
    exact, filtered = _leaves(hidden, weight), _leaves(hidden, weight)
    whole = _grads(cut_cross_entropy(exact[0], exact[1], labels, head=HeadLoss(tile=TILE)), exact)
    kept = cut_cross_entropy(filtered[0], filtered[1], labels, head=HeadLoss(tile=TILE, filter=0.01))
    lost = _grads(kept, filtered)
    unused = torch.ones(V, dtype=torch.bool)
    unused[labels[labels >= 0]] = False
    assert lost[1][unused].abs().max() == 0 < whole[1][unused].abs().max()
    below = cut_cross_entropy(filtered[0], filtered[1], labels, head=HeadLoss(tile=TILE, filter=1e-9))
    _close(_grads(below, filtered), whole, 1e-6)


def test_the_filter_of_a_sharp_model_loses_little() -> None:
    hidden, weight, labels, _ = _made(False)
    exact, filtered = _leaves(hidden, weight * 8), _leaves(hidden, weight * 8)
    whole = _grads(cut_cross_entropy(exact[0], exact[1], labels, head=HeadLoss(tile=TILE)), exact)
    kept = cut_cross_entropy(filtered[0], filtered[1], labels, head=HeadLoss(tile=TILE, filter=1e-6))
    _close(_grads(kept, filtered), whole, 1e-4)


@pytest.mark.parametrize("in_forward", [False, True])
def test_without_a_valid_label(in_forward: bool) -> None:
    hidden, weight, _, _ = _made(False)
    ours = _leaves(hidden, weight)
    nothing = torch.full((N,), -100)
    mean = cut_cross_entropy(ours[0], ours[1], nothing, in_forward=in_forward)
    assert mean.isnan()
    total = cut_cross_entropy(ours[0], ours[1], nothing, reduction="sum", in_forward=in_forward)
    assert total == 0 and all(one.abs().max() == 0 for one in _grads(total, ours))


def test_a_frozen_head_has_no_gradient() -> None:
    hidden, weight, labels, shift = _made()
    for in_forward in (False, True):
        rows = hidden.clone().requires_grad_()
        cut_cross_entropy(rows, weight, labels, shift, in_forward=in_forward, head=HeadLoss(tile=TILE)).backward()
        plain = hidden.clone().requires_grad_()
        F.cross_entropy(F.linear(plain, weight, shift), labels).backward()
        _close([rows.grad], [plain.grad], 2e-6)
    makes, frozen = (cut_bytes(4096, 65536, in_forward=True, makes_weight=one) for one in (True, False))
    assert frozen < makes < plain_bytes(4096, 65536, 4) / 10


def test_a_label_without_a_logit_and_a_second_backward() -> None:
    hidden, weight, labels, _ = _made(False)
    for wrong in (V, -1):
        bad = labels.clone()
        bad[3] = wrong
        for in_forward in (False, True):
            with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
                cut_cross_entropy(hidden.clone().requires_grad_(), weight, bad, in_forward=in_forward)
    loss = cut_cross_entropy(hidden.clone().requires_grad_(), weight, labels, in_forward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="made in forward and have been used"):
        loss.backward()


def test_double_precision_gradients_by_differences() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    shift, labels = torch.randn(7, dtype=torch.float64), torch.tensor([0, 6, 2, 2, 3])
    for logits in MAPS:
        head = HeadLoss(logits=logits, tile=(2, 3))
        given = [one.requires_grad_() for one in (hidden, weight, shift)]
        assert torch.autograd.gradcheck(lambda h, w, b, head=head: token_losses(h, w, labels, b, head=head), given)


def test_a_head_sharded_over_two_ranks(pool: Pool) -> None:
    hidden, weight, labels, shift = head_jobs.made()
    leaves = _leaves(hidden, weight, shift)
    loss = cut_cross_entropy(leaves[0], leaves[1], labels, leaves[2], head=head_jobs.settings())
    by_hidden, by_weight, by_bias = _grads(loss, leaves)
    for rank, found in enumerate(pool.run("ops.head_jobs:sharded", 2)):
        words = slice(0, head_jobs.FIRST) if rank == 0 else slice(head_jobs.FIRST, None)
        assert abs(found["loss"] - loss.item()) < 1e-6 * loss.item()
        _close([torch.tensor(one) for one in found["gradients"]], [by_hidden, by_weight[words], by_bias[words]], 2e-6)


def test_shapes_alone() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        hidden, weight, labels, shift = (mode.from_tensor(one) for one in _made())
        leaves = [one.requires_grad_() for one in (hidden, weight, shift)]
        for in_forward in (False, True):
            head = replace(HeadLoss(tile=TILE), is_outline=True)
            loss = cut_cross_entropy(leaves[0], leaves[1], labels, leaves[2], in_forward=in_forward, head=head)
            assert [one.shape for one in _grads(loss, leaves)] == [one.shape for one in leaves]
