"""What scripts do with models, gradients and optimizers between two steps: averages, searches, tools of their own."""

from __future__ import annotations

import copy
import io
import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint_sequential

from loops.habit import habit
from loops.scene import CLASSES, WIDTH, batches, cross_entropy, dataset, net, sgd


def stepped(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@habit(must="equal")
def average_put_in_place(wrap):
    """EMA: stored, copied into the model for an evaluation, and put back."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    shadow, best = [p.detach().clone() for p in model.parameters()], math.inf
    held = dataset(20, seed=5).tensors
    for step, (x, y) in enumerate(loader):
        stepped(model, optimizer, cross_entropy(model, x, y))
        decay = min(0.9, (1 + step) / (10 + step))
        for slow, p in zip(shadow, model.parameters(), strict=True):
            slow.sub_((1 - decay) * (slow - p.detach()))
        if step % 3 == 2:
            own = [p.detach().clone() for p in model.parameters()]
            for slow, p in zip(shadow, model.parameters(), strict=True):
                p.data.copy_(slow)
            model.eval()
            with torch.no_grad():
                best = min(best, float(cross_entropy(model, *held)))
            model.train()
            for was, p in zip(own, model.parameters(), strict=True):
                p.data.copy_(was)
    return model, shadow, best


@habit(must="equal")
def rate_found_first(wrap):
    """A range test: rates grow for some steps, then model and optimizer are put back."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    state, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.5**step)
    for step, (x, y) in enumerate(loader):
        stepped(model, optimizer, cross_entropy(model, x, y))
        schedule.step()
        if step == 3:
            break
    model.load_state_dict(state)
    optimizer.load_state_dict(moments)
    for x, y in loader:
        stepped(model, optimizer, cross_entropy(model, x, y))
    return model


@habit(must="equal")
def stopped_early(wrap):
    """Early stopping by held-out rows, with a patience; the best state is loaded at the end."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, 0.3), batches(rows=7))
    best, left, kept = math.inf, 2, {}
    for _ in range(4):
        for x, y in loader:
            stepped(model, optimizer, cross_entropy(model, x, y))
        with torch.no_grad():
            now = float(cross_entropy(model, *dataset(30, seed=5).tensors))
        if now < best:
            best, left, kept = now, 2, copy.deepcopy(model.state_dict())
        else:
            left -= 1
        if left == 0:
            break
    model.load_state_dict(kept)
    return model


@habit(may="refused")
def stopped_by_the_rank_s_loss(wrap):
    """Early stopping by the running training loss, which is of each rank's rows."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, 0.3), batches(rows=7))
    before = math.inf
    for _ in range(5):
        total = 0.0
        for x, y in loader:
            loss = cross_entropy(model, x, y)
            stepped(model, optimizer, loss)
            total += loss.item() * len(x)
            if total > 25 and len(x) < 4:
                break
        if total > before:
            break
        before = total
    return model


@habit(must="equal")
def warm_restarts(wrap):
    """CosineAnnealingWarmRestarts, stepped by fractions of an epoch."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=2)
    for epoch in range(2):
        for step, (x, y) in enumerate(loader):
            stepped(model, optimizer, cross_entropy(model, x, y))
            schedule.step(epoch + step / len(loader))
    return model


@habit(must="equal")
def profiled(wrap):
    """torch.profiler with a schedule around the steps."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    plan = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=plan) as watch:
        for x, y in loader:
            with torch.profiler.record_function("step"):
                stepped(model, optimizer, cross_entropy(model, x, y))
            watch.step()
    return model


@habit(must="equal")
def checkpointed_in_segments(wrap):
    """checkpoint_sequential."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    for x, y in loader:
        out = checkpoint_sequential(model, 2, x, use_reentrant=False)
        stepped(model, optimizer, F.cross_entropy(out, y))
    return model


@habit(may="refused")
def data_parallel_around(wrap):
    """nn.DataParallel, left in from a machine with several GPUs."""
    model = nn.DataParallel(net())
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    for x, y in loader:
        stepped(model, optimizer, cross_entropy(model, x, y))
    return model.module


@habit(must="equal")
def weights_normed_by_hooks(wrap):
    """The older weight_norm and spectral_norm: a hook makes the weight before every forward."""
    torch.manual_seed(3)
    first = nn.utils.weight_norm(nn.Linear(WIDTH, 8))
    model = nn.Sequential(first, nn.Tanh(), nn.utils.spectral_norm(nn.Linear(8, CLASSES)))
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    for x, y in loader:
        stepped(model, optimizer, cross_entropy(model, x, y))
    return model


@habit(must="equal")
def clipped_by_the_size_of_weights(wrap):
    """AGC: each row of a weight has its gradient clipped by its own norm."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        for p in model.parameters():
            size = p.detach().norm(dim=-1, keepdim=True).clamp(min=1e-3)
            slope = p.grad.norm(dim=-1, keepdim=True)
            p.grad.detach().mul_((0.05 * size / slope.clamp(min=1e-6)).clamp(max=1.0))
        optimizer.step()
    return model


class Lookahead(Optimizer):
    """As it is found: made around another optimizer, without calling Optimizer's constructor."""

    def __init__(self, optimizer, k=3, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.param_groups, self.state = optimizer.param_groups, defaultdict(dict)
        self.slow = [[p.clone().detach() for p in group["params"]] for group in self.param_groups]

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, q in zip(group["params"], slow, strict=True):
                    q.add_(self.alpha * (p.data - q))
                    p.data.copy_(q)
        return loss


@habit(may="refused", says="constructor")
def looks_ahead(wrap):
    """Lookahead around Adam, given to wrap."""
    model = net()
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), 1e-2))
    model, optimizer, loader = wrap(model, optimizer, batches(rows=7))
    for x, y in loader:
        stepped(model, optimizer, cross_entropy(model, x, y))
    return model


@habit(must="equal")
def looks_ahead_around_the_wrapped(wrap):
    """Lookahead around what wrap returned."""
    model = net()
    model, optimizer, loader = wrap(model, torch.optim.Adam(model.parameters(), 1e-2), batches(rows=7))
    outer = Lookahead(optimizer)
    for x, y in loader:
        stepped(model, outer, cross_entropy(model, x, y))
    return model


class Wrapper:
    """An optimizer that is no Optimizer: a schedule around one (the annotated transformer)."""

    def __init__(self, optimizer, factor, warm):
        self.optimizer, self.factor, self.warm, self.count = optimizer, factor, warm, 0

    def step(self):
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.factor * min(self.count**-0.5, self.count * self.warm**-1.5)
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


@habit(may="refused")
def optimizer_that_is_none(wrap):
    """NoamOpt, given to wrap."""
    model = net()
    model, optimizer, loader = wrap(model, Wrapper(sgd(model), 0.3, 4), batches(rows=7))
    for x, y in loader:
        stepped(model, optimizer, cross_entropy(model, x, y))
    return model


@habit(must="equal")
def optimizer_that_is_none_around_the_wrapped(wrap):
    """NoamOpt around what wrap returned."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    around = Wrapper(optimizer, 0.3, 4)
    for x, y in loader:
        stepped(model, around, cross_entropy(model, x, y))
    return model


@habit(may="refused")
def gradients_balanced(wrap):
    """GradNorm: task weights follow the norms of each task's gradient, of each rank's own rows."""
    model, weights = net(), nn.Parameter(torch.ones(2))
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    moves, first = torch.optim.SGD([weights], 0.1), None
    for x, y in loader:
        out = model(x)
        losses = torch.stack([F.cross_entropy(out, y), out.square().mean()])
        first = losses.detach() if first is None else first
        norms = torch.stack(
            [
                torch.norm(torch.autograd.grad(w * one, model[2].weight, retain_graph=True, create_graph=True)[0])
                for w, one in zip(weights, losses, strict=True)
            ]
        )
        rates = (losses.detach() / first) / (losses.detach() / first).mean()
        balance = (norms - (norms.mean() * rates).detach()).abs().sum()
        (weights.grad,) = torch.autograd.grad(balance, weights, retain_graph=True)
        optimizer.zero_grad()
        (weights.detach() * losses).sum().backward()
        optimizer.step()
        moves.step()
        weights.data.mul_(2 / weights.data.sum())
    return model


@habit(must="equal")
def model_saved_in_memory(wrap):
    """The best model is kept in a buffer, loaded into a new one, and fine-tuned with another optimizer."""
    model, held = net(), io.BytesIO()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    for x, y in loader:
        stepped(model, optimizer, cross_entropy(model, x, y))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, held)
    held.seek(0)
    fresh = net(seed=9)
    fresh.load_state_dict(torch.load(held)["model"])
    fresh, optimizer, loader = wrap(fresh, torch.optim.AdamW(fresh.parameters(), 1e-3), batches(rows=5, seed=2))
    for x, y in loader:
        stepped(fresh, optimizer, cross_entropy(fresh, x, y))
    return fresh


@habit(must="equal")
def one_model_inside_another(wrap):
    """The net is a part of a module that computes its own loss, and gives a dictionary."""

    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.scale = net(), nn.Parameter(torch.ones(()))

        def forward(self, x, y=None):
            out = self.net(x) * self.scale
            found = {"logits": out}
            if y is not None:
                found["loss"] = F.cross_entropy(out, y)
                found["accuracy"] = (out.argmax(1) == y).to(out.dtype).mean()
            return found

    task = Task()
    task, optimizer, loader = wrap(task, sgd(task), batches(rows=7))
    for x, y in loader:
        stepped(task, optimizer, task(x, y=y)["loss"])
    return task


@habit(must="equal")
def grown_on_the_way(wrap):
    """Layers are unfrozen one after the other, each with a smaller rate, as add_param_group gives it."""
    model = net().requires_grad_(False)
    model[4].requires_grad_(True)
    model, optimizer, loader = wrap(model, sgd(model[4], 0.2), batches(rows=7))
    for step, (x, y) in enumerate(loader):
        if step in (3, 6):
            layer = model[2 if step == 3 else 0].requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.2 / (1 + step)})
        stepped(model, optimizer, cross_entropy(model, x, y))
    return model
