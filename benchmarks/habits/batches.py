"""What a batch is made of, and which of it has rows."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BatchEncoding

from loops.habit import habit
from loops.scene import CLASSES, ROWS, WIDTH, batches, cross_entropy, net, pairs, ranks, seeded, sgd, texts

Pair = namedtuple("Pair", "x y")


def trained(wrap, data, loss_of, model=None, **settings):
    """The plain loop, with a loss of a whole batch."""
    model = model or net()
    model, optimizer, loader = wrap(model, sgd(model), data, **settings)
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@habit(must="equal")
def dictionaries(wrap):
    """{"x": ..., "y": ...}."""
    data = [{"x": x, "y": y} for x, y in batches(rows=7)]
    return trained(wrap, data, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))


@habit(must="equal")
def lists(wrap):
    """Lists, as the default collate makes of tuples."""
    return trained(wrap, [list(batch) for batch in batches(rows=7)], lambda model, batch: cross_entropy(model, *batch))


@habit(must="equal")
def named_tuples(wrap):
    """A namedtuple stays one."""
    data = [Pair(x, y) for x, y in batches(rows=7)]
    return trained(wrap, data, lambda model, batch: F.cross_entropy(model(batch.x), batch.y))


@habit(must="equal")
def data_classes(wrap):
    """A dataclass stays one."""

    @dataclass
    class Batch:
        x: Tensor
        y: Tensor

    data = [Batch(x, y) for x, y in batches(rows=7)]
    return trained(wrap, data, lambda model, batch: F.cross_entropy(model(batch.x), batch.y))


@habit(must="equal")
def bare_tensors(wrap):
    """A batch is one tensor (an autoencoder)."""
    return trained(wrap, [x for x, _ in batches(rows=7)], lambda model, x: F.mse_loss(model(x), x), net(outputs=WIDTH))


@habit(must="equal")
def nested(wrap):
    """Dictionaries in tuples in dictionaries."""
    data = [{"inputs": (x, {"x": -x}), "target": [y]} for x, y in batches(rows=7)]

    def loss_of(model, batch):
        first, second = batch["inputs"]
        return F.cross_entropy(model(first) - model(second["x"]), batch["target"][0])

    return trained(wrap, data, loss_of)


@habit(must="equal")
def scalars_and_strings(wrap):
    """Beside tensors: a name, a number, None, a tensor without a dimension, a flag."""
    data = [
        {"x": x, "y": y, "name": "part", "scale": 0.5, "no": None, "t": torch.tensor(0.3), "is": True}
        for x, y in batches()
    ]

    def loss_of(model, batch):
        assert batch["name"] == "part" and batch["no"] is None and batch["is"] is True
        return F.cross_entropy(model(batch["x"] * batch["scale"] + batch["t"]), batch["y"])

    return trained(wrap, data, loss_of)


@habit(must="equal")
def strings_of_rows(wrap):
    """A list of strings, one for each row, as the default collate makes them: the loop tokenizes."""
    data = [(["abcdefgh"[: 1 + int(label)] for label in y], x) for x, y in batches(rows=7)]

    def loss_of(model, batch):
        names, x = batch
        return F.cross_entropy(model(x), torch.tensor([len(name) - 1 for name in names]))

    return trained(wrap, data, loss_of)


@habit(must="equal")
def batch_encoding(wrap):
    """A BatchEncoding of transformers: .to, and attributes."""
    table = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, CLASSES))
    data = [BatchEncoding(batch | {"labels": batch["input_ids"][:, 0] % CLASSES}) for batch in texts(rows=7)]

    def loss_of(model, batch):
        batch = batch.to("cpu")
        mask = batch.attention_mask[..., None].to(torch.get_default_dtype())
        return F.cross_entropy((model(batch["input_ids"]) * mask).sum(1) / mask.sum(1), batch["labels"])

    return trained(wrap, data, loss_of, table)


@habit(must="equal")
def class_weights_in_the_batch(wrap):
    """A weight for each class, told by rows= to have no rows."""
    data = [{"x": x, "y": y, "w": torch.tensor([0.2, 1.0, 3.0, 0.7])} for x, y in batches()]
    return trained(
        wrap, data, lambda model, b: F.cross_entropy(model(b["x"]), b["y"], b["w"]), rows={"x": 0, "y": 0, "w": None}
    )


@habit(may="refused", says="w|rows")
def class_weights_untold(wrap):
    """The same without rows=: four weights beside eight rows."""
    data = [{"x": x, "y": y, "w": torch.tensor([0.2, 1.0, 3.0, 0.7])} for x, y in batches()]
    return trained(wrap, data, lambda model, b: F.cross_entropy(model(b["x"]), b["y"], b["w"]))


@habit(must="equal")
def time_major(wrap):
    """(time, rows, features), told by rows=."""
    data = [{"x": torch.stack([x, -x, 2 * x]), "y": y} for x, y in batches(rows=7)]
    return trained(wrap, data, lambda model, b: F.cross_entropy(model(b["x"]).mean(0), b["y"]), rows={"x": 1, "y": 0})


@habit(must="equal")
def time_major_tuples(wrap):
    """(time, rows) on both sides of a tuple, told by one number."""
    data = [(torch.stack([x, -x, 2 * x]), torch.stack([y, y, y])) for x, y in batches(rows=7)]
    return trained(wrap, data, lambda model, b: F.cross_entropy(model(b[0]).flatten(0, 1), b[1].flatten()), rows=1)


@habit(may="refused")
def time_major_untold(wrap):
    """(time, rows, features) beside (rows,), and nobody says so."""
    data = [{"x": torch.stack([x, -x, 2 * x]), "y": y} for x, y in batches()]
    return trained(wrap, data, lambda model, b: F.cross_entropy(model(b["x"]).mean(0), b["y"]))


@habit(must="equal")
def truncated_backpropagation(wrap):
    """word_language_model: (time, rows) text, and a hidden state that goes on from batch to batch."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Embedding(11, 6), nn.GRU(6, 8), nn.Linear(8, 11)])
    text = torch.randint(11, (ROWS, 1 + 4 * 12), generator=seeded(2)).T
    model, optimizer, loader = wrap(
        model, sgd(model), [(text[i : i + 4], text[i + 1 : i + 5]) for i in range(0, 48, 4)], rows=1
    )
    hidden = None
    for x, y in loader:
        optimizer.zero_grad()
        out, hidden = model[1](model[0](x), hidden)
        F.cross_entropy(model[2](out).flatten(0, 1), y.flatten()).backward()
        hidden = hidden.detach()
        optimizer.step()
    return model


@habit(may="refused")
def unequal_row_counts(wrap):
    """Labeled and unlabeled rows in one batch, twice as many of these."""
    data = [(x, y, torch.cat([-x, 2 * x])) for x, y in batches()]

    def loss_of(model, batch):
        x, y, free = batch
        return cross_entropy(model, x, y) + 0.1 * model(free).square().mean()

    return trained(wrap, data, loss_of)


@habit(may="refused")
def one_graph(wrap):
    """gcn: nodes, an adjacency matrix, and a list of edges; the batch is one graph."""
    edges = torch.randint(ROWS, (2, 20), generator=seeded(6))
    links = torch.zeros(ROWS, ROWS).index_put((edges[0], edges[1]), torch.tensor(0.2))
    data = [{"x": x, "links": links, "edges": edges, "y": y} for x, y in batches()]
    return trained(wrap, data, lambda model, b: F.cross_entropy(model(b["links"] @ b["x"]), b["y"]))


@habit(must="equal")
def short_last_batch(wrap):
    """The last batch of an epoch has fewer rows."""
    data = batches()
    data[-1] = tuple(part[:5] for part in data[-1])
    return trained(wrap, data * 2, lambda model, batch: cross_entropy(model, *batch))


@habit(must="equal")
def fewer_rows_than_ranks(wrap):
    """A batch of one row, and one of two, in the middle and at the end."""
    data = batches()
    data[1], data[2], data[-1] = (tuple(part[:n] for part in data[i]) for i, n in ((1, 1), (2, 2), (-1, 1)))
    return trained(wrap, data, lambda model, batch: cross_entropy(model, *batch))


@habit(must="equal")
def fewer_rows_than_ranks_summed(wrap):
    """The same with a sum over rows."""
    data = [tuple(part[:2] for part in batch) for batch in batches()]
    return trained(wrap, data, lambda model, b: F.cross_entropy(model(b[0]), b[1], reduction="sum"))


@habit(must="equal")
def unequal_share(wrap):
    """batch_fractions=: the last rank takes most rows."""
    share = [1.0 + rank for rank in range(ranks())]
    return trained(
        wrap,
        batches(),
        lambda model, batch: cross_entropy(model, *batch),
        batch_fractions=[s / sum(share) for s in share],
    )


@habit(must="equal")
def images(wrap):
    """(rows, channels, height, width), channels_last, convolutions and GroupNorm."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(16, CLASSES))
    draw = seeded(0)
    data = [(torch.randn(7, 2, 4, 4, generator=draw), y) for _, y in batches(rows=7)]
    model = model.to(memory_format=torch.channels_last)
    return trained(
        wrap, data, lambda model, b: F.cross_entropy(model(b[0].to(memory_format=torch.channels_last)), b[1]), model
    )


@habit(must="equal")
def packed_sequences(wrap):
    """Lengths go with the rows; the loop packs."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.LSTM(6, 8, batch_first=True), nn.Linear(8, CLASSES)])
    table = torch.randn(11, 6, generator=seeded(1))
    data = [(table[b["input_ids"]], b["attention_mask"].sum(1), b["input_ids"][:, 0] % CLASSES) for b in texts(rows=7)]

    def loss_of(model, batch):
        x, lengths, y = batch
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return F.cross_entropy(model[1](model[0](packed)[1][0][-1]), y)

    return trained(wrap, data, loss_of, model)


@habit(must="equal")
def rows_moved_in_the_loop(wrap):
    """.to, .double or .float, non_blocking, and a permutation of the rows that the loop has."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    for x, y in loader:
        x, y = x.to("cpu", torch.get_default_dtype(), non_blocking=True), y.to("cpu")
        order = torch.randperm(len(x))
        optimizer.zero_grad()
        cross_entropy(model, x[order], y[order]).backward()
        optimizer.step()
    return model


@habit(may="refused")
def micro_batches_of_a_batch(wrap):
    """The loop cuts each batch into rows, one backward for each: ranks may have unequal numbers of them."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(), timeout_s=5.0)
    for x, y in loader:
        optimizer.zero_grad()
        for row, label in zip(x.split(1), y.split(1), strict=True):
            (cross_entropy(model, row, label) / len(x)).backward()
        optimizer.step()
    return model


@habit(may="refused")
def micro_batches_by_a_constant(wrap):
    """The same, divided by the rows of the whole batch, of which a rank has a part."""
    model = net()
    model, optimizer, loader = wrap(model, sgd(model), batches(), timeout_s=5.0)
    for x, y in loader:
        optimizer.zero_grad()
        for row, label in zip(x.split(1), y.split(1), strict=True):
            (cross_entropy(model, row, label) / ROWS).backward()
        optimizer.step()
    return model


@habit(must="equal")
def float_and_integer_rows(wrap):
    """bool, int8 and int32 tensors beside floats."""
    data = [{"x": x, "y": y.int(), "mask": x > -1, "small": y.to(torch.int8)} for x, y in batches(rows=7)]

    def loss_of(model, b):
        return F.cross_entropy(model(b["x"] * b["mask"] + b["small"][:, None]), b["y"].long())

    return trained(wrap, data, loss_of)


@habit(must="equal")
def regression_of_one_number(wrap):
    """Targets without a second dimension, outputs squeezed."""
    data = [(x, y[:, 0]) for x, y in pairs(rows=7)]
    return trained(wrap, data, lambda model, b: F.mse_loss(model(b[0]).squeeze(-1), b[1]), net(outputs=1))


@habit(may="refused")
def square_list_of_rows(wrap):
    """As many tensors as rows, each of as many numbers: one of every row."""
    data = [(x, y, [torch.full((ROWS,), float(w)).type_as(x) for w in x[:, 0].abs()]) for x, y in batches()]

    def loss_of(model, batch):
        x, y, weights = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        return sum(w.sum() * loss for w, loss in zip(weights, losses, strict=False))

    return trained(wrap, data, loss_of, loss="sum")


@habit(must="equal")
def square_list_of_rows_told(wrap):
    """The same, told by a function."""
    data = [(x, y, [torch.full((ROWS,), float(w)).type_as(x) / 80 for w in x[:, 0].abs()]) for x, y in batches()]

    def loss_of(model, batch):
        x, y, weights = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        return sum(w.sum() * loss for w, loss in zip(weights, losses, strict=False))

    def taken(batch, take):
        rows = take(len(batch[0]))
        return tuple(part[rows] for part in batch)

    return trained(wrap, data, loss_of, loss="sum", rows=taken)


@habit(must="equal")
def square_list_of_fields_told(wrap):
    """As many tensors as rows, each of all rows, told by rows=."""
    data = [{"x": x, "y": y, "extra": [x[:, 0] * i for i in range(ROWS)]} for x, y in batches()]
    told = {"x": 0, "y": 0, **{f"extra.{i}": 0 for i in range(ROWS)}}
    return trained(wrap, data, lambda m, b: F.cross_entropy(m(b["x"]) + b["extra"][2][:, None], b["y"]), rows=told)


@habit(must="equal")
def fields_of_one_form(wrap):
    """(inputs, targets) of one form, two rows of them."""
    data = [(x, x.flip(1)) for x, _ in batches(rows=2)]
    return trained(wrap, data, lambda model, b: F.mse_loss(model(b[0]), b[1]), net(outputs=WIDTH))


@habit(must="equal")
def fields_in_a_list(wrap):
    """Seven tensors of all rows in a list; the last batch has as many rows."""
    data = [{"x": x, "y": y, "more": [x[:, 0] * i for i in range(7)]} for x, y in batches()]
    data[-1] = {"x": data[-1]["x"][:7], "y": data[-1]["y"][:7], "more": [one[:7] for one in data[-1]["more"]]}
    return trained(wrap, data, lambda m, b: F.cross_entropy(m(b["x"]) + b["more"][3][:, None], b["y"]))


def sized(size, rows=ROWS):
    return [{"x": x, "y": y, "size": size} for x, y in batches(rows=rows)]


def scaled_by_size(model, batch):
    height, width = batch["size"][:2]
    return F.cross_entropy(model(batch["x"] * height / width), batch["y"])


@habit(must="equal")
def size_of_images(wrap):
    """(height, width), the same for all rows."""
    return trained(wrap, sized((8, 3)), scaled_by_size)


@habit(may="refused", says="size")
def size_as_long_as_the_batch(wrap):
    """(height, width) beside two rows, which might be a number of each."""
    return trained(wrap, sized((8, 3), rows=2), scaled_by_size)


@habit(must="equal")
def size_as_long_as_the_batch_told(wrap):
    """The same with rows=."""
    return trained(wrap, sized((8, 3), rows=2), scaled_by_size, rows={"x": 0, "y": 0, "size": None})


@habit(must="equal")
def size_as_long_as_the_last_batch(wrap):
    """The same in a short last batch."""
    data = sized((8, 3))
    data[-1] = {"x": data[-1]["x"][:2], "y": data[-1]["y"][:2], "size": (8, 3)}
    return trained(wrap, data, scaled_by_size)


@habit(must="equal")
def size_of_torch(wrap):
    """A torch.Size of as many numbers as rows."""
    return trained(wrap, sized(torch.Size((8, 3)), rows=2), scaled_by_size)


@habit(may="refused", says="rows|numbers|labels")
def labels_in_a_tuple(wrap):
    """zip(*rows) in a collate function: labels as a tuple of numbers."""
    data = [{"x": x, "labels": tuple(y.tolist())} for x, y in batches()]
    return trained(wrap, data, lambda model, b: F.cross_entropy(model(b["x"]), torch.tensor(b["labels"])))


@habit(must="equal")
def labels_in_a_tuple_told(wrap):
    """The same with rows=."""
    data = [{"x": x, "labels": tuple(y.tolist())} for x, y in batches(rows=7)]
    return trained(
        wrap,
        data,
        lambda model, b: F.cross_entropy(model(b["x"]), torch.tensor(b["labels"])),
        rows={"x": 0, "labels": 0},
    )


@habit(must="equal")
def labels_in_a_list(wrap):
    """Labels as a list of numbers."""
    data = [{"x": x, "labels": y.tolist()} for x, y in batches(rows=7)]
    return trained(wrap, data, lambda model, b: F.cross_entropy(model(b["x"]), torch.tensor(b["labels"])))


def contrast(model, x):
    a, b = F.normalize(model(x), dim=-1), F.normalize(model(-x), dim=-1)
    return F.cross_entropy(5 * a @ b.T, torch.arange(len(a)))


@habit(may="refused", says="together")
def contrast_with_rows_by_a_function(wrap):
    """Rows against rows, in batches that a function divides."""

    def taken(batch, take):
        rows = take(len(batch[0]))
        return tuple(part[rows] for part in batch)

    return trained(wrap, batches(), lambda model, b: contrast(model, b[0]), rows=taken)


@habit(may="refused", says="together")
def contrast_of_time_major_rows(wrap):
    """The last steps of rows against each other, where rows are in the second dimension."""
    data = [torch.stack([x, -x, 2 * x]) for x, _ in batches()]

    def loss_of(model, x):
        out = model(x)[-1]
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))

    return trained(wrap, data, loss_of, rows=1)


@habit(may="refused", says="together")
def contrast_of_a_row_for_each_rank(wrap):
    """Rows against rows, of which every rank may have but one."""
    return trained(wrap, batches(rows=3), lambda model, b: contrast(model, b[0]))


@habit(must="equal")
def time_major_attention_of_square_batches(wrap):
    """Attention over steps, of which there are as many as rows."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0), nn.Linear(WIDTH, CLASSES)])
    data = [(torch.stack([x * i for i in range(1, 5)]), y) for x, y in batches()]

    def loss_of(model, batch):
        x, y = batch
        return F.cross_entropy(model[1](model[0](x)).mean(0), y)

    return trained(
        wrap,
        [{"x": x, "y": y} for x, y in data],
        lambda m, b: loss_of(m, (b["x"], b["y"])),
        model,
        rows={"x": 1, "y": 0},
    )


@habit(must="equal")
def attention_of_square_batches_turned(wrap):
    """Rows first in the loader, steps first in the model, as many of them as a rank has rows."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH, CLASSES)])
    data = [(torch.stack([x * i for i in range(1, 5)], 1), y) for x, y in batches()]

    def loss_of(model, batch):
        x, y = batch
        return F.cross_entropy(model[1](model[0](x, x, x)[0].transpose(0, 1)).mean(0), y)

    return trained(wrap, data, loss_of, model)
