"""A rank's rows of a batch of any form; what cannot be told is asked for."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gossamer.own_loop.batch_fingerprint import fingerprint
from gossamer.own_loop.batches import Divider
from gossamer.spec.errors import BadInput

Pair = namedtuple("Pair", "x y")
HALF = (0.5, 0.5)


@dataclass
class Item:
    x: Tensor
    name: str


def second(**settings: object) -> Divider:
    return Divider(rank=1, parts=HALF, **settings)


def numbers(rows: int) -> Tensor:
    return torch.arange(rows * 3).view(rows, 3)


FORMS = {
    "a tensor": (numbers(4), lambda b: b),
    "a tuple": ((numbers(4), torch.arange(4)), lambda b: b[0]),
    "a list": ([numbers(4), torch.arange(4)], lambda b: b[0]),
    "a named tuple": (Pair(numbers(4), torch.arange(4)), lambda b: b.x),
    "a data class": (Item(numbers(4), "train"), lambda b: b.x),
    "a dictionary of its own kind": (OrderedDict(x=numbers(4), n=3), lambda b: b["x"]),
    "nested": ({"in": (numbers(4), {"mask": torch.ones(4)}), "out": torch.arange(4)}, lambda b: b["in"][0]),
    "an array": ({"x": numbers(4).numpy()}, lambda b: torch.from_numpy(b["x"])),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_comes_back_as_it_was_with_the_ranks_rows(name: str) -> None:
    batch, first = FORMS[name]
    share = second().share(batch)
    assert type(share.batch) is type(batch)
    assert torch.equal(first(share.batch), numbers(4)[2:])
    assert (share.rows, share.whole) == (2, 4)


def test_words_of_rows_go_with_them_and_others_stay() -> None:
    batch = {"x": numbers(4), "names": ["a", "b", "c", "d"], "split": "train", "epoch": 3, "nothing": None}
    found = second().share(batch).batch
    assert (found["names"], found["split"], found["epoch"], found["nothing"]) == (["c", "d"], "train", 3, None)


def test_a_tensor_without_rows_is_asked_for_by_name() -> None:
    batch = {"x": numbers(4), "y": torch.arange(4), "classes": torch.ones(7)}
    with pytest.raises(BadInput, match=r"classes.*rows="):
        second().share(batch)
    found = second(rows={"classes": None}).share(batch).batch
    assert (len(found["x"]), len(found["classes"])) == (2, 7)


def test_rows_may_be_in_the_second_dimension() -> None:
    batch = (numbers(6).view(9, 2), torch.arange(18).view(9, 2))
    with pytest.raises(BadInput, match="rows=1"):
        second(may_be_time_major=True).share(batch)
    found = second(may_be_time_major=True, rows=1).share(batch).batch
    assert torch.equal(found[0], batch[0][:, 1:])


def test_a_function_divides_what_is_of_an_unknown_form() -> None:
    class Graph:
        def __init__(self, nodes: list[int]) -> None:
            self.nodes = nodes

    with pytest.raises(BadInput, match=r"Graph.*rows="):
        second().share({"graph": Graph([1, 2, 3])})
    share = second(rows=lambda batch, take: Graph(batch.nodes[take(3)])).share(Graph([1, 2, 3]))
    assert (share.batch.nodes, share.rows) == ([3], 1)


def test_fewer_rows_than_ranks_leave_a_spare_one_that_counts_nothing() -> None:
    share = Divider(rank=2, parts=(1.0, 1.0, 1.0)).share((numbers(2),))
    assert (share.rows, share.whole, len(share.batch[0])) == (0, 2, 1)


def test_a_batch_that_is_not_as_large_as_the_loader_says_is_not_guessed_at() -> None:
    time_major = (torch.zeros(7, 4, 3), torch.zeros(7, 4))
    with pytest.raises(BadInput, match="4, the loader's batch size"):
        second(given_rows=4).share(time_major, is_last=False)
    assert second(given_rows=4).share((numbers(3),), is_last=True).rows == 1  # the last one may be short


def test_unequal_shares() -> None:
    assert Divider(rank=0, parts=(3.0, 1.0)).share(numbers(8)).rows == 6


def test_a_fingerprint_is_of_everything_in_a_batch() -> None:
    batch = {"x": numbers(4), "y": torch.arange(4.0), "names": ["a", "b"]}
    changed = [
        {**batch, "x": numbers(4)[[1, 0, 2, 3]]},
        {**batch, "y": torch.arange(4.0) + 1e-6},
        {**batch, "names": ["b", "a"]},
        {**batch, "y": torch.arange(4.0).double()},
    ]
    assert fingerprint(batch) == fingerprint(dict(batch))
    assert len({fingerprint(one) for one in [batch, *changed]}) == 5


def test_a_large_tensors_fingerprint_sees_another_order_of_rows() -> None:
    large = torch.randn(64, 100, 100, generator=torch.Generator().manual_seed(0))
    assert fingerprint(large) != fingerprint(large[torch.arange(63, -1, -1)])


def test_records_of_rows_go_with_them() -> None:
    records = [{"name": name} for name in "abcd"]
    batch = {"x": numbers(4), "about": records, "scales": list(torch.arange(4.0).unbind()), "box": [1, 2, 3]}
    found = second().share(batch).batch
    assert (found["about"], found["scales"], found["box"]) == (records[2:], [2.0, 3.0], [1, 2, 3])


@pytest.mark.parametrize("one", [numbers(4).to_sparse(), torch.eye(4).to_sparse_csr()])
def test_a_tensor_that_cannot_be_cut_by_rows_is_asked_for(one: Tensor) -> None:
    with pytest.raises(BadInput, match=r"sparse.*rows="):
        second().share({"x": one})


def test_a_tuple_of_numbers_that_is_as_long_as_the_batch_is_asked_for() -> None:
    batch = {"x": numbers(2), "size": (8, 3), "names": ("a", "b"), "lengths": [5, 6], "shape": torch.Size((4, 4))}
    with pytest.raises(BadInput, match=r"numbers at size.*\{\"size\": 0\}.*\{\"size\": None\}"):
        second().share(batch)
    found = second(rows={"size": None}).share(batch).batch
    assert (found["size"], found["names"], found["lengths"], found["shape"]) == ((8, 3), ("b",), [6], (4, 4))
    assert second(rows={"size": 0}).share(batch).batch["size"] == (3,)


def test_a_tuple_that_was_not_as_long_as_its_batch_before_is_of_no_rows() -> None:
    divider = second()
    for rows in (4, 2):
        assert divider.share({"x": numbers(rows), "size": (8, 3)}).batch["size"] == (8, 3)


def test_as_many_tensors_as_rows_of_as_many_rows_are_asked_for() -> None:
    weights = [torch.full((4,), float(i)) for i in range(4)]
    for batch in ({"x": numbers(4), "w": weights}, (numbers(4), tuple(weights)), weights):
        with pytest.raises(BadInput, match="4 tensors of 4 rows each"):
            second().share(batch)
    told = {"x": 0, **{f"w.{i}": 0 for i in range(4)}}
    assert [len(one) for one in second(rows=told).share({"x": numbers(4), "w": weights}).batch["w"]] == [2] * 4
    by_hand = second(rows=lambda batch, take: {name: part[take(4)] for name, part in batch.items()})
    assert [float(one[0]) for one in by_hand.share({"x": numbers(4), "w": weights}).batch["w"]] == [2.0, 3.0]


def test_fields_are_not_mistaken_for_rows() -> None:
    two = [numbers(2), numbers(2).clone()]
    assert [len(one) for one in second().share(two).batch] == [1, 1]
    fields = {"x": numbers(3), "more": [torch.zeros(3), torch.zeros(3, 2), torch.zeros(3).long()]}
    assert [len(one) for one in second().share(fields).batch["more"]] == [1, 1, 1]
    divider = second()
    for rows in (5, 3):  # three fields, which three rows would have too
        batch = {"x": numbers(rows), "more": [torch.zeros(rows) for _ in range(3)]}
        assert [len(one) for one in divider.share(batch).batch["more"]] == [rows // 2] * 3


@pytest.mark.parametrize("rows", [0, 1])
def test_a_share_knows_which_dimensions_have_rows(rows: int) -> None:
    share = second(rows={"x": rows, "w": None}).share({"x": torch.zeros(4, 4), "w": torch.ones(7)})
    ((tensor, dim),) = share.having_rows()
    assert (tensor.shape[rows], tensor.shape[1 - rows], dim) == (2, 4, rows)
