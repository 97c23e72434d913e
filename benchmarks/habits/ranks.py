"""What ranks do unlike each other, and what they ask of one another."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.nn.functional as F

from loops.habit import habit
from loops.scene import batches, cross_entropy, net, rank, ranks, sgd


def trained(wrap, model, data, loss_of=cross_entropy, **settings):
    """The plain loop."""
    model, optimizer, loader = wrap(model, sgd(model), data, **settings)
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return model


def is_last():
    return ranks() > 1 and rank() == ranks() - 1


@habit(must="equal")
def saved_by_rank_0(wrap):
    """gossamer.rank() says who saves, gossamer.ranks() how many there are."""
    import gossamer  # here, as pages are read before a launcher's variables are set

    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    assert (gossamer.rank(), gossamer.ranks()) == (rank(), ranks())
    with tempfile.TemporaryDirectory() as folder:
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
            if gossamer.rank() == 0:
                torch.save(model.state_dict(), os.path.join(folder, "last.pt"))
    return model


@habit(may="refused", says="rank")
def one_rank_stops_early(wrap):
    """The last rank leaves the loop after five steps; the others go on."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(), timeout_s=5.0)
    for i, (x, y) in enumerate(loader):
        if i == 5 and is_last():
            break
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(may="refused", says="rank")
def one_rank_skips_a_step(wrap):
    """The last rank backs out of its sixth step, and comes back."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(), timeout_s=5.0)
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        if not (i == 5 and is_last()):
            optimizer.step()
    return model


@habit(may="refused", says="rank")
def one_rank_skips_a_backward(wrap):
    """The last rank passes over its sixth batch."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(), timeout_s=5.0)
    for i, (x, y) in enumerate(loader):
        if i == 5 and is_last():
            continue
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(may="refused", says="rank")
def one_rank_clips_by_itself(wrap):
    """The last rank zeroes a gradient before its step, by a test of its own loss: the ranks part."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        if i == 5 and is_last():
            optimizer.zero_grad()
        optimizer.step()
    return model


@habit(may="refused", says="rank")
def one_more_backward_on_rank_0(wrap):
    """Rank 0 alone calls backward twice on the sixth batch."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(), timeout_s=5.0)
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        if i == 5 and ranks() > 1 and rank() == 0:
            (0.1 * model(x).square().mean()).backward()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(may="refused", says="rank|shape|differ|model")
def unequal_models(wrap):
    """The last rank's model is wider."""
    return trained(wrap, net(outputs=5 if is_last() else 4), batches(), timeout_s=5.0)


@habit(may="refused", says="rank|differ|setting|loss|accumulate")
def unequal_settings(wrap):
    """The ranks call wrap with different settings."""
    return trained(wrap, net(), batches(), loss="sum" if is_last() else "mean", timeout_s=5.0)


@habit(may="refused")
def decided_by_the_rank_s_loss(wrap):
    """Curriculum by one's own loss: a rank whose loss is large takes its square root."""

    def loss_of(model, x, y):
        loss = cross_entropy(model, x, y)
        return loss.sqrt() if loss > 1.4 else loss

    return trained(wrap, net(), batches(), loss_of, timeout_s=5.0)


@habit(must="equal")
def folds(wrap):
    """Cross-validation: a new model, optimizer and wrap for each fold, in one process."""
    found = []
    for fold in range(4):
        found.append(trained(wrap, net(seed=fold), batches(seed=fold)))
    return found


@habit(must="equal")
def one_after_the_other(wrap):
    """Pretraining, then fine-tuning: the same model is wrapped again with another optimizer and loader."""
    model = trained(wrap, net(), batches())
    model[0].requires_grad_(False)
    model, optimizer, loader = wrap(model, torch.optim.AdamW(model[2:].parameters(), 0.01), batches(seed=1))
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def compressed(wrap, exchange, **settings):
    """A net large enough that an exchange has something to leave out."""
    model, data = net(), batches(rows=9) * 4
    model, optimizer, loader = wrap(model, sgd(model, 0.02), data, exchange=exchange, **settings)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="alike")
def exchange_auto(wrap):
    """exchange="auto"."""
    return compressed(wrap, "auto")


@habit(must="alike")
def exchange_int4(wrap):
    """Four bits, with error feedback."""
    return compressed(wrap, {"error_feedback": {"two_shot": "int4"}})


@habit(must="alike")
def exchange_topk(wrap):
    """The largest entries, with error feedback."""
    return compressed(wrap, {"error_feedback": {"topk": {"fraction": 0.2}}})


@habit(must="alike")
def exchange_powersgd(wrap):
    """exchange="powersgd"."""
    return compressed(wrap, "powersgd")


@habit(must="alike")
def exchange_int8(wrap):
    """Eight bits, with what a loop may do to gradients."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, 0.02), batches(rows=9) * 4, exchange={"two_shot": "int8"})
    for x, y in loader:
        model.zero_grad()
        (cross_entropy(model, x, y) / 2).backward()
        (cross_entropy(model, -x, y) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model
