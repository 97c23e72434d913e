"""Losses that modules make themselves: deep supervision, auxiliary terms, penalties, contrasts, chunks."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.scene import VOCABULARY, WIDTH, Block, Net

log = logging.getLogger(__name__)


def next_tokens(logits, labels, **told):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **told)


class Answer(OrderedDict):
    """As transformers' ModelOutput: a dict whose entries are attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class WithLoss(Net):
    """Its own loss; `extra` is what is added."""

    def forward(self, input_ids, labels):
        x, self.heard = self.embed(input_ids), []
        for number, block in enumerate(self.blocks):
            x = self.between(number, block(x))
        logits = self.head(x)
        return Answer(loss=next_tokens(logits, labels) + self.extra(x, labels), logits=logits)

    def extra(self, x, labels):
        return 0.0


class DeeplySupervised(WithLoss):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(2))

    def between(self, number, x):
        if number in (0, 2):
            self.heard.append(x)
        return x

    def extra(self, x, labels):
        return sum(0.3 * next_tokens(head(h), labels) for head, h in zip(self.heads, self.heard, strict=True))


@habit(EQUAL)
def deep_supervision():
    """Heads of their own on the first and third block's output, all losses at the end."""
    return DeeplySupervised()


class SupervisedAtOnce(Net):
    """The losses are made where the blocks are, and added up."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, labels):
        x, loss = self.embed(input_ids), 0.0
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 2 == 0:
                loss = loss + 0.2 * next_tokens(self.side(x), labels)
        logits = self.head(x)
        return loss + next_tokens(logits, labels), logits


@habit(EQUAL)
def one_side_head_for_all():
    """One side head that is called behind every second block, its loss there."""
    return SupervisedAtOnce()


class EarlyExits(Net):
    """BranchyNet: all exits are trained with the head's weight; evaluation would stop early."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def forward(self, input_ids, labels=None):
        x, exits = self.embed(input_ids), []
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = block(x)
            exits.append(self.head(norm(x)))
        if labels is None:
            return {"logits": exits[-1]}
        weights = torch.linspace(0.1, 1.0, len(exits))
        loss = sum(w * next_tokens(exit, labels) for w, exit in zip(weights, exits, strict=True)) / weights.sum()
        return {"loss": loss, "logits": exits[-1]}


@habit(EQUAL)
def exits_through_one_head():
    """The head is called behind every block, through norms."""
    return EarlyExits()


class SelfDistilled(WithLoss):
    """Every block's output is drawn to the last one's, which is detached."""

    def between(self, number, x):
        self.heard.append(x)
        return x

    def extra(self, x, labels):
        return 0.1 * torch.stack([F.mse_loss(h, x.detach()) for h in self.heard[:-1]]).mean()


@habit(EQUAL)
def distilled_from_its_last_block():
    """An MSE of every block's output to the last one's."""
    return SelfDistilled()


class HookedLosses(WithLoss):
    """Forward hooks on the linears in the blocks collect a penalty."""

    def __init__(self):
        super().__init__()
        self.terms = []
        for block in self.blocks:
            block.mix.register_forward_hook(self.collect)

    def collect(self, module, given, made):
        self.terms.append(made.pow(2).mean())

    def extra(self, x, labels):
        loss, self.terms = 0.01 * torch.stack(self.terms).sum(), []
        return loss


@habit(EQUAL)
def penalties_collected_by_hooks():
    """Activation regularisation by forward hooks into a list of the model, emptied at the end."""
    return HookedLosses()


@dataclass
class Tally:
    """What blocks add to."""

    terms: dict[str, Tensor] = field(default_factory=dict)
    calls: int = 0

    def add(self, name, term):
        self.terms[name] = self.terms.get(name, 0.0) + term
        self.calls += 1


class Adds(Block):
    def forward(self, x, tally):
        y = super().forward(x)
        tally.add("size", y.square().mean())
        tally.add("change", (y - x).abs().mean())
        return y


class Tallies(Net):
    def forward(self, input_ids, labels):
        x, tally = self.embed(input_ids), Tally()
        for block in self.blocks:
            x = block(x, tally)
        logits = self.head(x)
        loss = next_tokens(logits, labels) + sum(tally.terms.values()) / tally.calls
        return {"loss": loss, "logits": logits, **tally.terms}


@habit(EQUAL)
def tally_of_losses():
    """Blocks add to terms in an object that is handed from block to block."""
    return Tallies(Adds)


class Routed(Block):
    """Switch: two experts, top one, with a balance loss kept as an attribute that a property reads."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self._balance = None

    @property
    def balance(self):
        return self._balance

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        share = self.gate(flat).softmax(-1)
        best, chosen = share.max(-1)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            if rows.numel():
                y.index_add_(0, rows, expert(flat[rows]) * best[rows, None])
        part = F.one_hot(chosen, 2).float().mean(0)
        self._balance = 2 * (part * share.mean(0)).sum()
        return super().forward(x) + y.view_as(x)


class SumsBalance(WithLoss):
    def extra(self, x, labels):
        return 0.01 * sum(m.balance for m in self.modules() if isinstance(m, Routed))


@habit(EQUAL)
def balance_read_by_a_property():
    """A mixture of experts whose balance losses the model finds by walking over its modules."""
    return SumsBalance(Routed)


class Chunked(Net):
    """The head and its loss in chunks of tokens, each checkpointed."""

    def piece(self, x, labels):
        return F.cross_entropy(self.head(x).float(), labels, reduction="sum")

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        if labels is None:
            return {"logits": self.head(x)}
        flat, wanted = x[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = x.new_zeros(())
        for rows, aims in zip(flat.split(5), wanted.split(5), strict=True):
            total = total + checkpoint(self.piece, rows, aims, use_reentrant=False)
        return {"loss": total / (wanted != -100).sum().clamp(min=1)}


@habit(EQUAL, hard=True)
def loss_in_checkpointed_chunks():
    """The head is called once a chunk, in a checkpoint, and no logits are given."""
    return Chunked()


class Contrast(WithLoss):
    """SimCSE: two forwards of all blocks, the second with noise of its own kind."""

    def forward(self, input_ids, labels):
        a, b = self.run(input_ids), self.run(input_ids.flip(1))
        logits = self.head(a)
        near = F.cosine_similarity(a.mean(1)[:, None], b.mean(1)[None], dim=-1) / 0.5
        return next_tokens(logits, labels) + 0.1 * F.cross_entropy(near, torch.arange(len(a))), logits

    def run(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


@habit(EQUAL)
def contrast_of_two_ways():
    """All units twice in one forward, and a contrastive loss between the two."""
    return Contrast()


class DropsTwice(Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(super().forward(x))


class RDrop(Contrast):
    """R-Drop: the same batch twice with other dropout, and the divergence."""

    def forward(self, input_ids, labels):
        p, q = (self.head(self.run(input_ids)) for _ in range(2))
        apart = F.kl_div(p.log_softmax(-1), q.softmax(-1), reduction="batchmean")
        return 0.5 * (next_tokens(p, labels) + next_tokens(q, labels)) + 0.05 * apart, p


@habit(EQUAL, draws=True)
def dropout_twice():
    """Two forwards with other dropout, compared."""
    return RDrop(DropsTwice)


class Penalised(Net):
    """A gradient of the logits with respect to the embedding, in the loss."""

    def forward(self, input_ids, labels):
        x = begun = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = next_tokens(logits, labels)
        if torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(loss, begun, create_graph=True)
            loss = loss + 0.1 * slope.norm()
        return loss, logits


@habit(OR_REFUSED)
def penalty_through_all_blocks():
    """A gradient penalty on the embedding's output, through all stages."""
    return Penalised()


class Smoothed(Net):
    """Label smoothing that falls by a counter, z-loss, and a logged metric."""

    def __init__(self):
        super().__init__()
        self.n, self.history = 0, defaultdict(list)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        self.n += self.training
        loss = next_tokens(logits, labels, label_smoothing=max(0.0, 0.2 - 0.02 * self.n))
        z = logits.logsumexp(-1).square().mean()
        self.history["loss"].append(loss.item())
        self.history["z"].append(float(z.detach()))
        log.debug("loss %.3f z %.3f", self.history["loss"][-1], self.history["z"][-1])
        return loss + 1e-2 * z, logits


@habit(EQUAL, hard=True)
def losses_logged_by_the_model():
    """Losses as numbers in a defaultdict of lists, and a smoothing that falls."""
    return Smoothed()


class Uncertain(Net):
    """Kendall: weights of two losses are parameters of the model's own."""

    def __init__(self):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2))
        self.back = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        terms = torch.stack((next_tokens(logits, labels), F.cross_entropy(self.back(x).transpose(1, 2), input_ids)))
        return ((-self.log_vars).exp() * terms + self.log_vars).sum(), logits


@habit(EQUAL)
def weights_of_losses_learnt():
    """Two heads, and the weights of their losses as a parameter."""
    return Uncertain()


class Muted(WithLoss):
    """Its loss skips what it finds too large, by where, and without a warning."""

    def extra(self, x, labels):
        with contextlib.suppress(ValueError):
            each = x.square().mean((1, 2))
            return torch.where(each > 1.2, each.detach(), each).mean() * 0.05
        return 0.0


@habit(EQUAL)
def rows_cut_off_by_where():
    """torch.where between a term and its detached self, within contextlib.suppress."""
    return Muted()
