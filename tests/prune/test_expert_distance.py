"""The term of expert-wise distillation: by hand, in lists of experts and in fused ones."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.prune import apply_masks, build, expert_distances, prune
from gossamer.spec.errors import BadInput
from model.tiny import Plain
from prune.experts import Mixture, MixtureModel, ids, of_transformers
from prune.test_moe_pruner import Pairs


def pair(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model pruned, and as it was."""
    teacher = copy.deepcopy(module).eval().requires_grad_(False)
    apply_masks(module, prune(module, build({"magnitude": {"sparsity": 0.5}})).masks)
    return module, teacher


def by_hand(one: Any, other: Any, x: Tensor, number: int, kind: str) -> Tensor:
    if kind == "list":
        return (one.experts[number](x) - other.experts[number](x)).square().mean()
    found = []
    for experts in (one, other):
        up, down = experts.gate_up_proj[number], experts.down_proj[number]
        if kind == "gpt_oss":
            both = x @ up + experts.gate_up_proj_bias[number]
            found.append(experts._apply_gate(both) @ down + experts.down_proj_bias[number])
        else:
            gate, value = (x @ up.t()).chunk(2, -1)
            found.append((nn.functional.silu(gate) * value) @ down.t())
    return (found[0] - found[1]).square().mean()


@pytest.mark.parametrize("kind", ["list", "mixtral", "gpt_oss"])
def test_it_is_the_sum_over_experts_of_their_mean_squares(kind: str) -> None:
    torch.manual_seed(0)
    student, teacher = pair(MixtureModel() if kind == "list" else of_transformers(kind))
    blocks: list[tuple[Any, Any]]
    if kind == "list":
        blocks = [(student.get_submodule(f"blocks.{n}.moe"), teacher.get_submodule(f"blocks.{n}.moe")) for n in (0, 1)]
    else:
        paths = [f"model.layers.{n}.mlp.experts" for n in (0, 1)]
        blocks = [(student.get_submodule(path), teacher.get_submodule(path)) for path in paths]
    calls: list[Any] = []
    handles = [one.register_forward_pre_hook(lambda _, args: calls.append(args)) for one, _ in blocks]
    with expert_distances(student, teacher) as distance:
        student(ids(2, seed=1))  # what an earlier forward left does not count
        calls.clear()
        student(ids())
        found = distance()
    for handle in handles:
        handle.remove()
    wanted = torch.zeros(())
    for (one, other), args in zip(blocks, calls, strict=True):
        x = args[0].reshape(-1, args[0].shape[-1])
        chosen = one.weights(x)[1] if kind == "list" else args[1]
        for number in range(4):
            if len(rows := torch.where(chosen == number)[0]):
                wanted = wanted + by_hand(one, other, x[rows], number, kind)
    assert float(found) > 1e-4 and torch.allclose(found, wanted, rtol=1e-4)
    found.backward()
    trained = {name for name, one in student.named_parameters() if one.grad is not None and bool(one.grad.any())}
    assert any("experts" in name for name in trained) and not any(one.grad is not None for one in teacher.parameters())


def test_an_unpruned_model_is_at_no_distance_and_nothing_stays_hooked() -> None:
    module = Mixture()
    with expert_distances(module, copy.deepcopy(module)) as distance:
        module(torch.randn(9, 8))
        assert float(distance()) == 0.0
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in module.modules())


def test_a_distance_is_taken_once_and_a_forward_without_gradients_has_none() -> None:
    torch.manual_seed(2)
    student, teacher = pair(MixtureModel())
    with expert_distances(student, teacher) as distance:
        student(ids())
        assert float(distance().detach()) > 0
        assert float(distance()) == 0
        student(ids())
        with torch.no_grad():
            student(ids())
        assert float(distance()) == 0


@pytest.mark.parametrize("kind", ["list", "mixtral"])
def test_half_types_are_compared_in_float32(kind: str) -> None:
    torch.manual_seed(3)
    student, teacher = pair((MixtureModel() if kind == "list" else of_transformers(kind)).bfloat16())
    with expert_distances(student, teacher) as distance:
        student(ids())
        assert distance().dtype == torch.float32


def test_experts_that_return_more_than_a_tensor_are_refused_by_name() -> None:
    module = Pairs()
    with (
        pytest.raises(BadInput, match=r"experts in experts .*Pair: it returns more than one tensor"),
        expert_distances(module, copy.deepcopy(module)),
    ):
        module(torch.randn(9, 8))


def test_masks_hold_through_steps_of_distillation() -> None:
    torch.manual_seed(1)
    student, teacher = pair(MixtureModel())
    masks = prune(student, build({"magnitude": {"sparsity": 0.5}})).masks
    before = []
    rule = torch.optim.Adam(student.parameters(), lr=1e-2)
    with expert_distances(student, teacher) as distance:
        for _ in range(5):
            student(ids())
            loss = distance()
            before.append(float(loss))
            rule.zero_grad()
            loss.backward()
            for name, one in student.named_parameters():
                if name in masks and one.grad is not None:
                    one.grad.masked_fill_(~masks[name], 0.0)
            rule.step()
    params = dict(student.named_parameters())
    assert before[-1] < before[0]
    assert not any(bool(params[name][~mask].count_nonzero()) for name, mask in masks.items())


@pytest.mark.parametrize(
    ("student", "teacher", "said"),
    [
        (Plain, Plain, "without experts: distill its outputs"),
        (Mixture, lambda: Mixture(count=3), "other ones: give the model that was pruned"),
        (Mixture, lambda: nn.Linear(8, 8), "none: give the model"),
    ],
)
def test_other_teachers_are_refused(student: Any, teacher: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said), expert_distances(student(), teacher()):
        pass


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_the_model_itself_loses_no_distance(reentrant: bool) -> None:
    """A forward that hides its experts' graph is refused; a block that runs again adds its distance once."""
    from torch.utils.checkpoint import checkpoint

    student = of_transformers("mixtral", vocab_size=16, max_position_embeddings=512)
    teacher = of_transformers("mixtral", vocab_size=16, max_position_embeddings=512).requires_grad_(False)
    with torch.no_grad():
        for one in teacher.parameters():
            one.mul_(1.1)
    tokens = torch.randint(0, 16, (2, 5))
    with expert_distances(student, teacher) as distance:
        student(tokens)
        plain = float(distance().detach())
        for block in student.model.layers:
            block.forward = lambda x, f=block.forward, **more: checkpoint(
                partial(f, **more), x, use_reentrant=reentrant
            )
        if reentrant:
            with pytest.raises(BadInput, match="use_reentrant"):
                student(tokens)
            return
        logits, apart = student(tokens).logits, distance()
        (logits.sum() + apart).backward()
        assert plain > 0 and float(apart.detach()) == pytest.approx(plain) and not distance().requires_grad
