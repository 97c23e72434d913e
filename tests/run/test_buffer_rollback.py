"""Buffers after a step that was rejected or made again are those before it, whatever forwards do to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import gossamer
from gossamer.run.buffer_rollback import SMALL_BYTES, BufferRollback
from gossamer.spec.errors import StepRejected
from gossamer.store.checkpoint import latest_good


class Buffers(nn.Module):
    """Buffers of its own, and those of batch norm in an inner module; `large` is more than is kept unasked."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.still = nn.BatchNorm1d(3), nn.Identity()
        self.register_buffer("a", torch.zeros(3))
        self.register_buffer("large", torch.zeros(SMALL_BYTES))
        self.register_buffer("later", None)
        self.still.register_buffer("same", self.a)
        self.still.register_buffer("alias", self.a.data)


def _in_place(m: Any) -> None:
    m.a.add_(1)


def _replaced(m: Any) -> None:
    m.a = m.a + 1


def _uncounted(m: Any) -> None:
    m.a.data.add_(1)


def _written_and_replaced(m: Any) -> None:
    m.a.add_(1)
    m.a = m.a * float("nan")


def _normed(m: Any) -> None:
    m.norm(torch.randn(4, 3) + 1)


def _shaped(m: Any) -> None:
    m.a = m.a.new_zeros(len(m.a) + 1)


def _filled(m: Any) -> None:
    m.later = torch.ones(2) if m.later is None else m.later + 1


def _registered(m: Any) -> None:
    m.register_buffer(f"new{len(m._buffers)}", torch.ones(1))


def _large(m: Any) -> None:
    m.large.add_(1)


def _through_alias(m: Any) -> None:
    m.still.alias.add_(1)


CHANGES = [
    *(_in_place, _replaced, _uncounted, _written_and_replaced, _normed),
    *(_shaped, _filled, _registered, _large, _through_alias),
]


def state(module: nn.Module) -> dict[str, tuple[int, Any]]:
    named = {f"{p}.{n}": x for p, m in module.named_modules() for n, x in m._buffers.items()}
    return {name: (id(x), None if x is None else repr(x.tolist())) for name, x in named.items()}


@pytest.mark.parametrize("change", CHANGES)
def test_what_an_attempt_changes_is_undone(change: Callable[[nn.Module], None]) -> None:
    """Rejected at first, then after attempts that were not, and twice in a row."""
    module = Buffers()
    rollback = BufferRollback.of(module)
    for is_rejected in (True, False, False, True, True, False, True):
        rollback.keep()
        before = state(module)
        change(module)
        assert state(module) != before
        if is_rejected:
            assert rollback.put_back() == () and state(module) == before


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_begins_late_is_undone_or_named(change: Callable[[nn.Module], None]) -> None:
    named = {_large: ("large",), _uncounted: ("a", "still.same", "still.alias")}.get(change, ())
    module = Buffers()
    rollback = BufferRollback.of(module)
    for _ in range(2):
        rollback.keep()
    before = state(module)
    change(module)
    assert rollback.put_back() == named
    assert named or state(module) == before
    rollback.keep()
    before = state(module)
    change(module)
    assert rollback.put_back() == () and state(module) == before, "it is known from then on"


def test_what_does_not_change_is_copied_once() -> None:
    module = Buffers()
    rollback = BufferRollback.of(module)
    kept = []
    for _ in range(3):
        rollback.keep()
        kept.append([one.value for owner in rollback.owners for one in owner.kept.values()])
    assert all(x is y for x, y in zip(kept[1], kept[2], strict=True))
    assert sum(x.nbytes for x in kept[2] if x is not None) < 1000, "nor does a copy of a large one stay"


class Rows(Dataset[dict[str, Tensor]]):
    """Of ones; row `bad` is nan, all are with None."""

    def __init__(self, bad: int | None = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "x": torch.full((4,), float("nan") if self.bad in (None, index) else 1.0),
            "labels": torch.tensor(index % 2),
        }


class Normed(nn.Module):
    """`fails`: the number of a forward that gives nan, whatever its batch."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head, self.fails, self.forwards = nn.BatchNorm1d(4), nn.Linear(4, 2), fails, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.count = self.count + 1
        return self.head(self.norm(x * (float("nan") if self.forwards == self.fails else 1.0)))


def trained(model: nn.Module, data: Dataset[Any], folder: Path, **train: Any) -> nn.Module:
    given = {"steps": 8, "batch": 4, "accumulate": 2, "loss": "classification", "evaluate_every": 0, **train}
    gossamer.train(model, data, {"train": given, "run": {"directory": str(folder)}})
    return model


@pytest.mark.parametrize("policy", ["skip", "retry_skip_stop"])
def test_a_skipped_batch_leaves_no_trace_in_running_statistics(policy: str, tmp_path: Path) -> None:
    model = trained(Normed(), Rows(bad=5), tmp_path, on_nonfinite=policy)
    assert int(model.norm.num_batches_tracked) == int(model.count) == 14, "two micro-batches of seven steps"
    torch.testing.assert_close(model.norm.running_mean, torch.full((4,), 1 - 0.9**14))


def test_a_batch_that_ends_the_run_is_named_and_not_what_it_left(tmp_path: Path) -> None:
    with pytest.raises(StepRejected, match="has values in x that are not finite"):
        trained(Normed(), Rows(bad=None), tmp_path, on_nonfinite="stop")


def test_a_step_made_again_counts_once(tmp_path: Path) -> None:
    plain, again = (trained(Normed(fails), Rows(), tmp_path / str(fails)) for fails in (0, 4))
    assert again.forwards == 18, "the second micro-batch of the second step failed"
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


STAGES = {"mesh": {"pipe": 2}, "cuts": [0, 2]}


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {**STAGES, "savers": ["recompute"]}),
        pytest.param(2, {"sharding": "zero3"}, marks=pytest.mark.nightly),
        pytest.param(2, STAGES, marks=pytest.mark.nightly),
        pytest.param(4, {**STAGES, "mesh": {"pipe": 2, "replica": 2}}, marks=pytest.mark.nightly),
        pytest.param(2, {"sync": {"local_sgd": {"sync_every": 2}}}, marks=pytest.mark.nightly),
    ],
)
def test_on_all_ranks_alike(pool, tmp_path: Path, ranks: int, plan: dict[str, Any]) -> None:
    """Buffers in a checkpoint are finite, and in stages those of one process."""
    train = {"accumulate": 2, "on_nonfinite": "skip", "batch": 8}
    alone, divided = ({"sections": {"train": train, "plan": one}, "kind": "averaging"} for one in ({}, plan))
    for name, count, given in (("alone", 1, alone), ("divided", ranks, divided)):
        pool.run("run.jobs:train", count, folder=str(tmp_path / name), steps=8, bad=9, **given)
    one, two = _saved(tmp_path / "alone"), _saved(tmp_path / "divided")
    assert one.keys() == two.keys() and all(x.isfinite().all() for x in two.values())
    assert int(one["model/layers.0.total"]) == 2 * 2 * 7, "two blocks, two micro-batches, seven of eight steps"
    if ranks == 2 and "mesh" in plan:
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=2e-5)
    lines = (tmp_path / "divided" / "run" / "records.jsonl").read_text().splitlines()
    steps = [one for one in map(json.loads, lines) if one["kind"] == "step"]
    assert "local_sgd" in str(plan) or sum(not one["committed"] for one in steps) == 1


def _saved(folder: Path) -> dict[str, Tensor]:
    found = latest_good(folder / "run" / "checkpoints")[0]
    return {name: found.read(name).double() for name in found.names() if name.startswith("model/")}
