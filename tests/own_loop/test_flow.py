"""Rows of a batch stay apart on the way to a loss, or the step that takes them together is named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.loss_reader.batch_tensors import OfBatch
from gossamer.loss_reader.row_paths import followed

STEPS, WIDTH = 4, 8


@pytest.fixture(autouse=True)
def every_graph_is_followed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What flow does not know how to follow passes in a loop, and is said to a log alone."""
    caplog.set_level(logging.DEBUG, logger="gossamer.loss_reader.row_paths")
    yield
    assert not caplog.messages


def seeded(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes)))


def made(rows: int, *features: int) -> Tensor:
    """What a layer makes of rows."""
    torch.manual_seed(0)
    return nn.Linear(features[-1], features[-1])(seeded(rows, *features))


def found(loss: Tensor, rows: int, *leaves: tuple[Tensor, int], first: int = 0, folds: bool = True) -> str:
    return followed([loss], OfBatch(rows, leaves, first, folds=folds)).together


def other(o: Tensor) -> Tensor:
    """A second view of the same rows, of another tower."""
    return nn.Linear(o.shape[-1], o.shape[-1])(o.detach() + 0.1)


def frozen(o: Tensor) -> Tensor:
    """A second view without a graph."""
    return (o.detach() + 0.1).tanh()


def y(o: Tensor) -> Tensor:
    return torch.arange(len(o))


TOGETHER = {
    "rows against rows": lambda o: F.cross_entropy(o @ o.T, y(o)),
    "two towers": lambda o: F.cross_entropy(F.normalize(o, dim=-1) @ F.normalize(other(o), dim=-1).T, y(o)),
    "a tower without a graph": lambda o: F.cross_entropy(o @ frozen(o).T, y(o)),
    "the same, turned": lambda o: F.cross_entropy(frozen(o) @ o.T, y(o)),
    "by matmul of three dimensions": lambda o: (o[None] @ o.T[None]).logsumexp(-1).mean(),
    "by einsum": lambda o: torch.einsum("id,jd->ij", o, other(o)).logsumexp(1).mean(),
    "by broadcasting": lambda o: (o[:, None] - other(o)[None]).square().sum(-1).logsumexp(1).mean(),
    "cosines of pairs": lambda o: F.cosine_similarity(o[:, None], o[None], dim=-1).exp().sum(1).log().mean(),
    "distances": lambda o: torch.cdist(o, other(o)).mean(),
    "scaled and shifted": lambda o: torch.addmm(torch.zeros(1), o, o.T).logsumexp(-1).mean(),
    "two views in one": lambda o: (torch.cat([o, -o]) @ torch.cat([o, -o]).T).logsumexp(-1).mean(),
    "two views, stacked": lambda o: (torch.stack([o, -o], 1).flatten(0, 1) @ torch.cat([o, -o]).T).logsumexp(-1).mean(),
    "means of classes": lambda o: (F.one_hot(y(o) % 2).float().T @ o).square().sum(),
    "features against features": lambda o: (o.T @ o).square().mean(),
    "features against what has no graph": lambda o: (frozen(o).T @ o).square().mean(),
    "attention over rows": lambda o: F.scaled_dot_product_attention(o[None], o[None], o[None]).mean(),
    "attention over rows by hand": lambda o: ((o @ o.T).softmax(-1) @ o).mean(),
    "a layer over rows": lambda o: nn.Linear(len(o), 3)(o.T).square().mean(),
    "a root of a mean": lambda o: o.square().mean(0).sqrt().sum(),
    "rows less their mean": lambda o: (o - o.mean(0)).square().mean(),
    "their spread": lambda o: o.var(0).mean() if len(o) > 1 else o.norm(dim=0).mean(),
    "a softmax over rows": lambda o: o.softmax(0).square().mean(),
    "the largest": lambda o: o.amax(0).mean(),
    "running sums": lambda o: o.cumsum(0).square().mean(),
    "a product of two means": lambda o: (o.mean(0) * o.exp().mean(0)).sum(),
}
SEVERAL = {
    "a convolution over rows": lambda o: (
        F.conv1d(o.T[None], torch.ones(o.shape[1], o.shape[1], 1)).exp().var(-1).mean()
    ),
    "by einsum, late interaction": lambda o: (
        torch.einsum("iqd,jkd->ijqk", o.view(len(o), 2, -1), o.view(len(o), 2, -1)).amax(-1).mean()
    ),
    "means of classes, added up": lambda o: torch.zeros(2, o.shape[1]).index_add(0, y(o) % 2, o).square().mean(),
    "the next row": lambda o: (o - o.roll(1, 0)).square().mean(),
    "the others turned around": lambda o: (o - o.flip(0)).square().mean(),
    "another order": lambda o: (o - o[torch.arange(len(o) - 1, -1, -1)]).square().mean(),
    "halves": lambda o: o[: len(o) // 2].square().mean(),
    "halves by a view": lambda o: o.view(2, -1, o.shape[1]).prod(0).mean(),
    "the first": lambda o: o[0].square().mean(),
    "the first against all": lambda o: (o * o[0]).sum(-1).mean(),
    "rows in an order of their own": lambda o: o[torch.arange(len(o) - 1, -1, -2)].square().mean(),
    "one row times another": lambda o: (o[0] * o[1]).mean() + o.square().mean(),
    "advantages of mean 0": lambda o: (o[:, 0] * centered(frozen(o)[:, 0])).mean(),
    "advantages of mean 0, in a column": lambda o: (o[:, :1] * centered(frozen(o)[:, :1])).mean(),
    "advantages over steps too": lambda o: (o * centered(frozen(o))).mean(),
    "advantages of every column": lambda o: (o * (frozen(o) - frozen(o).mean(0))).mean(),
    "a target of mean 0 and spread 1": lambda o: F.mse_loss(o, centered(frozen(o))),
    "a half of what is large": lambda o: o.square().sum(-1).topk(len(o) // 2).values.mean(),
    "what has no graph, by broadcasting": lambda o: (o[:, None] - frozen(o)[None]).square().sum(-1).logsumexp(1).mean(),
}


def centered(one: Tensor) -> Tensor:
    return (one - one.mean()) / (one.std() + 1e-8)


@pytest.mark.parametrize("rows", [6, 2, 1])
@pytest.mark.parametrize("name", TOGETHER)
def test_rows_that_meet_are_named(name: str, rows: int) -> None:
    assert found(TOGETHER[name](made(rows, WIDTH)), rows)


@pytest.mark.parametrize("rows", [6, 4])
@pytest.mark.parametrize("name", SEVERAL)
def test_two_rows_that_meet_are_named(name: str, rows: int) -> None:
    assert found(SEVERAL[name](made(rows, WIDTH)), rows)


@pytest.mark.parametrize("folds", [True, False])
def test_rows_of_any_number_that_were_selected_before(folds: bool) -> None:
    o = made(5, WIDTH)  # of 8
    assert found(F.cross_entropy(o @ o.T, y(o)), 8, folds=folds)
    assert not found(F.cross_entropy(o, torch.zeros(5, dtype=torch.long)), 8, folds=folds)


def test_rows_in_the_second_dimension_that_meet_are_named() -> None:
    x = seeded(STEPS, 6, WIDTH)
    o = nn.Linear(WIDTH, WIDTH)(x)  # (steps, rows, features)
    for loss in (o[-1] @ o[-1].T, o.mean(0) @ o.mean(0).T, torch.einsum("tid,tjd->tij", o, o), o.softmax(1)):
        assert found(loss.exp().mean(), 6, (x, 1), first=1)
    assert not found(o.softmax(0).mean(0).square().mean(), 6, (x, 1), first=1)


APART = {
    "a mean": lambda o: o.square().sum(-1).mean(),
    "a mean over rows first": lambda o: o.square().mean(0).mean(),
    "weights of tasks": lambda o: (o.square().mean(0) * torch.full((WIDTH,), 1 / WIDTH)).sum(),
    "features against features of one row": lambda o: torch.einsum("ni,nj->nij", o, o).square().mean(),
    "a softmax over features": lambda o: o.softmax(-1).topk(3).values.mean(),
    "rows selected": lambda o: o[o[:, 0] > o[:, 0].min() - 1].square().mean(),
    "labels gathered": lambda o: o.log_softmax(-1).gather(1, (y(o) % WIDTH)[:, None]).mean(),
    "labels by an index": lambda o: -o.log_softmax(-1)[torch.arange(len(o)), y(o) % WIDTH].mean(),
    "rows one by one": lambda o: sum(one.square().sum() for one in o) / len(o),
    "rows by number": lambda o: torch.stack([o[i].exp().sum() for i in range(len(o))]).mean(),
    "a few for each": lambda o: (o.repeat_interleave(3, 0).view(-1, 3, WIDTH) - o[:, None]).square().mean(),
    "two views of each": lambda o: F.mse_loss(*torch.cat([o, o.tanh()]).chunk(2)),
    "two views in one, by a view": lambda o: torch.stack([o, o.tanh()]).prod(0).mean(),
    "experts": lambda o: experts(o).square().mean(),
    "a hidden layer": lambda o: nn.Linear(WIDTH, 2)(F.layer_norm(o, (WIDTH,)).relu()).square().mean(),
    "prototypes": lambda o: (o @ nn.Parameter(seeded(WIDTH, 5))).logsumexp(-1).mean(),
    "prototypes, by distances": lambda o: torch.cdist(o, nn.Parameter(seeded(5, WIDTH))).amin(-1).mean(),
    "prototypes, by broadcasting": lambda o: (
        (o[:, None] - nn.Parameter(seeded(5, WIDTH))).square().sum(-1).amin(1).mean()
    ),
    "a triplet": lambda o: F.triplet_margin_loss(o, other(o), o.tanh(), margin=9.0),
    "a baseline of a layer": lambda o: (o - nn.Linear(WIDTH, 1)(o)).square().mean(),
    "a masked mean": lambda o: (o.square().sum(-1) * (y(o) % 2)).sum() / 3,
    "nothing let through": lambda o: o.masked_fill(o > 1, 0.0).square().mean(),
    "nan left out": lambda o: o.nanmean(),
    "a norm of each": lambda o: o.norm(dim=-1).mean(),
    "a determinant of each": lambda o: (o[:, :4].reshape(-1, 2, 2).det() ** 2).mean(),
}


def experts(o: Tensor) -> Tensor:
    """Each row goes through a layer that is chosen by it."""
    out = torch.zeros_like(o)
    for at in range(2):
        (chosen,) = torch.where(y(o) % 2 == at)
        out = out.index_add(0, chosen, nn.Linear(WIDTH, WIDTH)(o[chosen]))
    return out


def mixture(x: Tensor) -> Tensor:
    """Each step of each row goes to the two experts that a router chooses, all steps of one expert together."""
    torch.manual_seed(0)
    steps = x.reshape(-1, WIDTH)
    weights, chosen = nn.Linear(WIDTH, 4)(steps).softmax(-1).topk(2, -1)
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=4).tolist()
    sorted_steps = steps[order // 2]
    out = torch.cat([nn.Linear(WIDTH, WIDTH)(one) for one in sorted_steps.split(counts)])
    out = out * (weights / weights.sum(-1, keepdim=True)).flatten()[order][:, None]
    return torch.zeros_like(steps).index_add(0, order // 2, out).view_as(x)


def mixture_put_back(x: Tensor) -> Tensor:
    """The same, with each choice put back into its place, and then added up."""
    torch.manual_seed(0)
    steps = x.reshape(-1, WIDTH)
    weights, chosen = nn.Linear(WIDTH, 4)(steps).softmax(-1).topk(2, -1)
    order = chosen.flatten().argsort(stable=True)
    out = nn.Linear(WIDTH, WIDTH)(steps[order // 2]).tanh()
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order)))
    return (out[back].view(-1, 2, WIDTH) * weights[..., None]).sum(1).view_as(x)


@pytest.mark.parametrize("rows", [6, 4, 3, 2, 1])
@pytest.mark.parametrize("experts_of", [mixture, mixture_put_back])
def test_steps_that_are_sorted_by_expert_and_added_back_pass(experts_of: Callable[[Tensor], Tensor], rows: int) -> None:
    x = seeded(rows, STEPS, WIDTH)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
    out = layer(experts_of(layer(x)))
    assert not found(F.cross_entropy(out.flatten(0, 1), torch.arange(rows * STEPS) % WIDTH), rows, (x, 0))
    assert found((out[:, 0] @ out[:, 0].T).exp().mean(), rows, (x, 0))


def test_choices_of_a_router_that_meet_those_of_other_rows_are_named() -> None:
    x = seeded(6, STEPS, WIDTH)
    steps = nn.Linear(WIDTH, WIDTH)(x).reshape(-1, WIDTH)
    order = (steps[:, 0] * 7).long().argsort(stable=True)
    assert found((steps[order] * steps).mean(), 6, (x, 0))
    assert found(torch.zeros(3, WIDTH).index_add(0, order % 3, steps).square().mean(), 6, (x, 0))


ONE_ROW = {
    "a product of folded steps": lambda o: torch.einsum("bin,bjn->bij", o, o).softmax(-1).mean(),
    "the same, with heads": lambda o: (
        torch.einsum("ibnd,jbnd->ijbn", *[o.transpose(0, 1).unflatten(-1, (2, -1))] * 2).softmax(1).mean()
    ),
    "states of chunks": lambda o: (
        torch.einsum("bcln,bchpn->bclhp", o[:, None], o[:, None, :2, None].expand(-1, -1, -1, 3, -1)).square().mean()
    ),
    "chunks of steps": lambda o: (
        torch.einsum("bhcqd,bhckd->bhcqk", *[o[:, None].unflatten(2, (2, -1))] * 2).softmax(-1).mean()
    ),
    "a convolution over steps": lambda o: F.gelu(nn.Conv1d(WIDTH, WIDTH, 2, padding=1)(o.transpose(1, 2))).mean(),
    "positions from a shifted view": lambda o: shifted(torch.einsum("bin,bjn->bij", o, torch.cat([o, o], 1))).mean(),
    "what was written into": lambda o: written(o.flatten(0, 1)).view_as(o).transpose(1, 2).softmax(-1).square().mean(),
}


def shifted(scores: Tensor) -> Tensor:
    """Scores of relative positions, moved by one for each step by a view."""
    rows, i, j = scores.shape
    return scores.reshape(rows, j, i)[:, 1:].reshape(rows, i, j - 1)[..., :i].softmax(-1)


def written(steps: Tensor) -> Tensor:
    out = torch.zeros_like(steps)
    out[:] = steps
    return out


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", ONE_ROW)
def test_steps_of_one_row_may_meet(name: str, rows: int) -> None:
    x = seeded(rows, STEPS, WIDTH)
    assert not found(ONE_ROW[name](nn.Linear(WIDTH, WIDTH)(x)), rows, (x, 0))


@pytest.mark.parametrize("rows", [8, 6, 5, 4, 2, 1])
@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_pass(name: str, rows: int) -> None:
    assert not found(APART[name](made(rows, WIDTH)), rows)


def test_a_model_of_constants_of_the_batchs_size_passes() -> None:
    rows = WIDTH
    x = seeded(rows, rows, rows)
    layer = nn.Linear(rows, rows)
    o = layer(x)
    causal = torch.ones(rows, rows).tril() == 0
    scores = (o @ o.transpose(1, 2)).masked_fill(causal, -1e9) + nn.Embedding(rows, rows)(torch.arange(rows))
    assert not found((scores.softmax(-1) @ o * torch.linspace(1, 2, rows)).mean(), rows, (x, 0))


TRANSFORMERS = {"first": (True, 0), "second": (False, 1)}


@pytest.mark.parametrize(("rows", "steps"), [(6, 6), (6, 3), (6, 1), (3, 6), (3, 3), (1, 6), (1, 3)])
@pytest.mark.parametrize("place", TRANSFORMERS)
def test_attention_with_as_many_steps_as_rows(place: str, rows: int, steps: int) -> None:
    batch_first, dim = TRANSFORMERS[place]
    x = seeded(rows, steps, WIDTH) if batch_first else seeded(steps, rows, WIDTH)
    for layer in (
        nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first),
        nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=batch_first),
        nn.LSTM(WIDTH, WIDTH, batch_first=batch_first),
        nn.GRU(WIDTH, WIDTH, 2, batch_first=batch_first),
    ):
        out = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        for leaves in ([(x, dim)], []) if steps != rows else ([(x, dim)],):
            assert not found(loss, rows, *leaves, first=dim), (type(layer), leaves)
        inner = nn.Linear(WIDTH, WIDTH)(x)
        out = layer(inner, inner, inner) if isinstance(layer, nn.MultiheadAttention) else layer(inner)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        assert not found(loss, rows, (x, dim), first=dim), type(layer)


@pytest.mark.parametrize(("rows", "steps"), [(6, 6), (3, 3), (6, 3), (1, 3)])
def test_a_model_that_turns_its_batch_around(rows: int, steps: int) -> None:
    x = seeded(rows, steps, WIDTH)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0)
    assert not found(layer(x.transpose(0, 1)).transpose(0, 1).square().mean(), rows, (x, 0))
    out = layer(nn.Linear(WIDTH, WIDTH)(x).transpose(0, 1))  # (steps, rows, features)
    assert not found(out.square().mean(), rows, (x, 0))
    assert found((out[-1] @ out[-1].T).exp().mean(), rows, (x, 0))


@pytest.mark.parametrize("rows", [6, 2, 1])
def test_images_pass(rows: int) -> None:
    x = seeded(rows, 2, 4, 4)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.MaxPool2d(2), nn.BatchNorm2d(4),
        nn.ConvTranspose2d(4, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ).eval()  # fmt: skip
    loss = F.cross_entropy(model(x), torch.zeros(rows, dtype=torch.long))
    assert not found(loss, rows, (x, 0)) and not found(loss, rows)
    upscaled = F.interpolate(nn.Conv2d(2, 2, 1)(x), scale_factor=2, mode="bilinear")
    assert not found(F.pad(upscaled, (1, 1)).square().mean(), rows)


def test_a_checkpoint_is_not_run_again() -> None:
    runs = 0

    def block(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return (x * seeded(6, WIDTH)).tanh()

    out = torch.utils.checkpoint.checkpoint(block, made(6, WIDTH), use_reentrant=False)
    assert not found(out.square().mean(), 6)
    assert found((out @ out.T).exp().mean(), 6)
    assert runs == 1


@pytest.mark.parametrize("place", ["as it is", "a copy", "changed"])
def test_rows_that_want_a_gradient_are_no_parameter(place: str) -> None:
    x = seeded(6, WIDTH)
    inner = {"as it is": x, "a copy": x.clone(), "changed": 2 * x + 0.1}[place].requires_grad_()
    z = nn.Linear(WIDTH, WIDTH)(inner)
    assert found(F.cross_entropy(z @ z.T, y(z)), 6, (x.detach(), 0))
    assert not found(z.square().mean(), 6, (x.detach(), 0))


def test_rows_are_found_by_their_numbers_whatever_was_done_to_their_places() -> None:
    """Where a dimension is as large as there are rows, and has none."""
    rows, ids = 4, torch.arange(40).view(2, 4, 5)
    words = nn.Embedding(40, WIDTH)
    out = words(torch.cat([ids[0], ids[1]])[:, :-1])  # (2 rows, 4)
    assert not found(out.exp().sum(1).log().mean(), rows, (ids[0], 0), (ids[1], 0))
    assert found(out.exp().sum(0).log().mean(), rows, (ids[0], 0), (ids[1], 0))
    x = seeded(rows, 4, 4, 2)
    windows = torch.roll(x, (-1, -1), (1, 2)).view(rows, 2, 2, 2, 2, 2).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 2)
    inner = nn.Linear(2, 2)(windows)
    assert not found((inner @ inner.mT).softmax(-1).mean(), rows, (x, 0))
    assert found(inner.view(rows, 4, 4, 2).softmax(0).square().mean(), rows, (x, 0))
    turned = seeded(3, 3, WIDTH)
    steps = nn.Linear(WIDTH, WIDTH)(turned[:, :3].transpose(0, 1).reshape(-1, WIDTH)).view(3, 3, WIDTH)
    assert not found(steps.cumsum(0).tanh().mean(), 3, (turned, 0))
    assert found(steps.cumsum(1).tanh().mean(), 3, (turned, 0))


def test_positions_do_not_hide_where_rows_are() -> None:
    x = seeded(3, 5, WIDTH)
    away = nn.Embedding(9, WIDTH)(torch.arange(5)[:, None] - torch.arange(5)[None] + 4)  # (5, 5, WIDTH)
    q = nn.Linear(WIDTH, WIDTH)(x)
    scores = torch.matmul(q.transpose(0, 1), away.transpose(1, 2)).transpose(0, 1) + q @ q.transpose(1, 2)
    out = scores.softmax(-1) @ q
    assert not found((out @ out.mT).softmax(-1).square().mean(), 3, (x, 0))
    assert found(out.mean(1).softmax(0).square().mean(), 3, (x, 0))


def test_what_meets_every_row_is_told_to_the_other_ranks() -> None:
    x, prompts = seeded(6, WIDTH), seeded(4, WIDTH, WIDTH)[:, 0]
    images, texts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def met(rows: Tensor, other: Tensor, *, apart: bool = False) -> int:
        a, b = images(rows), texts(other)
        scores = a @ b.T if not apart else -(a[:, None] - b[None]).square().sum(-1)
        path = followed([scores.logsumexp(1).mean()], OfBatch(len(rows), ((rows, 0),)))
        assert not path.together
        return path.strangers

    for apart in (False, True):
        same = {met(x, prompts, apart=apart), met(2 * x[:5], prompts, apart=apart)}
        assert len(same) == 1 and min(same) > 0
        assert met(x, 2 * x[:4] + 1, apart=apart) not in same
    assert followed([images(x).square().mean()], OfBatch(6, ((x, 0),))).strangers == 0
    assert followed([images(x[:1]).square().mean()], OfBatch(1, ((x[:1], 0),))).strangers == -1


@pytest.mark.parametrize("lengths", [(3, 3, 3), (2, 2), (4, 4, 4, 4), (4, 3, 2), (3, 3, 1)])
def test_packed_rows_with_as_many_steps_as_rows_pass(lengths: tuple[int, ...]) -> None:
    x = seeded(len(lengths), 5, WIDTH)
    inner = nn.Linear(WIDTH, WIDTH)(x)
    packed = nn.utils.rnn.pack_padded_sequence(inner, torch.tensor(lengths), batch_first=True)
    out, _ = nn.utils.rnn.pad_packed_sequence(nn.LSTM(WIDTH, WIDTH, batch_first=True)(packed)[0], batch_first=True)
    assert not found(out[:, :-1].square().mean(), len(lengths), (x, 0))


def test_one_row_beside_one_step_is_not_taken_for_the_step() -> None:
    q = nn.Linear(WIDTH, WIDTH)(seeded(1, 1, WIDTH)).view(1, 1, 4, 2).transpose(1, 2)  # (row, heads, step, features)
    assert not found((q @ q.transpose(2, 3)).exp().mean(), 1)


def test_numbers_that_every_row_normalizes_by_itself_pass() -> None:
    o = made(6, 4, WIDTH)[..., 0]
    gain = centered_rows(frozen(o))
    assert not found((o * gain).mean(), 6)
    assert not found((o.flatten() * gain.flatten()).mean(), 6)
    assert not found(nn.Linear(4, 4)(gain).square().mean(), 6, (gain, 0))


def centered_rows(one: Tensor) -> Tensor:
    return (one - one.mean(1, keepdim=True)) / one.std(1, keepdim=True)
