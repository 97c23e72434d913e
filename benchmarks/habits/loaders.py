"""Where batches come from, and how they are asked for."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    random_split,
)

from loops.habit import habit
from loops.scene import ROWS, batches, cross_entropy, dataset, net, rank, ranks, seeded, sgd


def trained(wrap, data, epochs=1, **settings):
    """The plain loop."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, 0.05), data, **settings)
    for _epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
    return model


@habit(must="equal")
def shuffled(wrap):
    """DataLoader(shuffle=True): its order comes from the global generator, each epoch."""
    return trained(wrap, DataLoader(dataset(44), ROWS, shuffle=True), epochs=3)


@habit(must="equal")
def shuffled_by_its_own_generator(wrap):
    """DataLoader(shuffle=True, generator=...)."""
    return trained(wrap, DataLoader(dataset(44), ROWS, shuffle=True, generator=seeded(8)), epochs=3)


@habit(may="refused")
def shuffled_by_unequal_seeds(wrap):
    """Every rank seeds by itself, so that orders differ."""
    torch.manual_seed(rank())
    return trained(wrap, DataLoader(dataset(44), ROWS, shuffle=True), epochs=3)


@habit(must="equal")
def shuffled_while_one_rank_samples(wrap):
    """Rank 0 alone samples from the model after each epoch, which moves its generator."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, 0.05), DataLoader(dataset(44), ROWS, shuffle=True))
    for _epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
        if rank() == 0:
            with torch.no_grad():
                torch.multinomial(model(torch.randn(3, 6)).softmax(-1), 5, replacement=True)
    return model


@habit(must="alike")
def shuffled_while_rows_are_drawn(wrap):
    """Noise for each row moves every rank's generator by its own rows; the ranks must still see the same batches."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, 0.05), DataLoader(dataset(), ROWS, shuffle=True))
    for _epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model, x + 0.01 * torch.randn(len(x) + 1, 6)[1:], y).backward()
            optimizer.step()
    return model


@habit(must="equal")
def workers(wrap):
    """num_workers=2, shuffled."""
    return trained(wrap, DataLoader(dataset(44), ROWS, shuffle=True, num_workers=2), epochs=3)


@habit(must="equal")
def persistent_workers(wrap):
    """num_workers=1, persistent, prefetching; the last short batch dropped."""
    data = DataLoader(dataset(44), ROWS, num_workers=1, persistent_workers=True, prefetch_factor=3, drop_last=True)
    return trained(wrap, data, epochs=3)


@habit(must="equal")
def random_part(wrap):
    """random_split, with the global generator, and a shuffling loader of one part."""
    return trained(wrap, DataLoader(random_split(dataset(70), [48, 22])[0], ROWS, shuffle=True), epochs=2)


@habit(must="equal")
def weighted_sampler(wrap):
    """WeightedRandomSampler: rows are drawn, with replacement."""
    sampler = WeightedRandomSampler(torch.linspace(0.1, 1, 44), 44)
    return trained(wrap, DataLoader(dataset(44), ROWS, sampler=sampler), epochs=3)


@habit(must="equal")
def batch_sampler(wrap):
    """A batch_sampler of one's own: batches of several sizes."""
    sampler = BatchSampler(RandomSampler(dataset(44)), 5, drop_last=False)
    return trained(wrap, DataLoader(dataset(44), batch_sampler=sampler), epochs=2)


@habit(must="equal")
def collated(wrap):
    """A collate_fn that draws: noise is added to the batch before anyone splits it."""

    def collate(rows):
        x, y = map(torch.stack, zip(*rows, strict=True))
        return x + 0.1 * torch.randn_like(x), y

    return trained(wrap, DataLoader(dataset(44), ROWS, shuffle=True, collate_fn=collate), epochs=3)


@habit(must="equal")
def stream(wrap):
    """An IterableDataset."""

    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*dataset(45).tensors, strict=True)

    return trained(wrap, DataLoader(Stream(), ROWS), epochs=3)


@habit(must="equal")
def generator_of_batches(wrap):
    """A generator, which can be gone through once."""
    return trained(wrap, (batch for batch in batches()))


@habit(must="equal")
def same_batch_object(wrap):
    """One batch, over and over (the first thing to try: does it overfit?)."""
    return trained(wrap, batches(count=1) * 12)


@habit(must="equal")
def looked_at(wrap):
    """next(iter(loader)) to look at a batch, before and amid the epochs."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for _epoch in range(2):
        x, y = next(iter(loader))
        cross_entropy(model, x, y)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
    return model


@habit(must="equal", steps=11)
def fetched_ahead(wrap):
    """nanoGPT: the next batch is fetched between forward and backward."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    source = iter(loader)
    x, y = next(source)
    for following in source:
        loss = cross_entropy(model, x, y)
        x, y = following
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@habit(must="equal", steps=11)
def fetched_ahead_and_accumulated(wrap):
    """The same with accumulate=2."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches() + batches(seed=1), accumulate=2)
    source = iter(loader)
    x, y = next(source)
    for i, following in enumerate(source):
        loss = cross_entropy(model, x, y) / 2
        x, y = following
        loss.backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return model


@habit(must="equal")
def all_fetched_first(wrap):
    """list(loader): every batch is there before the first step."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    for x, y in list(loader):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def endless(wrap):
    """minGPT: `try: next(it) except StopIteration: it = iter(loader)`."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), DataLoader(dataset(28), ROWS, shuffle=True))
    source = iter(loader)
    for _step in range(12):
        try:
            x, y = next(source)
        except StopIteration:
            source = iter(loader)
            x, y = next(source)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def cycled(wrap):
    """itertools: cycle and islice."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(count=5))
    for x, y in itertools.islice(itertools.cycle(loader), 12):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal")
def attributes(wrap):
    """len(loader), loader.dataset, loader.batch_size: a schedule and a log are made of them."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), DataLoader(dataset(), ROWS))
    log = [len(loader), len(loader.dataset), loader.batch_size]
    for i, (x, y) in enumerate(loader):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - i * loader.batch_size / len(loader.dataset))
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model, log


@habit(may="refused", says="DistributedSampler|sampler")
def distributed_sampler_left_in(wrap):
    """Every script that had DDP has one: it splits, and wrap would split again."""
    sampler = DistributedSampler(dataset(), num_replicas=ranks(), rank=rank(), shuffle=False)
    return trained(wrap, DataLoader(dataset(), ROWS, sampler=sampler), epochs=3)


@habit(must="equal")
def rows_of_its_own(wrap):
    """split=False: every rank's loader gives its own rows."""
    own = [(x[rank() :: ranks()], y[rank() :: ranks()]) for x, y in batches(rows=7)]
    return trained(wrap, own, split=False)


@habit(must="equal")
def distributed_sampler_kept(wrap):
    """split=False with a DistributedSampler: a batch is those of all ranks together."""
    data = dataset(ROWS * 12)
    if ranks() == 1:
        return trained(wrap, DataLoader(data, 6), epochs=2, split=False)
    sampler = DistributedSampler(data, num_replicas=ranks(), rank=rank(), shuffle=False)
    return trained(wrap, DataLoader(data, 6 // ranks(), sampler=sampler), epochs=2, split=False)


@habit(must="equal")
def no_loader(wrap):
    """Batches made in the loop (nanoGPT's get_batch), each rank its own rows; no loader is given to wrap."""
    model = net()
    model, optimizer, _ = wrap(model, sgd(model))
    for x, y in batches(rows=7):
        x, y = x[rank() :: ranks()], y[rank() :: ranks()]
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(may="refused", says="rank|differ|same")
def unequal_data(wrap):
    """Every rank has data of its own, and wrap is not told."""
    return trained(wrap, batches(seed=rank()))


@habit(may="refused", says="rank|differ|same")
def unequal_order(wrap):
    """The same batches, in another order on each rank."""
    return trained(wrap, batches()[rank() :] + batches()[: rank()])


@habit(may="refused", says="rank")
def unequal_lengths(wrap):
    """The last rank has two batches less."""
    is_last = ranks() > 1 and rank() == ranks() - 1
    return trained(wrap, batches()[: 10 if is_last else 12], timeout_s=5.0)


class Rows(Dataset):
    """A data set of one's own, one row at a time. `change` is what it does to x."""

    def __init__(self, change=lambda x: x, count=44):
        self.inner, self.change = dataset(count), change

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        x, y = self.inner[index]
        return self.change(x), y


@habit(must="equal")
def rows_of_a_class(wrap):
    """A data set of one's own, whose rows have nothing to do with each other."""
    return trained(wrap, DataLoader(Rows(lambda x: x * 2 - 1), ROWS, shuffle=True), epochs=3)


@habit(must="equal")
def rows_augmented(wrap):
    """Each row is changed by random numbers, as augmentations do."""
    return trained(wrap, DataLoader(Rows(lambda x: x + 0.1 * torch.randn(())), ROWS, shuffle=True), epochs=3)


@habit(must="equal")
def rows_augmented_by_python(wrap):
    """Each row is flipped, or not, by random.random()."""
    random.seed(4)
    return trained(wrap, DataLoader(Rows(lambda x: -x if random.random() < 0.3 else x), ROWS), epochs=3)


@habit(must="equal")
def rows_augmented_by_a_generator(wrap):
    """A data set with a generator of its own, which it draws from for every row."""
    draw = np.random.default_rng(5)
    return trained(wrap, DataLoader(Rows(lambda x: x + 0.1 * float(draw.normal())), ROWS), epochs=3)


@habit(must="equal")
def rows_that_are_counted(wrap):
    """What a row is depends on how many were given before it."""

    class Counted(Rows):
        given = 0

        def __getitem__(self, index):
            self.given += 1
            x, y = super().__getitem__(index)
            return x * (1 + 0.01 * self.given), y

    return trained(wrap, DataLoader(Counted(), ROWS), epochs=3)


@habit(must="equal")
def rows_augmented_later(wrap):
    """Random numbers come in after the first epochs alone."""
    data = Rows()
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, 0.05), DataLoader(data, ROWS, shuffle=True))
    for epoch in range(4):
        if epoch == 2:
            data.change = lambda x: x + 0.1 * torch.randn(())
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
    return model


@habit(must="equal")
def rows_from_a_cache(wrap):
    """A data set that keeps what it has made."""
    kept = {}
    return trained(wrap, DataLoader(Rows(lambda x: kept.setdefault(float(x[0]), x * 2)), ROWS, shuffle=True), epochs=3)


@habit(must="equal")
def rows_evaluated_by_one_rank(wrap):
    """Rank 0 alone goes through the wrapped loader once before training, in order."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model, 0.05), DataLoader(Rows(), ROWS))
    if rank() == 0:
        with torch.no_grad():
            sum(float(cross_entropy(model, x, y)) for x, y in loader)
    for _epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
    return model
