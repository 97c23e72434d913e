"""The loss of a batch: from the model's own loss, or from its logits in any of the forms a forward may return."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.loss.classification import Classification
from gossamer.loss.next_token import NextToken
from gossamer.spec.errors import BadInput

B, T, V = 3, 7, 11


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(V, (B, T), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    labels[1] = -100
    return {"input_ids": ids, "labels": labels}


def logits(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, T, V, generator=torch.Generator().manual_seed(1)).to(dtype)


def by_hand(logits: Tensor, labels: Tensor) -> float:
    rows = logits.double().log_softmax(-1)
    found = [-rows[b, t, labels[b, t + 1]] for b in range(B) for t in range(T - 1) if labels[b, t + 1] != -100]
    return float(torch.stack(found).mean())


class Named(NamedTuple):
    logits: Tensor
    loss: Tensor | None


FORMS: dict[str, Any] = {
    "tensor": lambda x: x,
    "dict": lambda x: {"loss": None, "logits": x},
    "tuple": lambda x: (x, "cache"),
    "list": lambda x: [x],
    "tuple of dict": lambda x: ({"logits": x}, 3),
    "object": lambda x: SimpleNamespace(logits=x, loss=None),
    "named tuple": lambda x: Named(x, None),
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_shifted_here(form: str) -> None:
    got = NextToken()(FORMS[form](logits()), batch())
    assert got.dtype == torch.float32 and got.shape == ()
    assert got.item() == pytest.approx(by_hand(logits(), batch()["labels"]), rel=1e-6)


OWN: dict[str, Any] = {
    "scalar": lambda x: x,
    "of one element": lambda x: x.view(1),
    "dict": lambda x: {"loss": x, "logits": logits()},
    "tuple": lambda x: (x, logits()),
    "object": lambda x: SimpleNamespace(loss=x),
    "named tuple": lambda x: Named(logits(), x),
}


@pytest.mark.parametrize("objective", [NextToken(), Classification()])
@pytest.mark.parametrize("form", OWN)
def test_the_models_own_loss_is_believed(objective: Any, form: str) -> None:
    own = torch.tensor(1.25, dtype=torch.bfloat16, requires_grad=True)
    got = objective(OWN[form](own), batch())
    assert got.item() == 1.25 and got.dtype == torch.float32 and got.shape == ()
    got.backward()
    assert own.grad == 1.0


def test_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    own = model(**batch())
    bare = model(input_ids=batch()["input_ids"])
    assert NextToken()(own, batch()).item() == pytest.approx(NextToken()(bare, batch()).item(), rel=1e-6)
    assert torch.equal(NextToken()(own, batch()), own.loss)
    assert NextToken()(model(**batch(), return_dict=False), batch()).item() == own.loss.item()


def test_half_logits_are_read_in_float32() -> None:
    got = NextToken()(logits(torch.bfloat16), batch()).item()
    assert got == pytest.approx(by_hand(logits(torch.bfloat16), batch()["labels"]), rel=1e-6)


def test_weights_count_labels_after_the_shift() -> None:
    assert NextToken().weight(batch()).item() == 4 + 0 + 6
    assert NextToken().weight({"labels": torch.zeros(2, 1, dtype=torch.int64)}).item() == 0
    assert Classification().weight({"labels": torch.tensor([1, -100, 0])}).item() == 2


def test_unequal_pieces_add_up_to_the_whole() -> None:
    objective, rows = NextToken(), batch()
    whole = logits().double().requires_grad_()
    objective(whole, rows).backward()
    total = objective.weight(rows)
    parts = logits().double().requires_grad_()
    for piece in (slice(0, 1), slice(1, 2), slice(2, 3)):
        cut = {k: v[piece] for k, v in rows.items()}
        (objective(parts[piece], cut) * objective.weight(cut) / total).backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("objective", [NextToken(), Classification()])
def test_no_valid_label_is_zero_with_zero_gradients(objective: Any) -> None:
    shape = (2, 3, V) if isinstance(objective, NextToken) else (2, V)
    x = torch.randn(shape, requires_grad=True)
    loss = objective(x, {"labels": torch.full(shape[:-1], -100)})
    loss.backward()
    assert loss.item() == 0.0 and x.grad is not None and not x.grad.any()


def test_classification_against_torch() -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    labels = torch.tensor([0, 3, -100, 1, 2])
    assert Classification()((x,), {"labels": labels}).item() == pytest.approx(F.cross_entropy(x, labels).item())


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (None, "NoneType"),
        ("text", "str"),
        ((), "tuple of ()"),
        ({"hidden": torch.zeros(2, 3)}, "dict(hidden: a tensor of shape (2, 3))"),
        (torch.zeros(2, 3), "a tensor of shape (2, 3)"),
    ],
)
def test_anything_else_is_named(output: Any, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        NextToken()(output, batch())
    assert said in str(caught.value) and "logits (batch, sequence, vocabulary)" in str(caught.value)


def test_logits_of_other_rows_are_named() -> None:
    with pytest.raises(BadInput, match=r"\(3, 6, 11\)"):
        NextToken()(logits()[:, 1:], batch())
    with pytest.raises(BadInput, match=r"labels \(2,\)"):
        Classification()(torch.zeros(3, 4), {"labels": torch.zeros(2, dtype=torch.int64)})


def test_missing_labels_are_named() -> None:
    with pytest.raises(BadInput, match="input_ids"):
        NextToken().weight({"input_ids": torch.zeros(2, 3)})


def test_a_label_without_a_logit_is_named() -> None:
    labels = torch.tensor([[0, 1, 9, -100, 12]])
    with pytest.raises(BadInput, match=r"^data: wanted labels from 0 to 6, .*got 9, 12: correct the labels"):
        NextToken()(torch.zeros(1, 5, 7), {"labels": labels})
    with pytest.raises(BadInput, match=r"wanted labels from 0 to 2.*got -1"):
        Classification()(torch.zeros(2, 3), {"labels": torch.tensor([2, -1])})
