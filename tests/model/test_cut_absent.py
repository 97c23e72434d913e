"""What a stage does not have is absent: it may be passed on and shown, and nothing else comes of it without a word."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.split.absent_tensor import AbsentTensor, Over, StageAbsence
from gossamer.model.split.output_leaf import Produced
from gossamer.model.split.reference import LossFunction, run_lockstep, stages_of
from gossamer.model.split.split_points import SplitPoints
from gossamer.model.split.trace import trace
from gossamer.model.unit_seeds import UnitSeeds, unit_seeds
from gossamer.model.units import unit_names
from gossamer.spec.errors import BadInput
from model.kept import EQUAL, REFUSED, WIDTH, Net

THIRDS = SplitPoints(("inlet", "blocks.1", "blocks.3"))
BATCHES = [{"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i))} for i in range(4)]


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)


def loss_of(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    loss: Tensor = (module(batch["x"]) - 0.3).square().mean()
    return loss


def compare(module: nn.Module, cuts: SplitPoints = THIRDS, *, is_keyed: bool = False) -> None:
    """Losses and gradients of some batches, one after the other, are those of one process, bit for bit."""
    whole = copy.deepcopy(module)
    loss = keyed(loss_of) if is_keyed else loss_of
    losses = []
    for batch in BATCHES:
        losses.append(loss(whole, batch))
        losses[-1].backward()
    flow = trace(module, lambda: loss_of(module, BATCHES[0]), units=unit_names(module))
    ours = run_lockstep(stages_of(module, flow, cuts), loss, BATCHES)
    assert [x.tolist() for x in ours.losses] == [x.tolist() for x in losses]
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert ours.gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def keyed(loss: LossFunction) -> LossFunction:
    """With randomness by batch and unit."""
    seeds: dict[int, UnitSeeds] = {}

    def run(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        found = seeds.get(id(module)) or seeds.setdefault(id(module), unit_seeds(module, seed=3))
        with found.at(1, int(batch["x"].sum() * 1e6)):
            return loss(module, batch)

    return run


@pytest.mark.parametrize(
    "cuts",
    [
        THIRDS,
        pytest.param(SplitPoints(("inlet", "blocks.2")), marks=pytest.mark.nightly),
        SplitPoints(("inlet", "outlet")),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", EQUAL)
def test_what_python_keeps_is_as_in_one_process(kind: str, cuts: SplitPoints) -> None:
    torch.manual_seed(0)
    compare(EQUAL[kind](), cuts)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_read_and_not_there_is_refused_by_name(kind: str) -> None:
    torch.manual_seed(0)
    make, said = REFUSED[kind]
    with pytest.raises(BadInput, match=said):
        compare(make())


def absent(*shape: int, dtype: torch.dtype = torch.float32, needs_grad: bool = False) -> tuple[Tensor, StageAbsence]:
    absence = StageAbsence(1)
    return absence.tensor(Produced(shape, dtype, torch.device("cpu"), needs_grad), "the output of blocks.0"), absence


LOOKS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "float": lambda x: float(x.mean()),
    "index": lambda x: [1, 2][x.argmax()],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().cpu().numpy(),
    "array": lambda x: __import__("numpy").asarray(x),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, torch.ones(3, 4)),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat": lambda x: x.repeat_interleave(x[:, 0].long(), 0),
    "contains": lambda x: 1.0 in x,
    "compared": lambda x: max(x.sum(), torch.ones(())),
    "pickle": lambda x: __import__("pickle").dumps(x),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_number_of_it_can_not_be_read(look: str) -> None:
    x, absence = absent(3, 4)
    with pytest.raises(
        BadInput, match=r"stage 1 .*the output of blocks\.0.*reads a value of it .* at test_cut_absent\.py:\d+"
    ):
        with absence.forward():
            LOOKS[look](x)
    with pytest.raises(Over), absence.forward():
        absence.is_over = True
        LOOKS[look](x)


STAYS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "product": lambda x: [x @ torch.ones(4, 2), torch.nn.functional.linear(x, torch.ones(5, 4))],
    "views": lambda x: [x[0], x.t(), x.view(-1), *x.unbind(), x[:, None].expand(3, 2, 4), x.detach()],
    "mixed": lambda x: [torch.cat([torch.ones(1, 4), x]), torch.where(torch.ones(4) > 0, x, 0.0), torch.ones(4) + x],
    "by_a_real_mask": lambda x: [x[torch.tensor([True, False, True])], x[:, torch.tensor([3, 1])]],
    "in_place": lambda x: [x.add_(1), x.mul_(torch.ones(4)), x.zero_(), x.masked_fill_(torch.ones(4) > 0, 1.0)],
    "into_a_view": lambda x: [x, x.__setitem__(0, torch.ones(4)) or x],
    "turned": lambda x: [x.t_(), x.unsqueeze_(0), x.transpose_(1, 2), x.squeeze_(0), x.swapdims_(0, 1) + 1],
    "sorted": lambda x: [*x.sort(), *x.topk(2), x.argsort()],
    "dropped": lambda x: [torch.nn.functional.dropout(x, 0.5), torch.bernoulli(x.sigmoid())],
    "cast": lambda x: [x.to(torch.bfloat16), x.long(), x.double(), x > 0, x.to("cpu")],
    "module": lambda x: [torch.nn.Linear(4, 3)(x), torch.nn.LayerNorm(4)(x), torch.nn.GRU(4, 4)(x)[0]],
    "recurrent": lambda x: [*torch.nn.GRU(4, 4, batch_first=True)(x[None]), *torch.nn.RNN(4, 4)(x), x + 1],
    "function": lambda x: [Doubled.apply(x)],
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("what", STAYS)
def test_whatever_is_computed_from_it_is_absent_and_has_the_shape_of_the_real_one(what: str, needs_grad: bool) -> None:
    real = torch.zeros(3, 4)
    real = real.requires_grad_().clone() if needs_grad else real
    x, absence = absent(3, 4, needs_grad=needs_grad)
    with absence.forward():
        ours, theirs = STAYS[what](x), STAYS[what](real)
        for a, b in zip(ours, theirs, strict=True):
            assert isinstance(a, AbsentTensor) and not isinstance(b, AbsentTensor)
            assert (a.shape, a.dtype, a.device, a.requires_grad) == (b.shape, b.dtype, b.device, b.requires_grad)
            assert a.stride() == b.stride() and a.is_leaf == b.is_leaf


def test_what_only_has_its_shape_is_real() -> None:
    x, absence = absent(3, 4)
    with absence.forward():
        made = [torch.zeros_like(x), torch.ones_like(x), x.new_zeros(2), torch.full_like(x, 2.0), x.new_full((2,), 1.0)]
        assert not any(isinstance(y, AbsentTensor) for y in made) and sum(float(y.sum()) for y in made) == 12 + 24 + 2
        torch.manual_seed(1)
        ours = torch.rand_like(x), torch.nn.functional.dropout(x), torch.rand(2)
        torch.manual_seed(1)
        theirs = torch.rand(3, 4), torch.nn.functional.dropout(torch.ones(3, 4)), torch.rand(2)
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[2], theirs[2])


def test_memory_that_it_was_written_to_is_absent_until_it_is_written_anew() -> None:
    x, absence = absent(4)
    kept = torch.zeros(3, 4)
    with absence.forward():
        first = kept[0]
        kept[1] = x
        assert isinstance(kept.sum(), AbsentTensor) and isinstance(first + 1, AbsentTensor)
    with absence.forward():  # it stays
        assert isinstance(kept[2] * 2, AbsentTensor)
        kept[1] = torch.ones(4)
        assert isinstance(kept[1] * 2, AbsentTensor), "who knows how much of it was written before"
        kept.copy_(torch.ones(3, 4))
        assert float(kept.sum()) == 12
    with pytest.raises(BadInput, match=r"blocks\.1 computes with it"), absence.forward():
        torch.stack([x], out=kept)
        absence.unit = "blocks.1"
        kept.sum()


def test_a_refusal_is_raised_at_the_end_whoever_caught_it() -> None:
    x, absence = absent(4)
    with pytest.raises(BadInput, match="reads a value of it"), absence.forward():
        try:
            x.tolist()
        except Exception:
            x = torch.ones(4)
        assert x.sum() == 4


def test_a_loss_of_what_is_not_there_is_refused() -> None:
    class Ghostly(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            first = self.inlet(x)
            for block in self.blocks:
                x = block(x if self.calls else first)
            return self.outlet(x) if self.calls < 3 else self.outlet(x) + first.mean()

    with pytest.raises(BadInput, match=r"stage 2 .*got the output of inlet.*the loss is computed from it"):
        compare(Ghostly())


def test_dropout_between_units_draws_the_same_numbers_on_what_is_absent() -> None:
    class Noisy(Net):
        def between(self, i: int, got: Tensor) -> Tensor:
            return nn.functional.dropout(got, 0.2) + 0.1 * torch.rand(WIDTH)

    torch.manual_seed(0)
    compare(Noisy(), is_keyed=True)
