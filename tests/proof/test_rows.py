"""Rows and verdicts, without a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gossamer.proof.cache import is_kept, keep
from gossamer.proof.fingerprints import PLACES, WIDTH, FingerprintTable, TensorNames, digests_of, row_of, rows_of
from gossamer.proof.time_limit import NotProved, ProofTimeLimit
from gossamer.proof.trials import move
from gossamer.proof.verdict import EPS, BothTables, judge
from gossamer.spec.config import RunConfig

NAMES = TensorNames(values=("b", "a"), trained=("b", "a"), buffers=(), eps=(EPS / 16,) * 2)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def table(a: Tensor, b: Tensor, loss: float = 2.0) -> FingerprintTable:
    held = {"a": a, "b": b}
    return FingerprintTable(
        initial=digests_of({"a": torch.ones(2), "b": torch.ones(3)}, NAMES.values),
        gradients=rows_of(held, NAMES.trained, 3)[None],
        buffers=torch.zeros(1, 0, WIDTH),
        losses=torch.tensor([[loss]], dtype=torch.float64),
        first=rows_of(held, NAMES.trained, 3)[None],
        keeps=torch.zeros(3, dtype=torch.float64),
    )


def sides(divided: FingerprintTable, again: FingerprintTable | None = None) -> BothTables:
    alone = table(drawn(40, 30), drawn(50, seed=1))
    return BothTables(names=NAMES, alone=alone, again=again or alone, divided=[divided], exact=(True,), own=1)


def test_a_row_tells_sizes_and_is_linear() -> None:
    x, y = drawn(60, 50), drawn(60, 50, seed=1)
    row = row_of(x, 7)
    assert row.shape == (WIDTH,)
    assert row[0] == x.abs().max()
    assert float(row[1]) == pytest.approx(float(x.square().mean().sqrt()), rel=1e-6)
    assert torch.allclose(row_of(x + y, 7)[2:], (row + row_of(y, 7))[2:], atol=1e-5)
    apart = torch.stack([row_of(x, key)[2:] - row_of(y, key)[2:] for key in range(50)])
    assert float(apart.square().mean().sqrt()) == pytest.approx(float((x - y).square().mean().sqrt()), rel=0.1)
    assert not torch.equal(row_of(x[torch.randperm(60)], 7)[2:], row[2:])


@pytest.mark.parametrize(
    "tensor", [torch.zeros(0), torch.ones(()), torch.ones(3, dtype=torch.int64), drawn(5).cfloat()]
)
def test_every_kind_of_tensor_has_a_row(tensor: Tensor) -> None:
    row = row_of(tensor, 1)
    assert row.shape == (2 + PLACES,) and bool(row.isfinite().all())


def test_equal_sides_have_no_fault() -> None:
    verdict = judge(sides(table(drawn(40, 30), drawn(50, seed=1))))
    assert verdict.faults == ()
    assert (verdict.proved, verdict.within, verdict.losses) == (2, 0.0, (2.0, 2.0))


def test_rounding_is_forgiven_and_a_thousandth_is_not() -> None:
    a, b = drawn(40, 30), drawn(50, seed=1)
    assert judge(sides(table(a * (1 + 1e-6), b))).faults == ()
    (fault,) = judge(sides(table(a * 0.999, b))).faults
    assert (fault.what, fault.name) == ("gradient", "a")
    assert fault.factor == pytest.approx(0.999, abs=1e-5)


def test_what_one_process_is_uncertain_of_is_forgiven() -> None:
    a, b = drawn(40, 30), drawn(50, seed=1)
    again = table(a * (1 + 1e-3), b)
    assert judge(sides(table(a * (1 - 2e-3), b), again)).faults == ()
    assert judge(sides(table(a, b * (1 - 2e-3)), again)).faults != ()


def test_gradients_that_are_nothing_beside_the_others_are_rounding() -> None:
    a, b = drawn(40, 30), drawn(50, seed=1)
    tiny = replace(sides(table(a, b * 1e-14)), alone=table(a, -b * 1e-14), again=table(a, -b * 1e-14))
    assert judge(tiny).faults == ()


def test_the_first_in_the_backward_comes_first() -> None:
    faults = judge(sides(table(drawn(40, 30, seed=5), drawn(50, seed=6)))).faults
    assert [fault.name for fault in faults] == ["b", "a"]


def test_no_gradient_on_both_sides_is_not_proved() -> None:
    a = table(drawn(40, 30), torch.zeros(50))
    verdict = judge(replace(sides(a), alone=a, again=a))
    assert (verdict.proved, verdict.idle) == (1, ("b",))


def test_what_is_not_finite_on_one_side_is_a_fault() -> None:
    broken = drawn(50, seed=1)
    broken[3] = torch.nan
    (fault,) = judge(sides(table(drawn(40, 30), broken))).faults
    assert fault.name == "b"
    (lost,) = judge(sides(table(drawn(40, 30), drawn(50, seed=1), loss=float("inf")))).faults
    assert lost.what == "loss"


def test_weights_are_moved_by_their_names_alone() -> None:
    first, second = {"a": drawn(300), "b": torch.zeros(7)}, {"b": torch.zeros(7), "a": drawn(300)}
    move(first, 3)
    move(second, 3)
    assert torch.equal(first["a"], second["a"]) and torch.equal(first["b"], second["b"])
    assert bool((first["b"] != 0).all()) and not torch.equal(first["a"], drawn(300))


def test_a_run_of_little_time_is_not_held_up() -> None:
    now = iter([1.0, 5.0])
    patience = ProofTimeLimit(run_s=60.0, pieces=8, clock=lambda: next(now))
    patience.pulse()
    with pytest.raises(NotProved, match="about 32 s of the 1m00s"):
        patience.pulse()


def test_a_machine_that_swaps_is_not_waited_for() -> None:
    now = iter([1.0, 2.0, 3.0, 100.0])
    patience = ProofTimeLimit(run_s=0.0, pieces=8, clock=lambda: next(now))
    for _ in range(3):
        patience.pulse()
    with pytest.raises(NotProved, match="a micro-batch of the whole model took 1m37s, and the first one 1 s"):
        patience.pulse()


def test_a_file_that_says_something_else_proves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "proved.json"
    assert not is_kept(file, "x")
    for text in ("", "[]", json.dumps({"digest": "y"})):
        file.write_text(text)
        assert not is_kept(file, "x")
    keep(file, "x", "all is well")
    assert is_kept(file, "x")


def test_the_default_is_auto() -> None:
    assert RunConfig().train.prove == "auto"
