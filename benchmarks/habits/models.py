"""What is trained: parameters that are frozen, shared, unused, sparse, cast; buffers; several models."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from loops.habit import habit
from loops.scene import CLASSES, WIDTH, batches, cross_entropy, net, rank, seeded, sgd


def trained(wrap, model, optimizer=None, data=None, loss_of=cross_entropy, **settings):
    """The plain loop."""
    model, optimizer, loader = wrap(model, optimizer or sgd(model), data or batches(), **settings)
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return model


def adamw(model, lr=0.01):
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=0.1)


@habit(must="equal")
def frozen_part(wrap):
    """The first layer is frozen; the optimizer holds the rest."""
    model = net()
    model[0].requires_grad_(False)
    return trained(wrap, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01))


@habit(must="equal")
def made_with_unequal_seeds(wrap):
    """Each rank makes its model with a seed of its own, a frozen layer and a buffer too: rank 0's are meant."""
    model = net(seed=1 + rank())
    model[0].requires_grad_(False)
    model.register_buffer("shift", torch.randn(CLASSES, generator=seeded(rank())))
    return trained(wrap, model, loss_of=lambda model, x, y: F.cross_entropy(model(x) + model.shift, y))


@habit(must="equal")
def unfrozen_on_the_way(wrap):
    """The first layer is frozen at wrap, and trained from the fifth batch on."""
    model = net()
    model[0].requires_grad_(False)
    model, optimizer, loader = wrap(model, adamw(model), batches())
    for i, (x, y) in enumerate(loader):
        if i == 4:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def frozen_on_the_way(wrap):
    """The middle layer is frozen from the fifth batch to the ninth."""
    model = net()
    model, optimizer, loader = wrap(model, adamw(model), batches())
    for i, (x, y) in enumerate(loader):
        model[2].requires_grad_(not 4 <= i < 8)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def unused_parameters(wrap):
    """A layer that no forward uses, under AdamW: without a gradient there is no decay."""
    model = net()
    model.spare = nn.Linear(3, 3)
    return trained(wrap, model, adamw(model), loss_of=lambda model, x, y: F.cross_entropy(model[:5](x), y))


@habit(must="equal")
def used_by_turns(wrap):
    """LayerDrop: every second batch leaves the middle layer out."""
    model, turn = net(), []

    def loss_of(model, x, y):
        turn.append(0)
        return F.cross_entropy(model[4](model[1](model[0](x)) if len(turn) % 2 else model[:4](x)), y)

    return trained(wrap, model, adamw(model), loss_of=loss_of)


@habit(must="equal")
def experts_chosen_by_rows(wrap):
    """Each row chooses one of four experts: one that no row of a rank chose has no gradient there."""
    model = nn.ModuleList([net(seed=i) for i in range(4)])

    def loss_of(model, x, y):
        chosen = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 1.2).long()
        out = torch.zeros(len(x), CLASSES)
        for i, expert in enumerate(model):
            if (chosen == i).any():
                out[chosen == i] = expert(x[chosen == i])
        return F.cross_entropy(out, y)

    return trained(wrap, model, adamw(model), loss_of=loss_of)


@habit(must="equal")
def head_of_the_task(wrap):
    """Two heads, by turns: both losses in one loop, each with its own head's parameters."""
    model = nn.ModuleList([net(), nn.Linear(CLASSES, 3), nn.Linear(CLASSES, 2)])
    model, optimizer, loader = wrap(model, adamw(model), batches())
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model[1 + i % 2](model[0](x)), y % (3 - i % 2)).backward()
        optimizer.step()
    return model


@habit(must="equal")
def tied_weights(wrap):
    """One weight in two places."""
    model = net(inputs=8, outputs=8)
    model[4].weight = model[0].weight
    return trained(wrap, model, loss_of=lambda model, x, y: F.cross_entropy(model(F.pad(x, (0, 2))), y))


@habit(must="equal")
def layer_called_twice(wrap):
    """One layer, three calls of it."""
    return trained(
        wrap, net(), loss_of=lambda m, x, y: F.cross_entropy(m[4](m[2](m[2](m[2](m[1](m[0](x)))).tanh())), y)
    )


@habit(must="equal")
def checkpointed(wrap):
    """Gradient checkpointing, not reentrant."""

    def loss_of(model, x, y):
        return F.cross_entropy(model[4](checkpoint(model[:4], x, use_reentrant=False)), y)

    return trained(wrap, net(), loss_of=loss_of)


@habit(must="equal")
def checkpointed_reentrant(wrap):
    """Gradient checkpointing, reentrant: a backward within backward."""

    def loss_of(model, x, y):
        hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
        return F.cross_entropy(model[4](checkpoint(model[2:4], hidden, use_reentrant=True)), y)

    return trained(wrap, net(), loss_of=loss_of)


@habit(must="equal")
def compiled(wrap):
    """torch.compile, before wrap."""
    return trained(wrap, torch.compile(net(), backend="aot_eager"))


@habit(must="equal")
def compiled_after_wrap(wrap):
    """torch.compile of what wrap returned."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    fast = torch.compile(model, backend="aot_eager")
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(fast, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def compiled_with_its_loss(wrap):
    """torch.compile of the model and its loss together, which is told to be a mean."""
    return compiled_loss(wrap, loss="mean")


@habit(may="refused")
def compiled_with_its_loss_untold(wrap):
    """The same, untold: nobody can look into it."""
    return compiled_loss(wrap)


def compiled_loss(wrap, **settings):
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7), **settings)
    loss_of = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="aot_eager")
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def moving_average(wrap):
    """EMA by deepcopy."""
    model = net()
    average = copy.deepcopy(model)
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return model, average


@habit(must="equal")
def copied_after_wrap(wrap):
    """deepcopy of the wrapped model: rank 0 trains the copy by itself for a while, and throws it away."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        other = copy.deepcopy(model)
        own = sgd(other)
        if rank() == 0:
            cross_entropy(other, x, y).backward()
            own.step()
    return model


@habit(must="equal")
def target_network(wrap):
    """BYOL, DQN: a slow copy of the model makes the targets."""
    model = net()
    target = copy.deepcopy(model).requires_grad_(False)
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    for x, _ in loader:
        optimizer.zero_grad()
        (1 - F.cosine_similarity(model(x), target(-x), dim=-1)).mean().backward()
        optimizer.step()
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
    return model, target


@habit(must="equal")
def averaged_model(wrap):
    """SWA: AveragedModel from the fourth step on."""
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        if i > 3:
            average.update_parameters(model)
    return model, average


@habit(must="equal")
def two_models(wrap):
    """A GAN: two models, two optimizers, three backwards, one wrap."""
    draw = seeded(4)
    maker, judge = net(inputs=3, outputs=WIDTH), net(seed=2, outputs=1)
    data = [(x, torch.randn(len(x), 3, generator=draw)) for x, _ in batches(rows=7)]
    (maker, judge), (o_maker, o_judge), loader = wrap([maker, judge], [sgd(maker, 0.02), sgd(judge, 0.02)], data)
    for x, noise in loader:
        judge.zero_grad()
        F.softplus(-judge(x)).mean().backward()
        made = maker(noise)
        F.softplus(judge(made.detach())).mean().backward()
        o_judge.step()
        maker.zero_grad()
        F.softplus(-judge(made)).mean().backward()
        o_maker.step()
    return maker, judge


@habit(must="equal")
def two_wraps(wrap):
    """The same with a wrap for each model, one of them without a loader (WGAN: weights are clipped through .data)."""
    draw = seeded(4)
    maker, judge = net(inputs=3, outputs=WIDTH), net(seed=2, outputs=1)
    data = [(x, torch.randn(len(x), 3, generator=draw)) for x, _ in batches()]
    maker, o_maker, loader = wrap(maker, sgd(maker, 0.02), data)
    judge, o_judge, _ = wrap(judge, sgd(judge, 0.02))
    for x, noise in loader:
        o_judge.zero_grad()
        (judge(maker(noise).detach()).mean() - judge(x).mean()).backward()
        o_judge.step()
        for param in judge.parameters():
            param.data.clamp_(-0.3, 0.3)
        o_maker.zero_grad()
        (-judge(maker(noise)).mean()).backward()
        o_maker.step()
    return maker, judge


@habit(must="equal")
def batch_norm_of_all(wrap):
    """BatchNorm with batch_norm="all": statistics of the whole batch; buffers too."""
    model = nn.Sequential(net(outputs=5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    return trained(wrap, model, data=batches(rows=9), batch_norm="all")


@habit(must="equal")
def batch_norm_of_images(wrap):
    """BatchNorm2d, batch_norm="all", evaluated in between with its running statistics."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, CLASSES))
    losses, held_out = [], torch.randn(5, 1, 4, 4, generator=seeded(2))
    draw = seeded(0)
    data = [(torch.randn(9, 1, 4, 4, generator=draw), y) for _, y in batches(rows=9)]
    model, optimizer, loader = wrap(model, sgd(model), data, batch_norm="all")
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        model.eval()
        losses.append(model(held_out).detach())
        model.train()
    return model, losses


@habit(must="alike", says="[Bb]atch")
def batch_norm_of_each_rank(wrap):
    """BatchNorm by default: statistics of each rank's rows. It is said, and the ranks hold the same model."""
    model = nn.Sequential(net(outputs=5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    return trained(wrap, model, data=batches(rows=32)).parameters()


@habit(must="equal")
def batch_norm_in_eval(wrap):
    """Fine-tuning with frozen BatchNorm: its module is in eval, its weights are trained."""
    model = nn.Sequential(net(outputs=5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    model[1].eval()
    return trained(wrap, model)


@habit(must="equal")
def normed(wrap):
    """LayerNorm, GroupNorm, RMSNorm, InstanceNorm without statistics: each row by itself."""
    torch.manual_seed(3)
    norms = [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)]
    return trained(wrap, nn.Sequential(nn.Linear(WIDTH, 8), *norms, nn.Linear(8, CLASSES)))


@habit(must="equal")
def buffers_of_the_model(wrap):
    """Buffers that count steps and follow the weights."""
    model = net()
    model.register_buffer("calls", torch.zeros((), dtype=torch.long))
    model.register_buffer("slow", model[0].weight.detach().clone())

    def loss_of(model, x, y):
        model.calls += 1
        model.slow.lerp_(model[0].weight.detach(), 0.1)
        return cross_entropy(model, x, y)

    return trained(wrap, model, loss_of=loss_of)


@habit(may="refused")
def buffers_of_the_batch(wrap):
    """A running mean of the inputs, which is a buffer: each rank sees its own rows."""
    model = net()
    model.register_buffer("mean", torch.zeros(WIDTH))

    def loss_of(model, x, y):
        model.mean.lerp_(x.mean(0), 0.1)
        return cross_entropy(model, x - model.mean, y)

    return trained(wrap, model, loss_of=loss_of)


@habit(may="refused", says="buffers differ")
def buffers_assigned_of_the_batch(wrap):
    """The same, and each step puts a new tensor in the buffer's place (DINO's center)."""
    model = net()
    model.register_buffer("mean", torch.zeros(WIDTH))

    def loss_of(model, x, y):
        model.mean = model.mean * 0.9 + x.mean(0) * 0.1
        return cross_entropy(model, x - model.mean, y)

    return trained(wrap, model, loss_of=loss_of)


@habit(must="equal")
def buffers_assigned_of_the_weights(wrap):
    """A new tensor in a buffer's place that is the same on all ranks, and one in that of a frozen parameter."""
    model = net()
    model.register_buffer("slow", model[0].weight.detach().clone())
    model[2].requires_grad_(False)

    def loss_of(model, x, y):
        model.slow = model.slow.lerp(model[0].weight.detach(), 0.1)
        model[2].bias = nn.Parameter(model[2].bias + 0.01 * model.slow.mean(), requires_grad=False)
        return cross_entropy(model, x, y)

    return trained(wrap, model, adamw(model), loss_of=loss_of)


@habit(must="equal")
def batch_norm_of_all_wrapped_again(wrap):
    """Two stages with batch_norm="all", of which the second trains all but the first layer."""
    model = nn.Sequential(net(outputs=5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    optimizer = sgd(model)
    for stage in range(2):
        model[0].requires_grad_(stage == 0)
        trained(wrap, model, optimizer, batches(rows=9, seed=stage), batch_norm="all")
    return model


@habit(must="equal")
def batch_norm_of_all_copied(wrap):
    """A copy of a model that was wrapped with batch_norm="all" is wrapped so, too."""
    model = nn.Sequential(net(outputs=5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    trained(wrap, model, data=batches(rows=9), batch_norm="all")
    return model, trained(wrap, copy.deepcopy(model), data=batches(rows=9, seed=1), batch_norm="all")


@habit(must="equal")
def normed_weights(wrap):
    """weight_norm, and spectral_norm with its buffers: parametrizations of the weights."""
    torch.manual_seed(3)
    model = net()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    return trained(wrap, model)


@habit(must="equal")
def pruned(wrap):
    """torch.nn.utils.prune: a mask is a buffer, the weight is made of two."""
    model = net()
    prune.l1_unstructured(model[2], "weight", amount=0.4)
    return trained(wrap, model)


@habit(must="equal")
def parameter_lists(wrap):
    """ParameterList, ParameterDict, a parameter without a dimension, one with no elements."""

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.list = nn.ParameterList([torch.full((WIDTH, CLASSES), 0.1 * i) for i in range(3)])
            self.by_name = nn.ParameterDict({"bias": torch.zeros(CLASSES)})
            self.scale, self.nothing = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.empty(0, 4))

        def forward(self, x):
            return self.scale * (x @ sum(self.list)) + self.by_name["bias"] + self.nothing.sum()

    return trained(wrap, Held())


@habit(must="equal")
def attention(wrap):
    """TransformerEncoder with a padding mask."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.ModuleList(
        [nn.Embedding(11, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)]
    )
    draw = seeded(5)
    data = [(torch.randint(11, (7, 5), generator=draw), torch.randint(3, (7,), generator=draw)) for _ in batches()]

    def loss_of(model, x, y):
        return F.cross_entropy(model[2](model[1](model[0](x), src_key_padding_mask=x == 0).mean(1)), y)

    return trained(wrap, model, sgd(model, 0.02), data, loss_of)


@habit(must="equal")
def sparse_embedding(wrap):
    """Embedding(sparse=True): the gradient is a sparse tensor."""
    return trained(wrap, *sparse(torch.optim.SGD, lr=0.5))


@habit(may="refused")
def sparse_adam(wrap):
    """SparseAdam: rows that nobody looked up must not move, which a mean of all ranks does not tell."""
    table, _, data, loss_of = sparse(torch.optim.SGD, lr=0.5)
    dense, rows = sgd(table[1]), torch.optim.SparseAdam(table[0].parameters(), 0.01)
    table, (dense, rows), loader = wrap(table, [dense, rows], data)
    for x, y in loader:
        dense.zero_grad()
        rows.zero_grad()
        loss_of(table, x, y).backward()
        dense.step()
        rows.step()
    return table


def sparse(kind, **settings):
    torch.manual_seed(3)
    model = nn.Sequential(nn.EmbeddingBag(40, 6, sparse=True), nn.Linear(6, CLASSES))
    draw = seeded(5)
    data = [(torch.randint(20, (7, 3), generator=draw), y) for _, y in batches(rows=7)]
    return model, kind(model.parameters(), **settings), data, cross_entropy


@habit(must="equal", fp32=False)
def in_float64(wrap):
    """model.double(), whatever the default is (physics)."""
    model = net().double()
    return trained(wrap, model, data=[(x.double(), y) for x, y in batches()])


@habit(must="equal", tolerance=1e-5)
def mixed_types(wrap):
    """One layer in float64 among float32."""
    model = net().float()
    model[4].double()
    return trained(wrap, model, loss_of=lambda model, x, y: F.cross_entropy(model[4](model[:4](x.float()).double()), y))


@habit(must="alike")
def in_bfloat16(wrap):
    """model.bfloat16(), and its gradients."""
    return trained(wrap, net().bfloat16(), loss_of=lambda model, x, y: F.cross_entropy(model(x.bfloat16()).float(), y))


@habit(must="alike")
def autocast(wrap):
    """torch.autocast to bfloat16."""

    def loss_of(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x.float())
        return F.cross_entropy(out.float(), y)

    return trained(wrap, net().float(), loss_of=loss_of)


@habit(may="refused")
def complex_parameters(wrap):
    """A complex weight."""

    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.complex(*torch.randn(2, 4, CLASSES, generator=seeded(3)).unbind()))

        def forward(self, x):
            return (torch.fft.rfft(x) @ self.weight).abs()

    return trained(wrap, Spectral())


@habit(must="equal")
def lazy_layers(wrap):
    """LazyLinear, made real by a first forward before wrap."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(CLASSES))
        model(torch.zeros(1, WIDTH))
    return trained(wrap, model)


@habit(may="refused")
def lazy_layers_at_wrap(wrap):
    """LazyLinear, still without a shape when wrap comes."""
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(CLASSES))
    return trained(wrap, model)


@habit(must="equal")
def adapters(wrap):
    """LoRA: low-rank adapters beside frozen weights; one half of them starts at zero."""

    class Adapted(nn.Module):
        def __init__(self, held):
            super().__init__()
            self.held = held.requires_grad_(False)
            self.a = nn.Parameter(0.3 * torch.randn(2, held.in_features, generator=seeded(7)))
            self.b = nn.Parameter(torch.zeros(held.out_features, 2))

        def forward(self, x):
            return self.held(x) + x @ self.a.T @ self.b.T

    model = net()
    for i in (0, 2, 4):
        model[i] = Adapted(model[i])
    return trained(wrap, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01))


@habit(must="equal")
def autograd_function(wrap):
    """A torch.autograd.Function with a straight-through gradient."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return (4 * x).round() / 4

        @staticmethod
        def backward(ctx, grad):
            return grad

    return trained(wrap, net(), loss_of=lambda model, x, y: F.cross_entropy(model[4](Rounded.apply(model[:4](x))), y))


@habit(must="equal")
def functional_call(wrap):
    """torch.func.functional_call with weights made of the parameters."""

    def loss_of(model, x, y):
        held = {name: 0.9 * param for name, param in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, held, x), y)

    return trained(wrap, net(), loss_of=loss_of)


@habit(must="equal")
def module_of_the_model(wrap):
    """`raw = model.module if hasattr(model, "module") else model`."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    raw = model.module if hasattr(model, "module") else model
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return raw


@habit(must="equal")
def initialized_after_wrap(wrap):
    """model.apply(init), after wrap, with the same seed everywhere."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    torch.manual_seed(11)
    model.apply(lambda module: nn.init.orthogonal_(module.weight) if isinstance(module, nn.Linear) else None)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(may="refused", sets=True)
def initialized_unequally_after_wrap(wrap):
    """The same, with a seed of each rank's own: ranks part before the first step."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    torch.manual_seed(11 + rank())
    model.apply(lambda module: nn.init.orthogonal_(module.weight) if isinstance(module, nn.Linear) else None)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(may="refused")
def head_replaced(wrap):
    """The head is replaced by a new one on the way, and added to the optimizer."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for i, (x, y) in enumerate(loader):
        if i == 5:
            model[4] = net(seed=5)[4]
            optimizer.add_param_group({"params": list(model[4].parameters())})
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(may="refused")
def parameter_outside_the_model(wrap):
    """A temperature that the optimizer holds and the model does not."""
    model, scale = net(), nn.Parameter(torch.tensor(1.5))
    model, optimizer, loader = wrap(model, sgd([*model.parameters(), scale]), batches())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(scale * model(x), y).backward()
        optimizer.step()
    return model, scale


@habit(may="refused", sets=True)
def weights_of_the_rank(wrap):
    """A rank alone changes a weight on the way (a script that loads its best checkpoint on rank 0)."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for i, (x, y) in enumerate(loader):
        if i == 5 and rank() == 0:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model
