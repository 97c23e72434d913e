"""States in 8 bits: which parameters have them, what they weigh, and AdamW's training with them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer import optimizer as optimizer_methods
from gossamer.optimizer import is_coded
from gossamer.spec.errors import BadInput

NAMES = ["adamw_8bit", "coat"]
each = pytest.mark.parametrize("name", NAMES)
SHAPES = {
    "matrix": (64, 96), "padded": (40, 300), "images": (32, 16, 3, 3), "below": (63, 65), "norm": (9000,),
    "narrow": (4096, 8), "number": (),
}  # fmt: skip
CODED = {"matrix", "padded", "images"}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


@each
def test_small_ones_keep_float32(name: str) -> None:
    state = optimizer_methods.build(name).init(drawn(0))
    assert {one for one, slots in state.items() if is_coded(slots)} == CODED
    for one in SHAPES.keys() - CODED:
        assert {slot: t.dtype for slot, t in state[one].items()} == dict.fromkeys(("mean", "square"), torch.float32)


@pytest.mark.parametrize(("name", "bytes_each"), [("adamw", 8.0), ("adamw_8bit", 2.03), ("coat", 2.19)])
def test_bytes_per_parameter(name: str, bytes_each: float) -> None:
    state = optimizer_methods.build(name).init({"w": torch.zeros(128, 1024)})["w"]
    assert sum(t.nbytes for t in state.values()) / 2**17 == pytest.approx(bytes_each, abs=0.005)


@each
def test_blocks_lie_within_rows(name: str) -> None:
    """The states of a row do not depend on the others: rows dealt out anew are the same states."""
    rule = optimizer_methods.build(name)
    params, grads = drawn(0), drawn(1)
    state, other = rule.init(params), rule.init(drawn(0))
    rule.update(params, grads, state, lr_scale=1.0, step=0)
    grads = {n: torch.cat([g[:5], torch.randn_like(g[5:])]) if g.dim() else g for n, g in grads.items()}
    rule.update(drawn(0), grads, other, lr_scale=1.0, step=0)
    for one in CODED:
        assert all(torch.equal(t[:5], other[one][slot][:5]) for slot, t in state[one].items())
        assert not all(torch.equal(t, other[one][slot]) for slot, t in state[one].items())


@each
def test_what_is_coded_is_decided_from_the_whole_parameter(name: str) -> None:
    rule = optimizer_methods.build(name)
    slots = rule.init_rows({"w": torch.zeros(3, 96)}, {"w": (64, 96)})["w"]
    assert is_coded(slots) and all(t.shape[0] == 3 for t in slots.values())


@each
def test_steps_are_adamws_but_for_the_code(name: str) -> None:
    """Where nothing is coded bit for bit; else to a few percent of the way."""
    rules = [optimizer_methods.build({one: {"lr": 1e-2}}) for one in ("adamw", name)]
    found = [drawn(0) for _ in rules]
    for rule, params in zip(rules, found, strict=True):
        state = rule.init(params)
        for step in range(8):
            rule.update(params, drawn(10 + step), state, lr_scale=1.0, step=step)
    start, plain, ours = drawn(0), *found
    for one in SHAPES.keys() - CODED:
        assert torch.equal(plain[one], ours[one])
    for one in CODED:
        assert 0 < float((ours[one] - plain[one]).norm()) < 0.05 * float((plain[one] - start[one]).norm())


class Largest(TorchDispatchMode):
    """The most float32 numbers in one tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.known = 0, set[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor) and one.dtype == torch.float32 and not one._is_view():
                self.most = max(self.most, one.numel() if one.data_ptr() not in self.known else 0)
        return made


@each
def test_float32_moments_never_exist_for_all_of_a_parameter(name: str) -> None:
    rule, params = optimizer_methods.build(name), {"w": torch.zeros(1024, 1024)}
    grads, state = {"w": torch.ones(1024, 1024)}, rule.init(params)
    with Largest() as seen:
        seen.known = {params["w"].data_ptr(), grads["w"].data_ptr()}
        rule.update(params, grads, state, lr_scale=1.0, step=0)
    assert 0 < seen.most <= 1 << 17


@each
def test_a_tiny_second_moment_is_not_lost(name: str) -> None:
    """A gradient beside ones a million times as large: its step is not the root of nothing."""
    rule = optimizer_methods.build({name: {"lr": 1e-3, "weight_decay": 0.0}})
    params = {"w": torch.zeros(64, 128)}
    state = rule.init(params)
    for step in range(20):
        grad = torch.full((64, 128), 1e-6)
        grad[:, 0] = 1.0
        rule.update(params, {"w": grad if step % 2 else 0.1 * grad}, state, lr_scale=1.0, step=step)
    assert float(params["w"].abs().max()) < 20 * 3e-3


@each
def test_what_is_not_finite_stays_so(name: str) -> None:
    rule, params = optimizer_methods.build(name), drawn(0)
    grads, state = drawn(1), rule.init(drawn(0))
    grads["matrix"][2, 3] = float("nan")
    rule.update(params, grads, state, lr_scale=1.0, step=0)
    rule.update(params, drawn(2), state, lr_scale=1.0, step=1)
    assert not params["matrix"][2].isfinite().all() and params["matrix"][3].isfinite().all()


@each
@pytest.mark.parametrize(("field", "value"), [("lr", 0.0), ("betas", (0.9, 1.0)), ("eps", -1.0), ("weight_decay", -1)])
def test_bad_input(name: str, field: str, value: object) -> None:
    with pytest.raises(BadInput, match=field):
        optimizer_methods.build({name: {field: value}})
