"""Python state in odd places: a forward that is run again before its backward changes it once."""

from __future__ import annotations

import array
import collections
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer.model.split.recompute import InPlaceWrites, LastPython, once_more


class Box:
    calls = 0


class OtherBox(Box):
    pass


class Slots:
    __slots__ = ("__calls", "late")

    def __init__(self) -> None:
        self.__calls = 0

    def count(self) -> int:
        self.__calls += 1
        return self.__calls


class Word(str):
    calls = 0


class Net(nn.Module):
    """A linear layer, and a number that a habit takes from `held` and changes there."""

    def __init__(self, make: Callable[[], Any], habit: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear, self.habit, self.calls = nn.Linear(2, 2), habit, 0
        self.held = make()

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.habit(self)).square().sum()


def _once() -> Callable[[], float]:
    value = 3.0

    def take() -> float:
        nonlocal value
        try:
            found = value
            del value
        except NameError:
            return 5.0
        return found

    return take


def _later() -> Callable[[], float]:
    def take() -> float:
        nonlocal value
        try:
            value += 1
        except NameError:
            value = 3.0
        return value

    if not take:
        value = 0.0
    return take


def _defaults() -> Callable[[], float]:
    def take(value: float = 1.0) -> float:
        return value

    return take


def _making() -> collections.defaultdict[str, int]:
    made = [0]

    def make() -> int:
        made[0] += 1
        return made[0]

    return collections.defaultdict(make)


def _boxes() -> tuple[list[Box], weakref.WeakValueDictionary[int, Box]]:
    boxes = [Box() for _ in range(3)]
    return boxes, weakref.WeakValueDictionary(enumerate(boxes))


def own_dict(net: Any) -> float:
    net.__dict__ = {**vars(net), "calls": net.calls + 1}
    return float(net.calls)


def dict_of_an_object(net: Any) -> float:
    vars(net)["held"].__dict__ = {"calls": net.held.calls + 1}
    return float(net.held.calls)


def an_empty_slot(net: Any) -> float:
    if hasattr(net.held, "late"):
        return 2.0
    net.held.late = True
    return 1.0


def another_class(net: Any) -> float:
    was, net.held.__class__ = type(net.held), OtherBox
    return 1.0 if was is Box else 2.0


def attribute(net: Any) -> float:
    net.held.calls = getattr(net.held, "calls", 0) + 1
    return float(net.held.calls)


def attribute_of_a_parameter(net: Any) -> float:
    net.linear.weight.calls = getattr(net.linear.weight, "calls", 0) + 1
    return float(net.linear.weight.calls)


def turned(net: Any) -> float:
    net.held.data = net.held.data.t()
    return float(net.held[0, 1])


def other_defaults(net: Any) -> float:
    net.held.__defaults__ = (net.held() + 1,)
    return float(net.held())


def made_anew(net: Any) -> float:
    net.held.pop("a", None)
    return float(net.held["a"])


def weakly_held(net: Any) -> float:
    boxes, known = net.held
    count = len(known)
    del boxes[:1]
    return 1.0 + count


def other_end(net: Any) -> float:
    type(net).end = range(0, 7 - getattr(Net, "end", range(0, 4, 2)).stop, 2)
    return float(net.end.stop)


def sign_of_zero(net: Any) -> float:
    net.held[0] = -net.held[0]
    return 2 + math.copysign(1, net.held[0])


def one_or_true(net: Any) -> float:
    was = net.held.pop()
    net.held.add(True if type(was) is int else 1)
    return 1.0 if was is True else 2.0


def in_an_array(net: Any) -> float:
    net.held[0].append(1)
    return float(len(net.held[0]))


def shape_of_an_array(net: Any) -> float:
    net.held.shape = net.held.shape[::-1]
    return float(len(net.held))


def behind_a_proxy(net: Any) -> float:
    net.held["a"].append(1)
    return float(len(net.held["a"]))


def _array() -> Any:
    made = np.empty(1, object)
    made[0] = []
    return made


WAYS: list[tuple[Callable[[], Any], Callable[[Any], float]]] = [
    (int, own_dict),
    (Box, dict_of_an_object),
    (Slots, lambda net: float(net.held.count())),
    (Slots, an_empty_slot),
    (_once, lambda net: net.held()),
    (_later, lambda net: net.held()),
    (Box, another_class),
    (lambda: torch.zeros(1), attribute),
    (lambda: Word("a"), attribute),
    (int, attribute_of_a_parameter),
    (lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]]), turned),
    (_defaults, other_defaults),
    (_making, made_anew),
    (_boxes, weakly_held),
    (int, other_end),
    (lambda: array.array("d", [0.0]), sign_of_zero),
    (lambda: {1}, one_or_true),
    (_array, in_an_array),
    (lambda: np.zeros((2, 3)), shape_of_an_array),
    (lambda: types.MappingProxyType({"a": []}), behind_a_proxy),
]


def trained(make: Callable[[], Any], habit: Callable[[Any], float], *, is_recomputed: bool) -> list[float]:
    """The losses of two steps of three micro-batches, the last forwards without a gradient, and the weights."""
    torch.manual_seed(0)
    Net.end = range(0, 4, 2)  # type: ignore[attr-defined]
    net, writes, last = Net(make, habit), InPlaceWrites(), LastPython()
    optimizer, found = torch.optim.SGD(net.parameters(), 0.05), []
    for _ in range(2):
        optimizer.zero_grad()
        for rows in (torch.ones(3, 2), torch.ones(3, 2) * 2, torch.ones(3, 2) * 3):
            loss = _recomputed(net, rows, writes, last) if is_recomputed else net(rows)
            loss.backward()
            found.append(float(loss.detach()))
        optimizer.step()
        with torch.no_grad():
            found.append(float(net(torch.ones(1, 2))))
    return [*found, *(float(x) for p in net.parameters() for x in p.detach().flatten())]


def _recomputed(net: Net, rows: Tensor, writes: InPlaceWrites, last: LastPython) -> Tensor:
    python = last.of(net)
    _, buffers = writes.run(lambda: net(rows), net, python)
    found: Tensor = once_more(lambda: net(rows), net, buffers, python, last)
    return found


@pytest.mark.parametrize(("make", "habit"), WAYS, ids=[f"{at}-{habit.__name__}" for at, (_, habit) in enumerate(WAYS)])
def test_it_changes_once(make: Callable[[], Any], habit: Callable[[Any], float]) -> None:
    assert trained(make, habit, is_recomputed=True) == trained(make, habit, is_recomputed=False)
