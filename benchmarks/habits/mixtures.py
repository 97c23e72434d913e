"""Losses, batches and models in the ways that are met where two habits of a loop come together."""

from __future__ import annotations

import io

import torch
import torch.nn.functional as F
from torch import nn

from loops.habit import habit
from loops.scene import CLASSES, batches, cross_entropy, net, sgd


def trained(wrap, loss_of, data, model=None, lr=0.05, every=1, **settings):
    """`loss_of(model, *batch, step)`."""
    model = net() if model is None else model
    model, optimizer, loader = wrap(model, sgd(model, lr), data, **settings)
    for step, batch in enumerate(loader):
        loss_of(model, *batch, step).backward()
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


@habit(must="equal", steps=6)
def divided_by_rows_and_by_passes(wrap):
    """A sum over rows divided by their number, and once more by the two passes before a step."""
    return trained(
        wrap, lambda model, x, y, _: F.cross_entropy(model(x), y, reduction="sum") / len(y) / 2, batches(), every=2
    )


@habit(must="equal")
def divided_by_rows_and_by_passes_unevenly(wrap):
    """The same with 6 rows, and three passes."""
    return trained(
        wrap, lambda model, x, y, _: F.cross_entropy(model(x), y, reduction="sum") / len(y) / 3, batches(rows=6)
    )


@habit(must="equal")
def mean_of_a_loss(wrap):
    """loss.mean() of a loss that is one number already, left over from DataParallel."""
    return trained(wrap, lambda model, x, y, _: F.cross_entropy(model(x), y, ignore_index=0).mean(), batches(rows=7))


@habit(must="equal")
def sum_of_a_loss(wrap):
    """loss.sum() of a loss that is one number already."""
    return trained(wrap, lambda model, x, y, _: F.cross_entropy(model(x), y).sum(), batches(rows=7))


@habit(must="equal")
def tasks_weighted(wrap):
    """(w * torch.stack(losses)).sum()."""

    def loss_of(model, x, y, _):
        out = model(x)
        return (torch.tensor([0.7, 0.5]) * torch.stack([F.cross_entropy(out, y), out.square().mean()])).sum()

    return trained(wrap, loss_of, batches())


@habit(must="equal")
def tasks_joined(wrap):
    """torch.cat of losses of one number each, summed."""

    def loss_of(model, x, y, _):
        out = model(x)
        return torch.cat([F.cross_entropy(out, y).view(1), out.square().mean().view(1)]).sum()

    return trained(wrap, loss_of, batches())


@habit(must="equal")
def tasks_as_a_product(wrap):
    """torch.stack(losses) @ weights."""

    def loss_of(model, x, y, _):
        out = model(x)
        return torch.stack([F.cross_entropy(out, y), out.square().mean()]) @ torch.tensor([0.7, 0.5])

    return trained(wrap, loss_of, batches())


@habit(must="equal")
def term_that_grows_from_nothing(wrap):
    """A term times a factor that is 0 at first (KL annealing)."""

    def loss_of(model, x, y, step):
        out = model(x)
        return F.cross_entropy(out, y) + min(1.0, step / 5) * out.square().mean()

    return trained(wrap, loss_of, batches(rows=7))


@habit(may="refused")
def contrast_that_comes_later(wrap):
    """Rows against rows from the fifth step on, where a plain mean was before."""

    def loss_of(model, x, y, step):
        out = model(x)
        return F.cross_entropy(out @ out.T, torch.arange(len(x))) if step > 4 else F.cross_entropy(out, y)

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def contrast_by_einsum(wrap):
    """CLIP's loss, its products written with einsum."""

    def loss_of(model, x, y, _):
        a, b = F.normalize(model(x), dim=-1), F.normalize(model(-x), dim=-1)
        return F.cross_entropy(5 * torch.einsum("id,jd->ij", a, b), torch.arange(len(x)))

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def contrast_by_broadcasting(wrap):
    """The distances of all pairs of rows, by broadcasting."""

    def loss_of(model, x, y, _):
        out = model(x)
        return F.cross_entropy(-(out[:, None] - out[None]).square().sum(-1), torch.arange(len(x)))

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def contrast_of_two_views(wrap):
    """NT-Xent: both views in one forward, 2 n rows against 2 n rows."""

    def loss_of(model, x, y, _):
        out = F.normalize(model(torch.cat([x, -x])), dim=-1)
        n = len(x)
        alike = (5 * out @ out.T).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        return F.cross_entropy(alike, (torch.arange(2 * n) + n) % (2 * n))

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def neighbors(wrap):
    """Rows less the ones before them."""

    def loss_of(model, x, y, _):
        out = model(x)
        return (out[1:] - out[:-1]).square().mean()

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def labeled_half(wrap):
    """Labels for the first half of a batch alone."""

    def loss_of(model, x, y, _):
        half = len(x) // 2
        return F.cross_entropy(model(x)[:half], y[:half])

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def halves_paired(wrap):
    """The first half of a batch beside the second."""

    def loss_of(model, x, y, _):
        a, b = model(x).chunk(2)
        return (a - b).square().mean()

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def mean_of_row_means(wrap):
    """Each row's mean over its own length, in a loop over rows that are sorted by length."""

    def loss_of(model, x, y, _):
        out = model(x)
        lengths = y[:, 0].tolist()
        return sum(out[i, :n].square().mean() for i, n in enumerate(lengths)) / len(out)

    data = [(x, torch.tensor([1, 1, 1, 1, 4, 4, 4, 4])[:, None]) for x, _ in batches()]
    return trained(wrap, loss_of, data)


@habit(may="refused")
def classes_averaged(wrap):
    """A mean over the classes of a batch, of the means over their rows."""

    def loss_of(model, x, y, _):
        losses = F.cross_entropy(model(x), y, reduction="none")
        counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
        return (torch.zeros(CLASSES).index_add(0, y, losses) / counts).mean()

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def advantages_normalized(wrap):
    """PPO: advantages less their mean, divided by their deviation, over the batch."""

    def loss_of(model, x, y, _):
        gain = x[:, 0]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        logp = model(x).log_softmax(-1).gather(1, y[:, None])[:, 0]
        ratio = torch.exp(logp - logp.detach())
        return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def weights_of_mean_one(wrap):
    """Importance weights divided by their mean over the batch."""

    def loss_of(model, x, y, _):
        w = x[:, 1].abs()
        return (w / w.mean() * F.cross_entropy(model(x), y, reduction="none")).mean()

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def class_weights_of_the_batch(wrap):
    """Class weights are one over the classes' counts in the batch."""

    def loss_of(model, x, y, _):
        return F.cross_entropy(model(x), y, weight=1.0 / (1 + torch.bincount(y, minlength=CLASSES)))

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def positive_weight_of_the_batch(wrap):
    """pos_weight is the ratio of labels in the batch."""

    def loss_of(model, x, y, _):
        hot = F.one_hot(y, CLASSES).to(x.dtype)
        return F.binary_cross_entropy_with_logits(model(x), hot, pos_weight=(1 + (1 - hot).sum(0)) / (1 + hot.sum(0)))

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def signs_of_ones_own(wrap):
    """Gradients by torch.autograd.grad, and their signs put into .grad: of the same norm on every rank."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, 0.01), batches())
    for x, y in loader:
        slopes = torch.autograd.grad(cross_entropy(model, x, y), list(model.parameters()))
        for param, slope in zip(model.parameters(), slopes, strict=True):
            param.grad = slope.sign()
        optimizer.step()
    return model


@habit(may="refused")
def normed_gradients_of_ones_own(wrap):
    """The same, each divided by its norm."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, 0.01), batches())
    for x, y in loader:
        slopes = torch.autograd.grad(cross_entropy(model, x, y), list(model.parameters()))
        for param, slope in zip(model.parameters(), slopes, strict=True):
            param.grad = slope / slope.norm()
        optimizer.step()
    return model


@habit(must="equal")
def whole_model_saved(wrap):
    """torch.save of the whole model, and of the optimizer, in the loop."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        cross_entropy(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        file = io.BytesIO()
        torch.save({"model": model, "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)["model"]
        cross_entropy(again, x, y).backward()
    return model


@habit(must="equal")
def numbers_of_rows_in_a_list(wrap):
    """A list of tensors of one number each, one of every row."""

    def loss_of(model, x, y, w, _):
        return sum(one * loss for one, loss in zip(w, F.cross_entropy(model(x), y, reduction="none"), strict=False))

    return trained(wrap, loss_of, [(x, y, list(x[:, 0].abs().unbind())) for x, y in batches()], lr=0.01, loss="sum")


@habit(must="equal")
def records_of_rows(wrap):
    """A list of dictionaries, one of every row."""

    def loss_of(model, x, y, about, _):
        losses = F.cross_entropy(model(x), y, reduction="none")
        return sum(one["w"] * loss for one, loss in zip(about, losses, strict=False))

    data = [(x, y, [{"w": float(w), "name": "a"} for w in x[:, 0].abs()]) for x, y in batches()]
    return trained(wrap, loss_of, data, lr=0.01, loss="sum")


@habit(may="refused")
def sparse_rows(wrap):
    """Batches are sparse matrices."""
    return trained(
        wrap, lambda model, x, y, _: F.cross_entropy(model(x.to_dense()), y), [(x.to_sparse(), y) for x, y in batches()]
    )


@habit(may="refused")
def compressed_rows(wrap):
    """Batches are sparse matrices in rows (CSR)."""
    return trained(
        wrap,
        lambda model, x, y, _: F.cross_entropy(model(x.to_dense()), y),
        [(x.to_sparse_csr(), y) for x, y in batches()],
    )


@habit(may="refused")
def jagged_rows(wrap):
    """Batches are nested tensors."""

    def loss_of(model, x, y, _):
        return F.cross_entropy(model(torch.stack([one.mean(0) for one in x.unbind()])), y)

    data = [
        (torch.nested.nested_tensor([r.expand(1 + i % 3, -1) for i, r in enumerate(x)], layout=torch.jagged), y)
        for x, y in batches()
    ]
    return trained(wrap, loss_of, data)


@habit(must="equal")
def wrapped_again(wrap):
    """A second stage of the training wraps the same model and optimizer with other data."""
    model = net()
    optimizer = sgd(model)
    for seed in range(2):
        model, optimizer, loader = wrap(model, optimizer, batches(seed=seed))
        for x, y in loader:
            cross_entropy(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@habit(must="equal")
def wrapped_again_unfrozen(wrap):
    """The second stage unfreezes the first layer, and wraps again with the same optimizer."""
    model = net()
    optimizer = sgd(model)
    for stage in range(2):
        model[0].requires_grad_(stage == 1)
        model, optimizer, loader = wrap(model, optimizer, batches(seed=stage))
        for x, y in loader:
            cross_entropy(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@habit(must="equal")
def wrapped_again_with_a_group_more(wrap):
    """The second stage gives the optimizer a parameter of its own, and wraps again."""
    model, scale = net(), nn.Parameter(torch.ones(()))
    optimizer = sgd(model)
    for stage in range(2):
        if stage:
            optimizer.add_param_group({"params": [scale]})
        model, optimizer, loader = wrap(model, optimizer, batches(seed=stage, rows=7))
        for x, y in loader:
            F.cross_entropy(scale * model(x) if stage else model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, scale


def clipped_in_stages(wrap):
    """The first stage is clipped to a norm of 0.02, the second to 0.5, the third not at all."""
    return in_stages(wrap, lambda model, norm: nn.utils.clip_grad_norm_(model.parameters(), norm) if norm else None)


@habit(must="equal", like=clipped_in_stages)
def wrapped_again_with_another_norm(wrap):
    """max_grad_norm=0.02, then 0.5, then none."""
    return in_stages(wrap, lambda model, norm: None, told=True)


def in_stages(wrap, clip, *, told=False):
    model = net()
    optimizer = sgd(model)
    for stage, norm in enumerate((0.02, 0.5, 0.0)):
        model, optimizer, loader = wrap(
            model, optimizer, batches(seed=stage, rows=7), max_grad_norm=norm if told else 0.0
        )
        for x, y in loader:
            cross_entropy(model, x, y).backward()
            clip(model, norm)
            optimizer.step()
            optimizer.zero_grad()
    return model


@habit(must="equal")
def head_replaced_after_pretraining(wrap):
    """A body is trained with one head, then with another, each time with an optimizer and a schedule of its own."""
    body, heads = net(outputs=5), [nn.Linear(5, CLASSES) for _ in range(2)]
    for stage, head in enumerate(heads):
        model = nn.Sequential(body, head)
        model, optimizer, loader = wrap(model, sgd(model), batches(seed=stage, rows=7))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        for x, y in loader:
            cross_entropy(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return body, heads


@habit(may="refused", says="as lists")
def two_wraps_that_share(wrap):
    """An actor and a critic with one trunk, each with a wrap and an optimizer of its own."""
    trunk = net(outputs=5)
    actor, critic = nn.Sequential(trunk, nn.Linear(5, CLASSES)), nn.Sequential(trunk, nn.Linear(5, 1))
    actor, first, loader = wrap(actor, sgd(actor), batches())
    critic, second, _ = wrap(critic, sgd(critic))
    for x, y in loader:
        cross_entropy(actor, x, y).backward()
        first.step()
        first.zero_grad()
        second.zero_grad()
        critic(x).square().mean().backward()
        second.step()
        first.zero_grad()
        second.zero_grad()
    return actor, critic


@habit(may="refused", says="as lists")
def wrap_of_a_part_later(wrap):
    """The head is wrapped once more with an optimizer of its own, and the first one goes on with the rest."""
    model = net()
    model, first, loader = wrap(model, sgd(model[:4]), batches())
    head, second, _ = wrap(model[4], torch.optim.AdamW(model[4].parameters(), 0.01))
    for x, y in loader:
        cross_entropy(model, x, y).backward()
        for one in (first, second):
            one.step()
            one.zero_grad()
    return model, head


@habit(may="refused", says="as lists")
def part_unfrozen_and_wrapped_later(wrap):
    """The head alone is trained at first; then the body is unfrozen, and wrapped with an optimizer of its own."""
    model = net()
    model[:4].requires_grad_(False)
    model, first, loader = wrap(model, sgd(model[4]), batches())
    second = None
    for i, (x, y) in enumerate(loader):
        if i == 4:
            body, second, _ = wrap(model[:4].requires_grad_(True), sgd(model[:4]))
        cross_entropy(model, x, y).backward()
        for one in filter(None, (first, second)):
            one.step()
            one.zero_grad()
    return model, body


@habit(must="equal", steps=6)
def checkpointed_tied_and_grouped(wrap):
    """Tied layers in two checkpoints, a group of two passes, and gradients that are clipped."""
    from torch.utils.checkpoint import checkpoint

    model = net()
    model[2].weight.data.mul_(0.5)

    def loss_of(x, y):
        h = checkpoint(model[2], torch.tanh(model[0](x)), use_reentrant=True)
        h = checkpoint(model[2], torch.tanh(h), use_reentrant=True)
        return F.cross_entropy(model[4](h), y)

    model, optimizer, loader = wrap(model, sgd(model), batches(), accumulate=2)
    for step, (x, y) in enumerate(loader):
        (loss_of(x, y) / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model


@habit(must="equal")
def spectral(wrap):
    """Spectral norms, whose buffers move in every forward."""
    model = net()
    nn.utils.parametrizations.spectral_norm(model[2])
    return trained(wrap, lambda model, x, y, _: cross_entropy(model, x, y), batches(), model)


@habit(must="equal")
def two_models_in_one_backward(wrap):
    """An encoder and a decoder, one loss, two optimizers, and a layer that both have."""
    first, second = net(outputs=6), net(seed=2)
    second[2] = first[2]
    optimizers = [sgd(first), sgd([p for p in second.parameters() if all(p is not q for q in first.parameters())])]
    (first, second), optimizers, loader = wrap([first, second], optimizers, batches(rows=7))
    for x, y in loader:
        cross_entropy(second, first(x), y).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    return first, second
