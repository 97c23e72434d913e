"""What every update rule must do; the rules are found by the room."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gossamer import optimizer as optimizer_methods
from gossamer.optimizer.eva_s import EvaS
from gossamer.optimizer.lars import Lars
from gossamer.optimizer.master import Master
from gossamer.optimizer.muon import Muon
from gossamer.spec.errors import BadInput

Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=optimizer_methods.names())
def rule(request: pytest.FixtureRequest) -> optimizer_methods.Optimizer:
    return optimizer_methods.build(request.param)


def some(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (17, 9), "vector": (9,), "scalar": (), "one": (1, 1), "none": (0, 3), "cube": (2, 3, 4)}
    shapes |= {"large": (41, 131), "images": (64, 8, 3, 3)}  # enough for states in 8 bits
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def run(
    rule: optimizer_methods.Optimizer, params: Tensors, state: optimizer_methods.OptimizerState, steps: range
) -> None:
    for step in steps:
        rule.update(params, some(100 + step), state, lr_scale=0.5, step=step)


def clone(state: optimizer_methods.OptimizerState) -> optimizer_methods.OptimizerState:
    return {n: {s: t.clone() for s, t in slots.items()} for n, slots in state.items()}


def same(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def test_is_a_frozen_value(rule: optimizer_methods.Optimizer) -> None:
    assert dataclasses.is_dataclass(rule) and rule.lr > 0
    assert rule == dataclasses.replace(rule) and hash(rule) == hash(dataclasses.replace(rule))
    for each in dataclasses.fields(rule):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(rule, each.name, 1.0)


def test_slots_have_the_parameters_rows_or_are_one_number(rule: optimizer_methods.Optimizer) -> None:
    params = some()
    state = rule.init(params)
    assert state.keys() == params.keys()
    for name, slots in state.items():
        assert set(slots) <= set(rule.slots)
        for slot in slots.values():
            # one that moves all parameters at once is never sharded, so its states are stored whole
            assert slot.dim() == 0 or slot.shape[0] == params[name].shape[0] or rule.has_one_clip
            assert slot.device == params[name].device and not slot.requires_grad
            assert slot.is_floating_point() or optimizer_methods.is_coded(slots)


def around(rule: optimizer_methods.Optimizer, inner: optimizer_methods.Optimizer) -> optimizer_methods.Optimizer | None:
    """The rule with another one in it, where it takes this one."""
    fields = [f.name for f in dataclasses.fields(rule) if f.type == "Optimizer"]
    try:
        return dataclasses.replace(rule, **dict.fromkeys(fields, inner)) if fields else None
    except BadInput:
        return None


def test_states_of_rows_are_rows_of_the_states(rule: optimizer_methods.Optimizer) -> None:
    """Also where the rule has one in it whose states depend on the size of the whole parameter."""
    if rule.has_one_clip:
        return  # refused where states are divided
    small = optimizer_methods.build("coat")
    for one in (rule, around(rule, small)):
        if one is None:
            continue
        params = some()
        whole, shapes = one.init(params), {n: tuple(p.shape) for n, p in params.items()}
        wanted = {n: {s: t[:1] if t.dim() else t for s, t in slots.items()} for n, slots in whole.items()}
        found = one.init_rows({n: p[:1] if p.dim() else p for n, p in params.items()}, shapes)
        assert all(found[n].keys() == wanted[n].keys() and same(wanted[n], found[n]) for n in params)
    assert optimizer_methods.is_coded(small.init(some())["large"])


def test_the_bytes_of_a_row_are_those_of_the_states(rule: optimizer_methods.Optimizer) -> None:
    if rule.has_one_clip:
        return  # its vectors are no rows, and refused where states are divided
    params = some()
    for name, slots in rule.init(params).items():
        shape = tuple(params[name].shape)
        held = sum(t.nbytes for t in slots.values() if t.dim() or not shape)
        assert rule.row_bytes(name, shape) * (shape[0] if shape else 1) == held


def test_works_in_place_on_leaves_that_require_a_gradient(rule: optimizer_methods.Optimizer) -> None:
    params = {n: torch.nn.Parameter(p) for n, p in some().items()}
    before = {n: p.detach().clone() for n, p in params.items()}
    held = {n: p.data_ptr() for n, p in params.items()}
    state = rule.init(params)
    run(rule, params, state, range(2))
    assert held == {n: p.data_ptr() for n, p in params.items()}
    assert all(p.is_leaf and p.requires_grad and p.dtype == torch.float32 for p in params.values())
    assert all(not torch.equal(p, before[n]) for n, p in params.items() if p.numel())


def test_gradients_are_only_read(rule: optimizer_methods.Optimizer) -> None:
    params, grads = some(), some(1)
    kept = {n: g.clone() for n, g in grads.items()}
    rule.update(params, grads, rule.init(params), lr_scale=1.0, step=0)
    assert same(grads, kept)


def test_what_has_no_gradient_stays_as_it_is(rule: optimizer_methods.Optimizer) -> None:
    params, grads = some(), some(1)
    del grads["matrix"]
    before, state = params["matrix"].clone(), rule.init(params)
    kept = clone(state)["matrix"]
    rule.update(params, grads, state, lr_scale=1.0, step=0)
    assert torch.equal(params["matrix"], before) and same(state["matrix"], kept)
    rule.update(params, {}, state, lr_scale=1.0, step=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_bit_for_bit(rule: optimizer_methods.Optimizer, dtype: torch.dtype) -> None:
    straight, state = some(dtype=dtype), rule.init(some(dtype=dtype))
    run(rule, straight, state, range(6))
    broken, state = some(dtype=dtype), rule.init(some(dtype=dtype))
    run(rule, broken, state, range(3))
    restored = rule.init(broken)
    for name, slots in clone(state).items():
        for slot, value in slots.items():
            restored[name][slot].copy_(value)
    run(rule, broken, restored, range(3, 6))
    assert same(straight, broken)


def after_steps_apart(
    rule: optimizer_methods.Optimizer, params: Tensors, state: optimizer_methods.OptimizerState
) -> Tensors:
    """Two steps, a meeting, a step in which all gradients meet."""
    for step in (3, 4):
        rule.update_apart(params, some(100 + step), state, lr_scale=0.5, step=step)
    rule.meet(params, {n: 0.01 * p for n, p in some(7).items()}, state, rates=rule.lr)
    rule.update(params, some(105), state, lr_scale=0.5, step=5)
    return params


def test_steps_apart_and_a_meeting_go_on_bit_for_bit(rule: optimizer_methods.Optimizer) -> None:
    straight, state = some(), rule.init(some())
    run(rule, straight, state, range(3))
    broken, restored = {n: p.clone() for n, p in straight.items()}, clone(state)
    assert same(after_steps_apart(rule, straight, state), after_steps_apart(rule, broken, restored))
    assert all(same(state[n], restored[n]) for n in state)


def test_half_types_follow_their_copies_through_steps_apart(rule: optimizer_methods.Optimizer) -> None:
    if isinstance(rule, Master):
        return
    halves, around = {n: p.bfloat16() for n, p in some().items()}, Master(inner=rule)
    copies = {n: p.float() for n, p in halves.items()}
    state, wide = rule.init(copies), around.init(halves)
    after_steps_apart(rule, copies, state)
    after_steps_apart(around, halves, wide)
    assert all(torch.equal(wide[n]["master"], p) for n, p in copies.items())
    assert same(halves, {n: p.bfloat16() for n, p in copies.items()})


def test_a_rate_of_zero_moves_nothing(rule: optimizer_methods.Optimizer) -> None:
    params = some()
    rule.update(params, some(1), rule.init(params), lr_scale=0.0, step=0)
    assert same(params, some())


def test_strides_do_not_matter(rule: optimizer_methods.Optimizer) -> None:
    """Transposed, gapped and channels-last tensors move like contiguous ones, and their neighbors stay."""
    plain = {"t": torch.arange(12.0).view(3, 4), "gap": torch.ones(4, 3), "image": torch.ones(2, 3, 4, 5)}
    around = torch.full((4, 6), 7.0)
    around[:, ::2] = 1.0
    odd = {
        "t": plain["t"].t().contiguous().t(),
        "gap": around[:, ::2],
        "image": plain["image"].to(memory_format=torch.channels_last),
    }
    generator = torch.Generator().manual_seed(3)
    states = rule.init(plain), rule.init(odd)
    for step in range(3):
        grads = {n: torch.randn(p.shape, generator=generator) for n, p in plain.items()}
        rule.update(plain, grads, states[0], lr_scale=1.0, step=step)
        mixed = {"t": grads["t"], "gap": grads["gap"].t().contiguous().t(), "image": grads["image"]}
        rule.update(odd, mixed, states[1], lr_scale=1.0, step=step)
    assert same(plain, odd) and bool((around[:, 1::2] == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_keep_their_type(rule: optimizer_methods.Optimizer, dtype: torch.dtype) -> None:
    params = some(dtype=dtype)
    state = rule.init(params)
    rule.update(params, some(1), state, lr_scale=1.0, step=0)  # float32 gradients, as reduced
    assert all(p.dtype == dtype for p in params.values())
    assert not same(params, some(dtype=dtype))


def test_mixed_types_in_one_model(rule: optimizer_methods.Optimizer) -> None:
    """Half, single and double parameters side by side move as each would alone."""
    if not rule.by_parameter:
        return
    dtypes = {"matrix": torch.bfloat16, "vector": torch.float64}
    mixed = {n: p.to(dtypes.get(n, p.dtype)) for n, p in some().items()}
    alone = {n: {n: p.clone()} for n, p in mixed.items()}
    rule.update(mixed, some(1), rule.init(mixed), lr_scale=1.0, step=0)
    for name, one in alone.items():
        rule.update(one, {name: some(1)[name]}, rule.init(one), lr_scale=1.0, step=0)
        assert torch.equal(one[name], mixed[name])


def test_goes_down_a_bowl(rule: optimizer_methods.Optimizer) -> None:
    if isinstance(rule, EvaS):  # with its clip, steps are of one length
        rule = dataclasses.replace(rule, kl_clip=0.0)
    params = {"w": torch.tensor([[3.0, -2.0], [1.0, 0.5]])}
    first = params["w"].square().sum()
    state = rule.init(params)
    for step in range(100):
        # the steps of one are so small a part of a layer, those of the other of the rate
        shrinks = rule.trust_coefficient if isinstance(rule, Lars) else 0.2 if isinstance(rule, Muon) else 1.0
        rate = 0.05 / shrinks
        rule.update(params, {"w": 2 * params["w"]}, state, lr_scale=rate / rule.lr, step=step)
    assert params["w"].square().sum() < 0.05 * first


def test_a_plain_rule_moves_against_the_gradient_and_nothing_else(rule: optimizer_methods.Optimizer) -> None:
    if not rule.is_plain:
        return
    params, grads = some(), some(100)
    wanted = {n: p - rule.lr * 0.5 * grads[n] for n, p in params.items()}
    assert all(not slots for slots in rule.init(params).values())
    rule.update(params, grads, rule.init(params), lr_scale=0.5, step=3)
    assert all(torch.allclose(params[n], w, rtol=1e-6, atol=1e-7) for n, w in wanted.items())
