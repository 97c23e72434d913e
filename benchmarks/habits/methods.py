"""Methods of training as scripts write them: reinforcement, preference, contrast, adversaries, meta-learning."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence

from habits.losses import trained
from loops.habit import habit
from loops.scene import CLASSES, WIDTH, batches, net, pairs, seeded, sgd, steps


def transitions(rows=7):
    """State, action, reward, next state, whether it was the last."""
    draw, found = seeded(20), []
    for _ in range(steps()):
        s, t = torch.randn(2, rows, WIDTH, generator=draw)
        a, r = torch.randint(CLASSES, (rows,), generator=draw), torch.rand(rows, generator=draw)
        found.append((s, a, r, t, (torch.rand(rows, generator=draw) < 0.3).to(r.dtype)))
    return found


@habit(must="equal")
def q_learning(wrap):
    """Double DQN: gathered values, a target network that is replaced now and then, Huber's loss."""
    model = net()
    target = copy.deepcopy(model)
    model, optimizer, loader = wrap(model, torch.optim.Adam(model.parameters(), 1e-2), transitions())
    for step, (s, a, r, t, done) in enumerate(loader):
        q = model(s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = model(t).argmax(1, keepdim=True)
            wanted = r + 0.9 * target(t).gather(1, best).squeeze(1) * (1 - done)
        optimizer.zero_grad()
        F.smooth_l1_loss(q, wanted).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        if step % 4 == 3:
            target.load_state_dict(model.state_dict())
    return model


@habit(must="equal")
def replay_by_priority(wrap):
    """Errors times importance weights that come with the batch; the errors go back to the replay."""
    kept = []

    def loss_of(model, s, a, r, t, done):
        error = model(s)[torch.arange(len(a)), a] - (r + 0.9 * model(t).max(1)[0].detach() * (1 - done))
        kept.append(error.abs().detach())
        return (r * error.pow(2)).mean()

    return trained(wrap, loss_of, transitions())


@habit(must="equal")
def policy_and_value(wrap):
    """PPO: several epochs over one batch, clipped ratios, clipped values, entropy."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"body": nn.Linear(WIDTH, 8), "actor": nn.Linear(8, CLASSES), "critic": nn.Linear(8, 1)})
    model, optimizer, loader = wrap(model, sgd(model), transitions())
    for s, a, r, _, _ in loader:
        with torch.no_grad():
            hidden = model["body"](s).tanh()
            old, was = Categorical(logits=model["actor"](hidden)).log_prob(a), model["critic"](hidden).view(-1)
        gain = r - was
        for _ in range(3):
            hidden = model["body"](s).tanh()
            policy, value = Categorical(logits=model["actor"](hidden)), model["critic"](hidden).view(-1)
            ratio = (policy.log_prob(a) - old).exp()
            clipped = torch.clamp(ratio, 0.9, 1.1)
            acts = torch.max(-gain * ratio, -gain * clipped).mean()
            near = was + torch.clamp(value - was, -0.2, 0.2)
            sees = 0.5 * torch.max((value - r) ** 2, (near - r) ** 2).mean()
            loss = acts - 0.01 * policy.entropy().mean() + 0.5 * sees
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model


@habit(must="equal")
def episodes(wrap):
    """REINFORCE: log-probabilities times returns, summed."""

    def loss_of(model, s, a, r, t, done):
        policy = Categorical(F.softmax(model(s), dim=-1))
        return (-policy.log_prob(a) * r).sum()

    return trained(wrap, loss_of, transitions(), lr=0.01)


@habit(must="equal")
def actor_critics(wrap):
    """SAC without its noise: two critics in one backward, an actor, a temperature; three optimizers."""
    actor, one, two = net(1, outputs=2), net(2, WIDTH + 2, 1), net(3, WIDTH + 2, 1)
    log_alpha = nn.ParameterList([nn.Parameter(torch.zeros(1))])
    both = nn.ModuleList([one, two])
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (actor, both, log_alpha)]
    _, optimizers, loader = wrap([actor, both, log_alpha], optimizers, transitions())
    for s, a, r, t, done in loader:
        did = F.one_hot(a % 2, 2).to(s.dtype)
        with torch.no_grad():
            following = actor(t).tanh()
            least = torch.min(one(torch.cat([t, following], 1)), two(torch.cat([t, following], 1)))
            wanted = r[:, None] + 0.9 * (1 - done[:, None]) * (least - log_alpha[0].exp() * following.sum(1, True))
        q1, q2 = one(torch.cat([s, did], 1)), two(torch.cat([s, did], 1))
        optimizers[1].zero_grad()
        (F.mse_loss(q1, wanted) + F.mse_loss(q2, wanted)).backward()
        optimizers[1].step()
        now = actor(s).tanh()
        value = torch.min(one(torch.cat([s, now], 1)), two(torch.cat([s, now], 1)))
        optimizers[0].zero_grad()
        (log_alpha[0].exp().detach() * now.sum(1, True) - value).mean().backward()
        optimizers[0].step()
        optimizers[2].zero_grad()
        (-log_alpha[0].exp() * (now.sum(1).detach() - 1)).mean().backward()
        optimizers[2].step()
    return actor, both, log_alpha


def preferred(rows=7):
    draw = seeded(21)
    return [tuple(torch.randint(11, (2, rows, 5), generator=draw)) for _ in range(steps())]


def speaker(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))


def said(model, ids):
    """The log-probability of each text."""
    each = model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return each.sum(-1)


@habit(must="equal")
def preference(wrap):
    """DPO: chosen and rejected texts in one forward, then taken apart; a frozen reference."""
    frozen = speaker().requires_grad_(False)

    def loss_of(model, good, bad):
        ids = torch.cat([good, bad], dim=0)
        ours, theirs = said(model, ids), said(frozen, ids)
        n = good.shape[0]
        margin = (ours[:n] - ours[n:]) - (theirs[:n] - theirs[n:])
        return -F.logsigmoid(0.1 * margin).mean()

    return trained(wrap, loss_of, preferred(), speaker())


@habit(must="equal")
def reward_model(wrap):
    """Chosen and rejected in two forwards, a margin, and a penalty on the size of rewards."""

    def loss_of(model, good, bad):
        a, b = said(model, good), said(model, bad)
        return -F.logsigmoid(a - b - 0.1).mean() + 0.01 * ((a + b) ** 2).mean()

    return trained(wrap, loss_of, preferred(), speaker(), lr=0.02)


@habit(must="equal")
def groups_of_answers(wrap):
    """GRPO: four answers to each question, whose rewards are normalized within the question."""
    draw = seeded(22)
    data = [(torch.randint(11, (6, 4, 5), generator=draw), torch.rand(6, 4, generator=draw)) for _ in range(steps())]

    def loss_of(model, ids, rewards):
        gain = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        ids, gain = ids.flatten(0, 1), gain.flatten()
        each = model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio = torch.exp(each - each.detach())
        kept = torch.min(ratio * gain[:, None], ratio.clamp(0.8, 1.2) * gain[:, None])
        mask = (ids[:, 1:] != 0).to(each.dtype)
        return -(kept * mask).sum() / mask.sum()

    return trained(wrap, loss_of, data, speaker())


@habit(must="equal")
def diffusion(wrap):
    """DDPM: noise and times come with the batch, a table of coefficients is looked up, losses are weighed by time."""
    draw = seeded(26)
    kept = torch.cumprod(1 - torch.linspace(1e-2, 0.3, 10), 0)
    data = [
        (*torch.randn(2, 7, WIDTH, generator=draw), torch.randint(10, (7,), generator=draw)) for _ in range(steps())
    ]
    model = net(inputs=WIDTH + 1, outputs=WIDTH)

    def loss_of(model, x, noise, t):
        a = kept[t].view(-1, 1)
        mixed = a.sqrt() * x + (1 - a).sqrt() * noise
        each = F.mse_loss(model(torch.cat([mixed, t[:, None] / 10], 1)), noise, reduction="none")
        snr = kept[t] / (1 - kept[t])
        return (each.mean(dim=list(range(1, each.dim()))) * snr.clamp(max=5.0) / snr).mean()

    return trained(wrap, loss_of, data, model)


@habit(must="equal")
def codes(wrap):
    """VQ-VAE: the nearest code of a table, straight through; a codebook loss and a commitment."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"in": nn.Linear(WIDTH, 4), "codes": nn.Embedding(9, 4), "out": nn.Linear(4, WIDTH)})

    def loss_of(model, x, _):
        z = model["in"](x)
        away = (z**2).sum(1, keepdim=True) + (model["codes"].weight ** 2).sum(1) - 2 * z @ model["codes"].weight.t()
        q = model["codes"](away.argmin(1))
        vq = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return F.mse_loss(model["out"](z + (q - z).detach()), x) + vq

    return trained(wrap, loss_of, batches(rows=7), model)


@habit(must="equal")
def variational(wrap):
    """A VAE whose noise comes with the batch: KL of torch.distributions, both sums divided by the rows."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"in": nn.Linear(WIDTH, 6), "out": nn.Linear(3, WIDTH)})

    def loss_of(model, x, noise):
        mean, log_var = model["in"](x).chunk(2, dim=1)
        z = mean + noise[:, :3] * torch.exp(0.5 * log_var)
        recon = F.mse_loss(model["out"](z), x, reduction="sum") / x.size(0)
        unit = Normal(torch.zeros_like(mean), torch.ones_like(mean))
        kl = kl_divergence(Normal(mean, torch.exp(0.5 * log_var)), unit).sum(1).mean()
        by_hand = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp()) / x.size(0)
        return recon + 0.5 * kl + 0.5 * by_hand

    return trained(wrap, loss_of, pairs(rows=7), model, lr=0.01)


@habit(must="alike")
def variational_with_noise_of_its_own(wrap):
    """The same as every tutorial has it: randn_like, and sums over the batch."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"in": nn.Linear(WIDTH, 6), "out": nn.Linear(3, WIDTH)})

    def loss_of(model, x, _):
        mean, log_var = model["in"](x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        kl = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
        return F.mse_loss(model["out"](z), x, reduction="sum") + kl

    return trained(wrap, loss_of, pairs(rows=64), model, lr=1e-4)


@habit(must="equal")
def mixture_of_gaussians(wrap):
    """A mixture density network: a logsumexp over components."""

    def loss_of(model, x, y):
        logits, mean, log_scale = model(x).view(len(x), 3, 3).unbind(1)
        each = Normal(mean, F.softplus(log_scale) + 0.3).log_prob(y[:, :1])
        return -torch.logsumexp(F.log_softmax(logits, 1) + each, 1).mean()

    return trained(wrap, loss_of, pairs(rows=7), net(outputs=9), lr=0.05)


def few_shots(rows=6):
    draw = seeded(27)
    return [tuple(torch.randn(4, rows, 5, WIDTH, generator=draw).unbind(0)) for _ in range(steps())]


def adapted(model, x, y):
    """Parameters after one step on a task."""
    own = dict(model.named_parameters())
    loss = F.mse_loss(torch.func.functional_call(model, own, (x,)), y)
    slopes = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    return {name: p - 0.1 * g for (name, p), g in zip(own.items(), slopes, strict=True)}


@habit(may="refused")
def task_by_task(wrap):
    """MAML: rows are tasks, each adapts by a gradient with a graph; the sum of their losses over their number."""

    def loss_of(model, x, y, u, v):
        total = 0
        for i in range(len(x)):
            out = torch.func.functional_call(model, adapted(model, x[i], y[i]), (u[i],))
            total = total + ((out - v[i]) ** 2).sum()
        return total / len(x)

    return trained(wrap, loss_of, few_shots(), net(outputs=WIDTH), lr=0.01)


@habit(may="refused")
def shots_in_rows(wrap):
    """MAML of one task to a batch, whose rows are shots: the inner gradient is of a rank's own shots."""
    data = [tuple(part[0] for part in tasks) for tasks in few_shots()]

    def loss_of(model, x, y, u, v):
        return F.mse_loss(torch.func.functional_call(model, adapted(model, x, y), (u,)), v)

    return trained(wrap, loss_of, data, net(outputs=WIDTH))


@habit(may="refused")
def reptile(wrap):
    """Reptile: a copy is trained on the batch, and how far it came is put into .grad."""
    model = net()
    model, optimizer, loader = wrap(model, torch.optim.SGD(model.parameters(), 0.5), batches())
    for x, y in loader:
        own = copy.deepcopy(model)
        inner = torch.optim.SGD(own.parameters(), 0.1)
        for _ in range(3):
            inner.zero_grad()
            F.cross_entropy(own(x), y).backward()
            inner.step()
        for p, q in zip(model.parameters(), own.parameters(), strict=True):
            p.grad = (p - q).detach()
        optimizer.step()
    return model


@habit(may="refused")
def gradients_clipped_by_row(wrap):
    """DP-SGD: a gradient for each row by vmap, each clipped, their mean put into .grad."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        own = dict(model.named_parameters())

        def one(params, x, y):
            return F.cross_entropy(torch.func.functional_call(model, params, (x[None],)), y[None])

        each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(own, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        for name, p in own.items():
            scale = (0.1 / norms).clamp(max=1.0).view(-1, *[1] * p.dim())
            p.grad = (each[name] * scale).mean(0).detach()
        optimizer.step()
    return model
