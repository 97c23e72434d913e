"""What a loss counts is read from its graph: for every form of loss that people write, or it is said to be unknown."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.loss_reader.batch_tensors import OfBatch
from gossamer.loss_reader.count import BatchRows, Kind, read

ROWS, CLASSES = 6, 5
labels = torch.tensor([0, 1, -100, 3, 4, -100])
whole = labels.clamp(0)
weights = torch.tensor([0.5, 1.0, 1.5, 2.0, 0.25])
target = torch.linspace(-1, 1, ROWS * CLASSES).view(ROWS, CLASSES)
shares = torch.tensor([0.7, 0.5])
tasks = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.3])
mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])


def outputs() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(3, CLASSES)
    return layer, layer(torch.randn(ROWS, 3))


class Counts(BatchRows):
    """A rank's rows of a batch of twice as many."""

    whole = 2 * ROWS

    def __init__(self, counts: set[float], rows: int = ROWS, first: int = 0, *leaves: tuple[Tensor, int]) -> None:
        self._counts, self.rows, self.first, self._leaves = counts, rows, first, leaves

    def origin(self) -> OfBatch:
        return OfBatch(self.rows, self._leaves, self.first)

    def counts(self) -> set[float]:
        return self._counts

    def is_new(self, shape: int) -> bool:
        return True

    def is_mean(self, kinds: int) -> bool:
        return False


def counted(loss: Tensor, given: Tensor | None = None, counts: set[float] | None = None):
    return read([loss], [given], Counts({float(ROWS)} if counts is None else counts))


MEANS = {
    "cross entropy": (lambda o: F.cross_entropy(o, whole), ROWS),
    "ignored labels": (lambda o: F.cross_entropy(o, labels), 4),
    "class weights": (lambda o: F.cross_entropy(o, whole, weight=weights), float(weights[whole].sum())),
    "smoothed labels": (lambda o: F.cross_entropy(o, labels, label_smoothing=0.1), 4),
    "labels as probabilities": (lambda o: F.cross_entropy(o, target.softmax(-1)), ROWS),
    "nll": (lambda o: F.nll_loss(o.log_softmax(-1), whole), ROWS),
    "mse": (lambda o: F.mse_loss(o, target), ROWS * CLASSES),
    "l1": (lambda o: F.l1_loss(o, target), ROWS * CLASSES),
    "smooth l1": (lambda o: F.smooth_l1_loss(o, target), ROWS * CLASSES),
    "huber": (lambda o: F.huber_loss(o, target), ROWS * CLASSES),
    "bce": (lambda o: F.binary_cross_entropy(o.sigmoid(), target.sigmoid()), ROWS * CLASSES),
    "bce of logits": (lambda o: F.binary_cross_entropy_with_logits(o, target.sigmoid()), ROWS * CLASSES),
    "kl, by batch": (lambda o: F.kl_div(o.log_softmax(-1), target.softmax(-1), reduction="batchmean"), ROWS),
    "mean of what was not reduced": (lambda o: F.cross_entropy(o, whole, reduction="none").mean(), ROWS),
    "mean of rows": (lambda o: o.square().sum(-1).mean(), ROWS),
    "features summed, rows averaged": (lambda o: o.mean(0).sum(), ROWS),
    "negated and scaled": (lambda o: -0.3 * o.logsumexp(-1).mean(), ROWS),
    "scaled by a scaler": (lambda o: F.mse_loss(o, target) * torch.tensor(65536.0), ROWS * CLASSES),
    "for two batches": (lambda o: F.mse_loss(o, target) / 2, ROWS * CLASSES),
    "two terms that count alike": (lambda o: F.mse_loss(o, target) + 0.1 * o.abs().mean(), ROWS * CLASSES),
    "a sum over rows": (lambda o: o.square().sum() / ROWS, ROWS),
    "a sum over rows, then scaled": (lambda o: 0.5 * (o.square().sum() / ROWS), ROWS),
    "losses in a list": (lambda o: torch.stack([F.mse_loss(o, target), o.abs().mean()]).sum(), ROWS * CLASSES),
    "losses in a list that count alike": (lambda o: torch.stack([o.square().mean(), o.abs().mean()]).mean(), 30),
    "a mean of one number": (lambda o: F.cross_entropy(o, labels).mean(), 4),
    "a sum of one number": (lambda o: F.cross_entropy(o, labels).view(1).sum(), 4),
    "losses joined": (lambda o: torch.cat([F.mse_loss(o, target).view(1), o.abs().mean().view(1)]).sum(), 30),
    "losses times weights": (lambda o: (shares * torch.stack([F.mse_loss(o, target), o.abs().mean()])).sum(), 30),
    "losses in a product": (lambda o: torch.stack([F.mse_loss(o, target), o.abs().mean()]) @ shares, 30),
    "a term switched off": (lambda o: F.cross_entropy(o, labels) + 0.0 * o.abs().mean(), 4),
    "a sum over rows, and for two passes": (lambda o: o.square().sum() / ROWS / 2, ROWS),
    "a mask": (lambda o: (o.square().sum(-1) * mask).sum() / mask.sum(), 3),
    "a mask of its own": (lambda o: (o.square() * (target > 0.3)).sum() / (target > 0.3).sum(), 11),
    "a mean over rows, then over features": (lambda o: o.square().mean(0).mean(), ROWS),
    "a mean over features, then over rows": (lambda o: o.square().mean(1).mean(0), ROWS),
    "a mean over rows, then weights of tasks": (lambda o: (o.square().mean(0) * tasks).sum(), ROWS),
    "tasks' weights, as a product": (lambda o: o.square().mean(0) @ tasks, ROWS),
    "tasks' weights, before the mean": (lambda o: (o.square() * tasks).sum(-1).mean(), ROWS),
    "nan left out": (lambda o: torch.where(target > 0.3, o, torch.nan).nanmean(), 11),
    "nan left out of each row": (lambda o: torch.where(target > -0.9, o, torch.nan).nanmean(1).mean(), ROWS),
    "a masked sum over a count of its own": (lambda o: (o * (target > 0.3)).sum() / (target > 0.3).sum(), 11),
    "what was filled": (lambda o: o.masked_fill(target > 0.3, 0.0).sum() / (target <= 0.3).sum(), 19),
    "what was selected": (lambda o: o[target > 0.3].sum() / (target > 0.3).sum(), 11),
    "weights of rows": (lambda o: (o.exp().sum(-1) * mask.exp()).sum() / mask.exp().sum(), float(mask.exp().sum())),
    "valid labels": (lambda o: F.cross_entropy(o, labels, reduction="sum") / (labels != -100).sum(), 4),
    "columns summed over rows": (lambda o: (o.square().sum(0) / torch.full((CLASSES,), 6.0)).mean(), ROWS),
    "a mask, as a factor": (lambda o: (o.square().sum(-1) * mask).sum() * (1 / (mask.sum() + 1)), 4),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_tells_what_it_was_divided_by(name: str) -> None:
    make, count = MEANS[name]
    found = counted(make(outputs()[1]), counts={float(ROWS), 3.0, 4.0})
    assert found.kind is Kind.MEAN, found
    assert found.counts == pytest.approx((count,))


SUMS = {
    "reduction='sum'": lambda o: F.mse_loss(o, target, reduction="sum"),
    "cross entropy": lambda o: F.cross_entropy(o, labels, reduction="sum"),
    "written out": lambda o: (o - target).square().sum(),
    "of row means": lambda o: o.square().mean(-1).sum(),
    "two of them": lambda o: F.mse_loss(o, target, reduction="sum") - 0.5 * (1 + o - o.exp()).sum(),
    "of columns, then a mean of them": lambda o: o.square().sum(0).mean(),
    "divided by the rows of all ranks": lambda o: (o - target).square().sum() / (2 * ROWS),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_a_sum(name: str) -> None:
    assert counted(SUMS[name](outputs()[1])).kind is Kind.SUM


def test_a_vector_of_losses_is_summed_by_its_gradient() -> None:
    _, out = outputs()
    found = read([out.square().mean(-1)], [torch.ones(ROWS)], Counts(set()))
    assert found.kind is Kind.SUM


DIVIDED = {
    "times a tensor": (lambda o: torch.tensor(0.5) * o.square().sum(), 2),
    "times a tensor of one number": (lambda o: (torch.tensor([0.25]) * o.square().sum()).sum(), 4),
    "times a tensor, before": (lambda o: (o.square() * torch.tensor(0.25)).sum(), 4),
    "over a tensor": (lambda o: F.mse_loss(o, target, reduction="sum") / torch.tensor(7.0), 7),
    "over a tensor, before": (lambda o: (o.square() / torch.tensor(7.0)).sum(), 7),
    "a sum of rows' losses over a tensor": (lambda o: o.square().mean(1).sum() / torch.tensor(7.0), 7),
    "times one over a tensor": (lambda o: o.square().sum() * torch.tensor(7.0).reciprocal(), 7),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_sum_divided_by_a_tensor_is_left_to_the_ranks(name: str) -> None:
    make, count = DIVIDED[name]
    found = counted(make(outputs()[1]))
    assert (found.kind, found.counts) == (Kind.DIVIDED, pytest.approx((count,)))


centered = torch.eye(ROWS) - 1 / ROWS
UNKNOWN = {
    "root of a mean": lambda o: F.mse_loss(o, target).sqrt(),
    "product of two losses": lambda o: F.mse_loss(o, target) * o.abs().mean(),
    "a mean and a sum": lambda o: F.mse_loss(o, target) + o.abs().sum(),
    "weights that add up to one": lambda o: (o.square().sum(-1) * torch.softmax(mask, 0)).sum(),
    "the same, as gradients": lambda o: o.square().sum(-1),
    "a largest row": lambda o: o.square().sum(-1).max(),
    "the larger half of the rows": lambda o: o.square().sum(-1).topk(3).values.mean(),
    "rows against rows": lambda o: F.cross_entropy(o @ o.T, torch.arange(ROWS)),
    "features against features": lambda o: (o.T @ o).square().sum(),
    "rows against the next ones": lambda o: (o[:, 0] - o[:, 0].roll(1)).square().mean(),
    "distances of rows": lambda o: torch.cdist(o, target).mean(),
    "rows against rows, by einsum": lambda o: torch.einsum("id,jd->ij", o, o).logsumexp(1).mean(),
    "rows against rows, by broadcasting": lambda o: (o[:, None] - o[None]).square().mean(),
    "two views against each other": lambda o: (torch.cat([o, -o]) @ torch.cat([o, -o]).T).square().mean(),
    "rows less the ones before": lambda o: (o[1:] - o[:-1]).square().mean(),
    "one half of the rows": lambda o: o[:3].square().mean(),
    "a mean over groups of rows": lambda o: torch.zeros(CLASSES).index_add(0, whole, o[:, 0]).mean(),
    "rows with advantages of mean 0": lambda o: (o[:, 0] * (target[:, 0].exp() - target[:, 0].exp().mean())).mean(),
    "a mean as a product": lambda o: o.square().sum(-1) @ torch.full((ROWS,), 1 / ROWS),
    "the spread of the rows": lambda o: o.std(0).mean(),
    "rows without their mean": lambda o: (o - o.mean(0)).square().mean(),
    "one over a count, as a factor": lambda o: o.square().sum() * (1 / ROWS),
    "columns that count differently": lambda o: torch.where(target > 0.3, o, torch.nan).nanmean(0)[:1].mean(),
    "some columns of a mean": lambda o: o.square().mean(0)[:2].mean(),
    "a column of a sum": lambda o: o.square().sum(0)[1:2].sum(),
    "columns divided by their counts": lambda o: (o.sum(0) / torch.linspace(1, 2, CLASSES)).mean(),
    "means of single rows": lambda o: sum(one.square().mean() for one in o),
    "a root of nanmean": lambda o: o.nanmean().abs().sqrt(),
    "a sum and a penalty": lambda o: o.square().sum() + nn.Parameter(torch.ones(2)).square().sum(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_weight_makes_right_is_unknown(name: str) -> None:
    given = torch.softmax(mask, 0) if name == "the same, as gradients" else None
    assert counted(UNKNOWN[name](outputs()[1]), given).kind is Kind.UNKNOWN


def test_a_model_with_products_of_its_own_is_not_mistaken_for_rows_against_rows() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(ROWS, 4, 8)
    out = nn.LayerNorm(8)(attention(x, x, x)[0]).softmax(-1).topk(3).values
    assert counted(out.square().mean()).kind is Kind.MEAN


def test_a_mask_that_lets_nothing_through_counts_nothing() -> None:
    _, out = outputs()
    found = counted((out.square().sum(-1) * torch.zeros(ROWS)).sum() / torch.zeros(ROWS).sum().clamp(min=1))
    assert (found.kind, found.counts) == (Kind.MEAN, (0.0,))


def test_a_sum_divided_by_no_count_that_is_known_is_left_to_the_ranks() -> None:
    found = counted(outputs()[1].sum() / 4.0)
    assert (found.kind, found.counts) == (Kind.DIVIDED, (4.0,))


def test_terms_that_count_differently_are_all_told() -> None:
    _, out = outputs()
    assert counted(F.cross_entropy(out, labels) + F.mse_loss(out, target)).counts == (4.0, 30.0)


def test_a_penalty_on_parameters_counts_nothing() -> None:
    layer, out = outputs()
    start = layer.weight.detach().clone()
    penalty = 0.1 * (layer.weight - start).square().sum() + layer.bias.norm() + layer.weight.square().mean()
    assert counted(penalty).kind is Kind.FREE
    found = counted(F.cross_entropy(out, labels) + penalty)
    assert (found.kind, found.counts) == (Kind.MEAN, (4.0,))


def test_a_weight_that_is_learnt_does_not_change_what_its_loss_counts() -> None:
    _, out = outputs()
    scale, others = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(2))
    found = counted(others[0].exp() * F.mse_loss(out, target) + others[0])
    assert (found.kind, found.counts) == (Kind.MEAN, (30.0,))
    found = counted((-scale).exp() * F.mse_loss(out, target) + scale)
    assert (found.kind, found.counts) == (Kind.MEAN, (30.0,))


def test_a_rank_without_labels_counts_nothing() -> None:
    _, out = outputs()
    none = torch.full((ROWS,), -100)
    by_hand = F.cross_entropy(out, none, reduction="sum") / (none != -100).sum()
    for loss in (F.cross_entropy(out, none), by_hand):
        found = counted(loss)
        assert (found.kind, found.counts) == (Kind.MEAN, (0.0,))


def test_factors_are_part_of_what_ranks_compare() -> None:
    _, out = outputs()
    one, same, other = (counted(factor * F.mse_loss(out, target)) for factor in (0.5, 0.5, 0.25))
    assert one.shape == same.shape != other.shape


def test_class_weights_are_part_of_what_ranks_compare() -> None:
    _, out = outputs()
    one, other = (counted(F.cross_entropy(out, whole, weight=w)) for w in (weights, weights + 0.1))
    assert one.shape != other.shape


def test_a_loss_that_is_made_in_another_way_is_looked_through() -> None:
    class Looked(Counts):
        def __init__(self) -> None:
            super().__init__(set())
            self.seen: list[int] = []

        def is_new(self, shape: int) -> bool:
            self.seen.append(shape)
            return True

    _, out = outputs()
    batch = Looked()
    for loss in (F.cross_entropy(out, whole), F.cross_entropy(out @ out.T, torch.arange(ROWS))):
        read([loss], [None], batch)
    assert len(set(batch.seen)) == 2


def test_a_sum_divided_by_one_may_have_counted_nothing() -> None:
    _, o = outputs()
    for loss in (o.square().sum() / max(1, 0), o[:, :1].square().sum() / 1.0, o.square().sum() / torch.tensor(1.0)):
        assert counted(loss).is_least
    one = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert not counted((o.square().sum(-1) * one).sum() / one.sum()).is_least
    assert not counted((o.square().sum(-1) * 0 * one).sum() / one.sum()).is_least
    assert not counted(o.square().sum() / ROWS).is_least and not counted(o.square().mean()).is_least


def test_penalties_of_products_of_parameters_count_nothing() -> None:
    layer, o = outputs()
    straight = ((layer.weight @ layer.weight.T - torch.eye(CLASSES)) ** 2).sum()
    found = counted(F.mse_loss(o, target) + straight + (layer.weight.T @ layer.weight).norm())
    assert (found.kind, found.counts) == (Kind.MEAN, (ROWS * CLASSES,))
    assert counted((torch.randn(ROWS, CLASSES) @ layer.weight).square().sum()).kind is Kind.SUM


def test_numbers_of_both_signs_that_come_to_one_by_chance_are_no_weights() -> None:
    _, o = outputs()
    chance = torch.tensor([3.0, -2.5, 0.75, -0.25, 1.5, -1.5])
    assert counted((o.square().sum(-1) * chance).mean()).kind is Kind.MEAN
    assert counted((o.square().sum(-1) * (chance.abs() / chance.abs().sum())).sum()).kind is Kind.UNKNOWN
