"""The grid of a sweep: which commas divide values, and what is refused."""

from __future__ import annotations

import pytest

from gossamer.settings.grid import Grid, split_values
from gossamer.spec.errors import BadInput


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,3e-4", ["1e-4", "3e-4"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3,4]", ["[1,2]", "[3,4]"]),
        ("adamw,{sgd: {lr: 0.1, momentum: 0.9}}", ["adamw", "{sgd: {lr: 0.1, momentum: 0.9}}"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("", [""]),
        ("8", ["8"]),
    ],
)
def test_commas_outside_of_brackets_and_quotes_divide_values(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_points_are_all_combinations_with_the_fixed_settings() -> None:
    grid = Grid.parse(["train.batch=8,16", "train.steps=5", "data.sequence=32,64"])
    assert [axis.key for axis in grid.varied] == ["train.batch", "data.sequence"]
    assert grid.points() == [
        (f"train.batch={batch}", "train.steps=5", f"data.sequence={length}") for batch in (8, 16) for length in (32, 64)
    ]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (["train.batch"], "wanted key=value,value"),
        (["train.batch=8,,16"], "on both sides of every comma"),
        (["train.batch=8,8"], "got 8 twice"),
        (["train.batch=8", "train.batch=16"], "every key once, got train.batch twice"),
    ],
)
def test_a_setting_that_is_no_axis_is_refused(written: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        Grid.parse(written)
