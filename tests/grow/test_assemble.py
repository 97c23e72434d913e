"""Deep model assembling: parts around a shared meta model that rests, and the model that they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossamer import grow
from gossamer.grow import GrowthTask
from gossamer.grow._parts import HEAD, STEM, placed
from gossamer.model.frozen_source import FrozenSource
from gossamer.model.origin import origin_of
from gossamer.model.structure.model import structure_of
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from gossamer.store.start_folder import start_state
from grow.grow_models import gpt2, llama, opt

PARTS, COUNT = 3, 2  # blocks of the meta model, and real blocks of each part
TIED = {"tie_word_embeddings": True}


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in start_state(module)}


def task(source: nn.Module, target: nn.Module, others: tuple[Mapping[str, Tensor], ...] = ()) -> GrowthTask:
    given = {"source": structure_of(source), "target": structure_of(target)}
    return GrowthTask(tensors=tensors(source), others=others, **given)


def trained_parts(make: Any, meta: nn.Module) -> list[dict[str, Tensor]]:
    """Every part with what it may train moved by a number of its own."""
    found = []
    for index in range(PARTS):
        module = make(PARTS - 1 + COUNT)
        part = grow.build({"part": {"index": index}}).grow(task(meta, module))
        module.load_state_dict(part.tensors, strict=False)
        unfreeze = part.said["unfreeze"]
        source = FrozenSource(origin_of(ModelSection(hf="llama")), (".",), tuple(unfreeze))
        source._chosen(module)
        for param in module.parameters():
            if param.requires_grad:
                param.data += index + 1
        found.append(tensors(module))
    return found


@pytest.mark.parametrize(("kind", "tied"), [(llama, False), (llama, True), (gpt2, True)])
def test_an_assembled_model_has_each_parts_own_blocks_and_exactly_the_targets_names(kind: Any, tied: bool) -> None:
    layers = "n_layer" if kind is gpt2 else "num_hidden_layers"

    def make(blocks: int) -> nn.Module:
        return kind(**{layers: blocks, **({} if kind is gpt2 else {"tie_word_embeddings": tied})})

    meta, target = make(PARTS), make(PARTS * COUNT)
    parts = trained_parts(make, meta)
    method = grow.build({"assemble": {"parts": ["a", "b", "c"]}})
    found = method.grow(task(meta, target, tuple(parts))).tensors
    assert found.keys() == {name for name, _ in target.named_parameters()}
    block = "transformer.h" if kind is gpt2 else "model.layers"
    norm = "ln_1.weight" if kind is gpt2 else "input_layernorm.weight"
    before = tensors(meta)
    for index in range(PARTS * COUNT):
        part = index // COUNT
        expected = before[f"{block}.{part}.{norm}"] + part + 1
        torch.testing.assert_close(found[f"{block}.{index}.{norm}"], expected)
    table, last = (
        ("transformer.wte.weight", "transformer.ln_f.weight")
        if kind is gpt2
        else (
            "model.embed_tokens.weight",
            "model.norm.weight",
        )
    )
    torch.testing.assert_close(found[table], before[table] + (0 if tied else 1))
    torch.testing.assert_close(found[last], before[last] + PARTS)


def test_what_rests_in_a_part_has_no_gradient() -> None:
    meta = llama(num_hidden_layers=PARTS)
    part = llama(num_hidden_layers=PARTS - 1 + COUNT)
    made = grow.build({"part": {"index": 1}}).grow(task(meta, part))
    part.load_state_dict(made.tensors, strict=False)
    FrozenSource(origin_of(ModelSection(hf="llama")), tuple(made.said["freeze"]), tuple(made.said["unfreeze"]))._chosen(
        part
    )
    ids = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    cross_entropy(part(input_ids=ids).logits.flatten(0, 1), ids.flatten()).backward()
    with_grad = {name for name, param in part.named_parameters() if param.grad is not None}
    own = {name for name, _ in part.named_parameters() if name.startswith(("model.layers.1.", "model.layers.2."))}
    assert with_grad == own


def test_a_part_is_the_meta_model_where_each_has_one_block() -> None:
    meta = llama(num_hidden_layers=PARTS)
    for index in range(PARTS):
        made = grow.build({"part": {"index": index}}).grow(task(meta, llama(num_hidden_layers=PARTS)))
        assert all(torch.equal(made.tensors[name], one) for name, one in tensors(meta).items())


def test_a_part_whose_rest_was_trained_is_refused_by_name() -> None:
    def make(blocks: int) -> nn.Module:
        return llama(num_hidden_layers=blocks)

    meta, target = make(PARTS), make(PARTS * COUNT)
    parts = trained_parts(make, meta)
    parts[2]["model.layers.0.mlp.up_proj.weight"] = parts[2]["model.layers.0.mlp.up_proj.weight"] + 1e-3
    method = grow.build({"assemble": {"parts": ["a", "b", "c"]}})
    with pytest.raises(BadInput, match=r"model\.layers\.0\.mlp\.up_proj\.weight of part 2.*other values"):
        method.grow(task(meta, target, tuple(parts)))


@pytest.mark.parametrize(
    ("method", "blocks", "others", "said"),
    [
        ({"part": {"index": 3}}, PARTS, 0, "a part from 0 to 2"),
        ({"assemble": {"parts": ["a", "b"]}}, 6, 2, "3 parts, one for each block"),
        ({"assemble": {"parts": ["a", "b", "c"]}}, 7, 3, "3 parts, one for each block"),
    ],
)
def test_wrong_parts_are_refused(method: Any, blocks: int, others: int, said: str) -> None:
    meta = llama(num_hidden_layers=PARTS)
    with pytest.raises(BadInput, match=said):
        grow.build(method).grow(task(meta, llama(num_hidden_layers=blocks), ({},) * others))


def test_one_run_named_twice_is_refused() -> None:
    with pytest.raises(BadInput, match="two or more different runs"):
        grow.build({"assemble": {"parts": ["a", "a"]}})


def test_another_width_is_refused() -> None:
    with pytest.raises(BadInput, match="changes the number of blocks alone"):
        grow.build({"part": {"index": 0}}).grow(
            task(llama(num_hidden_layers=2), llama(num_hidden_layers=3, intermediate_size=48))
        )


def test_what_is_behind_the_blocks_is_found_by_the_forward() -> None:
    """OPT registers its last norm before its blocks."""
    where = {name: at for name, at, _ in placed(structure_of(opt()))}
    assert where["model.decoder.final_layer_norm.weight"] == HEAD
    assert where["model.decoder.embed_positions.weight"] == STEM
