"""Optimizers, what is wrapped around them, schedules, and their states."""

from __future__ import annotations

import copy
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from loops.habit import habit
from loops.scene import CLASSES, batches, cross_entropy, net, pairs, rank, sgd


def trained(wrap, kind, /, **settings):
    """The plain loop with an optimizer of all parameters."""
    model = net()
    model, optimizer, loader = wrap(model, kind(model.parameters(), **settings), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


def scheduled(wrap, schedule, lr=0.1):
    """The plain loop with a schedule of the wrapped optimizer, a step of it for each batch."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, lr), batches())
    scheduler = schedule(optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        scheduler.step()
    return model, scheduler.get_last_lr()


@habit(must="equal")
def sgd_plain(wrap):
    """SGD without momentum, with decay."""
    return trained(wrap, torch.optim.SGD, lr=0.2, weight_decay=0.05)


@habit(must="equal")
def sgd_nesterov(wrap):
    """SGD with Nesterov's momentum, damped."""
    return trained(wrap, torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)


@habit(must="equal")
def adam(wrap):
    """Adam with amsgrad."""
    return trained(wrap, torch.optim.Adam, lr=0.01, amsgrad=True)


@habit(must="equal")
def adamw_fused(wrap):
    """AdamW, fused."""
    return trained(wrap, torch.optim.AdamW, lr=0.01, fused=True)


@habit(must="equal")
def adamw_fused_channels_last(wrap):
    """AdamW, fused, of a convolution in channels_last and a transposed weight: kernels walk through their memory."""
    return out_of_order(wrap, fused=True)


@habit(must="equal", steps=6)
def adamw_fused_channels_last_amid_a_group(wrap):
    """The same with accumulate=2, and gradients that are zeroed in place."""
    return out_of_order(wrap, accumulate=2, fused=True)


@habit(must="equal")
def adamw_channels_last(wrap):
    """The same, not fused."""
    return out_of_order(wrap)


def out_of_order(wrap, accumulate=1, **settings):
    """A loop with parameters whose elements do not lie in the order of their rows."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, CLASSES))
    model = model.to(memory_format=torch.channels_last)
    model[3].weight = nn.Parameter(model[3].weight.detach().T.contiguous().T)
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(len(y), 48, generator=draw), y) for _, y in batches()]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, **settings)
    model, optimizer, loader = wrap(model, optimizer, data, accumulate=accumulate)
    for i, (x, y) in enumerate(loader):
        (cross_entropy(model, x, y) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=accumulate == 1)
    return model


@habit(must="equal")
def adamw_foreach(wrap):
    """AdamW, foreach."""
    return trained(wrap, torch.optim.AdamW, lr=0.01, foreach=True)


@habit(must="equal")
def rmsprop(wrap):
    """RMSprop, centered, with momentum."""
    return trained(wrap, torch.optim.RMSprop, lr=0.005, centered=True, momentum=0.5)


@habit(must="equal")
def adagrad(wrap):
    """Adagrad."""
    return trained(wrap, torch.optim.Adagrad, lr=0.05)


@habit(must="equal")
def adadelta(wrap):
    """Adadelta (pytorch/examples mnist)."""
    return trained(wrap, torch.optim.Adadelta, lr=1.0)


@habit(must="equal")
def nadam(wrap):
    """NAdam with decoupled decay."""
    return trained(wrap, torch.optim.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1)


@habit(must="equal")
def averaged_sgd(wrap):
    """ASGD: its state holds averages."""
    return trained(wrap, torch.optim.ASGD, lr=0.1, t0=3)


class Lion(torch.optim.Optimizer):
    """An optimizer of one's own; tanh for sign, which has no steps."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    param.add_((100 * (0.9 * mean + 0.1 * param.grad)).tanh(), alpha=-group["lr"])
                    mean.lerp_(param.grad, 0.01)


@habit(must="equal")
def of_ones_own(wrap):
    """A subclass of Optimizer."""
    return trained(wrap, Lion, lr=0.01)


class SharpnessAware(torch.optim.Optimizer):
    """SAM, as it is copied from script to script: a first step uphill by the gradient's norm, and back."""

    def __init__(self, params, base, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base = base(self.param_groups, **settings)

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self._params()]).norm()
        for param in self._params():
            self.state[param]["was"] = param.clone()
            param.add_(param.grad * self.param_groups[0]["rho"] / norm)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for param in self._params():
            param.copy_(self.state[param]["was"])
        self.base.step()
        self.zero_grad()

    def _params(self):
        return [p for group in self.param_groups for p in group["params"]]


@habit(must="equal")
def sharpness_aware(wrap):
    """SAM: two backwards, and steps by other names than step."""
    model = net()
    model, optimizer, loader = wrap(model, SharpnessAware(model.parameters(), torch.optim.SGD, lr=0.1), batches())
    for x, y in loader:
        cross_entropy(model, x, y).backward()
        optimizer.first_step()
        cross_entropy(model, x, y).backward()
        optimizer.second_step()
    return model


@habit(must="equal")
def closure(wrap):
    """optimizer.step(closure) with SGD."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:

        def again(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            loss.backward()
            return loss

        optimizer.step(again)
    return model


def quasi_newton(wrap, **settings):
    """LBFGS on one batch (pytorch/examples time_sequence_prediction)."""
    model = net()
    data = pairs(rows=32)[0]
    model, optimizer, loader = wrap(model, torch.optim.LBFGS(model.parameters(), **settings), [data] * 12)
    for x, y in loader:

        def again(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(again)
    return model


@habit(must="equal", tolerance=1e-7, fp32=False)
def lbfgs(wrap):
    """LBFGS, four evaluations a step."""
    return quasi_newton(wrap, lr=0.2, max_iter=4)


@habit(must="equal", tolerance=1e-7, fp32=False)
def lbfgs_with_line_search(wrap):
    """LBFGS with a line search: what it decides is decided by the loss, which is each rank's own."""
    return quasi_newton(wrap, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


@habit(must="equal")
def parameter_groups(wrap):
    """No decay for biases; another rate for the head."""
    model = net()
    groups = [
        {"params": [p for p in model[:4].parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model[:4].parameters() if p.dim() < 2], "weight_decay": 0.0},
        {"params": model[4].parameters(), "lr": 0.003},
    ]
    model, optimizer, loader = wrap(model, torch.optim.AdamW(groups, 0.01), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def group_added(wrap):
    """add_param_group on the way: the body joins the head."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model[4]), batches())
    for i, (x, y) in enumerate(loader):
        if i == 4:
            optimizer.add_param_group({"params": list(model[:4].parameters()), "lr": 0.02})
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        model.zero_grad()
    return model


@habit(must="equal")
def two_optimizers(wrap):
    """One model, an optimizer for its body and one for its head."""
    model = net()
    both = [torch.optim.AdamW(model[:4].parameters(), 0.01), sgd(model[4])]
    model, (body, head), loader = wrap(model, both, batches())
    for x, y in loader:
        body.zero_grad()
        head.zero_grad()
        cross_entropy(model, x, y).backward()
        body.step()
        head.step()
    return model


@habit(must="equal")
def schedule_before_wrap(wrap):
    """A scheduler made before wrap."""
    model = net()
    optimizer = sgd(model)
    scheduler = lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, loader = wrap(model, optimizer, batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        scheduler.step()
    return model, scheduler.get_last_lr()


@habit(must="equal")
def schedule_after_wrap(wrap):
    """StepLR of what wrap returned."""
    return scheduled(wrap, lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5))


@habit(must="equal")
def one_cycle(wrap):
    """OneCycleLR: the momentum moves too."""
    return scheduled(wrap, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=13))


@habit(must="equal")
def warm_up(wrap):
    """SequentialLR of a warm-up and a cosine."""
    return scheduled(
        wrap,
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
            [4],
        ),
    )


@habit(must="equal")
def plateau(wrap):
    """ReduceLROnPlateau, by the loss of held-out rows."""
    model, held_out = net(), batches(seed=3, rows=32)[0]
    model, optimizer, loader = wrap(model, sgd(model, 0.8), batches())
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        with torch.no_grad():
            scheduler.step(cross_entropy(model, *held_out))
    return model, optimizer.param_groups[0]["lr"]


@habit(may="refused", says="lr|rate|group|rank|differ")
def plateau_of_the_rank(wrap):
    """ReduceLROnPlateau by the training loss, which is of each rank's rows: the rates part."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, 0.8), batches())
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
    return model


@habit(must="equal")
def rate_by_hand(wrap):
    """for group in optimizer.param_groups: group["lr"] = ... (nanoGPT)."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for i, (x, y) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = 0.1 / (1 + i), 0.5 + 0.03 * i
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def rate_by_hand_on_the_first(wrap):
    """The same, on the name from before wrap."""
    model = net()
    first = sgd(model)
    model, optimizer, loader = wrap(model, first, batches())
    for i, (x, y) in enumerate(loader):
        first.param_groups[0]["lr"] = 0.1 / (1 + i)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def step_hooks(wrap):
    """register_step_pre_hook and post_hook: decay before, a projection behind."""
    model = net()
    optimizer = sgd(model)
    model, optimizer, loader = wrap(model, optimizer, batches())

    def decay(optimizer, *_):
        torch._foreach_mul_([p.data for p in optimizer.param_groups[0]["params"]], 0.99)

    optimizer.register_step_pre_hook(decay)
    optimizer.register_step_post_hook(lambda *_: model[0].weight.data.clamp_(-0.4, 0.4))
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def is_an_optimizer(wrap):
    """isinstance, defaults, state, repr: what libraries ask an optimizer."""
    model = net()
    model, optimizer, loader = wrap(model, torch.optim.AdamW(model.parameters(), 0.01), batches())
    assert isinstance(optimizer, torch.optim.Optimizer) and "lr" in repr(optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model, optimizer.defaults["lr"], [optimizer.state[p]["exp_avg"] for p in model.parameters()]


@habit(must="equal")
def saved_and_loaded(wrap):
    """Model, optimizer and scheduler are saved on the way by rank 0, and all ranks load them again some steps later."""
    model = net()
    model, optimizer, loader = wrap(model, torch.optim.AdamW(model.parameters(), 0.01), batches())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    parts, kept = (model, optimizer, scheduler), io.BytesIO()
    for i, (x, y) in enumerate(loader):
        if i == 3:
            torch.save([part.state_dict() for part in parts], kept)
        if i == 7:
            kept.seek(0)
            for part, state in zip(parts, torch.load(kept), strict=True):
                part.load_state_dict(state)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        scheduler.step()
    return model


@habit(must="equal")
def loaded_before_wrap(wrap):
    """A resumed script: states are loaded, then wrap."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for x, y in batches(seed=9):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model = net(seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), 0.3)
    model, optimizer, loader = wrap(model, optimizer, batches())
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(may="refused")
def loaded_by_assigning(wrap):
    """load_state_dict(assign=True): the parameters are other tensors than wrap knows."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for i, (x, y) in enumerate(loader):
        if i == 5:
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(may="refused")
def optimizer_made_anew(wrap):
    """Two phases: the second makes an optimizer of its own, and wrap does not know it."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for i, (x, y) in enumerate(loader):
        if i == 6:
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def state_cleared(wrap):
    """The optimizer forgets on the way: its state is emptied."""
    model = net()
    model, optimizer, loader = wrap(model, torch.optim.AdamW(model.parameters(), 0.01), batches())
    for i, (x, y) in enumerate(loader):
        if i == 6:
            optimizer.state.clear()
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(may="refused", says="lr|rate|group|rank|differ")
def rate_of_the_rank(wrap):
    """Every rank computes a rate of its own (from its own time, or its own loss)."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for i, (x, y) in enumerate(loader):
        optimizer.param_groups[0]["lr"] = 0.1 if i < 5 else 0.1 / (1 + rank())
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model
