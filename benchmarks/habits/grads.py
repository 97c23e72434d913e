"""What a loop does to gradients between backward and step, or how it makes them at all."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from loops.habit import habit
from loops.scene import batches, cross_entropy, net, pairs, rank, seeded, sgd


@habit(must="equal")
def clip_grad_norm(wrap):
    """clip_grad_norm_, well below the norms that come."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return model


@habit(must="equal", like=clip_grad_norm)
def clip_told(wrap):
    """max_grad_norm=0.05 in place of clip_grad_norm_."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(), max_grad_norm=0.05)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def clip_grad_value(wrap):
    """clip_grad_value_."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return model


@habit(must="equal")
def clip_per_layer(wrap):
    """Each layer is clipped by its own norm."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        for layer in model:
            nn.utils.clip_grad_norm_(layer.parameters(), 0.02, norm_type=float("inf"))
        optimizer.step()
    return model


@habit(must="equal")
def norms_logged(wrap):
    """The norm of every gradient goes to the log; so does the cosine to the gradient before."""
    model, log, before = net(), [], None
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        now = nn.utils.parameters_to_vector(p.grad for p in model.parameters())
        log += [p.grad.norm() for p in model.parameters()]
        log += [] if before is None else [F.cosine_similarity(now, before, dim=0)]
        before = now
        optimizer.step()
    return model, log


@habit(must="equal")
def noise_added(wrap):
    """Gradient noise from a generator that every rank seeds alike."""
    model, draw = net(), seeded(9)
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        for param in model.parameters():
            param.grad += 0.01 * torch.randn(param.shape, generator=draw)
        optimizer.step()
    return model


@habit(must="equal")
def centralized(wrap):
    """Gradient centralization, and weight decay by hand."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        for param in model.parameters():
            if param.dim() > 1:
                param.grad.sub_(param.grad.mean(1, keepdim=True))
            param.grad.add_(param.detach(), alpha=0.01)
        optimizer.step()
    return model


@habit(must="equal")
def replaced(wrap):
    """The gradient is replaced by another tensor: its sign."""
    model = net()
    model, optimizer, loader = wrap(model, torch.optim.SGD(model.parameters(), 0.01), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        for param in model.parameters():
            param.grad = (param.grad * 1e3).tanh()
        optimizer.step()
    return model


@habit(must="equal")
def projected(wrap):
    """PCGrad: two losses' gradients are kept, projected on each other, and added."""
    model = net()
    params = list(model.parameters())
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        out, kept = model(x), []
        for loss in (F.cross_entropy(out, y), out.square().mean()):
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            kept.append([p.grad.clone() for p in params])
        for param, a, b in zip(params, *kept, strict=True):
            against = (a * b).sum().clamp(max=0)
            param.grad = a + b - against / b.square().sum() * b
        optimizer.step()
    return model


@habit(must="equal")
def kept_as_they_are(wrap):
    """Two losses' gradients are kept, without a copy, and the second counts twice."""
    model = net()
    params = list(model.parameters())
    model, optimizer, loader = wrap(model, sgd(model, 0.05), batches(rows=7))
    for x, y in loader:
        out, kept = model(x), []
        for loss in (F.cross_entropy(out, y), out.square().mean()):
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            kept.append([p.grad for p in params])
        for param, a, b in zip(params, *kept, strict=True):
            param.grad = a + 2 * b
        optimizer.step()
    return model


@habit(must="equal")
def kept_in_parts(wrap):
    """Rows, views and a sum of the gradients of the step before are kept, and compared with those of this one."""
    model, log, before = net(), [], None
    params = list(model.parameters())
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        now = params[0].grad[0], params[2].grad.view(-1), params[4].grad.T, params[1].grad.detach()
        if before is not None:
            log += [F.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in zip(now, before, strict=True)]
        before = now
        optimizer.step()
    return model, log


@habit(must="equal")
def kept_and_added_to(wrap):
    """`.grad` is kept and not dropped: a second backward adds to what is kept; zeros go into it."""
    model, log = net(), []
    params = list(model.parameters())
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    kept = []
    for x, y in loader:
        cross_entropy(model, x, y).backward()
        kept = kept or [p.grad for p in params]
        model(x).square().mean().backward()
        log += [k.norm() for k in kept]
        assert all(p.grad is k for p, k in zip(params, kept, strict=True))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model, log


@habit(must="equal", steps=6)
def kept_amid_a_group(wrap):
    """accumulate=2, and the gradients of the step before are kept without a copy."""
    model, log, before = net(), [], None
    params = list(model.parameters())
    model, optimizer, loader = wrap(model, sgd(model), batches(), accumulate=2)
    for i, (x, y) in enumerate(loader):
        (cross_entropy(model, x, y) / 2).backward()
        if i % 2:
            now = [p.grad for p in params]
            log += [(a * b).sum() for a, b in zip(now, before, strict=True)] if before else []
            before = now
            optimizer.step()
            optimizer.zero_grad()
    return model, log


@habit(must="equal")
def grad_scaler(wrap):
    """GradScaler: scale, unscale_, clip, step, update."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model, x, y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return model


@habit(must="equal")
def grad_scaler_without_unscale(wrap):
    """GradScaler: step alone unscales; the scale grows on the way."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model, scaler.get_scale()


@habit(must="equal")
def grad_scaler_skips(wrap):
    """GradScaler: the rows of one rank overflow once, and all ranks leave that step out and halve the scale."""
    model, scaler, data = net(), torch.amp.GradScaler("cpu", init_scale=1024.0), batches(count=24)
    data[2][0][7, 0] = float("inf")
    model, optimizer, loader = wrap(model, sgd(model, lr=0.02), data)
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model, scaler.get_scale()


@habit(must="equal")
def grad_scaler_told(wrap):
    """scaler= in wrap."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer, loader = wrap(model, sgd(model), batches(), scaler=scaler)
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model, scaler.get_scale()


@habit(must="equal")
def gradient_penalty(wrap):
    """A penalty on the slope at the input: autograd.grad with create_graph, then one backward."""
    model = net(outputs=1)
    model, optimizer, loader = wrap(model, sgd(model, lr=0.02), pairs(outputs=1))
    for x, y in loader:
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (F.mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
    return model


@habit(must="equal")
def force_matching(wrap):
    """Energies and forces: the loss is of the gradient at the input, summed over the parts of a row."""
    model = net(outputs=1)
    model, optimizer, loader = wrap(model, sgd(model, lr=0.02), pairs(outputs=6))
    for x, force in loader:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        (slope + force).square().sum(1).mean().backward()
        optimizer.step()
    return model


@habit(may="refused")
def backward_with_create_graph(wrap):
    """loss.backward(create_graph=True), and a second backward of the gradient's norm."""
    model = net(outputs=1)
    model, optimizer, loader = wrap(model, sgd(model, lr=0.02), pairs(outputs=1))
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward(create_graph=True)
        (0.01 * sum(p.grad.square().sum() for p in model.parameters())).backward()
        optimizer.step()
        model.zero_grad()  # or the graph keeps itself alive
    return model


@habit(may="refused")
def gradient_by_autograd_grad(wrap):
    """autograd.grad of the parameters, put where backward would put it."""
    model = net()
    params = list(model.parameters())
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        found = torch.autograd.grad(cross_entropy(model, x, y), params)
        for param, grad in zip(params, found, strict=True):
            param.grad = grad
        optimizer.step()
    return model


@habit(may="refused")
def gradient_by_torch_func(wrap):
    """torch.func.grad of a functional call, put where backward would put it."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        held = {name: param.detach() for name, param in model.named_parameters()}
        loss_of = lambda held, x=x, y=y: F.cross_entropy(torch.func.functional_call(model, held, x), y)  # noqa: E731
        for name, grad in torch.func.grad(loss_of)(held).items():
            model.get_parameter(name).grad = grad
        optimizer.step()
    return model


@habit(may="refused")
def hook_that_clamps(wrap):
    """param.register_hook: it sees the gradient of this rank's rows, and what it does is not linear."""
    model = net()
    for param in model.parameters():
        param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal", steps=6)
def hook_that_clamps_amid_a_group(wrap):
    """accumulate=2: the hook sees each of the two gradients."""
    model, norms = net(), []
    for param in model.parameters():
        param.register_hook(lambda grad: norms.append(grad.norm()) or grad.clamp(-0.01, 0.01))
    model, optimizer, loader = wrap(model, sgd(model), batches(), accumulate=2)
    for i, (x, y) in enumerate(loader):
        cross_entropy(model, x, y).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model, sum(norms), len(norms)


@habit(must="equal", steps=6)
def hook_that_clamps_without_sync(wrap):
    """The same with no_sync, where there is one, and a hook on one parameter alone."""
    model = net()
    model[2].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for i, (x, y) in enumerate(loader):
        with nullcontext() if i % 2 else getattr(model, "no_sync", nullcontext)():
            cross_entropy(model, x, y).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


@habit(may="refused", says="on all ranks or on none", steps=6)
def hook_on_rank_0_amid_a_group(wrap):
    """accumulate=2, and rank 0 alone has a hook that logs."""
    model, seen = net(), []
    if rank() == 0:
        model[2].weight.register_hook(lambda grad: seen.append(grad.norm()))
    model, optimizer, loader = wrap(model, sgd(model), batches(), accumulate=2)
    for i, (x, y) in enumerate(loader):
        cross_entropy(model, x, y).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


@habit(may="refused")
def hook_after_wrap(wrap):
    """param.register_hook behind wrap."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for param in model.parameters():
        param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(may="refused")
def post_hook_that_clamps(wrap):
    """register_post_accumulate_grad_hook before wrap: it edits .grad before the mean is there."""

    def clamp(param):
        param.grad.clamp_(-0.01, 0.01)

    model = net()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(clamp)
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(may="refused", steps=0)
def step_inside_backward(wrap):
    """An optimizer for every parameter, stepped by a hook while backward goes on."""
    model = net()
    own = {param: torch.optim.SGD([param], 0.1) for param in model.parameters()}
    model, _, loader = wrap(model, list(own.values()), batches())

    def step(param):
        own[param].step()
        own[param].zero_grad()

    for param in own:
        param.register_post_accumulate_grad_hook(step)
    for x, y in loader:
        cross_entropy(model, x, y).backward()
    return model


@habit(must="equal")
def module_hook(wrap):
    """register_full_backward_hook, to look at what passes."""
    model, seen = net(), []
    model[2].register_full_backward_hook(lambda module, into, out: seen.append(out[0].norm()))
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    assert len(seen) == len(loader)
    return model


@habit(must="equal")
def backward_of_some_inputs(wrap):
    """loss.backward(inputs=[...]): the other parameters have no gradient."""
    model = net()
    model, optimizer, loader = wrap(model, torch.optim.AdamW(model.parameters(), 0.01), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward(inputs=list(model[2:].parameters()))
        optimizer.step()
    return model


@habit(must="equal")
def a_different_half_each_time(wrap):
    """Alternating: one loss for the first half's parameters, another for the rest."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        F.cross_entropy(out, y).backward(inputs=list(model[:2].parameters()), retain_graph=True)
        out.square().mean().backward(inputs=list(model[2:].parameters()))
        optimizer.step()
    return model


@habit(may="refused")
def backward_of_a_vector(wrap):
    """losses.backward(weights): no scalar says how rows count."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x), y, reduction="none")
        losses.backward(torch.ones_like(losses) / len(losses))
        optimizer.step()
    return model


@habit(may="refused")
def backward_of_two_roots(wrap):
    """torch.autograd.backward([a, b])."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        torch.autograd.backward([F.cross_entropy(out, y), 0.1 * out.square().mean()])
        optimizer.step()
    return model


@habit(may="refused")
def outputs_given_gradients(wrap):
    """The chain is cut by hand: the loss's gradient at the output is passed to out.backward(grad)."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(), loss="mean")
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        cut = out.detach().requires_grad_()
        F.cross_entropy(cut, y).backward()
        out.backward(cut.grad)
        optimizer.step()
    return model
