"""The match of two models in this process: of which tokens it is, where its gradient goes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.loss import hidden_match
from gossamer.run.hidden_states import (
    CHILD,
    BlockTaps,
    EarthMovers,
    HiddenMaps,
    HiddenTerm,
    TappedStates,
    attach,
    blocks_of,
    label_rows,
)
from gossamer.spec.errors import BadInput


class Stack(nn.Module):
    """`twice`: its blocks run twice in a forward; `bare`: their forward is called past the hooks."""

    def __init__(self, width: int, layers: int = 3, *, twice: bool = False, bare: bool = False) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, width), nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head, self.twice, self.bare = nn.Linear(width, 9), twice, bare

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for _ in range(1 + self.twice):
            for layer in self.layers:
                x = torch.tanh(layer.forward(x) if self.bare else layer(x))
        out: Tensor = self.head(x)
        return out


def batch() -> dict[str, Tensor]:
    ids = torch.randint(9, (3, 5), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[1, :3], labels[2] = -100, -100
    return {"input_ids": ids, "labels": labels}


def term(student: nn.Module, teacher: nn.Module, by: Any, pairs: list[tuple[str, str]], weight: float) -> HiddenTerm:
    match = hidden_match.build(by)
    maps = HiddenMaps([match.shapes(4, 6) for _ in pairs], next(student.parameters()), 0)
    attach(student, maps)
    ours, theirs = (BlockTaps.on("", one, [pair[n] for pair in pairs]) for n, one in enumerate((student, teacher)))
    numbered = [(*pair, at) for at, pair in enumerate(pairs)]
    return HiddenTerm(by=match, weight=weight, pairs=numbered, maps=maps, student=ours, teacher=TappedStates(theirs))


def taps_of(found: HiddenTerm) -> BlockTaps:
    assert isinstance(found.teacher, TappedStates)
    return found.teacher.taps


def ran(found: HiddenTerm, student: nn.Module, teacher: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    student(rows["input_ids"])
    teacher(rows["input_ids"])
    return found.loss(rows)


def test_it_is_the_mean_over_pairs_and_tokens_that_predict() -> None:
    torch.manual_seed(0)
    student, teacher, rows = Stack(4), Stack(6, 2), batch()
    found = term(student, teacher, "mse", [("layers.0", "layers.0"), ("layers.1", "layers.1")], 0.5)
    value = ran(found, student, teacher, rows)
    x, y, by_hand = student.embed(rows["input_ids"]), teacher.embed(rows["input_ids"]), torch.zeros(())
    for pair in range(2):
        x, y = student.layers[pair](x), teacher.layers[pair](y)
        # labels -100 of token t + 1: token t predicts nothing; 4 tokens of row 0, and of row 1 those before 3 and 4
        kept = [(0, t) for t in range(4)] + [(1, 2), (1, 3)]
        mapped = x @ student.get_parameter(f"{CHILD}.map_{pair}").T
        by_hand = by_hand + sum((mapped[at] - y[at]).square().mean() for at in kept) / len(kept) / 2
        x, y = torch.tanh(x), torch.tanh(y)
    assert float(value.detach()) == pytest.approx(0.5 * float(by_hand.detach()), rel=1e-5)


@pytest.mark.parametrize("by", hidden_match.names())
def test_its_gradient_reaches_student_and_maps_and_not_the_teacher(by: str) -> None:
    torch.manual_seed(0)
    student, teacher = Stack(4), Stack(6)
    ran(term(student, teacher, by, [("layers.1", "layers.2")], 1.0), student, teacher, batch()).backward()
    reached = {name for name, p in student.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    maps = {name for name, _ in student.named_parameters() if name.startswith(CHILD)}
    assert reached >= maps | {"embed.weight", "layers.0.weight", "layers.1.weight"} and len(maps) >= 1
    assert not reached & {"layers.2.weight", "head.weight"}
    assert all(p.grad is None for p in teacher.parameters())


def test_tokens_are_drawn_by_the_generator_where_there_are_more() -> None:
    """With as many tokens as there are, it is the bound of all of them; fewer ones follow the generator alone."""
    torch.manual_seed(0)
    student, teacher, rows = Stack(4), Stack(6), batch()
    pairs = [("layers.1", "layers.2")]
    values = []
    for tokens in (6, 100):
        found = term(student, teacher, {"mi_alpha": {"tokens": tokens}}, pairs, 1.0)
        values.append(float(ran(found, student, teacher, rows).detach()))
        del student._modules[CHILD]
        found.student.remove()
        taps_of(found).remove()
    assert values[0] == values[1]
    found = term(student, teacher, {"mi_alpha": {"tokens": 3}}, pairs, 1.0)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(float(ran(found, student, teacher, rows).detach()))
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0] != values[0]


def test_where_each_block_costs_least_with_its_own_the_distance_is_the_mean_over_pairs() -> None:
    costs = torch.tensor([[0.1, 3.0, 2.0], [2.0, 0.2, 4.0], [5.0, 2.0, 0.3]], requires_grad=True)
    value = EarthMovers(3)(costs.flatten())
    value.backward()
    assert float(value.detach()) == pytest.approx(float(costs.detach().diagonal().mean()))
    assert costs.grad is not None and torch.equal(costs.grad, torch.eye(3) / 3)  # the flow alone
    assert EarthMovers(3)(torch.full((9,), torch.nan)).isnan()


def test_a_row_with_one_label_is_the_mean_of_its_tokens() -> None:
    hidden = torch.arange(12.0).view(2, 3, 2)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    rows = {"labels": torch.tensor([1, 0])}
    assert label_rows(hidden, rows, "").tolist() == [[2, 3], [8, 9]]
    assert label_rows(hidden, {**rows, "attention_mask": mask}, "").tolist() == [[1, 2], [8, 9]]
    assert label_rows(hidden[:, 0], rows, "").tolist() == [[0, 1], [6, 7]]
    for wrong in (torch.zeros(2, 4, 5, 2), torch.zeros(3, 2)):
        with pytest.raises(BadInput, match="of the tokens of the batch"):
            label_rows(wrong, rows, "layers.0")


@pytest.mark.parametrize(("habit", "said"), [("twice", "got 2 calls of layers.1"), ("bare", "got 0 calls of layers.1")])
def test_blocks_that_do_not_run_once_are_refused(habit: str, said: str) -> None:
    student, teacher = Stack(4, **{habit: True}), Stack(6)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=said):
        ran(term(student, teacher, "mse", [("layers.1", "layers.2")], 1.0), student, teacher, batch())


def test_an_evaluation_between_leaves_nothing_held() -> None:
    student, teacher = Stack(4), Stack(6)
    found = term(student, teacher, "mse", [("layers.1", "layers.2")], 1.0)
    student(batch()["input_ids"])
    value = ran(found, student, teacher, batch())
    assert value.isfinite() and not found.student.held and not taps_of(found).held


def test_models_without_one_list_of_blocks_and_a_taken_name_are_refused() -> None:
    both = nn.Module()
    both.encoder, both.decoder = Stack(4), Stack(4)
    with pytest.raises(BadInput, match=r"got 2 \(decoder.layers, encoder.layers\)"):
        blocks_of(both, "the teacher")
    with pytest.raises(BadInput, match="got none"):
        blocks_of(nn.Linear(2, 2), "the teacher")
    student = Stack(4)
    maps = HiddenMaps([{"map": (6, 4)}], next(student.parameters()), 0)
    undo = attach(student, maps)
    with pytest.raises(BadInput, match="has an attribute hidden_match"):
        attach(student, maps)
    undo()
    assert not hasattr(student, CHILD)
