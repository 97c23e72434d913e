"""How a loss counts rows: a rank's own loss must weigh as its part of the whole batch's loss does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from loops.habit import habit
from loops.scene import CLASSES, batches, cross_entropy, net, pairs, seeded, sgd, texts

IGNORED = -100


def trained(wrap, loss_of, data, model=None, lr=0.1, **settings):
    """The plain loop with a loss of one's own."""
    model = model or net()
    model, optimizer, loader = wrap(model, sgd(model, lr), data, **settings)
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        optimizer.step()
    return model


def tokens(length=5):
    """(x, y): rows of tokens, and labels of which an uneven part is ignored, whole rows among them."""
    draw, found = seeded(4), []
    for x, _ in batches():
        y = torch.randint(CLASSES, (len(x), length), generator=draw)
        y[torch.rand(y.shape, generator=draw) < torch.linspace(0, 0.9, len(x))[:, None]] = IGNORED
        y[-1], y[0, 0] = IGNORED, 1
        found.append((x[:, None] * torch.linspace(0.5, 1.5, length)[:, None], y))
    return found


def token_loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)


@habit(must="equal")
def summed(wrap):
    """reduction="sum" (vae): the gradient is a sum over all rows."""
    return trained(wrap, lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum"), batches(), lr=0.01)


@habit(must="equal")
def summed_over_rows(wrap):
    """A sum divided by the rows there are."""
    return trained(wrap, lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum") / len(x), batches(rows=7))


@habit(may="refused")
def summed_over_a_constant(wrap):
    """A sum divided by a number that is the same for every batch, and could be a count."""
    return trained(wrap, lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum") / 8, uneven())


@habit(must="equal")
def summed_over_a_constant_told(wrap):
    """The same with loss="sum"."""
    return trained(wrap, lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum") / 8, uneven(), loss="sum")


def uneven():
    """Batches of seven rows, and the last of four."""
    data = batches(rows=7)
    data[-1] = tuple(part[:4] for part in data[-1])
    return data


@habit(must="equal")
def mean_of_uneven_rows(wrap):
    """A mean, where ranks have unequal numbers of rows."""
    return trained(wrap, cross_entropy, batches(rows=7))


@habit(must="equal")
def unreduced_then_mean(wrap):
    """reduction="none", then .mean()."""
    return trained(wrap, lambda model, x, y: F.cross_entropy(model(x), y, reduction="none").mean(), batches(rows=7))


@habit(must="equal")
def told_mean(wrap):
    """loss="mean"."""
    return trained(wrap, cross_entropy, batches(rows=7), loss="mean")


@habit(must="equal")
def told_sum(wrap):
    """loss="sum"."""
    return trained(wrap, lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), batches(), lr=0.01, loss="sum")


@habit(must="equal")
def masked_mean(wrap):
    """(losses * mask).sum() / mask.sum(): the divisor is of the batch's data."""

    def loss_of(model, x, y):
        losses, mask = F.cross_entropy(model(x), y, reduction="none"), (x[:, 0] > -0.5).to(x.dtype)
        return (losses * mask).sum() / mask.sum().clamp(min=1)

    return trained(wrap, loss_of, batches())


@habit(must="equal")
def masked_mean_weighed(wrap):
    """The same, with weight= that says what a batch counts."""

    def loss_of(model, x, y):
        losses, mask = F.cross_entropy(model(x), y, reduction="none"), (x[:, 0] > -0.5).to(x.dtype)
        return (losses * mask).sum() / mask.sum().clamp(min=1)

    return trained(wrap, loss_of, batches(), weight=lambda batch: float((batch[0][:, 0] > -0.5).sum()))


@habit(must="equal")
def mean_of_selected(wrap):
    """losses[mask].mean(): as many as the mask lets through."""
    return trained(
        wrap, lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")[x[:, 0] > -0.7].mean(), batches()
    )


@habit(must="equal")
def selected_then_loss(wrap):
    """Rows are selected before the forward: the loss never sees the others."""
    return trained(wrap, lambda model, x, y: F.cross_entropy(model(x[y > 0]), y[y > 0]), batches())


@habit(must="equal")
def ignore_index(wrap):
    """Ragged labels: ignore_index, uneven over the rows, and a row without any."""
    return trained(wrap, token_loss, tokens())


@habit(must="equal")
def ignore_index_accumulated(wrap):
    """Two batches to a step, each a mean over its own labels."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), tokens() + tokens(), accumulate=2)
    for i, (x, y) in enumerate(loader):
        (token_loss(model, x, y) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


@habit(must="equal")
def a_rank_without_labels(wrap):
    """All labels of the last rows are ignored: a rank's mean is 0 / 0."""
    data = tokens()
    for _, y in data:
        y[3:] = IGNORED
    return trained(wrap, token_loss, data)


@habit(must="equal")
def tokens_normalized_by_hand(wrap):
    """A sum over tokens divided by the valid ones of the batch (litgpt, verl)."""

    def loss_of(model, x, y):
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / (y != IGNORED).sum()

    return trained(wrap, loss_of, tokens())


@habit(must="equal")
def mean_of_rows_means(wrap):
    """Each row's mean over its own tokens, then the mean over rows."""

    def loss_of(model, x, y):
        losses = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=IGNORED, reduction="none")
        return (losses.sum(1) / (y != IGNORED).sum(1).clamp(min=1)).mean()

    return trained(wrap, loss_of, tokens())


@habit(must="equal")
def class_weights(wrap):
    """Class-weighted cross-entropy: its mean divides by the weights of the labels there are."""
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0, 0.7]))
    return trained(wrap, lambda model, x, y: criterion(model(x), y), batches())


@habit(must="equal")
def label_smoothing(wrap):
    """label_smoothing=0.1."""
    return trained(wrap, lambda model, x, y: F.cross_entropy(model(x), y, label_smoothing=0.1), batches(rows=7))


@habit(must="equal")
def label_smoothing_with_class_weights(wrap):
    """Both, and an ignored label."""
    weight = torch.tensor([0.2, 1.0, 3.0, 0.7])
    return trained(
        wrap,
        lambda model, x, y: F.cross_entropy(model(x), y, weight, ignore_index=2, label_smoothing=0.1),
        batches(rows=9),
    )


@habit(must="equal")
def soft_targets(wrap):
    """Cross-entropy with probabilities as its target (mixup)."""
    return trained(
        wrap,
        lambda model, x, y: F.cross_entropy(model(x), 0.9 * F.one_hot(y, CLASSES) + 0.1 / CLASSES),
        batches(rows=7),
    )


@habit(must="equal")
def nll(wrap):
    """log_softmax and NLLLoss, in two."""
    return trained(wrap, lambda model, x, y: F.nll_loss(F.log_softmax(model(x), -1), y), batches(rows=7))


@habit(must="equal")
def gathered(wrap):
    """Log-probabilities gathered by hand (policy gradients), times an advantage, negative mean."""
    return trained(
        wrap,
        lambda model, x, y: -(model(x).log_softmax(-1).gather(1, y[:, None])[:, 0] * x[:, 0]).mean(),
        batches(rows=7),
    )


@habit(must="equal")
def binary(wrap):
    """BCEWithLogits with pos_weight, over (rows, classes)."""
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    return trained(wrap, lambda model, x, y: criterion(model(x), (y > 0).to(x.dtype)), pairs(rows=7))


@habit(must="equal")
def squared(wrap):
    """MSELoss."""
    return trained(wrap, lambda model, x, y: F.mse_loss(model(x), y), pairs(rows=7))


@habit(must="equal")
def absolute_and_huber(wrap):
    """L1, smooth L1 and Huber, added."""
    return trained(
        wrap,
        lambda model, x, y: F.l1_loss(model(x), y) + F.smooth_l1_loss(model(x), y) + 0.5 * F.huber_loss(model(x), y),
        pairs(rows=7),
        lr=0.01,
    )


@habit(must="equal")
def squared_by_hand(wrap):
    """((a - b) ** 2).mean()."""
    return trained(wrap, lambda model, x, y: ((model(x) - y) ** 2).mean(), pairs(rows=7))


@habit(must="equal")
def summed_over_features(wrap):
    """A sum over features, a mean over rows."""
    return trained(wrap, lambda model, x, y: (model(x) - y).pow(2).sum(-1).mean(0), pairs(rows=7), lr=0.01)


@habit(must="equal")
def gaussian(wrap):
    """GaussianNLLLoss, with a variance that is learned."""
    return trained(
        wrap,
        lambda model, x, y: F.gaussian_nll_loss(model(x)[:, :2], y, F.softplus(model(x)[:, 2:])),
        pairs(7, 2),
        lr=0.01,
    )


@habit(must="equal")
def divergence(wrap):
    """Distillation: KL with batchmean, of a frozen teacher at a temperature, and the labels' own loss."""
    teacher = net(seed=7).requires_grad_(False)

    def loss_of(model, x, y):
        out = model(x)
        soft = F.kl_div(F.log_softmax(out / 2, -1), F.softmax(teacher(x) / 2, -1), reduction="batchmean")
        return 0.5 * 4 * soft + 0.5 * F.cross_entropy(out, y)

    return trained(wrap, loss_of, batches(rows=7))


@habit(must="equal")
def ctc(wrap):
    """CTC: its mean divides each row by its own target's length."""

    def loss_of(model, x, y):
        out = model(x[:, None] * torch.linspace(0.5, 1.5, 6)[:, None]).log_softmax(-1).transpose(0, 1)
        targets = (y[:, None] + torch.arange(3)) % (CLASSES - 1) + 1
        return F.ctc_loss(out, targets, torch.full((len(y),), 6), 1 + y % 3)

    return trained(wrap, loss_of, batches(), lr=0.01)


@habit(must="equal")
def triplet(wrap):
    """TripletMarginLoss over rows (anchor, other, far), smooth enough to train."""
    return trained(
        wrap,
        lambda model, x, y: F.triplet_margin_loss(model(x), model(x + 0.1), model(-x), margin=9.0),
        batches(rows=7),
    )


@habit(must="equal")
def focal(wrap):
    """Focal loss."""

    def loss_of(model, x, y):
        losses = F.cross_entropy(model(x), y, reduction="none")
        return (0.25 * (1 - torch.exp(-losses)) ** 2 * losses).mean()

    return trained(wrap, loss_of, batches(rows=7))


@habit(must="equal")
def row_weights(wrap):
    """A weight for each row: (w * losses).sum() / w.sum()."""

    def loss_of(model, x, y):
        w = x[:, 1].abs()
        return (w * F.cross_entropy(model(x), y, reduction="none")).sum() / w.sum()

    return trained(wrap, loss_of, batches())


@habit(must="equal")
def auxiliary_term(wrap):
    """Two means, added: over rows, and over rows and features."""

    def loss_of(model, x, y):
        out = model(x)
        return F.cross_entropy(out, y) + 0.1 * out.square().mean()

    return trained(wrap, loss_of, batches(rows=7))


@habit(may="refused")
def terms_that_count_differently(wrap):
    """A mean over selected rows and a mean over all: each term weighs by itself."""

    def loss_of(model, x, y):
        out = model(x)
        return F.cross_entropy(out, y, ignore_index=0) + 0.1 * out.square().mean()

    return trained(wrap, loss_of, batches(rows=7))


@habit(may="refused")
def mean_and_sum(wrap):
    """A mean over rows plus a sum over rows: no one weight is right for both."""

    def loss_of(model, x, y):
        out = model(x)
        return F.cross_entropy(out, y) + 0.01 * out.square().sum()

    return trained(wrap, loss_of, batches(rows=7))


@habit(must="equal")
def penalty_of_weights(wrap):
    """An L2 and an L1 penalty of the weights, in the loss: a term that counts no rows."""

    def loss_of(model, x, y):
        weights = [p for name, p in model.named_parameters() if "weight" in name]
        return (
            cross_entropy(model, x, y) + 0.01 * sum(w.square().sum() for w in weights) + 1e-3 * weights[0].abs().sum()
        )

    return trained(wrap, loss_of, batches(rows=7))


@habit(may="refused")
def sum_with_penalty(wrap):
    """A sum over rows, and a penalty that must count once and not once for each rank."""

    def loss_of(model, x, y):
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(x), y, reduction="sum") + 0.1 * penalty

    return trained(wrap, loss_of, batches(), lr=0.01)


@habit(must="equal")
def learned_weights_of_losses(wrap):
    """Uncertainty weighting: exp(-s) * loss + s, with s a parameter."""

    class Weighed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.s = net(), nn.Parameter(torch.tensor([0.1, -0.2]))

    def loss_of(model, x, y):
        out = model.net(x)
        return sum(
            torch.exp(-s) * a + s for s, a in zip(model.s, (F.cross_entropy(out, y), out.abs().mean()), strict=True)
        )

    return trained(wrap, loss_of, batches(rows=7), Weighed(), lr=0.01)


@habit(must="equal")
def terms_in_a_list(wrap):
    """torch.stack of means, summed: the terms of a detector's dictionary."""

    def loss_of(model, x, y):
        out = model(x)
        terms = {"label": F.cross_entropy(out, y), "size": out.square().mean(), "shape": out[:, 0].abs().mean()}
        return torch.stack(list(terms.values())).sum()

    return trained(wrap, loss_of, batches(rows=7))


@habit(may="refused")
def root_of_the_mean(wrap):
    """RMSE: a root of the batch's mean is not a mean of ranks' roots."""
    return trained(wrap, lambda model, x, y: F.mse_loss(model(x), y).sqrt(), pairs())


@habit(may="refused")
def log_of_the_mean(wrap):
    """The log of a batch's mean."""
    return trained(wrap, lambda model, x, y: F.mse_loss(model(x), y).log(), pairs())


@habit(may="refused")
def flooded(wrap):
    """Flooding: |mean - b| + b."""
    return trained(wrap, lambda model, x, y: (cross_entropy(model, x, y) - 1.35).abs() + 1.35, batches())


@habit(may="refused")
def product_of_means(wrap):
    """One mean times another."""

    def loss_of(model, x, y):
        out = model(x)
        return F.cross_entropy(out, y) * (1 + out.square().mean())

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def contrastive(wrap):
    """CLIP's loss: every row against all others of the batch."""

    def loss_of(model, x, y):
        a, b = F.normalize(model(x), dim=-1), F.normalize(model(x + 0.1 * x.flip(1)), dim=-1)
        return F.cross_entropy(5 * a @ b.T, torch.arange(len(x)))

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def variance_of_the_batch(wrap):
    """VICReg's variance and covariance terms."""

    def loss_of(model, x, y):
        out = model(x)
        centered = out - out.mean(0)
        return (
            F.relu(1 - out.std(0)).mean() + (centered.T @ centered / (len(x) - 1)).square().sum() + out.square().mean()
        )

    return trained(wrap, loss_of, batches(), lr=0.01)


@habit(may="refused")
def load_balance(wrap):
    """Switch Transformer's load balance: the product of two means over the batch."""

    def loss_of(model, x, y):
        gates = model(x).softmax(-1)
        used = F.one_hot(gates.argmax(-1), CLASSES).to(x.dtype).mean(0)
        return F.cross_entropy(gates, y) + CLASSES * (used * gates.mean(0)).sum()

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def dice(wrap):
    """Dice: a ratio of two sums over the batch."""

    def loss_of(model, x, y):
        p, t = model(x).sigmoid(), (y > 0).to(x.dtype)
        return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)

    return trained(wrap, loss_of, pairs())


@habit(may="refused")
def largest_only(wrap):
    """Hard example mining: the mean of the larger half of the batch's losses."""

    def loss_of(model, x, y):
        losses = F.cross_entropy(model(x), y, reduction="none")
        return losses.topk(len(losses) // 2).values.mean()

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def centered_outputs(wrap):
    """Outputs less their mean over the batch (DINO's center, a baseline in policy gradients)."""

    def loss_of(model, x, y):
        out = model(x)
        return F.cross_entropy(out - out.mean(0), y)

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def spread_of_outputs(wrap):
    """The deviation over rows, a mean over features."""
    return trained(wrap, lambda model, x, y: (1 - model(x).std(0)).square().mean(), batches())


@habit(may="refused")
def decorrelated(wrap):
    """Barlow Twins: the correlation of features over the batch."""

    def loss_of(model, x, y):
        out = model(x)
        return (out.T @ out / len(x) - torch.eye(CLASSES)).square().mean()

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def distances_of_pairs(wrap):
    """The mean distance of all pairs of rows."""
    return trained(wrap, lambda model, x, y: (1 - torch.cdist(model(x), x[:, :CLASSES])).square().mean(), batches())


@habit(may="refused")
def against_the_next_row(wrap):
    """Ranking: each row against the next one of the batch."""

    def loss_of(model, x, y):
        out = model(x)[:, 0]
        return F.margin_ranking_loss(out, out.roll(1), (x[:, 0] > x[:, 0].roll(1)) * 2.0 - 1, margin=2.0)

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def softmax_over_rows(wrap):
    """A softmax along the batch: rows compete."""
    return trained(wrap, lambda model, x, y: -(model(x).log_softmax(0) * x[:, :CLASSES]).mean(), batches())


@habit(must="equal")
def loss_of_ones_own(wrap):
    """A fused loss: one torch.autograd.Function from hidden rows and the head's weight to a mean, told as one."""
    return trained(wrap, fused_loss, batches(rows=7), loss="mean")


@habit(may="refused")
def loss_of_ones_own_untold(wrap):
    """The same, untold: a function that nobody can look into."""
    return trained(wrap, fused_loss, batches(rows=7))


def fused_loss(model, x, y):
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, bias, x, y):
            out = x @ weight.T + bias
            ctx.save_for_backward(x, (out.softmax(-1) - F.one_hot(y, CLASSES)) / len(x))
            return F.cross_entropy(out, y)

        @staticmethod
        def backward(ctx, grad):
            x, slope = ctx.saved_tensors
            return grad * slope.T @ x, grad * slope.sum(0), None, None

    return Fused.apply(model[4].weight, model[4].bias, torch.cat([x, x[:, :2]], 1), y)


@habit(may="refused")
def mean_by_a_product(wrap):
    """A mean written as a product with 1 / n."""
    return trained(
        wrap,
        lambda model, x, y: F.cross_entropy(model(x), y, reduction="none") @ torch.full((len(x),), 1 / len(x)),
        batches(),
    )


@habit(must="equal")
def mean_divided_before_the_sum(wrap):
    """(losses / n).sum()."""
    return trained(
        wrap, lambda model, x, y: (F.cross_entropy(model(x), y, reduction="none") / len(y)).sum(), batches(rows=7)
    )


@habit(must="alike")
def mixed_up(wrap):
    """Mixup in the loop: rows are paired by chance, with those of the same rank."""

    def loss_of(model, x, y):
        other = torch.randperm(len(x))
        out = model(0.8 * x + 0.2 * x[other])
        return 0.8 * F.cross_entropy(out, y) + 0.2 * F.cross_entropy(out, y[other])

    return trained(wrap, loss_of, batches(rows=32), lr=0.05)


@habit(may="refused")
def median_of_losses(wrap):
    """The median row's loss."""
    return trained(wrap, lambda model, x, y: F.cross_entropy(model(x), y, reduction="none").median(), batches())


@habit(may="refused", says="together")
def means_of_classes(wrap):
    """Prototypes: the rows of every class are added up by a product with one-hot labels."""

    def loss_of(model, x, y):
        out = model(x)
        return (out - (F.one_hot(y, CLASSES).to(x.dtype).T @ out)[y] / 4).square().mean()

    return trained(wrap, loss_of, batches(), lr=0.01)


@habit(may="refused", says="together")
def against_a_frozen_tower(wrap):
    """CLIP with a second tower that is not trained."""
    tower = net(seed=7).requires_grad_(False)

    def loss_of(model, x, y):
        return F.cross_entropy(model(x) @ tower(-x).T, torch.arange(len(x)))

    return trained(wrap, loss_of, batches())


@habit(may="refused", says="together")
def against_selected_rows(wrap):
    """Rows against rows, of those that were selected first."""

    def loss_of(model, x, y):
        out = model(x[y > 0])
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def inputs_normalized(wrap):
    """Inputs less their mean over the batch, divided by their deviation: the graph has no trace but their numbers."""

    def loss_of(model, x, y):
        return F.cross_entropy(model((x - x.mean(0)) / x.std(0)), y)

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def targets_normalized(wrap):
    """Targets (returns) normalized over the batch."""

    def loss_of(model, x, y):
        return F.mse_loss(model(x), (y - y.mean()) / (y.std() + 1e-8))

    return trained(wrap, loss_of, pairs())


@habit(may="refused")
def advantages_normalized_in_columns(wrap):
    """Advantages of several steps, normalized over all of them."""

    def loss_of(model, x, y):
        gain = (x[:, :CLASSES] - x[:, :CLASSES].mean()) / (x[:, :CLASSES].std() + 1e-8)
        return -(model(x).log_softmax(-1) * gain).mean()

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def sum_times_a_tensor(wrap):
    """A sum over rows, times a weight that lies in a tensor."""
    weight = torch.tensor(0.5)
    return trained(wrap, lambda m, x, y: weight * F.cross_entropy(m(x), y, reduction="sum"), batches(rows=7), lr=0.01)


@habit(may="refused")
def sum_over_a_tensor(wrap):
    """A sum over rows, divided by a constant that lies in a tensor."""
    constant = torch.tensor(4.0)
    return trained(wrap, lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / constant, batches(rows=7), lr=0.01)


@habit(may="refused")
def sum_over_a_constant_that_one_rank_has_as_rows(wrap):
    """A sum divided by a number that is one rank's count, and not another's."""
    return trained(wrap, lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / 4, batches(rows=7), lr=0.01)


@habit(must="equal")
def mean_without_nan(wrap):
    """nanmean over what is there."""

    def loss_of(model, x, y):
        holes = torch.where(x[:, :CLASSES] > 0.8, torch.nan, 0.0)
        return (model(x).square() + holes).nanmean()

    return trained(wrap, loss_of, batches(rows=7))


@habit(must="equal")
def mean_over_rows_then_over_tasks(wrap):
    """losses.mean(0).mean()."""
    return trained(wrap, lambda model, x, y: (model(x) - y).square().mean(0).mean(), pairs(rows=7))


@habit(must="equal")
def mean_over_rows_times_weights_of_tasks(wrap):
    """(losses.mean(0) * w).sum(), with weights that add up to 1."""
    w = torch.tensor([0.1, 0.2, 0.3, 0.4])
    return trained(wrap, lambda model, x, y: ((model(x) - y).square().mean(0) * w).sum(), pairs(rows=7))


@habit(must="equal")
def weights_of_tasks_by_a_product(wrap):
    """losses.mean(0) @ w, with weights that add up to 1."""
    w = torch.tensor([0.1, 0.2, 0.3, 0.4])
    return trained(wrap, lambda model, x, y: (model(x) - y).square().mean(0) @ w, pairs(rows=7))


@habit(must="equal")
def weights_of_tasks_then_mean_over_rows(wrap):
    """(losses * w).sum(1).mean(), with weights that add up to 1."""
    w = torch.tensor([0.1, 0.2, 0.3, 0.4])
    return trained(wrap, lambda model, x, y: ((model(x) - y).square() * w).sum(1).mean(), pairs(rows=7))


@habit(must="equal")
def sum_over_rows_of_means_over_features(wrap):
    """losses.sum(0).mean()."""
    return trained(wrap, lambda model, x, y: (model(x) - y).square().sum(0).mean(), pairs(rows=7), lr=0.01)


@habit(may="refused")
def columns_without_nan(wrap):
    """losses.nanmean(0).mean(): every column has a count of its own."""

    def loss_of(model, x, y):
        holes = torch.where(x[:, :CLASSES] > 0.8, torch.nan, 0.0)
        return (model(x).square() + holes).nanmean(0).mean()

    return trained(wrap, loss_of, batches(rows=7))


@habit(may="refused")
def first_row_alone(wrap):
    """The loss of the first row of a batch."""
    return trained(wrap, lambda model, x, y: F.cross_entropy(model(x)[0], y[0]), batches())


@habit(must="equal")
def rows_one_by_one(wrap):
    """A loop over rows, and a sum divided by their number."""

    def loss_of(model, x, y):
        out = model(x)
        return sum((out[i] - y[i]).square().sum() for i in range(len(x))) / len(x)

    return trained(wrap, loss_of, pairs(rows=7), lr=0.01)


@habit(may="refused")
def means_of_rows_one_by_one(wrap):
    """A loop over rows, and a sum of their means."""

    def loss_of(model, x, y):
        out = model(x)
        return sum((out[i] - y[i]).square().mean() for i in range(len(x)))

    return trained(wrap, loss_of, pairs(rows=8), lr=0.01)


@habit(must="equal", tolerance=1e-6)
def causal_language_model(wrap):
    """A GPT-2 of transformers: labels are shifted inside, padding is ignored, and the loss is computed in float32."""
    torch.manual_seed(3)
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    model = GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, eos_token_id=1, bos_token_id=1)
    )
    return huggingface(
        wrap, model, [b | {"labels": b["input_ids"].masked_fill(b["attention_mask"] == 0, -100)} for b in texts()]
    )


@habit(must="equal")
def masked_language_model(wrap):
    """A BERT: labels are 2-D and not shifted, and most are ignored."""
    torch.manual_seed(3)
    data = texts()
    for i, batch in enumerate(data):
        chosen = torch.rand(batch["input_ids"].shape, generator=seeded(i)) < torch.linspace(0.1, 0.9, 7)
        chosen[0, 0] = True
        batch["labels"] = batch["input_ids"].masked_fill(~chosen | (batch["attention_mask"] == 0), -100)
    return huggingface(wrap, BertForMaskedLM(bert()), data)


@habit(must="equal")
def token_classification(wrap):
    """A BERT that labels each token, the first too."""
    torch.manual_seed(3)
    data = [b | {"labels": (b["input_ids"] % 3).masked_fill(b["attention_mask"] == 0, -100)} for b in texts()]
    return huggingface(wrap, BertForTokenClassification(bert(num_labels=3)), data)


@habit(must="equal")
def multi_label_classification(wrap):
    """A BERT with float labels of shape (rows, labels)."""
    torch.manual_seed(3)
    model = BertForSequenceClassification(bert(num_labels=3, problem_type="multi_label_classification"))
    return huggingface(
        wrap, model, [b | {"labels": (b["input_ids"][:, :3] % 2).to(torch.get_default_dtype())} for b in texts()]
    )


@habit(must="equal", tolerance=1e-6)
def sequence_to_sequence(wrap):
    """A T5: two masks, labels that are not shifted by the loss, and softmax in float32."""
    torch.manual_seed(3)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 11}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0, decoder_start_token_id=0))
    data = [
        b | {"labels": b["input_ids"].flip(1)[:, :4].masked_fill(b["input_ids"].flip(1)[:, :4] == 0, -100)}
        for b in texts()
    ]
    return huggingface(wrap, model, data)


def bert(**more):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertConfig(
        **sizes,
        vocab_size=11,
        max_position_embeddings=8,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        **more,
    )


def huggingface(wrap, model, data):
    """Dictionaries in, `.loss` out. No parameter starts at zero: a key's bias moves by rounding alone."""
    model = model.to(torch.get_default_dtype())
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.rand(param.shape, generator=seeded(8))
    model, optimizer, loader = wrap(model, sgd(model, 0.05), data)
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
