"""Functions of logits in tiles: equal to those of whole logits in value and in every gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from gossamer import loss
from gossamer.loss.distillation import Distillation
from gossamer.ops.cut_cross_entropy import LogitMap
from gossamer.ops.tiled_logits import HeadRows, by_token, coarse

N, D, E, V = 37, 8, 12, 53
LOSSES = ("kl", "reverse_kl", "jsd", "taid")


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draws = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=draws).to(dtype) for shape in shapes]


def built(name: str) -> Distillation:
    found = loss.build(name)
    assert isinstance(found, Distillation)
    return found


@pytest.mark.parametrize(("name", "tile", "map"), [*itertools.product(LOSSES, (1, 16, 64), (LogitMap(), "capped"))])
def test_tiles_give_the_value_and_every_gradient_of_whole_logits(name: str, tile: int, map: LogitMap | str) -> None:
    method, kind = (
        built(name),
        LogitMap() if isinstance(map, LogitMap) else LogitMap(inner=0.3, is_capped=True, outer=4),
    )
    hidden, weight, bias, seen, head, by_row = tensors((N, D), (V, D), (V,), (N, E), (V, E), (N,))
    found = []
    for is_tiled in (False, True):
        leaves = [one.clone().requires_grad_() for one in (hidden, weight, bias)]
        student = HeadRows(hidden=leaves[0], weight=leaves[1], bias=leaves[2], map=kind)
        teacher = HeadRows(hidden=seen, weight=head)
        if is_tiled:
            values = by_token(student, lambda z, at, t=teacher: method.divergence(z, t.logits(at), 0.7), tile=tile)
        else:
            x = hidden_logits(leaves, kind)
            values = method.divergence(x, seen @ head.T, 0.7)
        (values * by_row).sum().backward()
        found.append([values.detach(), *(one.grad for one in leaves)])
    for ours, plain in zip(found[1], found[0], strict=True):
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))


def hidden_logits(leaves: list[Tensor], kind: LogitMap) -> Tensor:
    made = (leaves[0] @ leaves[1].T + leaves[2]) * kind.inner
    return torch.tanh(made) * kind.outer if kind.is_capped else made


def test_logits_of_no_head_are_tiled_too_and_no_row_is_none() -> None:
    logits, teacher = tensors((N, V), (N, V))
    leaf, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    method = built("kl")
    by_token(HeadRows(hidden=leaf), lambda z, at: method.divergence(z, teacher[at], 1.0), tile=10).sum().backward()
    method.divergence(plain, teacher, 1.0).sum().backward()
    assert torch.allclose(leaf.grad, plain.grad, atol=1e-6)
    none = by_token(HeadRows(hidden=leaf[:0]), lambda z, at: method.divergence(z, teacher[at], 1.0), tile=10)
    assert none.shape == (0,)


def test_of_a_frozen_head_the_hidden_states_alone_have_a_gradient() -> None:
    hidden, weight = tensors((N, D), (V, D))
    leaf = hidden.requires_grad_()
    by_token(HeadRows(hidden=leaf, weight=weight), lambda z, at: z.logsumexp(1), tile=5).sum().backward()
    assert leaf.grad is not None and weight.grad is None
    wanted = (hidden.detach() @ weight.T).softmax(1) @ weight
    assert torch.allclose(leaf.grad, wanted, atol=1e-5)


def test_the_first_words_alone_can_count() -> None:
    hidden, weight = tensors((N, D), (V, D))
    leaf = weight.clone().requires_grad_()
    rows = HeadRows(hidden=hidden, weight=leaf, words=20)
    assert rows.width == 20 and rows.logits().shape == (N, 20)
    by_token(rows, lambda z, at: z.square().sum(1), tile=8).sum().backward()
    assert float(leaf.grad[20:].abs().max()) == 0 and float(leaf.grad[:20].abs().min()) > 0


def test_never_more_rows_of_logits_than_a_tile() -> None:
    hidden, weight = tensors((N, D), (V, D))
    seen = list[int]()

    def value(logits: Tensor, at: slice) -> Tensor:
        seen.append(logits.shape[0])
        return logits.logsumexp(1)

    by_token(HeadRows(hidden=hidden.requires_grad_(), weight=weight), value, tile=7).sum().backward()
    assert max(seen) == 7 and sum(seen) == 2 * N


def test_chosen_words_and_all_others_as_one() -> None:
    (logits,) = tensors((N, V))
    words = logits.topk(5, dim=1).indices
    found = coarse(logits, words)
    assert found.shape == (N, 6)
    p = logits.softmax(1)
    assert torch.allclose(found.softmax(1)[:, :5], p.gather(1, words), atol=1e-6)
    assert torch.allclose(found.softmax(1)[:, 5], 1 - p.gather(1, words).sum(1), atol=1e-6)
