"""The structure of models: what dims are, found by the operators of a forward, and what cannot be followed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.structure.dimension import Clash, Dimension, parts_of, product_of, sliced, unify, viewed
from gossamer.model.structure.model import (
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    POSITIONS,
    READS,
    STREAM,
    VOCABULARY,
    WRITES,
    ModelStructure,
    structure_of,
)
from gossamer.spec.errors import BadInput
from grow.grow_models import Plain, bert, gpt2, llama


def roles(found: ModelStructure, name: str) -> list[list[tuple[int, str]]]:
    return [[(leaf.size, found.role(leaf)) for leaf in dim.leaves()] for dim in found.dims[name]]


def test_a_llama_with_grouped_heads() -> None:
    found = structure_of(llama())
    block = "model.layers.1."
    assert roles(found, block + "self_attn.k_proj.weight") == [
        [(2, HEADS), (3, HEAD_SIZE), (3, HEAD_SIZE)],  # rotary: two halves
        [(24, STREAM)],
    ]
    assert [role for _, role in roles(found, block + "self_attn.q_proj.weight")[0]][:2] == [HEADS, HEADS]
    assert roles(found, block + "mlp.down_proj.weight") == [[(24, STREAM)], [(36, HIDDEN)]]
    assert found.how(block + "mlp.down_proj.weight", 0) == {WRITES}
    assert found.how(block + "mlp.down_proj.weight", 1) == {READS}
    assert roles(found, "lm_head.weight") == [[(50, VOCABULARY)], [(24, STREAM)]]
    assert [(norm.kind, norm.eps) for norm in found.norms] == [("rms", 1e-6)] * 5
    (read,) = found.reads[block + "mlp.up_proj.weight"]
    assert read is not None and read.weight == block + "post_attention_layernorm.weight"
    assert found.reads[block + "mlp.down_proj.weight"] == {None}
    assert found.blocks == ("model.layers.0", "model.layers.1") and not found.shared()


def test_a_gpt2_with_a_fused_projection_and_a_tied_head() -> None:
    found = structure_of(gpt2())
    fused = roles(found, "transformer.h.0.attn.c_attn.weight")  # Conv1D: inputs first
    assert fused == [[(24, STREAM)], [(4, HEADS), (6, HEAD_SIZE)] * 3]
    assert roles(found, "transformer.wpe.weight") == [[(64, POSITIONS)], [(24, STREAM)]]
    assert found.shared() == {"transformer.wte.weight"}
    assert {norm.kind for norm in found.norms} == {"layer"} and all(norm.bias for norm in found.norms)


def test_heads_of_one_block_are_not_those_of_another() -> None:
    found = structure_of(gpt2())
    first, second = (found.dims[f"transformer.h.{i}.attn.c_proj.weight"][0].factors()[0] for i in range(2))
    assert first is not second
    assert found.dims["transformer.h.0.ln_1.weight"][0].root is found.dims["transformer.ln_f.bias"][0].root


def test_an_encoder_and_a_plain_module() -> None:
    found = structure_of(bert())
    assert roles(found, "bert.encoder.layer.0.attention.self.query.weight")[0] == [(4, HEADS), (6, HEAD_SIZE)]
    assert roles(found, "cls.predictions.bias") == [[(50, VOCABULARY)]]
    plain = structure_of(Plain())
    assert roles(plain, "place")[1] == [(24, STREAM)]
    assert roles(plain, "blocks.0.qkv.weight")[0][1:] == [(4, HEADS), (6, HEAD_SIZE)]  # after query, key, value
    assert {norm.eps for norm in plain.norms} == {1e-5, 1e-4}


class Odd(nn.Module):
    """A block whose result is sorted, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.idle = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.linalg.qr(self.mix(self.embed(ids)))[0]


def test_an_operator_that_cannot_be_followed_is_named() -> None:
    with pytest.raises(BadInput, match=r"linalg_qr.*\(3, 11, 8\)"):
        structure_of(Odd())


def test_the_model_itself_is_left_as_it_is() -> None:
    module = gpt2().train()
    before = {name: p.clone() for name, p in module.named_parameters()}
    structure_of(module)
    assert module.training and module.config._attn_implementation == "sdpa"
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


def test_dimensions_are_refined_where_two_forms_meet() -> None:
    whole = Dimension(24)
    (rows,) = viewed([whole], (24,))
    heads, size = viewed([rows], (4, 6))
    assert [one.size for one in whole.factors()] == [4, 6]
    other = product_of([Dimension(2), Dimension(12)])
    unify(whole, other)
    assert [one.size for one in whole.factors()] == [2, 2, 6] and size.root is whole.factors()[-1]
    assert heads.root.form == "product"
    fused = Dimension(30)
    middle = sliced(fused, 10, 20)
    unify(middle, Dimension(10))
    assert [one.size for one in fused.parts()] == [10, 10, 10] and fused.parts()[1] is middle.root
    assert parts_of(fused.parts()).size == 30


@pytest.mark.parametrize(
    "clash",
    [
        lambda: unify(Dimension(3), Dimension(4)),
        lambda: viewed([Dimension(6), Dimension(35)], (10, 21)),
        lambda: unify(product_of([Dimension(2), Dimension(3)]), parts_of([Dimension(2), Dimension(4)])),
        lambda: sliced(product_of([Dimension(2), Dimension(3)]), 1, 4),
    ],
)
def test_what_cannot_be_one_is_a_clash(clash: object) -> None:
    with pytest.raises(Clash):
        clash()  # type: ignore[operator]


class Slopes(nn.Module):
    """A linear layer with a slope per head, which is a power of a number by a tensor, as ALiBi of Bloom has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor) -> Tensor:
        slopes = torch.pow(torch.tensor(0.5), torch.arange(1, 9))
        return self.head(torch.tanh(self.up(self.embed(input_ids)) * slopes))


def test_a_power_by_a_tensor_is_followed() -> None:
    found = structure_of(Slopes())
    assert [leaf.size for leaf in found.dims["up.weight"][0].leaves()] == [8]
