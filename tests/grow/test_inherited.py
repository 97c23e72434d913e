"""What every growth takes over from its source: the epsilon of norms, persistent buffers, second moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer import grow
from gossamer.grow._parts import placed
from gossamer.model.structure.model import structure_of
from gossamer.spec.errors import BadInput
from grow.grow_models import VOCABULARY, Plain, grown, opt, spread_out, state, task_of


class Scaled(Plain):
    """A plain model with what training learns beside parameters: a scale per unit of the first block's outputs."""

    def __init__(self, width: int = 24, layers: int = 2) -> None:
        super().__init__(width, layers)
        for index, block in enumerate(self.blocks):
            block.register_buffer("scale", torch.tensor(1.0 + index))
        self.register_buffer("last", torch.tensor(1.0))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for block in self.blocks:
            x = block(x) * block.scale
        logits: Tensor = self.head(self.norm(x * self.last))
        return logits


class Reordered(nn.Module):
    """A model that registers its parts in another order than its forward uses them: positions, head, blocks, table."""

    def __init__(self, width: int = 24, layers: int = 2) -> None:
        super().__init__()
        inner = Plain(width, layers)
        self.place, self.head, self.norm = nn.Embedding(16, width), inner.head, inner.norm
        self.blocks, self.embed = inner.blocks, inner.embed
        self.between = nn.Parameter(torch.ones(width))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.place(torch.arange(ids.shape[1]))[None] + self.embed(ids)
        for block in self.blocks:
            x = block(x) * self.between
        logits: Tensor = self.head(self.norm(x))
        return logits


class Flat(nn.Module):
    """A model without repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCABULARY, 24), nn.LayerNorm(24), nn.Linear(24, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embed(ids)))
        return logits


def with_eps(module: nn.Module, eps: float) -> nn.Module:
    for one in module.modules():
        if isinstance(one, nn.LayerNorm):
            one.eps = eps
    return module


@pytest.mark.parametrize(
    ("by", "blocks"),
    [
        ("lemon", 4),
        ("g_stack", 4),
        ("de_coalesce", 4),
        ("coalesce", 1),
        ({"interpolate": {"alpha": 0.5}}, 4),
        ({"part": {"index": 1}}, 3),
        ({"assemble": {"parts": ["a", "b"]}}, 4),
    ],
)
def test_norms_have_the_epsilon_of_the_source(by: Any, blocks: int) -> None:
    source, target = with_eps(spread_out(Plain()), 0.01), Plain(layers=blocks)
    more: dict[str, Any] = {"before": state(target)} if "interpolate" in by else {}
    if "assemble" in by:
        parts = [grow.build({"part": {"index": i}}).grow(task_of(source, Plain(layers=3))).tensors for i in range(2)]
        more = {"others": tuple(parts)}
    found = grow.build(by).grow(task_of(source, target, **more))
    norms = {f"{name}.weight" for name, one in target.named_modules() if isinstance(one, nn.LayerNorm)}
    assert found.eps == dict.fromkeys(norms, 0.01)


def test_norms_of_blocks_that_become_one_must_agree() -> None:
    source = Plain(layers=4)
    source.blocks[1].first.eps = 0.5
    with pytest.raises(BadInput, match=r"one epsilon in the norms of the source.*0\.5"):
        grow.build("coalesce").grow(task_of(source, Plain(layers=2)))


@pytest.mark.parametrize(
    ("by", "scales"),
    [
        ("lemon", [5.0, 5.0, 7.0, 7.0]),
        ("g_stack", [5.0, 7.0, 5.0, 7.0]),
        ("coalesce", [6.0]),
        ({"part": {"index": 0}}, [5.0, 5.0, 5.0, 7.0]),
        ({"assemble": {"parts": ["a", "b"]}}, [5.5, 5.5, 7.0, 7.5]),
    ],
)
def test_persistent_buffers_are_grown_with_their_blocks(by: Any, scales: list[float]) -> None:
    source, target = spread_out(Scaled()), Scaled(layers=len(scales))
    for block, value in zip(source.blocks, (5.0, 7.0), strict=True):
        block.scale.fill_(value)
    source.last.fill_(3.0)
    source.seen.fill_(9)
    more: dict[str, Any] = {}
    if "assemble" in by:
        part = [grow.build({"part": {"index": i}}).grow(task_of(source, Scaled(layers=3))) for i in range(2)]
        parts = [dict(one.tensors) for one in part]
        parts[0]["blocks.1.scale"] = torch.tensor(5.5)  # which training went on with
        parts[0]["blocks.0.scale"] = torch.tensor(5.5)
        parts[1]["blocks.2.scale"] = torch.tensor(7.5)
        more = {"others": tuple(parts)}
    found = grow.build(by).grow(task_of(source, target, **more)).tensors
    assert [float(found[f"blocks.{i}.scale"]) for i in range(len(scales))] == scales
    assert (float(found["last"]), int(found["seen"])) == (3.0, 9)


def test_a_buffer_of_another_shape_is_refused_by_name() -> None:
    source, target = Scaled(), Scaled(layers=4)
    target.register_buffer("last", torch.ones(24))
    with pytest.raises(BadInput, match=r"a buffer of \(\), as in the source \(last\), got \(24,\)"):
        grow.build("g_stack").grow(task_of(source, target))


def test_what_only_the_source_has_is_refused_by_name() -> None:
    source = Plain()
    source.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(BadInput, match=r"a place in the target for all that the source has.*none for extra"):
        grow.build("g_stack").grow(task_of(source, Plain(layers=4)))


def test_new_second_moments_are_the_mean_of_their_tensors() -> None:
    """A 0 after many updates would make first steps of 1/sqrt(1 - beta2) times the rate."""
    _, _, found = grown(
        Plain, {}, {"width": 40, "layers": 4}, "lemon", moments=(moments := filled()), degrees={"mean": 1, "square": 2}
    )
    for name, one in found.moments.items():
        assert name.startswith("mean") or bool((one > 0).all()), name
    new = found.moments["square/blocks.1.down.weight"]
    torch.testing.assert_close(new, moments["square/blocks.0.down.weight"].mean().expand_as(new))
    assert not bool(found.moments["mean/blocks.1.down.weight"].any())
    grown_in_width = found.moments["square/embed.weight"]  # 24 columns from the source, and 16 new ones
    expected = grown_in_width[:, :24].mean().expand(VOCABULARY, 16)
    torch.testing.assert_close(grown_in_width[:, 24:], expected)


def filled() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    given = {name: torch.rand(one.shape, generator=draw) + 0.1 for name, one in Plain().named_parameters()}
    return {f"mean/{name}": one - 0.6 for name, one in given.items()} | {f"square/{n}": one for n, one in given.items()}


def test_moments_of_a_deeper_copy_start_anew_altogether() -> None:
    degrees = {"mean": 1, "square": 2}
    _, _, deeper = grown(Plain, {}, {"layers": 4}, "de_coalesce", moments=filled(), degrees=degrees)
    _, _, wider = grown(Plain, {}, {"width": 48}, "de_coalesce", moments=filled(), degrees=degrees)
    assert not deeper.moments and len(wider.moments) == len(filled())


def test_what_is_before_and_behind_the_blocks_is_as_the_forward_says() -> None:
    places = {name: place for name, place, _ in placed(structure_of(opt())) if not isinstance(place, int)}
    outer = "model.decoder"
    assert places[f"{outer}.final_layer_norm.weight"] == places[f"{outer}.final_layer_norm.bias"] == "head"
    assert places[f"{outer}.embed_positions.weight"] == "stem"
    assert places[f"{outer}.embed_tokens.weight"] == "both", "tied"
    own = {name: place for name, place, _ in placed(structure_of(Reordered())) if not isinstance(place, int)}
    assert own == {
        "between": "both",
        "place.weight": "stem",
        "head.weight": "head",
        "head.bias": "head",
        "norm.weight": "head",
        "norm.bias": "head",
        "embed.weight": "stem",
    }


def test_token_ids_are_those_of_the_table_that_they_look_up() -> None:
    structure = structure_of(Reordered())
    assert structure.token_ids == VOCABULARY
    assert structure.role(structure.dims["place.weight"][0]) == "positions"
    assert structure.role(structure.dims["embed.weight"][0]) == "vocabulary"


@pytest.mark.parametrize(
    ("by", "source", "target", "said"),
    [
        ("g_stack", Flat, Flat, "a model with repeated blocks, of which g_stack changes the number"),
        ({"part": {"index": 0}}, Flat, Flat, "of which part changes the number"),
        ("de_coalesce", Flat, Plain, "repeated blocks in both models, or in none, got 0 in the source and 2"),
        ("lemon", Flat, Plain, "repeated blocks in both models, or in none, got 0 in the source and 2"),
    ],
)
def test_models_without_blocks_are_refused_where_these_are_needed(by: Any, source: Any, target: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        grow.build(by).grow(task_of(source(), target()))


def test_a_model_without_blocks_is_its_own_copy() -> None:
    source = spread_out(Flat())
    found = grow.build("de_coalesce").grow(task_of(source, Flat())).tensors
    assert all(torch.equal(found[name], one) for name, one in state(source).items())


def test_the_last_part_of_opt_trains_its_final_norm() -> None:
    part = grow.build({"part": {"index": 1}}).grow(task_of(opt(), opt(num_hidden_layers=3)))
    assert r"^model\.decoder\.final_layer_norm\.weight$" in part.said["unfreeze"]
    first = grow.build({"part": {"index": 0}}).grow(task_of(opt(), opt(num_hidden_layers=3)))
    assert not any("final_layer_norm" in one for one in first.said["unfreeze"])
