"""What scripts do around a loss: loaders, averages, schedules, tools, and optimizers of their own."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    get_worker_info,
)

from loops.habit import habit
from loops.scene import CLASSES, WIDTH, batches, cross_entropy, dataset, net, seeded, sgd, steps


def stepped(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@habit(must="equal")
def next_of_a_new_iterator(wrap):
    """next(iter(loader)) for every step, of a shuffled loader."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), DataLoader(dataset(), 7, shuffle=True))
    for _ in range(steps()):
        x, y = next(iter(loader))
        stepped(model, optimizer, cross_entropy(model, x, y))
    return model


@habit(must="equal")
def endless_generator(wrap):
    """A generator that goes through the loader again and again; two of its batches to a step, two backwards."""

    def cycle(loader):
        while True:
            yield from loader

    model = net()
    model, optimizer, loader = wrap(model, sgd(model), DataLoader(dataset(30), 7, shuffle=True, drop_last=True))
    source = cycle(loader)
    for _ in range(steps()):
        for _ in range(2):
            (cross_entropy(model, *next(source)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


@habit(may="refused")
def two_loaders_each_wrapped(wrap):
    """Labeled and unlabeled rows from two loaders, zipped; wrap is called for each of them."""
    model = net()
    model, optimizer, labeled = wrap(model, sgd(model), batches(rows=8))
    _, _, other = wrap(model, optimizer, [x for x, _ in batches(rows=6, seed=1)])
    for (x, y), u in zip(labeled, other, strict=True):
        stepped(model, optimizer, F.cross_entropy(model(x), y) + model(u).square().mean())
    return model


@habit(may="refused")
def two_loaders_each_wrapped_before(wrap):
    """The same the other way round, with a sum over the rows of each."""
    model = net()
    model, optimizer, other = wrap(model, sgd(model), [x for x, _ in batches(rows=6, seed=1)])
    _, _, labeled = wrap(model, optimizer, batches(rows=7))
    for (x, y), u in zip(labeled, other, strict=True):
        loss = F.cross_entropy(model(x), y, reduction="sum") / len(x) + model(u).square().sum(1).mean()
        stepped(model, optimizer, loss)
    return model


@habit(may="refused")
def one_loader_of_two_wrapped(wrap):
    """Rows of another domain come from a loader that wrap does not know: every rank has all of them."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    for (x, y), u in zip(loader, itertools.cycle([x for x, _ in batches(rows=5, seed=1)]), strict=False):
        stepped(model, optimizer, F.cross_entropy(model(x), y) + 0.1 * model(u).square().mean())
    return model


@habit(may="refused")
def loaders_zipped_before(wrap):
    """Two loaders are zipped, and wrap is given the pairs."""
    model = net()
    both = list(zip(batches(rows=7), batches(rows=14, seed=1), strict=True))
    model, optimizer, loader = wrap(model, sgd(model), both)
    for (x, y), (u, v) in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        (0.5 * F.cross_entropy(model(u), v)).backward()
        optimizer.step()
    return model


@habit(must="equal")
def parts_of_joined_sets(wrap):
    """ConcatDataset, Subset, and a sampler of some indices."""
    joined = ConcatDataset([dataset(40), Subset(dataset(60, seed=1), range(0, 60, 2))])
    sampler = SubsetRandomSampler(list(range(0, 70, 2)), generator=seeded(2))
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), DataLoader(joined, 5, sampler=sampler))
    for _ in range(2):
        for x, y in loader:
            stepped(model, optimizer, cross_entropy(model, x, y))
    return model


@habit(must="equal")
def rows_drawn_with_replacement(wrap):
    """RandomSampler with replacement, and a number of samples of its own."""
    data = dataset(20)
    sampler = RandomSampler(data, replacement=True, num_samples=7 * steps())
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), DataLoader(data, 7, sampler=sampler))
    for x, y in loader:
        stepped(model, optimizer, cross_entropy(model, x, y))
    return model


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, each = (info.id, info.num_workers) if info is not None else (0, 1)
        x, y = dataset(12 * 8).tensors
        yield from zip(x[first::each], y[first::each], strict=True)


@habit(must="equal")
def stream_of_workers(wrap):
    """An IterableDataset whose workers share its rows out, prefetched, kept from epoch to epoch."""
    model = net()
    loader = DataLoader(Stream(), 7, num_workers=2, prefetch_factor=2, persistent_workers=True)
    model, optimizer, loader = wrap(model, sgd(model), loader)
    for _ in range(2):
        for x, y in loader:
            stepped(model, optimizer, cross_entropy(model, x, y))
    return model


class Views(Dataset):
    """Two views of a row, made by generators that a worker seeds by itself."""

    def __len__(self):
        return 84

    def __getitem__(self, index):
        x, y = dataset(84).tensors
        noise = torch.randn(WIDTH) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return x[index] + noise, y[index]


@habit(must="equal")
def workers_that_draw(wrap):
    """Augmentation in workers, from torch, random and numpy, whose seeds come from the loader's generator."""

    def seed_worker(_):
        seed = torch.initial_seed() % 2**32
        np.random.seed(seed)
        random.seed(seed)

    draw = torch.Generator().manual_seed(3)
    loader = DataLoader(Views(), 7, shuffle=True, num_workers=2, worker_init_fn=seed_worker, generator=draw)
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), loader)
    for x, y in loader:
        stepped(model, optimizer, cross_entropy(model, x, y))
    return model


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    name: str = ""


@habit(must="equal")
def typed_tuples(wrap):
    """typing.NamedTuple, collated, with a word for each row."""
    x, y = dataset(7 * steps()).tensors
    points = [Point(a, b, f"row {i}") for i, (a, b) in enumerate(zip(x, y, strict=True))]
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), DataLoader(points, 7))
    for batch in loader:
        assert len(batch.name) == len(batch.x)
        stepped(model, optimizer, cross_entropy(model, batch.x, batch.y))
    return model


@habit(may="refused")
def namespaces(wrap):
    """A batch is a SimpleNamespace."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), [SimpleNamespace(x=x, y=y) for x, y in batches(rows=7)])
    for batch in loader:
        stepped(model, optimizer, cross_entropy(model, batch.x, batch.y))
    return model


class Held:
    """A batch of one's own: what torch_geometric and torchtext have."""

    def __init__(self, rows):
        self.x = torch.stack([x for x, _ in rows])
        self.y = torch.stack([y for _, y in rows])

    def __len__(self):
        return len(self.y)

    def to(self, *args, **kwargs):
        self.x = self.x.to(*args, **kwargs)
        return self


@habit(may="refused")
def batches_of_a_class(wrap):
    """A collate function that makes an object of a class of its own."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), DataLoader(dataset(), 7, collate_fn=Held))
    for batch in loader:
        batch = batch.to("cpu")
        stepped(model, optimizer, cross_entropy(model, batch.x, batch.y))
    return model


@habit(may="refused")
def rows_as_they_are(wrap):
    """collate_fn=lambda rows: rows: a list of tuples, stacked in the loop."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), DataLoader(dataset(), 7, collate_fn=lambda rows: rows))
    for rows in loader:
        x, y = torch.stack([a for a, _ in rows]), torch.stack([b for _, b in rows])
        stepped(model, optimizer, cross_entropy(model, x, y))
    return model


@habit(may="refused")
def tuples_of_rows(wrap):
    """collate_fn=lambda rows: tuple(zip(*rows)): tuples of tensors, as many as rows, stacked in the loop."""
    model = net()
    loader = DataLoader(dataset(), WIDTH, collate_fn=lambda rows: tuple(zip(*rows, strict=True)), drop_last=True)
    model, optimizer, loader = wrap(model, sgd(model), loader)
    for xs, ys in loader:
        stepped(model, optimizer, cross_entropy(model, torch.stack(xs), torch.stack(ys)))
    return model


@habit(must="equal")
def arrays(wrap):
    """Batches of numpy arrays."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), [(x.numpy(), y.numpy()) for x, y in batches(rows=7)])
    for x, y in loader:
        stepped(model, optimizer, cross_entropy(model, torch.from_numpy(x), torch.as_tensor(y)))
    return model


@habit(may="refused")
def padded_in_the_loop(wrap):
    """A list of texts of unequal length, which the loop pads."""
    draw = seeded(30)
    data = []
    for _ in range(steps()):
        lengths = torch.randint(2, 6, (7,), generator=draw).tolist()
        data.append([torch.randint(1, 11, (n,), generator=draw) for n in lengths])
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, 11))
    model, optimizer, loader = wrap(model, sgd(model), data)
    for texts in loader:
        ids = nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
        stepped(model, optimizer, F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], ignore_index=0))
    return model


@habit(must="equal")
def padded_by_the_collate(wrap):
    """Texts of unequal length, padded to the longest of the batch; lengths go with them, the longest first."""

    def collate(texts):
        texts = sorted(texts, key=len, reverse=True)
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        return {"ids": ids, "lengths": torch.tensor([len(one) for one in texts])}

    draw = seeded(31)
    lengths = torch.randint(2, 6, (7 * steps(),), generator=draw).tolist()
    texts = [torch.randint(1, 11, (n,), generator=draw) for n in lengths]
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Embedding(11, 8, padding_idx=0), nn.LSTM(8, 8, 2, batch_first=True), nn.Linear(8, 11)])
    model, optimizer, loader = wrap(model, sgd(model), DataLoader(texts, 7, collate_fn=collate))
    for batch in loader:
        packed = nn.utils.rnn.pack_padded_sequence(model[0](batch["ids"]), batch["lengths"], batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(model[1](packed)[0], batch_first=True)
        loss = F.cross_entropy(model[2](out[:, :-1]).mT, batch["ids"][:, 1 : out.shape[1]], ignore_index=0)
        stepped(model, optimizer, loss)
    return model


@habit(must="equal")
def statistics_of_the_average(wrap):
    """SWA: update_bn goes through whole batches, from before wrap, on every rank."""
    torch.manual_seed(3)
    model, data = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)), batches(rows=12)
    model, optimizer, loader = wrap(model, sgd(model), data, batch_norm="all")
    mean = torch.optim.swa_utils.AveragedModel(model)
    for x, y in loader:
        stepped(model, optimizer, cross_entropy(model, x, y))
        mean.update_parameters(model)
    torch.optim.swa_utils.update_bn(data, mean)
    return model, mean


@habit(must="equal")
def rows_normalized_one_by_one(wrap):
    """Each recording less its own mean, divided by its own deviation, in the loop (wav2vec2)."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    for x, y in loader:
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-7).sqrt()
        stepped(model, optimizer, cross_entropy(model, x, y))
    return model
