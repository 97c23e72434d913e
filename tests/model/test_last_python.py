"""The last snapshot of Python state serves as long as nothing has changed, and no longer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from gossamer.model.split.recompute import LastPython, once_more


class Slots:
    __slots__ = ("first", "second")

    def __init__(self) -> None:
        self.first = 1


class Plain:
    pass


def _cell() -> tuple[Callable[[], Any], Callable[[], None]]:
    def read() -> Any:
        return late

    def fill() -> None:
        nonlocal late
        late = [1]

    if not fill:
        late = None
    return read, fill


class Model(nn.Module):
    shared: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.count, self.scale = 0, 0.0
        self.seen: list[int] = [1]
        self.words = {"a": [1], "b": [2]}
        self.slots, self.plain = Slots(), Plain()
        self.kept = torch.zeros(2, requires_grad=True)
        self.read, self.fill = _cell()


def _grad(model: Model) -> None:
    model.kept.grad = torch.ones(2)


def _hook(model: Model) -> None:
    model.kept.register_hook(lambda grad: grad)


def _reorder(model: Model) -> None:
    model.words["a"] = model.words.pop("a")


CHANGES: dict[str, Callable[[Model], Any]] = {
    "an attribute": lambda m: setattr(m, "count", 1),
    "a new attribute": lambda m: setattr(m, "more", 1),
    "minus zero": lambda m: setattr(m, "scale", -0.0),
    "a list": lambda m: m.seen.append(2),
    "an inner list": lambda m: m.words["a"].append(2),
    "the order of a dict": _reorder,
    "a slot": lambda m: setattr(m.slots, "second", 2),
    "another dict of attributes": lambda m: setattr(m.plain, "__dict__", {}),
    "an attribute of the class": lambda m: setattr(Model, "added", 1),
    "what the class holds": lambda m: Model.shared.update(a=1),
    "a variable around a function": lambda m: m.fill(),
    "a gradient": _grad,
    "whether it needs a gradient": lambda m: m.kept.requires_grad_(False),
    "a hook": _hook,
    "the memory of a tensor": lambda m: setattr(m.kept, "data", torch.ones(2)),
}


@pytest.fixture
def model() -> Iterator[Model]:
    yield Model()
    Model.shared.clear()
    if hasattr(Model, "added"):
        del Model.added


def test_a_snapshot_serves_again_where_nothing_has_changed(model: Model) -> None:
    last = LastPython()
    first = last.of(model)
    model.linear(torch.ones(2)).sum().backward()
    assert last.of(model) is first


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_takes_another(model: Model, change: Callable[[Model], Any]) -> None:
    last = LastPython()
    first = last.of(model)
    change(model)
    second = last.of(model)
    assert second is not first and last.of(model) is second


@pytest.mark.parametrize(
    "held", [iter([1, 2]), weakref.WeakValueDictionary(), (n for n in range(3))], ids=lambda held: type(held).__name__
)
def test_what_can_be_restored_once_or_would_live_on_is_taken_each_time(model: Model, held: Any) -> None:
    model.held = held
    last = LastPython()
    assert last.of(model) is not last.of(model)


def test_a_second_run_leaves_no_trace_and_starts_from_the_first_ones_state(model: Model) -> None:
    def forward() -> int:
        model.count += 1
        return model.count

    last = LastPython()
    began = last.of(model)
    assert forward() == 1
    assert once_more(forward, model, [], began, last) == 1 and model.count == 1
    assert last.of(model) is not began
    began = last.of(model)
    assert once_more(forward, model, [], began, last) == 2 and model.count == 1
    assert last.of(model) is began
