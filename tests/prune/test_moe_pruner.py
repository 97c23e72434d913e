"""MoE-Pruner: router weights beside an independent computation, in lists of experts and in transformers' fused ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.prune import build, prune
from gossamer.spec.errors import BadInput
from prune.experts import FUSED, Expert, Mixture, MixtureModel, ids, of_transformers
from prune.test_wanda import by_hand


def test_router_weights_count_in_a_list_of_experts() -> None:
    torch.manual_seed(0)
    module, x = Mixture(), torch.randn(50, 8)
    found = prune(
        module, build({"moe_pruner": {"sparsity": 0.5}}), [lambda part=part: module(part) for part in x.split(9)]
    )
    weights, which = module.weights(x)
    for number, expert in enumerate(module.experts):
        rows, place = torch.where(which == number)
        gates, reached = weights[rows, place, None].detach(), x[rows]
        inner = torch.relu(expert.up(reached)).detach()  # type: ignore[operator,union-attr]
        for path, inputs in (("up", reached), ("down", inner)):
            name = f"experts.{number}.{path}"
            matrix = module.get_submodule(name).weight
            assert torch.equal(found.masks[f"{name}.weight"], by_hand(matrix, inputs * gates, matrix.shape[1] // 2))
            assert next(one for one in found.matrices if one.name == name).tokens == len(rows)


@pytest.mark.parametrize("kind", FUSED)
def test_router_weights_count_in_fused_experts(kind: str) -> None:
    module = of_transformers(kind)
    forwards = [lambda part=part: module(part) for part in ids().split(1)]
    found = prune(module, build("moe_pruner"), forwards)
    experts = module.get_submodule("model.layers.1.mlp.experts")
    calls: list[Any] = []
    experts.register_forward_pre_hook(lambda _, args: calls.append(args))
    with torch.no_grad():  # what the pruned first block gives
        for name, value in module.named_parameters():
            if name.startswith("model.layers.0.") and name in found.masks:
                value.mul_(found.masks[name])
        for forward in forwards:
            forward()
    inside: Any = experts
    for number in range(4):
        inputs: dict[str, list[Tensor]] = {"gate_up_proj": [], "down_proj": []}
        for hidden, which, weights in calls:
            rows, place = torch.where(which == number)
            gate_up, bias = inside.gate_up_proj[number].detach(), getattr(inside, "gate_up_proj_bias", None)
            both = hidden[rows] @ (gate_up if kind == "gpt_oss" else gate_up.t())
            inner = inside._apply_gate(both if bias is None else both + bias[number].detach())
            inputs["gate_up_proj"].append(hidden[rows] * weights[rows, place, None])
            inputs["down_proj"].append(inner * weights[rows, place, None])
        for name, seen in inputs.items():
            weight, mask = getattr(inside, name)[number], found.masks[f"model.layers.1.mlp.experts.{name}"][number]
            if kind == "gpt_oss":
                weight, mask = weight.t(), mask.t()
            assert torch.equal(mask, by_hand(weight, torch.cat(seen).detach(), weight.shape[1] // 2))


@pytest.mark.parametrize("gate", [1.0, 0.3])
@pytest.mark.parametrize("limit", [{"sparsity": 0.4}, {"pattern": "2:4"}])
def test_a_constant_gate_gives_wandas_masks(gate: float, limit: dict[str, Any]) -> None:
    torch.manual_seed(3)
    module = MixtureModel(gate=gate)
    masks = [prune(module, build({name: limit}), [lambda: module(ids(8))]).masks for name in ("wanda", "moe_pruner")]
    assert all(torch.equal(masks[0][name], masks[1][name]) for name in masks[0])


def test_a_constant_gate_gives_wandas_masks_in_fused_experts() -> None:
    module = of_transformers("mixtral", num_experts_per_tok=1)  # normalized over one: the gate is 1
    masks = [prune(module, build(name), [lambda: module(ids())]).masks for name in ("wanda", "moe_pruner")]
    assert all(torch.equal(masks[0][name], masks[1][name]) for name in masks[0])


def test_the_gate_changes_masks_of_experts_alone() -> None:
    torch.manual_seed(4)
    module = MixtureModel(layers=1)  # what reaches a second block follows from the masks of the first
    wanda, ours = (prune(module, build(name), [lambda: module(ids(8))]).masks for name in ("wanda", "moe_pruner"))
    apart = {name for name in ours if not torch.equal(ours[name], wanda[name])}
    assert apart and all("experts" in name for name in apart)


@pytest.mark.parametrize("fused", [False, True])
def test_an_expert_without_tokens_is_pruned_by_magnitude_and_reported(fused: bool) -> None:
    if fused:
        module = of_transformers("mixtral", num_hidden_layers=1)
        router: Any = module.get_submodule("model.layers.0.mlp.gate")
        router.register_forward_hook(lambda *given: (*given[2][:2], given[2][2].clamp(max=2)))  # 2 in place of 3
        text, name = [lambda: module(ids())], "model.layers.0.mlp.experts.{}[3]"
        parts = ("gate_up_proj", "down_proj")
    else:
        torch.manual_seed(5)
        module = Mixture()
        with torch.no_grad():
            module.router.bias[3] = -100.0
        x = torch.randn(30, 8)
        text, name = [lambda: module(x)], "experts.3.{}"
        parts = ("up", "down")
    found = prune(module, build("moe_pruner"), text)
    wanted = {name.format(part) for part in parts}
    assert {one.name for one in found.matrices if one.fell_back} == wanted
    assert all(one.tokens == 0 for one in found.matrices if one.name in wanted)
    plain = prune(module, build("magnitude")).masks
    for one in found.matrices:
        if one.name in wanted:
            mine, other = found.masks[one.parameter], plain[one.parameter]
            assert torch.equal(mine[3], other[3]) if fused else torch.equal(mine, other)


def test_tokens_with_a_gate_of_zero_do_not_count() -> None:
    class Dense(Mixture):
        """All experts see all tokens; those that are not chosen are multiplied with 0."""

        def forward(self, h: Tensor) -> Tensor:
            weights, which = self.weights(h)
            spread = torch.zeros(len(h), len(self.experts)).scatter(1, which, weights)
            return torch.stack([expert(h) for expert in self.experts], 1).mul(spread[..., None]).sum(1)

    torch.manual_seed(6)
    routed = Mixture()
    every = Dense()
    every.load_state_dict(routed.state_dict())
    x = torch.randn(40, 8)
    one, other = (prune(m, build("moe_pruner"), [lambda m=m: m(x)]) for m in (routed, every))
    assert all(torch.equal(one.masks[name], other.masks[name]) for name in one.masks)
    assert [m.tokens for m in one.matrices] == [m.tokens for m in other.matrices]


class Normed(Mixture):
    """A block whose output is no sum of its experts' outputs times one weight."""

    def forward(self, h: Tensor) -> Tensor:
        return nn.functional.layer_norm(super().forward(h), (8,)).square()


class Pair(Expert):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Pairs(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Pair(8, 16) for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        return sum(expert(h)[0] for expert in self.experts)


@pytest.mark.parametrize(
    ("make", "said"),
    [(Normed, "got a .*Normed: it does not multiply"), (Pairs, "got a .*Pair: it returns more than one tensor")],
)
def test_experts_that_cannot_be_observed_are_refused_by_name(make: Any, said: str) -> None:
    torch.manual_seed(7)
    module, x = make(), torch.randn(20, 8)
    with pytest.raises(BadInput, match=said):
        prune(module, build("moe_pruner"), [lambda: module(x)])
    assert torch.is_grad_enabled()


def test_fused_experts_that_compute_otherwise_are_refused_by_name() -> None:
    module = of_transformers("mixtral")
    experts: Any = module.get_submodule("model.layers.0.mlp.experts")
    experts.register_forward_hook(lambda *_: _[2] * 2)
    with pytest.raises(BadInput, match=r"layers\.0\.mlp\.experts .*MixtralExperts: its output is not"):
        prune(module, build("moe_pruner"), [lambda: module(ids())])
