from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.forward_adapter import caller_of
from gossamer.model.source.hf import Hf
from gossamer.run.engine import check_isolates
from gossamer.spec.errors import BadInput
from model.tiny import CONFIGS, Plain, batch


class Records(nn.Module):
    """Remembers how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}


class Named(Records):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> None:
        self.seen = {"input_ids": input_ids, "labels": labels}


class Everything(Records):
    def forward(self, **batch: Tensor) -> None:
        self.seen = batch


class OtherName(Records):
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> None:
        self.seen = {"idx": idx, "targets": targets}


class Starred(Records):
    def forward(self, *args: Tensor, labels: Tensor | None = None) -> None:
        self.seen = {"args": args, "labels": labels}


class Needy(nn.Module):
    def forward(self, input_ids: Tensor, style: Tensor) -> None: ...


class Blind(nn.Module):
    def forward(self, *, labels: Tensor) -> None: ...


def called(module: Records, **more: Tensor) -> dict[str, Any]:
    caller_of(module)(module, batch() | more)
    return module.seen


@pytest.mark.parametrize(("forward", "is_told"), [(Named, False), (OtherName, False), (Everything, True)])
def test_documents_are_isolated_in_a_forward_that_is_told_where_they_begin(
    forward: type[Records], is_told: bool
) -> None:
    module = forward()
    if is_told:
        check_isolates(module, caller_of(module))
        return
    with pytest.raises(BadInput, match=r"data\.isolate: wanted a forward with a parameter position_ids"):
        check_isolates(module, caller_of(module))


def test_each_forward_gets_what_it_takes() -> None:
    ids, extra = batch()["input_ids"], torch.ones(2, 16)
    assert set(called(Named(), attention_mask=extra)) == {"input_ids", "labels"}
    assert set(called(Everything(), attention_mask=extra)) == {"input_ids", "labels", "attention_mask"}
    other = called(OtherName(), attention_mask=extra)
    assert torch.equal(other["idx"], ids) and other["targets"] is None
    starred = called(Starred())
    assert torch.equal(starred["args"][0], ids) and torch.equal(starred["labels"], ids)


class Images(Records):
    def forward(self, pixels: Tensor, size: int, labels: Tensor | None = None) -> None:
        self.seen = {"pixels": pixels, "size": size, "labels": labels}


def test_what_is_no_text_goes_by_name() -> None:
    images = {"pixels": torch.ones(2, 3, 4, 4), "size": torch.tensor(4), "labels": torch.ones(2)}
    module = Images()
    caller_of(module, images)(module, images)
    assert all(module.seen[key] is images[key] for key in images)


def test_a_plain_module_is_called_with_the_tokens() -> None:
    module = Plain()
    caller = caller_of(module)
    assert caller(module, batch()).shape == (2, 16, 257)


def test_models_of_transformers_keep_no_cache() -> None:
    module = Hf("llama", CONFIGS["llama"]).fitted_to_tokenizer(257, 256).build(0)
    caller = caller_of(module)
    output = caller(module, batch())
    assert output.loss is not None and output.past_key_values is None
    assert caller_of(torch.compile(module, backend="eager")) == caller  # type: ignore[arg-type]


def test_forwards_that_cannot_be_called() -> None:
    with pytest.raises(BadInput, match="style"):
        caller_of(Needy())
    with pytest.raises(BadInput, match="takes tokens"):
        caller_of(Blind())
