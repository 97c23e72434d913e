"""What a unit changes in Python is never read on another stage as it was long ago: it is followed there, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.spec.errors import BadInput
from model import test_cut_hindsight
from model.kept import Block, Net
from model.test_cut_absent import compare


class Context:
    """Kept by a model, and known to its blocks."""

    def __init__(self) -> None:
        self.n, self.log, self.tensors = 0, list[float](), list[Tensor]()

    def count(self) -> int:
        return self.n


class Counts(Block):
    n = 0

    def forward(self, x: Tensor) -> Any:
        self.n += 1
        return super().forward(x)


class CountsLate(Block):
    n = calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.n += self.calls > 1
        if self.calls > 1:
            self.first = self.n
        return super().forward(x)


class Logs(Block):
    def __init__(self) -> None:
        super().__init__()
        self.log: Any = []

    def forward(self, x: Tensor) -> Any:
        self.log.append(1.0)
        return super().forward(x)


class LogsTensors(Logs):
    def forward(self, x: Tensor) -> Any:
        y = self.mix(x)
        self.log.append(y.detach().mean())
        return x + torch.tanh(y)


class KeepsWhatItIsGiven(Block):
    last: Any = None

    def forward(self, x: Tensor) -> Any:
        self.last = x
        return super().forward(x)


class CountsInContext(Block):
    context: Any = None

    def forward(self, x: Tensor) -> Any:
        self.context.n += 1
        return super().forward(x)


class CountsInParent(Block):
    parent: Any = None

    def forward(self, x: Tensor) -> Any:
        self.parent[0].n += 1
        return super().forward(x)


def first(kind: Callable[[], Any], read: Callable[[Any], Any], ready: Any = None, *, after: int = 0) -> Any:
    """A net whose first block is of a kind, of which the code behind the last one reads something, at some time."""

    class Reads(Net):
        calls = n = 0

        def __init__(self) -> None:
            super().__init__()
            self.blocks[0] = kind()
            if ready is not None:
                ready(self)

        def between(self, i: int, got: Any) -> Any:
            if i == 3:
                self.calls += 1
            return got * (1 + 0.1 * read(self)) if i == 3 and self.calls > after else got

    return Reads


def shares_a_list(net: Any) -> None:
    net.context = Context()
    net.blocks[0].log = net.context.log


def shares(give: Callable[[Any], Any]) -> Callable[[Any], None]:
    def share(net: Any) -> None:
        net.blocks[0].context = Context()
        net.read = give(net.blocks[0].context)

    return share


def knows_the_net(net: Any) -> None:
    net.blocks[0].parent = [net]


class MakesOneEachTime(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = CountsInContext()

    def forward(self, x: Tensor) -> Tensor:
        context = self.blocks[0].context = Context()
        return super().forward(x) * (1 + 0.1 * context.n)


EQUAL: dict[str, Callable[[], nn.Module]] = {
    "list_in_an_object": first(Logs, lambda net: len(net.context.log), shares_a_list),
    "method": first(CountsInContext, lambda net: net.read(), shares(lambda context: context.count)),
    "closure": first(CountsInContext, lambda net: net.read(), shares(lambda context: lambda: context.n)),
    "in_a_dict": first(CountsInContext, lambda net: net.read["all"][0].n, shares(lambda context: {"all": [context]})),
    "local": MakesOneEachTime,
    "parent": first(CountsInParent, lambda net: net.n, knows_the_net),
    "vars": first(Counts, lambda net: vars(net.blocks[0])["n"]),
    "how_many_tensors": first(LogsTensors, lambda net: len(net.blocks[0].log)),
    "what_it_was_given": first(KeepsWhatItIsGiven, lambda net: net.blocks[0].last),
}
LATER: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attribute": (first(Counts, lambda net: net.blocks[0].n, after=2), r"blocks\.0\.n"),
    "getattr": (first(Counts, lambda net: getattr(net.blocks[0], "n", 7), after=2), r"blocks\.0\.n"),
    "list": (first(Logs, lambda net: len(net.blocks[0].log), after=2), r"blocks\.0\.log"),
    "tensors": (first(LogsTensors, lambda net: sum(net.blocks[0].log), after=2), r"blocks\.0\.log"),
    "both": (first(CountsLate, lambda net: net.blocks[0].n, after=2), r"blocks\.0\.n"),
    "new": (first(CountsLate, lambda net: getattr(net.blocks[0], "first", 0), after=2), r"blocks\.0\.first"),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_what_can_be_got_at_in_another_way_is_followed(kind: str) -> None:
    torch.manual_seed(0)
    compare(EQUAL[kind]())


@pytest.mark.parametrize("kind", LATER)
def test_what_is_read_from_a_later_forward_on_is_refused_by_name(kind: str) -> None:
    torch.manual_seed(0)
    make, said = LATER[kind]
    with pytest.raises(BadInput, match=rf"wanted code that runs on stage \d to read .*{said}, which a unit of another"):
        compare(make())


def test_what_nobody_else_reads_or_is_set_again_is_as_before() -> None:
    compare(first(Counts, lambda net: 0)())

    class Resets(Net):
        block, calls = Counts, 0

        def between(self, i: int, got: Any) -> Any:
            self.calls += 1
            if i != 3 or self.calls < 8:
                return got
            self.blocks[0].n = 5
            return got * self.blocks[0].n

    compare(Resets())


class Properties(Block):
    """What it sets for itself is a property, a buffer, and a default of its class."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(2))
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    @count.setter
    def count(self, count: int) -> None:
        self._count = count

    def forward(self, x: Tensor) -> Any:
        self.count = self.count + 1
        self.running = self.running + 1
        self.scale = 1.0 + self.count
        return super().forward(x) * self.scale


def test_attributes_of_all_kinds_are_as_they_were() -> None:
    compare(first(Properties, lambda net: len(net.blocks[0].running))())

    class Resets(Net):
        block = Properties

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                block.count = 3
            return super().forward(x) * self.blocks[0].count

    compare(Resets())
    with pytest.raises(BadInput, match=r"blocks\.0\.(count|_count)"):
        compare(first(Properties, lambda net: net.blocks[0].count, after=2)())


class LooksLater(Net):
    calls = count = 0

    def between(self, i: int, got: Any) -> Any:
        self.calls += i == 3
        return got * 2 if i == 3 and self.calls > 1 and got.mean() > 50 else got

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * (1 + 0.5 * self.count))
        self.count += 1
        return y


def test_a_look_that_a_later_forward_begins_with_does_not_lose_what_comes_behind_it() -> None:
    with pytest.raises(BadInput, match=r"wanted the update of (count|calls), .*such a read before outlet"):
        compare(LooksLater())


class Holder:
    kept: Any = None
    all: list[Tensor] = []  # noqa: RUF012


class SetsTheClass(Block):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        Holder.kept = y.detach().abs().mean()
        return y


class Appends(Block):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        Holder.all.append(y.detach().abs().mean())
        return y


def hooked(kind: Callable[[], Any], read: Callable[[], Any]) -> Callable[[], nn.Module]:
    class Hooked(Block):
        def forward(self, x: Tensor) -> Any:
            y = self.mix(x)
            y.register_hook(lambda grad: grad * (0.5 + read()))
            return x + torch.tanh(y)

    class Reads(Net):
        def __init__(self) -> None:
            super().__init__()
            Holder.kept = torch.zeros(())
            Holder.all.clear()
            self.blocks[0], self.blocks[2] = Hooked(), kind()

    return Reads


@pytest.mark.parametrize("way", ["plain", "recompute"])
@pytest.mark.parametrize(
    "make",
    [hooked(SetsTheClass, lambda: Holder.kept), hooked(Appends, lambda: Holder.all[-1])],
    ids=["class", "list"],
)
def test_a_hook_that_reads_a_tensor_that_another_stage_has_left_is_refused(make: Any, way: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(BadInput, match=r"stage 0 .*(blocks\.\d|inlet).*a backward computes with it|changes the class"):
        test_cut_hindsight.compare(make(), way)


class Loads(list[int]):
    """Counts how often somebody goes through it."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        type(self).times += 1
        return super().__iter__()


def test_what_the_caller_of_a_forward_holds_is_not_gone_through() -> None:
    data = Loads([1, 2])
    Loads.times = 0
    with contextlib.suppress(BadInput):
        compare(first(LogsTensors, lambda net: 0)())
    assert Loads.times == 0 and len(data) == 2
