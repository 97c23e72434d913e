"""Losses of rows beside others: contrast, metrics, adversaries, teachers, and rows that choose themselves."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from habits.losses import trained
from loops.habit import habit
from loops.scene import CLASSES, WIDTH, batches, net, pairs, seeded, sgd, steps


@habit(must="equal")
def two_sides_without_negatives(wrap):
    """SimSiam: each view predicts the other, whose gradient is stopped."""
    torch.manual_seed(3)
    model = nn.ModuleList([net(), nn.Linear(CLASSES, CLASSES)])

    def apart(p, z):
        return -(F.normalize(p, dim=1) * F.normalize(z.detach(), dim=1)).sum(dim=1).mean()

    def loss_of(model, x, y):
        z1, z2 = model[0](x), model[0](y)
        return apart(model[1](z1), z2) / 2 + apart(model[1](z2), z1) / 2

    return trained(wrap, loss_of, pairs(rows=7, outputs=WIDTH), model)


@habit(may="refused")
def queue_of_keys(wrap):
    """MoCo: a buffer of the last batches' keys, which each rank would fill with its own rows."""
    model = net()
    model.register_buffer("queue", F.normalize(torch.randn(16, CLASSES, generator=seeded(23)), dim=1))
    model.register_buffer("at", torch.zeros(1, dtype=torch.long))
    slow = copy.deepcopy(nn.Sequential(*model)).requires_grad_(False)

    def loss_of(model, x, y):
        q, k = F.normalize(model(x), dim=1), F.normalize(slow(y), dim=1)
        near, far = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1), torch.einsum("nc,kc->nk", [q, model.queue.clone()])
        out = torch.cat([near, far], dim=1) / 0.2
        at, many = int(model.at), len(k)
        model.queue[at : at + many] = k[: max(0, 16 - at)]
        model.at[0] = (at + many) % 16
        return F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))

    return trained(wrap, loss_of, pairs(rows=6, outputs=WIDTH), model)


@habit(may="refused")
def supervised_contrast(wrap):
    """SupCon: rows of the same label are near."""

    def loss_of(model, x, y):
        z = F.normalize(model(x), dim=1)
        alike = (y[:, None] == y[None]).to(x.dtype) * (1 - torch.eye(len(y)))
        out = z @ z.T / 0.5
        out = out - out.max(1, keepdim=True)[0].detach()
        log_prob = out - (out.exp() * (1 - torch.eye(len(y)))).sum(1, keepdim=True).log()
        return -((alike * log_prob).sum(1) / alike.sum(1).clamp(min=1)).mean()

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def hardest_triplets(wrap):
    """Batch-hard triplets: the farthest of the same label, the nearest of another."""

    def loss_of(model, x, y):
        z = model(x)
        away = torch.cdist(z, z + 1e-3)
        alike = y[:, None] == y[None]
        far = (away * alike).amax(1)
        near = away.masked_fill(alike, 9.0).amin(1)
        return F.relu(far - near + 1.0).mean()

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def passages_of_the_batch(wrap):
    """DPR: a question against its passage and all others of the batch, by matmul of transposed rows."""
    torch.manual_seed(3)
    model = nn.ModuleList([net(1), net(2)])

    def loss_of(model, q, p):
        scores = torch.matmul(model[0](q), torch.transpose(model[1](p), 0, 1))
        return F.nll_loss(F.log_softmax(scores, dim=1), torch.arange(len(q)))

    return trained(wrap, loss_of, pairs(outputs=WIDTH), model)


@habit(must="equal")
def passages_of_the_row(wrap):
    """A question against its own passage and three that come with it."""
    draw = seeded(24)
    data = [(torch.randn(7, WIDTH, generator=draw), torch.randn(7, 4, WIDTH, generator=draw)) for _ in range(steps())]
    torch.manual_seed(3)
    model = nn.ModuleList([net(1), net(2)])

    def loss_of(model, q, p):
        z = model[1](p.view(-1, WIDTH)).view(len(q), 4, -1)
        scores = torch.bmm(model[0](q).unsqueeze(1), z.transpose(1, 2)).squeeze(1)
        return F.cross_entropy(scores, torch.zeros(len(q), dtype=torch.long))

    return trained(wrap, loss_of, data, model)


@habit(must="equal")
def centers(wrap):
    """Center loss and a margin of angles: class centers and weights are parameters."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"body": net(outputs=8)})
    model.centers, model.faces = nn.Parameter(torch.randn(CLASSES, 8)), nn.Parameter(torch.randn(CLASSES, 8))

    def loss_of(model, x, y):
        z = model["body"](x)
        cosine = F.linear(F.normalize(z), F.normalize(model.faces))
        sine = torch.sqrt(1.0 - cosine.pow(2) + 1e-7)
        turned = cosine * math.cos(0.3) - sine * math.sin(0.3)
        truth = torch.zeros_like(cosine).scatter_(1, y.view(-1, 1), 1)
        out = (truth * turned + (1 - truth) * cosine) * 4
        near = (z - model.centers.index_select(0, y)).pow(2).sum(1).mean() / 2
        return F.cross_entropy(out, y) + 0.05 * near

    return trained(wrap, loss_of, batches(rows=7), model)


@habit(must="equal")
def critic_with_penalty(wrap):
    """WGAN-GP: three critics' steps to each generator's, interpolates by numbers that come with the batch."""
    draw = seeded(25)
    data = [
        (torch.randn(7, WIDTH, generator=draw), torch.randn(7, 3, generator=draw), torch.rand(7, 1, generator=draw))
        for _ in range(steps())
    ]
    made, judge = net(1, 3, WIDTH), net(2, WIDTH, 1)
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2, betas=(0.0, 0.9)) for m in (made, judge)]
    (made, judge), (moves, judges), loader = wrap([made, judge], optimizers, data)
    for step, (x, z, alpha) in enumerate(loader):
        judges.zero_grad()
        fake = made(z).detach()
        between = (alpha * x + (1 - alpha) * fake).requires_grad_(True)
        out = judge(between)
        (slope,) = torch.autograd.grad(
            out, between, grad_outputs=torch.ones_like(out), create_graph=True, retain_graph=True, only_inputs=True
        )
        penalty = ((slope.view(len(slope), -1).norm(2, dim=1) - 1) ** 2).mean()
        (-torch.mean(judge(x)) + torch.mean(judge(fake)) + 10 * penalty).backward()
        judges.step()
        if step % 3 == 2:
            moves.zero_grad()
            (-judge(made(z)).mean()).backward()
            moves.step()
    return made, judge


@habit(must="equal")
def hinge_and_labels(wrap):
    """A hinge GAN whose judge also names classes; labels are made with full_like, two backwards add up."""
    made, judge = net(1, 3, WIDTH), net(2, WIDTH, 1 + CLASSES)
    (made, judge), (moves, judges), loader = wrap([made, judge], [sgd(made), sgd(judge)], batches(rows=7))
    for x, y in loader:
        z = torch.stack([y.to(x.dtype), x[:, 0], x[:, 1]], 1)
        judge.zero_grad()
        out = judge(x)
        (F.relu(1 - out[:, 0]).mean() + F.cross_entropy(out[:, 1:], y)).backward()
        fake = made(z)
        F.relu(1 + judge(fake.detach())[:, 0]).mean().backward()
        judges.step()
        made.zero_grad()
        out = judge(fake)
        loss = F.binary_cross_entropy_with_logits(out[:, 0], torch.full_like(out[:, 0], 0.9))
        (loss + F.cross_entropy(out[:, 1:], y)).backward()
        moves.step()
    return made, judge


@habit(may="refused")
def loss_over_its_own_value(wrap):
    """Tasks are balanced by dividing each loss by its own value."""

    def loss_of(model, x, y):
        out = model(x)
        one, two = F.cross_entropy(out, y), out.square().mean()
        return one / one.detach() + two / two.item()

    return trained(wrap, loss_of, batches())


@habit(may="refused")
def weights_by_their_own_losses(wrap):
    """Rows count by a softmax of their own losses."""

    def loss_of(model, x, y):
        each = F.cross_entropy(model(x), y, reduction="none")
        return (F.softmax(each.detach(), 0) * each).sum()

    return trained(wrap, loss_of, batches())


@habit(must="equal")
def sure_ones_alone(wrap):
    """FixMatch: labels of rows of which the model is sure; a mean over all of them, beside a teacher's mean square."""
    model = net()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss_of(model, x, y):
        sure, label = F.softmax(model(x).detach(), 1).max(1)
        each = F.cross_entropy(model(x + 0.1), label, reduction="none")
        loss = F.cross_entropy(model(x), y) + (each * sure.ge(0.3).to(x.dtype)).mean()
        return loss + 0.3 * F.mse_loss(model(x).softmax(1), teacher(x - 0.1).softmax(1))

    return trained(wrap, loss_of, batches(rows=7), model)


@habit(must="equal")
def easy_ones_first(wrap):
    """Self-paced: a mean over the rows whose loss is below a number."""

    def loss_of(model, x, y):
        each = F.cross_entropy(model(x), y, reduction="none")
        easy = (each.detach() < 1.5).to(x.dtype)
        return (each * easy).sum() / easy.sum()

    return trained(wrap, loss_of, batches())


@habit(must="equal")
def frozen_teacher_of_several_layers(wrap):
    """Distillation: smooth labels by hand, hidden states, attention of features; penalties that know no rows."""
    teacher = net(5)
    teacher.requires_grad_(False)

    def loss_of(model, x, y):
        hidden, wanted = model[:2](x), teacher[:2](x)
        out = model[2:](hidden)
        soft = torch.full_like(out, 0.1 / (CLASSES - 1)).scatter_(1, y.unsqueeze(1), 0.9)
        labels = torch.mean(torch.sum(-soft * out.log_softmax(-1), dim=-1))
        near = F.mse_loss(F.normalize(hidden.pow(2), dim=1), F.normalize(wanted.pow(2), dim=1))
        weight = model[2].weight
        straight = ((weight @ weight.T - torch.eye(8)) ** 2).sum()
        return labels + 5 * near + 1e-2 * straight + 1e-3 * torch.norm(model[0].weight, 2)

    return trained(wrap, loss_of, batches(rows=7))


@habit(may="refused")
def chosen_rows_against_all(wrap):
    """Rows of some labels, selected before the forward, against all rows of the batch."""
    torch.manual_seed(3)
    model = nn.ModuleList([net(1), net(2)])

    def loss_of(model, x, y):
        is_one = y > 0
        scores = model[0](x[is_one]) @ model[1](x).T
        return F.cross_entropy(scores, is_one.nonzero().squeeze(1))

    return trained(wrap, loss_of, batches(rows=12), model)


@habit(may="refused")
def all_rows_against_chosen(wrap):
    """All rows against some of them, which were changed on the way: a softmax over these."""
    torch.manual_seed(3)
    model = nn.ModuleList([net(1), net(2)])

    def loss_of(model, x, y):
        scores = model[0](x) @ model[1](2 * x[y > 0] + 0.1).T
        return scores.logsumexp(1).mean()

    return trained(wrap, loss_of, batches(rows=12), model)


@habit(may="refused")
def contrast_of_rows_that_want_a_gradient(wrap):
    """Rows against rows, where the inputs' own gradient is wanted for a penalty."""

    def loss_of(model, x, y):
        x.requires_grad_()
        z = model(x)
        (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        return F.cross_entropy(z @ z.T, torch.arange(len(z))) + slope.square().mean()

    return trained(wrap, loss_of, batches())


@habit(must="equal")
def prompts_of_classes(wrap):
    """CLIP, fine-tuned: images against one text for each class, the same in every step."""
    torch.manual_seed(3)
    model = nn.ModuleList([net(1, outputs=8), nn.Embedding(11, 8)])
    texts = torch.randint(11, (CLASSES, 7), generator=seeded(28))

    def loss_of(model, x, y):
        images, words = F.normalize(model[0](x), dim=-1), F.normalize(model[1](texts).mean(1), dim=-1)
        return F.cross_entropy(4 * images @ words.t(), y)

    return trained(wrap, loss_of, batches(rows=16), model)


@habit(may="refused", says="frozen parameter", sets=True)
def center_of_the_teacher(wrap):
    """DINO: what the teacher says less its running mean, which is a parameter that nobody trains."""
    body, held = net(), nn.Module()
    held.center = nn.Parameter(torch.zeros(1, CLASSES), requires_grad=False)
    model, teacher = nn.ModuleList([body, held]), copy.deepcopy(body).requires_grad_(False)
    model, optimizer, loader = wrap(model, sgd(body), pairs(rows=7, outputs=WIDTH))
    for x, y in loader:
        wanted = teacher(x)
        soft = F.softmax((wanted - held.center) / 0.5, dim=-1)
        loss = -(soft * F.log_softmax(body(y), dim=-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        held.center.data = held.center.data * 0.9 + wanted.mean(0, keepdim=True) * 0.1
        for slow, fast in zip(teacher.parameters(), body.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.detach(), alpha=0.1)
    return model
