"""GPTQ: never worse than rounding to nearest on its calibration inputs, equal to it where inputs are independent."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.model.quantized import Blocks
from gossamer.quantize import Quantizer, build
from gossamer.spec.errors import BadInput


def layer(seed: int, columns: int = 96, tokens: int = 256) -> tuple[Tensor, Tensor]:
    """A weight and correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    return (
        torch.randn(24, columns, generator=generator),
        torch.randn(tokens, columns, generator=generator) @ mixing,
    )


def moments(inputs: Tensor) -> Tensor:
    return (inputs.t() @ inputs).double()


def made(quantizer: Quantizer, blocks: Blocks, columns: int) -> Tensor:
    return quantizer.format.decode(blocks, columns)


def output_errors(given: Any, weight: Tensor, inputs: Tensor) -> Tensor:
    """|x (w - w')| of every row w over the calibration inputs."""
    quantizer = build(given)
    blocks = quantizer.encode(weight, moments(inputs)).blocks
    return (inputs.double() @ (weight - made(quantizer, blocks, weight.shape[1])).double().t()).norm(dim=0)


@pytest.mark.parametrize("order", ["given", "activation"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_no_row_has_a_larger_output_error_than_by_rounding_to_nearest(bits: int, order: str) -> None:
    for seed in range(2):
        for group, symmetric in ((0, False), (32, True), (64, False)):
            weight, inputs = layer(seed)
            shared = {"bits": bits, "group": group, "symmetric": symmetric}
            nearest = output_errors({"round_to_nearest": shared}, weight, inputs)
            ours = output_errors({"gptq": {**shared, "order": order}}, weight, inputs)
            assert bool((ours <= nearest * (1 + 1e-6)).all())
            assert ours.norm() < 0.95 * nearest.norm()  # and smaller in all


@pytest.mark.parametrize("order", ["given", "activation"])
def test_independent_inputs_of_equal_size_give_rounding_to_nearest_bit_for_bit(order: str) -> None:
    weight, _ = layer(0)
    for group in (0, 32, 64):
        plain = build({"round_to_nearest": {"group": group}}).encode(weight, None).blocks
        ours = build({"gptq": {"group": group, "order": order}}).encode(weight, 3 * torch.eye(96).double()).blocks
        assert torch.equal(ours.codes, plain.codes)
        assert ours.scales is not None and plain.scales is not None and torch.equal(ours.scales, plain.scales)


def test_one_column_after_another_is_what_the_paper_says() -> None:
    """Against the recursion with the inverse Hessian itself, from which a column is eliminated at a time."""
    weight, inputs = layer(1, columns=16)
    quantizer = build({"gptq": {"bits": 3, "group": 0, "block": 5}})
    format, hessian = quantizer.format, moments(inputs)
    scales = format.encode(weight).scales
    assert scales is not None
    inverse = torch.linalg.inv(hessian + 0.01 * hessian.diagonal().mean() * torch.eye(16))
    left, expected = weight.double(), torch.empty_like(weight)
    for i in range(16):
        expected[:, i] = format.values(format.nearest(left[:, i].float(), scales[:, 0]), scales[:, 0])
        error = (left[:, i] - expected[:, i]) / inverse[i, i]
        left = left - torch.outer(error, inverse[i])
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    ours = made(quantizer, quantizer.encode(weight, hessian).blocks, 16)
    kept = (ours == format.decode(format.encode(weight), 16)).all(1)  # rows that rounding to nearest serves better
    assert torch.equal(ours[~kept], expected[~kept]) and int(kept.sum()) < 12


def test_dead_inputs_are_rounded_to_nearest_and_said() -> None:
    weight, inputs = layer(2)
    inputs[:, 40:44] = 0
    quantizer = build({"gptq": {"order": "activation"}})
    encoded = quantizer.encode(weight, moments(inputs))
    plain = quantizer.format.decode(quantizer.format.encode(weight), 96)
    assert torch.equal(made(quantizer, encoded.blocks, 96)[:, 40:44], plain[:, 40:44])
    assert "4 inputs are always zero" in encoded.said


def test_fewer_inputs_than_columns_are_served_by_damping() -> None:
    weight, inputs = layer(3)
    few = inputs[:4].repeat(2, 1)  # of rank 4
    quantizer = build({"gptq": {"bits": 3}})
    assert made(quantizer, quantizer.encode(weight, moments(few)).blocks, 96).isfinite().all()


def test_what_cannot_be_served_is_refused_or_said() -> None:
    weight, inputs = layer(4)
    quantizer = build("gptq")
    assert "no calibration input" in quantizer.encode(weight, None).said
    assert "inputs are zero" in quantizer.encode(weight, torch.zeros(96, 96).double()).said
    with pytest.raises(BadInput, match="finite calibration inputs"):
        quantizer.encode(weight, moments(inputs.index_fill(0, torch.tensor([3]), torch.nan)))
    with pytest.raises(BadInput, match="positive definite"):
        quantizer.encode(weight, moments(inputs) - 1e6 * torch.ones(96, 96).double())
    with pytest.raises(BadInput, match="damping"):
        build({"gptq": {"damping": 0}})


class Held(TorchDispatchMode):
    """Counts the float64 matrices (n, n) that are there at once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.most = size, 0
        self.alive: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            is_matrix = isinstance(one, Tensor) and one.shape == (self.size,) * 2 and one.dtype == torch.float64
            if is_matrix and one._base is None:
                self.alive.append(weakref.ref(one))
        self.alive = [one for one in self.alive if one() is not None]
        self.most = max(self.most, len(self.alive))
        return found


@pytest.mark.parametrize("order", ["given", "activation"])
def test_beside_the_moments_there_are_two_matrices_at_once(order: str) -> None:
    weight, inputs = layer(0)
    held, given = Held(96), moments(inputs)
    with held:
        build({"gptq": {"order": order}}).encode(weight, given)
    assert 1 <= held.most <= 2
