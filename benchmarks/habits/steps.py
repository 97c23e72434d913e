"""When a loop zeroes, calls backward, and steps: in which order, how often, and what it leaves out."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from loops.habit import habit
from loops.scene import batches, cross_entropy, dataset, net, pairs, rank, sgd


@habit(must="equal")
def plain(wrap):
    """The loop of every tutorial."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def zero_after_step(wrap):
    """Gradients are zeroed behind the step."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        cross_entropy(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@habit(must="equal")
def zero_between_forward_and_backward(wrap):
    """Gradients are zeroed between forward and backward."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        loss = cross_entropy(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@habit(must="equal")
def zero_by_the_model(wrap):
    """The model zeroes, not the optimizer (minGPT, dcgan)."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        loss = cross_entropy(model, x, y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return model


@habit(must="equal")
def zero_by_the_first_optimizer(wrap):
    """A name of the optimizer from before wrap is used to zero."""
    model = net()
    first = sgd(model)
    model, optimizer, loader = wrap(model, first, batches())
    for x, y in loader:
        first.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def step_by_the_first_optimizer(wrap):
    """A name of the optimizer from before wrap does everything: what wrap returns is dropped."""
    model = net()
    optimizer = sgd(model)
    model, _, loader = wrap(model, optimizer, batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def zero_to_zeros(wrap):
    """set_to_none=False: every gradient stays a tensor."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def zero_by_hand(wrap):
    """param.grad = None for every parameter."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        for param in model.parameters():
            param.grad = None
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def zero_some(wrap):
    """One layer's gradient is thrown away before the step, another is never zeroed."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, lr=0.01), batches())
    for x, y in loader:
        for param in model[:4].parameters():
            param.grad = None
        cross_entropy(model, x, y).backward()
        model[2].weight.grad = None
        optimizer.step()
    return model


@habit(must="equal")
def never_zeroed(wrap):
    """Nobody zeroes: gradients add up over all steps."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, lr=0.01), batches())
    for x, y in loader:
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal", steps=6)
def accumulate_in_the_loop(wrap):
    """A step every second batch, and wrap is not told."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for i, (x, y) in enumerate(loader):
        (cross_entropy(model, x, y) / 2).backward()
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


@habit(must="equal", steps=6)
def accumulate_told(wrap):
    """accumulate=2: two backwards, one exchange."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(), accumulate=2)
    for i, (x, y) in enumerate(loader):
        (cross_entropy(model, x, y) / 2).backward()
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


@habit(must="equal")
def accumulate_short_group(wrap):
    """accumulate=2 with an odd number of batches: what is left over goes into the next epoch's first step."""
    model, data = net(), batches(count=7)
    model, optimizer, loader = wrap(model, sgd(model), data, accumulate=2)
    for _epoch in range(4):
        for i, (x, y) in enumerate(loader):
            (cross_entropy(model, x, y) / 2).backward()
            if (i + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


@habit(must="equal")
def accumulate_last_group_steps(wrap):
    """accumulate=2, and a step at the last batch whatever its number (the Trainer's way)."""
    model, data = net(), batches(count=5)
    model, optimizer, loader = wrap(model, sgd(model), data, accumulate=2)
    for _epoch in range(4):
        for i, (x, y) in enumerate(loader):
            (cross_entropy(model, x, y) / 2).backward()
            if (i + 1) % 2 == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return model


@habit(must="equal", steps=6, like=accumulate_in_the_loop)
def accumulate_without_sync(wrap):
    """DDP's way: no_sync around all backwards but a step's last."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for i, (x, y) in enumerate(loader):
        if (i + 1) % 2:
            with model.no_sync():
                (cross_entropy(model, x, y) / 2).backward()
        else:
            (cross_entropy(model, x, y) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@habit(must="equal")
def two_backwards(wrap):
    """An auxiliary loss has a backward of its own, and a forward of its own."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        (0.1 * model(2 * x).square().mean()).backward()
        optimizer.step()
    return model


@habit(must="equal")
def two_backwards_of_one_graph(wrap):
    """retain_graph: two losses of one forward."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        out = model(x)
        optimizer.zero_grad()
        F.cross_entropy(out, y).backward(retain_graph=True)
        (0.01 * out.square().mean()).backward()
        optimizer.step()
    return model


@habit(must="equal")
def backward_given_up(wrap):
    """A batch whose gradient is thrown away, after its backward."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), itertools.chain(batches(), batches(seed=1)))
    for i, (x, y) in enumerate(loader):
        cross_entropy(model, x, y).backward()
        if i % 3 == 1:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    return model


@habit(must="equal", steps=8)
def batch_skipped(wrap):
    """A batch that is passed over before its forward."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for i, (x, y) in enumerate(loader):
        if i % 3 == 2:
            continue
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def forward_without_backward(wrap):
    """A forward with gradients whose loss is never used."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        _ = cross_entropy(model, -x, y)
        loss.backward()
        optimizer.step()
    return model


@habit(must="equal")
def break_at_the_top(wrap):
    """Every epoch ends in its middle: `if i >= n: break` as the loop's first line."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for _epoch in range(4):
        for i, (x, y) in enumerate(loader):
            if i >= 3:
                break
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
    return model


@habit(must="equal")
def break_after_backward(wrap):
    """The loop is left between backward and step, and entered again."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for _epoch in range(4):
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            if i == 3:
                break
            optimizer.step()
    return model


@habit(must="equal")
def step_before_backward(wrap):
    """The step of the last batch comes first in the loop."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.step()
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
    optimizer.step()
    return model


@habit(must="equal")
def two_steps_of_one_gradient(wrap):
    """Two steps for every backward."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, lr=0.05), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        optimizer.step()
    return model


@habit(must="equal", steps=0)
def no_optimizer_step(wrap):
    """Gradient descent by hand: the optimizer is there for wrap alone."""
    model = net()
    model, _, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        cross_entropy(model, x, y).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        model.zero_grad()
    return model


@habit(must="equal")
def skipped_where_the_norm_is_not_finite(wrap):
    """A step is left out where the norm of the gradient, which all ranks share, is not finite."""
    model, data = net(), batches(count=24)
    data[3][0][6, 2] = float("nan")  # in the rows of one rank
    model, optimizer, loader = wrap(model, sgd(model, lr=0.02), data)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
    return model


@habit(may="refused", says="rank|finite")
def skipped_where_the_loss_is_not_finite(wrap):
    """`if not isfinite(loss): continue` before backward: one rank's rows hold a NaN, so it alone goes on."""
    model, data = net(), batches()
    data[1][0][0, 2] = float("nan")
    model, optimizer, loader = wrap(model, sgd(model), data, timeout_s=5.0)
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        if not torch.isfinite(loss):
            continue
        loss.backward()
        optimizer.step()
    return model


@habit(must="equal")
def evaluated_in_between(wrap):
    """Every rank evaluates all held-out rows after each step."""
    model, held_out = net(), batches(seed=3, count=2)
    losses = []
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            losses.append(sum(cross_entropy(model, *batch) for batch in held_out))
        model.train()
    return model, losses


def short_at_the_end():
    """The last batch has fewer rows than three ranks."""
    data = batches(rows=7)
    data[-1] = tuple(part[:2] for part in data[-1])
    return data


@habit(must="equal")
def evaluated_on_the_wrapped_loader(wrap):
    """The training rows themselves are evaluated, in the middle of an epoch, with the loader that wrap gave."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), short_at_the_end())
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        if i % 3 == 0:
            with torch.no_grad():
                _ = sum(cross_entropy(model, *batch) for batch in loader)
        loss.backward()
        optimizer.step()
    return model


@habit(must="equal")
def evaluated_on_the_wrapped_loader_after_a_step(wrap):
    """The same between two steps."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), short_at_the_end())
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        if i % 3 == 0:
            with torch.no_grad():
                _ = sum(cross_entropy(model, *batch) for batch in loader)
    return model


@habit(must="equal")
def evaluated_on_the_wrapped_loader_and_counted(wrap):
    """The same with a sum divided by the rows."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), short_at_the_end())
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / len(x)
        if i % 3 == 0:
            with torch.no_grad():
                _ = sum(cross_entropy(model, *batch) for batch in loader)
        loss.backward()
        optimizer.step()
    return model


@habit(must="equal")
def evaluated_on_the_wrapped_loader_and_shuffled(wrap):
    """The same with a shuffled DataLoader."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), DataLoader(dataset(86), 7, shuffle=True))
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        if i % 3 == 0:
            with torch.no_grad():
                _ = sum(cross_entropy(model, *batch) for batch in loader)
    return model


@habit(must="equal")
def evaluated_on_one_rank(wrap):
    """Rank 0 evaluates alone."""
    model, held_out = net(), batches(seed=3, count=2)
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        if rank() == 0:
            with torch.no_grad():
                _ = sum(cross_entropy(model, *batch).item() for batch in held_out)
    return model


@habit(must="equal")
def input_gradient_on_one_rank(wrap):
    """Rank 0 draws a saliency map: a gradient of the input alone."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        if rank() == 0:
            seen = x.clone().requires_grad_()
            torch.autograd.grad(model(seen).max(1).values.sum(), seen)
    return model


@habit(must="equal")
def adversarial_rows(wrap):
    """FGSM: the gradient of the input makes the rows that are trained."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        seen = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(seen), y, reduction="sum"), seen)
        optimizer.zero_grad()
        cross_entropy(model, x + 0.1 * slope.sign(), y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def adversarial_rows_by_backward(wrap):
    """The same with backward: it fills the parameters' gradients too, which are zeroed."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        seen = x.clone().requires_grad_()
        F.cross_entropy(model(seen), y, reduction="sum").backward()
        optimizer.zero_grad()
        cross_entropy(model, x + 0.1 * seen.grad.sign(), y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def anomaly_detection(wrap):
    """Under torch.autograd.detect_anomaly."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), pairs())
    with torch.autograd.detect_anomaly(check_nan=False):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return model
